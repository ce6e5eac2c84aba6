"""Rules on the derivatives of a multi-label loss, and on how it works with the rest of torch."""

import warnings

import torch
from torch import Tensor

from lastlayer.testing._multilabel_values import CLASSES, MultilabelSuite


def the_derivatives_are_right(suite: MultilabelSuite) -> None:
    if torch.float64 not in suite.dtypes:
        return
    scores = suite.normal(2, 5).requires_grad_()
    mask = torch.tensor([True, True, False, True, True], device=suite.device)
    for target in suite.targets(2, 5):
        for reduction in ("mean", "none"):

            def loss(x: Tensor, target: Tensor = target, reduction: str = reduction) -> Tensor:
                return suite.losses(x, target, mask, reduction)

            rule = f"gradcheck in float64, reduction={reduction!r}"
            suite.runs(rule, scores, torch.autograd.gradcheck, loss, (scores,))
        suite.runs(
            "gradgradcheck in float64", scores, torch.autograd.gradgradcheck, loss, (scores,)
        )


def compiling_changes_nothing(suite: MultilabelSuite, backend: str) -> None:
    rule = f"torch.compile(fullgraph=True, backend={backend!r}) with gradient"
    scores = suite.normal(4, CLASSES, dtype=suite.finest).requires_grad_()
    mask = suite.integers(3, 4, CLASSES) > 0
    for target in suite.targets(4, CLASSES):
        torch.compiler.reset()
        compiled = torch.compile(
            lambda x, y, m: suite.losses(x, y, m, "mean"), fullgraph=True, backend=backend
        )
        with warnings.catch_warnings(action="ignore"):  # torch's own, while it traces
            loss = suite.runs(rule, scores, compiled, scores, target, mask)
            (gradient,) = torch.autograd.grad(loss, scores)
        plain = suite.losses(scores, target, mask, "mean")
        suite.close(rule, loss, plain, suite.same, scores)
        (expected,) = torch.autograd.grad(plain, scores)
        suite.close(f"{rule}: its gradient", gradient, expected, suite.same, scores)


def vmap_is_a_loop(suite: MultilabelSuite) -> None:
    scores = suite.normal(2, 3, CLASSES, dtype=suite.finest)
    mask = suite.integers(3, 2, 3, CLASSES) > 0
    for target in suite.targets(2, 3, CLASSES):
        rule = "torch.func.vmap is a loop"
        mapped = suite.runs(rule, scores, torch.func.vmap(suite.losses), scores, target, mask)
        suite.close(rule, mapped, suite.losses(scores, target, mask), suite.same, scores)

        def total(x: Tensor, y: Tensor, m: Tensor) -> Tensor:
            return suite.losses(x, y, m, "sum")

        rule = "torch.func.vmap of the gradient is a loop"
        gradients = suite.runs(
            rule, scores, torch.func.vmap(torch.func.grad(total)), scores, target, mask
        )
        suite.close(rule, gradients, suite.gradient(scores, target, mask), suite.same, scores)


def autocast_changes_nothing(suite: MultilabelSuite) -> None:
    scores, target = suite.normal(4, CLASSES).float(), suite.labels(4, CLASSES)

    def run() -> tuple[Tensor, Tensor]:
        with torch.autocast(suite.device.type, dtype=torch.bfloat16):
            return suite.losses(scores, target), suite.gradient(scores, target)

    losses, gradient = suite.runs("autocast to bfloat16", scores, run)
    rule = "autocast to bfloat16 changes nothing"
    suite.close(rule, losses, suite.losses(scores, target), 1e-5, scores)
    suite.close(f"{rule}: gradient", gradient, suite.gradient(scores, target), 1e-5, scores)
