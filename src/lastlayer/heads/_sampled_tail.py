"""Draws among the classes outside an exact head, and how probable each is."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lastlayer.heads._sampled_checks import as_class_ids, check_sampler
from lastlayer.samplers import Sampler


class Drawn(NamedTuple):
    """Classes and how often each is expected."""

    ids: Tensor
    """int64 ``(m,)``."""
    log_prob: Tensor
    """Of one draw with replacement, or of being among those without; -inf for the head."""


class Tail(torch.nn.Module):
    """The classes that are drawn: all but those of the head.

    A sampler of all classes draws some of the head as well, which are left out. One of as many
    classes as the tail has draws among those alone, in the order of their ids.

    Args:
        head_classes: how many of the first classes are always counted, or which ones.
        n_classes: all classes.
        sampler: of all classes, or of the tail.
    """

    head_ids: Tensor
    tail_ids: Tensor | None

    def __init__(self, head_classes: Any, n_classes: int, sampler: Sampler) -> None:
        super().__init__()
        first = isinstance(head_classes, int) and not isinstance(head_classes, bool)
        ids = torch.empty(0) if first else _as_ids(head_classes, n_classes)
        size = head_classes if first else len(ids)
        if not 0 <= size < n_classes:
            raise ValueError(
                f"head_classes: expected 0 to {n_classes - 1}, so that something is left to draw, "
                f"got {size}"
            )
        ids = torch.arange(size) if first else ids
        left = n_classes - size
        self.is_own = bool(size) and getattr(sampler, "n_classes", None) == left
        check_sampler(sampler, left if self.is_own else n_classes)
        others = None
        if self.is_own and not first:
            kept = torch.ones(n_classes, dtype=torch.bool)
            kept[ids] = False
            others = kept.nonzero().squeeze(1)
        # Both follow from the configuration: they are no state. Kept apart as well, for a head that
        # was made on the meta device and gets its parameters later.
        self._made = ids, others
        self.register_buffer("head_ids", ids, persistent=False)
        self.register_buffer("tail_ids", others, persistent=False)
        self.register_load_state_dict_post_hook(_fill_in)

    @property
    def n_head(self) -> int:
        """How many classes are always counted."""
        return self.head_ids.shape[0]

    def draw(
        self,
        sampler: Sampler,
        n: int,
        counter: Tensor,
        unique: bool,
        dtype: torch.dtype = torch.float32,
    ) -> Drawn:
        """``n`` classes, different ones with ``unique``; log-probabilities at least in float32."""
        if unique:
            ids, log_prob = sampler.unique(n, counter=counter)
        elif dtype == torch.float64:
            ids = sampler.sample(n, counter=counter)
            log_prob = sampler.log_prob(ids, dtype=dtype)
        else:
            ids, log_prob = sampler.sample_with_log_prob(n, counter=counter)
        if not self.n_head:
            return Drawn(ids, log_prob)
        if self.is_own:
            return Drawn(self._class_of(ids), log_prob)
        return Drawn(ids, log_prob.masked_fill(self.is_head(ids), -torch.inf))

    def is_head(self, ids: Tensor) -> Tensor:
        """Whether classes are of the head."""
        if not self.n_head:
            return torch.zeros_like(ids, dtype=torch.bool)
        place = torch.searchsorted(self.head_ids, ids).clamp(max=self.n_head - 1)
        return self.head_ids[place] == ids

    def log_prob(self, sampler: Sampler, ids: Tensor, n: int, unique: bool) -> Tensor:
        """As of :class:`Drawn`, in float64."""
        names = self._name_of(ids) if self.is_own else ids
        if unique:
            made = sampler.log_expected(names, n).double()
        else:
            made = sampler.log_prob(names, dtype=torch.float64)
        return made.masked_fill(self.is_head(ids), -torch.inf) if self.n_head else made

    def log_left(self, sampler: Sampler, target: Tensor, dtype: torch.dtype) -> Tensor:
        """log(1 − q(head) − q(targets)), ``(n,)``, for targets ``(n, p)``, negative for none."""
        if not self.n_head and target.shape[1] == 1:
            return sampler.log_complement(target.squeeze(1), dtype=dtype)
        probs = self.log_prob(sampler, target.clamp(min=0), 1, unique=False).exp()
        again = (target.unsqueeze(-1) == target.unsqueeze(-2)).tril(-1).any(-1)
        taken = probs.masked_fill(again | (target < 0), 0.0).sum(-1)
        if self.n_head and not self.is_own:
            taken = taken + sampler.log_prob(self.head_ids, dtype=torch.float64).exp().sum()
        # Where they are all there is, rounding may make their sum more than 1.
        return torch.log1p(-taken.clamp(max=1.0)).to(dtype)

    def _class_of(self, names: Tensor) -> Tensor:
        return names + self.n_head if self.tail_ids is None else self.tail_ids[names]

    def _name_of(self, ids: Tensor) -> Tensor:
        if self.tail_ids is None:
            return (ids - self.n_head).clamp(min=0)
        return torch.searchsorted(self.tail_ids, ids).clamp(max=self.tail_ids.shape[0] - 1)


def _as_ids(head_classes: Any, n_classes: int) -> Tensor:
    if isinstance(head_classes, (bool, float, str)):
        raise TypeError(
            "head_classes: expected how many of the first classes, or a list of class ids, got "
            f"{type(head_classes).__name__}"
        )
    return as_class_ids("head_classes", head_classes, n_classes)


def _fill_in(tail: "Tail", _keys: Any) -> None:
    for buffer, made in zip((tail.head_ids, tail.tail_ids), tail._made, strict=True):
        if buffer is not None and made is not None and not buffer.is_meta:
            buffer.copy_(made)
