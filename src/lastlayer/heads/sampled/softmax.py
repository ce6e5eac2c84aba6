"""Sampled softmax: a softmax over the target and a few sampled classes."""

import math
from numbers import Integral
from typing import Any, Unpack

import torch
from torch import Tensor

from lastlayer._checks import check_choice, check_positive
from lastlayer._torch import accumulation_dtype, is_exporting
from lastlayer.fused.sampled import Correction, Rule
from lastlayer.heads.recipes import sampled_recipe
from lastlayer.heads.sampled.base import SampledHead, SampledOptions, as_class_ids, check_sampler
from lastlayer.samplers import Sampler

CORRECTIONS = ("exact", "classic", "none")
_EXACT, _NONE = Correction(Rule(average=True), targets=2), Correction(Rule(), corrects=False)


class SampledSoftmax(SampledHead):
    r"""Sampled softmax: trained over the target and ``n_samples`` classes shared by all rows.

    .. math:: L = \log\Bigl(e^{\theta_y} + \sum_{d \ne y} e^{\theta_d - \log w_d}\Bigr) - \theta_y,
              \qquad w_d = \frac{m\,q(d)}{1 - q(y)}, \qquad \theta = (W h + b) / T

    A sample stands for all classes that were not sampled, so its score is corrected by its expected
    count. The target is always included: it is not corrected, it is excluded from the proposal, and
    samples of it are dropped; m is the number of the others. The sum is then an unbiased estimate
    of the full one, and the gradient's bias falls as 1/m.

    Choose it to train with 100,000 classes or more, with ``samplers.Unigram(counts)`` and a few
    thousand samples. In eval mode the loss is the exact cross entropy; ``log_prob``, ``topk`` and
    ``sample`` are always exact.

    Cost: three products of rows × in_features × n_samples per training step, for any number of
    classes. Dense gradients fill a tensor of the weight's size. With ``sparse=True`` gradients have
    only the classes that were sampled or are a target, for :class:`lastlayer.optim.RowAdagrad`,
    :class:`lastlayer.optim.RowAdam` or torch's sparse optimizers. On a CPU they are coalesced. On a
    GPU they have one entry per sample and per target: the first entry of a class has its gradient
    and the others 0, so that no host sync is needed to count the classes.

    Args:
        in_features: size of the hidden state.
        n_classes: number of classes.
        sampler: distribution to sample from, such as ``samplers.Unigram(counts)``. With
            ``head_classes`` it may also cover only the remaining classes.
        n_samples: number of classes sampled per step.
        correction: "exact" as above. "classic", as in TensorFlow, also corrects the target's score
            by :math:`-\log m q(y)`. "none" corrects nothing, and learns a different model.
        head_classes: number of first classes that are always included, or a list of class ids.
            They are exact, and samples of them are dropped; a few hundred of the most frequent
            classes improve the estimate at the same cost.
        unique: sample without replacement; each class is corrected by its inclusion probability.
        temperature: T, divides the scores, in training and in prediction.
        bias: whether each class has a bias. A bias of -inf masks the class.
        sparse: whether gradients of weight and bias are row-sparse.
        seed: random seed of the samples.
        per_rank: whether the processes of ``torch.distributed`` draw different samples. By default
            they draw the same.
        ignore_index: rows with this target are ignored; None to ignore no rows.
        reduction: "mean" over the rows that are not ignored, "sum" or "none".
        chunk_rows: rows of scores held at a time, "auto" or "low".
        device: device of the parameters.
        dtype: dtype of the parameters.

    Example:
        >>> import torch
        >>> from lastlayer import samplers
        >>> counts = 1.0 / torch.arange(1, 10_001)
        >>> head = SampledSoftmax(16, 10_000, samplers.Unigram(counts), 64, sparse=True)
        >>> hidden, target = torch.randn(8, 16), torch.randint(10_000, (8,))
        >>> head(hidden, target).backward()
        >>> head.weight.grad.is_sparse
        True
        >>> exact = head.eval()(hidden, target)

    Reference:
        Yoshua Bengio and Jean-Sébastien Senécal, Quick training of probabilistic neural nets by
        importance sampling, AISTATS 2003; Khrylchenko et al., Correcting the LogQ correction:
        revisiting sampled softmax for large-scale retrieval, 2025, arXiv:2507.09331.
    """

    recipes = (
        sampled_recipe(
            "sampled", "softmax against drawn classes", compared=("sampled",), rank=30
        ),
    )  # fmt: skip
    head_ids: Tensor
    """Classes that are always included, ascending."""
    tail_ids: Tensor | None
    """The other classes, if the sampler covers only them and they are not simply the last ids."""

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        sampler: Sampler | None = None,
        n_samples: int = 1024,
        *,
        correction: str = "exact",
        head_classes: int | list[int] | Tensor = 0,
        unique: bool = False,
        temperature: float = 1.0,
        **options: Unpack[SampledOptions],
    ) -> None:
        check_choice("correction", correction, CORRECTIONS)
        self.correction, self.unique = correction, unique
        self.temperature = check_positive("temperature", temperature)
        self.head_classes: Any = head_classes
        super().__init__(in_features, n_classes, sampler, n_samples, **options)
        if unique and self.n_samples > self.sampler.n_classes:
            raise ValueError(
                f"n_samples: expected at most {self.sampler.n_classes}, the number of classes of "
                f"the sampler, since unique=True samples each once, got {n_samples}"
            )

    def _set_sampler(self, sampler: Any) -> None:
        n, ids = self.n_classes, _head_ids(self.head_classes, self.n_classes)
        first, size = isinstance(self.head_classes, Integral), len(ids)
        self.n_head = size
        self.head_classes = size if first else ids.tolist()
        # Whether the sampler covers only the other classes, in the order of their ids.
        self._has_tail_sampler = bool(size) and getattr(sampler, "n_classes", None) == n - size
        check_sampler(sampler, n - size if self._has_tail_sampler else n)
        others = None
        if self._has_tail_sampler and not first:
            is_tail = torch.ones(n, dtype=torch.bool, device="cpu").index_fill_(0, ids, False)
            others = is_tail.nonzero().squeeze(1)
        self.sampler = sampler
        # Both follow from the configuration, so they are not state. The host copies remake them on
        # other devices.
        self._made_ids = self.head_ids, self.tail_ids = ids, others

    def _make_tables(self, device: torch.device) -> None:
        if is_exporting():
            # Exported programs only predict and do not read them; torch forbids setting them there.
            return
        ids, others = self._made_ids
        self.head_ids = ids.to(device)
        self.tail_ids = None if others is None else others.to(device)

    def _draw(self, rng_counter: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if self.unique:
            ids, log_prob = self.sampler.unique(self.n_samples, rng_counter=rng_counter)
        else:
            ids, log_prob = super()._draw(rng_counter, dtype)
        if self._has_tail_sampler:
            ids = ids + self.n_head if self.tail_ids is None else self.tail_ids[ids]
        elif self.n_head:
            log_prob = log_prob.masked_fill(self._is_head(ids), -torch.inf)
        return ids, log_prob

    def _reads_targets(self) -> bool:
        return self.correction != "none"

    def _correction(self) -> Correction | None:
        if self.n_head or self.unique:
            return None
        if self.correction == "exact":
            return _EXACT
        if self.correction == "none":
            return _NONE
        return Correction(_NONE.rule, targets=1, less=math.log(self.n_samples))

    def _loss_of_step(self, rows: Tensor, target: Tensor, rng_counter: Tensor) -> Tensor:
        dtype, n_head = accumulation_dtype(rows.dtype), self.n_head
        ids, log_prob = self._draw(rng_counter, dtype)
        log_expected = torch.zeros_like(log_prob) if self.correction == "none" else log_prob
        if n_head:
            log_expected = torch.where(log_prob == -torch.inf, torch.inf, log_expected)
            ids = torch.cat([self.head_ids, ids])
            log_expected = torch.cat([log_expected.new_zeros(n_head), log_expected])
        more: dict[str, Any] = {"n_exact": n_head, "temperature": self.temperature}
        averages = self.correction == "exact" and not self.unique
        if averages:
            more["shift"] = self._log_left(target, dtype)
        elif self.correction == "classic":
            # Corrects targets and samples alike, by their expected counts.
            expected = self._log_q(target.clamp(min=0))
            if not self.unique:
                log_draws = math.log(self.n_samples)
                expected = expected + log_draws
                more["shift"] = expected.new_full(target.shape[:1], -log_draws, dtype=dtype)
            if n_head:
                expected = expected.masked_fill(self._is_head(target), 0.0)
            more["target_log_expected"] = expected.to(dtype)
        return self._compare(rows, target, ids, log_expected, Rule(average=averages), **more)

    def _log_q(self, ids: Tensor) -> Tensor:
        """Log-probability of a draw, or of inclusion if unique; float64, -inf for head classes."""
        names = ids
        if self._has_tail_sampler:
            # Their indices among the other classes; arbitrary for head classes.
            others = self.tail_ids
            names = ids - self.n_head if others is None else torch.searchsorted(others, ids)
            names = names.clamp(0, self.sampler.n_classes - 1)
        if self.unique:
            made = self.sampler.log_expected(names, self.n_samples).double()
        else:
            made = self.sampler._log_prob(names, None)
        return made.masked_fill(self._is_head(ids), -torch.inf) if self.n_head else made

    def _log_left(self, target: Tensor, dtype: torch.dtype) -> Tensor:
        """log(1 − q(head) − q(targets)), ``(n,)``, for targets ``(n, p)``, negative for none."""
        sampler = self.sampler
        if not self.n_head and target.shape[1] == 1:
            return sampler._log_complement(target.squeeze(1), None, dtype)
        probs = self._log_q(target.clamp(min=0)).exp()
        again = (target.unsqueeze(-1) == target.unsqueeze(-2)).tril(-1).any(-1)
        taken = probs.masked_fill(again | (target < 0), 0.0).sum(-1)
        if self.n_head and not self._has_tail_sampler:
            taken = taken + sampler._log_prob(self.head_ids, None).exp().sum()
        # Rounding may make the sum exceed 1 if these are all classes.
        return torch.log1p(-taken.clamp(max=1.0)).to(dtype)

    def _is_head(self, ids: Tensor) -> Tensor:
        place = torch.searchsorted(self.head_ids, ids).clamp(max=self.n_head - 1)
        return self.head_ids[place] == ids

    def _softcap_and_temperature(self) -> tuple[float, float]:
        return 0.0, float(self.temperature)


def _head_ids(head_classes: Any, n_classes: int) -> Tensor:
    if isinstance(head_classes, (bool, float, str)):
        raise TypeError(
            "head_classes: expected the number of first classes, or a list of class ids, got "
            f"{type(head_classes).__name__}"
        )
    first = isinstance(head_classes, Integral)
    ids = None if first else as_class_ids("head_classes", head_classes, n_classes)
    size = int(head_classes) if ids is None else len(ids)
    if not 0 <= size < n_classes:
        raise ValueError(
            f"head_classes: expected 0 to {n_classes - 1}, so that classes are left to sample, got "
            f"{size}"
        )
    return torch.arange(size, device="cpu") if ids is None else ids
