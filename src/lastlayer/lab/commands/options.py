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
    str | None,
    typer.Option(
        metavar="lm|classification|multilabel|pairs",
        help="What is predicted; inferred from the data by default, and said.",
    ),
]
VocabSize = Annotated[int | None, typer.Option(help="Size of the vocabulary, <unk> included.")]
MinCount = Annotated[int | None, typer.Option(help="Rarer words become <unk>.")]
Limit = Annotated[int | None, typer.Option(help="Largest number of tokens or rows for training.")]
Encoding = Annotated[str | None, typer.Option(help="Encoding of text files; utf-8 by default.")]
TextColumn = Annotated[
    str | None,
    typer.Option("--text", metavar="NAME,…", help="Column of the text; guessed by default."),
]
LabelColumn = Annotated[
    str | None,
    typer.Option(
        "--label",
        metavar="NAME",
        help="Column of the classes or labels, guessed by default; or the XML file of an ARFF set.",
    ),
]
FeatureColumns = Annotated[
    str | None,
    typer.Option("--features", metavar="NAME,…", help="Columns of numbers in place of text."),
]
TokenizerFile = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        metavar="PATH",
        help="A tokenizer.json, or a folder with one, in place of words between white space.",
    ),
]
Device = Annotated[
    str | None, typer.Option(metavar="auto|cpu|cuda", help="auto takes a CUDA GPU if there is one.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, below runs/.")]
