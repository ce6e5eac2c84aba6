"""The framework of the studies: options, data, seeds, timing, JSON, tables, plots and the page.

A study returns its measurements as JSON values. Its tables, plot and verdict are computed from
these values only, so docs/results.md is generated from the saved files.
"""

import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from benchmarks import record
from benchmarks.plot import INSTALL_COMMAND, is_available
from benchmarks.table import Grid, console
from lastlayer.lab import machine
from lastlayer.lab.statistics import estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "benchmarks" / "results" / "studies"
DOCS = ROOT / "docs"
DATA_VARIABLE = "LASTLAYER_DATA"
RECALLED = "†"
RECALLED_NOTE = f"{RECALLED} recalled: quoted from memory, not checked against the paper."

# In the order of the page; the study `a-name` is in a_name.py.
STUDIES = (
    "huffman-bits", "trees", "frequency-bands", "cnn-softmax", "importance-sampling", "nce",
    "estimators", "label-proportions", "multilabel-table", "zlpr-imbalance", "globalpointer",
    "nli-attention", "recommend", "topk-softmax",
)  # fmt: skip


class Options(NamedTuple):
    """Options of a run.

    Attributes:
        data: folder of the data sets, or None.
        seeds: one run per seed.
        quick: whether to run a small version, which only shows that the study works.
        device: device of the run.
    """

    data: Path | None
    seeds: tuple[int, ...]
    quick: bool
    device: torch.device

    def path(self, name: str) -> Path:
        """Path of a file or folder of the data."""
        if self.data is None:
            raise ValueError(f"--data: expected a folder with {name}, got none")
        return self.data / name


class Needed(NamedTuple):
    """A file that a study reads.

    Attributes:
        path: path in the data folder.
        source: what to download.
    """

    path: str
    source: str


class Verdict(NamedTuple):
    """Whether the published pattern "holds", "holds in part" or "does not hold"; and why."""

    word: str
    why: str

    def __str__(self) -> str:
        return f"The pattern {self.word}. {self.why}"


@dataclass(frozen=True)
class Study:
    """A published result and its replication.

    Attributes:
        title: title in one line.
        claim: the published result, its source, and whether that was checked.
        protocol: how it is measured here.
        measure: runs the study and returns JSON values.
        grids: tables of measured and published values.
        draw: draws the plot on an empty figure.
        verdict: whether the pattern holds.
        needs: required files.
        size: size of the plot in inches.
        seeds: default number of seeds.
        cpu_only: whether it only runs on a CPU.
    """

    title: str
    claim: str
    protocol: str
    measure: Callable[[Options], dict[str, Any]]
    grids: Callable[[Mapping[str, Any]], list[Grid]]
    draw: Callable[[Mapping[str, Any], "Figure"], None]
    verdict: Callable[[Mapping[str, Any]], Verdict]
    needs: tuple[Needed, ...] = ()
    size: tuple[float, float] = (9.0, 3.4)
    seeds: int = 3
    cpu_only: bool = False


def load(name: str) -> Study:
    """The study of that name.

    Raises:
        ValueError: if there is none.
    """
    if name not in STUDIES:
        raise ValueError(f"name: expected one of {', '.join(STUDIES)}, got {name!r}")
    study: Study = import_module(f"studies.{name.replace('-', '_')}").STUDY
    return study


def list_studies() -> str:
    """One line for each study."""
    width = max(map(len, STUDIES))
    return "\n".join(f"{name:<{width}}  {load(name).title}" for name in STUDIES)


def progress(text: str) -> None:
    """Print a progress line to stderr."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def data_folder(given: Path | None) -> Path | None:
    """The given folder, or else that of the environment variable LASTLAYER_DATA."""
    named = os.environ.get(DATA_VARIABLE)
    return given or (Path(named) if named else None)


def check_data(study: Study, folder: Path | None) -> None:
    """Check that all required files exist.

    Raises:
        ValueError: if not; the message lists what to download.
    """
    missing = [each for each in study.needs if folder is None or not (folder / each.path).exists()]
    if not missing:
        return
    where = f"'{folder}'" if folder else "no folder"
    wanted = "\n".join(f"  {each.path}: {each.source}" for each in missing)
    raise ValueError(
        f"--data: expected a folder with {len(missing)} more file(s), got {where}; download\n"
        f"{wanted}\ninto one folder under these names, and pass it with --data FOLDER or "
        f"{DATA_VARIABLE}=FOLDER"
    )


def run(name: str, options: Options, out: Path) -> Path:
    """Run a study, print its results, and write NAME.json and NAME.png at the end.

    Returns:
        The path of the JSON file.
    """
    study = load(name)
    check_data(study, options.data)
    if not is_available():
        raise ValueError(f"matplotlib: expected it for the plot, got none; {INSTALL_COMMAND}")
    wall, cpu = time.perf_counter(), time.process_time()
    found = study.measure(options)
    kept = {
        "study": name,
        "command": _command(name, options),
        "quick": options.quick,
        "seeds": list(options.seeds),
        "date": record.now(),
        "commit": record.commit(),
        "versions": machine.versions(),
        "machine": machine.device_record(options.device),
        "wall_seconds": round(time.perf_counter() - wall, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "load": machine.load_per_core(),
        "found": rounded(found),
    }
    picture = draw(study, kept["found"])
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.json"
    _write(path, (json.dumps(kept, ensure_ascii=False) + "\n").encode())
    _write(out / f"{name}.png", picture)
    show(study, kept)
    print(f"\nwrote {path} and {name}.png")
    return path


def _write(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(content)
    part.replace(path)


def _command(name: str, options: Options) -> str:
    words = ["python", "-m", "studies", name, "--seeds", str(len(options.seeds))]
    words += ["--device", options.device.type, *(["--quick"] if options.quick else [])]
    return shlex.join([*words, "--data", "FOLDER"])


def show(study: Study, kept: Mapping[str, Any]) -> None:
    """Print the tables and the verdict."""
    out = console()
    print(f"{study.title}\n{study.claim}\n")
    grids = study.grids(kept["found"])
    for grid in grids:
        out.print(grid.rich())
    if _has_recalled(grids):
        print(RECALLED_NOTE)
    print(study.verdict(kept["found"]))
    if kept["quick"]:
        print("A quick version: it only shows that the study runs; its results mean nothing.")


def _has_recalled(grids: Sequence[Grid]) -> bool:
    return any(RECALLED in cell for grid in grids for row in grid.rows for cell in row)


def draw(study: Study, found: Mapping[str, Any]) -> bytes:
    """The plot as a reproducible PNG."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=study.size, dpi=110, layout="constrained")
        FigureCanvasAgg(figure)
        study.draw(found, figure)
        made = BytesIO()
        figure.savefig(made, format="png", metadata={"Software": None})
    return made.getvalue()


_STYLE: Any = {
    "axes.grid": True, "grid.alpha": 0.3, "axes.spines.right": False, "axes.spines.top": False,
    "font.size": 8, "axes.titlesize": 9, "legend.frameon": False,
}  # fmt: skip


def log_x(panel: "Axes") -> None:
    """A logarithmic x axis with labels at 1, 2 and 5 only, so that they do not overlap."""
    from matplotlib.ticker import LogLocator, NullFormatter

    panel.set_xscale("log")
    panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    panel.xaxis.set_major_formatter("{x:g}")
    panel.xaxis.set_minor_formatter(NullFormatter())


def rounded(value: Any) -> Any:
    """Values with six significant digits for JSON, which has no NaN or infinity."""
    if isinstance(value, Mapping):
        return {str(name): rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def spread(values: Sequence[float], digits: int = 2, *, scale: float = 1.0) -> str:
    """The mean over seeds ± half of its 95% confidence interval."""
    made = estimate([scale * each for each in values])
    if made is None:
        return "–"
    text = f"{made.mean:.{digits}f}"
    return text if made.high is None else f"{text} ± {made.high - made.mean:.{digits}f}"


def mean(values: Sequence[float]) -> float:
    """The mean over seeds."""
    return math.fsum(values) / len(values)


def write_page(kept: Path = KEPT, docs: Path = DOCS) -> list[Path]:
    """Write docs/results.md and its figures from full runs; returns the written paths."""
    sections, written, rows = list[str](), list[Path](), list[list[str]]()
    missing = [name for name in STUDIES if not (kept / f"{name}.json").is_file()]
    for name in (each for each in STUDIES if each not in missing):
        found = json.loads((kept / f"{name}.json").read_text(encoding="utf-8"))
        if found["quick"]:
            raise ValueError(f"{kept / name}.json: expected a full run, got a quick one; run again")
        picture = docs / "pictures" / f"results-{name}.png"
        study = load(name)
        _write(picture, draw(study, found["found"]))
        sections += _section(name, study, found, picture)
        rows.append([f"`{name}`", study.title, study.verdict(found["found"]).word])
        written.append(picture)
    if missing:
        sections.append(f"## Not measured yet\n\n{', '.join(f'`{each}`' for each in missing)}.")
    summary = Grid("All of them", ["study", "result", "published pattern"], rows)
    page = docs / "results.md"
    _write(page, ("\n\n".join([_OPENING, summary.markdown(), *sections]) + "\n").encode())
    return [*written, page]


def _section(name: str, study: Study, kept: Mapping[str, Any], picture: Path) -> list[str]:
    found, made_on = kept["found"], kept["machine"]
    grids = study.grids(found)
    tables = [text for grid in grids for text in (f"{grid.title}:", grid.markdown())]
    versions = ", ".join(f"{each} {kept['versions'][each]}" for each in ("torch", "numpy"))
    about = (
        f"Run with `{kept['command']}`, seeds {', '.join(map(str, kept['seeds']))}, on "
        f"{kept['date'][:10]} at {kept['commit']}: {made_on['name']}, {made_on['threads']} "
        f"thread{'s' * (made_on['threads'] != 1)}, {versions}; {kept['cpu_seconds']:,.0f} seconds "
        f"of CPU time."
    )
    if (kept.get("load") or 0.0) > 1.0:
        about += " Other programs ran on the machine at the same time."
    verdict = study.verdict(found)
    return [
        f"## `{name}`: {study.title}", f"**Published.** {study.claim}",
        f"**Measured.** {study.protocol}", *tables,
        *([RECALLED_NOTE] if _has_recalled(grids) else []),
        f"![{study.title}](pictures/{picture.name})",
        f"**The pattern {verdict.word}.** {verdict.why}", about,
    ]  # fmt: skip


_OPENING = f"""\
# Replications of published results

Each section compares a published result with measurements of this library, shows a plot, and says
whether the published pattern holds. `python -m studies` lists the studies,
`python -m studies NAME --data FOLDER` runs one, and `--quick` runs a small version. This page is
generated from the files in `benchmarks/results/studies` by `python -m studies page`. Means over
seeds are followed by ± half the width of their 95% confidence interval. {RECALLED} and
*recalled* mark published figures that are quoted from memory, not checked against the paper."""
