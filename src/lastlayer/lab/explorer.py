"""Predictions of a head for twelve contexts or rows of the test part, with the targets."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lastlayer.heads import HierarchicalSoftmax
from lastlayer.lab.data import Data, LabelData, SparseRows, TextData
from lastlayer.lab.evaluation import as_table
from lastlayer.lab.feeding import Feed, TextFeed
from lastlayer.lab.models import FeatureBody

# Number of contexts or rows, of tokens in a context, and of the best classes of each.
ROWS, SHOWN, BEST = 12, 16, 10
# Features and labels of a row above these numbers are left out.
MOST_FEATURES, MOST_LABELS = 12, 40
# Number of candidates from which the rows are selected.
_LOOKED_AT = 8 * ROWS
# Weight of a feature that all rows have; that of a rare one is about 7.
_EVERYWHERE = 0.01


def readable(token: str) -> str:
    """Escape lone surrogates, which source code may contain but UTF-8 does not support."""
    return token.encode("utf-8", "backslashreplace").decode()


@torch.no_grad()
def explore(
    data: Data, feed: Feed, device: torch.device, body: nn.Module, head: nn.Module
) -> list[dict[str, Any]]:
    """Predictions for contexts or rows of the test part, the same for all heads; none for pairs."""
    if isinstance(data, TextData) and isinstance(feed, TextFeed):
        return _explore_text(data, body, head, feed.length, device)
    if isinstance(data, LabelData) and isinstance(body, FeatureBody):
        return explore_labels(data, body, head, feed)
    return []


def _explore_text(
    data: TextData, body: nn.Module, head: nn.Module, length: int, device: torch.device
) -> list[dict[str, Any]]:
    ids, tokens = np.asarray(data.test), data.vocabulary.tokens
    length = min(length, len(ids) - 1)
    body.eval()
    head.eval()
    # A fixed random selection; targets that are only white space come last.
    drawn = np.random.default_rng(0).permutation(len(ids) - length)[: 50 * ROWS].tolist()
    candidates = sorted(drawn, key=lambda i: not tokens[ids[i + length]].strip())
    entries = []
    for start in sorted(candidates[:ROWS]):
        window = torch.from_numpy(ids[start : start + length].astype(np.int64)).to(device)
        hidden = body(window.unsqueeze(0))[0, -1]
        context = [readable(tokens[i]) for i in window[-SHOWN:].tolist()]
        entries.append(_class_entry(head, hidden, int(ids[start + length]), context, tokens))
    return entries


def _class_entry(
    head: Any, hidden: Tensor, target: int, context: list[str], names: Sequence[str]
) -> dict[str, Any]:
    """The most probable classes in a context, and the target with its probability."""
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
    """The choices on the path to a class in the tree; None for heads without a tree."""
    if not isinstance(head, HierarchicalSoftmax) or head.tree.overlaps:
        return None
    tree = head.tree
    # The weight has one row per binary node, and one per child of a wider node.
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
    """Predictions for rows of the test part, the same for every head."""
    body.eval()
    head.eval()
    rarity, rows = _rarity(data.train.features), list[_Row]()
    for batch in feed.held_out("test", _LOOKED_AT):
        hidden = body(batch.inputs)
        for i in range(batch.size):
            target = batch.target[i].reshape(-1)
            features = _features(data, body, batch.inputs, i, rarity)
            rows.append(_Row(hidden[i], target[target >= 0], features))
    if data.task == "multilabel":
        return [_labels_entry(row, data, head) for row in _selected(rows)]
    return [
        _class_entry(head, row.hidden, int(row.labels[0]), [each["name"] for each in row.features],
                  data.label_names)
        for row in _selected(rows)
    ]  # fmt: skip


def _selected(rows: list[_Row]) -> list[_Row]:
    """Select rows that have labels and features, evenly spaced; others only if too few do."""
    complete = [i for i, row in enumerate(rows) if len(row.labels) and row.features]
    incomplete = [i for i in range(len(rows)) if i not in set(complete)]
    spread = (
        [complete[i * len(complete) // ROWS] for i in range(ROWS)]
        if len(complete) > ROWS
        else complete
    )
    return [rows[i] for i in sorted(spread + incomplete[: ROWS - len(spread)])]


def _rarity(features: Any) -> Tensor | None:
    """The weight of each sparse feature, higher for rarer ones (IDF); None if dense."""
    if not isinstance(features, SparseRows):
        return None
    seen = np.bincount(features.indices, minlength=features.width)
    return torch.from_numpy(_EVERYWHERE + np.log((1 + features.shape[0]) / (1 + seen)))


def _features(
    data: LabelData, body: FeatureBody, inputs: Any, row: int, rarity: Tensor | None
) -> list[dict[str, Any]]:
    """The most important features of a row: by value and rarity, or by distance from the mean."""
    if rarity is None:
        values = ((inputs[row] - body.shift) * body.scale).cpu()
        ids, weights = torch.arange(len(values)), values.abs()
    else:
        all_ids, begins, all_values = inputs
        end = int(begins[row + 1]) if row + 1 < len(begins) else len(all_ids)
        ids, values = (each[int(begins[row]) : end].cpu() for each in (all_ids, all_values))
        weights = values.abs() * rarity[ids]
    order = weights.argsort(descending=True, stable=True)[:MOST_FEATURES]
    return [
        {"name": readable(data.feature_names[int(ids[j])]), "value": float(values[j])}
        for j in order.tolist()
        if weights[j] > 0
    ]


def _labels_entry(row: _Row, data: LabelData, head: nn.Module) -> dict[str, Any]:
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
    others = zip(below[likely].tolist(), own[likely].tolist(), strict=True)

    def as_entry(label: int, p: float) -> dict[str, Any]:
        name, on = readable(data.label_names[label]), bool(guess[label])
        return {"label": name, "p": p, "predicted": on, "right": label in right}

    return {
        "features": row.features,
        "standardised": not isinstance(data.train.features, SparseRows),
        "labels": [readable(data.label_names[i]) for i in row.labels[:MOST_LABELS].tolist()],
        "n_labels": len(right),
        "n_predicted": int(guess.sum()),
        "n_found": int(guess[row.labels].sum()),
        "top": [as_entry(*each) for each in top.items()],
        "below": [as_entry(*each) for each in others],
    }
