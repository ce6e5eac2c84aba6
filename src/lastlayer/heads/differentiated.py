"""The differentiated softmax: frequent classes have longer vectors than rare ones."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter, ParameterList
from torch.nn.functional import linear

from lastlayer import kernels
from lastlayer._checks import as_pairs, check_choice, check_int
from lastlayer._torch import accumulation_dtype, in_autocast_dtype, in_dtype, without_autocast
from lastlayer.fused.clusters import BANDS, group_loss
from lastlayer.fused.prediction import (
    is_predictable,
    log_softmax,
    room_for_scores,
    rows_held,
    top_classes,
)
from lastlayer.fused.scores import fits_one_cpu_product, scores_into, wide_scores
from lastlayer.heads.base import all_in_dtype, init_uniform_
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

    where :math:`h_b` is the input of the band of a class: a slice of the hidden state ("slices"),
    or a projection :math:`P_b h` of all of it ("projections"). With slices this is a full softmax
    with a block-diagonal weight, of which only the blocks are stored.

    Choose it if most classes are too rare for a full vector: it saves parameters and
    multiplications, and still has a single normaliser over all classes.

    Cost: three products of rows × classes × width for each band per training step. One chunk of
    scores is held at a time; gradients are computed in the forward pass, and with
    ``reduction="none"`` in a second pass. "projections" adds products of rows × in_features × the
    sum of widths.

    Args:
        in_features: size of the hidden state.
        bands: ``[(classes, width), …]``, the most frequent classes first. In "slices" the widths
            must sum to in_features. :func:`bands_from_counts` can choose them.
        order: all classes, the most frequent first; by default 0, 1, 2, …. It decides which band a
            class is in; within a band classes are sorted by id.
        variant: "slices" or "projections".
        bias: whether each class has a bias.
        label_smoothing, ignore_index, reduction, chunk_rows, device, dtype: as in ``FullSoftmax``.

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
                f"bands: expected widths that sum to in_features={in_features}, got "
                f"{' + '.join(map(str, widths))} = {sum(widths)}; variant='projections' accepts "
                "any widths"
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
        """Reinitialises the parameters as ``nn.Linear`` does; completes ``to_empty`` after meta."""
        self._make_ready()
        for weight in self.weights:
            init_uniform_(weight.shape[1], weight)
        init_uniform_(self.in_features, self.bias, self.projection)

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The negative log-likelihood of the targets, with label smoothing if set."""
        self._check_hidden(hidden)
        (target, ignored), seen = self._target_and_ignored(hidden, target), hidden
        if self.projection is not None:
            seen = in_autocast_dtype(hidden)
            if ignored is not None:
                # A NaN in an ignored row would reach the gradient of the projection.
                seen = torch.where((target == ignored).unsqueeze(-1), 0.0, seen)
            seen = linear(seen, in_dtype(self.projection, seen.dtype))
        options = float(self.label_smoothing), ignored, self.chunk_rows
        return group_loss(
            BANDS, seen, target, self.places, self.bias, list(self.weights), options, self.reduction
        )

    def _score_tensors(self, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        return all_in_dtype(dtype, self.bias, self.projection, *self.weights.parameters())

    def _rows_log_prob(self, rows: Tensor, chosen: Tensor | None, *tensors: Any) -> Tensor:
        bias, projection, *weights = tensors
        few = fits_one_cpu_product(rows, self.n_classes, self.chunk_rows)
        if not few and not torch.is_grad_enabled() and is_predictable(rows):
            shape = len(rows), self.n_classes
            scores = kernels.empty(shape, accumulation_dtype(rows.dtype), rows.device)
            left = self._scores_into(scores, rows, *tensors)
            if chosen is None:
                kernels.prediction.log_softmax_("auto", scores, left, 0.0, 1.0)
                return self._by_class(scores)
            places, of_row = self._places_of(chosen), (left, 0.0, 1.0, 0, True)
            total: Tensor = kernels.prediction.best("auto", scores, *of_row)[2].unsqueeze(-1)
            found = scores.gather(-1, places)
            # In a fully masked row all log-probabilities are -inf.
            total = total.masked_fill_(total == -torch.inf, 0.0)
            return (found if left is None else found + left[places]) - total
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

    def _scores_into(self, out: Tensor, rows: Tensor, *tensors: Any) -> Tensor | None:
        """Computes scores by place, without a gradient; returns the bias still to be added."""
        bias, projection, *weights = tensors
        on_cpu = rows.device.type == "cpu"
        seen = rows if projection is None else linear(rows, projection)
        for (first, last), weight, part in zip(self._groups, weights, self._seen_by, strict=True):
            added = bias[first:last] if on_cpu and bias is not None else None
            scores_into(out[:, first:last], seen[:, part], weight, added)
        return None if on_cpu else bias

    def _scores_in_chunks(
        self, rows: Tensor, copies: float
    ) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Yields chunks of rows, their scores by place, and the bias still to be added."""
        step = rows_held(rows, self.n_classes, self.chunk_rows, copies)
        held = room_for_scores(rows, self.n_classes, step)
        tensors = self._score_tensors(rows.dtype)
        for first in range(0, max(1, len(rows)), step):
            part = slice(first, first + step)
            scores = held[: len(rows[part])]
            yield part, scores, self._scores_into(scores, rows[part], *tensors)

    def _rows_topk(self, rows: Tensor, k: int) -> tuple[Tensor, ...]:
        some, best = in_autocast_dtype(rows), []
        if fits_one_cpu_product(some, self.n_classes, self.chunk_rows) or not is_predictable(
            some, k
        ):
            return super()._rows_topk(rows, k)
        with without_autocast(rows):
            for _, scores, left in self._scores_in_chunks(some, 1.0):
                if self.order is None:
                    found = kernels.prediction.best("auto", scores, left, 0.0, 1.0, k, True)[:2]
                else:
                    kernels.prediction.log_softmax_("auto", scores, left, 0.0, 1.0)
                    found = self._best_of_groups(scores, k)
                best.append(found)
        return tuple(map(torch.cat, zip(*best, strict=True)))

    def _best_of_groups(self, log_prob: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The top k of log-probabilities by place; classes are sorted by id only within groups."""
        of_groups = []
        for first, last in self._groups:
            values, columns = top_classes(log_prob[:, first:last], min(k, last - first))
            of_groups.append((values, self._classes_at(columns + first)))
        values, classes = (torch.cat(each, -1) for each in zip(*of_groups, strict=True))
        by_id = classes.argsort(-1)
        values, columns = top_classes(values.gather(-1, by_id), k)
        return values, classes.gather(-1, by_id).gather(-1, columns)

    def _rows_sample(self, rows: Tensor, *uniform: Tensor) -> Tensor:
        some = in_autocast_dtype(rows)
        if not is_predictable(some):
            return super()._rows_sample(rows, *uniform)
        with without_autocast(rows):
            places = torch.cat([
                kernels.prediction.draw("auto", scores, left, 0.0, 1.0, uniform[0][part])
                for part, scores, left in self._scores_in_chunks(some, 5.0)
            ])  # fmt: skip
        return torch.where(places < 0, -1, self._classes_at(places.clamp(min=0)))
