"""Heads in Hugging Face Transformers: in place of the output layer of a model, and back.

No forward is copied and nothing global is changed: a swapped model is the model that it was, with
another output layer, two hooks, and a ``loss_function``. Training goes through ``Trainer``,
Accelerate, PEFT and ``torch.compile`` as before.
"""

import copy
import inspect
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lastlayer._checks import as_counts, check_choice, check_int
from lastlayer.heads import ClassData, FullSoftmax, Head, MultiLabel, registered
from lastlayer.heads.base import SavedModule
from lastlayer.heads.linear import LinearHead
from lastlayer.integrations._transformers_layers import (
    IGNORED,
    Call,
    LMHead,
    OutputLayer,
    ScoreHead,
    Swap,
)
from lastlayer.integrations._transformers_models import (
    Shape,
    Support,
    classifier_of,
    found_shape,
    guessed_shape,
    import_transformers,
    loss_of_two_tokens,
    name_of,
    supports,
)
from lastlayer.integrations.transformers_attention import register_attention
from lastlayer.samplers import Sampler
from lastlayer.trees import Tree

__all__ = [
    "AutoModelForCausalLM",
    "AutoModelForSequenceClassification",
    "Support",
    "count_tokens",
    "generate_with",
    "head_of",
    "register_attention",
    "supports",
    "swap_classifier",
    "swap_head",
    "unswap_head",
]

_LOGITS = ("eval", "never", "always")
_FOLDER = "lastlayer"
# Processors that look at scores alone, so that they can be given those of the best classes.
_OF_SCORES = (
    "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper",
    "TypicalLogitsWarper", "EpsilonLogitsWarper",
)  # fmt: skip


def swap_head(
    model: Any,
    head: str | type[Head] | Head,
    *,
    logits: str = "eval",
    statistics: bool = False,
    check: bool = True,
    **options: Any,
) -> Any:
    """Put a head in place of a causal language model's output layer.

    With labels the loss is made from hidden states inside of the output layer's own forward, and
    logits are not stored. ``labels``, ``shift_labels``, ``num_items_in_batch`` and
    ``logits_to_keep`` mean what they always do; labels of -100 are left out. Without labels, as in
    ``generate``, the model returns logits; those of a head that is not the plain softmax are its
    log-probabilities, so that sampling draws from what the head predicts.

    A head with one vector per class takes over the parameters of the layer, tied or not, and the
    state keeps the name ``lm_head.weight``. :class:`~lastlayer.heads.HierarchicalSoftmax` starts
    from them. Other heads start afresh.

    Only the plain softmax still looks like an ``nn.Linear``. Other heads have no ``weight`` where
    the output layer was, so that code which reads it to make a softmax of its own fails.

    Args:
        model: a model of Transformers that calls ``self.loss_function``; see :func:`supports`.
        head: a name such as "full" or "entmax" (``lastlayer.heads.registered()`` has them all),
            a class of heads, or a head. A head is taken as it is; else a soft cap and a scale of
            logits are taken over from the configuration of the model.
        logits: whether logits are made beside a loss: "eval" for in eval mode only, "never" or
            "always". Where they are not made, ``outputs.logits`` is None.
        statistics: with labels, outputs also have ``log_prob`` of each label, the ``entropy`` and
            the best class ``argmax`` at its position, all of the shape of the labels, shifted as
            logits are; and ``token_accuracy``, one number. They need no logits.
        check: compare, on two tokens, what the model does to scores with what the head knows of
            it, and the losses before and after where the head is a plain softmax.
        options: of the head's constructor, for a name or a class; ``counts`` (see
            :func:`count_tokens`) where its sampler, tree or clusters are made of them. Heads that
            are not leave counts aside, so that one call serves heads of any name.

    Returns:
        The model, which is changed in place.

    Example:
        .. code-block:: python

            from lastlayer.integrations.transformers import swap_head

            model = swap_head(AutoModelForCausalLM.from_pretrained(name), "full")
            Trainer(model=model, args=args, train_dataset=data).train()
    """
    _check_how(logits, statistics)
    supported = supports(model)
    if not supported:
        if hasattr(model, "_lastlayer"):
            supported = Support(False, "it has been swapped before; call unswap_head first")
        raise ValueError(
            f"model: expected a causal language model whose output layer can be swapped, got one "
            f"that cannot: {supported.why}"
        )
    layer, shape = model.get_output_embeddings(), guessed_shape(model.config)
    if check:
        shape = found_shape(model, layer)
    made = _made(head, layer, shape, options)
    if isinstance(made, MultiLabel):
        raise TypeError(
            "head: expected one for one class per token, got MultiLabel; swap_classifier takes it"
        )
    before = loss_of_two_tokens(model) if check and _is_plain(made, layer, shape) else None
    _install(model, made, name_of(model, layer), shape, logits, statistics)
    if before is not None:
        after = loss_of_two_tokens(model)
        # Scores of the stock layer are rounded to its dtype.
        room = 64.0 * torch.finfo(layer.weight.dtype).eps * max(1.0, abs(before))
        if not abs(after - before) <= room:
            unswap_head(model)
            raise ValueError(
                f"model: expected the loss of {type(model).__name__} to be the cross entropy of "
                f"its output layer's scores, got {before:.6g} from it and {after:.6g} from "
                "the head; something else is done to scores or to the loss"
            )
    return model


def swap_classifier(
    model: Any, head: str | type[Head] | Head, *, logits: str = "eval", **options: Any
) -> Any:
    """Put a head in place of the output layer of a model for sequence classification.

    The model pools as it always does, and the head meets the pooled hidden states alone: also
    where the model would make scores of every token. ``labels`` are class ids ``(batch,)``; for
    :class:`~lastlayer.heads.MultiLabel` ("zlpr", "bce", "asymmetric", "sparsemax_labels") lists of
    label ids ``(batch, m)`` padded with -100, integers, or 0 and 1 for each label, floats.

    Args:
        model: such as ``BertForSequenceClassification`` or ``LlamaForSequenceClassification``.
        head: as in :func:`swap_head`.
        logits: as in :func:`swap_head`. For labels that do not compete they are scores; else
            log-probabilities, or scores for the plain softmax.
        options: as in :func:`swap_head`.

    Returns:
        The model, which is changed in place.
    """
    _check_how(logits, statistics=False)
    name, layer = classifier_of(model)
    made = _made(head, layer, Shape(), options)
    _install(model, made, name, Shape(), logits, statistics=False, of_rows=True)
    return model


def unswap_head(model: Any) -> Any:
    """Put a plain ``nn.Linear`` back, with the parameters as they are now.

    After a head with parameters of its own it is the layer that the model had before.
    """
    model = _unwrapped(model)
    model._lastlayer.restore(model)
    return model


def head_of(model: Any) -> Head:
    """The head of a swapped model, with its parameters; also inside of DDP, PEFT and a compiler."""
    model = _unwrapped(model)
    layer = model.get_submodule(model._lastlayer.layer)
    if isinstance(layer, ScoreHead):
        return layer.head
    if isinstance(layer, LMHead):
        return layer.make_head()
    raise ValueError(
        f"model: expected its output layer by itself, got one inside of {type(layer).__name__}; "
        "merge adapters first: model.merge_and_unload()"
    )


def count_tokens(dataset: Iterable[Any], vocab_size: int, *, column: str = "input_ids") -> Tensor:
    """How often each token occurs, for samplers, clusters, trees and first biases.

    Args:
        dataset: of examples with token ids in a column, or of lists or tensors of token ids.
        vocab_size: number of tokens.
        column: where examples are dictionaries.

    Returns:
        int64 ``(vocab_size,)``.

    Example:
        >>> count_tokens([{"input_ids": [2, 0]}, {"input_ids": [2]}], 4)
        tensor([1, 0, 2, 0])
    """
    counts = torch.zeros(check_int("vocab_size", vocab_size), dtype=torch.int64)
    for number, example in enumerate(dataset):
        if isinstance(example, dict) and column not in example:
            raise ValueError(
                f"column: expected one of {', '.join(map(repr, example))}, got {column!r}"
            )
        ids = torch.as_tensor(example[column] if isinstance(example, dict) else example).flatten()
        if len(ids) and (ids.is_floating_point() or ids.dtype == torch.bool):
            raise TypeError(
                f"dataset: expected integer token ids, got {ids.dtype} in example {number}"
            )
        ids = ids.long()
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
            raise ValueError(
                f"dataset: expected token ids from 0 to {vocab_size - 1}, got "
                f"{int(ids.min() if ids.min() < 0 else ids.max())} in example {number}"
            )
        counts += torch.bincount(ids, minlength=vocab_size)
    return counts


def generate_with(head: Head, *, streamer: Any = None) -> Callable[..., Any]:
    """For ``model.generate(custom_generate=…)``: tokens from a head, without all log-probabilities.

    Greedy search is ``head.topk`` of one; sampling without ``top_k`` is ``head.sample``, and with
    it draws among ``head.topk`` of so many, after temperature, ``top_p`` and the like. This is
    exact, and for a tree much less work than a log-probability for each class.

    Args:
        head: such as ``head_of(model)``.
        streamer: gets the prompt and each token, as that of ``generate`` does. Give it here:
            ``generate`` keeps its own from functions that are given to it.

    Example:
        .. code-block:: python

            model.generate(**inputs, custom_generate=generate_with(head_of(model)), do_sample=False)
    """
    if not isinstance(head, Head):
        raise TypeError(f"head: expected a lastlayer.heads.Head, got {type(head).__name__}")

    def choose(hidden: Tensor, input_ids: Tensor, processors: Any, config: Any) -> Tensor:
        if not config.do_sample:
            return head.topk(hidden, 1).classes[:, 0]
        if not len(processors):
            return head.sample(hidden)[:, 0]
        best = head.topk(hidden, min(config.top_k, head.n_classes))
        scores = processors(input_ids, best.values)
        place = torch.multinomial(scores.softmax(-1), 1)
        return best.classes.gather(1, place)[:, 0]

    @torch.no_grad()
    def loop(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        **model_kwargs: Any,
    ) -> Tensor:
        _check_generation(model, logits_processor, generation_config, synced_gpus)
        swap: Swap = model._lastlayer
        pad = generation_config._pad_token_tensor
        stops = any(hasattr(each, "eos_token_id") for each in stopping_criteria)
        going = torch.ones(len(input_ids), dtype=torch.long, device=input_ids.device)
        first = True
        if streamer is not None:
            streamer.put(input_ids.cpu())
        while bool(going.any()):
            step = None if first or not model_kwargs.get("use_cache") else 1
            inputs = model.prepare_inputs_for_generation(
                input_ids, next_sequence_length=step, is_first_iteration=first, **model_kwargs
            )
            swap.call = call = Call("hidden")
            outputs, first = model(**inputs, return_dict=True), False
            model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs)
            hidden = call.hidden
            if hidden is None:
                raise RuntimeError("model: expected its output layer to be called, got no call")
            tokens = choose(hidden[:, -1], input_ids, logits_processor, generation_config)
            if stops:
                tokens = tokens * going + pad * (1 - going)
            input_ids = torch.cat([input_ids, tokens[:, None]], -1)
            if streamer is not None:
                streamer.put(tokens.cpu())
            going = going & ~stopping_criteria(input_ids, ())
        if streamer is not None:
            streamer.end()
        return input_ids

    return loop


class _Auto:
    """Opens folders of swapped models, and all others as Transformers does."""

    _stock: str

    @classmethod
    def from_pretrained(cls, name: str | Path, *args: Any, head: Any = None, **options: Any) -> Any:
        """The model of a folder or of the hub, with the head that it was saved with.

        No remote code is run: the head is made by a class of this library, or by one of your own
        that is imported, from the arguments that were saved.

        Args:
            name: a folder that ``save_pretrained`` wrote, or any name that Transformers takes.
            args: as in Transformers.
            head: another head, as in :func:`swap_head`; the layer must have its parameters, so
                that the saved head was one with one vector per class, or none.
            options: as in Transformers.
        """
        transformers = import_transformers()
        stock = getattr(transformers, cls._stock)
        named = ("revision", "token", "cache_dir", "local_files_only", "subfolder")
        where = {each: options[each] for each in named if each in options}
        config = options.get("config") or transformers.AutoConfig.from_pretrained(name, **where)
        saved = getattr(config, "lastlayer", None)
        if saved is None:
            model = stock.from_pretrained(name, *args, **options)
        elif saved["head"] == "LMHead":
            model = stock.from_pretrained(name, *args, **options)
            made = FullSoftmax.from_linear(
                model.get_submodule(saved["layer"]), **saved["arguments"]
            )
            _install_saved(model, made, saved)
        else:
            model = _restored(transformers, name, config, saved, where, args, options)
        if head is not None:
            swaps = swap_classifier if "Classification" in cls._stock else swap_head
            model = swaps(model if saved is None else unswap_head(model), head)
        return model


class AutoModelForCausalLM(_Auto):
    """``transformers.AutoModelForCausalLM`` for models with a head of this library."""

    _stock = "AutoModelForCausalLM"


class AutoModelForSequenceClassification(_Auto):
    """``transformers.AutoModelForSequenceClassification`` for heads of this library."""

    _stock = "AutoModelForSequenceClassification"


class _Swapped:
    """What a swapped model does otherwise than its class: it saves its head, and can be resized."""

    config: Any
    _lastlayer: Swap

    def save_pretrained(
        self, save_directory: str | Path, is_main_process: bool = True, **options: Any
    ) -> None:
        """As in Transformers; a head that is not the plain softmax is described beside it."""
        layer: Any = self.get_submodule(self._lastlayer.layer)  # type: ignore[attr-defined]
        if is_main_process and isinstance(layer, ScoreHead):
            folder = Path(save_directory) / _FOLDER
            layer.head.save_config(folder)
            self.config.lastlayer["files"] = sorted(each.name for each in folder.iterdir())
            if not hasattr(layer.head, "weight"):
                # A model without a head of this library must not open this with a random layer.
                state = options.get("state_dict") or self.state_dict()  # type: ignore[attr-defined]
                name = f"{self._lastlayer.layer}.weight"
                options["state_dict"] = {**state, name: torch.empty(0)}
        parent: Any = super()
        parent.save_pretrained(save_directory, is_main_process=is_main_process, **options)

    def resize_token_embeddings(self, *args: Any, **options: Any) -> Any:
        """As in Transformers, for heads that are nothing but the vectors of the layer."""
        model: Any = self
        swap, layer = model._lastlayer, model.get_submodule(model._lastlayer.layer)
        made = layer.make_head() if isinstance(layer, LMHead) else layer.head
        names = inspect.signature(type(made)).parameters.keys()
        fixed = [] if swap.shares else ["parameters"]
        fixed += [each for each in ("sampler", "counts") if each in names]
        fixed += ["class_weight"] if getattr(made, "class_weight", None) is not None else []
        if fixed:
            raise ValueError(
                f"resize_token_embeddings: expected a head that can be resized, got "
                f"{type(made).__name__} with {' and '.join(fixed)} of its own for {made.n_classes} "
                "classes; call unswap_head(model), resize, and swap_head with what suits the new "
                "size"
            )
        decided = ("in_features", "n_classes", "bias", "class_weight")
        kept = {key: each for key, each in made.config().items() if key not in decided}
        unswap_head(model)
        try:
            return model.resize_token_embeddings(*args, **options)
        finally:
            made = type(made).from_linear(model.get_submodule(swap.layer), **kept)
            _install(model, made, swap.layer, swap.shape, swap.logits, swap.statistics)


@cache
def _swapped(cls: Any) -> type[Any]:
    """The class of a swapped model; it has the name that Transformers saves and looks up."""
    named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (_Swapped, cls), named)


def _install(
    model: Any,
    head: Head,
    name: str,
    shape: Shape,
    logits: str,
    statistics: bool,
    of_rows: bool = False,
) -> None:
    """Put the head where the layer of that name is."""
    layer, config = model.get_submodule(name), model.config
    swap = Swap(name, shape, logits, statistics)
    tied_key = f"{name}.weight"
    shares = swap.shares = getattr(head, "weight", None) is layer.weight
    tied = tied_key in model.all_tied_weights_keys
    described: dict[str, Any] = {
        "head": "LMHead", "layer": name, "shape": list(shape), "logits": logits,
        "statistics": statistics, "of_rows": of_rows,
    }  # fmt: skip
    new: OutputLayer
    if _is_plain(head, layer, shape):
        new = LMHead(swap, layer, head.softcap, head.temperature, head.chunk_rows)
        described["arguments"] = new.loss_options()
    else:
        new = ScoreHead(swap, head)
        described["head"] = type(head).__name__
    new.train(layer.training)
    source = model.all_tied_weights_keys.get(tied_key)
    if tied and not shares:
        # The head has parameters of its own: those of the input are no longer tied to anything.
        config.tie_word_embeddings = False
        model.all_tied_weights_keys.pop(tied_key)
    # Kept for unswap_head, away from the GPU; a model that is loaded has none.
    old = None if shares or tied or layer.weight.is_meta else layer.to("cpu")
    bias = None if shares else layer.bias
    stock_class: Any = type(model)
    stock_loss = model.__dict__.get("_loss_function")

    def restore(model: Any) -> None:
        now = model.get_submodule(name)
        if not shares and source is None and old is None:
            raise ValueError(
                f"model: expected one whose former output layer is known, got one that was saved "
                f"with {type(now.head).__name__}, without it; load the model it was made from"
            )
        linear = torch.nn.Linear(1, 1, bias=False, device="meta")
        if shares:
            of: Any = now.head if isinstance(now, ScoreHead) else now
            linear.weight, linear.bias = of.weight, of.bias
        elif source is not None:
            linear.weight = model.get_parameter(source)
            if bias is not None:
                like = linear.weight
                linear.bias = torch.nn.Parameter(bias.detach().to(like.device, like.dtype))
        elif old is not None:
            parameter = next(now.parameters())
            linear = copy.deepcopy(old).to(parameter.device, parameter.dtype)
        linear.out_features, linear.in_features = linear.weight.shape
        linear.train(now.training)
        if source is not None and not shares:
            model.config.tie_word_embeddings = True
            model.all_tied_weights_keys[tied_key] = source
        for handle in model._lastlayer.handles:
            handle.remove()
        del model._lastlayer, model.config.lastlayer
        model.__class__ = stock_class
        if not of_rows:
            del model._loss_function
            if stock_loss is not None:
                model.loss_function = stock_loss
        _put(model, name, linear)

    swap.restore = restore
    _put(model, name, new)
    if of_rows:
        swap.attach(model, swap.before_rows, swap.after_rows)
    else:
        swap.attach(model, swap.before_tokens, swap.after_tokens)
        model.loss_function = swap.loss
    model._lastlayer, config.lastlayer = swap, described
    model.__class__ = _swapped(stock_class)


def _install_saved(model: Any, head: Head, saved: dict[str, Any]) -> None:
    how = saved["logits"], saved["statistics"], saved["of_rows"]
    _install(model, head, saved["layer"], Shape(*saved["shape"]), *how)


def _put(model: Any, name: str, layer: torch.nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, layer)


def _made(head: Any, layer: torch.nn.Linear, shape: Shape, options: dict[str, Any]) -> Head:
    """The head for a layer, from what :func:`swap_head` was given."""
    n_classes, in_features = layer.weight.shape
    if isinstance(head, Head):
        if options:
            raise TypeError(
                f"{next(iter(options))}: expected options with a name or a class of heads only, "
                "got them with a head; make the head with them"
            )
        _check_made(head, layer, shape)
        return head
    given = dict(options)
    if isinstance(head, str):
        names = registered()
        if head not in names:
            raise ValueError(f"head: expected one of {', '.join(names)}, got {head!r}")
        cls, recipe = names[head]
        given = _of_recipe(cls, recipe, in_features, n_classes, given)
    elif isinstance(head, type) and issubclass(head, Head):
        cls = head
    else:
        raise TypeError(
            f"head: expected the name of a head, a class of lastlayer.heads or a head, got {head!r}"
        )
    taken = inspect.signature(cls).parameters
    for name, value in shape._asdict().items():
        if name in taken:
            given.setdefault(name, value)
    for name in ("n_classes", "in_features"):
        wanted = {"n_classes": n_classes, "in_features": in_features}[name]
        if given.pop(name, wanted) != wanted:
            raise TypeError(f"{name}: expected none, since it follows from the model")
    # A tree takes counts for the start of its biases alone.
    starts: set[str] = {"counts"} if hasattr(cls, "init_from_linear") else set()
    unknown = given.keys() - taken.keys() - starts
    if unknown and not any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        raise TypeError(
            f"{min(unknown)}: expected an option of {cls.__name__}, got another; it has "
            f"{', '.join(each for each in taken if each not in ('in_features', 'n_classes'))}"
        )
    if issubclass(cls, LinearHead):
        _check_shape(cls, shape, given)
        return cls.from_linear(layer, **given)
    made: dict[str, Any] = {"device": layer.weight.device, "dtype": layer.weight.dtype}
    if hasattr(cls, "init_from_linear") and not layer.weight.is_meta:
        found: Head = cls.init_from_linear(layer, **given)
        return found
    own = {"n_classes": n_classes} if "n_classes" in taken and "counts" not in given else {}
    found = cls(**{"in_features": in_features, **own, **given, **made})
    _check_made(found, layer, Shape())
    return found


def _of_recipe(
    cls: type[Head], recipe: Any, in_features: int, n_classes: int, given: dict[str, Any]
) -> dict[str, Any]:
    """The constructor's arguments: what a recipe fills in from counts, and what was given."""
    taken = inspect.signature(cls).parameters
    counts = given.pop("counts", None)
    made = any(isinstance(each, Tree | Sampler) for each in given.values()) or "cutoffs" in given
    usual = {"sparse": False} if "sparse" in taken else {}
    given = {**recipe.defaults, **usual, **given}
    if recipe.from_data is None or made or "bands" in given:
        given |= recipe.fixed
        return given | ({} if counts is None or "counts" not in taken else {"counts": counts})
    if counts is None:
        raise ValueError(
            f"counts: expected how often each token occurs, which {recipe.name!r} is made from, "
            "got none; count_tokens(dataset, vocab_size) counts them"
        )
    counts = as_counts(counts, n_classes)
    if "order" in taken and "counts" not in taken:
        order = (-counts).argsort(kind="stable")
        given["order"], counts = order.tolist(), counts[order]
    data = ClassData(in_features, counts.astype(np.int64))
    arguments: dict[str, Any] = recipe.arguments(cls, data, given)
    arguments.pop("in_features", None)
    if "seed" not in given:
        arguments.pop("seed", None)
    return arguments


def _check_made(head: Head, layer: torch.nn.Linear, shape: Shape) -> None:
    n_classes, in_features = layer.weight.shape
    for name, wanted in (("in_features", in_features), ("n_classes", n_classes)):
        if getattr(head, name) != wanted:
            raise ValueError(
                f"head: expected {name}={wanted}, as the model has, got {name}="
                f"{getattr(head, name)}"
            )
    own = next(head.parameters())
    if own.device != layer.weight.device or own.dtype != layer.weight.dtype:
        raise ValueError(
            f"head: expected parameters on {layer.weight.device} in {layer.weight.dtype}, as the "
            f"model has, got {own.device} and {own.dtype}; head.to(device, dtype) moves them"
        )
    if getattr(head, "ignore_index", IGNORED) != IGNORED:
        raise ValueError(
            f"head: expected ignore_index={IGNORED}, which Transformers uses, got "
            f"{head.ignore_index}"
        )
    if isinstance(head, FullSoftmax) and head.weight is layer.weight and _shape_of(head) != shape:
        raise ValueError(
            f"head: expected softcap={shape.softcap} and temperature={shape.temperature}, which "
            f"are what the model does to its logits, got {head.softcap} and {head.temperature}"
        )


def _check_shape(cls: type[Head], shape: Shape, given: dict[str, Any]) -> None:
    """A head that takes over the vectors of a layer has to take over what is done to scores."""
    taken = inspect.signature(cls).parameters
    for (name, value), usual in zip(shape._asdict().items(), Shape(), strict=True):
        if value != usual and name not in taken:
            raise ValueError(
                f"head: expected one with the option {name}, since the model's logits have "
                f"{name}={value}, got {cls.__name__}, which has none; make the head yourself to do "
                f"without: {cls.__name__}.from_linear(model.get_output_embeddings())"
            )
        if name in taken and given.get(name, value) != value:
            raise ValueError(
                f"{name}: expected {value}, which is what the model does to its logits, got "
                f"{given[name]}"
            )


def _shape_of(head: FullSoftmax) -> Shape:
    return Shape(head.softcap, head.temperature)


def _is_plain(head: Any, layer: torch.nn.Linear, shape: Shape) -> bool:
    """Whether a head is the softmax that the model had."""
    return (
        type(head) is FullSoftmax
        and head.weight is layer.weight
        and not head.label_smoothing
        and not head.z_loss
        and head.class_weight is None
        and _shape_of(head) == shape
    )


def _check_how(logits: Any, statistics: Any) -> None:
    check_choice("logits", logits, _LOGITS)
    if not isinstance(statistics, bool):
        raise TypeError(f"statistics: expected True or False, got {statistics!r}")


def _check_generation(model: Any, processors: Any, config: Any, synced_gpus: bool) -> None:
    if not hasattr(model, "_lastlayer"):
        raise ValueError("model: expected one that swap_head has changed, got another")
    beams = max(config.num_beams or 1, config.num_return_sequences or 1)
    if beams > 1 or synced_gpus or config.return_dict_in_generate:
        raise ValueError(
            "custom_generate: expected greedy search or sampling, one sequence per prompt, that "
            "returns tokens alone; call generate without custom_generate for the rest"
        )
    other = [type(each).__name__ for each in processors if type(each).__name__ not in _OF_SCORES]
    if other:
        raise ValueError(
            f"custom_generate: expected processors that need no score of other tokens, got "
            f"{', '.join(other)}; call generate without custom_generate"
        )
    if config.do_sample and len(processors) and not config.top_k:
        raise ValueError(
            "top_k: expected how many of the best tokens are sampled from, since temperature and "
            f"the like need them, got {config.top_k}; set top_k, or leave these out"
        )


class _State(torch.nn.Module):
    """Parameters and buffers by the names of a head's state, for Transformers to load into."""

    def __init__(self, state: dict[str, Tensor], parameters: set[str]) -> None:
        super().__init__()
        for name, value in state.items():
            below, _, last = name.rpartition(".")
            module: Any = self
            for part in filter(None, below.split(".")):
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module._modules[part]
            if name in parameters:
                # Of torch's default dtype, which is that of the model while Transformers makes it.
                empty = torch.empty(value.shape, device="meta")
                module.register_parameter(last, torch.nn.Parameter(empty))
            else:
                module.register_buffer(last, torch.empty_like(value, device="meta"))


def _restored(
    transformers: Any,
    name: str | Path,
    config: Any,
    saved: dict[str, Any],
    where: dict[str, Any],
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    """A model with a head that is not the plain softmax.

    The head is made first, with its tables; Transformers loads its state beside the model's, and
    the head takes it over.
    """
    folder = Path(name) / _FOLDER
    for file in saved["files"]:
        # A name without folders: what a configuration says is not to be trusted.
        found = transformers.utils.cached_file(str(name), f"{_FOLDER}/{Path(file).name}", **where)
        folder = Path(found).parent
    head: Head = SavedModule.load_config(folder)  # type: ignore[assignment]
    base, layer = getattr(transformers, config.architectures[0]), saved["layer"]
    parameters = {each for each, _ in head.named_parameters()}

    class Loaded(base):  # type: ignore[misc, valid-type]
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            state = {"weight": torch.empty(0), **head.state_dict()}
            _put(self, layer, _State(state, parameters))

    Loaded.__name__, Loaded.__module__ = base.__name__, base.__module__
    options = {**options, "output_loading_info": True}
    model, info = Loaded.from_pretrained(name, *args, **options)
    missing = [each for each in info["missing_keys"] if each.startswith(f"{layer}.")]
    if missing:
        raise ValueError(
            f"name: expected a folder with the state of {type(head).__name__}, got {name}, which "
            f"lacks {', '.join(sorted(missing))}"
        )
    model.__class__ = base
    state = model.get_submodule(layer).state_dict()
    if "weight" not in head.state_dict():
        state.pop("weight")
    try:
        head.load_state_dict(state, assign=True)
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"name: expected the state of the head that {folder} describes, got another in {name}: "
            f"{error}"
        ) from error
    head.to(model.device)
    tied = model.all_tied_weights_keys.get(f"{layer}.weight")
    if tied is not None:
        head.weight = model.get_parameter(tied)
    linear: Any = torch.nn.Linear(head.in_features, head.n_classes, bias=False, device="meta")
    if isinstance(head, LinearHead):
        linear.weight, linear.bias = head.weight, head.bias
    _put(model, layer, linear)
    _install_saved(model, head, saved)
    return model.eval()


def _unwrapped(model: Any) -> Any:
    """The swapped model itself, inside of DDP, a compiler or PEFT."""
    for _ in range(8):
        if hasattr(model, "_lastlayer") and isinstance(model, _Swapped):
            return model
        inner = getattr(model, "module", None) or getattr(model, "_orig_mod", None)
        if inner is None and hasattr(model, "get_base_model"):
            inner = model.get_base_model()
        if inner is None:
            break
        model = inner
    raise ValueError(
        f"model: expected one that swap_head has changed, got {type(model).__name__} without a "
        "head of this library"
    )
