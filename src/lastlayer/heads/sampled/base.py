"""The frame of heads that train against some of their classes, and are exact in all else."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Self, TypedDict, Unpack

import torch
from torch import Tensor

from lastlayer._checks import as_integers, check_ids, check_int, check_reduction, check_seed
from lastlayer._torch import in_autocast_dtype, is_plain_step
from lastlayer.fused import linear_cross_entropy
from lastlayer.fused.sampled import Correction, Rule, drawn_loss, kernels_draw, sampled_loss
from lastlayer.heads.linear import LinearHead
from lastlayer.heads.rng import RngSteps, count_step
from lastlayer.heads.sampled.audit import Audit, Explanation, audit, explain
from lastlayer.heads.self_normalized import temperature_of
from lastlayer.samplers import Sampler, fork


class ComparedOptions(TypedDict, total=False):
    """Options that all of their constructors take; :class:`SampledSoftmax` says what they do."""

    bias: bool
    sparse: bool
    ignore_index: int | None
    reduction: str
    chunk_rows: int | str
    device: torch.device | str | None
    dtype: torch.dtype | None


class SampledOptions(ComparedOptions, total=False):
    """The same of heads that draw classes."""

    seed: int
    per_rank: bool


class ComparedHead(LinearHead):
    """One vector per class. In training a row is compared with some classes, in eval with all."""

    # Whether the loss weighs classes by their scores; one of noise does not.
    weighs_draws = True
    # The training loss of rows (n, in_features) and targets (n, p), negative for none.
    _sampled_loss: Callable[..., Tensor]
    # Set where classes are spread over processes: what compares rows with classes of all of them.
    _compare_spread: Callable[..., tuple[Tensor, Tensor | None]] | None = None
    ess: Tensor | None
    """Effective sample size of each row in the last training step, ``(n,)``; None before."""

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        *,
        bias: bool = True,
        sparse: bool = False,
        ignore_index: int | None = -100,
        reduction: str = "mean",
        chunk_rows: int | str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_features, n_classes, bias, ignore_index=ignore_index, reduction=reduction,
            chunk_rows=chunk_rows, device=device, dtype=dtype,
        )  # fmt: skip
        self.sparse, self.ess = sparse, None

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        """In training mode the loss against some classes; in eval mode the exact cross entropy.

        Args:
            hidden: ``(*batch, in_features)``.
            target: class ids ``(*batch)``, of any integer dtype. Several targets per row,
                ``(*batch, p)`` with ``ignore_index`` in places that are not used, count with the
                mean of their log-probabilities.
        """
        self._check_hidden(hidden)
        if self._takes_all():
            return self._exact_loss(hidden, target)
        rows, ids = self._rows(hidden, self._check_targets(hidden, target))
        loss = self._sampled_loss(rows, ids)
        return loss.reshape(hidden.shape[:-1]) if self.reduction == "none" else loss

    def _takes_all(self) -> bool:
        """Whether the loss is the exact one."""
        return not self.training

    @abstractmethod
    def _classes_per_step(self) -> int:
        """How many classes a row is compared with."""

    def _check_targets(self, hidden: Tensor, target: Any) -> Tensor:
        """One class id per row, or several in a last dimension, as int64; and the reduction."""
        check_reduction(self.reduction)
        shape = tuple(hidden.shape[:-1])
        if isinstance(target, Tensor) and target.dim() == hidden.dim() and target.shape[-1]:
            shape = *shape, target.shape[-1]
        return check_ids("target", target, shape, self.n_classes, self.ignore_index, like=hidden)

    def _rows(self, hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Rows in the dtype of autocast, and their targets ``(n, p)``, negative where ignored."""
        n = hidden.shape[:-1].numel()
        ids = target.reshape(n, target.shape[-1] if target.dim() == hidden.dim() else 1)
        # A negative ignore_index needs no other.
        if self.ignore_index is not None and self.ignore_index >= 0:
            ids = torch.where(ids == self.ignore_index, -1, ids)
        rows = in_autocast_dtype(hidden)
        return rows if rows.dim() == 2 else rows.reshape(n, self.in_features), ids

    def _compare(
        self,
        rows: Tensor,
        target: Tensor,
        ids: Tensor,
        log_expected: Tensor,
        rule: Rule,
        **more: Any,
    ) -> Tensor:
        """The loss by :func:`lastlayer.fused.sampled.sampled_loss`; keeps the sample sizes."""
        if self._compare_spread is not None:
            loss, self.ess = self._compare_spread(rows, target, ids, log_expected, rule, **more)
            return loss
        loss, self.ess = sampled_loss(
            rows, self.weight, self.bias, target, ids, log_expected, rule,
            reduction=self.reduction, sparse=self.sparse, chunk_rows=self.chunk_rows, **more,
        )  # fmt: skip
        return loss

    def _exact_loss(self, hidden: Tensor, target: Any) -> Tensor:
        if isinstance(target, Tensor) and target.dim() == hidden.dim():
            return self._loss_of_log_prob(hidden, target)
        return linear_cross_entropy(
            hidden, self.weight, target, self.bias, ignore_index=self.ignore_index,
            reduction=self.reduction, temperature=temperature_of(self), chunk_rows=self.chunk_rows,
            hidden_grad="part" if self._is_spread else "sum",
        )  # fmt: skip

    def _loss_of_log_prob(self, hidden: Tensor, target: Any) -> Tensor:
        """Minus the log-probability of targets: one per row, or the mean of several."""
        target = self._check_targets(hidden, target)
        classes = target if target.dim() == hidden.dim() else target.unsqueeze(-1)
        counts = torch.ones_like(classes, dtype=torch.bool)
        if self.ignore_index is not None:
            counts = classes != self.ignore_index
        # A NaN in a row that does not count would reach gradients as 0 · NaN.
        rows = torch.where(counts.any(-1, keepdim=True), hidden, 0.0)
        log_prob = self.log_prob(rows, torch.where(counts, classes, 0))
        of_row = -torch.where(counts, log_prob, 0.0).sum(-1) / counts.sum(-1).clamp(min=1)
        if self.reduction == "none":
            return of_row
        total = of_row.sum()
        return total / counts.any(-1).sum().clamp(min=1) if self.reduction == "mean" else total

    def audit(self, hidden: Tensor, target: Tensor, n_draws: int = 64, **given: Any) -> Audit:
        """Compare the gradient of the training loss with that of the exact loss, on one batch.

        The training loss is drawn ``n_draws`` times, as the next steps would draw it, and its mean
        gradient with respect to hidden, class vectors and biases is compared with the gradient of
        the exact loss, that of eval mode. The head is left as it was, its counter included.

        Cost: n_draws training steps and an exact one. Beside those it holds the exact and the mean
        gradient, twice the size of hidden and of the class vectors, however many draws there are.

        Args:
            hidden: ``(*batch, in_features)``.
            target: class ids ``(*batch)``, as in training.
            n_draws: how often to draw, at least 2. A bias is seen down to the deviation of one
                step divided by the root of this number. Two are enough for a head that draws
                nothing, whose deviation is 0.
            given: what else the head takes by name in training, such as a context.

        Returns:
            An ``Audit``; ``print(head.audit(hidden, target).table())``.
        """
        return audit(self, hidden, target, n_draws, **given)


class SampledHead(ComparedHead):
    """One vector per class, trained against a few classes that are drawn anew in every step.

    In eval mode the loss is the exact cross entropy, and ``log_prob``, ``topk`` and ``sample`` are
    exact in both modes. What is drawn depends on
    the buffer ``rng_counter``, seed and step, alone; it is saved with the state, so that a resumed
    run draws what the first one would have drawn. A forward pass under ``torch.no_grad()`` uses
    the draws of the next step and does not count as one. The sampler becomes a part of the head,
    and moves with it.
    """

    # Whether each row has draws of its own, or all rows the same.
    draws_for_each_row = False
    # Classes that every step looks at beside those it draws.
    n_head = 0
    # Whether a step needs the log-probabilities of what it draws.
    _reads_log_prob = True
    # The reduced training loss of rows and targets, of classes drawn by an rng_counter.
    _loss_of_step: Callable[..., Tensor]
    sampler: Sampler
    rng_counter: Tensor

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        sampler: Sampler | None = None,
        n_samples: int = 1024,
        *,
        seed: int = 0,
        per_rank: bool = False,
        **options: Unpack[ComparedOptions],
    ) -> None:
        self.n_samples, self.seed = check_int("n_samples", n_samples), check_seed(seed)
        super().__init__(in_features, n_classes, **options)
        self.per_rank = per_rank
        self._set_sampler(sampler)
        self.register_buffer("rng_counter", self._fresh_buffer("rng_counter"))
        self._steps = RngSteps()
        self._move_draws()

    def _set_sampler(self, sampler: Any) -> None:
        check_sampler(sampler, self.n_classes)
        self.sampler = sampler

    def _fresh_buffer(self, name: str) -> Tensor | None:
        if name == "rng_counter":
            return torch.tensor([self.seed, 0], device="cpu")
        return super()._fresh_buffer(name)

    def _sampled_loss(self, rows: Tensor, target: Tensor, *given: Tensor) -> Tensor:
        own = rng_counter = self.rng_counter
        counts = True
        if not is_plain_step():
            rng_counter, counts = self._steps.counter(own)
        distributed = torch.distributed
        if self.per_rank and distributed.is_available() and distributed.is_initialized():
            rng_counter = fork(rng_counter, distributed.get_rank())
        weight = self.weight
        drawable = rng_counter is own and self.reduction != "none" and not self._is_spread
        if drawable and kernels_draw(rows, weight, target):
            correction, tables = self._correction(), self.sampler._tables()
            if correction and tables:
                # The kernel draws, and moves the counter on. A module takes long to set a tensor.
                loss, self.__dict__["ess"] = drawn_loss(
                    rows, weight, self.bias, target, own, tables, self.n_samples, correction,
                    reduction=self.reduction, counts=counts, row_shift=self._row_shift(rows),
                    temperature=temperature_of(self), sparse=self.sparse,
                    chunk_rows=self.chunk_rows,
                )  # fmt: skip
                return loss
        loss = self._loss_of_step(rows, target, rng_counter, *given)
        if counts:
            # Once all is drawn; on the device, so that nothing waits for it.
            count_step(own)
        return loss

    def _correction(self) -> Correction | None:
        """The loss of classes that a kernel draws; None where it cannot."""
        return None

    def _reads_targets(self) -> bool:
        """Whether a step needs the log-probabilities of targets."""
        return False

    def _row_shift(self, rows: Tensor) -> Tensor | None:  # noqa: ARG002 - for heads with any
        """Added to all logits of a row, ``(n,)``."""
        return None

    def _draw(self, rng_counter: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Classes of a step and their log-probabilities; -inf for one that is always counted."""
        # Not by its public methods, which would check what is known to be right.
        with torch.no_grad():
            draw = self.sampler._draw_both
            if dtype == torch.float64:
                draw = self.sampler._draw_wide
            return draw(self.n_samples, rng_counter, None)

    def _classes_per_step(self) -> int:
        return self.n_samples

    def explain(self, audit: Audit | None = None, *, n_rows: int = 1024) -> Explanation:
        """What a training step costs beside a full softmax, and how many samples to draw.

        Numbers are counted, not measured. The sample count follows from the effective sample size
        that an audit found; without one it is a first guess from the number of classes.

        Args:
            audit: what :meth:`audit` gave.
            n_rows: hidden states in a step.

        Returns:
            An ``Explanation``; ``print(head.explain())``.
        """
        return explain(self, audit, n_rows=n_rows)

    def _move_draws(self) -> None:
        """Puts the counter and all that draws where the parameters are."""
        device = self.weight.device
        if device.type != "meta":
            for part in self.children():
                part.to(device)
            for name, buffer in self.named_buffers(recurse=False):
                setattr(self, name, buffer.to(device))

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear | torch.nn.Embedding, **options: Any) -> Self:
        head = super().from_linear(linear, **options)
        head._move_draws()
        return head

    def _saved_config(self, config: dict[str, Any]) -> dict[str, Any]:
        sampler = config["sampler"]
        saved = {"name": type(sampler).__name__, "arguments": sampler._saved_config()}
        return {**config, "sampler": saved}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        device = config.get("device")
        on_meta = device is not None and torch.device(device).type == "meta"
        return cls(**{**config, "sampler": _sampler_from(config["sampler"], on_meta)})

    def extra_repr(self) -> str:
        config = self._saved_config(self.config())
        # Shown below, as a part.
        config.pop("sampler", None)
        return self._shown(config)


def check_sampler(sampler: Any, n_classes: int) -> None:
    """A sampler of the head's classes that needs no context."""
    if not isinstance(sampler, Sampler):
        got = "None" if sampler is None else type(sampler).__name__
        raise TypeError(
            f"sampler: expected one of lastlayer.samplers, got {got}; give "
            "samplers.Unigram(counts), which draws classes as often as they occur, or "
            f"samplers.Uniform({n_classes}) where all are equally likely"
        )
    if sampler.n_classes != n_classes:
        raise ValueError(
            f"sampler: expected one of {n_classes} classes, as the head has, got one of "
            f"{sampler.n_classes}"
        )
    if sampler.needs_context:
        raise ValueError(
            f"sampler: expected one without context, got {type(sampler).__name__}; "
            "AdaptiveNGram is for AdaptiveImportanceSampling, and InBatch for "
            "in_batch_softmax_loss"
        )


def as_class_ids(name: str, ids: Any, n_classes: int) -> Tensor:
    """Different class ids, ascending; at least one."""
    given = as_integers(name, ids, "class ids")
    if not len(given):
        raise ValueError(f"{name}: expected at least one class id, got none")
    found = check_ids(name, torch.from_numpy(given), None, n_classes).sort().values
    again = found[1:][found[1:] == found[:-1]]
    if len(again):
        raise ValueError(f"{name}: expected each class once, got class {int(again[0])} again")
    return found


def _sampler_from(saved: dict[str, Any], on_meta: bool) -> Sampler:
    """A sampler by the name of its class; its state is still to be loaded."""
    classes: list[Any] = [Sampler]
    for cls in classes:
        classes += cls.__subclasses__()
    found = [cls for cls in classes if cls.__name__ == saved["name"]]
    if len(found) != 1:
        trouble = "none is imported" if not found else f"{len(found)} have this name"
        raise ValueError(
            f"sampler: expected a class named {saved['name']!r} below lastlayer.samplers.Sampler, "
            f"got no single one: {trouble}; import the module that defines it before loading"
        )
    make = found[0]._on_meta if on_meta else found[0].from_config
    made: Sampler = make(saved["arguments"])
    return made
