"""Modules with index tables, which kernels read without checking them.

``to_empty``, ``load_state_dict(assign=True)``, a constructor under ``torch.device("meta")`` and
loaders that set attributes can leave a table on the wrong device, on meta, or uninitialised. A
kernel would then read invalid indices. So the tables are prepared and checked before the first use,
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
    """A module whose tables are prepared on the device of its parameters before they are used.

    There are two kinds of tables. Tables that depend only on the constructor's arguments are plain
    attributes, created by :meth:`_make_tables`. They are not buffers, so torch cannot empty,
    broadcast or drop them. Tables that are state are buffers: :meth:`_fresh_buffer` returns their
    initial values, and :meth:`_check_state` checks loaded ones.

    Code that reads tables compares ``_ready_on`` with the device, which is cheap, and calls
    :meth:`_be_ready` if they differ. Under torch.compile it always calls it: the compiler must not
    trace the attributes that this changes.
    """

    # The device of the tables; None if something may have changed since they were created.
    _ready_on: torch.device | None = None
    # Uninitialised buffers: the tensor itself, or None if any tensor of that name is uninitialised.
    _unfilled: Mapping[str, Tensor | None] = MappingProxyType({})

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_after_loading)

    def _make_tables(self, device: torch.device) -> None:
        """Create the tables that depend on the constructor's arguments, on ``device``."""

    def _fresh_buffer(self, name: str) -> Tensor | None:  # noqa: ARG002 - for modules with any
        """The initial values of a buffer; None if only a state dict can restore them."""
        return None

    def _check_state(self) -> None:
        """Raise a ValueError if loaded buffers are invalid; kernels do not check them."""

    def _state_device(self) -> torch.device | None:
        """The device of the parameters, or else of the buffers; None without either."""
        for each in (*self.parameters(), *self.buffers()):
            return each.device
        return None

    @constant_while_traced
    def _be_ready(self) -> None:
        """Calls :meth:`_make_ready` if something has changed since the last call."""
        if self._ready_on is None or self._ready_on != self._state_device():
            self._make_ready()

    def _make_ready(self) -> None:
        """Create the tables on the device of the parameters, and check the buffers.

        Raises:
            RuntimeError: if a buffer is uninitialised and its values do not follow from the
                constructor's arguments.
            ValueError: if a loaded buffer is invalid.
        """
        device = self._state_device()
        # While torch.export traces, buffers have no values to check.
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
        """Prepare this module as a submodule of one whose parameters are on ``device``."""
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
        """Raises an error for a buffer still uninitialised and not replaced since ``before``."""
        for name in filter(self._is_unfilled, self._buffers):
            if self._buffers[name] is before[name]:
                raise RuntimeError(
                    f"{name}: expected the values of a buffer of {type(self).__name__}, got "
                    "uninitialised memory, from the meta device or to_empty; call load_state_dict. "
                    "Tables that are not saved are created in _make_tables"
                )
        self._unfilled = {}

    def _forget(self, name: str, buffer: Tensor) -> None:
        # Loaders allocate buffers that are not saved without filling them, so any new tensor of
        # that name is uninitialised as well.
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
                # fn was to_empty, after which the caller initialises the parameters but not the
                # tables. So keep their values.
                with torch.no_grad():
                    new.copy_(old)
        if self._ready_on is not None and self._ready_on != self._state_device():
            self._ready_on = None
            _if_complete(self)
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self._ready_on = None
        super()._load_from_state_dict(state_dict, prefix, *rest)
        # The last argument is the list of errors. torch raises them at the end; these are clearer
        # than an error from a check of the tables.
        self.__dict__["_load_errors"] = rest[-1]
        loaded = {name: state_dict.get(prefix + name) for name in self._unfilled}
        self._unfilled = {
            name: buffer
            for name, buffer in self._unfilled.items()
            if loaded[name] is None or loaded[name].is_meta
        }


def _keeps_values(fn: Callable[[Tensor], Tensor]) -> bool:
    """Whether a function of tensors keeps their values; that of ``to_empty`` does not."""
    # A random number that uninitialised memory cannot contain by chance.
    number = torch.tensor([secrets.randbits(62)], device="cpu")
    return bool((fn(number).cpu() == number).all())


def _if_complete(module: TabledModule) -> None:
    """Prepare the tables now if nothing is on meta, so that the first use does not have to."""
    if not any(each.is_meta for each in (*module.parameters(), *module.buffers())):
        try:
            module._make_ready()
        except RuntimeError:
            # The first use raises this error, unless the missing values are loaded before.
            module._ready_on = None


def _after_loading(module: Any, _keys: Any) -> None:
    if not module.__dict__.pop("_load_errors", None):
        _if_complete(module)
