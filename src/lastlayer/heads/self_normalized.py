"""A softmax that is trained to have a normaliser of 1."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Self, Unpack

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer._checks import check_positive, check_real, check_seed
from lastlayer._torch import (
    accumulation_dtype,
    host_sync_allowed,
    in_autocast_dtype,
    in_functorch,
    is_eager,
)
from lastlayer.fused import linear_cross_entropy, linear_statistics
from lastlayer.fused.function import RowScale
from lastlayer.heads.base import all_in_dtype
from lastlayer.heads.linear import LinearHead, LinearOptions
from lastlayer.heads.recipes import Recipe
from lastlayer.heads.rng import RngSteps, count_step
from lastlayer.kernels.rng import words


class Drift(NamedTuple):
    """Statistics of the error of log Z over rows."""

    mean: float
    """Mean error; it could be subtracted from all scores."""
    deviation: float
    """Standard deviation, the remaining error of unnormalised log-probabilities."""
    largest: float
    """Largest absolute error."""


def drift_of(log_z: Tensor) -> Drift:
    """:class:`Drift` of one error per row; all 0 if there are no rows. Needs a host sync."""
    rows = log_z.detach().flatten().double()
    if not rows.numel():
        return Drift(0.0, 0.0, 0.0)
    spread, mean = torch.std_mean(rows, correction=0)
    return Drift(mean.item(), spread.item(), rows.abs().max().item())


@torch.no_grad()
def log_normalizer(head: LinearHead, hidden: Tensor, biases: Tensor | None = None) -> Tensor:
    """The exact log Σ e^s over all classes, ``(*batch)``; ``biases`` replace those of the head."""
    head._check_hidden(hidden)
    anything = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
    biases = head.bias if biases is None else biases
    options: Any = {"temperature": temperature_of(head), "chunk_rows": head.chunk_rows}
    found = linear_statistics(hidden, head.weight, anything, biases, ignore_index=None, **options)
    return found.logsumexp


def temperature_of(head: LinearHead) -> float:
    """The temperature of a head; 1 if it has none."""
    return float(getattr(head, "temperature", 1.0))


@torch.no_grad()
def chosen_scores(head: LinearHead, hidden: Tensor, classes: Tensor) -> Tensor:
    """Scores of chosen classes, in float32, or float64 from float64; no others are computed."""
    rows = in_autocast_dtype(head._check_rows(hidden))
    chosen, shape = head._check_classes(hidden, classes)
    scores: Tensor = kernels.products.scores("auto", rows, *head._score_tensors(rows.dtype), chosen)
    return scores.reshape(shape)


class SelfNormalized(LinearHead):
    r"""A full softmax that is trained to be self-normalised: log Z is close to 0.

    .. math:: L = \log Z - s_y + \lambda \log^2 Z, \qquad Z = \sum_c e^{s_c}

    The last term keeps Z near 1. After training, a score is therefore an approximate
    log-probability, :meth:`unnormalized_log_prob`, at the cost of one class instead of all.
    :meth:`drift` measures the error, which is log Z. ``log_prob``, ``topk``, ``sample`` and the
    loss in eval mode, the cross entropy, are exact.

    With ``fraction`` :math:`\gamma < 1`, only this share of rows is normalised in a step
    (infrequent normalisation):

    .. math:: L = -s_y + \frac{1_S}{\gamma}\,(\log Z + \lambda \log^2 Z)

    where S is a random set of rows, drawn in every step. The expected loss is the one above; the
    gradient is noisier, and a step costs :math:`\gamma` of the full one.

    Choose it for fast scores of single classes after training, if a full softmax is affordable in
    training. :class:`NoiseContrastive` does not need one.

    Cost: three products of :math:`\gamma` × rows × in_features × n_classes per training step.

    Args:
        in_features: size of the hidden state.
        n_classes: number of classes.
        bias: whether each class has a bias.
        z_loss: :math:`\lambda`, the weight of log² Z. Larger values bring log Z closer to 0, but
            reduce the likelihood.
        fraction: :math:`\gamma`, the share of rows to normalise in a step, above 0 and at most 1;
            rounded up to whole rows.
        seed: random seed of the rows to normalise.
        options: ``class_weight`` and the arguments after it, as in :class:`FullSoftmax`.

    Example:
        >>> import torch
        >>> head = SelfNormalized(16, 1000, fraction=0.25)
        >>> hidden, target = torch.randn(8, 16), torch.randint(1000, (8,))
        >>> head(hidden, target).backward()
        >>> head.unnormalized_log_prob(hidden, target).shape
        torch.Size([8])
        >>> head.drift(hidden).mean > 5  # near log 1000: nothing has been learned yet
        True

    Reference:
        Devlin et al., Fast and Robust Neural Network Joint Models for Statistical Machine
        Translation, ACL 2014; Andreas and Klein, When and why are log-linear models
        self-normalizing?, NAACL 2015; Chen, Grangier and Auli, Strategies for Training Large
        Vocabulary Neural Language Models, ACL 2016, arXiv:1512.04906.
    """

    recipes = (Recipe("self_normalized", "softmax whose log Z is near 0", rank=14),)
    rng_counter: Tensor
    # For classes that are sharded over processes: scores of targets, and class weights.
    _target_scores_spread: Callable[..., Tensor] | None = None
    _class_weights_spread: Callable[[Tensor], Tensor] | None = None

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        bias: bool = True,
        *,
        z_loss: float = 0.1,
        fraction: float = 1.0,
        seed: int = 0,
        **options: Unpack[LinearOptions],
    ) -> None:
        self.z_loss = check_positive("z_loss", z_loss)
        expected = "a share of the rows, above 0 and at most 1"
        self.fraction = check_real("fraction", fraction, expected, lambda x: 0.0 < x <= 1.0)
        self.seed = check_seed(seed)
        super().__init__(in_features, n_classes, bias, **options)
        # Seed and step, saved so that a resumed run draws the same rows.
        device = torch.device("cpu") if self.weight.is_meta else self.weight.device
        self.register_buffer("rng_counter", torch.tensor([self.seed, 0], device=device))
        self._steps = RngSteps()

    def _fresh_buffer(self, name: str) -> Tensor | None:
        if name == "rng_counter":
            return torch.tensor([self.seed, 0], device="cpu")
        return super()._fresh_buffer(name)

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        """In training mode the loss above; in eval mode the exact cross entropy."""
        self._check_hidden(hidden)
        if self.training and self.fraction < 1.0:
            return self._infrequent(hidden, self._check_target(hidden, target))
        if self.training and self.class_weight is not None:
            target = self._check_target(hidden, target)
            row_weight = self._row_weight(target, accumulation_dtype(hidden.dtype))
            return self._weighted(hidden, target, self.weight, self.bias, row_weight)
        options = {**self._loss_options(), "z_loss": self.z_loss if self.training else 0.0}
        return linear_cross_entropy(hidden, self.weight, target, self.bias, **options)

    def _weighted(
        self, hidden: Tensor, target: Tensor, weight: Any, bias: Any, row_weight: Tensor
    ) -> Tensor:
        """The loss with row weights: class weights of the fused loss do not apply to log² Z."""
        return linear_cross_entropy(
            hidden, weight, target, bias, row_weight=row_weight, z_loss=self.z_loss,
            ignore_index=self.ignore_index, chunk_rows=self.chunk_rows,
            reduction="none" if self.reduction == "none" else "sum",
            hidden_grad="part" if self._is_spread else "sum",
        )  # fmt: skip

    def _infrequent(self, hidden: Tensor, target: Tensor) -> Tensor:
        rows = in_autocast_dtype(hidden).reshape(-1, self.in_features)
        ids = target.reshape(-1)
        row_weight = self._row_weight(ids, accumulation_dtype(rows.dtype))
        present = torch.where(row_weight == 0, 0, ids)
        chosen = self._chosen(ids)
        times = ids.shape[0] / max(1, chosen.shape[0])
        # The loss of chosen rows contains -s_y too, with its full factor.
        factor = torch.full_like(row_weight, -1.0).index_fill_(0, chosen, times - 1.0)
        factor = factor * row_weight
        # A row with a factor of 0 has no gradient, even if it contains NaN.
        counted = torch.where((factor != 0).unsqueeze(-1), rows, 0.0)
        spread = self._target_scores_spread
        scores = (
            _target_scores(counted, self.weight, self.bias, present, factor)
            if spread is None
            else spread(counted, present, factor)
        )
        weight, bias = self._score_tensors(rows.dtype)
        of_chosen = row_weight[chosen] * times
        losses = self._weighted(rows[chosen], ids[chosen], weight, bias, of_chosen)
        if self.reduction != "none":
            return losses + scores.sum()
        return scores.index_add(0, chosen, losses).reshape(target.shape)

    def _row_weight(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight of each row's loss in the reduced loss."""
        counts = torch.ones_like(ids, dtype=torch.bool)
        if self.ignore_index is not None:
            counts = ids != self.ignore_index
        weight = counts.to(dtype)
        if self.class_weight is not None:
            known, spread = torch.where(counts, ids, 0), self._class_weights_spread
            found = self.class_weight[known] if spread is None else spread(known)
            weight = weight * found.to(dtype)
        n = ids.numel()
        return RowScale.of(weight, self.reduction, n).factors(weight, n)

    def _chosen(self, ids: Tensor) -> Tensor:
        """Evenly spaced rows with a random start, so that all rows are equally probable."""
        n = ids.shape[0]
        size = math.ceil(self.fraction * n)
        rng_counter, counts = self._steps.counter(self.rng_counter)
        word: Tensor = words("auto", rng_counter.clone(), 1)[0, 0]
        if counts:
            count_step(self.rng_counter)
        start = word.double() * 2.0**-32
        places = (torch.arange(size, device=ids.device) + start) * (n / max(1, size))
        return places.long().clamp(max=max(0, n - 1))

    def unnormalized_log_prob(self, hidden: Tensor, classes: Tensor) -> Tensor:
        """The scores of given classes, which are log-probabilities if log Z is 0.

        No other classes are computed, and no gradient is recorded.

        Args:
            hidden: ``(*batch, in_features)``.
            classes: class ids ``(*batch)`` or ``(*batch, k)``; the result has the same shape.
        """
        return chosen_scores(self, hidden, classes)

    def drift(self, hidden: Tensor) -> Drift:
        """Statistics of log Z, which should be 0; needs all scores, and a host sync."""
        return drift_of(log_normalizer(self, hidden))

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear | torch.nn.Embedding, **options: Any) -> Self:
        head = super().from_linear(linear, **options)
        head.rng_counter = head.rng_counter.to(linear.weight.device)
        return head


def _target_scores(
    rows: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, factor: Tensor
) -> Tensor:
    """``factor`` ``(n,)`` times the score of each row's target, in the dtype of ``factor``."""
    if in_functorch():
        scores = (rows.to(factor.dtype) * weight[target].to(factor.dtype)).sum(-1)
        return factor * (scores if bias is None else scores + bias[target].to(factor.dtype))
    made: Tensor = _TargetScores.apply(rows, weight, bias, target, factor)
    return made


class _TargetScores(torch.autograd.Function):
    """:func:`_target_scores`, without a copy of the vectors of all targets."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, factor: Tensor
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, target, factor)
        ctx.bias_like = None if bias is None else (bias.shape, bias.dtype)
        narrow = all_in_dtype(rows.dtype, weight, bias)
        scores: Tensor = kernels.products.scores("auto", rows, *narrow, target.unsqueeze(-1))
        return scores.squeeze(-1) * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, target, factor = ctx.saved_tensors
        slopes, classes = (grad * factor).unsqueeze(-1), target.unsqueeze(-1)
        to_rows, to_weight, to_bias = ctx.needs_input_grad[:3]
        of_rows = of_weight = of_bias = None
        if to_rows:
            vectors = weight.to(rows.dtype)
            of_rows = kernels.products.to_hidden("auto", slopes, classes, vectors)
        if to_weight:
            of_weight = _weight_gradient(slopes, classes, rows, weight)
        if to_bias:
            shape, dtype = ctx.bias_like
            of_bias = slopes.new_zeros(shape).index_add_(0, target, slopes.squeeze(-1)).to(dtype)
        return of_rows, of_weight, of_bias, None, None


def _weight_gradient(slopes: Tensor, classes: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the weight, summed in full precision, since frequent classes add many terms.

    If a host sync is allowed it is row-sparse, and autograd adds it in place to the dense gradient
    of the other loss.
    """
    n_classes, depth = weight.shape
    compact = is_eager(rows) and host_sync_allowed(rows)
    if compact:
        touched, classes = torch.unique(classes, return_inverse=True)
        n_classes = touched.shape[0]
    sums = rows.new_zeros(n_classes, depth, dtype=accumulation_dtype(rows.dtype))
    kernels.products.add_to_weight_("auto", slopes, classes, rows, sums)
    gradient = sums.to(weight.dtype)
    if not compact:
        return gradient
    return torch.sparse_coo_tensor(
        touched.unsqueeze(0), gradient, weight.shape, is_coalesced=True, check_invariants=False
    )
