"""A step of a comparison with another number of classes, whose frequencies follow Zipf's law."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lastlayer.heads.recipes import ClassData
from lastlayer.lab._plan_costs import zipf_shares
from lastlayer.lab.feeding import PADDING, Batch, Feed

# Labels are drawn with replacement: so many more that a row nearly always has enough.
_SPARE_DRAWS, _SPARE_TIMES = 16, 4
# Letters that no language has: words with them are nobody else's.
_PRIVATE = 0xE000


class GivenStates(nn.Module):
    """A body that computes nothing: its hidden states are what it learns."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = nn.Parameter(hidden)

    def forward(self, _inputs: Any) -> Tensor:
        """The hidden states."""
        return self.hidden


@dataclass(frozen=True)
class Problem:
    """Makes data of any number of classes that is like the comparison's own in all else.

    Attributes:
        needs: what heads are made from at the data's own number of classes.
        shape: of the targets of a step, ``(batch, length)``, or ``(rows, labels)``.
        lengths: how many labels each row has; None where each target is one class.
        device: where it is.
    """

    needs: ClassData
    shape: tuple[int, ...]
    lengths: NDArray[np.int64] | None
    device: torch.device
    _made: dict[int, ClassData] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, needs: ClassData, feed: Feed, task: str, device: torch.device) -> "Problem":
        """With steps as the feed has them."""
        target = feed.batch(0, 0).target.cpu().numpy()
        lengths = (target != PADDING).sum(1) if task == "multilabel" else None
        return cls(needs, target.shape, lengths, device)

    @property
    def rows(self) -> int:
        """Of a step."""
        return self.shape[0] if self.lengths is not None else int(np.prod(self.shape))

    def at(self, classes: int) -> ClassData:
        """What heads are made from at so many classes."""
        if classes not in self._made:
            total = max(int(self.needs.counts.sum()), classes)
            counts = np.maximum(total * zipf_shares(classes), 1).astype(np.int64)
            words = words_for(self.needs.spellings, classes)
            self._made[classes] = ClassData(self.needs.in_features, counts, words)
        return self._made[classes]

    def body(self) -> GivenStates:
        """Hidden states of a step."""
        rows = self.shape if self.lengths is None else self.shape[:1]
        draw = torch.Generator().manual_seed(0)
        return GivenStates(torch.randn(*rows, self.needs.in_features, generator=draw)).to(
            self.device
        )

    def batch(self, classes: int) -> Batch:
        """Targets of a step, and tokens before them for heads that want to see some."""
        draw = np.random.default_rng([0, classes])
        ends = np.cumsum(zipf_shares(classes))
        if self.lengths is None:
            inputs, target = (_drawn(draw, ends, self.shape) for _ in range(2))
            return Batch(self._tensor(inputs), self._tensor(target), self.rows)
        table = np.full(self.shape, PADDING, np.int64)
        for row, length in zip(table, self.lengths, strict=True):
            # Of many draws the first that differ: with the chances of drawing without replacement.
            many = _drawn(draw, ends, (_SPARE_TIMES * int(length) + _SPARE_DRAWS,))
            kept = list(dict.fromkeys(many.tolist()))[: int(length)]
            row[: len(kept)] = kept
        return Batch(None, self._tensor(table), self.rows)

    def _tensor(self, values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(self.device)


def words_for(spellings: Sequence[str], classes: int) -> list[str]:
    """So many different words as long as those of the data: some of them, or all and more.

    Example:
        >>> words_for(["a", "b", "c", "d"], 2)
        ['a', 'd']
        >>> [len(word) for word in words_for(["a", "bcd"], 4)]
        [1, 3, 2, 4]
    """
    own = len(spellings)
    if classes <= own:
        places = np.linspace(0, own - 1, classes).round().astype(np.int64)
        return [spellings[place] for place in places.tolist()]
    return [
        spellings[i % own] + (chr(_PRIVATE + i // own) if i >= own else "") for i in range(classes)
    ]


def _drawn(
    draw: np.random.Generator, ends: NDArray[np.float64], shape: tuple[int, ...]
) -> NDArray[np.int64]:
    found = np.searchsorted(ends, draw.random(shape), side="right")
    # The last end may be a little below 1.
    return np.minimum(found, len(ends) - 1).astype(np.int64)
