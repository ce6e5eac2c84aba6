"""What the scores of labels say as probabilities, and which labels they turn on."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lastlayer.losses.calibration import ZLPRCalibrator
from lastlayer.maps.sparsemax import sparsemax


def label_log_probs(
    scores: Tensor, loss: str, calibrator: ZLPRCalibrator | None, chosen: Tensor | None = None
) -> Tensor:
    """The log-probability that a label is on.

    Args:
        scores: of all labels; or of some, where these stand for themselves.
        loss: what the scores were trained with.
        calibrator: gives the probabilities if there is one.
        chosen: which labels the scores are of, in their shape; None for all.
    """
    if loss == "sparsemax":
        probs = sparsemax(scores)
        outside = probs == 0
        # The log of 1 in their place: that of 0 would make their gradient NaN.
        return probs.masked_fill(outside, 1.0).log().masked_fill(outside, -torch.inf)
    if calibrator is None:
        return logsigmoid(2.0 * scores if loss == "zlpr" else scores)
    slope, bias = (
        each if chosen is None or each.shape[0] == 1 else each[chosen]
        for each in (calibrator.slope.to(scores), calibrator.bias.to(scores))
    )
    # A slope of 0 makes nothing of an infinite score.
    return logsigmoid(torch.where(slope == 0, 0.0, slope * scores) + bias)


def lists_above(chunks: Iterable[Tensor], least: float | Tensor, padding: int) -> Tensor:
    """The labels of each row above a threshold, ascending, ``(rows, m)``.

    The host waits for m, the length of the longest list.

    Args:
        chunks: ``(some rows, labels)`` each, at least one.
        least: one number, or one a label.
        padding: what fills the lists.
    """
    found, n_rows = [], 0
    for values in chunks:
        row, label = (values > least).nonzero(as_tuple=True)
        found.append((row + n_rows, label))
        n_rows += values.shape[0]
    rows, labels = (torch.cat(each) for each in zip(*found, strict=True))
    counts = torch.bincount(rows, minlength=n_rows)
    longest = int(counts.max()) if n_rows else 0
    starts = counts.cumsum(0) - counts
    place = torch.arange(rows.shape[0], device=rows.device) - starts[rows]
    lists = labels.new_full((n_rows, longest), padding)
    lists[rows, place] = labels
    return lists
