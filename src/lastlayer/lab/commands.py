"""The commands of the lab. Imports are inside them, so that ``--help`` does not import torch."""

import inspect as inspection
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from datetime import datetime
from fractions import Fraction
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from lastlayer.lab.errors import LabError, require
from lastlayer.lab.families import FAMILIES
from lastlayer.lab.options import READING, CompareOptions

_RUNS = "lastlayer-runs"
_INTERRUPTED = 130
# Packages of the extra `lab`, by import name.
PACKAGES = (
    "altair", "jinja2", "matplotlib", "pyarrow", "safetensors", "scipy", "sklearn", "tokenizers",
    "vl_convert",
)  # fmt: skip

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, below runs/.")]
_for_processes = partial(typer.Option, rich_help_panel="Several processes")
Hidden = Annotated[int, typer.Option(min=1, help="Hidden size.")]
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}


def whole_number(text: Any) -> int:
    """Parse a count such as 250000, 250k, 1.5M or 1B.

    Example:
        >>> whole_number("100M"), whole_number("1.5k"), whole_number("1,000")
        (100000000, 1500, 1000)
    """
    found = re.fullmatch(r"(\d[\d_,]*)(\.\d+)?([a-z]?)", str(text).strip().lower())
    if found is not None and found[3] in _UNITS:
        number = Fraction(re.sub("[_,]", "", found[1]) + (found[2] or "")) * _UNITS[found[3]]
        if number.denominator == 1:
            return int(number)
    raise typer.BadParameter(
        f"expected a whole number such as 250000, 250k, 100M or 1B, got {text!r}"
    )


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    width = max(map(len, FAMILIES))
    # Plain spaces would be collapsed.
    heads_ = [f"{name:\N{NO-BREAK SPACE}<{width}}  {each.title}" for name, each in FAMILIES.items()]
    epilog = "\n".join(["Heads (lastlayer heads lists their arguments):", *heads_])
    app.command("compare", cls=CompareCommand, epilog=epilog)(compare)
    for command in (heads, inspect, plan, show, report, generate, export):
        app.command(command.__name__)(command)


@contextmanager
def refusals(**flags: str) -> Iterator[None]:
    """Print user errors as one message with exit code 2, without a traceback.

    ``flags`` maps argument names in messages to the options of the command.
    """
    try:
        require(*PACKAGES)

        from lastlayer.lab.data.files import DataError

        try:
            yield
        except DataError as error:
            raise LabError(as_flags(str(error))) from None
    except LabError as error:
        name, colon, rest = str(error).partition(":")
        typer.echo(f"lastlayer: {flags.get(name, name)}{colon}{rest}", err=True)
        raise typer.Exit(2) from None


def as_flags(text: str) -> str:
    """Replace arguments of :func:`lastlayer.lab.data.load` in a message by command-line options."""
    names = "|".join(("task", *READING))

    def flag(found: re.Match[str]) -> str:
        return " ".join([f"--{found[1].replace('_', '-')}", *found.groups()[1:]])

    # File names may contain these words, so only mentions of an option are replaced.
    text = re.sub(rf"\b({names})='?((?<=')[^']*)'?", flag, text)
    said = r"(?<=another |; lower )|(?<=: )(?=\w+: expected)"
    return re.sub(rf"(?:{said})({names})\b", flag, text)


def _with_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add these options of a comparison, or all, to a command; it gets them as ``options``."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        taken = [each for each in fields(CompareOptions) if not names or each.name in names]

        def run(**given: Any) -> None:
            asked = {each.name: given.pop(each.name) for each in taken}
            asked = {k: tuple(v) if isinstance(v, list) else v for k, v in asked.items()}
            command(CompareOptions(**asked), **given)

        kind = inspection.Parameter.KEYWORD_ONLY
        shared = [
            inspection.Parameter(each.name, kind, default=None, annotation=Annotated[
                list[str] | None if each.name == "heads" else each.type, each.metadata["cli"]])
            for each in taken
        ]  # fmt: skip
        _, *own = inspection.signature(command).parameters.values()
        parameters = [*shared, *(each.replace(kind=kind) for each in own)]
        run.__signature__ = inspection.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


class CompareCommand(TyperCommand):
    """Allows ``--ray`` without an address, which typer does not support."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the default address."""
        words = []
        for word, after in pairwise([*args, "-"]):
            words += [word, "local"] if word == "--ray" and after.startswith("-") else [word]
        return super().parse_args(ctx, words)


@_with_options()
def compare(
    options: CompareOptions,
    out: Annotated[Path | None, typer.Option(
        metavar="DIR", help=f"Folder of the results; by default below {_RUNS}/.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the comparison in --out.")
    ] = False,
    ray: Annotated[str | None, typer.Option(
        metavar="[HOST:PORT]", help="Make the runs on a Ray cluster that shares this file system, "
        "with --threads cores each and one GPU each on cuda; without an address, in parallel on "
        "this machine.")] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print only the path of the page.")
    ] = False,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Train the same backbone with each output layer (head), and write a page about it."""
    with refusals():
        if resume and out is None:
            raise LabError("--resume: expected --out with the folder to continue, got none")
        options.settled()
        out = out or _new_folder(options.data)
        raise typer.Exit(_compare(options, out, resume, quiet, as_json, ray))


def _compare(
    options: CompareOptions, out: Path, resume: bool, quiet: bool, as_json: bool, ray: str | None
) -> int:
    from lastlayer.lab.comparison import compare as run
    from lastlayer.lab.records import finite
    from lastlayer.lab.report import write_report
    from lastlayer.lab.show import print_summary

    console = Console(quiet=quiet or as_json)
    done = run(options, out, resume=resume, console=console, ray=ray)
    page = write_report(out)
    if as_json:
        runs = [{k: v for k, v in each.items() if k != "explorer"} for each in done.results]
        made = {
            "out": str(out), "page": str(page), "interrupted": done.interrupted, "runs": runs,
            "costs": done.costs,
        }  # fmt: skip
        typer.echo(json.dumps(finite(made), indent=2))
    elif not quiet:
        print_summary(out, console)
    if done.interrupted:
        # Keep stdout machine-readable.
        resumed = f"lastlayer compare --resume --out {shlex.quote(str(out))}"
        typer.echo(f"Stopped. Resume with: {resumed}", err=quiet or as_json)
    if not as_json:
        typer.echo(str(page) if quiet else f"Page: {page}")
    if done.interrupted:
        return _INTERRUPTED
    return 0 if any(each["status"] == "ok" for each in done.results) else 1


def _new_folder(data: str | None) -> Path:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(data).stem if data else "python").strip("-.")
    stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    return Path(_RUNS) / f"{name or 'data'}-{stamp}"


def heads(*, as_json: AsJson = False) -> None:
    """List the heads that --head takes, with their arguments."""
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
        if listed := ", ".join(f"{name}={kind}" for name, kind in each["arguments"].items()):
            typer.echo(f"    takes {listed}")


@_with_options("data", "task", *READING)
def inspect(options: CompareOptions, hidden: Hidden = 256, as_json: AsJson = False) -> None:
    """Print statistics of the classes, and which heads to try first and why."""
    with refusals():
        settled = options.settled()

        from lastlayer.lab.inspect import inspect_data, render
        from lastlayer.lab.records import told_of

        read = settled.read()
        found = inspect_data(read, hidden=hidden)
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2, ensure_ascii=False))
        return
    console = Console()
    for line in told_of({"task": read.task, "description": read.description}):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    render(found, console)


@_with_options("heads", "task", "device")
def plan(
    options: CompareOptions,
    classes: Annotated[
        int, typer.Option(parser=whole_number, metavar="N", help="Number of classes, such as 100M.")
    ],
    hidden: Annotated[
        int | None, typer.Option(min=1, help="Hidden size; 512 by default with --ranks.")
    ] = None,
    rows: Annotated[int | None, typer.Option(
        parser=whole_number, metavar="N", help="Targets per step: batch size times length; with "
        "--ranks those of each process, 1024 by default.")] = None,
    seconds: Annotated[float | None, typer.Option(
        min=0.0, help="Time to measure all heads together, in seconds; 60 by default.")] = None,
    ranks: Annotated[int | None, _for_processes(
        min=1, help="Instead count the cost of heads over this many processes with DDP, FSDP2 and "
        "class-parallel. Nothing is measured. Without --head, the full softmax.")] = None,
    memory: Annotated[float | None, _for_processes(
        help="Memory for the head in each process, in GB; 80 by default.")] = None,
    gbps: Annotated[float | None, _for_processes(
        help="Bandwidth of a process in Gbit/s, to add the time of its traffic.")] = None,
    slots: Annotated[int | None, _for_processes(
        min=0, help="Values per parameter in the state of the optimiser; 2 by default, for Adam.",
    )] = None,
    dtype: Annotated[str | None, _for_processes(
        metavar="float32|bfloat16|float16",
        help="Dtype of parameters and hidden states; float32 by default.")] = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Measure time and memory of a training step of each head for a number of classes.

    With --ranks: compute memory and traffic of heads over several processes instead.
    """
    console = Console()
    with refusals():
        settled = options.settled()
        of_processes = {"memory": memory, "gbps": gbps, "slots": slots, "dtype": dtype}
        unused = of_processes if ranks is None else {"seconds": seconds}
        for name, value in unused.items():
            if value is not None:
                when = "with" if ranks is None else "without"
                raise LabError(f"--{name}: expected it only {when} --ranks, got {value}")
        if ranks is not None:
            _plan_processes(
                settled, console, as_json, classes, hidden or 512, 1024 if rows is None else rows,
                ranks, memory=80.0 if memory is None else memory, gbps=gbps,
                optimizer_slots=2 if slots is None else slots, dtype=dtype or "float32",
            )  # fmt: skip
            return
        if hidden is None or rows is None:
            name = "hidden" if hidden is None else "rows"
            raise LabError(f"--{name}: expected a number without --ranks, got none")

        from lastlayer.lab import costs
        from lastlayer.lab.machine import device_named

        device = device_named(settled.device).type
        shown = console.is_terminal and not as_json
        with console.status("Measuring …") if shown else nullcontext() as at:
            planned = costs.plan(
                classes, hidden, rows, device, task=settled.task or "lm",
                heads=tuple(settled.heads), seconds=60.0 if seconds is None else seconds,
                tell=lambda text: None if at is None else at.update(f"Measuring {text} …"),
            )  # fmt: skip
    if as_json:
        sizes = {"classes": classes, "hidden": hidden, "rows": rows, "device": device}
        typer.echo(json.dumps({**sizes, "heads": [each.as_json() for each in planned]}, indent=2))
    else:
        costs.render_plan(planned, console)


def _plan_processes(
    settled: Any, console: Console, as_json: bool, *sizes: int, **given: Any
) -> None:
    from lastlayer.lab.process_plan import plan_processes, render_processes

    # The plan is for other machines, so GPUs are the default.
    device = "cpu" if settled.device == "cpu" else "cuda"
    found = plan_processes(
        *sizes, task=settled.task or "lm", heads=tuple(settled.heads), device=device, **given
    )
    if as_json:
        named = dict(zip(("classes", "hidden", "rows", "ranks"), sizes, strict=True))
        made = {**named, "device": device, "heads": [each.as_json() for each in found]}
        typer.echo(json.dumps(made, indent=2))
    else:
        render_processes(found, console)


def show(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Folders of runs or of comparisons.")
    ],
    *,
    as_json: AsJson = False,
) -> None:
    """Print settings side by side, then results with confidence intervals."""
    with refusals():
        from lastlayer.lab.show import show as print_runs

        print_runs(runs, as_json=as_json)


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a comparison.")],
) -> None:
    """Write the page, the pictures and the tables of a comparison again."""
    with refusals():
        from lastlayer.lab.report import write_report

        typer.echo(f"Page: {write_report(folder)}")


def generate(
    run: RunFolder,
    *,
    prompt: Annotated[
        str, typer.Option(help="Beginning of the text, tokenized in the same way as the data.")
    ] = "",
    tokens: Annotated[int, typer.Option(min=1, help="Number of tokens.")] = 40,
    top: Annotated[int, typer.Option(min=0, help="Number of candidates to show per token.")] = 5,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the most probable token, 1 samples.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Generate text with a trained run, and print the most probable tokens at each step."""
    with refusals(path="RUN", trained="RUN"):
        from lastlayer.lab import trained as of

        trained = of.load_trained(run)
        begun = of.prompt_tokens(trained, prompt)
        unknown = of.unknown_words(trained, begun)
        steps = list(
            of.generate(
                trained, begun, tokens=tokens, top=max(1, top), temperature=temperature, seed=seed
            )
        )
    text = of.as_text([*begun, *(each.token for each in steps)], trained.tokenizer)
    if as_json:
        made = [{"token": e.token, "p": e.p, "top": e.top[:top]} for e in steps]
        typer.echo(json.dumps({"text": text, "unknown": unknown, "steps": made}, indent=2))
        return
    if unknown:
        listed = ", ".join(repr(word) for word in unknown)
        typer.echo(f"Not in the vocabulary, read as <unk>: {listed}", err=True)
    if top:
        Console().print(of.table_of(steps, top))
    sys.stdout.write(text + "\n")


def export(
    run: RunFolder,
    *,
    to: Annotated[Path, typer.Option(metavar="DIR", help="A folder that is new or empty.")],
) -> None:
    """Export a trained run to a self-contained folder: safetensors, settings and vocabulary."""
    with refusals(path="RUN", to="--to"):
        from lastlayer.lab.trained import export as copy

        for path in copy(run, to):
            typer.echo(str(path))
