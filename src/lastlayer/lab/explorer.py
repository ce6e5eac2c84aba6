"""What a head expects in a dozen contexts or rows of the test part, beside what is right."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lastlayer.heads import HierarchicalSoftmax
from lastlayer.lab.data import LabelData, SparseRows, TextData
from lastlayer.lab.evaluation import as_table
from lastlayer.lab.feeding import Batch, Feed
from lastlayer.lab.models import FeatureBody

# Contexts or rows that are shown, tokens of a context, and the best classes of each.
ROWS, SHOWN, BEST = 12, 16, 10
# What is kept of a row that has more.
MOST_FEATURES, MOST_LABELS = 12, 40
# Rows that a dozen with labels is taken from.
_LOOKED_AT = 8 * ROWS
# What a feature weighs that every row has, where a rare one weighs some 7.
_EVERYWHERE = 0.01

Weigh = Callable[[Any, int], tuple[Tensor, Tensor, Tensor]]


def readable(token: str) -> str:
    """As text that every encoder takes: source code may hold lone surrogates."""
    return token.encode("utf-8", "backslashreplace").decode()


@torch.no_grad()
def explore(
    data: TextData, body: nn.Module, head: nn.Module, length: int, device: torch.device
) -> list[dict[str, Any]]:
    """The same contexts of the test part for every head."""
    ids, tokens = np.asarray(data.test), data.vocabulary.tokens
    length = min(length, len(ids) - 1)
    body.eval()
    head.eval()
    made = []
    for start in _starts(len(ids) - length, tokens, ids, length):
        window = torch.from_numpy(ids[start : start + length].astype(np.int64)).to(device)
        hidden = body(window.unsqueeze(0))[0, -1]
        context = [readable(tokens[i]) for i in window[-SHOWN:].tolist()]
        made.append(_expected(head, hidden, int(ids[start + length]), context, tokens))
    return made


def _starts(places: int, tokens: Sequence[str], ids: Any, length: int) -> list[int]:
    """At random, but always the same; tokens of white space alone show little."""
    drawn = np.random.default_rng(0).permutation(places)[: 50 * ROWS].tolist()
    telling = sorted(drawn, key=lambda i: not tokens[ids[i + length]].strip())
    return sorted(telling[:ROWS])


def _expected(
    head: Any, hidden: Tensor, target: int, context: list[str], names: Sequence[str]
) -> dict[str, Any]:
    """The classes that a head expects in a context, beside the one that is right."""
    row = hidden.unsqueeze(0)
    best = head.topk(row, min(BEST, len(names)))
    top = zip(best.classes[0].tolist(), best.values[0].exp().tolist(), strict=True)
    own = head.log_prob(row, torch.tensor([target], device=hidden.device))
    return {
        "context": context,
        "target": readable(names[target]),
        "target_p": float(own.exp()),
        "top": [{"token": readable(names[i]), "p": p} for i, p in top if p > 0],
        "path": path_of(head, hidden, target),
    }


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


class _Row(NamedTuple):
    hidden: Tensor
    labels: Tensor
    features: list[dict[str, Any]]


@torch.no_grad()
def explore_labels(
    data: LabelData, body: FeatureBody, head: nn.Module, feed: Feed
) -> list[dict[str, Any]]:
    """The same rows of the test part for every head."""
    body.eval()
    head.eval()
    weigh, found = _weigher(data, body), []
    for batch in feed.held_out("test", _LOOKED_AT):
        found += _rows(batch, body(batch.inputs), data, weigh)
    if data.task == "multilabel":
        return [_said(row, data, head) for row in _telling(found)]
    return [
        _expected(head, row.hidden, int(row.labels[0]), [each["name"] for each in row.features],
                  data.label_names)
        for row in _telling(found)
    ]  # fmt: skip


def _telling(rows: list[_Row]) -> list[_Row]:
    """Spread over those that have labels and features; others only where these are too few."""
    full = [i for i, row in enumerate(rows) if len(row.labels) and row.features]
    rest = [i for i in range(len(rows)) if i not in set(full)]
    spread = [full[i * len(full) // ROWS] for i in range(ROWS)] if len(full) > ROWS else full
    return [rows[i] for i in sorted(spread + rest[: ROWS - len(spread)])]


def _rows(batch: Batch, hidden: Tensor, data: LabelData, weigh: Weigh) -> list[_Row]:
    made = []
    for i in range(batch.size):
        names, values, weights = weigh(batch.inputs, i)
        order = weights.argsort(descending=True, stable=True)[:MOST_FEATURES]
        features = [
            {"name": readable(data.feature_names[int(names[j])]), "value": float(values[j])}
            for j in order.tolist()
            if weights[j] > 0
        ]
        target = batch.target[i].reshape(-1)
        made.append(_Row(hidden[i], target[target >= 0], features))
    return made


def _weigher(data: LabelData, body: FeatureBody) -> Weigh:
    """Gives the features of a row: their numbers, their values, and how telling each is.

    Dense ones tell by how far they are from their mean. In a bag the largest are what every row
    has, so those that fewer rows have weigh more.
    """
    features = data.train.features
    if not isinstance(features, SparseRows):

        def far_from_the_mean(inputs: Tensor, row: int) -> tuple[Tensor, Tensor, Tensor]:
            values = ((inputs[row] - body.shift) * body.scale).cpu()
            return torch.arange(len(values)), values, values.abs()

        return far_from_the_mean
    seen = np.bincount(features.indices, minlength=features.width)
    rarity = torch.from_numpy(_EVERYWHERE + np.log((1 + features.shape[0]) / (1 + seen)))

    def weigh(inputs: tuple[Tensor, Tensor, Tensor], row: int) -> tuple[Tensor, Tensor, Tensor]:
        ids, values = (_of_row(each, inputs[1], row).cpu() for each in (inputs[0], inputs[2]))
        return ids, values, values.abs() * rarity[ids]

    return weigh


def _of_row(entries: Tensor, begins: Tensor, row: int) -> Tensor:
    end = int(begins[row + 1]) if row + 1 < len(begins) else len(entries)
    return entries[int(begins[row]) : end]


def _said(row: _Row, data: LabelData, head: nn.Module) -> dict[str, Any]:
    hidden, right = row.hidden.unsqueeze(0), set(row.labels.tolist())
    guess = as_table(head.predict(hidden), data.n_classes)[0]  # type: ignore[operator]
    best = head.topk(hidden, min(BEST, data.n_classes))  # type: ignore[operator]
    top = {
        label: math.exp(value)
        for label, value in zip(best.classes[0].tolist(), best.values[0].tolist(), strict=True)
        if value > -math.inf
    }
    below = row.labels[[label not in top for label in row.labels.tolist()]][:MOST_LABELS]
    own = head.log_prob(hidden, below.unsqueeze(0))[0].exp()  # type: ignore[operator]
    likely = own.argsort(descending=True, stable=True)
    rest = zip(below[likely].tolist(), own[likely].tolist(), strict=True)

    def told(label: int, p: float) -> dict[str, Any]:
        name, on = readable(data.label_names[label]), bool(guess[label])
        return {"label": name, "p": p, "predicted": on, "right": label in right}

    return {
        "features": row.features,
        "standardised": not isinstance(data.train.features, SparseRows),
        "labels": [readable(data.label_names[i]) for i in row.labels[:MOST_LABELS].tolist()],
        "n_labels": len(right),
        "n_predicted": int(guess.sum()),
        "n_found": int(guess[row.labels].sum()),
        "top": [told(*each) for each in top.items()],
        "below": [told(*each) for each in rest],
    }
