"""Properties of a Transformers model that are needed to swap its output layer."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

# Names in configurations of a cap on logits, and of a factor of logits: True if it divides them.
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_SCALES = {
    "logit_scale": False, "lm_head_multiplier": False, "output_multiplier": False,
    "logits_scaling": True,
}  # fmt: skip
# Range of the scores for probing a model, large enough to show the effect of any cap.
_PROBED = 60.0


class Support(NamedTuple):
    """Whether a model's output layer can be swapped."""

    ok: bool
    why: str
    """The reason if not; otherwise empty."""

    def __bool__(self) -> bool:
        return self.ok


class Shape(NamedTuple):
    """Cap and scale of scores: ``softcap * tanh(scores / softcap) / temperature``."""

    softcap: float | None = None
    temperature: float = 1.0

    def __call__(self, scores: Tensor) -> Tensor:
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        return scores / self.temperature


def supports(model: Any) -> Support:
    """Whether :func:`swap_head` supports a model, and if not, why.

    Args:
        model: any model; only its class and configuration are inspected, it is not run.

    Example:
        >>> supports(torch.nn.Linear(2, 2)).why
        'it is a Linear, not a PreTrainedModel of Transformers'
    """
    if not hasattr(model, "get_output_embeddings") or not hasattr(model, "config"):
        return Support(
            False, f"it is a {type(model).__name__}, not a PreTrainedModel of Transformers"
        )
    if hasattr(model, "get_base_model"):
        return Support(False, "PEFT has wrapped it; swap its head before get_peft_model")
    name, layer = type(model).__name__, model.get_output_embeddings()
    if layer is None:
        return Support(False, f"{name} has no output embeddings")
    if not isinstance(layer, torch.nn.Linear):
        return Support(
            False, f"the output layer of {name} is a {type(layer).__name__}, not an nn.Linear"
        )
    if not _uses_loss_function(type(model)):
        return Support(
            False, f"{name}.forward computes its own loss instead of calling self.loss_function"
        )
    loss = _stock_loss(model)
    if loss is not import_transformers().loss.loss_utils.ForCausalLMLoss:
        return Support(False, f"{name} is trained with {getattr(loss, '__name__', loss)}")
    if getattr(model, "_tp_size", None) is not None:
        return Support(False, "its output layer is sharded over processes (tensor parallelism)")
    if getattr(model, "hf_quantizer", None) is not None and _is_packed(layer.weight):
        return Support(False, f"its output layer is quantized ({layer.weight.dtype})")
    return Support(True, "")


def guessed_shape(config: Any) -> Shape:
    """Cap and scale of logits according to a configuration."""
    return next(_shapes(config))


def _shapes(config: Any) -> Iterator[Shape]:
    """Possible caps and scales of a configuration, the most common interpretation first."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    caps = [value for each in _CAPS if (value := getattr(text, each, None))]
    divisors = [
        value if divides else 1.0 / value
        for each, divides in _SCALES.items()
        if isinstance(value := getattr(text, each, None), int | float) and value
    ]
    for cap in [*caps, None]:
        for divisor in [*divisors, *(1.0 / each for each in divisors), 1.0]:
            yield Shape(cap, divisor)
            if cap is not None:
                # For models that scale scores before they cap them.
                yield Shape(cap * divisor, divisor)


def found_shape(model: Any, layer: torch.nn.Linear) -> Shape:
    """Cap and scale of a model, measured by replacing its scores with known ones."""
    if layer.weight.is_meta:
        raise ValueError(
            "check: expected a model with parameters, got one on the meta device; load it first, "
            "or swap with check=False"
        )
    n_classes, seen = layer.weight.shape[0], []

    def known(_layer: Any, args: tuple[Any, ...], _scores: Tensor) -> Tensor:
        made = torch.linspace(-_PROBED, _PROBED, n_classes, device=args[0].device)
        seen.append(made)
        return made.roll(len(seen)).expand(*args[0].shape[:-1], n_classes)

    handle = layer.register_forward_hook(known)
    try:
        with _evaluated(model) as outputs:
            logits, loss = outputs.logits.float(), float(outputs.loss)
    finally:
        handle.remove()
    if len(seen) != 1:
        raise ValueError(
            f"model: expected an output layer that is called once, got {len(seen)} calls in "
            f"{type(model).__name__}"
        )
    scores = seen[0].roll(1)
    for shape in _shapes(model.config):
        expected = shape(scores).expand_as(logits)
        if torch.allclose(logits, expected, rtol=1e-4, atol=1e-4):
            break
    else:
        raise ValueError(
            f"model: expected logits that are its output layer's scores, capped or scaled as its "
            f"configuration says, got something else from {type(model).__name__}; this model "
            "cannot be swapped"
        )
    target = torch.tensor([min(2, n_classes - 1)], device=logits.device)
    wanted = float(functional.cross_entropy(expected[0, :1], target))
    if not abs(loss - wanted) <= 1e-3 * max(1.0, abs(wanted)):
        raise ValueError(
            f"model: expected the loss of {type(model).__name__} to be the cross entropy of its "
            f"logits, {wanted:.6g} for two tokens, got {loss:.6g}"
        )
    return shape


@contextmanager
def _evaluated(model: Any) -> Iterator[Any]:
    """Yields the outputs of the model for two tokens with labels, in eval mode."""
    modes = {each: each.training for each in model.modules()}
    device = model.get_input_embeddings().weight.device
    most = model.get_input_embeddings().weight.shape[0] - 1
    ids = torch.tensor([[min(1, most), min(2, most)]], device=device)
    model.eval()
    try:
        with torch.no_grad():
            yield model(
                input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, return_dict=True
            )
    finally:
        for module, mode in modes.items():
            module.training = mode


def loss_of_two_tokens(model: Any) -> float:
    with _evaluated(model) as outputs:
        return float(outputs.loss)


def _uses_loss_function(cls: type[Any]) -> bool:
    forwards = (vars(each)["forward"] for each in cls.__mro__ if "forward" in vars(each))
    codes = (getattr(inspect.unwrap(each), "__code__", None) for each in forwards)
    return any(code is not None and "loss_function" in code.co_names for code in codes)


def _stock_loss(model: Any) -> Any:
    if hasattr(model, "_loss_function"):
        return model._loss_function
    mapping = import_transformers().loss.loss_utils.LOSS_MAPPING
    return mapping.get(getattr(model, "loss_type", None), mapping["ForCausalLM"])


def _is_packed(weight: Tensor) -> bool:
    return not weight.is_floating_point()


def name_of(model: Any, layer: torch.nn.Module) -> str:
    names: list[str] = [name for name, each in model.named_modules() if each is layer]
    return names[0]


def classifier_of(model: Any) -> tuple[str, torch.nn.Linear]:
    """The name of the output layer of a classifier, and the layer."""
    config = getattr(model, "config", None)
    if hasattr(model, "_lastlayer") or not hasattr(model, "base_model") or config is None:
        raise ValueError(
            "model: expected a Transformers model for sequence classification that has not been "
            f"swapped, got {type(model).__name__}"
        )
    inside = {*model.base_model.modules()}
    found = [
        (name, each)
        for name, each in model.named_modules()
        if isinstance(each, torch.nn.Linear)
        and each not in inside
        and each.out_features == config.num_labels
    ]
    if len(found) != 1 or not type(model).__name__.endswith("ForSequenceClassification"):
        names = ", ".join(name for name, _ in found) or "none"
        raise ValueError(
            f"model: expected a ...ForSequenceClassification with one linear layer for its "
            f"{config.num_labels} labels, got {type(model).__name__} with {names}"
        )
    return found[0]


def import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            "swapping heads of Transformers models needs the package transformers; install it with "
            'pip install "lastlayer[hf]"'
        ) from error
    return transformers
