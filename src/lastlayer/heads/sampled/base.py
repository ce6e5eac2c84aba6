"""Base classes of heads that train on some of their classes, and are exact otherwise."""

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
    """Options that all of these constructors take; documented in :class:`SampledSoftmax`."""

    bias: bool
    sparse: bool
    ignore_index: int | None
    reduction: str
    chunk_rows: int | str
    device: torch.device | str | None
    dtype: torch.dtype | None


class SampledOptions(ComparedOptions, total=False):
    """The same for heads that sample classes."""

    seed: int
    per_rank: bool


class ComparedHead(LinearHead):
    """One vector per class. Training compares each row with some classes, evaluation with all."""

    # Whether the loss weights samples by their scores; noise-contrastive losses do not.
    weighs_draws = True
    # The training loss of rows (n, in_features) and targets (n, p), where negative targets are
    # ignored.
    _sampled_loss: Callable[..., Tensor]
    # Set if classes are sharded over processes: compares rows with the classes of all processes.
    _compare_spread: Callable[..., tuple[Tensor, Tensor | None]] | None = None
    ess: Tensor | None
    """Effective sample size of each row in the last training step, ``(n,)``, or None."""

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
        """The loss against some classes in training mode, the exact cross entropy in eval mode.

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
        """Whether to use the exact loss."""
        return not self.training

    @abstractmethod
    def _classes_per_step(self) -> int:
        """Number of classes that a row is compared with."""

    def _check_targets(self, hidden: Tensor, target: Any) -> Tensor:
        """Checks the reduction and the targets, one or several class ids per row; as int64."""
        check_reduction(self.reduction)
        shape = tuple(hidden.shape[:-1])
        if isinstance(target, Tensor) and target.dim() == hidden.dim() and target.shape[-1]:
            shape = *shape, target.shape[-1]
        return check_ids("target", target, shape, self.n_classes, self.ignore_index, like=hidden)

    def _rows(self, hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Rows in the autocast dtype, and their targets ``(n, p)``, negative if ignored."""
        n = hidden.shape[:-1].numel()
        ids = target.reshape(n, target.shape[-1] if target.dim() == hidden.dim() else 1)
        # A negative ignore_index can stay.
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
        """The loss by :func:`lastlayer.fused.sampled.sampled_loss`; sets ``ess``."""
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
        """The negative log-likelihood of targets: one per row, or the mean of several."""
        target = self._check_targets(hidden, target)
        classes = target if target.dim() == hidden.dim() else target.unsqueeze(-1)
        counts = torch.ones_like(classes, dtype=torch.bool)
        if self.ignore_index is not None:
            counts = classes != self.ignore_index
        # A NaN in an ignored row would reach gradients as 0 · NaN.
        rows = torch.where(counts.any(-1, keepdim=True), hidden, 0.0)
        log_prob = self.log_prob(rows, torch.where(counts, classes, 0))
        of_row = -torch.where(counts, log_prob, 0.0).sum(-1) / counts.sum(-1).clamp(min=1)
        if self.reduction == "none":
            return of_row
        total = of_row.sum()
        return total / counts.any(-1).sum().clamp(min=1) if self.reduction == "mean" else total

    def audit(self, hidden: Tensor, target: Tensor, n_draws: int = 64, **given: Any) -> Audit:
        """Compares the gradient of the training loss with that of the exact loss, on one batch.

        The training loss is computed ``n_draws`` times, with the samples of the next steps. Its
        mean gradient for hidden, class vectors and biases is compared with the gradient of the
        exact loss of eval mode. The head, including its RNG counter, is left unchanged.

        Cost: n_draws training steps and an exact one. In addition it holds the exact and the mean
        gradient, twice the size of hidden and of the class vectors, for any number of draws.

        Args:
            hidden: ``(*batch, in_features)``.
            target: class ids ``(*batch)``, as in training.
            n_draws: number of repetitions, at least 2. The smallest detectable bias is the standard
                deviation of one step divided by the square root of this number. Two are enough for
                a head without random samples, whose deviation is 0.
            given: other keyword arguments of the head in training, such as a context.

        Returns:
            An ``Audit``; ``print(head.audit(hidden, target).table())`` shows it.
        """
        return audit(self, hidden, target, n_draws, **given)


class SampledHead(ComparedHead):
    """One vector per class, trained against a few classes that are sampled in every step.

    In eval mode the loss is the exact cross entropy; ``log_prob``, ``topk`` and ``sample`` are
    exact in both modes. The samples depend only on the buffer ``rng_counter`` (seed and step). It
    is saved with the state, so that a resumed run draws the same samples. A forward pass under
    ``torch.no_grad()`` uses the samples of the next step without counting as a step. The sampler
    becomes a submodule of the head and moves with it.
    """

    # Whether each row has its own samples, or all rows share them.
    draws_for_each_row = False
    # Number of classes that every step includes besides the sampled ones.
    n_head = 0
    # Whether a step needs the log-probabilities of its samples.
    _reads_log_prob = True
    # The reduced training loss of rows and targets, with classes sampled by an rng_counter.
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
                # The kernel draws and advances the counter. __dict__: nn.Module.__setattr__ is
                # slow.
                loss, self.__dict__["ess"] = drawn_loss(
                    rows, weight, self.bias, target, own, tables, self.n_samples, correction,
                    reduction=self.reduction, counts=counts, row_shift=self._row_shift(rows),
                    temperature=temperature_of(self), sparse=self.sparse,
                    chunk_rows=self.chunk_rows,
                )  # fmt: skip
                return loss
        loss = self._loss_of_step(rows, target, rng_counter, *given)
        if counts:
            # After all draws; on the device, without a host sync.
            count_step(own)
        return loss

    def _correction(self) -> Correction | None:
        """The correction of classes that a kernel samples; None if the kernel cannot.

        A subclass that replaces :meth:`_draw` returns None.
        """
        return None

    def _reads_targets(self) -> bool:
        """Whether a step needs the log-probabilities of targets."""
        return False

    def _row_shift(self, rows: Tensor) -> Tensor | None:  # noqa: ARG002 - for heads with any
        """Added to all logits of a row, ``(n,)``."""
        return None

    def _draw(self, rng_counter: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Classes of a step and their log-probabilities; -inf for those always included."""
        # Not by the sampler's public methods, which would check the arguments again.
        with torch.no_grad():
            draw = self.sampler._draw_both
            if dtype == torch.float64:
                draw = self.sampler._draw_wide
            return draw(self.n_samples, rng_counter, None)

    def _classes_per_step(self) -> int:
        return self.n_samples

    def explain(self, audit: Audit | None = None, *, n_rows: int = 1024) -> Explanation:
        """Compares the cost of a training step with a full softmax, and suggests ``n_samples``.

        Costs are calculated, not measured. The suggestion follows from the effective sample size
        that an audit found; without an audit it is a first guess from the number of classes.

        Args:
            audit: result of :meth:`audit`.
            n_rows: batch size of a step.

        Returns:
            An ``Explanation``; ``print(head.explain())`` shows it.
        """
        return explain(self, audit, n_rows=n_rows)

    def _move_draws(self) -> None:
        """Moves the counter and the sampler to the device of the parameters."""
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
        # The sampler is shown as a submodule.
        config.pop("sampler", None)
        return self._shown(config)


def check_sampler(sampler: Any, n_classes: int) -> None:
    """Checks a sampler for the head's classes that needs no context."""
    if not isinstance(sampler, Sampler):
        got = "None" if sampler is None else type(sampler).__name__
        raise TypeError(
            f"sampler: expected one of lastlayer.samplers, got {got}; give "
            "samplers.Unigram(counts), which samples classes by frequency, or "
            f"samplers.Uniform({n_classes}), which samples all equally"
        )
    if sampler.n_classes != n_classes:
        raise ValueError(
            f"sampler: expected one for {n_classes} classes, as the head has, got one for "
            f"{sampler.n_classes}"
        )
    if sampler.needs_context:
        raise ValueError(
            f"sampler: expected one without context, got {type(sampler).__name__}; "
            "AdaptiveNGram is for AdaptiveImportanceSampling, and InBatch for "
            "in_batch_softmax_loss"
        )


def as_class_ids(name: str, ids: Any, n_classes: int) -> Tensor:
    """Checks unique class ids, at least one; returns them sorted."""
    given = as_integers(name, ids, "class ids")
    if not len(given):
        raise ValueError(f"{name}: expected at least one class id, got none")
    found = check_ids(name, torch.from_numpy(given), None, n_classes).sort().values
    again = found[1:][found[1:] == found[:-1]]
    if len(again):
        raise ValueError(f"{name}: expected unique class ids, got class {int(again[0])} twice")
    return found


def _sampler_from(saved: dict[str, Any], on_meta: bool) -> Sampler:
    """Makes a sampler by the name of its class; its state is loaded later."""
    classes: list[Any] = [Sampler]
    for cls in classes:
        classes += cls.__subclasses__()
    found = [cls for cls in classes if cls.__name__ == saved["name"]]
    if len(found) != 1:
        trouble = "none is imported" if not found else f"{len(found)} have this name"
        raise ValueError(
            f"sampler: expected a subclass of lastlayer.samplers.Sampler named {saved['name']!r}, "
            f"got none or several: {trouble}; import the module that defines it before loading"
        )
    make = found[0]._on_meta if on_meta else found[0].from_config
    made: Sampler = make(saved["arguments"])
    return made
