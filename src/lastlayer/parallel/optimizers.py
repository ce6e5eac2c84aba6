"""Parameter groups and gradient clipping for models with plain tensors and DTensors."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from lastlayer._processes import is_dtensor


def parameter_groups(parameters: Tensor | Iterable[Tensor]) -> list[dict[str, Any]]:
    """Groups of parameters for ``torch.optim``: plain tensors, and the DTensors of each mesh.

    On a GPU torch's optimisers update all parameters of a group in one call, which rejects plain
    tensors and DTensors together. A model with a :class:`ClassParallel` has both.

    Args:
        parameters: those of the backbone and the head.

    Returns:
        One group per kind that occurs. Options of the optimiser apply to all groups.

    Example:
        >>> import torch
        >>> from lastlayer import heads, parallel
        >>> body, head = torch.nn.Linear(8, 8), heads.FullSoftmax(8, 100)
        >>> both = [*body.parameters(), *head.parameters()]
        >>> optimizer = torch.optim.Adam(parallel.parameter_groups(both), lr=1e-3)
    """
    groups: dict[Any, list[Tensor]] = {}
    for each in _listed(parameters):
        of: Any = each
        groups.setdefault(of.device_mesh if is_dtensor(of) else None, []).append(each)
    return [{"params": some} for some in groups.values()]


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clips the gradients of plain and sharded parameters by the norm of all of them.

    ``torch.nn.utils.clip_grad_norm_`` rejects plain tensors and DTensors in one call. A model with
    a :class:`ClassParallel` has both: its class vectors are DTensors, its replicated parameters and
    those of a backbone are not. Like torch's function, this one returns the norm before clipping.

    All processes must call it with the same parameters. Gradients of plain parameters must be equal
    in all of them, as they are inside DDP.

    Args:
        parameters: parameters, whose gradients are changed in place.
        max_norm: maximum norm of all gradients together.
        norm_type: p of the norm, or ``math.inf``.
        error_if_nonfinite: whether to raise an error if the norm is infinite or NaN.

    Returns:
        The norm of all gradients before clipping, the same in all processes.

    Example:
        >>> import torch
        >>> from lastlayer import parallel
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> parallel.clip_grad_norm_([weight], 1.0)
        tensor(5.)
        >>> weight.grad
        tensor([0.6000, 0.8000])
    """
    groups: dict[Any, list[Tensor]] = {}
    for each in _listed(parameters):
        if each.grad is not None:
            of: Any = each.grad
            # Gradients on different meshes cannot be in one call either.
            key = (of.device_mesh, tuple(of.placements)) if is_dtensor(of) else None
            groups.setdefault(key, []).append(each)
    norms = []
    for some in groups.values():
        norm: Any = get_total_norm([each.grad for each in some if each.grad is not None], norm_type)
        norms.append(norm.full_tensor() if is_dtensor(norm) else norm)
    if not norms:
        return torch.tensor(0.0)
    total = get_total_norm(norms, norm_type, error_if_nonfinite)
    for some in groups.values():
        clip_grads_with_norm_(some, max_norm, total)
    return total


def _listed(parameters: Any) -> list[Tensor]:
    alone = isinstance(parameters, Tensor) or not hasattr(parameters, "__iter__")
    every = [parameters] if alone else [*parameters]
    for each in every:
        if not isinstance(each, Tensor):
            raise TypeError(
                f"parameters: expected tensors, got {type(each).__name__}; pass model.parameters()"
            )
    return every
