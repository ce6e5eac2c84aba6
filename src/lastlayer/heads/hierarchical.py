"""The hierarchical softmax: a class is a path through a tree, with a small softmax at each node."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.nn import Parameter

from lastlayer._checks import check_int
from lastlayer._torch import eager, host_sync_allowed, in_dtype, is_exporting, without_autocast
from lastlayer.fused.paths import TreeTables, groups_suit
from lastlayer.fused.recompute import in_chunks
from lastlayer.fused.scores import row_chunks
from lastlayer.heads._tree_nodes import (
    WIDEST_GATHERED,
    Nodes,
    all_leaves,
    all_log_prob,
    class_vectors,
    init_biases,
    init_nodes,
    is_predictable,
    leaves_of,
    path_log_prob,
    shared_log_prob,
    tree_loss,
    walked_log_prob,
    walks_suit,
    wide,
)
from lastlayer.heads._tree_search import Found, draw_leaves, search, search_suits
from lastlayer.heads.base import Head, TopK
from lastlayer.heads.recipes import Recipe
from lastlayer.trees import Tree

# File name of the tree of a saved head.
_TREE_FILE = "tree.safetensors"
# Rows per search.
_SEARCHED_ROWS = 1024
# Rows that are searched first, to decide whether a search is faster than a sort.
_TRIED_ROWS = 8
# For k above this share of the classes, sorting all is faster than a search.
_SEARCHED_PART, _SEARCHED_CLASSES = 1 / 8, 512
# Elements held per class and row for all log-probabilities (scores, edges by arity and in order,
# sums, classes), and per gathered element.
_ALL_COPIES, _GATHERED_COPIES = 9.0, 3.0
# The same with kernels, which hold scores and classes alone.
_LEAF_COPIES = 2.0


class HierarchicalSoftmax(Head):
    r"""Hierarchical softmax: a class is a path through a tree, with a small softmax at each node.

    .. math:: \log p_c = \sum_{v \in \mathrm{path}(c)} \log p(\text{child of } v \mid v, h)

    At a node with two children one vector decides: the second child has the probability
    :math:`\sigma(w_v \cdot h + b_v)`. At a wider node every child has a vector, and the
    probabilities are a softmax over its children. They sum to 1 over all classes by construction.
    In a tree with overlap, the probability of a class is the sum over its paths.

    Choose it for very many classes if training must be cheap, with a suitable tree: Huffman's for
    speed, a learned one (:func:`lastlayer.trees.cluster`) for accuracy.

    Cost: a training step touches the nodes on the paths of its targets, about log₂ of n_classes
    per row, or fewer for frequent classes in Huffman's tree. Computing all classes costs as much as
    a flat layer. In a binary tree without overlap a step copies no vectors: kernels read them in
    place. With overlap a CPU does the same for each path of a target, from a copy of its hidden
    state. In other trees a step on a GPU holds the scores of all children on the paths. On a CPU
    it holds vectors, rows × path × in_features, until backward; nodes with more than 32 children
    are processed one by one instead.

    With ``sparse=True`` the gradients of ``weight`` and ``bias`` are sparse tensors of the rows
    that were touched, for ``lastlayer.optim.RowAdagrad``, ``torch.optim.SparseAdam`` or SGD. With
    dense gradients most of a step is spent on zeros. On a GPU, sparse gradients of a binary tree
    are not coalesced, and contain zero entries for the root. Gradients stay dense for ``log_prob``
    of all classes, in compiled code, and for wider nodes during CUDA graph capture.

    Args:
        in_features: size of the hidden state.
        tree: tree over the classes; ``lastlayer.trees`` builds them.
        bias: whether nodes have biases.
        sparse: whether gradients are row-sparse.
        ignore_index: rows with this target are ignored; None to ignore no rows.
        reduction: "mean" over the rows that are not ignored, "sum" or "none".
        device: device of the parameters.
        dtype: dtype of the parameters.

    Attributes:
        tree: the tree that was given.
        weight: ``(n_rows, in_features)``: one row per binary node and one per child of a wider
            node, in the order of the nodes.
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

    recipes = (
        Recipe(
            "hierarchical",
            "a path through a tree of small choices",
            defaults={"sparse": True},
            extra={"tree": Literal["huffman", "balanced", "two_level"], "arity": int},
            from_data=lambda data, given: {
                "tree": data.tree(given.get("tree", "huffman"), given.get("arity"))
            },
            filled=frozenset({"tree"}),
            compared=("hierarchical", "hierarchical:tree=two_level"),
            rank=20,
        ),
    )
    weight: Parameter
    bias: Parameter | None
    tree_digest: Tensor

    def __init__(
        self,
        in_features: int,
        tree: Tree,
        *,
        bias: bool = True,
        sparse: bool = False,
        ignore_index: int | None = -100,
        reduction: str = "mean",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_tree(tree)
        super().__init__(
            in_features, tree.n_classes, ignore_index=ignore_index, reduction=reduction
        )
        self.tree, self.sparse = tree, sparse
        n_rows = int(tree.arity.sum()) - int((tree.arity == 2).sum())
        self.weight = Parameter(torch.empty(n_rows, self.in_features, device=device, dtype=dtype))
        biases = torch.empty(n_rows, device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if biases is None else Parameter(biases))
        # In the state, so that it cannot be loaded into a head with another tree of the same size.
        self.register_buffer("tree_digest", torch.tensor(tree.digest, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialises the parameters, with the distribution of ``nn.Linear``.

        Call it after ``to_empty`` on a head that was made on the meta device.
        """
        self._make_ready()
        bound = 1.0 / math.sqrt(self.in_features)
        torch.nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            torch.nn.init.uniform_(self.bias, -bound, bound)

    def _make_tables(self, device: torch.device) -> None:
        self._tables = TreeTables(self.tree, device)

    def _fresh_buffer(self, name: str) -> Tensor | None:  # noqa: ARG002 - it has one
        return torch.tensor(self.tree.digest, device="cpu")

    def _check_state(self) -> None:
        self._check_digest(self.tree_digest)

    def _check_digest(self, digest: Any) -> None:
        if isinstance(digest, Tensor) and not digest.is_meta and int(digest) != self.tree.digest:
            raise ValueError(
                "state_dict: expected the state of a head with the same tree, got that of another "
                "tree; construct the head with the tree it was trained with, not with "
                f"{self.tree!r}"
            )

    @property
    def _nodes(self) -> Nodes:
        sparse = self.sparse and not torch.compiler.is_compiling()
        return Nodes(self._tables, self.weight, self.bias, sparse)

    def init_bias_from_counts(self, counts: Any) -> None:
        """Initialises the biases from class frequencies, which speeds up the start of training.

        A binary node gets the log-odds of the counts below its two children; each child of a wider
        node gets the log of its share. At hidden state 0 the head then predicts the frequencies.

        Args:
            counts: number of occurrences of each class, or their frequencies, ``(n_classes,)``; 0
                is treated as 0.5, or as half of the smallest count above 0 if that is less.
        """
        if self.bias is None:
            raise ValueError(
                f"init_bias_from_counts: expected a head with biases, got {type(self).__name__} "
                "with bias=False; make it with bias=True"
            )
        init_biases(self._tables, self.bias, counts)

    @classmethod
    def init_from_linear(
        cls,
        linear: torch.nn.Linear | torch.nn.Embedding,
        tree: Tree,
        *,
        counts: Any = None,
        **options: Any,
    ) -> Self:
        """Makes a head initialised from a trained flat layer: a warm start, not the same function.

        The score of a subtree is the linearisation, at hidden state 0, of the logsumexp of its
        classes' scores. This is the mean of their vectors and biases, weighted by their
        probabilities at 0, plus the entropy of these weights (the log of their number if they are
        equal). A binary node gets the difference of its second and its first child. The more
        similar the vectors below a node are, the closer the head is to the layer, so build the tree
        from them: ``trees.cluster(linear.weight)``.

        Args:
            linear: the layer, or an embedding whose rows are the class vectors.
            tree: tree over the same classes.
            counts: one number per class, the weights of the means; None for the probabilities that
                the biases give.
            options: other keyword arguments of the constructor; device and dtype follow the layer.
        """
        _check_tree(tree)
        if not isinstance(linear, (torch.nn.Linear, torch.nn.Embedding)):
            raise TypeError(
                f"linear: expected an nn.Linear or nn.Embedding, got {type(linear).__name__}"
            )
        layer = linear.weight.detach()
        if len(layer) != tree.n_classes:
            raise ValueError(
                f"linear: expected {tree.n_classes} classes, as the tree has, got {len(layer)} in "
                f"a weight of shape {tuple(layer.shape)}"
            )
        bias = getattr(linear, "bias", None)
        biases = layer.new_zeros(len(layer)) if bias is None else bias.detach()
        head = cls(layer.shape[1], tree, device=layer.device, dtype=layer.dtype, **options)
        init_nodes(head._nodes, layer, biases, counts)
        return head

    def relearn(self, tree: Tree, *, counts: Any = None) -> Self:
        """Makes a head with another tree over the same classes, initialised from this one.

        Each class gets the vector that the current tree implies: the signed sum of the vectors on
        its path, weighted as in the linearisation of its log-probability at hidden state 0. The new
        nodes are computed from these as in :meth:`init_from_linear`. Relearning the same tree
        without overlap changes nothing.

        The new head has the options, device and dtype of this one, which is not modified. Its
        parameters are new tensors, so they need a new optimizer.

        Args:
            tree: the new tree, for example by ``trees.cluster`` on the mean hidden state per class.
            counts: one number per class, the weights of the means; None for the probabilities at
                hidden state 0.
        """
        _check_tree(tree)
        if tree.n_classes != self.n_classes:
            raise ValueError(
                f"tree: expected the {self.n_classes} classes of the head, got {tree.n_classes}"
            )
        made = type(self)(**{**self.config(), "tree": tree})
        made.to(self.weight.device, self.weight.dtype).train(self.training)
        init_nodes(made._nodes, *class_vectors(self._nodes), counts)
        return made

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The negative log-likelihood of the targets. Only nodes on their paths are touched."""
        rows = self._check_rows(hidden)
        target, ignored = self._target_and_ignored(hidden, target)
        classes = target if target.dim() == 1 else target.reshape(-1)
        nodes = self._nodes
        loss = tree_loss(nodes, rows, classes, ignored, self.reduction)
        if not nodes.tables.n_inner:
            # A single class has no nodes: add empty sums, so that all parameters get a gradient.
            for each in self.parameters():
                loss = loss + each.sum().to(loss.dtype)
        return loss.reshape(target.shape) if loss.dim() != 0 and target.dim() != 1 else loss

    def _part_losses(
        self, tables: TreeTables, weight: Tensor, bias: Tensor | None, rows: Tensor, target: Tensor
    ) -> Tensor:
        """Contribution of some nodes to each row's loss, for a process that has only these."""
        return tree_loss(Nodes(tables, weight, bias), rows, target, None, "none")

    def _from_scores(self, scores: Tensor) -> Tensor:
        """Log-probabilities of all classes from the scores of all rows of the weight."""
        return leaves_of(self._tables, scores)

    def log_prob(self, hidden: Tensor, classes: Tensor | None = None) -> Tensor:
        """Exact log-probabilities in float32, or in float64 from float64.

        For all classes, the scores of all nodes are one matrix product, and log-probabilities are
        summed down the tree level by level. For chosen classes only their paths are computed,
        unless these have more nodes than the tree. For a list that all rows share, each vector is
        used once. The result is differentiable; for chosen classes, backward recomputes the scores
        of each chunk of rows.

        Arguments and result are those of :meth:`Head.log_prob`.
        """
        rows, shape = self._check_rows(hidden), (*hidden.shape[:-1], self.n_classes)
        chosen = None
        if classes is not None:
            chosen, shape = self._check_classes(hidden, classes)
        with without_autocast(hidden):
            made = self._rows_log_prob(rows, chosen)
        return made if made.shape == shape else made.reshape(shape)

    def _rows_log_prob(self, rows: Tensor, chosen: Tensor | None) -> Tensor:
        nodes, tables, d = self._nodes, self._tables, self.in_features
        if is_exporting():
            rows = in_dtype(rows, torch.promote_types(rows.dtype, self.weight.dtype))
            return all_log_prob(nodes, rows, chosen)
        # Maximum number of nodes, and of rows of the weight, for the classes of one hidden state.
        at = 0 if chosen is None else chosen.shape[1] * tables.most_paths * tables.longest
        most = at * (tables.widest if tables.has_wide else 1)
        recording = torch.is_grad_enabled() and (
            rows.requires_grad or any(each.requires_grad for each in self.parameters())
        )
        predicted, on_cpu = not recording and is_predictable(nodes, rows), rows.device.type == "cpu"
        shared = chosen is not None and len(rows) > 1 and chosen.stride(0) == 0
        if (
            predicted and chosen is not None and not tables.overlaps and not (shared and on_cpu)
            and walks_suit(nodes, rows, chosen.shape[1])
        ):  # fmt: skip
            return walked_log_prob(nodes, rows, chosen)
        log_prob: Callable[..., Tensor] = path_log_prob
        copies = _GATHERED_COPIES
        if chosen is None or most > tables.n_rows or (predicted and not on_cpu):
            # In a dtype that rounds neither rows nor vectors, since path_log_prob rounds neither.
            rows = in_dtype(rows, torch.promote_types(rows.dtype, self.weight.dtype))
            if chosen is None and predicted:
                return all_leaves(nodes, rows, None, self.chunk_rows)
            if chosen is None and recording:
                return all_log_prob(nodes, rows, None)
            log_prob, held, copies = all_log_prob, tables.n_edges // 2, _ALL_COPIES
            if predicted:
                log_prob, held, copies = all_leaves, tables.n_classes, _LEAF_COPIES
        elif (
            shared and tables.n_inner and host_sync_allowed(rows)
            and not torch.compiler.is_compiling()
        ):  # fmt: skip
            rows, log_prob, held = wide(rows), shared_log_prob, 2 * most
        else:
            # Gathers vectors, or for wide nodes hidden states and the scores of all children.
            held = most * d if tables.widest <= WIDEST_GATHERED else at * (tables.widest + d)
            # The kernel for very wide nodes takes half precision.
            narrow = tables.widest <= WIDEST_GATHERED or not len(rows)
            if narrow or not groups_suit(tables, rows):
                rows = wide(rows)

        def of_chunk(
            rows: Tensor, chosen: Tensor | None, weight: Tensor, bias: Tensor | None
        ) -> Tensor:
            return log_prob(nodes._replace(weight=weight, bias=bias), rows, chosen)

        chunks = [*row_chunks(rows, held, self.chunk_rows, copies)]
        return in_chunks(of_chunk, rows, [chosen], (self.weight, self.bias), chunks)

    @torch.no_grad()
    def topk(self, hidden: Tensor, k: int, *, beam: int | None = None) -> TopK:
        """Returns the k most probable classes, exactly as a sort of all log-probabilities would.

        It searches down the tree; to open a node is to compute its children's probabilities. On a
        CPU the most probable node is opened first, until k classes are more probable than all
        unopened nodes. On a GPU a first sweep follows a few nodes per level and finds k classes,
        and a second one opens every node that is at least as probable as the k-th of them. Both are
        exact: a child is at most as probable as its parent, so a node that is less probable than k
        known classes contains none of the best k.

        If the search of a row would read more than 1024 rows of the weight one by one, and more
        than a sixteenth of all, it is given up, and all classes are computed and sorted. This is
        done for all rows

        * on a CPU, if most of the first 8 searches are given up, or for 16 or more rows and at most
          1024 rows of the weight;
        * on a GPU, if a node has more than two children, or for k above 64;
        * for k above an eighth of the classes, if there are more than 512;
        * if the tree has overlap, since the bound does not hold for a sum over paths.

        Args:
            hidden: ``(*batch, in_features)``.
            k: from 1 to ``n_classes``.
            beam: at least k. Runs only the first sweep, with this many nodes per level. This is not
                exact: it misses a good class below a node that is worse than ``beam`` others.
        """
        self._check_hidden(hidden)
        k, tables = self._check_k(k), self._tables
        if beam is not None:
            beam = check_int("beam", beam, least=k, note="a beam must hold k classes")
            if tables.overlaps:
                raise ValueError(
                    f"beam: expected None for a tree with overlap, got {beam}; a beam finds single "
                    "paths, but the probability of a class is the sum over its paths"
                )
        many = self.n_classes > _SEARCHED_CLASSES and k > self.n_classes * _SEARCHED_PART
        every = tables.overlaps or not tables.n_inner or (many and beam is None)
        # A search is data-dependent control flow, which cannot be exported.
        if every or is_exporting():
            return super().topk(hidden, k)
        found, shape = self._search(hidden, k, beam), (*hidden.shape[:-1], k)
        return TopK(found.values.reshape(shape), found.classes.reshape(shape))

    @eager
    def _search(self, hidden: Tensor, k: int, beam: int | None = None) -> Found:
        rows = hidden.reshape(-1, self.in_features)
        n = rows.shape[0]
        suits = beam is not None or search_suits(self._nodes, rows, k)
        # On a CPU a few rows first: if their search is given up, so would be that of most others.
        tried = _TRIED_ROWS if suits and hidden.device.type == "cpu" and n > 2 * _TRIED_ROWS else 0
        parts = [self._search_rows(rows[:tried], k, beam)] if tried else []
        if not suits or (tried and int((parts[0].opened < 0).sum()) * 2 > tried):
            values, classes = super().topk(rows, k)
            return Found(values, classes, classes.new_full((n,), self._tables.n_inner))
        parts += [self._search_rows(each, k, beam) for each in rows[tried:].split(_SEARCHED_ROWS)]
        found = Found(*(torch.cat(each) for each in zip(*parts, strict=True)))
        given_up = (found.opened < 0).nonzero().squeeze(-1)
        if len(given_up):
            found.values[given_up], found.classes[given_up] = super().topk(rows[given_up], k)
            found.opened[given_up] = self._tables.n_inner
        return found

    def _search_rows(self, rows: Tensor, k: int, beam: int | None) -> Found:
        with without_autocast(rows):
            return search(self._nodes, wide(rows), k, beam)

    def _rows_sample(self, rows: Tensor, *uniform: Tensor) -> Tensor:
        """Walks down the tree once per draw, opening only the nodes on the way."""
        nodes, (numbers,) = self._nodes, uniform
        if not self._tables.n_inner:
            return torch.zeros_like(numbers, dtype=torch.int64)
        if rows.device.type != "cpu" and not walks_suit(nodes, rows, numbers.shape[1]):
            return super()._rows_sample(rows, numbers)
        with without_autocast(rows):
            return draw_leaves(nodes, rows, numbers, self.chunk_rows)

    def _saved_config(self, config: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in config.items() if name != "tree"}

    def _save_extra(self, folder: Path) -> None:
        self.tree.save(folder / _TREE_FILE)

    @classmethod
    def _load_extra(cls, folder: Path) -> dict[str, Any]:
        return {"tree": Tree.load(folder / _TREE_FILE)}

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        self._check_digest(state_dict.get(f"{prefix}tree_digest"))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"


def _check_tree(tree: Any) -> None:
    if not isinstance(tree, Tree):
        raise TypeError(
            f"tree: expected a lastlayer.trees.Tree, got {type(tree).__name__}; trees.balanced(n) "
            "or trees.huffman(counts) builds one"
        )
