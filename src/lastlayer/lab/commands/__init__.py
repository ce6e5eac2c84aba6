"""The commands of the lab. What they need is imported inside them: help imports no torch."""

import typer

from lastlayer.lab.commands.after import export, generate, report, show
from lastlayer.lab.commands.before import heads, inspect, plan
from lastlayer.lab.commands.comparing import CompareCommand, compare
from lastlayer.lab.families import FAMILIES


def register(app: typer.Typer) -> None:
    """Adds the commands to the program."""
    app.command("compare", cls=CompareCommand, epilog=_listed())(compare)
    for command in (heads, inspect, plan, show, report, generate, export):
        app.command(command.__name__)(command)


def _listed() -> str:
    """Every head for the end of the help, a line each."""
    width = max(map(len, FAMILIES))
    # Blanks at the beginning and in a row would be taken out.
    lines = [f"{name:\N{NO-BREAK SPACE}<{width}}  {each.title}" for name, each in FAMILIES.items()]
    return "\n".join(["Heads (lastlayer heads says what they do and take):", *lines])
