"""Whether processes have the same head, the same options and the same targets."""

import zlib
from typing import Any

import torch
from torch import Tensor

from lastlayer._processes import all_gathered, named
from lastlayer._torch import debugging, values_are_checked


def check_alike(module: Any) -> None:
    """Raises an error in all processes if their heads differ in type, options or sizes."""
    head = module.head
    sizes = [(name, tuple(each.shape), each.dtype) for name, each in head.named_parameters()]
    options = module.rows, module.assignment, module.even_rows
    mine = _digest(f"{head!r}{sizes}{options}")
    told = all_gathered(torch.tensor([mine], device=module.mesh.device_type), module.group)
    _check_equal("head", "options of the head and the same sizes", told.flatten().tolist(), module)


def check_agreement(module: Any, rows: Tensor, ids: Tensor) -> None:
    """Inside ``lastlayer.debug()``, raises an error in all processes if their arguments disagree.

    Compares the options and the mode of the head and, unless rows are local, the number of rows and
    the targets; hidden states must be finite.
    """
    if not debugging() or not values_are_checked(ids):
        return
    head = module.head
    options = _digest(f"{head!r}{head.training}{torch.is_grad_enabled()}")
    finite = bool(rows.isfinite().all())
    digest = int((ids * torch.arange(1, ids.numel() + 1, device=ids.device).view(ids.shape)).sum())
    n = len(rows) if module.rows == "shared" or module.even_rows else 0
    digest = digest if module.rows == "shared" else 0
    mine = torch.tensor([options, finite, n, digest], device=ids.device)
    told = all_gathered(mine, module.group).T.tolist()
    wrong = [rank for rank, is_finite in enumerate(told[1]) if not is_finite]
    if wrong:
        raise ValueError(
            "hidden: expected finite numbers in every process, got inf or NaN in "
            f"{named(wrong[:1], module.group)}"
        )
    _check_equal("head", "options of the head", told[0], module)
    _check_equal("hidden", "number of rows", told[2], module)
    _check_equal("target", "targets", told[3], module)


def _digest(text: str) -> int:
    return zlib.crc32(text.encode())


def _check_equal(argument: str, what: str, values: list[int], module: Any) -> None:
    other = [rank for rank, value in enumerate(values) if value != values[0]]
    if other:
        raise ValueError(
            f"{argument}: expected the same {what} in every process, got different ones in "
            f"{named(other[:1], module.group)} than in {named([0], module.group)}"
        )
