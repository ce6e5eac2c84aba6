"""A dozen contexts, and what a head expects after each: best classes, and the way to the target."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lastlayer.heads import HierarchicalSoftmax
from lastlayer.lab.data import TextData

CONTEXTS, SHOWN, BEST = 12, 16, 10


def readable(token: str) -> str:
    """As text that every encoder takes: source code may hold lone surrogates."""
    return token.encode("utf-8", "backslashreplace").decode()


@torch.no_grad()
def explore(
    data: TextData, body: nn.Module, head: nn.Module, length: int, device: torch.device
) -> list[dict[str, Any]]:
    """The same contexts of the test part for every head."""
    ids = np.asarray(data.test)
    length = min(length, len(ids) - 1)
    body.eval()
    head.eval()
    tokens = data.vocabulary.tokens
    made = []
    for start in _starts(len(ids) - length, tokens, ids, length):
        window = torch.from_numpy(ids[start : start + length].astype(np.int64)).to(device)
        target = int(ids[start + length])
        hidden = body(window.unsqueeze(0))[:, -1]
        best = head.topk(hidden, min(BEST, len(tokens)))  # type: ignore[operator]
        top = zip(best.classes[0].tolist(), best.values[0].exp().tolist(), strict=True)
        own = head.log_prob(hidden, torch.tensor([target], device=device))  # type: ignore[operator]
        made.append(
            {
                "context": [readable(tokens[i]) for i in window[-SHOWN:].tolist()],
                "target": readable(tokens[target]),
                "target_p": float(own.exp()),
                "top": [{"token": readable(tokens[i]), "p": p} for i, p in top if p > 0],
                "path": path_of(head, hidden[0], target),
            }
        )
    return made


def _starts(places: int, tokens: tuple[str, ...], ids: Any, length: int) -> list[int]:
    """At random, but always the same; tokens of white space alone show little."""
    drawn = np.random.default_rng(0).permutation(places)[: 50 * CONTEXTS]
    telling = [int(i) for i in drawn if tokens[ids[i + length]].strip()]
    rest = [int(i) for i in drawn if not tokens[ids[i + length]].strip()]
    return sorted((telling + rest)[:CONTEXTS])


def path_of(head: nn.Module, hidden: Tensor, target: int) -> list[dict[str, Any]] | None:
    """The choices on the way to a class; None for heads without a tree."""
    if not isinstance(head, HierarchicalSoftmax) or head.tree.overlaps:
        return None
    tree = head.tree
    # One row of the weight for a binary node, one for each child of a wider one.
    sizes = np.where(tree.arity == 2, 1, tree.arity)
    first = np.concatenate([[0], np.cumsum(sizes)])
    node, path = 0, []
    for position in tree.code(target):
        rows = slice(int(first[node]), int(first[node + 1]))
        scores = head.weight[rows] @ hidden
        if head.bias is not None:
            scores = scores + head.bias[rows]
        if tree.arity[node] == 2:
            second = float(torch.sigmoid(scores[0]))
            p = second if position else 1.0 - second
        else:
            p = float(torch.softmax(scores, 0)[position])
        path.append({"node": node, "direction": int(position), "p": p})
        node = int(tree.child[tree.child_start[node] + position])
    return path
