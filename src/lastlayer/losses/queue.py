"""A queue of past keys, for more negatives than a batch has."""

from typing import Any

import torch
from torch import Tensor

from lastlayer._checks import check_int, check_scores
from lastlayer._processes import check_gather, gathered, shares
from lastlayer.losses.contrastive import check_groups


class NegativeQueue(torch.nn.Module):
    """The last ``size`` keys, and their groups, as negatives for :func:`lastlayer.info_nce`.

    It starts empty: until it is full there are fewer negatives, and none is made up. Keys, groups,
    the place of the next key and the number of keys are buffers: ``state_dict`` has all of them,
    and a resumed run goes on where the first one stopped. A batch may be short, or larger than the
    queue, of which the last ``size`` keys then stay.

    Keys are held without gradients. Push them after the loss, so that a key is not its own
    negative, or give groups.

    Args:
        size: the most keys that are held.
        dim: size of a key.
        device: where keys are held.
        dtype: of the keys held.

    Example:
        >>> import torch
        >>> from lastlayer.losses.contrastive import info_nce
        >>> queue = NegativeQueue(100, 8)
        >>> for _ in range(3):
        ...     query, key = torch.randn(32, 8), torch.randn(32, 8)
        ...     loss = info_nce(query, key, queue.keys())
        ...     queue.push(key)
        >>> len(queue)
        96

    Reference:
        He et al., Momentum contrast for unsupervised visual representation learning, CVPR 2020,
        arXiv:1911.05722.
    """

    memory: Tensor
    memory_groups: Tensor
    position: Tensor

    def __init__(
        self,
        size: int,
        dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.size, self.dim = size, dim = check_int("size", size), check_int("dim", dim)
        self.register_buffer("memory", torch.zeros(size, dim, device=device, dtype=dtype))
        self.register_buffer("memory_groups", torch.zeros(size, dtype=torch.int64, device=device))
        # The place of the next key, the number of keys, and whether they have groups.
        self.register_buffer("position", torch.zeros(3, dtype=torch.int64, device=device))
        # The same for the host, which would have to wait for a buffer on a GPU.
        self._next, self._count, self._grouped = 0, 0, False
        self.register_load_state_dict_post_hook(_read_position)

    def __len__(self) -> int:
        """How many keys are held."""
        return self._count

    def keys(self) -> Tensor:
        """The keys held, oldest first, ``(len(self), dim)``; a copy, which a push leaves alone."""
        return self.memory[self._order()]

    def groups(self) -> Tensor | None:
        """The groups of the keys held, int64, or None where keys were pushed without any."""
        return self.memory_groups[self._order()] if self._grouped else None

    def push(
        self,
        keys: Tensor,
        groups: Tensor | None = None,
        *,
        gather: bool | str = False,
        process_group: Any = None,
    ) -> None:
        """Add keys; the oldest ones leave where there is no more room.

        Args:
            keys: ``(n, dim)``, for any n.
            groups: their groups, integers ``(n,)``: for all keys that are ever pushed, or for none.
            gather: add the keys of all processes, as :func:`lastlayer.info_nce` does; all then hold
                the same.
            process_group: see there.
        """
        self._check(keys, groups)
        check_gather(gather, process_group)
        keys = keys.detach()
        if gather:
            of = shares(keys, gather, process_group)
            keys = gathered(keys, of)
            groups = None if groups is None else gathered(groups, of)
        kept = min(keys.shape[0], self.size)
        if not kept:
            return
        place = torch.arange(self._next, self._next + kept, device=self.memory.device) % self.size
        with torch.no_grad():
            self.memory[place] = keys[-kept:].to(self.memory)
            if groups is not None:
                self.memory_groups[place] = groups[-kept:].to(self.memory_groups)
        count = min(self.size, self._count + kept)
        self._move((self._next + kept) % self.size, count, groups is not None)

    def clear(self) -> None:
        """Forget all keys."""
        self._move(0, 0, False)

    def extra_repr(self) -> str:
        """What it was made with, and how full it is."""
        return f"{self.size}, {self.dim}, held={self._count}"

    def _move(self, following: int, count: int, grouped: bool) -> None:
        self._next, self._count, self._grouped = following, count, grouped
        self.position.copy_(torch.tensor([following, count, int(grouped)]), non_blocking=True)

    def _order(self) -> Tensor:
        first = self._next - self._count
        return torch.arange(first, self._next, device=self.memory.device) % self.size

    def _check(self, keys: Any, groups: Any) -> None:
        check_scores(keys, name="keys")
        if keys.dim() != 2 or keys.shape[1] != self.dim:
            raise ValueError(f"keys: expected shape (n, {self.dim}), got {tuple(keys.shape)}")
        if groups is not None:
            check_groups("groups", groups, keys.shape[:1], keys, "key")
        if self._count and keys.shape[0] and (groups is not None) != self._grouped:
            expected, got = ("groups", "None") if self._grouped else ("None", "groups")
            raise ValueError(
                f"groups: expected {expected}, as for the keys that are held, got {got}; clear() "
                "the queue to change"
            )


def _read_position(queue: NegativeQueue, _: Any) -> None:
    queue._next, queue._count, grouped = queue.position.tolist()
    queue._grouped = bool(grouped)
