"""Heads with one vector per class, exact: softmax, entmax and top-k softmax over all classes."""

import math
from collections.abc import Iterator
from typing import Any, Self, TypedDict, Unpack

import torch
from torch import Tensor
from torch.nn import Parameter

from lastlayer import kernels
from lastlayer._checks import check_alpha_number, check_chunk, check_class_weight, check_k
from lastlayer._torch import in_autocast_dtype, is_eager, is_exporting, without_autocast
from lastlayer.fused.cross_entropy import cross_entropy_numbers, linear_cross_entropy
from lastlayer.fused.prediction import (
    TOP_COPIES,
    best_classes,
    drawn_by,
    entmax_log_probs,
    is_predictable,
    log_softmax,
    rows_held,
    top_classes,
    topk_log_probs_of,
    write_entmax_log_probs,
    write_topk_log_probs,
)
from lastlayer.fused.scores import wide_scores
from lastlayer.fused.sparse import linear_entmax_loss, linear_topk_softmax_loss
from lastlayer.heads.base import ScoredHead, all_in_dtype, deformed_log, init_uniform_
from lastlayer.heads.recipes import Recipe
from lastlayer.kernels.prediction import MOST_BEST


class LinearOptions(TypedDict, total=False):
    """Options that all of these constructors take; :class:`LinearHead` has the defaults."""

    class_weight: Tensor | None
    ignore_index: int | None
    reduction: str
    chunk_rows: int | str
    device: torch.device | str | None
    dtype: torch.dtype | None


class LinearHead(ScoredHead):
    """Base class of heads with scores ``hidden @ weight.T + bias``, computed in chunks of rows.

    ``weight`` is ``(n_classes, in_features)`` and ``bias`` ``(n_classes,)`` or None, as in
    ``nn.Linear``. A subclass defines :meth:`forward` and :meth:`_log_probs`.
    """

    # Attributes that are passed to the fused loss by name.
    _loss_names: tuple[str, ...] = ("ignore_index", "reduction", "class_weight", "chunk_rows")
    weight: Parameter
    bias: Parameter | None
    class_weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        bias: bool = True,
        *,
        class_weight: Tensor | None = None,
        ignore_index: int | None = -100,
        reduction: str = "mean",
        chunk_rows: int | str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, n_classes, ignore_index=ignore_index, reduction=reduction)
        check_chunk(chunk_rows)
        self.chunk_rows = chunk_rows
        shape = self.n_classes, self.in_features
        self.weight = Parameter(torch.empty(shape, device=device, dtype=dtype))
        biases = torch.empty(self.n_classes, device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if biases is None else Parameter(biases))
        self.register_buffer("class_weight", None)
        self._set_class_weight(class_weight)
        self.reset_parameters()

    def _set_class_weight(self, class_weight: Any) -> None:
        if class_weight is not None:
            check_class_weight(class_weight, self.n_classes)
            device, given = self.weight.device, class_weight.detach()
            # A tensor on the meta device would lose the values.
            self.class_weight = given if device.type == "meta" else given.to(device)

    def reset_parameters(self) -> None:
        """Reinitialises the parameters, with the distribution of ``nn.Linear``."""
        init_uniform_(self.in_features, self.weight, self.bias)

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear | torch.nn.Embedding, **options: Any) -> Self:
        """Makes a head that shares the parameters of a layer: training one trains both.

        With an ``nn.Embedding`` the class vectors are its rows (tied embeddings). The head then has
        no bias, unless you set ``head.bias`` to a parameter.

        Args:
            linear: the layer that owns the parameters.
            options: keyword arguments of the constructor; bias, device and dtype follow the layer.
        """
        if not isinstance(linear, (torch.nn.Linear, torch.nn.Embedding)):
            raise TypeError(
                f"linear: expected an nn.Linear or nn.Embedding, got {type(linear).__name__}"
            )
        if not isinstance(linear.weight, Parameter):
            raise TypeError(
                "linear: expected a weight that is a parameter, so that it can be shared, got "
                f"{type(linear.weight).__name__}; "
                "call torch.nn.utils.parametrize.remove_parametrizations first"
            )
        if torch.nn.parameter.is_lazy(linear.weight):
            raise ValueError(
                "linear: expected a layer with initialised parameters, got a "
                f"{type(linear).__name__} before its first forward; call it once"
            )
        if linear.weight.layout != torch.strided:
            raise TypeError(
                f"linear: expected a dense weight, got one of layout {linear.weight.layout}; "
                "convert it with weight.to_dense()"
            )
        for name in ("in_features", "n_classes", "bias", "device", "dtype"):
            if name in options:
                raise TypeError(
                    f"{name}: expected no such argument, since it follows from the layer, got "
                    f"{options[name]!r}"
                )
        if "class_weight" in options and "class_weight" not in cls.__signature__.parameters:
            raise TypeError(f"class_weight: expected none, since {cls.__name__} has no such option")
        n_classes, in_features = linear.weight.shape
        bias = linear.bias if isinstance(linear, torch.nn.Linear) else None
        class_weight = options.pop("class_weight", None)
        # On meta, no memory is initialised for parameters that the layer's replace at once.
        head = cls(in_features, n_classes, bias=bias is not None, device="meta", **options)
        head.weight, head.bias = linear.weight, bias
        head._set_class_weight(class_weight)
        return head

    def to_linear(self) -> torch.nn.Linear:
        """An ``nn.Linear`` that shares this head's parameters; its outputs are the logits."""
        linear = torch.nn.Linear(self.in_features, self.n_classes, bias=False, device="meta")
        linear.weight = self.weight
        linear.register_parameter("bias", self.bias)
        return linear

    def _score_tensors(self, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        return all_in_dtype(dtype, self.weight, self.bias)

    def _scores_in_chunks(self, rows: Tensor, copies: float) -> Iterator[tuple[int, Tensor]]:
        """First row of each chunk, and its scores of all classes."""
        tensors: tuple[Any, ...] = self._score_tensors(rows.dtype)
        if is_exporting():
            yield 0, wide_scores(rows, *tensors)
            return
        step = rows_held(rows, self.n_classes, self.chunk_rows, copies)
        for first in range(0, max(1, rows.shape[0]), step):
            yield first, wide_scores(rows[first : first + step], *tensors)

    def _loss_options(self) -> dict[str, Any]:
        """Keyword arguments of the fused loss besides hidden, weight, target and bias."""
        options = {name: getattr(self, name) for name in self._loss_names}
        return options | {"hidden_grad": "part"} if self._is_spread else options

    def _saved_config(self, config: dict[str, Any]) -> dict[str, Any]:
        # The weights are saved as part of the state.
        weighted = config.get("class_weight") is not None
        return config | ({"class_weight": True} if weighted else {})

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        weighted = config.get("class_weight")
        head = cls(**config | ({"class_weight": None} if weighted else {}))
        if weighted:
            head.class_weight = torch.ones(head.n_classes)
        return head


class FullSoftmax(LinearHead):
    r"""Exact softmax over all classes with cross entropy, without storing the full score matrix.

    .. math:: \log p_c = \theta_c - \log \sum_j e^{\theta_j},
              \qquad \theta = \mathrm{cap}(W h + b) / T

    It replaces ``nn.Linear`` followed by ``cross_entropy``. Start with it: it is exact, trains
    fastest up to about 100,000 classes, and is the baseline for every other head.

    Cost: three products of rows × in_features × n_classes per training step, one for predictions.
    One chunk of scores is held at a time; see :func:`lastlayer.fused.linear_cross_entropy`.

    Args:
        in_features: size of the hidden state.
        n_classes: number of classes.
        bias: whether each class has a bias.
        label_smoothing: share of the target's probability that the loss spreads over all classes.
        z_loss: weight of the squared log normaliser in the loss.
        softcap: c, replaces scores by :math:`c \tanh(\theta / c)`; None for no cap.
        temperature: T, divides the scores, in training and in prediction.
        class_weight: weight of each class in the loss, ``(n_classes,)``; stored as a buffer.
        ignore_index: rows with this target are ignored; None to ignore no rows.
        reduction: "mean" over the rows that are not ignored, "sum" or "none".
        chunk_rows: rows of scores held at a time, "auto" or "low".
        device, dtype: of the parameters.

    Example:
        >>> import torch
        >>> head = FullSoftmax(16, 1000)
        >>> hidden, target = torch.randn(8, 16), torch.randint(1000, (8,))
        >>> head(hidden, target).backward()
        >>> head.topk(hidden, 5).classes.shape
        torch.Size([8, 5])
        >>> tied = FullSoftmax.from_linear(torch.nn.Embedding(1000, 16))
    """

    recipes = (Recipe("full", "softmax over all classes, fused", compared=("full",), rank=10),)
    _loss_names = *LinearHead._loss_names, "label_smoothing", "z_loss", "softcap", "temperature"

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        bias: bool = True,
        *,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        temperature: float = 1.0,
        **options: Unpack[LinearOptions],
    ) -> None:
        super().__init__(in_features, n_classes, bias, **options)
        cross_entropy_numbers(label_smoothing, z_loss, softcap, temperature)
        self.label_smoothing, self.z_loss = label_smoothing, z_loss
        self.softcap, self.temperature = softcap, temperature

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The cross entropy of the targets; see :func:`lastlayer.fused.linear_cross_entropy`."""
        self._check_hidden(hidden)
        return linear_cross_entropy(hidden, self.weight, target, self.bias, **self._loss_options())

    def _softcap_and_temperature(self) -> tuple[float, float]:
        return float(self.softcap or 0.0), float(self.temperature)


class EntmaxHead(LinearHead):
    r"""A linear layer with :func:`lastlayer.entmax`: most probabilities are exactly 0.

    .. math:: p_c = \bigl[(\alpha - 1)\,\theta_c - \tau\bigr]_+^{1/(\alpha - 1)},
              \qquad \theta = W h + b

    alpha = 2 is sparsemax, alpha = 1 softmax. The ``log_prob`` of a class with probability 0 is
    -inf, and ``sample`` never draws it. The loss is the entmax loss, not the negative
    log-likelihood, so it is finite even if the target has probability 0. The full score matrix is
    never stored.

    Choose it if a short list of possible classes is worth more than a likelihood for every class:
    translation, morphology, generation without truncation.

    Cost: that of :class:`FullSoftmax`, less once the supports are small; see
    :func:`lastlayer.fused.linear_entmax_loss`.

    Args:
        in_features: size of the hidden state.
        n_classes: number of classes.
        alpha: a number of at least 1; larger values give fewer classes a nonzero probability.
        bias: whether each class has a bias.
        options: ``class_weight`` and the arguments after it, as in :class:`FullSoftmax`.

    Example:
        >>> import torch
        >>> linear = torch.nn.Linear(1, 3, bias=False)
        >>> _ = linear.weight.data.copy_(torch.tensor([[2.0], [1.5], [0.0]]))
        >>> head = EntmaxHead.from_linear(linear, alpha=2.0)
        >>> head.log_prob(torch.ones(1)).exp()
        tensor([0.7500, 0.2500, 0.0000], grad_fn=<ExpBackward0>)
    """

    recipes = (
        Recipe("entmax", "entmax: most probabilities exactly 0", compared=("entmax",), rank=11),
        Recipe("sparsemax", "entmax with α = 2", fixed={"alpha": 2.0}, rank=12),
    )
    _loss_names = *LinearHead._loss_names, "alpha"
    _copies = 2.0

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        alpha: float = 1.5,
        bias: bool = True,
        **options: Unpack[LinearOptions],
    ) -> None:
        super().__init__(in_features, n_classes, bias, **options)
        self.alpha = check_alpha_number(alpha)

    def _scores_from_counts(self, counts: Any) -> Tensor:
        # entmax is the inverse of the deformed logarithm, as softmax is of the logarithm.
        return deformed_log(super()._scores_from_counts(counts), self.alpha)

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The entmax loss of the targets; see :func:`lastlayer.fused.linear_entmax_loss`."""
        self._check_hidden(hidden)
        return linear_entmax_loss(hidden, self.weight, target, self.bias, **self._loss_options())

    def _log_probs(self, scores: Tensor) -> Tensor:
        if self.alpha == 1.0:
            return log_softmax(scores)
        return entmax_log_probs(scores, self.alpha)

    def _write_log_probs(self, out: Tensor, rows: Tensor, *tensors: Any) -> None:
        if self.alpha == 1.0:
            super()._write_log_probs(out, rows, *tensors)
        else:
            write_entmax_log_probs(out, rows, self.alpha, self._layer(*tensors))


class TopKSoftmaxHead(LinearHead):
    r"""A linear layer with :func:`lastlayer.topk_softmax`: softmax over each row's k best classes.

    .. math:: \log p_c = \theta_c - \log \sum_{j \in \Omega_k} e^{\theta_j}
              \quad (c \in \Omega_k), \qquad \theta = W h + b

    where :math:`\Omega_k` are the k classes with the highest scores; ties go to the lower id. All
    others have probability 0: their ``log_prob`` is -inf, and ``sample`` never draws them. The loss
    is the negative of the formula above for any target, so it is finite for these classes, too. The
    full score matrix is never stored.

    Choose it if a model is fine-tuned on little data and softmax overfits by pushing down classes
    that are already improbable, or if the number of classes with nonzero probability must be known.

    Cost: that of :class:`FullSoftmax`, with a backward pass over k + 1 classes per row; see
    :func:`lastlayer.fused.linear_topk_softmax_loss`.

    Args:
        in_features: size of the hidden state.
        n_classes: number of classes.
        k: number of classes with nonzero probability, at least 1; n_classes or more is the softmax.
        bias: whether each class has a bias.
        options: ``class_weight`` and the arguments after it, as in :class:`FullSoftmax`.

    Example:
        >>> import torch
        >>> head = TopKSoftmaxHead(16, 1000, k=10)
        >>> hidden = torch.randn(4, 16)
        >>> (head.log_prob(hidden) > -torch.inf).sum(-1)
        tensor([10, 10, 10, 10])
    """

    recipes = (Recipe("topk", "softmax over the k best classes", defaults={"k": 100}, rank=13),)
    _loss_names = *LinearHead._loss_names, "k"

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        k: int,
        bias: bool = True,
        **options: Unpack[LinearOptions],
    ) -> None:
        super().__init__(in_features, n_classes, bias, **options)
        self.k = check_k(k)
        self._copies = 2.0 if self.k <= MOST_BEST else TOP_COPIES + 2.0

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The loss of the targets; see :func:`lastlayer.fused.linear_topk_softmax_loss`."""
        self._check_hidden(hidden)
        return linear_topk_softmax_loss(
            hidden, self.weight, target, self.bias, **self._loss_options()
        )

    def _log_probs(self, scores: Tensor) -> Tensor:
        if self.k >= scores.shape[-1]:
            return log_softmax(scores)
        if is_eager(scores) and not scores.requires_grad:
            made = torch.empty_like(scores, memory_format=torch.contiguous_format)
            kernels.topk_softmax.logs_into("auto", made, scores, None, self.k)
            return made
        values, classes = top_classes(scores, self.k)
        logs = log_softmax(values)
        # A NaN in the row's best scores makes all of its probabilities NaN.
        rest = torch.where(logs[:, :1].isnan(), math.nan, -torch.inf).to(logs.dtype)
        return rest.expand(scores.shape).scatter(-1, classes, logs)

    def _goes_by_itself(self, rows: Tensor, chosen: Tensor) -> bool:  # noqa: ARG002
        return not torch.is_grad_enabled() and is_eager(rows)

    def _rows_log_prob(self, rows: Tensor, chosen: Tensor | None, *tensors: Any) -> Tensor:
        if chosen is None or not self._goes_by_itself(rows, chosen):
            return super()._rows_log_prob(rows, chosen, *tensors)
        return topk_log_probs_of(rows, self._layer(*tensors), self.k, chosen)

    def _write_log_probs(self, out: Tensor, rows: Tensor, *tensors: Any) -> None:
        write_topk_log_probs(out, rows, self._layer(*tensors), self.k)

    def _best(self, rows: Tensor) -> tuple[Tensor, Tensor] | None:
        """Scores and ids of the k best classes, best first; None if there is no kernel."""
        some = in_autocast_dtype(rows)
        if self.k >= self.n_classes or not is_predictable(some, self.k):
            return None
        with without_autocast(rows):
            layer = self._layer(*self._score_tensors(some.dtype))
            return best_classes(some, layer, self.k, normalised=False)

    def _rows_topk(self, rows: Tensor, k: int) -> tuple[Tensor, ...]:
        found = None if k > self.k else self._best(rows)
        if found is None:
            return super()._rows_topk(rows, k)
        logs, classes = found
        kernels.prediction.log_softmax_("auto", logs, None, 0.0, 1.0, None)
        # A row with a NaN ranks all classes equal, so the lowest ids come first.
        first = torch.arange(k, device=rows.device)
        return logs[:, :k], torch.where(logs[:, :1].isnan(), first, classes[:, :k])

    def _rows_sample(self, rows: Tensor, *uniform: Tensor) -> Tensor:
        found = self._best(rows)
        if found is None:
            return super()._rows_sample(rows, *uniform)
        place = drawn_by(found[0], uniform[0])
        return torch.where(place < 0, -1, found[1].gather(-1, place.clamp(min=0)))
