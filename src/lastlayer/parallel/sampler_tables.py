"""Tables of samplers whose rows are sharded over processes, like class vectors.

Draws depend on a counter that is equal in all processes, so all of them need the same entries. Each
process contributes the entries that it has, in one all-reduce. Entries of targets differ between
processes, and are looked up like class vectors.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lastlayer._processes import Layout, Shards, local_part, summed
from lastlayer.parallel.lookup import looked_up
from lastlayer.samplers import Sampler, Unigram

# Tables with one row per class id; others are in an order of their own.
BY_CLASS = "weight", "rank"


class SpreadTables:
    """Reads entries of a sampler's tables, of which each process has a range of rows.

    Args:
        group: the process group.
        layout: the order of the rows of tables in :data:`BY_CLASS`; None if the classes of the
            sampler are not those of the head.
    """

    def __init__(self, group: Any, layout: Layout | None) -> None:
        self.group, self.layout = group, layout
        # Which entries other than draws are read: "each" process reads its own, "all" processes
        # read the same, or all entries are "here", in this process.
        self.asking = "each"

    @contextmanager
    def asked_by(self, who: str) -> Iterator[None]:
        """A context that sets ``asking``."""
        before, self.asking = self.asking, who
        try:
            yield
        finally:
            self.asking = before

    def entries(self, name: str, table: Any, places: Tensor, drawn: bool) -> Tensor:
        """``table[places]``. All processes must call this together, unless entries are "here".

        Args:
            name: name of the table.
            table: a DTensor with ``Shard(0)``.
            places: indices in the order of the sampler, of any shape.
            drawn: whether these are draws, which are the same in all processes.
        """
        by_class = self.layout if name in BY_CLASS else None
        rows = places if by_class is None else by_class.rows_of(places)
        shards, part = Shards.even(self.group, table.shape[0]), local_part(table)
        asking = "all" if drawn else self.asking
        if asking == "here" or shards.processes == 1:
            found: Tensor = part[rows - shards.first]
            return found
        if asking == "all":
            if not shards.here:
                return summed(torch.zeros_like(rows), self.group)
            # Indexing with a mask would make the host wait.
            place = rows - shards.first
            here = (place >= 0) & (place < shards.here)
            mine = torch.where(here, part[place.clamp(0, shards.here - 1)], 0)
            return summed(mine, self.group)
        needed, place = torch.unique(rows, return_inverse=True)
        (found,) = looked_up(shards, needed, part)
        return found[place]


def spreadable_tables(sampler: Any) -> list[str]:
    """Names of the tables of a sampler that can be sharded over processes."""
    if not isinstance(sampler, Sampler):
        return []
    return [name for name in sampler.spreadable if sampler._buffers[name] is not None]


def with_spread_tables(sampler: Sampler, tables: SpreadTables) -> Sampler:
    """A copy of the sampler that reads its tables through ``tables``, to be sharded afterwards.

    The sampler itself is not changed, since other heads may use it.
    """
    made = copy.copy(sampler)
    made._buffers = dict(sampler._buffers)
    made._spread, made._inclusion, made._ready_on = tables, None, None
    # These cover all classes, and cannot be computed from a part.
    if isinstance(made, Unigram):
        made._counts = None
    return made


def without_state(sampler: Sampler) -> Sampler:
    """The sampler with whole tables on the meta device, to replace one with sharded tables."""
    return type(sampler)._on_meta(sampler._saved_config())
