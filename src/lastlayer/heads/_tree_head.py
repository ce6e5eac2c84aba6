"""Parameters of a head whose classes are the leaves of a tree, and what is kept of the tree."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from lastlayer.heads._node_scores import Nodes
from lastlayer.heads._tree_state import check_digest, check_tree, load_tree, save_tree, tree_digest
from lastlayer.heads._tree_tables import TreeTables
from lastlayer.heads.base import Head
from lastlayer.trees import Tree


class TreeHead(Head):
    """A row of the weight for a binary node, and one for each child of a wider one."""

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
        check_tree(tree)
        super().__init__(
            in_features, tree.n_classes, ignore_index=ignore_index, reduction=reduction
        )
        self.tree, self.sparse = tree, sparse
        n_rows = int(np.where(tree.arity == 2, 1, tree.arity).sum())
        self.weight = Parameter(torch.empty(n_rows, in_features, device=device, dtype=dtype))
        biases = torch.empty(n_rows, device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if biases is None else Parameter(biases))
        # In the state, so that it is not loaded into a head with another tree of the same size.
        self.register_buffer("tree_digest", torch.tensor(0, device=device))
        self.register_load_state_dict_post_hook(_fill_tables)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fresh numbers, distributed as those of ``nn.Linear``; and the tables of the tree.

        A head that was made on the meta device is whole after ``to_empty`` and this.
        """
        self._make_tables()
        self.tree_digest = torch.tensor(tree_digest(self.tree), device=self.weight.device)
        bound = 1.0 / math.sqrt(self.in_features)
        with torch.no_grad():
            self.weight.uniform_(-bound, bound)
            if self.bias is not None:
                self.bias.uniform_(-bound, bound)

    def _make_tables(self) -> None:
        self._tables = TreeTables(self.tree, self.weight.device)
        self._tables_are_made = not self.weight.is_meta

    @property
    def _nodes(self) -> Nodes:
        sparse = self.sparse and not torch.compiler.is_compiling()
        return Nodes(self._tables, self.weight, self.bias, sparse)

    def config(self) -> dict[str, Any]:
        """The arguments as JSON can hold them, without the tree; :meth:`save` writes it beside."""
        shared = super().config()
        del shared["n_classes"]
        return {**shared, "bias": self.bias is not None, "sparse": self.sparse}

    def _save_extra(self, folder: Path) -> None:
        save_tree(self.tree, folder)

    @classmethod
    def _load_extra(cls, folder: Path) -> dict[str, Any]:
        return {"tree": load_tree(folder)}

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        check_digest(state_dict.get(f"{prefix}tree_digest"), self.tree)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"

    def extra_repr(self) -> str:
        first, *rest = super().extra_repr().split(", ")
        return ", ".join([first, f"tree={self.tree!r}", *rest])


def _fill_tables(head: TreeHead, _keys: Any) -> None:
    """A head that was made on the meta device has no tables before it has its parameters."""
    if not head._tables_are_made:
        head._make_tables()
