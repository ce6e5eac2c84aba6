"""The goals that heads are held to."""

from collections.abc import Iterator

from targets import Results, Target, judge, times

from lastlayer.bench.heads import top
from lastlayer.bench.heads.cases import CPU_SIZES, CUDA_SIZES, STEP, TOP, TREES
from lastlayer.bench.heads.entries import ADAPTIVE, ADAPTIVE_25, ADAPTIVE_50, HUFFMAN, SAMPLED
from lastlayer.bench.heads.record import HeadRecord
from lastlayer.bench.table import milliseconds

# How many times faster than linear + cross_entropy on a CPU, and than linear + topk.
FASTER = {HUFFMAN: 60.0, ADAPTIVE: 12.0, ADAPTIVE_50: 12.0, SAMPLED: 40.0}
TOP_FASTER = 50.0
# Milliseconds of a step with a million classes on an H200.
MOST_MS = {HUFFMAN: 0.6, ADAPTIVE: 6.0, ADAPTIVE_25: 6.0, SAMPLED: 0.8}
# And of building a tree of a million classes on a CPU.
MOST_BUILDING_MS = 2000.0


def heads_targets(results: Results[HeadRecord]) -> list[Target]:
    """Every goal for this kind of device."""
    if results.last.device_type == "cpu":
        return [*_cpu_targets(results)]
    return [*_cuda_targets(results)]


def _find(
    results: Results[HeadRecord], section: str, shape: tuple[int, ...], method: str
) -> HeadRecord | None:
    """The one record of one of ours in a case."""
    for r in results.records:
        if r.is_ours and (r.section, r.shape, r.method) == (section, shape, method):
            return r
    return None


def _where(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


def _faster(found: HeadRecord | None, goal: str, where: str, least: float) -> Target:
    return judge(
        goal, where, [found], lambda r: r.times_faster, lambda value: value >= least, times
    )


def _at_most(found: HeadRecord | None, goal: str, where: str, most: float) -> Target:
    return judge(
        goal,
        where,
        [found],
        lambda r: r.median_ms,
        lambda value: value <= most,
        lambda value: f"{milliseconds(value)} ms",
    )


def _cpu_targets(results: Results[HeadRecord]) -> Iterator[Target]:
    for shape in CPU_SIZES.steps:
        for name, least in FASTER.items():
            goal = f"{name}: at least {least:g} times faster than linear + cross_entropy"
            yield _faster(_find(results, STEP, shape, name), goal, _where(shape), least)
    for spread in top.SPREADS:
        name = top.named(top.HIERARCHICAL, spread)
        goal = f"top {top.K}, {name}: at least {TOP_FASTER:g} times faster than linear + topk"
        found = _find(results, TOP, CPU_SIZES.top, name)
        yield _faster(found, goal, _where(CPU_SIZES.top), TOP_FASTER)
    for classes in CPU_SIZES.trees:
        goal = f"trees.huffman: at most {MOST_BUILDING_MS / 1000:g} s"
        found = _find(results, TREES, (classes,), "huffman")
        yield _at_most(found, goal, f"{classes:,} classes", MOST_BUILDING_MS)


def _cuda_targets(results: Results[HeadRecord]) -> Iterator[Target]:
    shape = CUDA_SIZES.steps[-1]
    for name, most in MOST_MS.items():
        found = _find(results, STEP, shape, name)
        yield _at_most(found, f"{name}: at most {most:g} ms", _where(shape), most)
    for spread in top.SPREADS:
        name = top.named(top.HIERARCHICAL, spread)
        goal = f"top {top.K}, {name}: faster than linear + topk"
        yield judge(
            goal,
            _where(CUDA_SIZES.top),
            [_find(results, TOP, CUDA_SIZES.top, name)],
            lambda r: r.times_faster,
            lambda value: value > 1,
            times,
        )
