"""Data for the lab: text and labelled rows from files, and two corpora that are always there."""

from lastlayer.lab.data.errors import DataError
from lastlayer.lab.data.label_data import LabelData, LabelPart, Lists, SparseRows
from lastlayer.lab.data.load import load
from lastlayer.lab.data.text_data import TextData
from lastlayer.lab.data.vocabulary import Vocabulary

__all__ = [
    "DataError",
    "LabelData",
    "LabelPart",
    "Lists",
    "SparseRows",
    "TextData",
    "Vocabulary",
    "load",
]
