"""What the heads with one vector a class share."""

import inspect
import math
from typing import Any, Self, TypedDict

import torch
from torch import Tensor
from torch.nn import Parameter

from lastlayer._checks import check_chunk_rows, check_class_weight
from lastlayer.heads._scoring import ScoringHead


class LinearOptions(TypedDict, total=False):
    """What all of their constructors take by name; :class:`LinearHead` has the defaults."""

    class_weight: Tensor | None
    ignore_index: int | None
    reduction: str
    chunk_rows: int | str
    device: torch.device | str | None
    dtype: torch.dtype | None


class LinearHead(ScoringHead):
    """Scores ``hidden @ weight.T + bias``, a chunk of rows at a time; a map and its loss on them.

    ``weight`` is ``(n_classes, in_features)`` and ``bias`` ``(n_classes,)``, or None, as in
    ``nn.Linear``.
    """

    weight: Parameter
    bias: Parameter | None
    class_weight: Tensor | None
    __signature__: inspect.Signature

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
        check_chunk_rows(chunk_rows)
        self.chunk_rows = chunk_rows
        self.weight = Parameter(torch.empty(n_classes, in_features, device=device, dtype=dtype))
        biases = torch.empty(n_classes, device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if biases is None else Parameter(biases))
        if class_weight is not None:
            check_class_weight(class_weight, self.weight.shape[0])
            class_weight = class_weight.detach().to(self.weight.device)
        self.register_buffer("class_weight", class_weight)
        self.reset_parameters()

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.__signature__ = _with_inherited_options(cls)

    def reset_parameters(self) -> None:
        """Fresh numbers, distributed as those of ``nn.Linear``."""
        bound = 1.0 / math.sqrt(self.in_features)
        torch.nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            torch.nn.init.uniform_(self.bias, -bound, bound)

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear | torch.nn.Embedding, **options: Any) -> Self:
        """A head on the very parameters of a layer: a step on one is a step on both.

        With an ``nn.Embedding`` the class vectors are its rows (tied embeddings); there is no
        bias then, unless you set ``head.bias`` to a parameter.

        Args:
            linear: the layer that owns the parameters.
            options: what else the constructor takes, by name; the layer decides ``bias``, device
                and dtype.
        """
        if not isinstance(linear, (torch.nn.Linear, torch.nn.Embedding)):
            raise TypeError(
                f"linear: expected an nn.Linear or nn.Embedding, got {type(linear).__name__}"
            )
        if not isinstance(linear.weight, Parameter):
            raise TypeError(
                "linear: expected a weight that is a parameter, to share it, got "
                f"{type(linear.weight).__name__}; "
                "torch.nn.utils.parametrize.remove_parametrizations makes it one"
            )
        if torch.nn.parameter.is_lazy(linear.weight):
            raise ValueError(
                f"linear: expected a layer that has its parameters, got a {type(linear).__name__} "
                "before its first forward; call it once"
            )
        if linear.weight.layout != torch.strided:
            raise TypeError(
                f"linear: expected a dense weight, got one of layout {linear.weight.layout}; "
                "weight.to_dense() makes it one"
            )
        for name in ("in_features", "n_classes", "bias", "device", "dtype"):
            if name in options:
                raise TypeError(
                    f"{name}: expected none, since it follows from the layer, got {options[name]!r}"
                )
        n_classes, in_features = linear.weight.shape
        bias = linear.bias if isinstance(linear, torch.nn.Linear) else None
        class_weight = options.pop("class_weight", None)
        # On meta no memory is filled that the layer's parameters would replace at once.
        head = cls(in_features, n_classes, bias=bias is not None, device="meta", **options)
        head.weight, head.bias = linear.weight, bias
        if class_weight is not None:
            check_class_weight(class_weight, linear.weight.shape[0])
            head.class_weight = class_weight.detach().to(linear.weight.device)
        return head

    def to_linear(self) -> torch.nn.Linear:
        """An ``nn.Linear`` on the very parameters of this head; its outputs are the scores."""
        linear = torch.nn.Linear(
            self.in_features, self.n_classes, bias=self.bias is not None, device="meta"
        )
        linear.weight = self.weight
        if self.bias is not None:
            linear.bias = self.bias
        return linear

    def _vectors_and_biases(self) -> tuple[Tensor, Tensor | None]:
        return self.weight, self.bias

    def _loss_options(self) -> dict[str, Any]:
        """What the fused losses take beside hidden, weight, target and bias."""
        return {
            "ignore_index": self.ignore_index,
            "reduction": self.reduction,
            "class_weight": self.class_weight,
            "chunk_rows": self.chunk_rows,
        }

    def config(self) -> dict[str, Any]:
        return {
            **super().config(),
            "bias": self.bias is not None,
            # The weights themselves are part of the state.
            "class_weight": None if self.class_weight is None else True,
            "chunk_rows": self.chunk_rows,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        weighted = config["class_weight"]
        head = cls(**{**config, "class_weight": None})
        if weighted:
            head.class_weight = torch.ones(head.n_classes)
        return head


def _with_inherited_options(head: type[LinearHead]) -> inspect.Signature:
    """The constructor's signature with the names that its ``**options`` hand on to its parent."""
    kinds = inspect.Parameter
    # Without self.
    own = list(inspect.signature(head.__init__).parameters.values())[1:]
    rest = [each for each in own if each.kind is not kinds.VAR_KEYWORD]
    if len(rest) < len(own):
        parent = next(each for each in head.__mro__[1:] if issubclass(each, LinearHead))
        taken = {each.name for each in rest}
        handed_on = inspect.signature(parent).parameters.values()
        rest += [e for e in handed_on if e.kind is kinds.KEYWORD_ONLY and e.name not in taken]
    return inspect.Signature(rest)
