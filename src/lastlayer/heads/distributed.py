"""Heads inside DistributedDataParallel, and heads whose parameters FSDP2 has sharded."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from lastlayer._processes import gathered, is_dtensor, shares
from lastlayer._tables import TabledModule
from lastlayer._torch import active_ddp


def prepare_ddp(model: torch.nn.Module, process_group: Any = None) -> list[str]:
    """Prepares a model with heads for ``DistributedDataParallel``; call it just before that.

    DDP then ignores three kinds of tensors. The first are parameters of heads with ``sparse=True``,
    whose gradients DDP cannot reduce: a hook gathers the rows that each process has touched and
    averages them, so every process has the same row-sparse gradient, with gloo and with NCCL. The
    second are tables of samplers and orders of classes, which are equal in all processes; DDP would
    broadcast them in every forward pass. The third are the class vectors of a
    :class:`lastlayer.parallel.ClassParallel`, of which each process has its own part.

    As with DDP itself, every process must compute a gradient for each of these parameters in every
    backward pass. Gradients may be accumulated, with or without ``no_sync()``. Parameters are
    broadcast once, from the first process of the group.

    Args:
        model: the model that DDP will wrap; parameters of dense heads and other layers are not
            changed.
        process_group: as for DDP; None for the default group.

    Returns:
        The names of all parameters and buffers that DDP ignores.

    Example:
        >>> import torch
        >>> from lastlayer import heads, samplers
        >>> head = heads.SampledSoftmax(16, 1000, samplers.Uniform(1000), 64, sparse=True)
        >>> model = torch.nn.ModuleDict({"body": torch.nn.Linear(8, 16), "head": head})
        >>> heads.prepare_ddp(model)  # then DistributedDataParallel(model)  # doctest: +SKIP
        ['head.weight', 'head.bias', 'head.rng_counter']
    """
    names: list[str] = []
    for prefix, module in model.named_modules():
        if not isinstance(module, TabledModule):
            continue
        dot = f"{prefix}." if prefix else ""
        if getattr(module, "sparse", False):
            for name, parameter in module.named_parameters(recurse=False):
                names.append(dot + name)
                _average_in_hook(parameter, process_group)
            module.__dict__["_averages_rows"] = True
        if getattr(module, "_is_spread", False):
            # The head of a ClassParallel, of whose tables each process has its own part.
            names += [dot + name for name, each in module.named_parameters() if is_dtensor(each)]
        names += [dot + name for name, each in module.named_buffers(recurse=False) if each.numel()]
    if names:
        ignored = [*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), *names]
        ddp = torch.nn.parallel.DistributedDataParallel
        ddp._set_params_and_buffers_to_ignore_for_model(model, ignored)
    return names


def check_sparse(head: Any) -> None:
    """Raises an error if DDP would get row-sparse gradients of a head, which it cannot reduce."""
    ddp = active_ddp()
    if ddp is not None and not head.__dict__.get("_averages_rows") and torch.is_grad_enabled():
        raise RuntimeError(
            "sparse: expected False inside DistributedDataParallel, which cannot reduce row-sparse "
            "gradients, got True; call lastlayer.heads.prepare_ddp(model) before "
            "DistributedDataParallel(model), which reduces the touched rows"
        )


def _average_in_hook(parameter: Tensor, group: Any) -> None:
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "prepare_ddp: expected a process group, to reduce the gradients of heads with "
            "sparse=True, got none; call torch.distributed.init_process_group first"
        )
    with torch.no_grad():
        first = 0 if group is None else dist.get_global_rank(group, 0)
        dist.broadcast(parameter.detach(), first, group=group)
    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(functools.partial(_average, group=group))


def _average(parameter: Tensor, *, group: Any) -> None:
    """Replaces ``parameter.grad`` by its mean over all processes.

    Previously accumulated gradients are equal in all processes, so the mean does not change them.
    """
    gradient, processes = parameter.grad, dist.get_world_size(group)
    if gradient is None or processes == 1:
        return
    if not gradient.is_sparse:
        dist.all_reduce(gradient, group=group)
        gradient.div_(processes)
        return
    gradient = gradient.coalesce()
    rows, values = gradient.indices()[0], gradient.values()
    of = shares(rows, True, group)
    ids, made = (gathered(each, of) for each in (rows, values / processes))
    whole = torch.sparse_coo_tensor(
        ids.unsqueeze(0), made, gradient.shape, check_invariants=False
    )  # fmt: skip
    parameter.grad = whole.coalesce()


def made_by_fsdp(cls: type) -> bool:
    """Whether ``fully_shard`` created this class: it subclasses that of each sharded module."""
    # Compared by name, since importing FSDP takes time and most programs do not need it.
    return any(each.__name__ == "FSDPModule" for each in cls.__bases__)


def gather_in_methods(cls: type[Any]) -> None:
    """Makes every public method with an argument ``hidden`` gather the sharded parameters.

    FSDP2 only does this for ``forward``. With ``register_fsdp_forward_method`` for each method, a
    method that calls another one would have sharded parameters again after that call.
    """
    for name in dir(cls):
        method = inspect.getattr_static(cls, name)
        if name.startswith("_") or not inspect.isfunction(method):
            continue
        taken = [*inspect.signature(method).parameters]
        if taken[1:2] == ["hidden"]:
            setattr(cls, name, (_inside if name == "forward" else _gathering)(method))
    cls._call_gathered = _call_gathered


def _inside(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.sparse and torch.is_grad_enabled():
            raise RuntimeError(
                "sparse: expected False for a head inside fully_shard, which cannot reduce "
                "row-sparse gradients, got True; construct the head with sparse=False, or use "
                "DistributedDataParallel with lastlayer.heads.prepare_ddp"
            )
        with _marked(self):
            return _not_a_view(forward(self, *args, **kwargs))

    return call


def _gathering(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.__dict__.get("_is_gathered"):
            return method(self, *args, **kwargs)
        if "_call_gathered" not in self.__dict__:
            from torch.distributed.fsdp import register_fsdp_forward_method

            register_fsdp_forward_method(self, "_call_gathered")
        return self._call_gathered(method, *args, **kwargs)

    return call


def _call_gathered(self: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _marked(self):
        return _not_a_view(method(self, *args, **kwargs))


def _not_a_view(made: Any) -> Any:
    """Clones a view that requires a gradient: FSDP2 cannot register its hook on a view."""
    recorded = isinstance(made, Tensor) and made.requires_grad and made._is_view()
    return made.clone() if recorded else made


@contextmanager
def _marked(head: Any) -> Iterator[None]:
    before = head.__dict__.get("_is_gathered", False)
    head.__dict__["_is_gathered"] = True
    try:
        yield
    finally:
        head.__dict__["_is_gathered"] = before


def whole_state(module: torch.nn.Module) -> tuple[dict[str, Tensor], bool]:
    """The state with full tensors, and whether this process should write it.

    If parameters are sharded, all processes must call this.
    """
    state = {name: value.detach() for name, value in module.state_dict().items()}
    if not any(map(is_dtensor, state.values())):
        return state, True
    # All processes gather in the same order, one tensor after the other.
    whole = {name: each.full_tensor() if is_dtensor(each) else each for name, each in state.items()}
    return whole, dist.get_rank() == 0
