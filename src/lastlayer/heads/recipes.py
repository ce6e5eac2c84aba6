"""How heads are made from data: what the lab and the benchmarks know of them.

A head says so itself, in its class attribute ``recipes``; :func:`registered` collects them. A new
head is its file, its export, its line in the conformance tests and its page.
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
    """What heads need to know of the data; the same for all of them.

    Attributes:
        in_features: size of the hidden state.
        counts: how often each class occurs in the training data, by falling count.
        spellings: the token of each class.
        seed: of the run.
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
        """The same for another run."""
        return ClassData(self.in_features, self.counts, self.spellings, seed, self._made)

    def positive_counts(self) -> NDArray[np.int64]:
        """Counts of at least 1: a class that never occurs still needs a place."""
        return np.maximum(self.counts, 1)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What ``make`` gives, made once for all heads: trees and layouts may be slow to build."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def tree(self, kind: str = "huffman", arity: int | None = None) -> Tree:
        """Huffman's, a balanced one, or two levels; with nodes of up to ``arity`` children."""
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
        """A new one each time: it becomes a part of the head."""
        if kind == "uniform":
            return samplers.Uniform(self.n_classes)
        if kind == "log_uniform":
            return samplers.LogUniform(self.n_classes)
        return samplers.Unigram(self.positive_counts(), power)


@dataclass(frozen=True)
class Recipe:
    """One way to make a head from data.

    Attributes:
        name: in specs, such as ``--head full``.
        about: one line for lists.
        task: what it learns: "lm" (one class per row) or "multilabel".
        fixed: constructor arguments that make the recipe what it is.
        defaults: constructor arguments that are set unless they are given.
        extra: arguments that a spec may have beside those of the constructor, with their types.
        from_data: constructor arguments from the data and the arguments of the spec.
        filled: which arguments of the constructor that makes, so that a spec cannot give them.
        compared: specs of it that a comparison takes by default.
        rank: its place in lists; lower comes first.
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
        """A head of the class for this data; ``arguments`` are those of a spec."""
        return cls(**self.arguments(cls, data, arguments))

    def arguments(self, cls: type["Head"], data: ClassData, given: Arguments) -> Arguments:
        """What :meth:`build` calls the constructor with."""
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
    """A recipe of a head that takes a sampler and a number of samples."""

    def from_data(data: ClassData, given: Arguments) -> Arguments:
        sampler = data.sampler(given.get("sampler", "unigram"), given.get("power", power))
        # From a quarter of all classes on, the full softmax is the faster one.
        usual = {"n_samples": min(n_samples, max(1, data.n_classes // 4))}
        return {"sampler": sampler, **({} if "n_samples" in given else usual)}

    return Recipe(
        name, about, defaults={"sparse": True}, from_data=from_data,
        extra={"sampler": SamplerKind, "power": float}, filled=frozenset({"sampler"}), **more,
    )  # fmt: skip


def registered() -> dict[str, tuple[type["Head"], Recipe]]:
    """All recipes by name, with the class that each belongs to, in the order of their ranks."""
    from lastlayer.heads.base import Head

    found: dict[str, tuple[type[Head], Recipe]] = {}
    classes: list[type[Head]] = Head.__subclasses__()
    for cls in classes:
        classes += cls.__subclasses__()
        # Not those that a class inherits.
        for recipe in vars(cls).get("recipes", ()):
            found.setdefault(recipe.name, (cls, recipe))
    return dict(sorted(found.items(), key=lambda item: item[1][1].rank))
