"""The ``lastlayer`` command. Torch is imported inside the commands, so that help is instant."""

import json
from typing import Annotated

import typer
from rich.console import Console

from lastlayer import __version__
from lastlayer.lab.commands import register

app = typer.Typer(
    help="Compare, inspect and plan output layers for models with many classes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
register(app)


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="lastlayer")


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


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show versions, devices, the kernels that would run, and missing extras."""
    from lastlayer import _doctor

    report = _doctor.examine()
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _doctor.render(report, Console())
