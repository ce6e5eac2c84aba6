"""The differentiated softmax: frequent classes have more numbers than rare ones."""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import Parameter, ParameterList
from torch.nn.functional import linear

from lastlayer.heads._band_loss import band_loss
from lastlayer.heads._band_widths import VARIANTS, bands_from_counts
from lastlayer.heads._checks import check_count, check_hidden, check_target
from lastlayer.heads._ranked import IGNORED, RankedHead
from lastlayer.heads._scores import wide_scores

__all__ = ["DifferentiatedSoftmax", "bands_from_counts"]


class DifferentiatedSoftmax(RankedHead):
    r"""One softmax over bands of classes whose vectors have different widths.

    .. math:: \theta_c = \langle w_c, h_{b(c)} \rangle + b_c, \qquad
              \log p_c = \theta_c - \log \sum_j e^{\theta_j}

    where :math:`h_b` is what the band of a class sees of the hidden state: its own slice of it
    ("slices"), or a projection :math:`P_b h` of all of it ("projections"). As a matrix of all
    classes the weight would be block-diagonal, and it is never made.

    Choose it where most classes are too rare to fill a whole vector: it has the parameters and the
    products of the bands alone, and every class still competes with every other, in one normaliser.

    Cost: a training step three products of rows × classes × width for each band. A chunk of scores
    is held at a time; gradients are made in the forward pass, and with ``reduction="none"`` in a
    second one. "projections" adds products of rows × in_features × all widths.

    Args:
        in_features: how many numbers a hidden state has.
        bands: ``[(classes, width), …]``, the most frequent classes first. In "slices" the widths
            add up to in_features. :func:`bands_from_counts` chooses them for you.
        order: all classes, the most frequent first; else 0, 1, 2, …. It decides which band a
            class is in; inside a band classes stand by their ids.
        variant: "slices" or "projections".
        bias: whether each class has a bias.
        label_smoothing: how much of the target the loss spreads evenly over all classes.
        ignore_index: rows with this target count for nothing; None where every target counts.
        reduction: "mean" over the rows that count, "sum" or "none".
        chunk_rows: rows of scores held at a time, "auto" or "low".
        device: where the parameters are made.
        dtype: of the parameters.

    Example:
        >>> import torch
        >>> head = DifferentiatedSoftmax(64, [(100, 40), (900, 16), (4000, 8)])
        >>> hidden, target = torch.randn(8, 64), torch.randint(5000, (8,))
        >>> head(hidden, target).backward()
        >>> sum(each.numel() for each in head.weights), 5000 * 64
        (50400, 320000)

    Reference:
        Chen, Grangier and Auli, Strategies for training large vocabulary neural language models,
        ACL 2016, arXiv:1512.04906; "projections" is the variant of Grave et al.,
        arXiv:1609.04309.
    """

    bias: Parameter | None
    projection: Parameter | None

    def __init__(
        self,
        in_features: int,
        bands: Sequence[Sequence[int]],
        *,
        order: Any = None,
        variant: str = "slices",
        bias: bool = True,
        label_smoothing: float = 0.0,
        ignore_index: int | None = -100,
        reduction: str = "mean",
        chunk_rows: int | str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_count("in_features", in_features)
        self_bands = _checked_bands(bands, in_features, variant)
        super().__init__(
            in_features,
            list(accumulate(classes for classes, _ in self_bands)),
            order,
            label_smoothing=label_smoothing,
            ignore_index=ignore_index,
            reduction=reduction,
            chunk_rows=chunk_rows,
            device=device,
        )
        self.bands, self.variant = self_bands, variant

        def empty(*shape: int) -> Parameter:
            return Parameter(torch.empty(*shape, device=device, dtype=dtype))

        ends = [0, *accumulate(width for _, width in self_bands)]
        self._numbers = [slice(a, b) for a, b in pairwise(ends)]
        self.weights = ParameterList([empty(*band) for band in self_bands])
        self.register_parameter("bias", empty(self.n_classes) if bias else None)
        projects = variant == "projections"
        self.register_parameter("projection", empty(ends[-1], in_features) if projects else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fresh numbers, distributed as those of ``nn.Linear`` on what each band sees.

        A head that was made on the meta device is whole after ``to_empty`` and this.
        """
        self._fill_order()
        for weight in self.weights:
            bound = 1.0 / math.sqrt(weight.shape[1])
            torch.nn.init.uniform_(weight, -bound, bound)
        for each in (self.bias, self.projection):
            if each is not None:
                bound = 1.0 / math.sqrt(self.in_features)
                torch.nn.init.uniform_(each, -bound, bound)

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Minus the log-probability of the targets, smoothed where asked for."""
        check_hidden(self, hidden)
        target = check_target(self, hidden, target)
        rows, place = self._operand(hidden), self._target_places(target.reshape(-1))
        if self.projection is not None and self.ignore_index is not None:
            # A NaN in a row that does not count would reach the gradient of the projection.
            rows = torch.where((place == IGNORED).unsqueeze(-1), 0.0, rows)
        loss = band_loss(
            self._seen(rows),
            list(self.weights),
            self.bias,
            place,
            ignore_index=None if self.ignore_index is None else IGNORED,
            chunk_rows=self.chunk_rows,
            smoothing=self.label_smoothing,
            reduction=self.reduction,
        )
        return loss.reshape(target.shape) if self.reduction == "none" else loss

    def _seen(self, rows: Tensor) -> Tensor:
        """What all bands see of the rows, side by side."""
        return rows if self.projection is None else linear(rows, self.projection.to(rows.dtype))

    def _rows_log_prob(self, rows: Tensor, chosen: Tensor | None = None) -> Tensor:
        seen, dtype = self._seen(rows), rows.dtype
        scores = torch.cat(
            [
                wide_scores(seen[:, numbers], weight.to(dtype), None)
                for weight, numbers in zip(self.weights, self._numbers, strict=True)
            ],
            -1,
        )
        if self.bias is not None:
            scores = scores + self.bias.to(dtype)
        log_prob = torch.log_softmax(scores, -1)
        if chosen is None:
            return self._by_class(log_prob)
        return log_prob.gather(-1, self._places_of(chosen))

    def config(self) -> dict[str, Any]:
        return {
            **super().config(),
            "bands": [list(band) for band in self.bands],
            "variant": self.variant,
            "bias": self.bias is not None,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        # The bands say how many classes there are.
        return super().from_config({k: v for k, v in config.items() if k != "n_classes"})


def _checked_bands(bands: Any, in_features: int, variant: Any) -> tuple[tuple[int, int], ...]:
    if variant not in VARIANTS:
        raise ValueError(f"variant: expected one of {VARIANTS}, got {variant!r}")
    expected = "a list of (classes, width), the most frequent classes first"
    if isinstance(bands, (str, bytes)) or not hasattr(bands, "__iter__"):
        raise TypeError(f"bands: expected {expected}, got {type(bands).__name__}")
    pairs = []
    for position, band in enumerate(bands):
        pair = tuple(band) if hasattr(band, "__iter__") else ()
        if len(pair) != 2 or not all(type(each) is int for each in pair):
            raise TypeError(f"bands: expected {expected}, got {band!r} at position {position}")
        for name, number in zip(("classes", "width"), pair, strict=True):
            if number < 1:
                raise ValueError(
                    f"bands: expected at least 1 for the {name} of each band, got {number} at "
                    f"position {position}"
                )
        pairs.append((pair[0], pair[1]))
    if not pairs:
        raise ValueError(f"bands: expected {expected}, got none")
    total = sum(width for _, width in pairs)
    if variant == "slices" and total != in_features:
        raise ValueError(
            f"bands: expected widths that add up to in_features={in_features}, got "
            f"{' + '.join(str(width) for _, width in pairs)} = {total}; "
            "variant='projections' takes any widths"
        )
    return tuple(pairs)
