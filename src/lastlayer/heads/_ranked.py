"""What the heads share that group their classes by frequency."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from lastlayer._checks import as_permutation, check_chunk
from lastlayer.fused.cross_entropy import cross_entropy_numbers
from lastlayer.heads.base import ScoredHead


class RankedHead(ScoredHead):
    """Classes have places, and a group of classes is a range of places.

    ``order`` has the class of each place and ``places`` the place of each class; both are None
    where class c is at place c. Inside a group classes are sorted by id.
    """

    order: Tensor | None
    places: Tensor | None

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
        super().__init__(in_features, ends[-1], ignore_index=ignore_index, reduction=reduction)
        check_chunk(chunk_rows)
        cross_entropy_numbers(label_smoothing, 0.0, None, 1.0)
        self.chunk_rows, self.label_smoothing = chunk_rows, label_smoothing
        # The first and the last place of each group.
        self._groups = tuple(pairwise([0, *ends]))
        by_place = None
        if order is not None:
            given = as_permutation("order", order, self.n_classes)
            given = np.concatenate([np.sort(given[a:b]) for a, b in self._groups])
            if (given != np.arange(self.n_classes)).any():
                by_place = torch.from_numpy(given)
        device = torch.get_default_device() if device is None else torch.device(device)
        self.register_buffer("order", None if by_place is None else by_place.to(device))
        self.register_buffer("places", None if by_place is None else by_place.argsort().to(device))
        # On meta nothing is kept; what is filled in later has to be known until then.
        self._order_to_come = by_place if device.type == "meta" else None

    def _fill_order(self) -> None:
        """What :meth:`reset_parameters` fills in where a head was made on the meta device."""
        to_come = self._order_to_come
        if to_come is None or self.order is None or self.places is None or self.order.is_meta:
            return
        self.order.copy_(to_come)
        self.places.copy_(to_come.argsort())
        self._order_to_come = None

    def _places_of(self, classes: Tensor) -> Tensor:
        return classes if self.places is None else self.places[classes]

    def _classes_at(self, places: Tensor) -> Tensor:
        return places if self.order is None else self.order[places]

    def _by_class(self, by_place: Tensor) -> Tensor:
        """Columns of places as columns of classes."""
        return by_place if self.places is None else by_place.index_select(-1, self.places)

    def _log_frequencies(self, counts: Any) -> Tensor:
        logs = super()._log_frequencies(counts)
        return logs if self.order is None else logs[self.order.cpu()]

    def _check_state(self) -> None:
        self._check_order(self.order, self.places)

    def _check_order(self, order: Any, places: Any) -> None:
        for name, each in (("order", order), ("places", places)):
            # Another shape is told by torch.
            if type(each) is not Tensor or each.is_meta or each.shape != (self.n_classes,):
                return
            if each.dtype != torch.int64:
                raise ValueError(f"{name}: expected torch.int64, got {each.dtype}")
        by_place = as_permutation("order", order, self.n_classes)
        if (places.cpu().numpy() != by_place.argsort()).any():
            raise ValueError("places: expected the place of each class in order, got another one")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if self.order is not None:
            self._check_order(*(state_dict.get(prefix + name) for name in ("order", "places")))
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if self.order is not None and not self.order.is_meta and f"{prefix}order" in state_dict:
            self._order_to_come = None

    def config(self) -> dict[str, Any]:
        order = self.order if self._order_to_come is None else self._order_to_come
        return {**super().config(), "order": order}

    def extra_repr(self) -> str:
        sizes = {"in_features": self.in_features, "n_classes": self.n_classes}
        return self._shown(sizes | self.config())

    def _saved_config(self, config: dict[str, Any]) -> dict[str, Any]:
        # The order itself is part of the state.
        return {**config, "order": config["order"] is not None}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        if not isinstance(config["order"], bool):
            return cls(**config)
        head = cls(**{**config, "order": None})
        if config["order"]:
            head.order, head.places = (torch.arange(head.n_classes) for _ in range(2))
        return head
