"""Multi-label classification with very many labels."""

import inspect
import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lastlayer import kernels
from lastlayer._checks import (
    as_counts,
    check_choice,
    check_chunk,
    check_int,
    check_real,
    check_reduction,
)
from lastlayer._labels import check_label_smoothing
from lastlayer._torch import accumulation_dtype, in_autocast_dtype, is_exporting, without_autocast
from lastlayer.fused.label_lists import check_lists, sorted_lists
from lastlayer.fused.labels import asymmetric_label_loss, linear_bce_loss, linear_zlpr_loss
from lastlayer.fused.prediction import (
    TOP_COPIES,
    best_classes,
    entmax_log_probs,
    is_predictable,
    top_classes,
    write_entmax_log_probs,
    write_log_probs,
)
from lastlayer.fused.recompute import in_chunks, weighted_sum_in_chunks
from lastlayer.fused.scores import row_chunks, wide_scores
from lastlayer.heads.base import count_for_zero, deformed_log
from lastlayer.heads.linear import LinearHead
from lastlayer.heads.recipes import Recipe
from lastlayer.losses.calibration import ZLPRCalibrator
from lastlayer.losses.multilabel import asymmetric_loss, multilabel_sparsemax_loss
from lastlayer.maps.sparsemax import sparsemax

# Losses of hidden states; losses of scores and dense labels.
_FUSED: dict[str, Callable[..., Tensor]] = {"zlpr": linear_zlpr_loss, "bce": linear_bce_loss}
_DENSE: dict[str, Callable[..., Tensor]] = {
    "asymmetric": asymmetric_loss,
    "sparsemax": multilabel_sparsemax_loss,
}
# The options of the asymmetric loss, in order.
_ASYMMETRIC: dict[str, float] = {
    name: parameter.default
    for name, parameter in inspect.signature(asymmetric_loss).parameters.items()
    if name in ("gamma_negative", "gamma_positive", "margin", "focus_gradient")
}
# Name and description of each loss in the lab.
_RECIPES = {
    "zlpr": ("zlpr", "zero-bounded log-sum-exp and pairwise ranking"),
    "bce": ("bce", "one logistic choice per label"),
    "asymmetric": ("asymmetric", "logistic choices with fewer easy negatives"),
    "sparsemax": ("sparsemax_labels", "one sparse distribution over the labels"),
}


class MultiLabel(LinearHead):
    r"""Multi-label classification with a linear layer, without storing the full score matrix.

    .. math:: s = W h + b, \qquad \text{predicted: } \{c : s_c > 0\}

    Targets are lists of positive labels. The losses are:

    * ``"zlpr"``: :func:`lastlayer.zlpr_loss`, which balances few positive and very many negative
      labels. Try it first. It reports the probability :math:`\sigma(2s)`, which is right for *soft*
      labels only; read :func:`lastlayer.zlpr_probability` before you rely on it.
    * ``"bce"``: the binary cross entropy; :math:`\sigma(s)` is a probability.
    * ``"asymmetric"``: :func:`lastlayer.asymmetric_loss`; :math:`\sigma(s)` is only a ranking.
    * ``"sparsemax"``: :func:`lastlayer.multilabel_sparsemax_loss`. Probabilities are one
      distribution over all labels, and its support is predicted, which is at least one label. Rows
      without labels have loss 0.

    ``log_prob`` is the log-probability of each label. Except for sparsemax, labels are not
    exclusive, so probabilities do not sum to 1, and there is no ``sample``. ``topk`` returns the
    labels with the highest scores, with their log-probabilities.

    Cost: "zlpr" and "bce" take three to four products of rows × in_features × n_classes per step,
    with a block of scores in memory, see :func:`lastlayer.fused.linear_zlpr_loss`; so does
    "asymmetric", unless labels are smoothed or ``chunk_rows`` is a number. Otherwise dense scores
    and labels are computed chunk by chunk, and again in backward, which is slower.

    Args:
        in_features: size of the hidden state.
        n_classes: number of labels.
        loss: "zlpr", "bce", "asymmetric" or "sparsemax".
        bias: whether each label has a bias.
        label_smoothing: target ε of negative labels, from 0 to below 1/2; positive labels have the
            target 1 - ε.
        loss_options: options of :func:`lastlayer.asymmetric_loss` by name; for that loss only.
        calibrator: a calibrator fitted on scores of held-out data, which determines probabilities
            and thresholds; not with "sparsemax". It is a submodule, is saved with the head, and can
            be set at any time.
        ignore_index: the id that pads lists.
        reduction: "mean" over rows, "sum" or "none".
        chunk_rows: rows of scores held at a time, "auto" or "low", if all labels of a row are
            needed: in prediction, and in training with "asymmetric" and "sparsemax".
        chunk_classes: labels whose scores are held at a time, "auto" or "low", in training with
            "zlpr" and "bce".
        device, dtype: of the parameters.

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

    recipes = tuple(
        Recipe(name, about, task="multilabel", fixed={"loss": loss}, compared=(name,), rank=rank)
        for rank, (loss, (name, about)) in enumerate(_RECIPES.items(), 40)
    )
    _loss_names = "label_smoothing", "ignore_index", "reduction", "chunk_classes"
    ignore_index: int

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        loss: str = "zlpr",
        bias: bool = True,
        *,
        label_smoothing: float = 0.0,
        loss_options: Mapping[str, float] | None = None,
        calibrator: ZLPRCalibrator | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        chunk_rows: int | str = "auto",
        chunk_classes: int | str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_choice("loss", loss, tuple(_RECIPES))
        if loss_options:
            if loss != "asymmetric":
                raise ValueError(
                    f"loss_options: expected none for loss={loss!r}, got {dict(loss_options)}; "
                    "only 'asymmetric' has any"
                )
            # The loss function checks its options.
            _DENSE[loss](torch.zeros(1), torch.zeros(1), **loss_options)
        _check_calibrator(calibrator, loss, n_classes)
        if ignore_index is None:
            raise TypeError("ignore_index: expected an int, the id that pads lists, got None")
        check_chunk(chunk_classes, "chunk_classes")
        if loss in _DENSE and chunk_classes != "auto":
            raise ValueError(
                f"chunk_classes: expected 'auto' for loss={loss!r}, which needs all labels of a "
                f"row at once, got {chunk_classes!r}; chunk_rows= bounds its memory"
            )
        super().__init__(
            in_features, n_classes, bias, ignore_index=ignore_index, reduction=reduction,
            chunk_rows=chunk_rows, device=device, dtype=dtype,
        )  # fmt: skip
        self.loss, self.label_smoothing = loss, check_label_smoothing(label_smoothing)
        self.loss_options, self.chunk_classes = dict(loss_options or {}), chunk_classes
        self.calibrator = calibrator

    @torch.no_grad()
    def init_bias_from_counts(self, counts: Any, n_rows: int | None = None) -> None:
        """Initialises the biases from label frequencies, which speeds up the start of training.

        At hidden state 0 the probability of each label is then the share of rows with this label:
        its bias is the log-odds of this share, or half of them for "zlpr". With "sparsemax" the
        distribution is then the share of each label among all labels.

        Args:
            counts: number of rows with each label, ``(n_classes,)``; 0 is treated as 0.5, or as
                half of the smallest count above 0 if that is less.
            n_rows: total number of rows, 1 for counts that are shares; not needed for "sparsemax".
        """
        given = torch.from_numpy(as_counts(counts, self.n_classes))
        if n_rows is None and self.loss != "sparsemax":
            raise ValueError(
                "n_rows: expected the number of rows in which labels were counted, got None; pass "
                "n_rows=len(dataset)"
            )
        if n_rows is not None and float(given.max()) > check_int("n_rows", n_rows):
            raise ValueError(
                f"counts: expected at most n_rows={n_rows} for each label, got {given.max():g}"
            )
        super().init_bias_from_counts(counts)
        if self.loss == "sparsemax" and self.bias is not None:
            self.bias.copy_(deformed_log(self._scores_from_counts(counts), 2.0))
        if n_rows is not None and self.loss != "sparsemax" and self.bias is not None:
            least = count_for_zero(given)
            log_odds = (given.clamp(least, n_rows - least) / n_rows).logit()
            self.bias.copy_(log_odds / 2 if self.loss == "zlpr" else log_odds)

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
            positives: the positive labels, class ids of any integer dtype: ``(*batch, m)``,
                padded with ``ignore_index``; or ``(k,)`` with offsets. Duplicates count once.
            offsets: integers ``(rows + 1,)``: row i has ``positives[offsets[i]:offsets[i + 1]]``.
            values: targets of the listed labels in [0, 1], for soft labels; they get no gradient.
        """
        self._check_hidden(hidden)
        if self.class_weight is not None:
            raise TypeError(
                "class_weight: expected none, since MultiLabel has no such option, got a tensor; "
                "set it to None"
            )
        if self.loss in _FUSED:
            options = {**self._loss_options(), "offsets": offsets, "values": values}
            return _FUSED[self.loss](hidden, self.weight, positives, self.bias, **options)
        if not self._needs_dense_labels:
            numbers = tuple(float(each) for each in (_ASYMMETRIC | self.loss_options).values())
            return asymmetric_label_loss(
                hidden, self.weight, positives, self.bias, numbers, offsets=offsets, values=values,
                ignore_index=self.ignore_index, reduction=self.reduction,
                chunk_classes=self.chunk_rows, hidden_grad="part" if self._is_spread else "sum",
            )  # fmt: skip
        return self._dense_loss(hidden, positives, offsets, values)

    @property
    def _needs_dense_labels(self) -> bool:
        """Whether the loss is computed from dense scores and labels, in chunks of rows."""
        if self.loss == "asymmetric":
            return bool(self.label_smoothing) or not isinstance(self.chunk_rows, str)
        return self.loss == "sparsemax"

    def _losses_of(self, scores: Tensor, labels: Tensor) -> Tensor:
        """The loss of each row from dense scores and labels."""
        made: Tensor = _DENSE[self.loss](scores, labels, reduction="none", **self.loss_options)
        return made

    def _dense_loss(self, hidden: Tensor, positives: Any, offsets: Any, values: Any) -> Tensor:
        """The loss from dense scores and labels of one chunk of rows at a time."""
        check_reduction(self.reduction)
        n, smoothing = hidden.shape[:-1].numel(), self.label_smoothing
        given = check_lists(
            hidden, self.n_classes, positives, offsets, values, self.ignore_index, smoothing
        )
        lists = sorted_lists(*given, n, self.n_classes, self.ignore_index, smoothing)

        def losses_of(some: Tensor, ids: Tensor, *tensors: Any) -> Tensor:
            scores = wide_scores(some, *tensors)
            return self._losses_of(scores, lists.dense(ids[:1], scores, smoothing))

        rows = in_autocast_dtype(hidden.reshape(n, self.in_features))
        with without_autocast(hidden):
            ids, tensors = torch.arange(n, device=rows.device), self._score_tensors(rows.dtype)
            chunks = list(row_chunks(rows, self.n_classes, self.chunk_rows, self._copies))
            if self.reduction == "none":
                losses = in_chunks(losses_of, rows, [ids], tensors, chunks)
                return losses.reshape(hidden.shape[:-1])
            dtype = accumulation_dtype(rows.dtype)
            share = torch.ones((), dtype=dtype, device=rows.device)
            if self.reduction == "mean":
                share = share / max(1, n)
                if self.loss == "sparsemax" and not smoothing:
                    # Rows without labels have no target distribution, and loss 0.
                    counted = lists.sum(lists.positive(dtype)) > 0
                    share = share.new_ones(()) / counted.sum().clamp(min=1)
            return weighted_sum_in_chunks(losses_of, rows, [ids], tensors, chunks, share.expand(n))

    @torch.no_grad()
    def predict(self, hidden: Tensor, *, threshold: float | Tensor | None = None) -> Tensor:
        """Predicts the labels of each row, as padded lists in ascending order, as for the loss.

        Labels with a score above the threshold are predicted; with the loss "sparsemax" those with
        a probability above it. Memory: one chunk of scores, and the result. There is one host sync,
        for the length of the longest list.

        Args:
            hidden: ``(*batch, in_features)``.
            threshold: one number, or one per label, ``(n_classes,)``; None for that of the
                calibrator, or 0 without one.

        Returns:
            Class ids, int64 ``(*batch, m)``, padded with ``ignore_index``.
        """
        rows = in_autocast_dtype(self._check_rows(hidden))
        least = self._check_threshold(threshold, hidden.device)
        found, n_rows = [], rows.shape[0]
        with without_autocast(hidden):
            for first, scores in self._scores_in_chunks(rows, self._copies):
                told = sparsemax(scores) if self.loss == "sparsemax" else scores
                row, label = (told > least).nonzero(as_tuple=True)
                found.append((row + first, label))
        row, label = map(torch.cat, zip(*found, strict=True))
        counts = torch.bincount(row, minlength=n_rows)
        longest = int(counts.max()) if n_rows else 0
        place = torch.arange(row.shape[0], device=row.device) - (counts.cumsum(0) - counts)[row]
        lists = label.new_full((n_rows, longest), self.ignore_index)
        lists[row, place] = label
        return lists.reshape(*hidden.shape[:-1], longest)

    def probability(self, hidden: Tensor, classes: Tensor | None = None) -> Tensor:
        """The probability of each label, ``exp(log_prob)``; see the docstring of the class."""
        return self.log_prob(hidden, classes).exp()

    def _rows_topk(self, rows: Tensor, k: int) -> tuple[Tensor, ...]:
        """Ranks by scores, since probabilities close to 1 may be equal after rounding."""
        best, some = [], in_autocast_dtype(rows)
        with without_autocast(rows):
            if self.loss != "sparsemax" and is_predictable(some, k):
                layer = self._layer(*self._score_tensors(some.dtype))
                top, classes = best_classes(some, layer, k, normalised=False)
                return self._log_probs(top, classes), classes
            for _, scores in self._scores_in_chunks(some, TOP_COPIES):
                top, classes = top_classes(scores, k)
                if self.loss == "sparsemax":
                    best.append((self._log_probs(scores).gather(-1, classes), classes))
                else:
                    best.append((self._log_probs(top, classes), classes))
        return tuple(map(torch.cat, zip(*best, strict=True)))

    def sample(
        self, hidden: Tensor, n_samples: int = 1, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Not available, since labels are not exclusive: use ``torch.bernoulli(probability)``."""
        raise NotImplementedError(
            "sample: expected a head with one class per row, got MultiLabel; use "
            "torch.bernoulli(head.probability(hidden)) to draw each label independently"
        )

    def _log_probs(self, scores: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Log-probabilities from scores of all labels, or, unless sparsemax, of chosen ones."""
        if self.loss == "sparsemax":
            return entmax_log_probs(scores, 2.0)
        if self.calibrator is None:
            return logsigmoid(2.0 * scores if self.loss == "zlpr" else scores)
        slope, bias = (
            each if chosen is None or each.shape[0] == 1 else each[chosen]
            for each in (self.calibrator.slope.to(scores), self.calibrator.bias.to(scores))
        )
        # With a slope of 0, infinite scores have no effect; 0 · inf would be NaN.
        return logsigmoid(torch.where(slope == 0, 0.0, slope * scores) + bias)

    def _rows_log_prob(self, rows: Tensor, chosen: Tensor | None, *tensors: Any) -> Tensor:
        # Labels are independent, so only the chosen ones are computed. The kernel has no gradient.
        listed = chosen is not None and self.loss != "sparsemax"
        if not listed or torch.is_grad_enabled() or is_exporting():
            return super()._rows_log_prob(rows, chosen, *tensors)
        scores = kernels.products.scores("auto", rows, *tensors, chosen)
        return self._log_probs(scores, chosen)

    def _goes_by_itself(self, rows: Tensor, chosen: Tensor) -> bool:  # noqa: ARG002
        return self.loss != "sparsemax" and not torch.is_grad_enabled()

    def _write_log_probs(self, out: Tensor, rows: Tensor, *tensors: Any) -> None:
        if self.loss == "sparsemax":
            write_entmax_log_probs(out, rows, 2.0, self._layer(*tensors))
        elif self.calibrator is None:
            layer = self._layer(*tensors)
            if self.loss == "zlpr":
                layer = layer._replace(temperature=0.5)
            write_log_probs(out, rows, layer, exclusive=False)
        else:
            super()._write_log_probs(out, rows, *tensors)

    def _check_threshold(self, threshold: Any, device: torch.device) -> float | Tensor:
        """A number, or one per label, on the device; by default the calibrator's, or 0."""
        if threshold is None:
            threshold = 0.0 if self.calibrator is None else self.calibrator.threshold
        if not isinstance(threshold, Tensor):
            return check_real("threshold", threshold, "a number", lambda x: not math.isnan(x))
        if threshold.shape not in ((1,), (self.n_classes,)):
            raise ValueError(
                f"threshold: expected a number, or one per label, ({self.n_classes},), got "
                f"{tuple(threshold.shape)}"
            )
        return threshold.to(device)

    def config(self) -> dict[str, Any]:
        options, calibrator = dict(self.loss_options) or None, deepcopy(self.calibrator)
        return {**super().config(), "loss_options": options, "calibrator": calibrator}

    def _saved_config(self, config: dict[str, Any]) -> dict[str, Any]:
        made = config["calibrator"]
        # The fitted parameters are part of the state.
        options = made and {
            "n_classes": made.n_classes,
            "threshold": made.threshold_kind,
            "strength": made.strength,
        }
        return super()._saved_config(config | {"calibrator": options})

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        made = config.get("calibrator")
        calibrator = ZLPRCalibrator(**made) if isinstance(made, dict) else made
        return super().from_config(config | {"calibrator": calibrator})


def _check_calibrator(calibrator: Any, loss: str, n_classes: int) -> None:
    if calibrator is None:
        return
    if not isinstance(calibrator, ZLPRCalibrator):
        raise TypeError(f"calibrator: expected a ZLPRCalibrator, got {type(calibrator).__name__}")
    if loss == "sparsemax":
        raise ValueError(
            "calibrator: expected none for loss='sparsemax', a distribution over labels, got one"
        )
    if calibrator.n_classes not in (None, n_classes):
        raise ValueError(
            f"calibrator: expected one for {n_classes} labels, or for any number, got one for "
            f"{calibrator.n_classes}"
        )
