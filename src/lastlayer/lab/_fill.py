"""What heads need from the data: how many classes, how frequent, how they are spelled."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lastlayer import samplers, trees
from lastlayer.heads import bands_from_counts
from lastlayer.samplers import Sampler
from lastlayer.trees import Tree


@dataclass(frozen=True)
class Needs:
    """The same for all heads of a comparison; what is slow to make is made once.

    Attributes:
        in_features: how many numbers a hidden state has.
        counts: how often each class stands in the training part, by falling count.
        spellings: the token of each class.
        seed: of the run.
    """

    in_features: int
    counts: NDArray[np.int64]
    spellings: Sequence[str]
    seed: int = 0
    _made: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def n_classes(self) -> int:
        """How many classes there are."""
        return len(self.counts)

    def with_seed(self, seed: int) -> "Needs":
        """The same for another run."""
        return Needs(self.in_features, self.counts, self.spellings, seed, self._made)

    def tree(self, kind: str, arity: int | None = None) -> Tree:
        """Huffman's, a balanced one, or two levels; with nodes of up to ``arity`` children."""
        made: Tree = self._once(("tree", kind, arity), lambda: self._new_tree(kind, arity))
        return made

    def _new_tree(self, kind: str, arity: int | None) -> Tree:
        if arity is not None:
            return self.tree(kind).collapse(arity)
        if kind == "balanced":
            return trees.balanced(self.n_classes)
        # A class that never occurs still needs a place.
        counts = np.maximum(self.counts, 1)
        return trees.huffman(counts) if kind == "huffman" else trees.two_level(counts)

    def sampler(self, kind: str, power: float) -> Sampler:
        """A new one each time: it becomes a part of the head."""
        if kind == "uniform":
            return samplers.Uniform(self.n_classes)
        if kind == "log_uniform":
            return samplers.LogUniform(self.n_classes)
        return samplers.Unigram(np.maximum(self.counts, 1), power)

    def bands(self, share: float, variant: str) -> list[tuple[int, int]]:
        """With at most this share of the numbers of a full layer."""
        most = max(1, int(share * self.n_classes * self.in_features))
        made: list[tuple[int, int]] = self._once(
            ("bands", share, variant),
            lambda: bands_from_counts(
                np.maximum(self.counts, 1), self.in_features, most, variant=variant
            ),
        )
        return made

    def _once(self, key: Any, make: Any) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]
