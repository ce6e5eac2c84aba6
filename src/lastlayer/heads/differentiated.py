"""The differentiated softmax: frequent classes have longer vectors than rare ones."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter, ParameterList
from torch.nn.functional import linear

from lastlayer._checks import as_pairs, check_choice, check_int
from lastlayer._torch import in_autocast_dtype, in_dtype
from lastlayer.fused.clusters import BANDS, group_loss
from lastlayer.fused.scores import wide_scores
from lastlayer.heads.base import all_in_dtype, init_uniform_, log_softmax
from lastlayer.heads.layout import VARIANTS, RankedHead, bands_from_counts
from lastlayer.heads.recipes import Arguments, ClassData, Recipe


def _bands_of_data(data: ClassData, given: Arguments) -> Arguments:
    """The bands of a recipe: as given, or with a ``share`` of a full layer's parameters."""
    if "bands" in given:
        return {"bands": given["bands"]}
    share, variant = given.get("share", 0.5), given.get("variant", "slices")
    most = max(1, int(share * data.n_classes * data.in_features))
    of_data = data.positive_counts(), data.in_features
    make = partial(bands_from_counts, *of_data, most, variant=variant)
    return {"bands": data.once(("bands", share, variant), make)}


class DifferentiatedSoftmax(RankedHead):
    r"""One softmax over bands of classes whose vectors have different widths.

    .. math:: \theta_c = \langle w_c, h_{b(c)} \rangle + b_c, \qquad
              \log p_c = \theta_c - \log \sum_j e^{\theta_j}

    where :math:`h_b` is what the band of a class sees of the hidden state: its own slice of it
    ("slices"), or a projection :math:`P_b h` of all of it ("projections"). As a matrix of all
    classes the weight would be block-diagonal, and it is never made.

    Choose it where most classes are too rare to fill a whole vector: it has the parameters and the
    products of the bands alone, and every class still competes with every other, in one normaliser.

    Cost: a training step is three products of rows × classes × width for each band. A chunk of
    scores is held at a time; gradients are made in the forward pass, and with
    ``reduction="none"`` in a second one. "projections" adds products of rows × in_features × all
    widths.

    Args:
        in_features: size of the hidden state.
        bands: ``[(classes, width), …]``, the most frequent classes first. In "slices" the widths
            add up to in_features. :func:`bands_from_counts` chooses them for you.
        order: all classes, the most frequent first; else 0, 1, 2, …. It decides which band a
            class is in; inside a band classes are sorted by id.
        variant: "slices" or "projections".
        bias: whether each class has a bias.
        label_smoothing, ignore_index, reduction, chunk_rows, device, dtype: as of ``FullSoftmax``.

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

    recipes = (
        Recipe(
            "differentiated",
            "narrower vectors for rare classes",
            extra={"bands": list[tuple[int, int]], "share": float},
            from_data=_bands_of_data,
            filled=frozenset({"bands", "order"}),
            compared=("differentiated",),
            rank=22,
        ),
    )

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
        in_features = check_int("in_features", in_features)
        check_choice("variant", variant, VARIANTS)
        sizes = as_pairs("bands", bands, ("classes", "width"))
        widths = [width for _, width in sizes]
        if variant == "slices" and sum(widths) != in_features:
            raise ValueError(
                f"bands: expected widths that add up to in_features={in_features}, got "
                f"{' + '.join(map(str, widths))} = {sum(widths)}; variant='projections' takes any "
                "widths"
            )
        super().__init__(
            in_features, list(accumulate(classes for classes, _ in sizes)), order,
            label_smoothing=label_smoothing, ignore_index=ignore_index, reduction=reduction,
            chunk_rows=chunk_rows, device=device,
        )  # fmt: skip
        self.bands, self.variant = sizes, variant

        def empty(*shape: int) -> Parameter:
            return Parameter(torch.empty(*shape, device=device, dtype=dtype))

        ends = [0, *accumulate(widths)]
        self._seen_by = [slice(a, b) for a, b in pairwise(ends)]
        self.weights = ParameterList([empty(*band) for band in sizes])
        self.register_parameter("bias", empty(self.n_classes) if bias else None)
        projects = variant == "projections"
        self.register_parameter("projection", empty(ends[-1], in_features) if projects else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fresh parameters, as of ``nn.Linear``; makes a head whole after meta and ``to_empty``."""
        self._fill_order()
        for weight in self.weights:
            init_uniform_(weight.shape[1], weight)
        init_uniform_(self.in_features, self.bias, self.projection)

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Minus the log-probability of the targets, smoothed where asked for."""
        self._check_hidden(hidden)
        target, seen = self._check_target(hidden, target), hidden
        if self.projection is not None:
            seen = in_autocast_dtype(hidden)
            if self.ignore_index is not None:
                # A NaN in a row that does not count would reach the gradient of the projection.
                seen = torch.where((target == self.ignore_index).unsqueeze(-1), 0.0, seen)
            seen = linear(seen, in_dtype(self.projection, seen.dtype))
        options = float(self.label_smoothing), self.ignore_index, self.chunk_rows
        return group_loss(
            BANDS, seen, target, self.places, self.bias, list(self.weights), options, self.reduction
        )

    def _score_tensors(self, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        return all_in_dtype(dtype, self.bias, self.projection, *self.weights)

    def _rows_log_prob(self, rows: Tensor, chosen: Tensor | None, *tensors: Any) -> Tensor:
        bias, projection, *weights = tensors
        seen = rows if projection is None else linear(rows, projection)
        of_bands = [
            wide_scores(seen[:, part], weight, None)
            for weight, part in zip(weights, self._seen_by, strict=True)
        ]
        scores = torch.cat(of_bands, -1)
        log_prob = log_softmax(scores if bias is None else scores + bias)
        if chosen is None:
            return self._by_class(log_prob)
        return log_prob.gather(-1, self._places_of(chosen))
