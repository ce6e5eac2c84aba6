"""Data for the lab: text, labelled rows and pairs from files, and an embedded corpus."""

from lastlayer.lab.data.files import DataError
from lastlayer.lab.data.load import load
from lastlayer.lab.data.rows import LabelData, LabelPart, Lists, PairData, PairPart, SparseRows
from lastlayer.lab.data.text import TextData, Vocabulary

Data = TextData | LabelData | PairData

__all__ = [
    "Data",
    "DataError",
    "LabelData",
    "LabelPart",
    "Lists",
    "PairData",
    "PairPart",
    "SparseRows",
    "TextData",
    "Vocabulary",
    "load",
]
