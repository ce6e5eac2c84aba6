"""``lastlayer compare``."""

import json
import re
import shlex
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

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

_RUNS = "lastlayer-runs"
_INTERRUPTED = 130


class CompareCommand(TyperCommand):
    """``--ray`` may stand without an address, which typer's options cannot."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Fills the address in."""
        words = []
        for word, after in zip(args, [*args[1:], "-"], strict=True):
            words += [word, "local"] if word == "--ray" and after.startswith("-") else [word]
        return super().parse_args(ctx, words)


def compare(
    data: Data = None,
    *,
    head: Heads = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="2000steps|3epochs|30s",
            help="Training of each run, the same number of steps for every head; a time is that of "
            "the slowest head. 400 steps by default.",
        ),
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Seeds of each head; 3 by default.")] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="lstm|transformer|bag", help="Backbone; lstm for text, bag for rows."),
    ] = None,
    task: Task = None,
    device: Device = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help=f"Folder of the results; by default below {_RUNS}/."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the comparison in --out.")
    ] = False,
    vocab_size: VocabSize = None,
    min_count: MinCount = None,
    limit: Limit = None,
    encoding: Encoding = None,
    text: TextColumn = None,
    label: LabelColumn = None,
    features: FeatureColumns = None,
    tokenizer: TokenizerFile = None,
    batch: Annotated[
        int | None, typer.Option(help="Batch size: 32 windows of text by default, or 128 rows.")
    ] = None,
    length: Annotated[int | None, typer.Option(help="Tokens per window; 32 by default.")] = None,
    width: Annotated[int | None, typer.Option(help="Hidden size; 128 by default.")] = None,
    layers: Annotated[
        int | None,
        typer.Option(help="Layers of the backbone: 1 of an LSTM by default, 2 of a transformer."),
    ] = None,
    lr: Annotated[
        str | None,
        typer.Option(
            metavar="auto|NUMBER",
            help="Learning rate; auto, the default, tries three for each head and takes the best.",
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="The cheapest head whose quality is within this share of the best is recommended; "
            "0.03 by default."
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="The first seed; the others follow. 1 by default.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of torch.")] = None,
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
    from lastlayer.lab.options import CompareOptions

    options = CompareOptions(
        data=data, heads=tuple(head) if head else None, budget=budget, seeds=seeds, model=model,
        task=task, device=device, vocab_size=vocab_size, min_count=min_count, batch=batch,
        length=length, width=width, layers=layers, lr=lr, tolerance=tolerance, seed=seed,
        threads=threads, limit=limit, encoding=encoding,
        text=text, label=label, features=features, tokenizer=tokenizer,
    )  # fmt: skip
    with refusals():
        if resume and out is None:
            from lastlayer.lab.errors import LabError

            raise LabError("--resume: expected --out with the folder to go on with, got none")
        options.settled()
        code = _compare(options, out or _new_folder(data), resume, quiet, as_json, ray)
        raise typer.Exit(code)


def _compare(
    options: Any, out: Path, resume: bool, quiet: bool, as_json: bool, ray: str | None
) -> int:
    from lastlayer.lab.comparison import compare as run
    from lastlayer.lab.records import finite
    from lastlayer.lab.report import require_packages, write_report
    from lastlayer.lab.show import print_summary

    require_packages()
    shown = console()
    done = run(options, out, resume=resume, quiet=quiet or as_json, console=shown, ray=ray)
    page = write_report(out)
    if as_json:
        runs = [{k: v for k, v in each.items() if k != "explorer"} for each in done.results]
        made = {
            "out": str(out), "page": str(page), "interrupted": done.interrupted, "runs": runs,
            "costs": done.costs,
        }  # fmt: skip
        typer.echo(json.dumps(finite(made), indent=2))
    elif not quiet:
        print_summary(out, shown)
    if done.interrupted:
        # What is read by machines stays as it is without a Ctrl-C.
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
