"""The data that options ask for."""

from lastlayer.lab.data import Data, DataError, load
from lastlayer.lab.errors import LabError
from lastlayer.lab.options import Settled


def read_data(settled: Settled) -> Data:
    """Whatever cannot be read is one message: a DataError or a LabError."""
    try:
        return load(settled.data, task=settled.task, **settled.reading)
    except DataError:
        raise
    except (ValueError, TypeError, LookupError, OSError, ImportError) as error:
        raise LabError(f"DATA: {error}") from error
