"""The autograd function behind every fused loss. It computes gradients in the forward pass.

An :class:`Engine` computes losses and gradients from its operands (hidden states, class vectors,
targets). While the scores of some rows are in memory, their gradient is cheap to compute. So the
forward pass computes the gradients, and the backward pass only scales them by the upstream
gradient. This requires a scalar upstream gradient. With ``reduction="none"`` the upstream gradient
has one value per row, and backward recomputes scores and gradients from the operands.

This module handles, for all engines: which gradients are wanted, ``retain_graph``, second
derivatives, the range of float16, and torch.compile (one registered operation per engine; in eager
mode the engine is called directly).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer._torch import (
    accumulation_dtype,
    apply_of,
    forward_mode_is_active,
    gradient_sum_dtype,
    graph_is_kept,
    in_dtype,
    in_functorch,
    is_eager,
    is_grads_batched,
    is_vmapped,
    refuse_second_derivatives,
    transforms_are_active,
)

# Tensors, or None for those that are absent.
Operands = Sequence[Any]
Grads = list[Tensor | None]
_library = torch.library.Library("lastlayer", "FRAGMENT")


class Call(NamedTuple):
    """One request to an engine: the loss, and the gradients of the ``wanted`` operands.

    With ``reduction="none"`` the loss has one value per row. Gradients are then computed only if
    ``upstream``, one value per row, is given: they are those of ``(loss * upstream).sum()``.
    """

    operands: Operands
    options: tuple[Any, ...]
    reduction: str
    wanted: Sequence[bool]
    upstream: Tensor | None = None

    @property
    def makes_gradients(self) -> bool:
        """Whether this call computes gradients, for engines that recompute with "none"."""
        return any(self.wanted) and (self.upstream is not None or self.reduction != "none")


class Result(NamedTuple):
    """The output of an engine.

    ``pieces`` are the gradients of the differentiable operands (None if not wanted), or the tensors
    from which :meth:`Engine.finish` computes them. The true gradients are ``pieces * size``; None
    means a size of 1.
    """

    loss: Tensor
    pieces: Sequence[Tensor | None] = ()
    statistics: Sequence[Tensor] = ()
    size: Tensor | None = None


class Engine(ABC):
    """A loss over rows that is computed together with its gradients.

    Operands are tensors: first those that may need a gradient, then ``n_constants`` that never do.
    Options are plain values (numbers, strings, None). ``schema`` declares their names and types in
    the schema language of ``torch.library``.

    Attributes:
        name: name of the registered operation, under ``torch.ops.lastlayer``.
        schema: schema of the options, such as ``"int? ignore_index, str chunk_rows"``.
        n_constants: number of operands without a gradient; they come last.
        kept: indices of the operands that :meth:`finish` and :meth:`differentiable` read.
        recomputes_unreduced: whether backward recomputes from the operands with
            ``reduction="none"``.
        written: index of the operand that backward writes to, or None. It is not passed to
            ``save_for_backward``, which would raise after the write.
        what: name of the loss in error messages.
        instead: alternative that supports second derivatives, for error messages.
    """

    name: str
    schema: str
    n_constants: int
    kept: tuple[int, ...] = ()
    recomputes_unreduced = True
    written: int | None = None
    what = "a fused loss"
    instead = "log_prob(hidden, classes), which has them"

    def __init__(self) -> None:
        tail = ", str reduction, bool[] wanted) -> Tensor[]"
        _library.define(f"{self.name}(Tensor?[] operands, Tensor? upstream, {self.schema}{tail}")
        _library.impl(self.name, self._registered, "CompositeExplicitAutograd")
        torch.library.register_fake(f"lastlayer::{self.name}", self._fake, lib=_library)
        self._operation = getattr(torch.ops.lastlayer, self.name).default

    @abstractmethod
    def compute(self, call: Call) -> Result:
        """Computes the reduced loss and the wanted gradients.

        If backward recomputes the gradients, the pieces may be any tensors that backward reuses.
        They are then appended to the operands of the second call.
        """

    def fake(self, call: Call) -> Result:
        """Returns empty results with the right shapes and dtypes, for tracing.

        The default is for engines whose first operand is hidden states ``(*batch, d)`` and whose
        gradients are computed in forward.
        """
        rows, dtype = call.operands[0], accumulation_dtype(call.operands[0].dtype)
        batch = rows.shape[:-1] if call.reduction == "none" else ()
        loss = rows.new_empty(batch, dtype=dtype)
        if call.upstream is None and self.recomputes(call.options, call.reduction):
            return Result(loss, (None,) * len(call.wanted))
        scaled_down = rows.dtype == torch.float16 and any(call.wanted)
        size = rows.new_empty((), dtype=dtype) if scaled_down else None
        return Result(loss, empty_gradients(call.operands, call.wanted), (), size)

    def statistics(self, options: tuple[Any, ...]) -> int:  # noqa: ARG002 - for engines with any
        """Number of statistics that :meth:`compute` returns."""
        return 0

    def recomputes(self, options: tuple[Any, ...], reduction: str) -> bool:  # noqa: ARG002
        """Whether backward recomputes the gradients from the operands."""
        return self.recomputes_unreduced and reduction == "none"

    def finish(
        self, call: Call, pieces: Sequence[Any], factor: Tensor | None, reusable: bool
    ) -> Grads:
        """Computes ``gradients * factor`` from the pieces, in place if they are ``reusable``."""
        del call
        if factor is None:
            return list(pieces)
        if factor.is_cpu and is_eager(factor) and factor.item() == 1.0:
            return [each if reusable or each is None else each.clone() for each in pieces]
        return scaled(pieces, factor, reusable)

    def differentiable(self, call: Call, grad: Tensor) -> Grads | None:  # noqa: ARG002
        """Computes the gradients from the operands with operations that are differentiable again.

        Called for ``create_graph=True``, which raises by default, and for batched (vmapped)
        upstream gradients. Returns None if the engine has no such path.
        """
        refuse_second_derivatives(self.what, self.instead)
        return None

    def invoke(self, call: Call) -> Result:
        """Calls :meth:`compute`, directly in eager mode: the dispatcher costs host time."""
        operands, options, reduction, wanted, upstream = call
        first = operands[0]
        # The registered operation declares no mutation, so it must not write to an operand.
        writes = self.written is not None and operands[self.written] is not None
        if writes or (is_eager(first) and not first.is_meta):
            return self.compute(call)
        made = self._operation(list(operands), upstream, *options, reduction, list(wanted))
        n = 2 + self.statistics(options)
        size = made[1] if made[1].numel() else None
        return Result(made[0], made[n:], made[2:n], size)

    def _registered(self, operands: Operands, upstream: Tensor | None, *rest: Any) -> list[Tensor]:
        return self._flat(self.compute(Call(operands, rest[:-2], rest[-2], rest[-1], upstream)))

    def _fake(self, operands: Operands, upstream: Tensor | None, *rest: Any) -> list[Tensor]:
        return self._flat(self.fake(Call(operands, rest[:-2], rest[-2], rest[-1], upstream)))

    def _flat(self, result: Result) -> list[Tensor]:
        """The result as the registered operation returns it: contiguous, empty for None."""
        none = result.loss.new_empty(0)
        pieces = [none.clone() if each is None else each.contiguous() for each in result.pieces]
        size = none if result.size is None else result.size
        return [result.loss, size, *result.statistics, *pieces]


def fused_loss(
    engine: Engine, operands: Operands, options: tuple[Any, ...], reduction: str
) -> tuple[Tensor, ...]:
    """Returns the reduced loss, which is differentiable, and the statistics of each row.

    Operands are checked and in the dtype of the matrix products. Options follow the engine's
    schema.
    """
    n = len(operands) - engine.n_constants
    recording = torch.is_grad_enabled()
    wanted = tuple([
        recording and each is not None and each.requires_grad for each in operands[:n]
    ])  # fmt: skip
    if in_functorch():
        first, _, *rest = _TransformedLoss.apply(engine, options, reduction, wanted, *operands)
        return first, *rest[: engine.statistics(options)]
    if True not in wanted and not forward_mode_is_active():
        result = engine.invoke(Call(operands, options, reduction, wanted))
        return result.loss, *result.statistics
    apply = _FusedLoss.apply if transforms_are_active() else _apply
    made: tuple[Tensor, ...] = apply(engine, options, reduction, wanted, *operands)
    return made


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        engine: Engine,
        options: tuple[Any, ...],
        reduction: str,
        wanted: tuple[bool, ...],
        *operands: Tensor | None,
    ) -> tuple[Tensor, ...]:
        result = engine.invoke(Call(operands, options, reduction, wanted))
        dtypes = [None if each is None else each.dtype for each in operands[: len(wanted)]]
        kept: Sequence[int] = engine.kept
        if engine.recomputes(options, reduction):
            kept = [i for i in range(len(operands)) if i != engine.written]
        ctx.given = engine, options, reduction, wanted, dtypes, len(operands), kept
        ctx.written = None if engine.written is None else operands[engine.written]
        ctx.save_for_backward(*[operands[i] for i in kept], result.size, *result.pieces)
        if not result.statistics:
            return (result.loss,)
        ctx.mark_non_differentiable(*result.statistics)
        # Otherwise autograd would allocate zero gradients for the statistics.
        ctx.set_materialize_grads(False)
        return result.loss, *result.statistics

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
        engine, options, reduction, wanted, dtypes, n, kept = ctx.given
        if grad is None:
            return *(None,) * 4, *(None,) * n
        saved = ctx.saved_tensors
        size, pieces = saved[len(kept)], saved[len(kept) + 1 :]
        operands: list[Tensor | None] = [None] * n
        for i, each in zip(kept, saved[: len(kept)], strict=True):
            operands[i] = each
        if engine.written is not None:
            operands[engine.written] = ctx.written
        call = Call(operands, options, reduction, wanted)
        compiling = torch.compiler.is_compiling()
        if not compiling and (torch.is_grad_enabled() or is_vmapped(grad)):
            made = engine.differentiable(call, grad)
            if made is not None:
                return _returned(made, wanted, dtypes, n)
            if is_grads_batched(grad):
                raise RuntimeError(
                    f"{engine.what}: expected one upstream gradient at a time, got a batch "
                    "(is_grads_batched=True); call torch.autograd.grad once per gradient"
                )
        # Scale in place unless the graph is retained: a second copy of the weight's gradient may
        # not fit in device memory.
        reusable = not compiling and not graph_is_kept()
        made = _gradients(engine, call, grad, size, pieces, reusable)
        return _returned(made, wanted, dtypes, n)


_apply = apply_of(_FusedLoss)


def _gradients(
    engine: Engine,
    call: Call,
    grad: Tensor,
    size: Tensor | None,
    pieces: Sequence[Any],
    reusable: bool,
) -> Grads:
    """The gradients of the operands, from the saved pieces and the upstream gradient."""
    factor: Tensor | None = grad
    if engine.recomputes(call.options, call.reduction):
        left = [each for each in pieces if each is not None and each.numel()]
        # The gradient of losses.sum() is an expanded scalar with stride 0.
        # Not _replace, which torch 2.8 cannot trace.
        again = Call(
            [*call.operands, *left], call.options, call.reduction, call.wanted, grad.contiguous()
        )
        result = engine.invoke(again)
        factor, size, pieces, reusable = None, result.size, result.pieces, True
    if size is not None:
        factor = size if factor is None else factor * size
    return engine.finish(call, pieces, factor, reusable)


class _TransformedLoss(torch.autograd.Function):
    """:class:`_FusedLoss` for ``torch.func``, where backward may only use inputs and outputs.

    So it returns all outputs of the registered operation. vmap loops over the batch.
    """

    @staticmethod
    def forward(
        engine: Engine,
        options: tuple[Any, ...],
        reduction: str,
        wanted: tuple[bool, ...],
        *operands: Tensor | None,
    ) -> tuple[Tensor, ...]:
        if engine.written is not None and operands[engine.written] is not None:
            raise RuntimeError(
                "weight_grad: expected None inside torch.func, got a tensor; leave it out"
            )
        return tuple(engine._flat(engine.invoke(Call(operands, options, reduction, wanted))))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        operands = inputs[4:]
        ctx.given, ctx.n_operands = inputs[:4], len(operands)
        ctx.save_for_backward(*operands, *output[1:])
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
        wanted: tuple[bool, ...] = ctx.given[3]
        n: int = ctx.n_operands
        if grad is None:
            return (None,) * (4 + n)
        made = iter(_TransformedGradients.apply(*ctx.given, n, grad, *ctx.saved_tensors))
        gradients = [next(made) if needed else None for needed in wanted]
        return *(None,) * 4, *gradients, *(None,) * (n - len(wanted))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        return _looped(_TransformedLoss, info.batch_size, in_dims, inputs)


class _TransformedGradients(torch.autograd.Function):
    """The backward pass of :class:`_TransformedLoss`: computes the wanted gradients."""

    @staticmethod
    def forward(
        engine: Engine,
        options: tuple[Any, ...],
        reduction: str,
        wanted: tuple[bool, ...],
        n_operands: int,
        grad: Tensor,
        *saved: Tensor | None,
    ) -> tuple[Tensor, ...]:
        operands, outputs = saved[:n_operands], saved[n_operands:]
        size, *pieces = [each if each is not None and each.numel() else None for each in outputs]
        call = Call(operands, options, reduction, wanted)
        left = pieces[engine.statistics(options) :]
        made = _gradients(engine, call, grad, size, left, reusable=False)
        return tuple([
            torch.zeros_like(operand) if each is None else in_dtype(each, operand.dtype)
            for each, operand, needed in zip(made, operands, wanted, strict=False)
            if needed and operand is not None
        ])  # fmt: skip

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        del output
        ctx.engine = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        raise RuntimeError(
            f"{ctx.engine.what}: expected one derivative inside torch.func, got two; use "
            f"{ctx.engine.instead}"
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        return _looped(_TransformedGradients, info.batch_size, in_dims, inputs)


def _looped(
    function: type[torch.autograd.Function],
    batch_size: int,
    in_dims: tuple[Any, ...],
    inputs: tuple[Any, ...],
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """vmap of a function without a batched implementation: a loop over the batch."""
    made = [
        function.apply(*[
            each.select(dim, i) if isinstance(dim, int) else each
            for each, dim in zip(inputs, in_dims, strict=True)
        ])
        for i in range(batch_size)
    ]  # fmt: skip
    return tuple(map(torch.stack, zip(*made, strict=True))), (0,) * len(made[0])


def _returned(
    made: Sequence[Tensor | None],
    wanted: Sequence[bool],
    dtypes: Sequence[torch.dtype],
    n_operands: int,
) -> tuple[Tensor | None, ...]:
    """Gradients as ``backward`` returns them: in the operands' dtypes, None for other inputs."""
    gradients = [
        in_dtype(each, dtype) if needed and each is not None else None
        for each, needed, dtype in zip(made, wanted, dtypes, strict=True)
    ]
    return *(None,) * 4, *gradients, *(None,) * (n_operands - len(gradients))


def scaled(pieces: Sequence[Tensor | None], factor: Tensor, reusable: bool) -> Grads:
    """Each piece times ``factor``, rounded once; in place if ``reusable``.

    The factor is a scalar tensor that may be outside the range of half precision.
    """
    if reusable:
        # None are left if the weight's gradient has been added to `weight_grad`.
        made = [each for each in pieces if each is not None]
        if made:
            kernels.products.scale_("auto", made[0], made[1:], factor)
        return list(pieces)
    return [
        None if each is None else (each.to(factor.dtype) * factor).to(each.dtype) for each in pieces
    ]


def normalized_factors(
    scale: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Row factors divided by their largest magnitude, and that magnitude; for float16 only.

    float16 has no values below 6e-8, so a small probability times 1/n underflows. The factors are
    therefore normalized, and the gradients are multiplied by the magnitude later, together with the
    upstream gradient, which may contain a loss scale.
    """
    if dtype != torch.float16 or scale is None:
        return scale, None
    size = scale.abs().amax() if scale.shape[0] else scale.new_ones(())
    size = torch.where(size == 0, 1.0, size)
    return scale / size, size


class RowScale(NamedTuple):
    """Weight of each row in the reduced loss, and the gradient factors that follow from it."""

    weight: Tensor | None
    """Weight of each row's loss, ``(n,)``; None for 1."""
    divisor: Tensor | float | None
    """Divides the weighted sum of losses; None for the sum of the weights. 0 gives a loss of 0."""

    @classmethod
    def of(
        cls, weight: Tensor | None, reduction: str, n: int, counted: Tensor | None = None
    ) -> "RowScale":
        """From row weights; "mean" divides by the sum of ``counted``, or else of the weights."""
        if reduction != "mean":
            return cls(weight, 1.0)
        if weight is None and counted is None:
            return cls(None, float(n))
        return cls(weight, None if counted is None else counted.sum())

    def reduce(self, losses: Tensor, reduction: str) -> Tensor:
        """The reduced loss; rows of weight 0 add 0 even if their loss is inf or NaN."""
        by_kernel = self.divisor is None or (
            # On a GPU torch's mean is a single launch, too.
            losses.is_cpu and self.weight is None and 1.0 < self.divisor == losses.shape[0]
        )
        if by_kernel and is_eager(losses) and not losses.requires_grad:
            loss: Tensor = kernels.products.weighted_mean("auto", losses, self.weight)[0]
            return loss
        if self.weight is not None:
            losses = torch.where(self.weight == 0, 0.0, losses * self.weight)
        if reduction == "none":
            return losses
        if isinstance(self.divisor, float):
            if 1.0 < self.divisor == losses.numel():
                return losses.mean()
            total = losses.sum()
            return total if self.divisor == 1.0 else total / max(1.0, self.divisor)
        divisor = self.divisor
        if divisor is None:
            divisor = losses.new_zeros(()) if self.weight is None else self.weight.sum()
        return torch.where(divisor == 0, 0.0, losses.sum() / divisor)

    def factors(self, like: Tensor, n: int, upstream: Tensor | None = None) -> Tensor:
        """Factor of the gradient of each row's loss, ``(n,)``.

        ``upstream`` is the gradient of the reduced loss, or of each row's loss with "none".
        """
        dtype = accumulation_dtype(like.dtype)
        if upstream is not None and upstream.dim():
            upstream = in_dtype(upstream, dtype)
            return upstream if self.weight is None else upstream * self.weight
        if isinstance(self.divisor, float):
            share = 1.0 / max(1.0, self.divisor)
            if self.weight is None:
                scale = kernels.full(n, share, dtype, like)
            else:
                scale = self.weight if share == 1.0 else self.weight * share
        else:
            weight = like.new_ones(n, dtype=dtype) if self.weight is None else self.weight
            divisor = weight.sum() if self.divisor is None else self.divisor
            scale = torch.where(divisor == 0, 0.0, weight / divisor)
        return scale if upstream is None else scale * in_dtype(upstream, dtype)


def empty_gradients(operands: Operands, wanted: Sequence[bool]) -> Grads:
    """Empty gradients for :meth:`Engine.fake`, if forward computes the gradients.

    All but the first operand's are sums over rows, and have :func:`gradient_sum_dtype`.
    """
    made: Grads = []
    for i, (source, needed) in enumerate(zip(operands, wanted, strict=False)):
        if source is None or not needed:
            made.append(None)
        else:
            dtype = gradient_sum_dtype(source.dtype) if i else source.dtype
            made.append(source.new_empty(source.shape, dtype=dtype))
    return made
