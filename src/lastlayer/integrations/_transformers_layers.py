"""The output layers of swapped Transformers models, and the hooks that connect them to a model.

A hook before the model's forward passes the labels to the output layer. The layer computes the loss
from hidden states in its own forward, where DDP, FSDP and PEFT expect parameters to be read, and
returns scores of width 0, so that whatever the model does to scores has no effect. The model's
``loss_function`` then returns this loss, and a hook after the forward fixes the outputs.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional

from lastlayer.fused.cross_entropy import linear_cross_entropy, linear_statistics
from lastlayer.fused.scores import row_chunks
from lastlayer.heads import FullSoftmax, Head, MultiLabel
from lastlayer.integrations._transformers_models import Shape

IGNORED = -100
# Buffers per chunk, in units of its scores: log-probabilities, probabilities, their product.
_COPIES = 4.0


class Known(NamedTuple):
    """Statistics of labels that are not ignored; all but the first have the labels' shape."""

    token_accuracy: Tensor
    log_prob: Tensor
    entropy: Tensor
    argmax: Tensor


class Call:
    """One forward of a model: its request to the output layer, and the results of the layer."""

    def __init__(self, wants: str, target: Tensor | None = None) -> None:
        # "loss", which needs a target, or "logits"; or, to keep the hidden states, "hidden" for
        # all rows, or "rows" for those that the model will select.
        self.wants, self.target = wants, target
        self.keep: Any = 0
        self.n_items: Any = None
        self.with_logits, self.with_statistics = True, False
        self.adapters: list[tuple[Any, ...]] = []
        self.hidden: Tensor | None = None
        self.loss: Tensor | None = None
        self.logits: Tensor | None = None
        self.known: Known | None = None

    def target_of(self, hidden: Tensor) -> Tensor:
        """One label per hidden state, for those that ``logits_to_keep`` keeps."""
        target, shape = self.target, tuple(hidden.shape[:-1])
        if target is None:
            raise ValueError("labels: expected a tensor, got None")
        if tuple(target.shape) != shape:
            target = kept(target, self.keep)
        if tuple(target.shape) != shape:
            raise ValueError(
                f"labels: expected shape {shape} like the hidden states of the output layer, got "
                f"{tuple(target.shape)}; give one label per token, or per text to a classifier"
            )
        return target.to(hidden.device)


class OutputLayer(torch.nn.Module):
    """Base class of both output layers, which get each :class:`Call` from :class:`Swap`."""

    def __init__(self, swap: "Swap", *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.swap = swap

    def forward(self, hidden: Tensor) -> Tensor:
        """Scores ``(*batch, n_classes)``; of width 0 if the model should not process them."""
        call: Call | None = self.swap.call
        if call is None:
            return self.direct_scores(hidden)
        if call.wants == "hidden":
            call.hidden = hidden
            return hidden.new_empty((*hidden.shape[:-1], 0))
        if call.wants == "rows":
            # Row numbers as scores: the model's selection of them shows which rows it uses.
            call.hidden = hidden.reshape(-1, hidden.shape[-1])
            number = torch.arange(len(call.hidden), device=hidden.device, dtype=torch.float32)
            return number.reshape(*hidden.shape[:-1], 1)
        if call.wants == "loss":
            call.loss = self.make_loss(hidden, call)
        if call.wants == "logits" or call.with_logits:
            return self.make_scores(hidden, call)
        return hidden.new_empty((*hidden.shape[:-1], 0))

    def direct_scores(self, hidden: Tensor) -> Tensor:
        """Scores if the layer is called directly, outside the model's forward."""
        raise NotImplementedError

    def make_scores(self, hidden: Tensor, call: Call) -> Tensor:
        """Scores to be processed and returned by the model."""
        raise NotImplementedError

    def make_loss(self, hidden: Tensor, call: Call) -> Tensor:
        """The sum over labels that are not ignored, divided by their number or ``n_items``."""
        raise NotImplementedError


class LMHead(OutputLayer, torch.nn.Linear):
    """A linear layer with a softmax: scores as in ``nn.Linear``, with a fused loss."""

    bias: Any

    def __init__(
        self, swap: "Swap", linear: torch.nn.Linear, softcap: Any, temperature: Any, chunk_rows: Any
    ) -> None:
        out_features, in_features = linear.weight.shape
        super().__init__(swap, in_features, out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.softcap, self.temperature, self.chunk_rows = softcap, temperature, chunk_rows

    def loss_options(self) -> dict[str, Any]:
        """Keyword arguments of the fused loss."""
        names = ("softcap", "temperature", "chunk_rows")
        return {name: getattr(self, name) for name in names}

    def direct_scores(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.weight, self.bias)

    def make_scores(self, hidden: Tensor, call: Call) -> Tensor:
        hidden, weight, bias = self._with_adapters(hidden, call)
        return functional.linear(hidden, weight, bias)

    def make_loss(self, hidden: Tensor, call: Call) -> Tensor:
        target = call.target_of(hidden)
        hidden, weight, bias = self._with_adapters(hidden, call)
        options = {**self.loss_options(), "reduction": "mean" if call.n_items is None else "sum"}
        if call.with_statistics:
            made = linear_statistics(hidden, weight, target, bias, ignore_index=IGNORED, **options)
            loss = made.loss
            call.known = known(target, made.log_prob, made.entropy, made.argmax)
        else:
            loss = linear_cross_entropy(
                hidden, weight, target, bias, ignore_index=IGNORED, **options
            )
        return loss if call.n_items is None else loss / on_device(call.n_items, loss)

    def _with_adapters(self, hidden: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
        """With LoRA, ``W h + s B A h`` as one product of longer vectors: [W, B] [h, s A h]."""
        weight, bias = self.weight, self.bias
        hiddens, weights = [hidden], [weight]
        for down, up, dropout, scaling in call.adapters:
            hiddens.append(down(dropout(hidden.to(down.weight.dtype))).to(hidden.dtype) * scaling)
            weights.append(up.weight.to(weight.dtype))
            if up.bias is not None:
                added = up.bias.to(weight.dtype) * scaling
                bias = added if bias is None else bias + added
        if len(weights) == 1:
            return hidden, weight, bias
        return torch.cat(hiddens, -1), torch.cat(weights, -1), bias

    def make_head(self) -> FullSoftmax:
        """A head that shares the parameters of this layer."""
        return FullSoftmax.from_linear(self, **self.loss_options())


class ScoreHead(OutputLayer):
    """Any other head. It has no ``weight``, so that no code treats it as a linear layer.

    Its ``state_dict`` is the head's, so that ``lm_head.weight`` keeps its name.
    """

    def __init__(self, swap: "Swap", head: Head) -> None:
        super().__init__(swap)
        self.head = head
        self.register_load_state_dict_pre_hook(_add_prefix)

    def direct_scores(self, hidden: Tensor) -> Tensor:
        if self.swap.shape != Shape():
            raise RuntimeError(
                "output layer: expected a call by its model, got a direct call, after which the "
                "model would cap or scale log-probabilities like scores; call model(...), not "
                "model.forward(...)"
            )
        return self._scores(hidden)

    def _scores(self, hidden: Tensor) -> Tensor:
        if isinstance(self.head, MultiLabel):
            # Labels are independent: each score is the log-odds of one label.
            return functional.linear(hidden, self.head.weight, self.head.bias)
        return self.head.log_prob(hidden)

    def make_scores(self, hidden: Tensor, call: Call) -> Tensor:
        call.logits = self._scores(hidden)
        return hidden.new_empty((*hidden.shape[:-1], 0))

    def make_loss(self, hidden: Tensor, call: Call) -> Tensor:
        if isinstance(self.head, MultiLabel):
            return self._loss_of_labels(hidden, self.head, call)
        target = call.target_of(hidden)
        reduction = "mean" if call.n_items is None else "sum"
        loss = self._reduced(hidden, target, reduction=reduction)
        if call.with_statistics:
            # After the loss, which checks the labels.
            call.known = known_of(self.head, hidden, target)
        return loss if call.n_items is None else loss / on_device(call.n_items, hidden)

    def _loss_of_labels(self, hidden: Tensor, head: MultiLabel, call: Call) -> Tensor:
        labels: Any = call.target
        given = positives_of(labels.to(hidden.device), head)
        loss = self._reduced(hidden, *given, reduction="mean")
        if call.n_items is None:
            return loss
        # Trainer counts entries of labels: a batch is weighted by its share of them.
        entries = on_device((labels != IGNORED).sum(), loss)
        return loss * (entries / on_device(call.n_items, loss))

    def _reduced(self, *given: Any, reduction: str) -> Tensor:
        head, before = self.head, self.head.reduction
        head.reduction = reduction
        try:
            loss: Tensor = head(*given)
        finally:
            head.reduction = before
        return loss

    def state_dict(self, *args: Any, **options: Any) -> Any:
        """The ``state_dict`` of the head."""
        return self.head.state_dict(*args, **options)

    def _fqn_modifiers(self) -> dict[str, str]:
        """For torch's distributed checkpoints: the submodule that contains each state entry."""
        return {name.split(".")[0]: "head" for name in self.head.state_dict()}

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                f"weight: expected an output layer that is the softmax of a linear layer, got "
                f"{type(self.head).__name__}; head_of(model) has its parameters"
            )
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Transformers ties embeddings by setting the weight of the output layer.
        if name == "weight":
            self.head.weight = value
        else:
            super().__setattr__(name, value)


def _add_prefix(module: ScoreHead, state: dict[str, Any], prefix: str, *_others: Any) -> None:
    if not hasattr(module.head, "weight"):
        # save_pretrained adds this entry for code that expects a linear layer.
        state.pop(f"{prefix}weight", None)
    names = [name for name in state if name.startswith(prefix)]
    moved = {f"{prefix}head.{name.removeprefix(prefix)}": state.pop(name) for name in names}
    state.update(moved)


class Swap:
    """The state shared by a model's hooks and its output layer.

    It has no reference to the model, so that a copy of the model or of the layer gets its own Swap.
    """

    def __init__(self, layer: str, shape: Shape, logits: str, statistics: bool) -> None:
        self.layer, self.shape = layer, shape
        self.logits, self.statistics = logits, statistics
        # Whether the head has the parameters of the original layer.
        self.shares = True
        self.call: Call | None = None
        self.restore: Callable[[Any], None] = _nothing_to_restore
        self.handles: list[Any] = []
        self.labels_at: int | None = None
        self.paused: list[Any] = []
        self.kinds: dict[type[Any], type[Any]] = {}

    def attach(self, model: Any, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        """Register the hooks on the model."""
        signature = inspect.signature(model.forward)
        names = [*signature.parameters]
        self.labels_at = names.index("labels") if "labels" in names else None
        if self.statistics:
            # Created now, since torch.compile cannot create classes.
            returned = signature.return_annotation
            kinds = [*get_args(returned), returned]
            self.kinds = {each: _with_statistics(each) for each in kinds if _has_logits(each)}
        self.handles = [
            model.register_forward_pre_hook(before, with_kwargs=True),
            # Also called after an error, so that no state is left for the next call.
            model.register_forward_hook(after, with_kwargs=True, always_call=True),
        ]

    def wants_logits(self, model: torch.nn.Module) -> bool:
        """Whether logits are computed in addition to a loss."""
        return self.logits == "always" or (self.logits == "eval" and not model.training)

    def labels(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The labels that the model was called with."""
        if self.labels_at is not None and len(args) > self.labels_at:
            return args[self.labels_at]
        return kwargs.get("labels")

    def hand_over(self, model: Any, call: Call | None) -> None:
        """Pass the call to the layer, which may be wrapped by PEFT."""
        if call is not None and getattr(model, "_is_replica", False):
            raise RuntimeError(
                "model: expected one process per GPU, got torch.nn.DataParallel, whose threads "
                "share hooks; start the script with torchrun or accelerate launch"
            )
        self.call = call
        layer: Any = model
        for name in self.layer.split("."):
            layer = getattr(layer, name)
        if isinstance(layer, OutputLayer):
            layer.swap.call = call
            return
        for each in _output_layers(layer, self.layer):
            each.swap.call = call
        if call is not None and call.wants != "logits" and hasattr(layer, "base_layer"):
            call.adapters = list(_adapters(layer))
            # The layer adds the adapters' output; the wrapper must not add it to the scores again.
            self.paused = [layer] if call.adapters else []
            for each in self.paused:
                each._disable_adapters = True

    def finish(self, model: Any) -> Call | None:
        """End the call: reset adapters and layer, and return it."""
        call = self.call
        for each in self.paused:
            each._disable_adapters = False
        self.paused = []
        self.hand_over(model, None)
        return call

    # Hooks of a causal language model.

    def before_tokens(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the forward of a causal language model."""
        if self.call is not None and self.call.wants == "hidden":
            # Set by generate_with.
            return self.hand_over(model, self.call)
        labels = self.labels(args, kwargs)
        if labels is None:
            return self.hand_over(model, Call("logits"))
        ignored = kwargs.get("ignore_index", IGNORED)
        target = kwargs.get("shift_labels")
        if target is None:
            target = functional.pad(labels, (0, 1), value=ignored)[..., 1:]
        if ignored != IGNORED:
            target = target.masked_fill(target == ignored, IGNORED)
        call = Call("loss", target)
        call.keep = kwargs.get("logits_to_keep", 0)
        call.n_items = kwargs.get("num_items_in_batch")
        call.with_logits, call.with_statistics = self.wants_logits(model), self.statistics
        return self.hand_over(model, call)

    def loss(self, logits: Tensor, labels: Tensor, *_args: Any, **_options: Any) -> Tensor:  # noqa: ARG002
        """The ``loss_function`` of the model: returns the loss of the output layer."""
        call = self.call
        if call is None or call.loss is None:
            raise RuntimeError(
                "loss_function: expected a loss from the output layer, got none; call model(...), "
                "not model.forward(...), so that hooks run"
            )
        return call.loss

    def after_tokens(
        self, model: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any], outputs: Any
    ) -> Any:
        """After the forward of a causal language model."""
        call = self.finish(model)
        # Some libraries replace the model's forward by one that skips the output layer.
        unused = call is not None and call.wants == "loss" and call.loss is None
        if call is None or outputs is None or unused:
            return outputs
        return self.returned(outputs, call, int(call.wants == "loss"))

    def returned(self, outputs: Any, call: Call, place: int) -> Any:
        """The outputs of the model, with the logits that were computed, or without logits."""
        without = call.wants == "loss" and not call.with_logits
        if isinstance(outputs, tuple):
            if call.known is not None:
                raise ValueError("return_dict: expected True with statistics=True, got False")
            made = () if without else (outputs[place] if call.logits is None else call.logits,)
            return *outputs[:place], *made, *outputs[place + 1 :]
        fields = dict(outputs.items())
        if without:
            fields.pop("logits")
        elif call.logits is not None:
            fields["logits"] = call.logits
        if call.known is None:
            return type(outputs)(**fields)
        kind: Any = type(outputs)
        kind = self.kinds.get(kind) or _with_statistics(kind)
        return kind(**fields, **call.known._asdict())

    # Hooks of a sequence classifier.

    def before_rows(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before the forward of a classifier, which then selects rows but computes no loss."""
        labels = self.labels(args, kwargs)
        if self.labels_at is not None and len(args) > self.labels_at:
            args = *args[: self.labels_at], None, *args[self.labels_at + 1 :]
        else:
            kwargs = {**kwargs, "labels": None}
        self.hand_over(model, Call("rows", labels))
        return args, kwargs

    def after_rows(
        self, model: Any, _args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
    ) -> Any:
        """After the forward of a classifier: call the head on the selected rows."""
        asked = self.finish(model)
        if asked is None or asked.hidden is None or outputs is None:
            return outputs
        numbers = outputs[0] if isinstance(outputs, tuple) else outputs.logits
        rows = asked.hidden[numbers.squeeze(-1).long()]
        call = Call("logits" if asked.target is None else "loss", asked.target)
        call.with_logits = self.wants_logits(model)
        call.n_items = kwargs.get("num_items_in_batch")
        self.hand_over(model, call)
        layer: Any = model
        for name in self.layer.split("."):
            layer = getattr(layer, name)
        scores = layer(rows)
        self.finish(model)
        made = scores if call.logits is None else call.logits
        if isinstance(outputs, tuple):
            first = () if call.loss is None else (call.loss,)
            logits = (made,) if made.shape[-1] else ()
            return *first, *logits, *outputs[1:]
        fields = {**outputs, "loss": call.loss, "logits": made if made.shape[-1] else None}
        return type(outputs)(**fields)


def _nothing_to_restore(_model: Any) -> None:
    """Placeholder until a head is installed."""


def kept(target: Tensor, keep: Any) -> Tensor:
    """The labels of the hidden states that ``logits_to_keep`` keeps."""
    if not isinstance(keep, Tensor):
        return target[:, -keep:] if keep else target
    if keep.dim() == 2 and keep.dtype == torch.bool:
        return target[keep]
    return target[:, keep] if keep.dim() == 1 else target.gather(1, keep)


def on_device(n_items: Any, like: Tensor) -> Tensor:
    """A number, or a tensor on any device, as a tensor on the device of ``like``."""
    return torch.as_tensor(n_items, device=like.device)


def known(target: Tensor, log_prob: Tensor, entropy: Tensor, argmax: Tensor) -> Known:
    """Statistics, with the accuracy of the argmax added."""
    counts = target != IGNORED
    hits = ((argmax == target) & counts).sum()
    return Known(hits / counts.sum().clamp(min=1), log_prob, entropy, argmax)


@torch.no_grad()
def known_of(head: Head, hidden: Tensor, target: Tensor) -> Known:
    """Statistics of any head, from log-probabilities chunk by chunk."""
    rows, ids = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    counts, made = ids != IGNORED, []
    for part in row_chunks(rows, head.n_classes, head.chunk_rows, _COPIES):
        logs = head.log_prob(rows[part])
        chosen = logs.gather(-1, ids[part].clamp(min=0).unsqueeze(-1)).squeeze(-1)
        made.append((chosen, torch.special.entr(logs.exp()).sum(-1), logs.argmax(-1)))
    whole = (torch.cat(each) for each in zip(*made, strict=True))
    return known(target, *(each.masked_fill(~counts, 0).reshape(target.shape) for each in whole))


def positives_of(labels: Tensor, head: MultiLabel) -> tuple[Tensor, ...]:
    """Labels as arguments of the head: lists unchanged, a 0/1 matrix as lists with offsets."""
    if not labels.is_floating_point() and labels.dtype != torch.bool:
        return (labels,)
    if labels.shape[-1] != head.n_classes:
        raise ValueError(
            f"labels: expected 0 and 1 for each of the {head.n_classes} labels, got shape "
            f"{tuple(labels.shape)}; for lists of label ids, padded with {IGNORED}, use integers"
        )
    rows, classes = labels.nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=labels.shape[0])
    return classes, functional.pad(counts.cumsum(0), (1, 0))


def _output_layers(wrapper: torch.nn.Module, name: str) -> Iterator[OutputLayer]:
    """The output layers inside a wrapper that another library has added."""
    found = [each for each in wrapper.modules() if isinstance(each, OutputLayer)]
    if not found:
        raise RuntimeError(
            f"{name}: expected the layer of swap_head, got {type(wrapper).__name__}; call "
            "swap_head after the layer is replaced"
        )
    yield from found


def _adapters(layer: Any) -> Iterator[tuple[Any, ...]]:
    """The active LoRA adapters of PEFT around the layer: A, B, dropout and scaling of each."""
    if layer.disable_adapters or layer.merged:
        return
    is_lora = type(layer).__module__.startswith("peft.tuners.lora.")
    for name in layer.active_adapters:
        if is_lora and name not in layer.lora_A:
            continue
        if not is_lora or name in layer.lora_variant:
            kind = type(layer.lora_variant[name] if is_lora else layer)
            raise ValueError(
                f"target_modules: expected plain LoRA on the output layer, got {kind.__module__}."
                f"{kind.__qualname__}; leave the output layer out of target_modules, or train it "
                "whole with modules_to_save"
            )
        yield layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name], layer.scaling[name]


def _has_logits(kind: Any) -> bool:
    return isinstance(kind, type) and "logits" in getattr(kind, "__dataclass_fields__", ())


@cache
def _with_statistics(outputs: Any) -> type[Any]:
    """A subclass of an output class, with fields for statistics."""
    fields = [(name, Tensor | None, dataclasses.field(default=None)) for name in Known._fields]
    return dataclasses.make_dataclass(f"{outputs.__name__}WithStatistics", fields, bases=(outputs,))
