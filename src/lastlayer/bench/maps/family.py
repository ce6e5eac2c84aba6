"""How maps are drawn, verified, called and judged."""

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lastlayer.bench import timing
from lastlayer.bench.cases import Call, Family, Measured, Method
from lastlayer.bench.maps import cases, tables
from lastlayer.bench.maps.cases import MapCase
from lastlayer.bench.maps.record import MapRecord
from lastlayer.bench.maps.verify import (
    MapVerdict,
    judge,
    largest,
    sample_rows,
    verify_gradient,
    verify_probabilities,
)
from lastlayer.bench.timing import Thunk, Timer


class Maps(Family[MapCase, MapVerdict, MapRecord]):
    """The family of maps from scores to probabilities over the last dimension.

    Inputs are the scores and, in the direction forward+backward, the gradient of the result.
    """

    name = "maps"
    record = MapRecord

    def draw(self, case: MapCase, device: torch.device, seed: int) -> tuple[Tensor, ...]:
        """Scores as scale · N(0, 1), and for backward a gradient as N(0, 1)."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal() -> Tensor:
            return torch.randn(case.shape, generator=generator, device=device)

        scores = normal().mul_(case.scale).to(case.torch_dtype)
        return (scores, normal().to(case.torch_dtype)) if case.backward else (scores,)

    def verify(
        self, case: MapCase, method: Method, call: Call, inputs: tuple[Tensor, ...]
    ) -> MapVerdict:
        """Compare a sample of rows with the float64 reference, and all row sums with 1."""

        def truth(scores: Tensor) -> Tensor:
            return cases.truth(method.computes, scores)

        if case.backward:
            return verify_gradient(call, truth, *inputs)
        if method.variant:
            return _verify_support(call, truth, *inputs)
        if method.computes == cases.TOPK:
            return verify_probabilities(call, _topk_truth, *inputs)
        return verify_probabilities(call, lambda scores, _: truth(scores), *inputs)

    def thunk(self, call: Call, sets: list[tuple[Tensor, ...]]) -> Thunk:
        """The map, and its gradient where that is part of the work."""
        if len(sets[0]) == 1:
            rotation = itertools.cycle(sets)
            return lambda: call(*next(rotation))
        leaves = itertools.cycle([(scores.detach().requires_grad_(), up) for scores, up in sets])

        def forward_and_backward() -> tuple[Tensor, ...]:
            leaf, cotangent = next(leaves)
            return torch.autograd.grad(call(leaf), leaf, cotangent)

        return forward_and_backward

    def limit(self, device: torch.device, timer: Timer, *, quick: bool) -> float:
        """The bandwidth of a copy."""
        return timing.copy_tb_per_s(device, _copy_bytes(device, quick=quick), timer)

    def in_words(self, limit: float) -> str:
        """The limit for the terminal."""
        return tables.limit(limit)

    def details(
        self, case: MapCase, method: Method, measured: Measured[MapVerdict]
    ) -> dict[str, Any]:
        """The bytes that had to move and how fast they did."""
        moved = _bytes_moved(case, method)
        speed, verdict = measured.tera_per_s(moved), measured.verdict
        return {
            "scale": case.scale,
            "bytes": moved,
            "tb_per_s": speed,
            "copy_tb_per_s": measured.limit,
            "fraction_of_copy": speed / measured.limit if speed else None,
            "ratio_to_softmax": measured.ratio_to_baseline,
            "error": verdict.error if verdict else None,
            "row_sum_error": verdict.row_sum_error if verdict else None,
        }


def _copy_bytes(device: torch.device, *, quick: bool) -> int:
    if device.type == "cuda":
        return 2**30 if quick else 2**32
    return 2**26 if quick else 2**28


def _bytes_moved(case: MapCase, method: Method) -> int:
    """Forward reads and writes a matrix; backward reads two more and writes one."""
    rows, n = case.shape
    size = case.torch_dtype.itemsize
    if method.variant:
        slots = cases.MAX_SUPPORT * (size + torch.int64.itemsize) + torch.int64.itemsize
        return rows * (n * size + slots)
    return rows * n * size * (5 if case.backward else 2)


def _topk_truth(scores: Tensor, got: Tensor) -> Tensor:
    """The reference, except that of scores tied for the last place any may be taken."""
    exact = cases.truth(cases.TOPK, scores)
    last = scores.topk(cases.K).values[..., -1:]
    value_of_last = exact.masked_fill(scores != last, 0).amax(-1, keepdim=True)
    nearest = torch.where(got > value_of_last / 2, value_of_last, 0.0)
    return torch.where(scores == last, nearest, exact)


def _verify_support(call: Call, truth: Call, scores: Tensor) -> MapVerdict:
    """Scatter the compact result back into rows, and compare those."""
    support = call(scores)
    fits = support.size <= cases.MAX_SUPPORT
    sum_error = largest(support.values.sum(-1, dtype=torch.float64)[fits] - 1)
    rows = sample_rows(scores)
    exact = truth(scores[rows].double())
    dense = torch.zeros_like(exact)
    # Padding has index 0 and value 0: adding leaves a real entry at index 0 alone.
    dense.scatter_add_(-1, support.indices[rows], support.values[rows].double())
    verdict = judge(largest((dense - exact)[fits[rows]]), sum_error, scores.dtype, gradient=False)
    clearly_positive = (exact > 1e-6).sum(-1)
    if verdict.ok and bool((support.size[rows] < clearly_positive).any()):
        return replace(verdict, reason="sizes smaller than the support")
    if verdict.ok and not bool(fits.any()):
        return replace(verdict, reason="no row's support fits, so nothing was verified")
    return verdict
