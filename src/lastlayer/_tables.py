"""Modules with tables that kernels read without looking at them, and what torch does to modules.

``to_empty``, ``load_state_dict(assign=True)``, a constructor under ``torch.device("meta")`` and
loaders that set attributes leave a table on another device, on none, or in memory that nobody
filled. A kernel would read indices from there. So a module is made ready before it is used: once,
and again after each of these.
"""

import secrets
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lastlayer._torch import constant_while_traced, without_modes

_FILLED = object()


class TabledModule(torch.nn.Module):
    """A module that is made ready for the device of its parameters before it is used.

    Tables are of two kinds. Those that follow from the constructor's arguments are plain
    attributes, made by :meth:`_make_tables`: no state, no buffers, so nothing can empty, broadcast
    or forget them. Those that are state are buffers: :meth:`_fresh_buffer` says what they start
    with, and :meth:`_check_state` what is wrong with those that were loaded.

    Whoever reads tables compares ``_ready_on`` with the device, which is cheap, and calls
    :meth:`_be_ready` where they differ. So does a compiler always: it must not look at what that
    changes.
    """

    # Where the tables are; None where something may have changed since they were made.
    _ready_on: torch.device | None = None
    # Buffers whose memory nobody has filled: that very tensor, or None for whatever is there.
    _unfilled: Mapping[str, Tensor | None] = MappingProxyType({})

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_after_loading)

    def _make_tables(self, device: torch.device) -> None:
        """Put tables that follow from the constructor's arguments on ``device``."""

    def _fresh_buffer(self, name: str) -> Tensor | None:  # noqa: ARG002 - for modules with any
        """What the constructor put into a buffer; None where only a state can tell."""
        return None

    def _check_state(self) -> None:
        """Raise ValueError where loaded buffers cannot be right; kernels trust them."""

    def _state_device(self) -> torch.device | None:
        """Where the parameters are, or else the buffers; None where there are neither."""
        for each in (*self.parameters(), *self.buffers()):
            return each.device
        return None

    @constant_while_traced
    def _be_ready(self) -> None:
        """:meth:`_make_ready`, where that has not been done since something changed."""
        if self._ready_on is None or self._ready_on != self._state_device():
            self._make_ready()

    def _make_ready(self) -> None:
        """Make tables where the parameters are, and check the buffers.

        Raises:
            RuntimeError: where a buffer has no values, and the constructor's arguments do not say
                which.
            ValueError: where a loaded one cannot be right.
        """
        device = self._state_device()
        # Those of a program that is being exported have no values to look at.
        traced = any(isinstance(each, FakeTensor) for each in self.buffers())
        with without_modes():
            known = device is not None and device.type != "meta" and not traced
            if device is not None and known:
                self._fill_buffers(device)
            before = dict(self._buffers)
            if device is not None:
                self._make_tables(device)
            for part in self.modules():
                if part is not self and isinstance(part, TabledModule):
                    part._follow(device)
            if known:
                self._check_filled(before)
                self._check_state()
        self._ready_on = None if traced else device

    def _follow(self, device: torch.device | None) -> None:
        """As a part of a module whose parameters are on ``device``."""
        if self._ready_on is None or self._ready_on != device:
            self._make_ready()

    def _is_unfilled(self, name: str) -> bool:
        buffer = self._buffers[name]
        if buffer is None or not buffer.numel():
            return False
        known = self._unfilled.get(name, _FILLED)
        return buffer.is_meta or known is None or known is buffer

    def _fill_buffers(self, device: torch.device) -> None:
        for name in filter(self._is_unfilled, [*self._buffers]):
            fresh = self._fresh_buffer(name)
            if fresh is not None:
                self._buffers[name] = fresh.to(device)

    def _check_filled(self, before: dict[str, Tensor | None]) -> None:
        """An error for a buffer that is still not filled, nor replaced since ``before``."""
        for name in filter(self._is_unfilled, self._buffers):
            if self._buffers[name] is before[name]:
                raise RuntimeError(
                    f"{name}: expected the values of a buffer of {type(self).__name__}, got memory "
                    "that nothing was written to, as the meta device and to_empty leave it; "
                    "load_state_dict fills it. A table that is not saved is made in _make_tables"
                )
        self._unfilled = {}

    def _forget(self, name: str, buffer: Tensor) -> None:
        # Loaders give memory to what is not saved, and nobody fills that: whatever is there then.
        saved = name not in self._non_persistent_buffers_set
        self._unfilled = {**self._unfilled, name: buffer if saved else None}

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        super().register_buffer(name, tensor, persistent)
        made = self._buffers[name]
        if made is not None and made.is_meta:
            self._forget(name, made)

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Self:
        before = {name: each for name, each in self._buffers.items() if each is not None}
        super()._apply(fn, recurse)
        replaced = {
            name: (old, new)
            for name, old in before.items()
            if (new := self._buffers[name]) is not None and new is not old and new.numel()
        }
        keeps = None
        for name, (old, new) in replaced.items():
            if old.is_meta or new.is_meta:
                self._forget(name, new)
                continue
            keeps = _keeps_values(fn) if keeps is None else keeps
            if not keeps:
                # What to_empty is for has values afterwards; tables are no part of that.
                with torch.no_grad():
                    new.copy_(old)
        if self._ready_on is not None and self._ready_on != self._state_device():
            self._ready_on = None
            _if_complete(self)
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self._ready_on = None
        super()._load_from_state_dict(state_dict, prefix, *rest)
        # The last argument; torch raises them at the end, and knows better than a check of tables.
        self.__dict__["_load_errors"] = rest[-1]
        loaded = {name: state_dict.get(prefix + name) for name in self._unfilled}
        self._unfilled = {
            name: buffer
            for name, buffer in self._unfilled.items()
            if loaded[name] is None or loaded[name].is_meta
        }


def _keeps_values(fn: Callable[[Tensor], Tensor]) -> bool:
    """Whether a function of tensors keeps what is in them; ``to_empty`` has one that does not."""
    # A number that is in no memory yet.
    number = torch.tensor([secrets.randbits(62)], device="cpu")
    return bool((fn(number).cpu() == number).all())


def _if_complete(module: TabledModule) -> None:
    """Make it ready at once where nothing is missing, so that its first use waits for nothing."""
    if not any(each.is_meta for each in (*module.parameters(), *module.buffers())):
        try:
            module._make_ready()
        except RuntimeError:
            # Its first use says so, unless the rest comes before that.
            module._ready_on = None


def _after_loading(module: Any, _keys: Any) -> None:
    if not module.__dict__.pop("_load_errors", None):
        _if_complete(module)
