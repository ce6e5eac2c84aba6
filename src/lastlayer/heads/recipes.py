"""Recipes: how the lab and the benchmarks construct heads from data.

A head declares its recipes in the class attribute ``recipes``; :func:`registered` collects them. To
add a head, add its file, its export, its entry in the conformance tests and its docs page.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from lastlayer import samplers, trees
from lastlayer.samplers import Sampler
from lastlayer.trees import Tree

if TYPE_CHECKING:
    from lastlayer.heads.base import Head

Arguments = dict[str, Any]
SamplerKind = Literal["unigram", "log_uniform", "uniform"]


@dataclass(frozen=True)
class ClassData:
    """What heads may be constructed from, the same for all heads.

    Attributes:
        in_features: size of the hidden state.
        counts: number of occurrences of each class in the training data, in falling order.
        spellings: the token of each class.
        seed: random seed of the run.
    """

    in_features: int
    counts: NDArray[np.int64]
    spellings: Sequence[str] = ()
    seed: int = 0
    _made: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def n_classes(self) -> int:
        """Number of classes."""
        return len(self.counts)

    def with_seed(self, seed: int) -> "ClassData":
        """The same data with another random seed."""
        return ClassData(self.in_features, self.counts, self.spellings, seed, self._made)

    def positive_counts(self) -> NDArray[np.int64]:
        """Counts of at least 1: trees and samplers also need the classes that never occur."""
        return np.maximum(self.counts, 1)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Caches the result of ``make`` for all heads: trees and layouts may be slow to build."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def tree(self, kind: str = "huffman", arity: int | None = None) -> Tree:
        """A "huffman", "balanced" or "two_level" tree, with up to ``arity`` children per node."""
        made: Tree = self.once(("tree", kind, arity), lambda: self._new_tree(kind, arity))
        return made

    def _new_tree(self, kind: str, arity: int | None) -> Tree:
        if arity is not None:
            return self.tree(kind).collapse(arity)
        if kind == "balanced":
            return trees.balanced(self.n_classes)
        make = trees.huffman if kind == "huffman" else trees.two_level
        return make(self.positive_counts())

    def sampler(self, kind: str = "unigram", power: float = 1.0) -> Sampler:
        """A new sampler on each call, since it becomes a submodule of the head."""
        if kind == "uniform":
            return samplers.Uniform(self.n_classes)
        if kind == "log_uniform":
            return samplers.LogUniform(self.n_classes)
        return samplers.Unigram(self.positive_counts(), power)


@dataclass(frozen=True)
class Recipe:
    """One way to make a head from data.

    Attributes:
        name: name in specs, such as ``--head full``.
        about: one-line description.
        task: "lm" (one class per row) or "multilabel".
        fixed: constructor arguments that define the recipe and cannot be changed.
        defaults: constructor arguments that a spec may override.
        extra: arguments of a spec that are not constructor arguments, with their types.
        from_data: computes constructor arguments from the data and the arguments of the spec.
        filled: constructor arguments that ``from_data`` computes, so that a spec cannot set them.
        compared: specs of this recipe that are compared by default.
        rank: position in lists; lower comes first.
    """

    name: str
    about: str = ""
    task: str = "lm"
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    from_data: Callable[[ClassData, Arguments], Arguments] | None = None
    filled: frozenset[str] = frozenset()
    compared: tuple[str, ...] = ()
    rank: int = 100

    def build(self, cls: type["Head"], data: ClassData, arguments: Arguments) -> "Head":
        """Constructs a head of class ``cls`` for the data; ``arguments`` are those of a spec."""
        return cls(**self.arguments(cls, data, arguments))

    def arguments(self, cls: type["Head"], data: ClassData, given: Arguments) -> Arguments:
        """The constructor arguments that :meth:`build` uses."""
        given = {**self.defaults, **given, **self.fixed}
        if self.from_data is not None:
            given |= self.from_data(data, given)
            extra = self.extra.keys() - self.filled
            given = {name: each for name, each in given.items() if name not in extra}
        known = {"in_features", "n_classes", "counts", "spellings", "seed"}
        taken = inspect.signature(cls).parameters
        return {name: getattr(data, name) for name in known & taken.keys()} | given


def sampled_recipe(
    name: str, about: str, *, n_samples: int = 512, power: float = 1.0, **more: Any
) -> Recipe:
    """A recipe for a head that takes a sampler and a number of samples."""

    def from_data(data: ClassData, given: Arguments) -> Arguments:
        sampler = data.sampler(given.get("sampler", "unigram"), given.get("power", power))
        # With a quarter of all classes or more, the full softmax is faster.
        usual = {"n_samples": min(n_samples, max(1, data.n_classes // 4))}
        return {"sampler": sampler, **({} if "n_samples" in given else usual)}

    return Recipe(
        name, about, defaults={"sparse": True}, from_data=from_data,
        extra={"sampler": SamplerKind, "power": float}, filled=frozenset({"sampler"}), **more,
    )  # fmt: skip


def registered() -> dict[str, tuple[type["Head"], Recipe]]:
    """All recipes by name, with the class that each belongs to, ordered by rank."""
    from lastlayer.heads.base import Head

    found: dict[str, tuple[type[Head], Recipe]] = {}
    classes: list[type[Head]] = Head.__subclasses__()
    for cls in classes:
        classes += cls.__subclasses__()
        # vars(): without the recipes that a class inherits.
        for recipe in vars(cls).get("recipes", ()):
            found.setdefault(recipe.name, (cls, recipe))
    return dict(sorted(found.items(), key=lambda item: item[1][1].rank))
