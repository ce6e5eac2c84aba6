"""Multi-label sets as MULAN has them: ARFF, and an XML file that names the labels."""

from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET

import numpy as np
from numpy.typing import NDArray

from lastlayer.lab.data._arff import Arff, read_arff
from lastlayer.lab.data._arff_header import POSITIVE, Attribute, unescaped
from lastlayer.lab.data._files import plain_stem
from lastlayer.lab.data._layout import files_by_part, part_named
from lastlayer.lab.data._rows import assemble_rows, three_parts
from lastlayer.lab.data.errors import broken
from lastlayer.lab.data.label_data import Integers, LabelData, LabelPart, Lists, SparseRows

SUFFIXES = (".arff",)
# A list of more values is taken for names of the rows.
_MOST_VALUES = 100


class Layout(NamedTuple):
    """Which columns are labels, and what becomes of the others."""

    labels: list[int]
    numbers: list[int]
    """Numbers, and yes or no."""
    lists: list[int]
    """One column for each value."""
    left_out: list[str]


def mulan_data(
    path: Path, *, encoding: str, limit: int | None, labels: str | Path | None = None
) -> LabelData:
    """A file or a folder with parts; ``labels`` is the XML where it cannot be found by name."""
    files = files_by_part(path, SUFFIXES)
    xml = Path(labels) if labels else _xml_beside(files["train"])
    names = label_names(xml)
    read = {part: read_arff(file, encoding) for part, file in files.items()}
    attributes = read["train"].attributes
    for part, found in read.items():
        if found.attributes != attributes:
            what = "its attributes are not those of the training file"
            raise broken(what, f"compare it with {files['train'].name}", path=files[part])
    layout = _layout(attributes, names, files["train"], xml)
    parts = {part: _part(found, layout, files[part]) for part, found in read.items()}
    description = {
        "source": str(path),
        "format": "ARFF",
        "labels": str(xml),
        "left_out": layout.left_out,
        "limit": limit,
    }
    return assemble_rows(
        path.name,
        three_parts(parts, limit, str(path)),
        _feature_names(attributes, layout),
        [attributes[c].name for c in layout.labels],
        description,
        where=str(path),
    )


def _xml_beside(arff: Path) -> Path:
    """Of the same name, without the word for the part; or the only one there."""
    beside = sorted(arff.parent.glob("*.xml"))
    words = [w for w in plain_stem(arff).split("-") if part_named(w) is None]
    for stem in (plain_stem(arff), "-".join(words), *words[:1]):
        for xml in beside:
            if xml.stem.lower() == stem:
                return xml
    if len(beside) == 1:
        return beside[0]
    found = "none" if not beside else f"{len(beside)}"
    what = f"expected an XML file with the names of the labels beside it, got {found}"
    raise broken(what, f"name it {'-'.join(words)}.xml, or give labels=PATH", path=arff)


def label_names(xml: Path) -> list[str]:
    """The names in ``<labels><label name="…"/></labels>``, at any depth."""
    try:
        root = ET.fromstring(xml.read_bytes())
    except OSError as error:
        remedy = "check the path and its permissions"
        raise broken(f"cannot be read ({error.strerror})", remedy, path=xml) from None
    except ET.ParseError as error:
        remedy = 'expected <labels><label name="…"/></labels>'
        raise broken(f"not XML ({error})", remedy, path=xml) from None
    found = [e.get("name") for e in root.iter() if e.tag.rpartition("}")[2] == "label"]
    names = [unescaped(name) for name in found if name is not None]
    if not names or len(names) != len(found):
        what = f"{len(names)} names of labels"
        raise broken(what, 'expected <labels><label name="…"/></labels>', path=xml)
    return names


def _layout(attributes: tuple[Attribute, ...], names: list[str], arff: Path, xml: Path) -> Layout:
    place = {each.name: c for c, each in enumerate(attributes)}
    missing = [name for name in names if name not in place]
    if missing:
        some = ", ".join(map(repr, missing[:3])) + (", …" if len(missing) > 3 else "")
        what = f"{len(missing)} of its {len(names)} labels are no attributes of {arff.name}: {some}"
        raise broken(what, "give the XML file of this set", path=xml)
    labels = sorted({place[name] for name in names})
    for c in labels:
        values = attributes[c].values
        if values is not None and not attributes[c].is_binary:
            what = f"the label {attributes[c].name!r} has the values {', '.join(values[:4])}"
            raise broken(what, "a label is 0 or 1", path=arff)
    numbers, lists, left_out = [], [], []
    own = {*labels}
    for c, each in enumerate(attributes):
        if c in own:
            continue
        values = each.values
        if not each.used or (values and len(values) > _MOST_VALUES):
            left_out.append(each.name)
        elif values is None or each.is_binary:
            numbers.append(c)
        else:
            lists.append(c)
    return Layout(labels, numbers, lists, left_out)


def _feature_names(attributes: tuple[Attribute, ...], layout: Layout) -> list[str]:
    lists = [f"{attributes[c].name}={v}" for c in layout.lists for v in attributes[c].values or ()]
    return [*(attributes[c].name for c in layout.numbers), *lists]


def _part(found: Arff, layout: Layout, path: Path) -> LabelPart:
    rows, attributes = found.rows, found.attributes
    binary = [c for c in (*layout.labels, *layout.numbers) if attributes[c].values]
    if isinstance(rows, SparseRows):
        # What a sparse row leaves out is the first value: 0, unless a list says otherwise.
        if not layout.lists and not any(_truth(attributes[c])[0] for c in binary):
            labels = _columns(rows, layout.labels)
            _check_labels(labels.values, labels.indices, layout, attributes, path)
            return LabelPart(_columns(rows, layout.numbers), Lists(labels.indices, labels.offsets))
        rows = rows.dense()
    for c in binary:
        rows[:, c] = _truth(attributes[c])[rows[:, c].astype(np.int64)]
    marked = rows[:, layout.labels]
    row, label = np.nonzero(marked)
    _check_labels(marked[row, label], label, layout, attributes, path)
    offsets = np.searchsorted(row, np.arange(len(rows) + 1)).astype(np.int64)
    chosen = [
        (rows[:, c, None] == np.arange(len(attributes[c].values or ()))).astype(np.float32)
        for c in layout.lists
    ]
    features = np.concatenate([rows[:, layout.numbers], *chosen], 1)
    return LabelPart(features, Lists(label.astype(np.int64), offsets))


def _truth(each: Attribute) -> NDArray[np.float32]:
    """For each value of a list of yes and no, 1 or 0."""
    return np.array([value.lower() in POSITIVE for value in each.values or ()], np.float32)


def _columns(rows: SparseRows, chosen: list[int]) -> SparseRows:
    """Some of the columns, without entries that are 0."""
    place = np.full(rows.width, -1)
    place[chosen] = np.arange(len(chosen))
    kept = (place[rows.indices] >= 0) & (rows.values != 0)
    before = np.concatenate([[0], np.cumsum(kept)])
    return SparseRows(
        place[rows.indices[kept]], before[rows.offsets], rows.values[kept], len(chosen)
    )


def _check_labels(
    values: NDArray[np.float32],
    labels: Integers,
    layout: Layout,
    attributes: tuple[Attribute, ...],
    path: Path,
) -> None:
    wrong = values != 1
    if wrong.any():
        place = int(wrong.argmax())
        name = attributes[layout.labels[labels[place]]].name
        what = f"the label {name!r} is {values[place]:g} in a row"
        raise broken(what, "a label is 0 or 1", path=path)
