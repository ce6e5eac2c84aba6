"""The commands of the lab. What they need is imported inside them: help imports no torch."""

import typer

from lastlayer.lab.commands.after import export, generate, report, show
from lastlayer.lab.commands.before import inspect, plan
from lastlayer.lab.commands.comparing import CompareCommand, compare


def register(app: typer.Typer) -> None:
    """Adds the commands to the program."""
    app.command("compare", cls=CompareCommand)(compare)
    for command in (inspect, plan, show, report, generate, export):
        app.command(command.__name__)(command)
