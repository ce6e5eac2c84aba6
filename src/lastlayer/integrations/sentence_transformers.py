"""InfoNCE as a loss of sentence-transformers.

This module does not import that library: a loss gets the model, calls it with the features of a
column of texts, and reads ``sentence_embedding`` from the result.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed

from lastlayer._checks import check_choice, check_positive
from lastlayer.losses.contrastive import InfoNCELoss as _Loss

_SIMILARITIES = ("cosine", "dot")


class InfoNCELoss(torch.nn.Module):
    """:func:`lastlayer.info_nce` for a ``SentenceTransformer``, instead of its ranking losses.

    With its defaults it equals ``MultipleNegativesRankingLoss``; with ``symmetric=True`` the
    variant with both directions, query to document and document to query, each with its own
    softmax. The similarity matrix of a batch is never stored, so the batch size is limited only by
    the encoder. In addition, labels can mark pairs that belong together, the scale can be learned,
    and processes may have batches of different sizes.

    Inputs are (anchor, positive) pairs, or tuples with more columns of negatives, which are shared
    by all anchors.

    Args:
        model: the ``SentenceTransformer``.
        scale: 1 / temperature.
        symmetric: also classify the anchor of each positive.
        similarity: "cosine" or "dot".
        learn_scale: makes the scale a parameter, ``loss.info_nce.log_scale``.
        max_scale: upper bound of a learned scale.
        group_by_label: labels are groups: pairs with the same integer belong together. If False,
            labels are ignored.
        same_group: how to treat the positives of other pairs of the group: "ignore" masks them
            out, "positive" counts them as positives.
        gather_across_devices: use the positives and negatives of all processes.
        chunk_rows: number of anchors per chunk, "auto" or "low".

    Example:
        .. code-block:: python

            from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
            from lastlayer.integrations.sentence_transformers import InfoNCELoss

            model = SentenceTransformer("microsoft/mpnet-base")
            loss = InfoNCELoss(model, symmetric=True)
            SentenceTransformerTrainer(model=model, train_dataset=pairs, loss=loss).train()
    """

    def __init__(
        self,
        model: torch.nn.Module,
        scale: float = 20.0,
        *,
        symmetric: bool = False,
        similarity: str = "cosine",
        learn_scale: bool = False,
        max_scale: float | None = 100.0,
        group_by_label: bool = False,
        same_group: str = "ignore",
        gather_across_devices: bool = False,
        chunk_rows: int | str = "auto",
    ) -> None:
        super().__init__()
        scale = check_positive("scale", scale)
        check_choice("similarity", similarity, _SIMILARITIES)
        self.model, self.scale, self.similarity = model, scale, similarity
        self.group_by_label, self.gather_across_devices = group_by_label, gather_across_devices
        self.info_nce = _Loss(
            1.0 / scale,
            learn_temperature=learn_scale,
            max_scale=max_scale,
            symmetric=symmetric,
            same_group=same_group,
            normalize=similarity == "cosine",
            chunk_rows=chunk_rows,
        )

    def forward(
        self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None
    ) -> Tensor:
        """The loss of a batch: one dictionary of features per column of texts."""
        embeddings = [self.model(column)["sentence_embedding"] for column in sentence_features]
        return self.compute_loss_from_embeddings(embeddings, labels)

    def compute_loss_from_embeddings(
        self, embeddings: list[Tensor], labels: Tensor | None = None
    ) -> Tensor:
        """The loss from the embeddings of anchors, positives, and each column of negatives."""
        if len(embeddings) < 2:
            raise ValueError(
                "sentence_features: expected a column of anchors and one of positives, got "
                f"{len(embeddings)} columns"
            )
        anchor, positive, *negatives = embeddings
        groups = None
        if self.group_by_label:
            if labels is None:
                raise ValueError(
                    "labels: expected the group of each pair, got None; the dataset needs a "
                    "column 'label', or group_by_label=False"
                )
            groups = labels.view(-1)
        # Without a process group there is nothing to gather, and the library's losses need none.
        together = distributed.is_available() and distributed.is_initialized()
        self.info_nce.options["gather"] = self.gather_across_devices and together
        further = torch.cat(negatives) if negatives else None
        loss: Tensor = self.info_nce(anchor, positive, further, groups=groups)
        return loss

    @property
    def temperature(self) -> float:
        """The current temperature, 1 / scale."""
        return self.info_nce.temperature

    def get_config_dict(self) -> dict[str, Any]:
        """The arguments of the constructor, for a model card."""
        options = self.info_nce.options
        return {
            "scale": self.scale,
            "symmetric": options["symmetric"],
            "similarity": self.similarity,
            "learn_scale": self.info_nce.learn_temperature,
            "max_scale": self.info_nce.max_scale,
            "group_by_label": self.group_by_label,
            "same_group": options["same_group"],
            "gather_across_devices": self.gather_across_devices,
            "chunk_rows": options["chunk_rows"],
        }

    @property
    def citation(self) -> str:
        """BibTeX of the paper, for a model card."""
        return """
@misc{oord2018representation,
    title={Representation Learning with Contrastive Predictive Coding},
    author={Aaron van den Oord and Yazhe Li and Oriol Vinyals},
    year={2018},
    eprint={1807.03748},
    archivePrefix={arXiv},
    primaryClass={cs.LG}
}
"""
