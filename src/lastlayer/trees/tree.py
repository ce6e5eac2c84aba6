"""The class ``Tree``: inner nodes, their children, and classes as leaves."""

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from lastlayer._checks import as_integers
from lastlayer.trees import _draw
from lastlayer.trees._arrays import (
    Ids,
    Integers,
    Offsets,
    Reals,
    as_labels,
    as_shares,
    as_strings,
    check_children,
    check_count,
    check_leaves,
    frozen,
    offsets,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# If all paths together have more entries than this, an error is raised.
_MOST_PATH_ENTRIES = 2**31
_FORMAT, _VERSION = "lastlayer.tree", "1"
_ARRAYS, _NAMES = ("child_start", "child"), ("labels", "node_labels")


class EntropyBound(NamedTuple):
    """A lower bound of the expected depth."""

    bits: float
    """The bound for binary trees."""
    steps: float
    """The bound for trees with the same ``max_arity``."""


class Tree:
    """An immutable tree with classes as its leaves.

    A class is reached from the root by choosing one child at every inner node on the way. These
    choices are the *code* of the class; the nodes and choices together are its *path*.

    Inner nodes are numbered from 0, the root, level by level and from left to right, so a parent
    has a lower number than its children. Every inner node has at least two children. A tree with
    one class has no inner nodes.

    Usually one of the functions of ``lastlayer.trees`` builds the tree. This constructor expects
    arrays that are in the order above already, and checks them.

    All arrays are read-only NumPy arrays: ids and positions are int32, offsets int64.
    ``torch.tensor(tree.child)`` copies one to a tensor. Derived arrays are computed at first use.

    Args:
        child_start: ``(n_inner + 1,)``: the children of node v are
            ``child[child_start[v]:child_start[v + 1]]``.
        child: the children of all nodes in order: the id of an inner node if not negative, else
            ``~class``.
        labels: one unique name per class.
        node_labels: one name per inner node, for pictures; names may be empty.
        overlap: whether a class may have several leaves. Its probability is then the sum over its
            paths. If False, a class with two leaves raises an error.

    Example:
        >>> from lastlayer import trees
        >>> tree = trees.huffman([60, 25, 10, 5], labels=["the", "cat", "purrs", "loudly"])
        >>> tree
        Tree(n_classes=4, n_inner=3, max_arity=2, max_depth=3)
        >>> tree.code("cat")
        [1, 0]
        >>> print(tree)
        4 classes, 3 inner nodes, up to 2 children, up to 3 deep
        ●
        ├─ the
        └─ ●
           ├─ cat
           └─ ●
              ├─ purrs
              └─ loudly
    """

    child_start: Offsets
    child: Ids
    labels: tuple[str, ...] | None
    node_labels: tuple[str, ...] | None

    def __init__(
        self,
        child_start: Any,
        child: Any,
        labels: Sequence[str] | None = None,
        node_labels: Sequence[str] | None = None,
        *,
        overlap: bool = False,
    ) -> None:
        start = as_integers("child_start", child_start, "offsets into child")
        below = as_integers("child", child, "nodes, or ~class for leaves")
        check_children(start, below)
        n_classes, n_inner = check_leaves(below, overlap), len(start) - 1
        if node_labels is not None:
            node_labels = as_strings(node_labels, n_inner, "node_labels", "inner node")
        self.__dict__.update(
            child_start=frozen(start, np.int64),
            child=frozen(below, np.int32),
            labels=as_labels(labels, n_classes),
            node_labels=node_labels,
        )

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name}: a Tree cannot be changed; build another one")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{name}: a Tree cannot be changed; build another one")

    def __reduce__(self) -> tuple[Any, ...]:
        # Calls the constructor: unpickled arrays would be writable, and hashes differ between
        # processes.
        parts = self.child_start, self.child, self.labels, self.node_labels
        return partial(type(self), overlap=self.overlaps), parts

    @property
    def n_inner(self) -> int:
        """The number of inner nodes."""
        return len(self.child_start) - 1

    @cached_property
    def n_classes(self) -> int:
        """The number of classes."""
        return max(1, -int(self.child.min(initial=-1)))

    @property
    def n_paths(self) -> int:
        """The number of leaves, ``n_classes`` or more if the tree overlaps."""
        return len(self._leaf_edge)

    @property
    def overlaps(self) -> bool:
        """Whether any class has several leaves."""
        return self.n_paths > self.n_classes

    @cached_property
    def arity(self) -> Ids:
        """The number of children of each inner node, ``(n_inner,)``."""
        return frozen(np.diff(self.child_start), np.int32)

    @cached_property
    def max_arity(self) -> int:
        """The largest number of children of a node; 0 for a tree with one class."""
        return int(self.arity.max(initial=0))

    @property
    def is_binary(self) -> bool:
        """Whether every inner node has two children."""
        return self.max_arity <= 2

    @cached_property
    def _owner(self) -> Ids:
        """The parent of each entry of ``child``."""
        return frozen(np.repeat(np.arange(self.n_inner), self.arity), np.int32)

    @cached_property
    def parent(self) -> Ids:
        """The parent of each inner node, ``(n_inner,)``; -1 for the root."""
        return _under_root(self._owner[self.child >= 0], self.n_inner)

    @cached_property
    def position(self) -> Ids:
        """The position of each inner node among its siblings, ``(n_inner,)``; -1 for the root."""
        edges = np.flatnonzero(self.child >= 0)
        return _under_root(edges - self.child_start[self._owner[edges]], self.n_inner)

    @cached_property
    def node_depth(self) -> Ids:
        """The number of ancestors of each inner node, ``(n_inner,)``; 0 for the root."""
        from lastlayer.trees import _loops

        depth = np.ones(self.n_inner, np.int64)
        depth[:1] = 0
        _loops.add_down(self.parent, depth)
        return frozen(depth, np.int32)

    @cached_property
    def _leaf_edge(self) -> Integers:
        """The index in ``child`` of the leaf of each path, sorted by class."""
        edges = np.flatnonzero(self.child < 0)
        if not self.n_inner:
            return np.full(1, -1)
        if len(edges) > self.n_classes:
            result: Integers = edges[np.argsort(~self.child[edges], kind="stable")]
            return result
        result = np.empty_like(edges)
        result[~self.child[edges]] = edges
        return result

    @cached_property
    def path_class(self) -> Ids:
        """The class of each path, ascending, ``(n_paths,)``."""
        classes = ~self.child[self._leaf_edge] if self.n_inner else np.zeros(1)
        return frozen(classes, np.int32)

    @cached_property
    def class_start(self) -> Offsets:
        """``(n_classes + 1,)``: the first path of each class, then the number of paths."""
        return frozen(offsets(np.bincount(self.path_class)), np.int64)

    @cached_property
    def path_start(self) -> Offsets:
        """``(n_paths + 1,)``: where each path starts in ``path_node`` and ``path_position``."""
        if not self.n_inner:
            return frozen(np.zeros(2), np.int64)
        lengths = self.node_depth[self._owner[self._leaf_edge]].astype(np.int64) + 1
        return frozen(offsets(lengths), np.int64)

    @property
    def path_node(self) -> Ids:
        """The inner nodes of each path, root first; one path after the other."""
        return self._paths[0]

    @property
    def path_position(self) -> Ids:
        """The position of the child that each path takes at its nodes, like ``path_node``."""
        return self._paths[1]

    @cached_property
    def _paths(self) -> tuple[Ids, Ids]:
        total = int(self.path_start[-1])
        if total > _MOST_PATH_ENTRIES:
            raise ValueError(
                f"paths of all classes: expected at most {_MOST_PATH_ENTRIES} nodes, got {total} "
                f"in a tree of depth {self.max_depth}; tree.collapse(arity) has shorter paths"
            )
        node, position = np.empty(total, np.int32), np.empty(total, np.int32)
        if total:
            from lastlayer.trees import _loops

            up = self._owner, self.child_start, self.parent, self.position
            _loops.fill_paths(self._leaf_edge, *up, self.path_start, node, position)
        node.flags.writeable = position.flags.writeable = False
        return node, position

    @cached_property
    def leaf_rank(self) -> Ids:
        """The rank of each path's leaf from left to right, ``(n_paths,)``.

        In this order the leaves below any node are contiguous.
        """
        from lastlayer.trees import _loops

        if not self.n_inner:
            return frozen(np.zeros(1), np.int32)
        inner = self.child >= 0
        size = np.ones(len(self.child), np.int64)
        size[inner] = self.sums_below(np.ones(self.n_classes))[self.child[inner]]
        # First the leaves to the left of each edge below the same node, then those further up.
        left = np.cumsum(size) - size
        left -= left[self.child_start[self._owner]]
        before = np.zeros(self.n_inner, np.int64)
        before[self.child[inner]] = left[inner]
        _loops.add_down(self.parent, before)
        return frozen((before[self._owner] + left)[self._leaf_edge], np.int32)

    @cached_property
    def class_depth(self) -> Ids:
        """The depth of each class, ``(n_classes,)``: the length of its longest path."""
        lengths = np.diff(self.path_start)
        if self.overlaps:
            lengths = np.maximum.reduceat(lengths, self.class_start[:-1])
        return frozen(lengths, np.int32)

    @cached_property
    def max_depth(self) -> int:
        """The depth of the deepest class."""
        return int(self.class_depth.max())

    def code(self, c: int | str) -> list[int]:
        """The position of the child taken at each node on the path to a class, root first.

        Args:
            c: the id or label of a class. A class with several paths raises an error: see
                :meth:`codes`.
        """
        codes = self.codes(c)
        if len(codes) > 1:
            raise ValueError(
                f"c: expected a class with one path, got {c!r} with {len(codes)}; "
                "tree.codes(c) returns all of them"
            )
        return codes[0]

    def codes(self, c: int | str) -> list[list[int]]:
        """The codes of all paths to a class; exactly one unless the tree overlaps.

        Args:
            c: the id or label of a class.
        """
        number = self._class_id(c)
        first, last = int(self.class_start[number]), int(self.class_start[number + 1])
        return [self._code_to(int(edge)) for edge in self._leaf_edge[first:last]]

    def _code_to(self, edge: int) -> list[int]:
        code: list[int] = []
        if edge < 0:
            return code
        node = int(self._owner[edge])
        code.append(edge - int(self.child_start[node]))
        while node:
            code.append(int(self.position[node]))
            node = int(self.parent[node])
        return code[::-1]

    def depth(self, c: int | str) -> int:
        """The number of choices on the longest path to a class.

        Args:
            c: the id or label of a class.
        """
        return int(self.class_depth[self._class_id(c)])

    def expected_depth(self, counts: Any = None) -> float:
        """The mean of :meth:`depth` over classes, weighted by their counts.

        Args:
            counts: one number per class; None for equal counts.
        """
        return float(as_shares(counts, self.n_classes) @ self.class_depth)

    def entropy_bound(self, counts: Any = None) -> EntropyBound:
        """Shannon's lower bound of the expected depth of any tree without overlap.

        Args:
            counts: one number per class; None for equal counts.

        Returns:
            ``bits``, the entropy of the counts in bits, which bounds binary trees, and ``steps``,
            the entropy to the base ``max_arity``, which bounds trees with the same ``max_arity``.
        """
        shares = as_shares(counts, self.n_classes)
        some = shares[shares > 0]
        bits = max(0.0, float(-(some * np.log2(some)).sum()))
        return EntropyBound(bits, bits / np.log2(max(2, self.max_arity)).item())

    def step_cost(self, counts: Any, in_features: int) -> float:
        """Expected number of multiply-adds for the node scores of one row and its target.

        A node with two children has one vector, since one score decides between them; a wider node
        has one vector per child. If a class has several paths, a node on more than one of them
        counts once. For comparison, a flat layer costs ``n_classes * in_features``.

        Args:
            counts: one number per class; None for equal counts.
            in_features: size of the hidden states.
        """
        check_count("in_features", in_features, least=1)
        return float(as_shares(counts, self.n_classes) @ self._vectors_met()) * in_features

    def _vectors_met(self) -> Integers:
        """The number of node vectors that are scored for each class."""
        from lastlayer.trees import _loops

        if not self.n_inner:
            return np.zeros(1, np.int64)
        vectors = np.where(self.arity == 2, 1, self.arity).astype(np.int64)
        result: Integers
        if self.overlaps:
            paths = self.class_start, self.path_start, self.path_node
            result = _loops.cost_of_several_paths(*paths, vectors)
        else:
            _loops.add_down(self.parent, vectors)
            result = vectors[self._owner[self._leaf_edge]]
        return result

    def sums_below(self, values: Any) -> Reals:
        """For each inner node the sum of values over the leaves below it, ``(n_inner,)``.

        Args:
            values: one number per class; a class with several leaves counts once per leaf.
        """
        from lastlayer.trees import _loops

        leaf = self.child < 0
        each = np.asarray(values, np.float64)[~self.child[leaf]]
        total = np.bincount(self._owner[leaf], each, self.n_inner).astype(np.float64)
        _loops.add_up(self.parent, total)
        return total

    def collapse(self, arity: int, counts: Any = None) -> "Tree":
        """A tree with fewer and wider nodes, and the same classes in the same order.

        From the root down, each node absorbs inner nodes below it, whose children become its own,
        as long as it has at most ``arity`` children. Without counts the shallowest nodes are
        absorbed first; with counts the most frequent ones, which reduces the expected depth the
        most. No class gets deeper.

        Args:
            arity: maximum number of children of a node; at least ``max_arity``.
            counts: one number per class.

        Example:
            >>> from lastlayer import trees
            >>> deep = trees.balanced(4096)
            >>> deep.max_depth, deep.collapse(64).max_depth
            (12, 2)
        """
        from lastlayer.trees import _loops

        arity = check_count("arity", arity, least=2)
        if arity < self.max_arity:
            raise ValueError(
                f"arity: expected at least {self.max_arity}, the max_arity of the tree, got {arity}"
            )
        if counts is None:
            rank = self.node_depth.astype(np.float64)
        else:
            shares = as_shares(counts, self.n_classes)
            rank = -self.sums_below(shares / np.diff(self.class_start))
        below = self.child.astype(np.int64)
        merged = _loops.nodes_to_merge(self.child_start, below, rank, arity)
        start, child = _loops.merged_children(self.child_start, below, merged)
        start, child, origin, _ = _loops.breadth_first(start, child, 0 if self.n_inner else -1)
        names = self.node_labels
        kept = None if names is None else [names[v] for v in origin]
        return Tree(start, child, self.labels, kept, overlap=self.overlaps)

    def text(self, max_nodes: int = 60) -> str:
        """The tree as lines for a terminal.

        Args:
            max_nodes: approximate number of lines; nodes that do not fit are summarized.
        """
        return _draw.text(self, max_nodes)

    def plot(self, ax: "Axes | None" = None, *, max_nodes: int = 60, counts: Any = None) -> "Axes":
        """The tree as a picture, the root on the left. Needs matplotlib.

        Args:
            ax: the axes to draw on; None creates a figure of suitable height.
            max_nodes: approximate number of nodes. Of a larger tree the top is drawn, with the
                number of classes in each part below it.
            counts: one number per class; lines are then thicker for more frequent children.

        Returns:
            The axes.
        """
        return _draw.plot(self, ax, max_nodes, counts)

    @cached_property
    def digest(self) -> int:
        """A 64-bit hash of the structure of the tree; labels do not matter."""
        made = _digest(self.child_start.astype("<i8"), self.child.astype("<i8"))
        return int.from_bytes(made, "little", signed=True)

    def save(self, path: str | Path) -> None:
        """Write the tree and its labels to one safetensors file. Nothing is pickled."""
        path, safetensors = Path(path), _safetensors()
        if not path.parent.is_dir():
            raise FileNotFoundError(f"path: expected a file in a folder that exists, got {path}")
        if path.is_dir():
            raise IsADirectoryError(f"path: expected a file, got the folder {path}")
        arrays: dict[str, NDArray[Any]] = {name: getattr(self, name) for name in _ARRAYS}
        for name in _NAMES:
            names = getattr(self, name)
            if names is not None:
                arrays[name] = np.frombuffer(json.dumps(names).encode(), np.uint8)
        metadata = {
            "format": _FORMAT,
            "version": _VERSION,
            "overlap": json.dumps(self.overlaps),
            "digest": _digest(*(arrays[name] for name in sorted(arrays))).hex(),
        }
        safetensors.numpy.save_file(arrays, str(path), metadata)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a tree that :meth:`save` wrote; its arrays are checked as in the constructor."""
        path, safetensors = Path(path), _safetensors()
        if not path.is_file():
            raise FileNotFoundError(f"path: expected a file that Tree.save wrote, got {path}")
        try:
            with safetensors.safe_open(str(path), framework="numpy") as file:
                metadata = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in sorted(file.keys())}
        except safetensors.SafetensorError as error:
            raise ValueError(
                f"path: expected a file that Tree.save wrote, got {path}: {error}"
            ) from error
        if metadata.get("format") != _FORMAT or metadata.get("version") != _VERSION:
            raise ValueError(
                f"path: expected a tree of version {_VERSION}, got {path} with metadata "
                f"{metadata}; a newer lastlayer may have written it"
            )
        absent = [name for name in _ARRAYS if name not in arrays]
        if absent:
            raise ValueError(f"path: expected the arrays {_ARRAYS}, got {path} without {absent}")
        if metadata.get("digest") not in (None, _digest(*arrays.values()).hex()):
            raise ValueError(
                f"path: expected an unchanged file, got {path}, which was altered; save it again"
            )
        try:
            for name in _NAMES:
                arrays[name] = json.loads(arrays[name].tobytes()) if name in arrays else None
            return cls(**arrays, overlap=metadata.get("overlap") == "true")
        except (TypeError, ValueError) as error:
            raise ValueError(f"path: expected a tree, got {path}: {error}") from error

    def _class_id(self, c: int | str) -> int:
        if isinstance(c, str):
            if self.labels is None:
                raise ValueError(f"c: expected a class id, since the tree has no labels, got {c!r}")
            if c not in self._ids:
                raise ValueError(f"c: expected a label of the tree, got {c!r}")
            return self._ids[c]
        if isinstance(c, (bool, np.bool_)) or not hasattr(c, "__index__"):
            raise TypeError(f"c: expected a class id or a label, got {type(c).__name__}")
        number = int(c)
        if not 0 <= number < self.n_classes:
            raise ValueError(f"c: expected a class from 0 to {self.n_classes - 1}, got {number}")
        return number

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {label: c for c, label in enumerate(self.labels or ())}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tree):
            return NotImplemented
        return (
            np.array_equal(self.child_start, other.child_start)
            and np.array_equal(self.child, other.child)
            and self.labels == other.labels
            and self.node_labels == other.node_labels
        )

    @cached_property
    def _hash(self) -> int:
        return hash((self.digest, self.labels))

    def __hash__(self) -> int:
        return self._hash

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __repr__(self) -> str:
        paths = f", n_paths={self.n_paths}" if self.overlaps else ""
        return (
            f"Tree(n_classes={self.n_classes}{paths}, n_inner={self.n_inner}, "
            f"max_arity={self.max_arity}, max_depth={self.max_depth})"
        )

    def __str__(self) -> str:
        return self.text()


def _under_root(values: NDArray[Any], n_inner: int) -> Ids:
    return frozen(np.concatenate([np.full(min(1, n_inner), -1), values]), np.int32)


def _digest(*arrays: NDArray[Any]) -> bytes:
    made = hashlib.blake2b(digest_size=8)
    for array in arrays:
        made.update(np.ascontiguousarray(array).tobytes())
    return made.digest()


def _safetensors() -> ModuleType:
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            "saving and loading trees needs the package safetensors; install it with "
            'pip install "lastlayer[save]"'
        ) from error
    return safetensors
