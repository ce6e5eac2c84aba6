"""What is known before any training: ``lastlayer heads``, ``inspect`` and ``plan``."""

import json
from contextlib import nullcontext
from typing import Annotated, Any

import typer

from lastlayer.lab.commands.options import (
    AsJson,
    Data,
    Device,
    Encoding,
    FeatureColumns,
    Heads,
    LabelColumn,
    Limit,
    MinCount,
    Task,
    TextColumn,
    TokenizerFile,
    VocabSize,
)
from lastlayer.lab.commands.speaking import console, refusals


def heads(*, as_json: AsJson = False) -> None:
    """Every head that --head takes, what it is, and its arguments."""
    with refusals():
        from lastlayer.lab.families import title
        from lastlayer.lab.specs import arguments_of, catalogue

        found: list[dict[str, Any]] = [
            {"head": name, "title": title(name, name), "class": each.cls.__name__,
             "tasks": list(each.tasks), "about": each.recipe.about, "arguments": arguments_of(each)}
            for name, each in catalogue().items()
        ]  # fmt: skip
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for each in found:
        tasks = ", ".join(each["tasks"])
        typer.echo(f"{each['head']}: {each['title']} ({each['class']}, --task {tasks})")
        typer.echo(f"    {each['about']}")
        listed = ", ".join(f"{name}={kind}" for name, kind in each["arguments"].items())
        if listed:
            typer.echo(f"    takes {listed}")


def inspect(
    data: Data = None,
    *,
    task: Task = None,
    vocab_size: VocabSize = None,
    min_count: MinCount = None,
    limit: Limit = None,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size.")] = 256,
    encoding: Encoding = None,
    text: TextColumn = None,
    label: LabelColumn = None,
    features: FeatureColumns = None,
    tokenizer: TokenizerFile = None,
    as_json: AsJson = False,
) -> None:
    """Classes, frequencies, code lengths, and which heads to try first and why."""
    from lastlayer.lab.options import CompareOptions

    options = CompareOptions(
        data=data, task=task, vocab_size=vocab_size, min_count=min_count, limit=limit,
        encoding=encoding, text=text, label=label, features=features, tokenizer=tokenizer,
    )  # fmt: skip
    with refusals():
        settled = options.settled()

        from lastlayer.lab.inspect import inspect_data, render
        from lastlayer.lab.records import told_of

        read = settled.read()
        found = inspect_data(read, hidden=hidden)
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2, ensure_ascii=False))
    else:
        shown = console()
        for line in told_of({"task": read.task, "description": read.description}):
            shown.print(line, highlight=False, markup=False)
        render(found, shown)


def plan(
    *,
    classes: Annotated[int, typer.Option(min=2, help="Number of classes.")],
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size.")],
    rows: Annotated[int, typer.Option(min=1, help="Targets in a step: batch size times length.")],
    head: Heads = None,
    task: Task = None,
    device: Device = None,
    seconds: Annotated[
        float, typer.Option(min=0.0, help="For measuring, all heads together.")
    ] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Time and memory of a training step of each head at a size, measured here."""
    from lastlayer.lab import plan as planning
    from lastlayer.lab.options import CompareOptions

    shown = console()
    with refusals():
        from lastlayer.lab.errors import LabError

        settled = CompareOptions(device=device, task=task).settled()
        if settled.task not in planning.TASKS:
            known = ", ".join(planning.TASKS)
            raise LabError(f"--task: expected one of {known}, got {settled.task!r}")
        if classes > planning.MOST_CLASSES:
            most = f"{planning.MOST_CLASSES:,}"
            raise LabError(f"--classes: expected at most {most}, got {classes:,}")

        from lastlayer.lab.machine import device_named

        place = device_named(settled.device).type
        with (
            shown.status("Measuring …")
            if shown.is_terminal and not as_json
            else nullcontext() as at
        ):
            planned = planning.plan(
                classes, hidden, rows, place, task=settled.task or "lm", heads=tuple(head or ()),
                seconds=seconds,
                tell=lambda text: None if at is None else at.update(f"Measuring {text} …"),
            )  # fmt: skip
    if as_json:
        sizes = {"classes": classes, "hidden": hidden, "rows": rows, "device": place}
        typer.echo(json.dumps({**sizes, "heads": [each.as_json() for each in planned]}, indent=2))
    else:
        planning.render_plan(planned, shown)
