"""The hierarchical softmax: a class is a path through a tree of small choices."""

from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from lastlayer.heads._checks import (
    check_classes,
    check_count,
    check_generator,
    check_hidden,
    check_target,
)
from lastlayer.heads._grouped_nodes import groups_suit
from lastlayer.heads._path_log_prob import any_tree_loss, chosen_log_prob, most_rows
from lastlayer.heads._path_loss import path_loss
from lastlayer.heads._sampling import check_drawn
from lastlayer.heads._tree_head import TreeHead
from lastlayer.heads._tree_levels import all_classes_log_prob
from lastlayer.heads._tree_search import Found, beam_search, draw_leaves, exact_search
from lastlayer.heads._tree_start import class_vectors, start_nodes, vectors_of_layer, wide
from lastlayer.heads._tree_state import check_tree
from lastlayer.heads.base import TopK
from lastlayer.trees import Tree

# Rows that are searched at a time.
_SEARCHED_ROWS = 1024
# Where more than this part of the classes is asked for, sorting all is faster than a search.
_SEARCHED_PART, _SEARCHED_CLASSES = 1 / 8, 512


class HierarchicalSoftmax(TreeHead):
    r"""A choice among the children of each node on the way from the root of a tree to a class.

    .. math:: \log p_c = \sum_{v \in \mathrm{path}(c)} \log p(\text{child of } v \mid v, h)

    At a node with two children one vector decides: the second child has the probability
    :math:`\sigma(w_v \cdot h + b_v)`. At a wider node every child has a vector, and the
    probabilities are a softmax over its children. They sum to 1 over all classes by construction.
    In a tree that overlaps, a class has the sum of its paths.

    Choose it where classes are very many and training has to be cheap, with a tree that fits:
    Huffman's for speed, one that is learned (:func:`lastlayer.trees.cluster`) for accuracy.

    Cost: a training step touches the nodes on the paths of its targets, some log₂ of n_classes
    for each row, or fewer for frequent classes in Huffman's tree. All classes cost as much as a
    flat layer. In a binary tree without overlap a step holds no vectors: kernels read them where
    they are. In other trees a step on a GPU holds the scores of all children on the paths. On a
    CPU it holds vectors, rows × path × in_features, until backward; nodes of more than 32 children
    are taken one by one instead, except inside ``torch.compile``.

    With ``sparse=True`` the gradients of ``weight`` and ``bias`` are sparse tensors of the rows
    that were touched, for ``lastlayer.optim.RowAdagrad``, ``torch.optim.SparseAdam`` or SGD:
    without it, most of a step is spent on zeros. On a GPU those of a binary tree are not coalesced,
    and have zeros of the root at the end. The gradient of ``log_prob`` for all classes is dense,
    and so is all that is compiled, and that of wider nodes while a CUDA graph is captured.

    Args:
        in_features: how many numbers a hidden state has.
        tree: where each class is.
        bias: whether nodes have biases.
        sparse: whether gradients are row-sparse.
        ignore_index: rows with this target count for nothing; None where every target counts.
        reduction: "mean" over the rows that count, "sum" or "none".
        device: where the parameters are made.
        dtype: of the parameters.

    Attributes:
        tree: as it was given.
        weight: ``(n_rows, in_features)``: one row for a binary node, one for each child of a
            wider one, in the order of the nodes.
        bias: ``(n_rows,)``, or None.

    Example:
        >>> import torch
        >>> from lastlayer import trees
        >>> tree = trees.huffman([60, 25, 10, 5], labels=["the", "cat", "purrs", "loudly"])
        >>> head = HierarchicalSoftmax(16, tree)
        >>> hidden, target = torch.randn(8, 16), torch.randint(4, (8,))
        >>> head(hidden, target).backward()
        >>> head.weight.shape
        torch.Size([3, 16])

    Reference:
        Morin and Bengio, Hierarchical probabilistic neural network language model, AISTATS 2005;
        Mnih and Hinton, A scalable hierarchical distributed language model, NIPS 2008.
    """

    @classmethod
    def from_linear(
        cls,
        linear: torch.nn.Linear | torch.nn.Embedding,
        tree: Tree,
        *,
        counts: Any = None,
        **options: Any,
    ) -> Self:
        """A head that starts from a trained flat layer. A warm start, not the same function.

        The score of a subtree is the tangent, at the hidden state 0, of the log of the sum of its
        classes' exponentials: the mean of their vectors and biases, each class by its probability
        there, plus the entropy of these weights, which is the log of their number where they are
        alike. A binary node has the difference of its second and its first child. The closer the
        vectors below a node are to each other, the closer the head is to the layer, so build the
        tree from them: ``trees.cluster(linear.weight)``.

        Args:
            linear: the layer, or an embedding whose rows are the class vectors.
            tree: over the same classes.
            counts: one number a class, the weights of the means; without them the probabilities
                that the biases give.
            options: what else the constructor takes, by name; the layer decides device and dtype.
        """
        check_tree(tree)
        vectors, biases = vectors_of_layer(linear, tree.n_classes)
        layer = linear.weight
        head = cls(vectors.shape[1], tree, device=layer.device, dtype=layer.dtype, **options)
        start_nodes(head._tables, head.weight, head.bias, vectors, biases, counts)
        return head

    def relearn(self, tree: Tree, *, counts: Any = None) -> Self:
        """A new head on another tree over the same classes, started from this one.

        Each class gets the vector that this tree implies, the signed sum of the vectors on its
        path, weighted as in the tangent of its log-probability at the hidden state 0. From these
        the new nodes are made as :meth:`from_linear` makes them. From a tree without overlap to
        itself nothing changes.

        The new head has the options, device and dtype of this one, which is left alone. Its
        parameters are other tensors: make an optimiser for them.

        Args:
            tree: such as ``trees.cluster`` makes of the mean hidden states of each class.
            counts: one number a class, the weights of the means; without them the probabilities
                at the hidden state 0.
        """
        check_tree(tree)
        if tree.n_classes != self.n_classes:
            raise ValueError(
                f"tree: expected the {self.n_classes} classes of the head, got {tree.n_classes}"
            )
        made = type(self).from_config({**self.config(), "tree": tree})
        made.to(self.weight.device, self.weight.dtype).train(self.training)
        with torch.no_grad():
            bias = None if self.bias is None else wide(self.bias)
            vectors, biases = class_vectors(self._tables, wide(self.weight), bias)
        start_nodes(made._tables, made.weight, made.bias, vectors, biases, counts)
        return made

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Minus the log-probability of the targets. Only nodes on their paths are touched."""
        check_hidden(self, hidden)
        target = check_target(self, hidden, target)
        rows, classes = hidden.reshape(-1, self.in_features), target.reshape(-1)
        if self._tables.is_plain:
            loss = path_loss(
                self._tables, rows, self.weight, self.bias, classes,
                ignore_index=self.ignore_index, reduction=self.reduction, sparse=self.sparse,
            )  # fmt: skip
        else:
            with torch.autocast(hidden.device.type, enabled=False):
                rows = rows if groups_suit(self._tables, rows) else wide(rows)
                loss = any_tree_loss(self._nodes, rows, classes, self.ignore_index, self.reduction)
        if not len(self.weight):
            # A single class has no node: a sum over none, so that backward finds the parameters.
            for each in self.parameters():
                loss = loss + each.sum().to(loss.dtype)
        return loss.reshape(target.shape) if self.reduction == "none" else loss

    def log_prob(self, hidden: Tensor, classes: Tensor | None = None) -> Tensor:
        """Exact log-probabilities in float32, or in float64 from float64.

        For all classes the scores of all nodes are one product, and log-probabilities are added
        down the tree level by level, for a chunk of rows at a time. For chosen classes only their
        paths are touched, unless these have more nodes than the tree. The result is
        differentiable; for chosen classes backward gathers the vectors of each chunk again.

        Args:
            hidden: ``(*batch, in_features)``.
            classes: class ids, int64: ``(*batch, k)``, or ``(k,)`` for every row; None for all.

        Returns:
            ``(*batch, n_classes)``, or ``(*batch, k)``.
        """
        check_hidden(self, hidden)
        chosen = None if classes is None else check_classes(self, hidden, classes)
        recording = torch.is_grad_enabled() and (
            hidden.requires_grad or any(each.requires_grad for each in self.parameters())
        )
        with torch.autocast(hidden.device.type, enabled=False):
            if chosen is None or most_rows(self._tables, chosen) > self._tables.n_rows:
                rows = self._product_rows(hidden)
                made = all_classes_log_prob(self._nodes, rows, self.chunk_rows, recording)
                made = made if chosen is None else made.gather(-1, chosen)
            else:
                rows = self._wide_rows(hidden)
                made = chosen_log_prob(self._nodes, rows, chosen, self.chunk_rows, recording)
        return made.reshape(*hidden.shape[:-1], made.shape[-1])

    def _product_rows(self, hidden: Tensor) -> Tensor:
        """Rows in a dtype that rounds neither them nor the vectors: those of paths are not."""
        dtype = torch.promote_types(hidden.dtype, self.weight.dtype)
        return hidden.reshape(-1, self.in_features).to(dtype)

    def _wide_rows(self, hidden: Tensor) -> Tensor:
        """Rows in float32, or in float64 from float64: what is gathered is not rounded."""
        return wide(hidden.reshape(-1, self.in_features))

    @torch.no_grad()
    def topk(self, hidden: Tensor, k: int, *, beam: int | None = None) -> TopK:
        """The k most probable classes, exactly as a sort of all log-probabilities has them.

        By a search down the tree. On a CPU the most probable node is opened first, until k
        classes are more probable than all that is still closed. On a GPU a first sweep follows a
        few nodes of each level and finds k classes, and a second one opens every node that is at
        least as probable as the k-th of them. Both are exact: a child is at most as probable as
        its parent, so a node that is less probable than k known classes has no class below it
        that is one of the best k.

        A row for which more than a sixteenth of the nodes would be opened is sorted as a whole,
        and so are all where k is more than an eighth of the classes, or where the tree overlaps,
        as the bound does not hold for a sum over paths.

        Args:
            hidden: ``(*batch, in_features)``.
            k: from 1 to ``n_classes``.
            beam: at least k. Only the first sweep, with so many nodes of each level. This is not
                exact: a good class below a node that looks worse than ``beam`` others is missed.
        """
        check_hidden(self, hidden)
        check_count("k", k, most=self.n_classes)
        if beam is not None:
            self._check_beam(beam, k)
        many = self.n_classes > _SEARCHED_CLASSES and k > self.n_classes * _SEARCHED_PART
        if self._tables.overlaps or not self._tables.n_inner or (many and beam is None):
            return super().topk(hidden, k)
        found = self._search(hidden, k, beam)
        shape = *hidden.shape[:-1], k
        return TopK(found.values.reshape(shape), found.classes.reshape(shape))

    def _search(self, hidden: Tensor, k: int, beam: int | None = None) -> Found:
        rows = self._wide_rows(hidden)
        given = hidden.reshape(-1, self.in_features).split(_SEARCHED_ROWS)
        found = []
        mixed = torch.is_autocast_enabled(hidden.device.type)
        with torch.autocast(hidden.device.type, enabled=False):
            for some, as_given in zip(rows.split(_SEARCHED_ROWS), given, strict=True):
                nodes = self._nodes
                if beam is None:
                    sort = partial(self._sorted, as_given, k, mixed)
                    found.append(exact_search(nodes, some, k, sort))
                else:
                    found.append(beam_search(nodes, some, k, beam))
        return Found(*(torch.cat(each) for each in zip(*found, strict=True)))

    def _sorted(self, rows: Tensor, k: int, mixed: bool, some: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(rows.device.type, enabled=mixed):
            best = super().topk(rows[some], k)
        return best.values, best.classes

    def _check_beam(self, beam: Any, k: int) -> None:
        check_count("beam", beam)
        if beam < k:
            raise ValueError(f"beam: expected at least k, {k}, got {beam}")
        if self._tables.overlaps:
            raise ValueError(
                f"beam: expected None for a tree that overlaps, got {beam}; a beam finds single "
                "paths, and the probability of a class is the sum over its paths"
            )

    @torch.no_grad()
    def sample(
        self, hidden: Tensor, n_samples: int = 1, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Independent draws from the probabilities of each row, with replacement.

        A walk down the tree for each, all at once: only nodes that a walk is at are opened.

        Args:
            hidden: ``(*batch, in_features)``.
            n_samples: draws a row.
            generator: where chance comes from, on the device of hidden; torch's own otherwise.

        Returns:
            Class ids ``(*batch, n_samples)``, int64. A row without probabilities, as a NaN
            makes it, is an error on a CPU and inside ``lastlayer.debug()``, and else all -1.
        """
        check_hidden(self, hidden)
        check_count("n_samples", n_samples)
        check_generator(generator, hidden)
        shape = *hidden.shape[:-1], n_samples
        if not self._tables.n_inner:
            return torch.zeros(shape, dtype=torch.int64, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            classes = draw_leaves(self._nodes, self._wide_rows(hidden), n_samples, generator)
        classes = classes.reshape(shape)
        check_drawn(classes)
        return classes
