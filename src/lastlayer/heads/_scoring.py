"""Log-probabilities from the products of hidden states with class vectors."""

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lastlayer._torch import accumulation_dtype
from lastlayer.fused.engine import MOST_ROUNDED_ADDITIONS
from lastlayer.heads._checks import check_classes, check_hidden
from lastlayer.heads._rows import row_chunks
from lastlayer.heads._scores import wide_scores
from lastlayer.heads.base import Head


class ScoringHead(Head):
    """A map on scores ``hidden @ vectors.T + biases``, made for a chunk of rows at a time."""

    # Numbers held for each score of a chunk, itself included.
    _copies = 4.0

    def log_prob(self, hidden: Tensor, classes: Tensor | None = None) -> Tensor:
        """Exact log-probabilities in float32, or in float64 from float64.

        Scores are float32 also where the head is in half precision. They are made for a chunk of
        rows at a time, so that for chosen classes memory is bounded; only a result for all
        classes has one number a row and class.

        The result is differentiable. For chosen classes backward makes the scores of each chunk
        again; for all classes nothing is made in chunks where a gradient is recorded. A class of
        probability 0 passes no gradient on.

        Args:
            hidden: ``(*batch, in_features)``.
            classes: class ids, int64: ``(*batch, k)``, or ``(k,)`` for every row; None for all.

        Returns:
            ``(*batch, n_classes)``, or ``(*batch, k)``; -inf for a class of probability 0.
        """
        check_hidden(self, hidden)
        chosen = None if classes is None else check_classes(self, hidden, classes)
        operands = self._operands(hidden)
        recording = torch.is_grad_enabled() and any(
            each is not None and each.requires_grad for each in operands
        )
        with torch.autocast(hidden.device.type, enabled=False):
            if not recording:
                made = self._filled_in_chunks(*operands, chosen)
            elif chosen is None:
                made = self._rows_log_prob(*operands)
            else:
                made = self._remade_in_backward(*operands, chosen)
        return made.reshape(*hidden.shape[:-1], made.shape[-1])

    @abstractmethod
    def _vectors_and_biases(self) -> tuple[Tensor, Tensor | None]:
        """Class vectors ``(n_classes, in_features)``, and ``(n_classes,)`` or None."""

    @abstractmethod
    def _log_probs(self, scores: Tensor) -> Tensor:
        """The log of the map of scores ``(rows, n_classes)``, differentiable."""

    def _operands(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rows, weight and bias in the dtype of autocast where it is on."""
        rows = hidden.reshape(-1, self.in_features)
        device = hidden.device.type
        if torch.is_autocast_enabled(device) and rows.dtype != torch.float64:
            rows = rows.to(torch.get_autocast_dtype(device))
        weight, bias = self._vectors_and_biases()
        return rows, weight.to(rows.dtype), None if bias is None else bias.to(rows.dtype)

    def _rows_log_prob(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None, chosen: Tensor | None = None
    ) -> Tensor:
        log_probs = self._log_probs(wide_scores(rows, weight, bias))
        return log_probs if chosen is None else log_probs.gather(-1, chosen)

    def _remade_in_backward(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None, chosen: Tensor
    ) -> Tensor:
        chunks = list(self._chunks(rows))
        if rows.itemsize < 4 and len(chunks) > MOST_ROUNDED_ADDITIONS:
            # The gradients of the chunks are added where these are made: in float32.
            weight, bias = weight.float(), None if bias is None else bias.float()
        return torch.cat([
            checkpoint(
                self._rounded_log_prob, rows[part], weight, bias, chosen[part],
                use_reentrant=False, preserve_rng_state=False,
            )
            for part in chunks
        ])  # fmt: skip

    def _rounded_log_prob(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None, chosen: Tensor
    ) -> Tensor:
        bias = None if bias is None else bias.to(rows.dtype)
        return self._rows_log_prob(rows, weight.to(rows.dtype), bias, chosen)

    def _filled_in_chunks(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None, chosen: Tensor | None
    ) -> Tensor:
        width = self.n_classes if chosen is None else chosen.shape[-1]
        dtype = accumulation_dtype(rows.dtype)
        made = rows.new_empty(rows.shape[0], width, dtype=dtype)
        for part in self._chunks(rows):
            some = None if chosen is None else chosen[part]
            made[part] = self._rows_log_prob(rows[part], weight, bias, some)
        return made

    def _chunks(self, rows: Tensor) -> Iterator[slice]:
        return row_chunks(rows, self.n_classes, self.chunk_rows, self._copies)
