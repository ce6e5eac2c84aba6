"""Judging a multi-label model on held-out rows."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lastlayer.lab.evaluation import DECILES, deciles_of, rows_for
from lastlayer.lab.feeding import Feed

_DEPTHS = (1, 3, 5)


class LabelJudge:
    """Judges models on one set of labelled rows.

    A label is predicted where the head's ``predict`` says so. Beside F1 over all pairs of rows and
    labels there are the share of right labels among the 1, 3 and 5 best of a row (precision at k),
    and the share of labels found by how frequent they are.

    Args:
        feed: where held-out rows come from.
        counts: in how many rows of the training part each label stands.
    """

    def __init__(self, feed: Feed, counts: NDArray[np.int64]) -> None:
        self._feed, self._n_classes = feed, len(counts)
        self._decile = torch.from_numpy(deciles_of(counts))

    def on_the_way(self, body: nn.Module, head: nn.Module) -> dict[str, Any]:
        """For a point of the learning curve."""
        found = self._judged(body, head, "valid")
        del found["by_decile"]
        return found

    def at_the_end(self, body: nn.Module, head: nn.Module) -> dict[str, Any]:
        """For the result."""
        return self._judged(body, head, "test")

    @torch.no_grad()
    def _judged(self, body: nn.Module, head: nn.Module, part: str) -> dict[str, Any]:
        body.eval()
        head.eval()
        sums: dict[str, float] = {}
        hit, present = torch.zeros(DECILES), torch.zeros(DECILES)
        rows = 0
        for batch in self._feed.held_out(part, rows_for(part, self._n_classes)):
            hidden = body(batch.inputs)
            truth = as_table(batch.target, self._n_classes).cpu()
            guess = as_table(head.predict(hidden), self._n_classes).cpu()  # type: ignore[operator]
            best = head.topk(hidden, min(max(_DEPTHS), self._n_classes)).classes.cpu()  # type: ignore[operator]
            found = truth.gather(1, best).double()
            size = batch.size
            numbers = {
                "loss": size * float(head(hidden, batch.target)),
                "true": float((guess & truth).sum()),
                "guessed": float(guess.sum()),
                "present": float(truth.sum()),
                "exact": float((guess == truth).all(1).sum()),
            }
            numbers |= {f"at_{k}": float(found[:, :k].sum()) / k for k in _DEPTHS}
            for name, value in numbers.items():
                sums[name] = sums.get(name, 0.0) + value
            rows += size
            hit.index_add_(0, self._decile, (guess & truth).sum(0).float())
            present.index_add_(0, self._decile, truth.sum(0).float())
        return {
            "rows": rows,
            "loss": sums["loss"] / rows,
            "micro_f1": _share(2 * sums["true"], sums["guessed"] + sums["present"]),
            "micro_precision": _share(sums["true"], sums["guessed"]),
            "micro_recall": _share(sums["true"], sums["present"]),
            "exact_match": sums["exact"] / rows,
            **{f"precision_at_{k}": sums[f"at_{k}"] / rows for k in _DEPTHS},
            "by_decile": [
                {"decile": i + 1, "count": int(n), "recall": _share(float(h), float(n))}
                for i, (h, n) in enumerate(zip(hit, present, strict=True))
            ],
        }


def as_table(positives: Tensor, n_classes: int) -> Tensor:
    """Padded lists of classes as a table of booleans, ``(rows, n_classes)``."""
    table = torch.zeros(len(positives), n_classes + 1, dtype=torch.bool, device=positives.device)
    # Padding goes into a column of its own.
    places = torch.where(positives < 0, n_classes, positives)
    return table.scatter_(1, places, value=True)[:, :-1]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
