"""Base class of the row-wise optimisers: the loop over parameters, and state with its own dtype."""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from lastlayer import kernels

# Up to this many rows ids are sorted as int32, which takes half the time of int64.
_MOST_NARROW = 2**31 - 1


class RowOptimizer(Optimizer):
    """An optimiser that updates the rows of a sparse gradient, or all rows for a dense one."""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        self._check_options(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; see :class:`torch.optim.Optimizer`."""
        self._check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: recomputes the loss and its gradients, and returns the loss.

        Returns:
            The return value of the closure, or None without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        slots = _Slots()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, parameter.grad, group, slots)
        return loss

    def _step_one(
        self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], slots: "_Slots"
    ) -> None:
        if not parameter.is_floating_point():
            raise TypeError(f"params: expected floating-point parameters, got {parameter.dtype}")
        state = self.state[parameter]
        if not state:
            state.update(self._fresh_state(parameter, group))
        if gradient.layout == torch.strided:
            self._update("reference", parameter, None, gradient, state, group)
            return
        _check_row_sparse(parameter, gradient)
        # Not -1, which is ambiguous for a table without rows.
        rows = parameter.view(parameter.shape[0], parameter.shape[1:].numel())
        ids, values = slots.of(gradient, rows)
        self._update("auto", rows, ids, values, state, group)

    @abstractmethod
    def _fresh_state(self, parameter: Tensor, group: dict[str, Any], /) -> dict[str, Tensor]:
        """The state before the first step, in the accumulation dtype of the parameter."""

    @abstractmethod
    def _update(
        self,
        impl: kernels.Impl,
        rows: Tensor,
        ids: Tensor | None,
        gradient: Tensor,
        state: dict[str, Tensor],
        group: dict[str, Any],
    ) -> None:
        """Updates the rows ``ids``, or all rows if it is None; ``gradient`` has their gradients."""

    @staticmethod
    @abstractmethod
    def _check_options(options: dict[str, Any]) -> None:
        """Raises an error if an option of a parameter group is invalid."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of ``state_dict()``, onto the devices of the parameters.

        The state keeps its dtype: torch would round accumulators and step counts to the dtype of
        the parameters.
        """
        super().load_state_dict(state_dict)
        numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
        parameters = [each for group in self.param_groups for each in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                self.state[parameter][name] = value.to(parameter.device, copy=True)


def _check_row_sparse(parameter: Tensor, gradient: Tensor) -> None:
    """Checks that the gradient has one sparse dimension and the parameter is contiguous."""
    if gradient.layout != torch.sparse_coo or gradient.sparse_dim() != 1:
        raise ValueError(
            "params: expected gradients that are dense, or torch.sparse_coo with one sparse "
            f"dimension, got {gradient.layout} of shape {tuple(gradient.shape)}"
        )
    if not parameter.is_contiguous():
        raise ValueError(
            "params: expected contiguous parameters for sparse gradients, got strides "
            f"{parameter.stride()} for shape {tuple(parameter.shape)}"
        )


class _Slots:
    """Row-sparse gradients of one step. A weight and its bias share one sort of their row ids."""

    def __init__(self) -> None:
        self._sorted: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def of(self, gradient: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Row ids ``(k,)`` and gradients ``(k, d)`` for a parameter ``rows`` ``(v, d)``.

        Equal ids are adjacent, and the first of them has the whole gradient of the row. On a GPU k
        is the number of entries, so that no host sync is needed for the number of distinct rows.
        """
        slotted = kernels.selected("touched_slots_", rows.device.type, rows.dtype) == "triton"
        if gradient.is_coalesced() or not slotted:
            gradient = gradient.coalesce()
            ids = gradient.indices()[0]
            return ids, gradient.values().reshape(ids.shape[0], rows.shape[1])
        entries = gradient._indices()[0]
        values = gradient._values().reshape(entries.shape[0], rows.shape[1])
        keys, order = self._order(entries, rows.shape[0])
        sums = values.new_empty(values.shape, dtype=torch.float32)
        nothing = sums.new_empty(0)
        kernels.touched_rows.slots_(
            "auto", nothing, values[:0], values.contiguous(), len(keys), order, keys,
            sums.new_ones(()), sums, nothing, None, False,
        )  # fmt: skip
        return keys, sums

    def _order(self, entries: Tensor, n_rows: int) -> tuple[Tensor, Tensor]:
        # All gradients are alive during the step, so equal addresses mean equal ids.
        known = entries.data_ptr(), entries.shape[0]
        if known not in self._sorted:
            narrow = entries.int() if n_rows <= _MOST_NARROW else entries
            self._sorted[known] = kernels.touched_rows.sort_ids("auto", narrow)
        return self._sorted[known]
