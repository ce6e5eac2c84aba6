"""InfoNCE as a loss of sentence-transformers.

Nothing of that library is imported here: a loss gets its model, calls it with the features of a
column of texts, and takes ``sentence_embedding`` out of what it returns.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed

from lastlayer._checks import check_choice, check_positive
from lastlayer.losses.contrastive import InfoNCELoss as _Loss

_SIMILARITIES = ("cosine", "dot")


class InfoNCELoss(torch.nn.Module):
    """:func:`lastlayer.info_nce` for a ``SentenceTransformer``, in place of its ranking losses.

    With its defaults it is ``MultipleNegativesRankingLoss``, and with ``symmetric=True`` the one
    with the directions query to document and document to query, each with its own softmax. It
    differs in what it needs: similarities of a batch are never held together, so that the batch
    may have as many pairs as the encoder can take; pairs that belong together can be told by a
    label; the scale can be learned; and processes may have batches of different sizes.

    Inputs are (anchor, positive) pairs, or tuples with further columns of negatives, which all
    anchors share.

    Args:
        model: the ``SentenceTransformer``.
        scale: 1 / temperature.
        symmetric: positives look for their anchor too.
        similarity: "cosine" or "dot".
        learn_scale: makes the scale a parameter, ``loss.info_nce.log_scale``.
        max_scale: the most that a learned scale may become.
        group_by_label: labels are groups: pairs with the same integer belong together. Without it
            labels are not looked at.
        same_group: what positives of another pair of the group are: "ignore" leaves them out,
            "positive" makes them positives.
        gather_across_devices: take the positives and negatives of all processes.
        chunk_rows: anchors whose similarities are held at a time, "auto" or "low".

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
        """The loss from the vectors of anchors, positives, and each column of negatives."""
        if len(embeddings) < 2:
            raise ValueError(
                "sentence_features: expected a column of anchors and one of positives, got "
                f"{len(embeddings)}"
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
        # Alone there is nothing to gather; the library's own losses then do not ask either.
        together = distributed.is_available() and distributed.is_initialized()
        self.info_nce.options["gather"] = self.gather_across_devices and together
        further = torch.cat(negatives) if negatives else None
        loss: Tensor = self.info_nce(anchor, positive, further, groups=groups)
        return loss

    @property
    def temperature(self) -> float:
        """1 / scale, as it is now."""
        return self.info_nce.temperature

    def get_config_dict(self) -> dict[str, Any]:
        """What it was made with, for a model card."""
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
