"""``lastlayer bench maps``: sparsemax, entmax and top-k softmax beside torch and the peers."""

from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from torch import Tensor

from lastlayer.bench import map_cases, plot, session, table
from lastlayer.bench.cases import Call, Case, Method
from lastlayer.bench.verify import (
    Verdict,
    judge,
    largest,
    sample_rows,
    verify_gradient,
    verify_probabilities,
)


class Maps:
    """The family of maps from scores to probabilities over the last dimension."""

    name = "maps"
    baseline = "softmax"

    def draw(self, case: Case, device: torch.device, seed: int) -> tuple[Tensor, ...]:
        """Scores as scale · N(0, 1), and for backward a gradient as N(0, 1)."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal() -> Tensor:
            return torch.randn(case.shape, generator=generator, device=device)

        scores = normal().mul_(case.scale).to(case.torch_dtype)
        return (scores, normal().to(case.torch_dtype)) if case.backward else (scores,)

    def verify(self, case: Case, method: Method, call: Call, inputs: tuple[Tensor, ...]) -> Verdict:
        """Compare a sample of rows with the float64 reference, and all row sums with 1."""

        def truth(scores: Tensor) -> Tensor:
            return map_cases.truth(method.computes, scores)

        if case.backward:
            return verify_gradient(call, truth, *inputs)
        if method.compact:
            return _verify_support(call, truth, *inputs)
        if method.computes == map_cases.TOPK:
            return verify_probabilities(call, _topk_truth, *inputs)
        return verify_probabilities(call, lambda scores, _: truth(scores), *inputs)

    def bytes_moved(self, case: Case, method: Method) -> int:
        """Forward reads and writes a matrix; backward reads two more and writes one."""
        rows, n = case.shape
        size = case.torch_dtype.itemsize
        if method.compact:
            slots = map_cases.MAX_SUPPORT * (size + torch.int64.itemsize) + torch.int64.itemsize
            return rows * (n * size + slots)
        return rows * n * size * (5 if case.backward else 2)


def _topk_truth(scores: Tensor, got: Tensor) -> Tensor:
    """The reference, except that of scores tied for the last place any may be taken."""
    exact = map_cases.truth(map_cases.TOPK, scores)
    last = scores.topk(map_cases.K).values[..., -1:]
    value_of_last = exact.masked_fill(scores != last, 0).amax(-1, keepdim=True)
    nearest = torch.where(got > value_of_last / 2, value_of_last, 0.0)
    return torch.where(scores == last, nearest, exact)


def _verify_support(call: Call, truth: Call, scores: Tensor) -> Verdict:
    """Scatter the compact result back into rows, and compare those."""
    support = call(scores)
    fits = support.size <= map_cases.MAX_SUPPORT
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


def run(
    *,
    device: str,
    dtypes: tuple[str, ...],
    quick: bool,
    peers: bool,
    json_path: Path | None,
    plot_path: Path | None,
    out: Console,
) -> int:
    """Verify every map, time it beside torch and the peers, and print one table.

    Args:
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
        dtypes: names of torch dtypes; none means those that the device is judged by.
        quick: few shapes and repeats: seconds instead of minutes.
        peers: compare with the packages of the extra ``peers`` that are installed.
        json_path: a file that every measurement is appended to as soon as it is made.
        plot_path: where a PNG of bandwidth against width goes.
        out: where the table goes; a terminal gets a progress bar too.

    Returns:
        0, or 1 when a result of ours was wrong, or 2 when it could not be run as asked.
    """
    problem = session.problem(device, dtypes, json_path, plot_path)
    if problem is not None:
        out.print(f"[bold red]error:[/] {escape(problem)}", highlight=False, soft_wrap=True)
        return 2
    place = torch.device(device)
    cases = map_cases.plan(
        place.type, dtypes, quick=quick, peers=peers, widths=not quick or plot_path is not None
    )
    bench = session.measure(Maps(), cases, device=place, quick=quick, json_path=json_path, out=out)
    of = {name: [r for r in bench.records if r.section == name] for name in map_cases.SECTIONS}
    tables = [table.comparison(of["shapes"], "maps: verified, then timed")]
    if of["scales"]:
        tables.append(table.by_scale(of["scales"]))
    if of["widths"]:
        tables.append(table.by_width(of["widths"]))
    session.show(bench, tables, out)
    if plot_path is not None:
        plot.bandwidth_against_width(bench.records, plot_path)
        out.print(f"plot: {escape(str(plot_path))}", highlight=False, soft_wrap=True)
    return 1 if bench.failures else 0
