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

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, below runs/.")]
_PROCESSES = "Several processes"
Hidden = Annotated[int, typer.Option(min=1, help="Hidden size.")]
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}


def whole_number(text: Any) -> int:
    """A count as people write it: 250000, 250k, 1.5M, 1B.

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
    """Adds the commands to the program."""
    width = max(map(len, FAMILIES))
    # Plain spaces would be collapsed.
    heads_ = [f"{name:\N{NO-BREAK SPACE}<{width}}  {each.title}" for name, each in FAMILIES.items()]
    epilog = "\n".join(["Heads (lastlayer heads says what they do and take):", *heads_])
    app.command("compare", cls=CompareCommand, epilog=epilog)(compare)
    for command in (heads, inspect, plan, show, report, generate, export):
        app.command(command.__name__)(command)


@contextmanager
def refusals(**flags: str) -> Iterator[None]:
    """Turns errors of the user into one message and exit code 2, without a traceback.

    ``flags`` maps arguments of the functions that a command calls to its options.
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
    """Replace arguments of :func:`lastlayer.lab.data.load` in a message by options."""
    names = "|".join(("task", *READING))

    def flag(found: re.Match[str]) -> str:
        return " ".join([f"--{found[1].replace('_', '-')}", *found.groups()[1:]])

    # File names may contain these words: only mentions of an option are replaced.
    text = re.sub(rf"\b({names})='?((?<=')[^']*)'?", flag, text)
    return re.sub(rf"(?<=another |; lower )({names})\b", flag, text)


def _with_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these options of a comparison, or all, as its argument ``options``."""

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
    """Lets ``--ray`` stand without an address, which typer does not support."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the default address."""
        words = []
        for word, after in pairwise([*args, "-"]):
            words += [word, "local"] if word == "--ray" and after.startswith("-") else [word]
        return super().parse_args(ctx, words)


@_with_options()
def compare(
    options: CompareOptions,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help=f"Folder of the results; by default below {_RUNS}/."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the comparison in --out.")
    ] = False,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:PORT]",
            help="Make the runs on a Ray cluster that shares this file system, --threads cores and "
            "on cuda one GPU each; without an address, side by side on this machine.",
        ),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print only the path of the page.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train the same backbone with each output layer (head), and write a page about it."""
    with refusals():
        if resume and out is None:
            raise LabError("--resume: expected --out with the folder to go on with, got none")
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

    console = Console()
    done = run(options, out, resume=resume, quiet=quiet or as_json, console=console, ray=ray)
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
        # Output for machines must not change: this goes to stderr.
        resumed = f"lastlayer compare --resume --out {shlex.quote(str(out))}"
        typer.echo(f"Stopped. Go on with: {resumed}", err=quiet or as_json)
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
        if listed := ", ".join(f"{name}={kind}" for name, kind in each["arguments"].items()):
            typer.echo(f"    takes {listed}")


@_with_options("data", "task", *READING)
def inspect(options: CompareOptions, hidden: Hidden = 256, as_json: AsJson = False) -> None:
    """Classes, frequencies, code lengths, and which heads to try first and why."""
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
        console.print(line, highlight=False, markup=False)
    render(found, console)


@_with_options("heads", "task", "device")
def plan(
    options: CompareOptions,
    classes: Annotated[
        int, typer.Option(parser=whole_number, metavar="N", help="Number of classes, such as 100M.")
    ],
    hidden: Annotated[
        int | None,
        typer.Option(min=1, help="Hidden size; 512 with --ranks.", show_default=False),
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(
            parser=whole_number, metavar="N", show_default=False,
            help="Targets in a step: batch size times length; with --ranks of each process, 1024.",
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.0, help="For measuring, all heads together.")
    ] = 60.0,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1, show_default=False, rich_help_panel=_PROCESSES,
            help="Count instead what heads cost over so many processes: with DDP, FSDP2 and "
            "class-parallel. Nothing is measured; without --head, of the full softmax.",
        ),
    ] = None,
    memory: Annotated[
        float,
        typer.Option(
            help="Gigabytes of a process that the head may take.", rich_help_panel=_PROCESSES
        ),
    ] = 80.0,
    gbps: Annotated[
        float | None,
        typer.Option(
            show_default=False, rich_help_panel=_PROCESSES,
            help="Bandwidth of a process in gigabits per second, for times of the traffic.",
        ),
    ] = None,
    slots: Annotated[
        int,
        typer.Option(
            min=0, rich_help_panel=_PROCESSES,
            help="Numbers per parameter that the optimiser keeps; 2 of Adam.",
        ),
    ] = 2,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="float32|bfloat16|float16", rich_help_panel=_PROCESSES,
            help="Of parameters and hidden states.",
        ),
    ] = "float32",
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Time and memory of a training step of each head at a size, measured here.

    With --ranks: memory and traffic of heads over several processes, counted.
    """
    console = Console()
    with refusals():
        settled = options.settled()
        if ranks is not None:
            _plan_processes(
                settled, console, as_json, classes, hidden or 512, 1024 if rows is None else rows,
                ranks, memory=memory, gbps=gbps, optimizer_slots=slots, dtype=dtype,
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
                heads=tuple(settled.heads), seconds=seconds,
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

    # The plan is for other machines: by default for their GPUs.
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
    run: Run,
    *,
    to: Annotated[Path, typer.Option(metavar="DIR", help="A folder that is new or empty.")],
) -> None:
    """A trained run as safetensors, settings and vocabulary, in a folder that stands alone."""
    with refusals(path="RUN", to="--to"):
        from lastlayer.lab.trained import export as copy

        for path in copy(run, to):
            typer.echo(str(path))
