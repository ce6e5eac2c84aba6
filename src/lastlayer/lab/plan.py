"""Time and memory of a training step of each head for a size, without training."""

from collections.abc import Callable
from typing import Any, NamedTuple

from lastlayer.lab._machine import Machine, measure
from lastlayer.lab._plan_view import PlannedHead, render_plan
from lastlayer.lab.options import TASKS

__all__ = ["Machine", "PlannedHead", "measure", "plan", "render_plan"]

# How far off a time may be, as a factor. The recorded steps of a CPU stay within the first one, but
# the counts behind the times were fitted to these steps. Entmax hangs on how sparse rows are,
# spelling on the length of words, a proposal that learns on what it has learned, and of top-k and
# labels few steps are behind the weights. Those of a GPU were not fitted: its times are the same
# counts at its own rates.
FACTOR, WIDER, ON_CUDA = 3.0, 4.0, 2.0
# What the lab draws, and word2vec.
SAMPLES, FEW_SAMPLES, BEST = 512, 64, 100
# Of importance sampling whose proposal learns: the sample size that it asks for, and a block.
ESS, BLOCK = 50.0, 50
DEVICES = ("cpu", "cuda")
# Trees and bands are made for the frequencies of all classes, in some 150 bytes each.
MOST_CLASSES = 20_000_000


class _Entry(NamedTuple):
    head: str
    work: Callable[[Any], tuple[Any, str]]
    factor: float = FACTOR


def plan(
    classes: int,
    hidden: int,
    rows: int,
    device: str = "cpu",
    *,
    task: str = "lm",
    machine: Machine | None = None,
) -> list[PlannedHead]:
    """What each head costs, the fastest first.

    The machine is measured (about two seconds), and each head's cost is the sum of what it
    computes and moves at these rates. Frequencies follow Zipf's law, one over the rank. float32 on
    a CPU, bfloat16 on a GPU.

    Args:
        classes: V.
        hidden: the width of hidden states.
        rows: targets in a step: batch times length.
        device: ``"cpu"`` or ``"cuda"``.
        task: ``"lm"`` for heads that choose one class, ``"multilabel"`` for those of many labels.
        machine: what :func:`measure` gave, to plan for several sizes, or for another machine.
    """
    for name, value, least in (("classes", classes, 2), ("hidden", hidden, 1), ("rows", rows, 1)):
        _check_size(name, value, least)
    if classes > MOST_CLASSES:
        raise ValueError(f"classes: expected at most {MOST_CLASSES:,}, got {classes:,}")
    for name, text, known in (("device", device, DEVICES), ("task", task, TASKS)):
        if text not in known:
            raise ValueError(f"{name}: expected one of {known}, got {text!r}")
    from lastlayer.lab._plan_costs import Problem, zipf_shares

    machine = machine or measure(device)
    problem = Problem(rows, hidden, zipf_shares(classes), machine.number, device)
    entries = _label_entries() if task == "multilabel" else _entries()
    made = [_planned(entry, problem, machine) for entry in entries]
    return sorted(made, key=lambda each: each.ms)


def _check_size(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")


def _planned(entry: _Entry, problem: Any, machine: Machine) -> PlannedHead:
    work, settings = entry.work(problem)
    ms = 1e3 * work.seconds(machine)
    factor = entry.factor * (ON_CUDA if machine.device == "cuda" else 1.0)
    return PlannedHead(
        head=entry.head,
        settings=settings,
        ms=ms,
        low_ms=ms / factor,
        high_ms=ms * factor,
        flops=work.flops,
        parameters=work.parameters,
        parameter_bytes=work.parameters * machine.number,
        gradient_bytes=round(work.gradient),
        held_bytes=round(work.held),
        adam_bytes=work.parameters * 8,
    )


def _entries() -> list[_Entry]:
    from lastlayer import trees
    from lastlayer.heads import bands_from_counts, cutoffs_from_counts
    from lastlayer.lab import _plan_costs as costs

    def adaptive(p: costs.Problem) -> tuple[costs.Work, str]:
        cutoffs = cutoffs_from_counts(p.shares, p.width, cost=p.device)
        words = ", ".join(f"{each:,}" for each in cutoffs) or "none"
        return costs.adaptive(p, cutoffs), f"cutoffs {words}"

    def differentiated(p: costs.Problem) -> tuple[costs.Work, str]:
        layout = bands_from_counts(p.shares, p.width, max(p.classes, p.classes * p.width // 2))
        words = ", ".join(f"{classes:,} of {width}" for classes, width in layout)
        return costs.bands(p, layout), f"bands {words}"

    def tree(make: Callable[[Any], trees.Tree]) -> Callable[[Any], tuple[costs.Work, str]]:
        def work(p: costs.Problem) -> tuple[costs.Work, str]:
            made = make(p.shares)
            steps = made.expected_depth(p.shares)
            return costs.tree_paths(p, made), f"{steps:.1f} choices a target"

        return work

    def drawn(most: int, **options: float) -> Callable[[Any], tuple[costs.Work, str]]:
        def work(p: costs.Problem) -> tuple[costs.Work, str]:
            samples = min(most, max(1, p.classes // 4))
            return costs.drawn(p, samples, **options), f"{samples} drawn"

        return work

    def drawn_alone(p: costs.Problem) -> tuple[costs.Work, str]:
        draws = costs.draws_at_first(p, ESS, BLOCK)
        return costs.drawn_alone(p, draws, BLOCK), f"{draws} drawn a row: at first"

    return [
        _Entry("full", lambda p: (costs.flat(p), "")),
        _Entry("self_normalized", lambda p: (costs.flat(p), "")),
        _Entry(
            "entmax",
            lambda p: (costs.flat(p, per_score=costs.ENTMAX), "flat rows: at first"),
            WIDER,
        ),
        _Entry("topk", lambda p: (costs.best_of(p, BEST), f"k {min(BEST, p.classes)}"), WIDER),
        _Entry("hierarchical", tree(trees.huffman)),
        _Entry("hierarchical:tree=two_level", tree(trees.two_level)),
        _Entry("adaptive", adaptive),
        _Entry("differentiated", differentiated),
        _Entry("sampled", drawn(SAMPLES)),
        _Entry("importance", drawn(SAMPLES)),
        _Entry("adaptive_importance", drawn_alone, WIDER),
        _Entry("nce", drawn(SAMPLES, per_score=costs.LOGISTIC)),
        _Entry("negative", drawn(FEW_SAMPLES, per_score=costs.LOGISTIC)),
        _Entry("char_cnn", lambda p: (costs.spelled(p), "words of 11 letters"), WIDER),
    ]


def _label_entries() -> list[_Entry]:
    from lastlayer.lab import _plan_costs as costs

    def labels(per_score: float) -> Callable[[Any], tuple[costs.Work, str]]:
        return lambda p: (costs.flat(p, per_score=per_score), "")

    return [
        _Entry("zlpr", labels(costs.LABELS), WIDER),
        _Entry("bce", labels(costs.LABELS), WIDER),
        _Entry("asymmetric", labels(costs.ASYMMETRIC), WIDER),
        _Entry("sparsemax_labels", labels(costs.SPARSE_LABELS), WIDER),
    ]
