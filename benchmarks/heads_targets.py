"""The goals that heads are held to."""

from collections.abc import Iterator

from targets import Results, Target, judge, times

from lastlayer.bench.heads import draws, top
from lastlayer.bench.heads.cases import CPU_SIZES, CUDA_SIZES, DRAWS, STEP, TOP, TREES
from lastlayer.bench.heads.entries import (
    ADAPTIVE,
    ADAPTIVE_25,
    ADAPTIVE_50,
    FULL,
    HUFFMAN,
    SAMPLED,
    UPDATED,
)
from lastlayer.bench.heads.record import HeadRecord
from lastlayer.bench.table import milliseconds

# How many times faster than linear + cross_entropy on a CPU, and than linear + topk.
FASTER = {HUFFMAN: 60.0, ADAPTIVE: 12.0, ADAPTIVE_50: 12.0, SAMPLED: 40.0}
TOP_FASTER = 50.0
# Milliseconds of a step with a million classes on an H200: of a replay where there is one.
MOST_MS = {HUFFMAN: 0.6, ADAPTIVE: 6.0, ADAPTIVE_25: 6.0, SAMPLED: 0.8, SAMPLED + UPDATED: 1.5}
# Megabytes that a sampled step holds there, and how many times faster it is than the full softmax.
MOST_SAMPLED_MB, SAMPLED_FASTER = 250.0, 40.0
# Of drawing by alias: how many times faster than multinomial on a CPU, and milliseconds on an H200.
DRAWN_FASTER, MOST_DRAWN_MS = 20.0, 0.02
# And of building a tree of a million classes on a CPU.
MOST_BUILDING_MS = 2000.0


def heads_targets(results: Results[HeadRecord]) -> list[Target]:
    """Every goal for this kind of device."""
    if results.last.device_type == "cpu":
        return [*_cpu_targets(results)]
    return [*_cuda_targets(results)]


def _find(
    results: Results[HeadRecord],
    section: str,
    shape: tuple[int, ...],
    method: str,
    *,
    ours: bool = True,
) -> HeadRecord | None:
    """The one record of one of ours in a case, or of what it is compared with."""
    for r in results.records:
        if r.is_ours == ours and (r.section, r.shape, r.method) == (section, shape, method):
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
        lambda r: r.device_ms,
        lambda value: value <= most,
        lambda value: f"{milliseconds(value)} ms{_how(found)}",
    )


def _how(found: HeadRecord | None) -> str:
    """Which of its two times was judged, where there are two."""
    return "" if found is None or found.replayed_ms is None else ", replayed"


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
    for classes in CPU_SIZES.draws:
        goal = f"{draws.ALIAS}: at least {DRAWN_FASTER:g} times faster than multinomial"
        found = _find(results, DRAWS, (classes,), draws.ALIAS)
        yield _faster(found, goal, f"{classes:,} classes", DRAWN_FASTER)
    for classes in CPU_SIZES.trees:
        goal = f"trees.huffman: at most {MOST_BUILDING_MS / 1000:g} s"
        found = _find(results, TREES, (classes,), "huffman")
        yield _at_most(found, goal, f"{classes:,} classes", MOST_BUILDING_MS)


def _times_faster(found: HeadRecord | None, beside: HeadRecord | None) -> float | None:
    """By replays where there are some."""
    if found is None or beside is None or not found.device_ms or beside.device_ms is None:
        return None
    return beside.device_ms / found.device_ms


def _cuda_targets(results: Results[HeadRecord]) -> Iterator[Target]:
    shape = CUDA_SIZES.steps[-1]
    for name, most in MOST_MS.items():
        found = _find(results, STEP, shape, name)
        yield _at_most(found, f"{name}: at most {most:g} ms", _where(shape), most)
    sampled, full = (_find(results, STEP, shape, name) for name in (SAMPLED, FULL))
    yield judge(
        f"{SAMPLED}: less than {MOST_SAMPLED_MB:g} MB",
        _where(shape),
        [sampled],
        lambda r: None if r.peak_bytes is None else r.peak_bytes / 1e6,
        lambda value: value < MOST_SAMPLED_MB,
        lambda value: f"{value:.0f} MB",
    )
    yield judge(
        f"{SAMPLED}: at least {SAMPLED_FASTER:g} times faster than {FULL}",
        _where(shape),
        [sampled],
        lambda r: _times_faster(r, full),
        lambda value: value >= SAMPLED_FASTER,
        times,
    )
    for classes in CUDA_SIZES.draws:
        goal = f"{draws.ALIAS}: at most {MOST_DRAWN_MS:g} ms for {draws.DRAWN:,} draws"
        found = _find(results, DRAWS, (classes,), draws.ALIAS)
        yield _at_most(found, goal, f"{classes:,} classes", MOST_DRAWN_MS)
    dense = _find(results, TOP, CUDA_SIZES.top, top.DENSE, ours=False)
    for spread in top.SPREADS:
        for kind in (top.HIERARCHICAL, top.ADAPTIVE):
            name = top.named(kind, spread)
            yield judge(
                f"top {top.K}, {name}: faster than linear + topk",
                _where(CUDA_SIZES.top),
                [_find(results, TOP, CUDA_SIZES.top, name)],
                lambda r: _times_faster(r, dense),
                lambda value: value > 1,
                times,
            )
