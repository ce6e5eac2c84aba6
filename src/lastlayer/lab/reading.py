"""The data that options ask for, and what was found in it."""

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


def told_of(data: Data) -> list[str]:
    """What was found in the data, for a person who did not say it."""
    described = data.description
    task = f"Task: {data.task}"
    if described.get("task_reason", "as asked") != "as asked":
        task += f" ({described['task_reason']}; --task asks for another)"
    lines = [task]
    columns = described.get("columns") or {}
    if columns:
        listed = {use: [v] if isinstance(v, str) else v for use, v in columns.items()}
        found = (
            f"{use} from {', '.join(names[:6])}{', …' * (len(names) > 6)}"
            for use, names in listed.items()
        )
        lines.append(f"Columns: {'; '.join(found)}")
    return [*lines, *(f"Note: {each}." for each in described.get("notes", ()))]
