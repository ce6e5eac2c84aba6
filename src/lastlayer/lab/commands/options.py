"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

Data = Annotated[
    str | None,
    typer.Argument(
        metavar="DATA",
        help="A file, a folder or hf:name; without it, the source of Python's own library.",
        show_default=False,
    ),
]
Heads = Annotated[
    list[str] | None,
    typer.Option(
        "--head",
        metavar="SPEC",
        help="A head and its arguments, such as adaptive:cutoffs=2000,10000 or mymodule:MyHead; "
        "repeatable. Without it, one of every family. lastlayer heads lists them.",
        show_default=False,
    ),
]
Task = Annotated[
    str | None, typer.Option(metavar="lm|multilabel", help="What is predicted; lm by default.")
]
VocabSize = Annotated[int | None, typer.Option(help="Size of the vocabulary, <unk> included.")]
MinCount = Annotated[int | None, typer.Option(help="Rarer words become <unk>.")]
Limit = Annotated[int | None, typer.Option(help="Largest number of tokens or rows for training.")]
Encoding = Annotated[str | None, typer.Option(help="Encoding of text files; utf-8 by default.")]
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
    str | None, typer.Option(metavar="auto|cpu|cuda", help="auto takes a CUDA GPU if there is one.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, below runs/.")]
