"""Rules on the derivatives of a map, and on how it works with the rest of torch."""

import warnings

import torch

from lastlayer.testing._map_values import MapSuite
from lastlayer.testing._suite import SAME_TOLERANCE


def the_gradient_is_right(suite: MapSuite) -> None:
    scores = suite.settled(suite.map, 3, 6).requires_grad_()
    rule = "gradcheck in float64"
    suite.runs(rule, scores, torch.autograd.gradcheck, suite.map, (scores,))


def the_second_derivative_is_right(suite: MapSuite) -> None:
    scores = suite.settled(suite.map, 2, 5).requires_grad_()
    rule = "gradgradcheck in float64"
    suite.runs(rule, scores, torch.autograd.gradgradcheck, suite.map, (scores,))


def lower_precision_has_the_same_gradient(suite: MapSuite) -> None:
    exact = suite.settled(suite.map, 4, 33).requires_grad_()
    upstream = suite.normal(4, 33)
    (expected,) = torch.autograd.grad(suite.map(exact), exact, upstream)
    for dtype in suite.dtypes:
        if torch.finfo(dtype).eps > 1e-6:
            continue  # Rounding the scores to a half may already change the support.
        scores = exact.detach().to(dtype).requires_grad_()
        (gradient,) = torch.autograd.grad(suite.map(scores), scores, upstream.to(dtype))
        rule = "the gradient has the dtype of the scores"
        suite.require(rule, gradient.dtype == dtype, f"got {gradient.dtype}", scores)
        rule = f"the gradient in {dtype} is that in float64"
        suite.close(rule, gradient, expected, 10 * SAME_TOLERANCE[dtype], scores)


def compiling_changes_nothing(suite: MapSuite, backend: str) -> None:
    rule = f"torch.compile(fullgraph=True, backend={backend!r}) with gradient"
    torch.compiler.reset()
    compiled = torch.compile(suite.map, fullgraph=True, backend=backend)
    for dtype in suite.dtypes:
        if dtype not in (torch.float32, torch.float64):
            continue
        scores = suite.settled(suite.map, 3, 11).to(dtype).requires_grad_()
        upstream = suite.normal(3, 11, dtype=dtype)
        with warnings.catch_warnings(action="ignore"):  # torch's own, while it traces
            probs = suite.runs(rule, scores, compiled, scores)
            (gradient,) = torch.autograd.grad(probs, scores, upstream)
        suite.close(rule, probs, suite.map(scores), SAME_TOLERANCE[dtype], scores)
        (expected,) = torch.autograd.grad(suite.map(scores), scores, upstream)
        suite.close(f"{rule}: its gradient", gradient, expected, SAME_TOLERANCE[dtype], scores)


def vmap_is_a_loop(suite: MapSuite) -> None:
    scores = suite.settled(suite.map, 12, 6).reshape(4, 3, 6)
    for in_dim in (0, 1):
        rule = f"torch.func.vmap(in_dims={in_dim}) is a loop"
        mapped = suite.runs(rule, scores, torch.func.vmap(suite.map, in_dims=in_dim), scores)
        loop = torch.stack([suite.map(part) for part in scores.unbind(in_dim)])
        suite.close(rule, mapped, loop, suite.same, scores)
    rule = "torch.func.jacrev is the Jacobian of a loop"
    row = scores[0, 0]
    jacobian = suite.runs(rule, row, torch.func.jacrev(suite.map), row)
    expected = torch.autograd.functional.jacobian(suite.map, row)
    suite.close(rule, jacobian, expected, suite.same, row)


def autocast_works(suite: MapSuite) -> None:
    rule = "autocast to bfloat16"
    scores = suite.settled(suite.map, 3, 9).float().requires_grad_()

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(suite.device.type, dtype=torch.bfloat16):
            probs = suite.map(scores)
            (gradient,) = torch.autograd.grad(probs.float().square().sum(), scores)
        return probs, gradient

    probs, gradient = suite.runs(rule, scores, run)
    plain = suite.map(scores)
    suite.close(rule, probs, plain, 8e-3, scores)
    (expected,) = torch.autograd.grad(plain.square().sum(), scores)
    suite.close(f"{rule}: its gradient", gradient, expected, 5e-2, scores)
