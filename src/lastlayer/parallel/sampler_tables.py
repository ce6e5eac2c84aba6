"""Tables of samplers whose rows are spread over processes, as class vectors are.

Draws follow from a counter that all processes have alike, so that all of them ask for the same
entries: each gives those that it has, in one all-reduce. Entries of targets, which are others in
every process, are looked up as class vectors are.
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

# Tables with a row per class; the others are in an order of their own.
BY_CLASS = "weight", "rank"


class SpreadTables:
    """Reads entries of the tables of a sampler, of which each process has a range of rows.

    Args:
        group: the processes.
        layout: of the rows of tables in the order of the classes; None where the classes of the
            sampler are not those of the head.
    """

    def __init__(self, group: Any, layout: Layout | None) -> None:
        self.group, self.layout = group, layout
        # Who asks for what is not drawn: "each" process for its own entries, "all" for the same,
        # or "here" for entries that this process has.
        self.asking = "each"

    @contextmanager
    def asked_by(self, who: str) -> Iterator[None]:
        """A context in which entries are asked for otherwise."""
        before, self.asking = self.asking, who
        try:
            yield
        finally:
            self.asking = before

    def entries(self, name: str, table: Any, places: Tensor, drawn: bool) -> Tensor:
        """``table[places]``; unless entries are here, all processes call this together.

        Args:
            name: of the table.
            table: a DTensor with ``Shard(0)``.
            places: in the order of the sampler, of any shape.
            drawn: whether all processes ask for the same, since they have drawn it.
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
            # Without a mask as an index, for which the host would wait.
            place = rows - shards.first
            here = (place >= 0) & (place < shards.here)
            mine = torch.where(here, part[place.clamp(0, shards.here - 1)], 0)
            return summed(mine, self.group)
        needed, place = torch.unique(rows, return_inverse=True)
        (found,) = looked_up(shards, needed, part)
        return found[place]


def spreadable_tables(sampler: Any) -> list[str]:
    """Names of the tables of a sampler that can be spread over processes."""
    if not isinstance(sampler, Sampler):
        return []
    return [name for name in sampler.spreadable if sampler._buffers[name] is not None]


def with_spread_tables(sampler: Sampler, tables: SpreadTables) -> Sampler:
    """A copy that reads its tables by ``tables``; they are still to be spread.

    The sampler itself, which other heads may have as well, stays as it is.
    """
    made = copy.copy(sampler)
    made._buffers = dict(sampler._buffers)
    made._spread, made._inclusion, made._ready_on = tables, None, None
    # Of all classes, and not known of a part of them.
    if isinstance(made, Unigram):
        made._counts = None
    return made


def without_state(sampler: Sampler) -> Sampler:
    """A sampler with whole tables on the meta device, in the place of one whose are spread."""
    return type(sampler)._on_meta(sampler._saved_config())
