"""Rules on the derivatives of a loss, and on how it works with the rest of torch."""

import warnings

import torch
from torch import Tensor

from lastlayer.testing._loss_values import LossSuite, targets_for


def the_derivatives_are_right(suite: LossSuite) -> None:
    if torch.float64 not in suite.dtypes:
        return
    scores = suite.settled_scores(3, 5).requires_grad_()
    for target in targets_for(suite, scores.detach()):
        for reduction in ("mean", "none"):

            def loss(x: Tensor, target: Tensor = target, reduction: str = reduction) -> Tensor:
                return suite.losses(x, target, reduction)

            rule = f"gradcheck in float64, reduction={reduction!r}"
            suite.runs(rule, scores, torch.autograd.gradcheck, loss, (scores,))
        rule = "gradgradcheck in float64"
        suite.runs(rule, scores, torch.autograd.gradgradcheck, loss, (scores,))


def the_hessian_is_the_jacobian_of_the_map(suite: LossSuite) -> None:
    if suite.map is None or torch.float64 not in suite.dtypes:
        return
    rule = "the Hessian of the loss is the Jacobian of the map"
    # Several rows: where one class has it all there is nothing to compare.
    for row in suite.settled_scores(8):
        jacobian = torch.autograd.functional.jacobian(suite.map, row)
        for target in targets_for(suite, row):
            hessian = torch.autograd.functional.hessian(
                lambda x, target=target: suite.losses(x, target, "sum"), row
            )
            suite.close(rule, hessian, jacobian, 1e-8, row)


def compiling_changes_nothing(suite: LossSuite, backend: str) -> None:
    rule = f"torch.compile(fullgraph=True, backend={backend!r}) with gradient"
    scores = suite.settled_scores(4).requires_grad_()
    for target in targets_for(suite, scores.detach()):
        torch.compiler.reset()
        compiled = torch.compile(
            lambda x, y: suite.losses(x, y, "mean"), fullgraph=True, backend=backend
        )
        with warnings.catch_warnings(action="ignore"):  # torch's own, while it traces
            loss = suite.runs(rule, scores, compiled, scores, target)
            (gradient,) = torch.autograd.grad(loss, scores)
        plain = suite.losses(scores, target, "mean")
        suite.close(rule, loss, plain, suite.same, scores)
        (expected,) = torch.autograd.grad(plain, scores)
        suite.close(f"{rule}: its gradient", gradient, expected, suite.same, scores)


def vmap_is_a_loop(suite: LossSuite) -> None:
    scores = suite.settled_scores(6).reshape(2, 3, -1)
    for target in targets_for(suite, scores):
        rule = "torch.func.vmap is a loop"
        mapped = suite.runs(rule, scores, torch.func.vmap(suite.losses), scores, target)
        loop = torch.stack([suite.losses(s, y) for s, y in zip(scores, target, strict=True)])
        suite.close(rule, mapped, loop, suite.same, scores)
        rule = "torch.func.vmap of the gradient is a loop"

        def total(x: Tensor, y: Tensor) -> Tensor:
            return suite.losses(x, y, "sum")

        gradients = suite.runs(
            rule, scores, torch.func.vmap(torch.func.grad(total)), scores, target
        )
        suite.close(rule, gradients, suite.gradient(scores, target), suite.same, scores)


def autocast_works(suite: LossSuite) -> None:
    rule = "autocast to bfloat16"
    scores = suite.settled_scores(4).float()
    target = suite.integers(scores.shape[-1], 4)

    def run() -> tuple[Tensor, Tensor]:
        with torch.autocast(suite.device.type, dtype=torch.bfloat16):
            return suite.losses(scores, target), suite.gradient(scores, target)

    losses, gradient = suite.runs(rule, scores, run)
    suite.close(rule, losses, suite.losses(scores, target), 5e-2, scores)
    suite.close(f"{rule}: its gradient", gradient, suite.gradient(scores, target), 2e-2, scores)
