"""``python -m studies [NAME]``, from the repository root: list the studies, or run one."""

import argparse
import sys
from pathlib import Path

PAGE = "page"
OUT = Path("studies-results")


def main(arguments: list[str] | None = None) -> int:
    """List the studies, run one, or generate the page.

    Returns:
        0, or 2 for invalid arguments.
    """
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except (ValueError, OSError) as error:
        print(f"studies: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    from studies import frame

    if options.name is None:
        print(frame.list_studies())
        return 0
    if options.name == PAGE:
        print("\n".join(f"wrote {path}" for path in frame.write_page()))
        return 0
    from lastlayer.lab.machine import device_named

    study = frame.load(options.name)
    n_seeds = options.seeds if options.seeds is not None else 1 if options.quick else study.seeds
    if n_seeds < 1:
        raise ValueError(f"--seeds: expected at least 1, got {n_seeds}")
    if options.device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device: expected auto, cpu or cuda, got {options.device!r}")
    if study.cpu_only and options.device == "cuda":
        raise ValueError(f"--device: expected cpu, got cuda; {options.name} runs only on a CPU")
    device = "cpu" if study.cpu_only else options.device
    made = frame.Options(
        data=frame.data_folder(options.data), seeds=tuple(range(n_seeds)), quick=options.quick,
        device=device_named(device),
    )  # fmt: skip
    frame.run(options.name, made, options.out)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m studies", description=__doc__)
    option = parser.add_argument
    option("name", nargs="?", help=f"study; none lists them; {PAGE!r} writes docs/results.md")
    option("--data", type=Path, metavar="FOLDER", help="folder of data sets ($LASTLAYER_DATA)")
    option("--quick", action="store_true", help="a small version: minutes on a CPU")
    option("--seeds", type=int, metavar="N", help="number of seeds (3 or more; 1 with --quick)")
    option("--device", default="auto", help="auto (a GPU if there is one), cpu, cuda")
    option("--out", type=Path, default=OUT, metavar="FOLDER", help=f"for NAME.json, .png ({OUT})")
    return parser


if __name__ == "__main__":
    sys.exit(main())
