"""What the heads share that group their classes by frequency."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lastlayer._checks import as_permutation, check_chunk_rows
from lastlayer._torch import accumulation_dtype
from lastlayer.fused._options import cross_entropy_options
from lastlayer.fused.engine import MOST_ROUNDED_ADDITIONS
from lastlayer.heads._checks import check_classes, check_hidden
from lastlayer.heads._rows import row_chunks
from lastlayer.heads.base import Head

# The place of a target that does not count.
IGNORED = -1


class RankedHead(Head):
    """Classes have places, and a group of classes is a range of places.

    ``order`` has the class of each place and ``places`` the place of each class; both are None
    where class c is at place c. Inside a group classes stand in the order of their ids.
    """

    order: Tensor | None
    places: Tensor | None
    # Numbers held for each score of a chunk, itself included.
    _copies = 4.0

    def __init__(
        self,
        in_features: int,
        ends: Sequence[int],
        order: Any,
        *,
        label_smoothing: float,
        ignore_index: int | None,
        reduction: str,
        chunk_rows: int | str,
        device: torch.device | str | None,
    ) -> None:
        n_classes = ends[-1]
        super().__init__(in_features, n_classes, ignore_index=ignore_index, reduction=reduction)
        check_chunk_rows(chunk_rows)
        cross_entropy_options(label_smoothing, 0.0, None, 1.0)
        self.chunk_rows, self.label_smoothing = chunk_rows, label_smoothing
        # The first and the last place of each group.
        self._groups = tuple(pairwise([0, *ends]))
        by_place = None if order is None else _inside_groups_by_id(order, self._groups)
        self._set_order(by_place, device)

    def _set_order(self, by_place: Tensor | None, device: torch.device | str | None) -> None:
        if by_place is not None and _is_counting(by_place):
            by_place = None
        device = torch.get_default_device() if device is None else device
        by_class = None if by_place is None else by_place.argsort()
        for name, values in (("order", by_place), ("places", by_class)):
            self.register_buffer(name, None if values is None else values.to(device))
        # On meta nothing is kept; what is filled in later has to be known until then.
        self._order_to_come = by_place if torch.device(device).type == "meta" else None

    def _fill_order(self) -> None:
        """What :meth:`reset_parameters` leaves of a head that was made on the meta device."""
        to_come = self._order_to_come
        if to_come is None or self.order is None or self.places is None or self.order.is_meta:
            return
        self.order.copy_(to_come)
        self.places.copy_(to_come.argsort())
        self._order_to_come = None

    def _places_of(self, classes: Tensor) -> Tensor:
        return classes if self.places is None else self.places[classes]

    def _target_places(self, target: Tensor) -> Tensor:
        """Of targets ``(n,)``; :data:`IGNORED` for those that do not count."""
        if self.ignore_index is None:
            return self._places_of(target)
        counts = target != self.ignore_index
        if self.places is None:
            return torch.where(counts, target, IGNORED)
        return torch.where(counts, self.places[torch.where(counts, target, 0)], IGNORED)

    def _classes_at(self, places: Tensor) -> Tensor:
        return places if self.order is None else self.order[places]

    def _by_class(self, by_place: Tensor) -> Tensor:
        """Columns of places as columns of classes."""
        return by_place if self.places is None else by_place.index_select(-1, self.places)

    @abstractmethod
    def _rows_log_prob(self, rows: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Log-probabilities of all classes, or of ``chosen`` ones (rows, k); differentiable."""

    def log_prob(self, hidden: Tensor, classes: Tensor | None = None) -> Tensor:
        """Exact log-probabilities in float32, or in float64 from float64.

        Scores are float32 also where the head is in half precision. They are made for a chunk of
        rows at a time; only a result for all classes has one number a row and class. The result
        is differentiable; for chosen classes backward makes the scores of each chunk again.

        Args:
            hidden: ``(*batch, in_features)``.
            classes: class ids, int64: ``(*batch, k)``, or ``(k,)`` for every row; None for all.

        Returns:
            ``(*batch, n_classes)``, or ``(*batch, k)``.
        """
        check_hidden(self, hidden)
        chosen = None if classes is None else check_classes(self, hidden, classes)
        rows = self._operand(hidden)
        recording = torch.is_grad_enabled() and (
            rows.requires_grad or any(each.requires_grad for each in self.parameters())
        )
        with torch.autocast(hidden.device.type, enabled=False):
            if not recording:
                made = self._filled_in_chunks(rows, chosen)
            elif chosen is None:
                made = self._rows_log_prob(rows)
            else:
                made = self._remade_in_backward(rows, chosen)
        return made.reshape(*hidden.shape[:-1], made.shape[-1])

    def _operand(self, hidden: Tensor) -> Tensor:
        """Rows in the dtype of autocast where it is on."""
        rows, device = hidden.reshape(-1, self.in_features), hidden.device.type
        return rows.to(torch.get_autocast_dtype(device)) if _autocast_is_on(hidden) else rows

    def _filled_in_chunks(self, rows: Tensor, chosen: Tensor | None) -> Tensor:
        width = self.n_classes if chosen is None else chosen.shape[-1]
        made = rows.new_empty(rows.shape[0], width, dtype=accumulation_dtype(rows.dtype))
        for part in self._chunks(rows, self.n_classes):
            made[part] = self._rows_log_prob(rows[part], None if chosen is None else chosen[part])
        return made

    def _remade_in_backward(self, rows: Tensor, chosen: Tensor) -> Tensor:
        chunks = list(self._chunks(rows, self.n_classes))
        parameters = {}
        if rows.itemsize < 4 and len(chunks) > MOST_ROUNDED_ADDITIONS:
            # The gradients of the chunks are added where these are made: in float32.
            parameters = {name: each.float() for name, each in self.named_parameters()}
        return torch.cat([
            checkpoint(
                self._rounded_log_prob, rows[part], chosen[part], parameters,
                use_reentrant=False, preserve_rng_state=False,
            )
            for part in chunks
        ])  # fmt: skip

    def _rounded_log_prob(
        self, rows: Tensor, chosen: Tensor, parameters: dict[str, Tensor]
    ) -> Tensor:
        rounded = {f"head.{name}": each.to(rows.dtype) for name, each in parameters.items()}
        if not rounded:
            return self._rows_log_prob(rows, chosen)
        made: Tensor = torch.func.functional_call(_RowsLogProb(self), rounded, (rows, chosen))
        return made

    def _chunks(self, rows: Tensor, n_scores: int) -> Iterator[slice]:
        return row_chunks(rows, n_scores, self.chunk_rows, self._copies)

    def config(self) -> dict[str, Any]:
        return {
            **super().config(),
            # The order itself is part of the state.
            "order": None if self.order is None else True,
            "label_smoothing": self.label_smoothing,
            "chunk_rows": self.chunk_rows,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        head = cls(**{**config, "order": None})
        if config["order"]:
            head.order, head.places = (torch.arange(head.n_classes) for _ in range(2))
        return head


class _RowsLogProb(torch.nn.Module):
    """The head as a module that is called for log-probabilities."""

    def __init__(self, head: RankedHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, rows: Tensor, chosen: Tensor) -> Tensor:
        return self.head._rows_log_prob(rows, chosen)


def _autocast_is_on(tensor: Tensor) -> bool:
    device = tensor.device.type
    if device == "meta" or tensor.dtype == torch.float64:
        return False
    return torch.is_autocast_enabled(device)


def _is_counting(values: Tensor) -> bool:
    """0, 1, 2, …."""
    return torch.equal(values, torch.arange(len(values), device=values.device))


def _inside_groups_by_id(order: Any, groups: Sequence[tuple[int, int]]) -> Tensor:
    by_place = as_permutation("order", order, groups[-1][1])
    return torch.from_numpy(np.concatenate([np.sort(by_place[a:b]) for a, b in groups]))
