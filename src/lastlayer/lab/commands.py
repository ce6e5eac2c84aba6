"""The commands of the lab. What they need is imported inside them: help imports no torch."""

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

_RUNS = "lastlayer-runs"
_INTERRUPTED = 130

Data = Annotated[
    str | None,
    typer.Argument(
        metavar="DATA",
        help="A file, a folder or hf:name; without it, the source of Python's own library.",
        show_default=False,
    ),
]
Task = Annotated[
    str | None, typer.Option(metavar="lm|multilabel", help="What is predicted; lm by default.")
]
VocabSize = Annotated[int | None, typer.Option(help="The most words, <unk> among them.")]
MinCount = Annotated[int | None, typer.Option(help="Words that come less often become <unk>.")]
Limit = Annotated[int | None, typer.Option(help="The most tokens or rows for training.")]
Encoding = Annotated[str | None, typer.Option(help="Of text files; utf-8 by default.")]
TextField = Annotated[
    str | None,
    typer.Option(metavar="NAME,…", help="Where JSON lines have their text; 'text' by default."),
]
LabelsField = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Where JSON lines have labels; 'labels' by default."),
]
Labels = Annotated[
    str | None, typer.Option(metavar="XML", help="The names of the labels of an ARFF set.")
]
Device = Annotated[
    str | None,
    typer.Option(metavar="auto|cpu|cuda", help="auto takes a CUDA GPU if there is one."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, below runs/.")]


def register(app: typer.Typer) -> None:
    """Adds the commands to the program."""
    for name, command in (
        ("compare", compare),
        ("inspect", inspect),
        ("plan", plan),
        ("show", show),
        ("report", report),
        ("generate", generate),
        ("export", export),
    ):
        app.command(name)(command)


@contextmanager
def _refusals() -> Iterator[None]:
    """A mistake of the user's is one message and exit code 2, without a traceback."""
    from lastlayer.lab.data.errors import DataError
    from lastlayer.lab.errors import LabError

    try:
        yield
    except (LabError, DataError) as error:
        typer.echo(f"lastlayer: {_as_flags(str(error))}", err=True)
        raise typer.Exit(2) from None


def _as_flags(text: str) -> str:
    """Arguments of :func:`lastlayer.lab.data.load` as the options that they are here."""
    names = "task|encoding|vocab_size|min_count|limit|text_field|labels_field|labels"

    def flag(found: re.Match[str]) -> str:
        return " ".join([f"--{found[1].replace('_', '-')}", *found.groups()[1:]])

    # The name of a file may be one of these words: only what is said of an option is changed.
    text = re.sub(rf"\b({names})='?((?<=')[^']*|PATH)'?", flag, text)
    return re.sub(rf"(?<=another |; lower )({names})\b", flag, text)


def compare(
    data: Data = None,
    *,
    head: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help="A head and its arguments, such as adaptive:cutoffs=2000,10000 or "
            "mymodule:MyHead; repeatable. Without it, one of every family.",
            show_default=False,
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="30s|2000steps|3epochs", help="Of each run; 3s by default."),
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Runs of each head; 3 by default.")] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="lstm|transformer|bag", help="What the head ends; lstm by default."),
    ] = None,
    task: Task = None,
    device: Device = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help=f"Where everything goes; by default below {_RUNS}/."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the comparison in --out.")
    ] = False,
    vocab_size: VocabSize = None,
    min_count: MinCount = None,
    limit: Limit = None,
    encoding: Encoding = None,
    text_field: TextField = None,
    labels_field: LabelsField = None,
    labels: Labels = None,
    batch: Annotated[
        int | None, typer.Option(help="Windows in a step, 32 by default, or rows, 128.")
    ] = None,
    length: Annotated[int | None, typer.Option(help="Tokens in a window; 32 by default.")] = None,
    width: Annotated[
        int | None, typer.Option(help="Numbers of a hidden state; 128 by default.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Of an LSTM, 1 by default, or of a transformer, 2.")
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate; by default what suits the model.")
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Show the path of the page alone.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train the same model with each head under the same budget, and write a page about it."""
    from lastlayer.lab.options import CompareOptions

    options = CompareOptions(
        data=data, heads=tuple(head) if head else None, budget=budget, seeds=seeds, model=model,
        task=task, device=device, vocab_size=vocab_size, min_count=min_count, batch=batch,
        length=length, width=width, layers=layers, lr=lr, limit=limit, encoding=encoding,
        text_field=text_field, labels_field=labels_field, labels=labels,
    )  # fmt: skip
    with _refusals():
        if resume and out is None:
            from lastlayer.lab.errors import LabError

            raise LabError("--resume: expected --out with the folder to go on with, got none")
        options.settled()
        raise typer.Exit(_compare(options, out or _new_folder(data), resume, quiet, as_json))


def _compare(options: Any, out: Path, resume: bool, quiet: bool, as_json: bool) -> int:
    from lastlayer.lab.compare import compare as run
    from lastlayer.lab.report import write_report
    from lastlayer.lab.report.build import require_packages
    from lastlayer.lab.summary import print_summary

    require_packages()
    console = _console()
    done = run(options, out, resume=resume, quiet=quiet or as_json, console=console)
    page = write_report(out)
    if as_json:
        runs = [{k: v for k, v in each.items() if k != "explorer"} for each in done.results]
        made = {"out": str(out), "page": str(page), "interrupted": done.interrupted, "runs": runs}
        typer.echo(json.dumps(_finite(made), indent=2))
    elif quiet:
        typer.echo(str(page))
    else:
        print_summary(out, console)
        if done.interrupted:
            typer.echo(f"Stopped. Go on with: lastlayer compare --resume --out {out}")
        typer.echo(f"Page: {page}")
    if done.interrupted:
        return _INTERRUPTED
    return 0 if any(each["status"] == "ok" for each in done.results) else 1


def _finite(value: Any) -> Any:
    from lastlayer.lab.files import finite

    return finite(value)


def _new_folder(data: str | None) -> Path:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(data).stem if data else "python").strip("-.")
    stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    return Path(_RUNS) / f"{name or 'data'}-{stamp}"


def inspect(
    data: Data = None,
    *,
    task: Task = None,
    vocab_size: VocabSize = None,
    min_count: MinCount = None,
    limit: Limit = None,
    hidden: Annotated[int, typer.Option(min=1, help="The width of hidden states.")] = 256,
    encoding: Encoding = None,
    text_field: TextField = None,
    labels_field: LabelsField = None,
    labels: Labels = None,
    as_json: AsJson = False,
) -> None:
    """Classes, frequencies, code lengths, and which heads to try first and why."""
    from lastlayer.lab.options import CompareOptions

    options = CompareOptions(
        data=data, task=task, vocab_size=vocab_size, min_count=min_count, limit=limit,
        encoding=encoding, text_field=text_field, labels_field=labels_field, labels=labels,
    )  # fmt: skip
    with _refusals():
        settled = options.settled()

        from lastlayer.lab.inspect import inspect_data, render
        from lastlayer.lab.reading import read_data

        found = inspect_data(read_data(settled), hidden=hidden)
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2, ensure_ascii=False))
    else:
        render(found, _console())


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

    with _refusals():
        settled = CompareOptions(device=device, task=task).settled()

        from lastlayer.lab.environment import device_named

        place = device_named(settled.device).type
    machine = planning.measure(place)
    planned = planning.plan(classes, hidden, rows, place, task=settled.task, machine=machine)
    if as_json:
        sizes = {"classes": classes, "hidden": hidden, "rows": rows}
        heads = [each.as_json() for each in planned]
        content = {**sizes, "machine": machine.as_json(), "heads": heads}
        typer.echo(json.dumps(content, indent=2))
    else:
        planning.render_plan(planned, machine, _console())


def _console() -> Any:
    from rich.console import Console

    return Console()


def show(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Folders of runs or of comparisons.")
    ],
    *,
    as_json: AsJson = False,
) -> None:
    """Settings side by side, then results with intervals."""
    with _refusals():
        from lastlayer.lab.show import show as print_runs

        print_runs(runs, as_json=as_json)


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What compare --out wrote.")],
) -> None:
    """Write the page, the pictures and the tables of a comparison again."""
    with _refusals():
        from lastlayer.lab.report import write_report

        typer.echo(f"Page: {write_report(folder)}")


def generate(
    run: Run,
    *,
    prompt: Annotated[
        str, typer.Option(help="What the text begins with; it is cut as the data was.")
    ] = "",
    tokens: Annotated[int, typer.Option(min=1, help="How many to make.")] = 40,
    top: Annotated[int, typer.Option(min=0, help="How many of the best to show a step.")] = 5,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the best, 1 draws as the head says.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Text from a trained run, and the best tokens of each step."""
    with _refusals():
        from lastlayer.lab.generate import as_text, prompt_tokens, table_of
        from lastlayer.lab.generate import generate as make
        from lastlayer.lab.trained import load_trained

        trained = load_trained(run)
        begun = prompt_tokens(trained, prompt)
        steps = list(
            make(trained, begun, tokens=tokens, top=max(1, top), temperature=temperature, seed=seed)
        )
    text = as_text([*begun, *(each.token for each in steps)])
    if as_json:
        made = [{"token": e.token, "p": e.p, "top": e.top[:top]} for e in steps]
        typer.echo(json.dumps({"text": text, "steps": made}, indent=2))
        return
    if top:
        _console().print(table_of(steps, top))
    sys.stdout.write(text + "\n")


def export(
    run: Run,
    *,
    to: Annotated[Path, typer.Option(metavar="DIR", help="A folder that is new or empty.")],
) -> None:
    """A trained run as safetensors, settings and vocabulary, in a folder that stands alone."""
    with _refusals():
        from lastlayer.lab.export import export as copy

        for path in copy(run, to):
            typer.echo(str(path))
