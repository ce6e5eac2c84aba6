"""What is done with runs: ``lastlayer show``, ``report``, ``generate`` and ``export``."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from lastlayer.lab.commands.options import AsJson, Run
from lastlayer.lab.commands.speaking import console, refusals


def show(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Folders of runs or of comparisons.")
    ],
    *,
    as_json: AsJson = False,
) -> None:
    """Settings side by side, then results with intervals."""
    with refusals():
        from lastlayer.lab.show import show as print_runs

        print_runs(runs, as_json=as_json)


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What compare --out wrote.")],
) -> None:
    """Write the page, the pictures and the tables of a comparison again."""
    with refusals():
        from lastlayer.lab.report import write_report

        typer.echo(f"Page: {write_report(folder)}")


def generate(
    run: Run,
    *,
    prompt: Annotated[
        str, typer.Option(help="Beginning of the text; it is tokenized as the data was.")
    ] = "",
    tokens: Annotated[int, typer.Option(min=1, help="Number of tokens.")] = 40,
    top: Annotated[int, typer.Option(min=0, help="Number of candidates to show per token.")] = 5,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the best, 1 draws as the head says.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Text from a trained run, and the most probable tokens at each step."""
    with refusals():
        from lastlayer.lab.trained import (
            as_text,
            load_trained,
            prompt_tokens,
            table_of,
            unknown_words,
        )
        from lastlayer.lab.trained import generate as make

        trained = load_trained(run)
        begun = prompt_tokens(trained, prompt)
        unknown = unknown_words(trained, begun)
        steps = list(
            make(trained, begun, tokens=tokens, top=max(1, top), temperature=temperature, seed=seed)
        )
    text = as_text([*begun, *(each.token for each in steps)], trained.tokenizer)
    if as_json:
        made = [{"token": e.token, "p": e.p, "top": e.top[:top]} for e in steps]
        typer.echo(json.dumps({"text": text, "unknown": unknown, "steps": made}, indent=2))
        return
    if unknown:
        listed = ", ".join(repr(word) for word in unknown)
        typer.echo(f"Not in the vocabulary, read as <unk>: {listed}", err=True)
    if top:
        console().print(table_of(steps, top))
    sys.stdout.write(text + "\n")


def export(
    run: Run,
    *,
    to: Annotated[Path, typer.Option(metavar="DIR", help="A folder that is new or empty.")],
) -> None:
    """A trained run as safetensors, settings and vocabulary, in a folder that stands alone."""
    with refusals():
        from lastlayer.lab.trained import export as copy

        for path in copy(run, to):
            typer.echo(str(path))
