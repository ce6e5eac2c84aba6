"""The ``lastlayer`` command. Torch is imported inside the commands, so that help is instant."""

import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from lastlayer import __version__
from lastlayer.lab.commands import register

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("float32", "bfloat16", "float16", "float64")
DEFAULT_DTYPES = "By default float32, and bfloat16 too on a GPU."

app = typer.Typer(
    help="Every way to end a network.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Verify a family, then time it beside its peers.", no_args_is_help=True)
app.add_typer(bench, name="bench")
register(app)

Quick = Annotated[bool, typer.Option("--quick", help="Few and small shapes.")]
Device = Annotated[
    str, typer.Option(metavar="|".join(DEVICES), help="auto takes a CUDA GPU if there is one.")
]
Only = Annotated[
    str, typer.Option(metavar="TEXT", help="Measure the cases whose title contains this.")
]
NoPeers = Annotated[
    bool, typer.Option("--no-peers", help="Leave out the other packages that are installed.")
]
JsonPath = Annotated[
    Path | None, typer.Option("--json", metavar="PATH", help="Append the results as JSON lines.")
]
PlotPath = Annotated[
    Path | None, typer.Option("--plot", "--png", metavar="PATH", help="Draw the results as a PNG.")
]


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="lastlayer")


def _refuse(option: str, expected: str, got: object, remedy: str) -> NoReturn:
    typer.echo(f"lastlayer: {option}: expected {expected}, got {got}; {remedy}", err=True)
    raise typer.Exit(2)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


@bench.command("maps")
def bench_maps(
    *,
    quick: Quick = False,
    device: Device = "auto",
    dtype: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"{', '.join(DTYPES)}; repeatable. {DEFAULT_DTYPES}"),
    ] = None,
    no_peers: NoPeers = False,
    json_path: JsonPath = None,
    plot_path: PlotPath = None,
) -> None:
    """Sparsemax, entmax and top-k softmax: times, ratios, and the fraction of the limit."""
    dtypes = tuple(dict.fromkeys(dtype or ()))
    for name in dtypes:
        if name not in DTYPES:
            _refuse("--dtype", f"one of {', '.join(DTYPES)}", repr(name), "repeat it for several")
    options = dict(peers=not no_peers, quick=quick, dtypes=dtypes)
    _run("maps", device, json_path, plot_path, **options)


@bench.command("fused")
def bench_fused(
    *,
    quick: Quick = False,
    device: Device = "auto",
    only: Only = "",
    no_peers: NoPeers = False,
    json_path: JsonPath = None,
    plot_path: PlotPath = None,
) -> None:
    """Losses on a linear layer, with gradients: times, rates, memory, and errors."""
    options = dict(peers=not no_peers, quick=quick, only=only)
    _run("fused", device, json_path, plot_path, **options)


@bench.command("heads")
def bench_heads(
    *,
    quick: Quick = False,
    device: Device = "auto",
    only: Only = "",
    json_path: JsonPath = None,
    plot_path: PlotPath = None,
) -> None:
    """Training steps and best classes of heads: times, memory, parameters, and growth with V."""
    options = dict(quick=quick, only=only)
    _run("heads", device, json_path, plot_path, **options)


@bench.command("multilabel")
def bench_multilabel(
    *,
    quick: Quick = False,
    device: Device = "auto",
    only: Only = "",
    no_peers: NoPeers = False,
    json_path: JsonPath = None,
    plot_path: PlotPath = None,
) -> None:
    """Losses of many labels, on a linear layer and on scores: times, memory, and errors."""
    options = dict(peers=not no_peers, quick=quick, only=only)
    _run("multilabel", device, json_path, plot_path, **options)


@bench.command("contrastive")
def bench_contrastive(
    *,
    quick: Quick = False,
    device: Device = "auto",
    only: Only = "",
    no_peers: NoPeers = False,
    json_path: JsonPath = None,
    plot_path: PlotPath = None,
) -> None:
    """InfoNCE over batches of pairs, with gradients: times, rates, memory, and errors."""
    options = dict(peers=not no_peers, quick=quick, only=only)
    _run("contrastive", device, json_path, plot_path, **options)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")] = False,
) -> None:
    """Versions, devices, which kernels would run, and which extras are missing."""
    from lastlayer import _doctor

    report = _doctor.examine()
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=2))
    else:
        _doctor.render(report, Console())


def _run(
    family: str, device: str, json_path: Path | None, plot_path: Path | None, **options: Any
) -> None:
    """Measures a family, after the options that all of them have were looked at."""
    _check_file("--json", json_path)
    _check_plot(plot_path)
    options |= dict(device=_resolve_device(device), json_path=json_path, plot_path=plot_path)
    run = import_module(f"lastlayer.bench.{family}").run
    raise typer.Exit(run(**options, out=Console()))


def _check_file(option: str, path: Path | None) -> None:
    if path is None:
        return
    if path.is_dir():
        _refuse(option, "a file", f"the folder '{path}'", "add a file name to it")
    if not path.parent.is_dir():
        _refuse(option, "a file in an existing folder", f"'{path}'", f"mkdir -p '{path.parent}'")


def _check_plot(path: Path | None) -> None:
    if path is None:
        return
    if path.suffix.lower() != ".png":
        _refuse("--plot", "a file that ends in .png", f"'{path}'", "rename it")
    _check_file("--plot", path)
    if find_spec("matplotlib") is None:
        _refuse("--plot", "matplotlib", "no such package", 'pip install "lastlayer[lab]"')


def _resolve_device(device: str) -> str:
    if device not in DEVICES:
        _refuse("--device", f"one of {', '.join(DEVICES)}", repr(device), "leave it out for auto")
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        found = f"none with torch {torch.__version__}"
        _refuse("--device", "a CUDA GPU that torch can use", found, "use --device cpu")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


if __name__ == "__main__":
    main()
