"""What is known before any training: ``lastlayer inspect`` and ``plan``."""

import json
from typing import Annotated

import typer

from lastlayer.lab.commands.options import (
    AsJson,
    Data,
    Device,
    Encoding,
    FeatureColumns,
    LabelColumn,
    Limit,
    MinCount,
    Task,
    TextColumn,
    TokenizerFile,
    VocabSize,
)
from lastlayer.lab.commands.speaking import console, refusals


def inspect(
    data: Data = None,
    *,
    task: Task = None,
    vocab_size: VocabSize = None,
    min_count: MinCount = None,
    limit: Limit = None,
    hidden: Annotated[int, typer.Option(min=1, help="The width of hidden states.")] = 256,
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
        from lastlayer.lab.reading import read_data, told_of

        read = read_data(settled)
        found = inspect_data(read, hidden=hidden)
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2, ensure_ascii=False))
    else:
        shown = console()
        for line in told_of(read):
            shown.print(line, highlight=False, markup=False)
        render(found, shown)


def plan(
    *,
    classes: Annotated[int, typer.Option(min=2, help="How many classes there are.")],
    hidden: Annotated[int, typer.Option(min=1, help="The width of hidden states.")],
    rows: Annotated[int, typer.Option(min=1, help="Targets in a step: batch times length.")],
    task: Task = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Time and memory of each head for a size, from costs measured here, without training."""
    from lastlayer.lab import plan as planning
    from lastlayer.lab.options import CompareOptions

    with refusals():
        settled = CompareOptions(device=device, task=task).settled()

        from lastlayer.lab.environment import device_named

        place = device_named(settled.device).type
        if classes > planning.MOST_CLASSES:
            from lastlayer.lab.errors import LabError

            most = f"{planning.MOST_CLASSES:,}"
            raise LabError(f"--classes: expected at most {most}, got {classes:,}")
    machine = planning.measure(place)
    planned = planning.plan(
        classes, hidden, rows, place, task=settled.task or "lm", machine=machine
    )
    if as_json:
        sizes = {"classes": classes, "hidden": hidden, "rows": rows}
        heads = [each.as_json() for each in planned]
        content = {**sizes, "machine": machine.as_json(), "heads": heads}
        typer.echo(json.dumps(content, indent=2))
    else:
        planning.render_plan(planned, machine, console())
