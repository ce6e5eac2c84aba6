"""``lastlayer plan --ranks``: the cost of heads over several processes, computed, not measured.

Heads are built on the meta device, so that a billion classes take no memory. Arguments that usually
depend on data, such as cutoffs and samplers, have fixed defaults here, unless the spec sets them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lastlayer.heads import AdaptiveSoftmax, CharCNNSoftmax, DifferentiatedSoftmax, Head
from lastlayer.heads.recipes import ClassData
from lastlayer.lab.costs import LABELS
from lastlayer.lab.errors import LabError, SpecError
from lastlayer.lab.options import CLASS_TASKS, one_of, whole
from lastlayer.lab.specs import HeadSpec, parse_specs
from lastlayer.parallel import LayoutCost, Plan, plan
from lastlayer.parallel.communication import as_bytes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Limit of classes for trees, spellings and tables of counts, which have an entry per class.
MOST_TABLES = 1_000_000
_TITLES = {"replicate": "replicate (DDP)", "fsdp": "FSDP2", "class-parallel": "class-parallel"}


@dataclass(frozen=True)
class ProcessPlan:
    """The plan of a head, or the reason why there is none."""

    head: str
    plan: Plan | None = None
    reason: str = ""

    def as_json(self) -> dict[str, Any]:
        """For JSON."""
        if self.plan is None:
            return {"head": self.head, "reason": self.reason}
        made = self.plan.as_json()
        return {"head": self.head, "class": made.pop("head"), **made}


class _Sizes(ClassData):
    """Class data of equally frequent classes; counts are refused for too many classes."""

    def positive_counts(self) -> Any:
        _check_table(self.n_classes)
        return super().positive_counts()


def _check_table(classes: int) -> None:
    if classes > MOST_TABLES:
        raise SpecError(
            f"expected at most {MOST_TABLES:,} classes for a table with an entry per class, "
            f"got {classes:,}"
        )


def plan_processes(
    classes: int,
    hidden: int,
    rows: int,
    ranks: int,
    *,
    task: str = "lm",
    heads: Sequence[str] = (),
    device: str = "cuda",
    dtype: str = "float32",
    **given: Any,
) -> list[ProcessPlan]:
    """Compute the cost of heads over ``ranks`` processes with ``rows`` targets per step each.

    Without ``heads``, of the full softmax, or of ZLPR for several labels. Other arguments are
    passed to :func:`lastlayer.parallel.plan`.
    """
    one_of("--dtype", dtype, tuple(DTYPES))
    one_of("--task", task, CLASS_TASKS)
    whole("--classes", classes, least=2)
    for option, value in {"--hidden": hidden, "--rows": rows, "--ranks": ranks}.items():
        whole(option, value)
    specs = parse_specs(list(heads) or ["zlpr" if task == "multilabel" else "full"], task=task)
    found = []
    for spec in specs:
        try:
            head = _on_meta(spec, hidden, classes, DTYPES[dtype])
        except (SpecError, ValueError, TypeError) as error:
            text = str(error).removeprefix(f"--head {spec.text}: ")
            found.append(ProcessPlan(spec.text, reason=text))
            continue
        labels = LABELS if task == "multilabel" else 1
        try:
            made = plan(head, ranks, rows=rows, targets=labels, device=device, **given)
        except (ValueError, TypeError) as error:
            raise LabError(f"--{error}") from error
        found.append(ProcessPlan(spec.text, made))
    return found


def _on_meta(spec: HeadSpec, hidden: int, classes: int, dtype: torch.dtype) -> Head:
    """Build the head of a spec on the meta device."""
    cls, recipe, given = spec.made_by.cls, spec.made_by.recipe, dict(spec.arguments)
    factory = {"device": "meta", "dtype": dtype}
    if "sparse" in recipe.defaults:
        given.setdefault("sparse", False)
    if cls is AdaptiveSoftmax:
        given.setdefault("cutoffs", [classes // 50, classes // 5] if classes >= 100 else [1])
        made: Head = cls(hidden, n_classes=classes, **{**recipe.defaults, **given}, **factory)
        return made
    if cls is DifferentiatedSoftmax and "bands" not in given:
        if hidden < 2:
            raise SpecError(f"expected a hidden size of at least 2 for two bands, got {hidden}")
        top, narrow = max(1, classes // 10), max(1, hidden // 4)
        given.pop("share", None)
        given["bands"] = [(top, hidden - narrow), (classes - top, narrow)]
    if "sampler" in recipe.extra:
        given.setdefault("sampler", "log_uniform")
    # A broadcast view of one value takes no memory.
    words: list[str] = []
    if cls is CharCNNSoftmax:
        _check_table(classes)
        words = [f"{i:07d}" for i in range(classes)]
    data = _Sizes(hidden, np.broadcast_to(np.int64(1), (classes,)), words)
    built: Head = cls(**recipe.arguments(cls, data, given), **factory)
    return built


def render_processes(found: Sequence[ProcessPlan], console: Console) -> None:
    """Print a table per head with its layouts, the recommended one and why."""
    for each in found:
        if each.plan is None:
            console.print(Text(f"{each.head}: not planned: {each.reason}"), soft_wrap=True)
            continue
        console.print(Text(f"{each.head}: {each.plan.title()}", style="bold"), soft_wrap=True)
        console.print(_table(each.plan))
        for cost in (cost for cost in each.plan.layouts if cost.refused):
            text = f"{_TITLES[cost.name]} is not possible: {cost.refused}"
            console.print(Text(text), soft_wrap=True)
        told = f"Take {_TITLES[each.plan.layout]}: {each.plan.why}."
        console.print(Text(told), soft_wrap=True)
        console.print()
    text = (
        "Computed, not measured, per process: tables are parameters, gradients and the state of "
        "the optimiser; beside are scores and data received from other processes. Traffic is the "
        "data that a process receives per step of the head, calls how often it communicates."
    )
    console.print(Text(text, style="dim"))


def _table(planned: Plan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("layout", no_wrap=True)
    timed = any(cost.seconds is not None for cost in planned.layouts)
    for name in ("tables", "beside", "memory", "traffic", "calls", *(["time"] if timed else [])):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for cost in planned.layouts:
        if not cost.refused:
            table.add_row(*_cells(cost), style="bold" if cost.name == planned.layout else None)
    return table


def _cells(cost: LayoutCost) -> list[str]:
    memory = cost.memory
    tables = memory.weights + memory.gradients + memory.optimizer
    sizes = tables, memory.gathered + memory.scores, memory.total, cost.nbytes
    fits = {None: "", True: "fits", False: "too large"}[cost.fits]
    time = [] if cost.seconds is None else [_as_time(cost.seconds)]
    return [_TITLES[cost.name], *map(as_bytes, sizes), f"{cost.rounds:,}", *time, fits]


def _as_time(seconds: float) -> str:
    if seconds >= 99.95:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
