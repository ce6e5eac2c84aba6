"""``python -m benchmarks COMMAND``, from the repository root."""

import argparse
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.record import FAMILIES

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parent.parent / "docs"


def main(arguments: list[str] | None = None) -> int:
    """Run a command.

    Returns:
        0; 1 if one of our results is wrong or slower than allowed; 2 for invalid arguments.
    """
    options = _parser().parse_args(arguments)
    try:
        code: int = options.command(options)
    except (ValueError, OSError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace], int], about: str) -> Any:
        made = commands.add_parser(name, help=about, description=about)
        made.set_defaults(command=command, name=name)
        return made.add_argument

    for family in FAMILIES:
        option = add(family, _measure, f"verify the {family} family, then time it and its peers")
        option("--device", default="auto", help="auto (a GPU if there is one), cpu, cuda")
        option("--quick", action="store_true", help="few and small shapes")
        option("--only", nargs="+", default=[""], metavar="TEXT",
               help="cases whose title contains one of these")  # fmt: skip
        option("--no-peers", action="store_true", help="leave other packages out")
        option("--json", type=Path, metavar="FILE", help="append records as JSON lines")
        option("--plot", type=Path, metavar="FILE", help="draw the results as a PNG")
        option("--commit", help="commit of the source, if git is not available")
        option("--seconds", type=float, help="time budget of all cases, verification included")
    option = add("study", _study, "train every head on real data to convergence")
    option("name", help="wikitext2, wikitext2-part, cooking-first-tag, cooking or start")
    option("data", type=Path, help="folder with wikitext2/, cooking.txt and cooking-first-tag.txt")
    option("--out", type=Path, required=True, help="folder of the comparison; a run is resumed")
    option("--json", type=Path, default=RESULTS / "study", help="folder of the saved results")
    option = add("vectors", _vectors, "train word vectors, ours and gensim's: speed and quality")
    option("data", type=Path, help="folder with wikitext2/, brown/ and wordeval/")
    option("--only", default="", metavar="TEXT", help="cases whose title contains this")
    option("--quick", action="store_true", help="a twentieth of the text, one epoch")
    option("--threads", type=int, default=1, help="number of threads of both (1)")
    option("--seeds", type=int, default=3, help="number of runs of each (3)")
    option("--json", type=Path, metavar="FILE", help="append a JSON line per case")
    option("--commit", help="commit of the source, if git is not available")
    option = add("parallel", _parallel, "class-parallel heads: two processes vs one, mesh of one")
    option("--json", type=Path, metavar="FILE", help="append a JSON line per figure")
    option("--commit", help="commit of the source, if git is not available")
    add("page", _page, "generate pages of docs/ and their figures from the records")
    option = add("structure", _structure, "figures of simplicity and host time")
    option("--json", type=Path, metavar="FILE", help="append them as a JSON line")
    option("--markdown", action="store_true", help="print a Markdown table")
    option("--commit", help="commit of the source, if git is not available")
    option = add("diff", _diff, "compare the records of two runs, worst ratio first")
    option("old", type=Path, help="a file of records, or a folder of such files")
    option("new", type=Path, help="a file or folder of records to compare with it")
    option("--limit", type=float, default=1.03, help="slowest accepted ratio (1.03)")
    option("--all", action="store_true", help="list peers too")
    return parser


def _measure(options: argparse.Namespace) -> int:
    from benchmarks import driver, plot, table

    device = _device(options.device)
    _check_file("--json", options.json)
    _check_file("--plot", options.plot)
    if options.plot is not None and not plot.is_available():
        raise ValueError(f"--plot: expected matplotlib, got none; {plot.INSTALL_COMMAND}")
    family: driver.Family = import_module(f"benchmarks.{options.name}").FAMILY
    cases = family.cases(device, options.quick)
    cases = driver.chosen(cases, options.only, peers=not options.no_peers)
    out = table.console()
    seconds = family.seconds.get(device.type) if options.seconds is None else options.seconds
    run = driver.run(
        family, cases, device, quick=options.quick, out=out, json_path=options.json,
        commit=options.commit, seconds=seconds,
    )  # fmt: skip
    shared = run.shared
    print(
        f"{shared['device']} · torch {shared['torch']} · lastlayer {shared['lastlayer']} at "
        f"{shared['commit'] or 'unknown commit'} · GEMM {shared['gemm_tflop_per_s']:.3g} TFLOP/s, "
        f"copy {1000 * shared['copy_tb_per_s']:.0f} GB/s"
    )
    grids = table.grids(run.records, family.sweeps)
    for grid in family.shown(run.records, misses=False) if family.shown else grids:
        out.print(grid.rich())
    print(table.LEGEND)
    for line in [*(f"{peer}: {why}" for peer, why in sorted(run.absent.items())), *run.notes]:
        print(line)
    if options.plot is not None:
        plot.draw(run.records, options.plot, family.sweeps)
        print(f"plot: {options.plot}")
    if run.failures:
        print(f"{len(run.failures)} of our results failed verification", file=sys.stderr)
    return 1 if run.failures else 0


def _device(name: str) -> Any:
    import torch

    kind = name.partition(":")[0]
    if kind not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device: expected auto, cpu or cuda, got {name!r}")
    if kind == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        found = f"none with torch {torch.__version__}"
        raise ValueError(f"--device: expected a CUDA GPU, got {found}; use --device cpu")
    return torch.device(name)


def _check_file(option: str, path: Path | None) -> None:
    if path is not None and path.is_dir():
        raise ValueError(f"{option}: expected a file, got the folder '{path}'; add a file name")
    if path is not None and not path.absolute().parent.is_dir():
        raise ValueError(f"{option}: the folder of '{path}' does not exist; create it first")


def _page(_: argparse.Namespace) -> int:
    from benchmarks import page, study, vectors

    written = [*page.write(RESULTS), *study.write_page(RESULTS / "study", DOCS)]
    written += vectors.write_page(RESULTS, DOCS)
    print("\n".join(f"wrote {path}" for path in written))
    return 0


def _study(options: argparse.Namespace) -> int:
    from benchmarks import study

    if options.name not in study.STUDIES:
        raise ValueError(f"name: expected one of {', '.join(study.STUDIES)}, got {options.name!r}")
    needed = options.data / study.STUDIES[options.name].data
    if not needed.exists():
        raise ValueError(f"data: expected a folder with {needed.name}, got '{options.data}'")
    options.json.mkdir(parents=True, exist_ok=True)
    is_whole = study.run(options.data, options.name, options.out, options.json)
    return 0 if is_whole else 1


def _vectors(options: argparse.Namespace) -> int:
    from benchmarks import vectors

    _check_file("--json", options.json)
    for name in ("threads", "seeds"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name}: expected at least 1, got {getattr(options, name)}")
    return vectors.run(
        options.data, only=options.only, quick=options.quick, threads=options.threads,
        seeds=options.seeds, json_path=options.json, commit=options.commit,
    )  # fmt: skip


def _parallel(options: argparse.Namespace) -> int:
    from benchmarks import parallel

    _check_file("--json", options.json)
    return parallel.run(options.json, options.commit)


def _structure(options: argparse.Namespace) -> int:
    from benchmarks import structure

    _check_file("--json", options.json)
    structure.report(options.json, markdown=options.markdown, commit=options.commit)
    return 0


def _diff(options: argparse.Namespace) -> int:
    from benchmarks import diff

    return diff.report(options.old, options.new, limit=options.limit, everything=options.all)


if __name__ == "__main__":
    sys.exit(main())
