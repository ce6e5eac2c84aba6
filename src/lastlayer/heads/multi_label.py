"""Any number of labels a row, of very many."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer.heads import _label_options as labels
from lastlayer.heads._checks import check_count, check_hidden
from lastlayer.heads._dense_labels import dense_label_losses, reduced_label_losses
from lastlayer.heads._label_probs import label_log_probs, lists_above
from lastlayer.heads._linear import LinearHead
from lastlayer.heads._rows import row_chunks
from lastlayer.heads._scores import wide_scores
from lastlayer.heads._top import COPIES as TOP_COPIES
from lastlayer.heads._top import top_classes
from lastlayer.heads.base import TopK
from lastlayer.losses._positives import positive_lists
from lastlayer.losses.calibration import ZLPRCalibrator
from lastlayer.maps.sparsemax import sparsemax


class MultiLabel(LinearHead):
    r"""A linear layer for any number of right labels a row, without the matrix of scores.

    .. math:: s = W h + b, \qquad \text{predicted: } \{c : s_c > 0\}

    The losses, from lists of the labels that are on:

    * ``"zlpr"``: :func:`lastlayer.zlpr_loss`, which keeps few positives and very many negatives in
      balance. Choose it first. The probability that it reports is :math:`\sigma(2s)`, which is
      that of *soft* labels; read :func:`lastlayer.zlpr_probability` before you trust it.
    * ``"bce"``: :func:`lastlayer.binary_cross_entropy_loss`; :math:`\sigma(s)` is a probability.
    * ``"asymmetric"``: :func:`lastlayer.asymmetric_loss`; :math:`\sigma(s)` is a ranking only.
    * ``"sparsemax"``: :func:`lastlayer.multilabel_sparsemax_loss`. Its probabilities are one
      distribution over the labels, and the predicted labels are its support, at least one. Rows
      without a label have no loss.

    Labels do not exclude each other: ``log_prob`` is the log-probability that a label is on, and
    does not add up to 1 over the labels (but for sparsemax). So ``sample`` has no meaning here.

    Cost: "zlpr" and "bce" take three to four products of rows × in_features × n_classes a step and
    hold a slab of scores, see :func:`lastlayer.fused.linear_zlpr_loss`. The other two make dense
    scores and labels for a chunk of rows at a time, and again in backward: slower, and the
    gradient of the weight is added up chunk by chunk in its own dtype.

    Args:
        in_features: how many numbers a hidden state has.
        n_classes: how many labels there are.
        loss: "zlpr", "bce", "asymmetric" or "sparsemax".
        bias: whether each label has a bias.
        smoothing: how far labels that are not listed are on, from 0 to below 1/2; listed ones are
            on by as much less than 1.
        loss_options: what the asymmetric loss takes by name beside scores and labels.
        calibrator: fitted on scores of held-out data, it gives the probabilities and the thresholds
            of the labels; not with "sparsemax". It is a part of the head, saved with it, and can
            be set at any time.
        ignore_index: the id that pads lists.
        reduction: "mean" over rows, "sum" or "none".
        chunk_rows: rows of scores held at a time where all labels of a row are, "auto" or "low".
        device: where the parameters are made.
        dtype: of the parameters.

    Example:
        >>> import torch
        >>> linear = torch.nn.Linear(1, 4, bias=False)
        >>> _ = linear.weight.data.copy_(torch.tensor([[2.0], [-1.0], [0.5], [-3.0]]))
        >>> head = MultiLabel.from_linear(linear)
        >>> head.predict(torch.tensor([[1.0], [-1.0], [0.0]]))
        tensor([[   0,    2],
                [   1,    3],
                [-100, -100]])
    """

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        loss: str = "zlpr",
        bias: bool = True,
        *,
        smoothing: float = 0.0,
        loss_options: Mapping[str, float] | None = None,
        calibrator: ZLPRCalibrator | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        chunk_rows: int | str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        labels.check_options(loss, loss_options, smoothing, calibrator, n_classes, ignore_index)
        super().__init__(
            in_features, n_classes, bias, ignore_index=ignore_index, reduction=reduction,
            chunk_rows=chunk_rows, device=device, dtype=dtype,
        )  # fmt: skip
        self.loss, self.smoothing = loss, smoothing
        self.loss_options = dict(loss_options or {})
        self.calibrator = calibrator

    def forward(
        self,
        hidden: Tensor,
        positives: Tensor,
        offsets: Tensor | None = None,
        *,
        values: Tensor | None = None,
    ) -> Tensor:
        """The training loss in float32, or in float64 from float64.

        Args:
            hidden: ``(*batch, in_features)``.
            positives: the labels of each row that are on, int64: ``(*batch, m)``, padded with
                ``ignore_index``; or ``(k,)`` with offsets. Duplicates count once.
            offsets: ``(rows + 1,)`` int64: row i lists ``positives[offsets[i] : offsets[i + 1]]``.
            values: how far each listed label is on, in [0, 1]; no gradient flows to it.
        """
        check_hidden(self, hidden)
        lists = {"offsets": offsets, "values": values, "ignore_index": self.ignore_index}
        if self.loss in labels.FUSED:
            slabs = self.chunk_rows if isinstance(self.chunk_rows, str) else "auto"
            return labels.FUSED[self.loss](
                hidden, self.weight, positives, self.bias, **lists, smoothing=self.smoothing,
                reduction=self.reduction, chunk_classes=slabs,
            )  # fmt: skip
        return self._dense_loss(hidden, positives, lists)

    def _dense_loss(self, hidden: Tensor, positives: Tensor, options: dict[str, Any]) -> Tensor:
        batch = hidden.shape[:-1]
        lists = positive_lists(
            positives, n_rows=batch.numel(), n_classes=self.n_classes, smoothing=self.smoothing,
            batch=tuple(batch), **options,
        )  # fmt: skip
        row_loss = partial(labels.DENSE[self.loss], reduction="none", **self.loss_options)
        made_of = rows, _, _ = self._operands(hidden)
        chunks = self._chunks(rows)
        losses = dense_label_losses(row_loss, *made_of, lists, self.smoothing, chunks)
        if self.reduction == "none":
            return losses.reshape(batch)
        # Without labels there is no distribution over them, and so no loss.
        only_with_labels = self.loss == "sparsemax" and not self.smoothing
        return reduced_label_losses(losses, lists, self.reduction, only_with_labels)

    @torch.no_grad()
    def predict(self, hidden: Tensor, *, threshold: float | Tensor | None = None) -> Tensor:
        """The labels of each row that are on, ascending, in the form that the loss takes them.

        A label is on where its score is above the threshold; with the loss "sparsemax" where its
        probability is. A row without a label is all padding. Memory is that of a chunk of scores
        and of the result; the host waits for the length of the longest list.

        Args:
            hidden: ``(*batch, in_features)``.
            threshold: one number, or one a label, ``(n_classes,)``; where it is None that of the
                calibrator, or 0 without one.

        Returns:
            Class ids, int64 ``(*batch, m)``, padded with ``ignore_index``.
        """
        check_hidden(self, hidden)
        least = labels.checked_threshold(threshold, self.calibrator, self.n_classes, hidden.device)
        rows, weight, bias = self._operands(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            chunks = (wide_scores(rows[part], weight, bias) for part in self._chunks(rows))
            told = map(sparsemax, chunks) if self.loss == "sparsemax" else chunks
            lists = lists_above(
                told, least, -100 if self.ignore_index is None else self.ignore_index
            )
        return lists.reshape(*hidden.shape[:-1], lists.shape[-1])

    def probability(self, hidden: Tensor, classes: Tensor | None = None) -> Tensor:
        """The probability that a label is on: ``exp(log_prob)``, with what the class says of it.

        Args:
            hidden: ``(*batch, in_features)``.
            classes: class ids, int64: ``(*batch, k)``, or ``(k,)`` for every row; None for all.

        Returns:
            ``(*batch, n_classes)``, or ``(*batch, k)``, float32, or float64 from float64.
        """
        return self.log_prob(hidden, classes).exp()

    @torch.no_grad()
    def topk(self, hidden: Tensor, k: int) -> TopK:
        """The k labels of the highest scores, the highest first, with their log-probabilities.

        Labels are ordered by their scores, which differ also where probabilities are too close to
        1 to do so; of equal scores the lower id comes first. No gradient is recorded.

        Args:
            hidden: ``(*batch, in_features)``.
            k: from 1 to ``n_classes``.
        """
        check_hidden(self, hidden)
        check_count("k", k, most=self.n_classes)
        rows, weight, bias = self._operands(hidden)
        best = []
        with torch.autocast(hidden.device.type, enabled=False):
            for part in row_chunks(rows, self.n_classes, self.chunk_rows, TOP_COPIES):
                scores = wide_scores(rows[part], weight, bias)
                top, classes = top_classes(scores, k)
                if self.loss == "sparsemax":
                    best.append((self._log_probs(scores).gather(-1, classes), classes))
                else:
                    best.append((self._log_probs(top, classes), classes))
        values, classes = (torch.cat(each) for each in zip(*best, strict=True))
        shape = *hidden.shape[:-1], k
        return TopK(values.reshape(shape), classes.reshape(shape))

    def sample(
        self, hidden: Tensor, n_samples: int = 1, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Not here: a row has any number of labels. Draw with ``torch.bernoulli(probability)``."""
        raise NotImplementedError(
            "sample: the labels of a row do not exclude each other, so none is drawn from them; "
            "torch.bernoulli(head.probability(hidden)) draws each label for itself"
        )

    def _log_probs(self, scores: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Of all labels, or of the chosen ones of each row, where these stand for themselves."""
        return label_log_probs(scores, self.loss, self.calibrator, chosen)

    def _filled_in_chunks(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None, chosen: Tensor | None
    ) -> Tensor:
        if chosen is None or self.loss == "sparsemax":
            return super()._filled_in_chunks(rows, weight, bias, chosen)
        # A label stands for itself: the others are not looked at.
        scores = kernels.products.scores("auto", rows, weight, bias, chosen)
        return self._log_probs(scores, chosen)

    def config(self) -> dict[str, Any]:
        shared, given = super().config(), self.calibrator
        del shared["class_weight"]
        return {
            **shared,
            "loss": self.loss,
            "smoothing": self.smoothing,
            "loss_options": self.loss_options or None,
            # What was fitted is part of the state.
            "calibrator": None if given is None else labels.calibrator_config(given),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        made_of = config["calibrator"]
        return cls(**config | {"calibrator": made_of and ZLPRCalibrator(**made_of)})
