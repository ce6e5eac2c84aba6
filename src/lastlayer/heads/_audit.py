"""What a sampled gradient is worth: its bias and variance against the exact one on a batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from lastlayer.heads._audit_gradients import GradientSums
from lastlayer.heads._audit_report import Audit
from lastlayer.heads._audit_weights import Importance, importance
from lastlayer.heads._checks import check_count, check_hidden
from lastlayer.heads._log_z import drift_of, log_normalizer
from lastlayer.heads._sampled_checks import check_targets

if TYPE_CHECKING:
    from lastlayer.heads._compared import ComparedHead
    from lastlayer.heads._sampled import SampledHead


def audit(
    head: "ComparedHead", hidden: Tensor, target: Tensor, n_draws: int = 64, **given: Any
) -> Audit:
    """As :meth:`Audited.audit` says it."""
    check_hidden(head, hidden)
    check_targets(head, hidden, target)
    check_count("n_draws", n_draws)
    if n_draws < 2:
        raise ValueError(f"n_draws: expected at least 2, to know a variance, got {n_draws}")
    leaf = hidden.detach().clone().requires_grad_()
    leaves = {"hidden": leaf, **_learned(head)}
    rows, counts = _counted_rows(head, hidden, target)
    weights: list[Importance] = []
    drawn: list[tuple[float, float]] = []
    with _as_in_training(head), torch.enable_grad():
        exact = torch.autograd.grad(head._exact_loss(leaf, target), list(leaves.values()))
        sums = {
            name: GradientSums(gradient.detach().to_dense())
            for name, gradient in zip(leaves, exact, strict=True)
        }
        for _ in range(n_draws):
            draws = getattr(head, "draws", None)
            counter = None if draws is None else draws.clone()
            head.ess = None
            loss = head.forward(leaf, target, **given)
            made = torch.autograd.grad(loss, list(leaves.values()))
            for name, gradient in zip(leaves, made, strict=True):
                sums[name].add(gradient)
            weights.append(_weights(head, rows, counts, counter))
            drawn.append(_drawn(head, counts))
    log_z = getattr(head, "_row_log_z", lambda some: log_normalizer(head, some))(rows)
    return Audit(
        head=type(head).__name__,
        n_rows=rows.shape[0],
        n_classes=head.n_classes,
        n_samples=round(sum(each for each, _ in drawn) / n_draws),
        n_draws=n_draws,
        gradients={name: each.compared() for name, each in sums.items()},
        ess=torch.stack([each.ess for each in weights]).mean(0).double().cpu(),
        least_ess=min((float(each.ess.min()) for each in weights if each.ess.numel()), default=0.0),
        log_z=log_z.double().cpu(),
        log_z_error=_errors(weights, log_normalizer(head, rows)),
        took_all=sum(each for _, each in drawn) / n_draws,
    )


def _learned(head: "ComparedHead") -> dict[str, Tensor]:
    named = {"weight": head.weight, "bias": head.bias}
    return {k: v for k, v in named.items() if v is not None and v.requires_grad}


def _counted_rows(head: "ComparedHead", hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that have a target, and which they are."""
    batch = head._batch(hidden.detach(), target)
    counts = (batch.target >= 0).any(-1)
    return hidden.detach().reshape(-1, head.in_features)[counts], counts


def _weights(
    head: "ComparedHead", rows: Tensor, counts: Tensor, counter: Tensor | None
) -> Importance:
    """As the head reports them; for one that has no weights, those of its draws."""
    own = head.ess
    if not rows.shape[0]:
        return Importance(rows.new_empty(0), None)
    if own is None or counter is None:
        # All classes counted, or those that count are not left to chance.
        size = rows.new_full(rows.shape[:1], head.n_classes) if own is None else own[counts]
        return Importance(size.detach(), None)
    if head.weighs_draws:
        return Importance(own.detach()[counts], None)
    return importance(cast("SampledHead", head), rows, counter)


def _drawn(head: "ComparedHead", counts: Tensor) -> tuple[float, float]:
    """How many classes a row drew in the last step, and which share of the rows took all."""
    n_drawn: Tensor | None = getattr(head, "n_drawn", None)
    took_all: Tensor | None = getattr(head, "took_all", None)
    if n_drawn is None or took_all is None or not bool(counts.any()):
        return float(head._classes_a_step()), 0.0
    return float(n_drawn[counts].double().mean()), float(took_all[counts].double().mean())


def _errors(weights: list[Importance], exact: Tensor) -> Any:
    estimates = [each.log_z for each in weights if each.log_z is not None]
    return drift_of(torch.stack(estimates) - exact) if estimates else None


@contextmanager
def _as_in_training(head: "ComparedHead") -> Iterator[None]:
    """Training mode with a mean of rows and sparse gradients; everything is put back."""
    # What is no parameter, buffer or part: options, and what heads tell of their last step.
    plain = {name: value for name, value in vars(head).items() if not name.startswith("_")}
    buffers = {name: each.clone() for name, each in head.named_buffers()}
    head.train()
    head.reduction, head.sparse = "mean", True
    try:
        yield
    finally:
        head.train(plain["training"])
        vars(head).update(plain)
        for name, each in head.named_buffers():
            each.copy_(buffers[name])
