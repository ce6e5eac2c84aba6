"""A queue of keys of past batches, as additional negatives."""

from typing import Any

import torch
from torch import Tensor

from lastlayer._checks import check_int, check_scores
from lastlayer._processes import check_gather, gathered, shares
from lastlayer.losses.contrastive import check_groups


class NegativeQueue(torch.nn.Module):
    """A queue of the last ``size`` keys and their groups, negatives for :func:`lastlayer.info_nce`.

    It starts empty, not with random keys: until it is full there are fewer negatives. Its whole
    state is in buffers, so that ``state_dict`` saves it and a resumed run has the same negatives. A
    batch may be of any size; of a batch larger than the queue the last ``size`` keys are kept.

    Keys are stored without gradients. Push keys after computing the loss, so that a key is not its
    own negative, or give groups.

    Args:
        size: maximum number of keys.
        dim: size of a key.
        device: device of the stored keys.
        dtype: dtype of the stored keys.

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
        # Index of the next key, number of keys, and whether they have groups.
        self.register_buffer("position", torch.zeros(3, dtype=torch.int64, device=device))
        # The same on the host: reading a buffer on a GPU would need a host sync.
        self._next, self._count, self._grouped = 0, 0, False
        self.register_load_state_dict_post_hook(_read_position)

    def __len__(self) -> int:
        """Number of keys in the queue."""
        return self._count

    def keys(self) -> Tensor:
        """A copy of the keys, oldest first, ``(len(self), dim)``."""
        return self.memory[self._order()]

    def groups(self) -> Tensor | None:
        """The groups of the keys, int64, or None if keys were pushed without groups."""
        return self.memory_groups[self._order()] if self._grouped else None

    def push(
        self,
        keys: Tensor,
        groups: Tensor | None = None,
        *,
        gather: bool | str = False,
        process_group: Any = None,
    ) -> None:
        """Add keys; a full queue drops the oldest ones.

        Args:
            keys: ``(n, dim)``, for any n.
            groups: groups of the keys, integers ``(n,)``; give them at every push or never.
            gather: add the keys of all processes, so that all have the same queue; takes the values
                of the same argument of :func:`lastlayer.info_nce`.
            process_group: as in :func:`lastlayer.info_nce`.
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
        """Remove all keys."""
        self._move(0, 0, False)

    def extra_repr(self) -> str:
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
                f"groups: expected {expected}, as for the keys in the queue, got {got}; call "
                "clear() first"
            )


def _read_position(queue: NegativeQueue, _: Any) -> None:
    queue._next, queue._count, grouped = queue.position.tolist()
    queue._grouped = bool(grouped)
