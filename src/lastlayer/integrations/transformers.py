"""Use heads as the output layer of Hugging Face Transformers models.

No ``forward`` is copied and nothing global is patched: a swapped model is the same model with
another output layer, two hooks, and a ``loss_function``. ``Trainer``, Accelerate, PEFT and
``torch.compile`` work as before.
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
# Logits processors that depend on scores only, so that they work on the scores of the top k.
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
    """Replace the output layer of a causal language model with a head.

    With labels, the output layer computes the loss from hidden states in its own forward, without
    storing logits. ``labels``, ``shift_labels``, ``num_items_in_batch`` and ``logits_to_keep``
    keep their meaning; labels of -100 are ignored. Without labels, as in ``generate``, the model
    returns logits; for heads other than the plain softmax these are log-probabilities, so that
    ``generate`` samples from the distribution of the head.

    A head with one vector per class takes over the parameters of the layer, tied or not, and the
    ``state_dict`` keeps the name ``lm_head.weight``. :class:`~lastlayer.heads.HierarchicalSoftmax`
    is initialized from them. Other heads are initialized randomly.

    Only the plain softmax remains an ``nn.Linear``. With other heads the output layer has no
    ``weight``, so that code which would compute a softmax from it raises an error.

    Args:
        model: a Transformers model that calls ``self.loss_function``; see :func:`supports`.
        head: a name such as "full" or "entmax" (``lastlayer.heads.registered()`` lists them), a
            head class, or a head. A head is used unchanged; a name or class takes the soft cap and
            scale of logits from the configuration of the model.
        logits: whether to compute logits in addition to the loss: in "eval" mode only, "never" or
            "always". ``outputs.logits`` is None if they are not computed.
        statistics: with labels, outputs also have ``log_prob``, the log-probability of each label;
            ``entropy`` and ``argmax`` of each predicted distribution, all with the shape of the
            labels, and shifted like logits; and the scalar ``token_accuracy``. This does not
            compute logits.
        check: on two tokens, check that the head applies the same cap and scale to scores as the
            model, and, for the plain softmax, that the loss before and after is equal.
        options: arguments of the head's constructor, for a name or a class; also ``counts`` (see
            :func:`count_tokens`), from which its sampler, tree or clusters are built. Heads that do
            not need counts ignore them.

    Returns:
        The model, modified in place.

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
            f"that is not supported: {supported.why}"
        )
    layer, shape = model.get_output_embeddings(), guessed_shape(model.config)
    if check:
        shape = found_shape(model, layer)
    made = _made(head, layer, shape, options)
    if isinstance(made, MultiLabel):
        raise TypeError(
            "head: expected a head with one class per token, got MultiLabel; use swap_classifier"
        )
    before = loss_of_two_tokens(model) if check and _is_plain(made, layer, shape) else None
    _install(model, made, name_of(model, layer), shape, logits, statistics)
    if before is not None:
        after = loss_of_two_tokens(model)
        # Scores of the original layer are rounded to its dtype.
        room = 64.0 * torch.finfo(layer.weight.dtype).eps * max(1.0, abs(before))
        if not abs(after - before) <= room:
            unswap_head(model)
            raise ValueError(
                f"model: expected the loss of {type(model).__name__} to be the cross entropy of "
                f"its output layer's scores, got {before:.6g} from it and {after:.6g} from "
                "the head; the model changes scores or the loss in some other way"
            )
    return model


def swap_classifier(
    model: Any, head: str | type[Head] | Head, *, logits: str = "eval", **options: Any
) -> Any:
    """Replace the output layer of a sequence classification model with a head.

    The model pools as before, and the head only sees the pooled hidden states, even if the model
    would compute scores for every token. ``labels`` are class ids ``(batch,)``. For
    :class:`~lastlayer.heads.MultiLabel` ("zlpr", "bce", "asymmetric", "sparsemax_labels") they are
    integer lists of label ids ``(batch, m)``, padded with -100, or a float matrix of 0 and 1,
    ``(batch, n_labels)``.

    Args:
        model: a model such as ``BertForSequenceClassification`` or
            ``LlamaForSequenceClassification``.
        head: as in :func:`swap_head`.
        logits: as in :func:`swap_head`. Logits are scores for :class:`~lastlayer.heads.MultiLabel`
            and the plain softmax, and log-probabilities for all other heads.
        options: as in :func:`swap_head`.

    Returns:
        The model, modified in place.
    """
    _check_how(logits, statistics=False)
    name, layer = classifier_of(model)
    made = _made(head, layer, Shape(), options)
    _install(model, made, name, Shape(), logits, statistics=False, of_rows=True)
    return model


def unswap_head(model: Any) -> Any:
    """Restore a plain ``nn.Linear`` as the output layer, with the current parameters.

    If the head had its own parameters, the original layer of the model is restored.
    """
    model = _unwrapped(model)
    model._lastlayer.restore(model)
    return model


def head_of(model: Any) -> Head:
    """The head of a swapped model, which may be wrapped by DDP, PEFT or ``torch.compile``."""
    model = _unwrapped(model)
    layer = model.get_submodule(model._lastlayer.layer)
    if isinstance(layer, ScoreHead):
        return layer.head
    if isinstance(layer, LMHead):
        return layer.make_head()
    raise ValueError(
        f"model: expected an unwrapped output layer, got one inside {type(layer).__name__}; "
        "merge adapters first: model.merge_and_unload()"
    )


def count_tokens(dataset: Iterable[Any], vocab_size: int, *, column: str = "input_ids") -> Tensor:
    """Count how often each token occurs, for samplers, clusters, trees and initial biases.

    Args:
        dataset: examples with token ids in a column, or lists or tensors of token ids.
        vocab_size: number of tokens.
        column: the key of the token ids, if examples are dictionaries.

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
    """A generation loop for ``model.generate(custom_generate=…)`` that avoids full logits.

    Greedy search uses ``head.topk(hidden, 1)``. Sampling uses ``head.sample``, or with ``top_k``
    the classes of ``head.topk``, after temperature, ``top_p`` and similar processors. This is
    exact, and for a tree much cheaper than the log-probabilities of all classes.

    Args:
        head: the head, usually ``head_of(model)``.
        streamer: gets the prompt and each token, as in ``generate``. Pass it here, because
            ``generate`` does not pass its own streamer to custom functions.

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
    """Loads swapped models, and all other models as Transformers does."""

    _stock: str

    @classmethod
    def from_pretrained(cls, name: str | Path, *args: Any, head: Any = None, **options: Any) -> Any:
        """Load a model from a folder or from the hub, with the head that it was saved with.

        No remote code is run: the head is constructed from the saved arguments, by a class of this
        library or by your own class, which must be imported.

        Args:
            name: a folder that ``save_pretrained`` wrote, or any name that Transformers accepts.
            args: as in Transformers.
            head: another head, as in :func:`swap_head`. The model must have been saved without a
                head, or with one that has one vector per class.
            options: as in Transformers.
        """
        transformers = import_transformers()
        stock = getattr(transformers, cls._stock)
        named = ("revision", "token", "cache_dir", "local_files_only", "subfolder")
        where = {each: options[each] for each in named if each in options}
        config = options.get("config") or transformers.AutoConfig.from_pretrained(name, **where)
        saved = getattr(config, "lastlayer", None)
        if saved is not None:
            _check_saved(saved, name)
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
    """``transformers.AutoModelForSequenceClassification`` with heads of this library."""

    _stock = "AutoModelForSequenceClassification"


class _Swapped:
    """Methods that a swapped model overrides: saving with its head, and resizing."""

    config: Any
    _lastlayer: Swap

    def save_pretrained(
        self, save_directory: str | Path, is_main_process: bool = True, **options: Any
    ) -> None:
        """As in Transformers; heads other than the plain softmax also save their config."""
        layer: Any = self.get_submodule(self._lastlayer.layer)  # type: ignore[attr-defined]
        if is_main_process and isinstance(layer, ScoreHead):
            folder = Path(save_directory) / _FOLDER
            layer.head.save_config(folder)
            self.config.lastlayer["files"] = sorted(each.name for each in folder.iterdir())
            if not hasattr(layer.head, "weight"):
                # Without this entry, Transformers alone would load a randomly initialized layer.
                state = options.get("state_dict") or self.state_dict()  # type: ignore[attr-defined]
                name = f"{self._lastlayer.layer}.weight"
                options["state_dict"] = {**state, name: torch.empty(0)}
        parent: Any = super()
        parent.save_pretrained(save_directory, is_main_process=is_main_process, **options)

    def resize_token_embeddings(self, *args: Any, **options: Any) -> Any:
        """As in Transformers, for heads that have only the parameters of the layer."""
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
                f"{type(made).__name__} with its own {' and '.join(fixed)} for {made.n_classes} "
                "classes; call unswap_head(model), resize, and call swap_head with options for the "
                "new size"
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
    """The class of a swapped model, with the same name, which Transformers saves and looks up."""
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
    """Replace the layer of that name with the head."""
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
        # The head has its own parameters, so the input embeddings are no longer tied.
        config.tie_word_embeddings = False
        model.all_tied_weights_keys.pop(tied_key)
    # Kept for unswap_head, in host memory; a loaded model has no original layer.
    old = None if shares or tied or layer.weight.is_meta else layer.to("cpu")
    bias = None if shares else layer.bias
    stock_class: Any = type(model)
    stock_loss = model.__dict__.get("_loss_function")

    def restore(model: Any) -> None:
        now = model.get_submodule(name)
        if not shares and source is None and old is None:
            raise ValueError(
                f"model: expected one whose original output layer is known, got one that was saved "
                f"with {type(now.head).__name__}, without that layer; load the original model"
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


def _check_saved(saved: Any, name: str | Path) -> None:
    """Checks what :func:`_install` has described in the configuration of a model."""
    kinds = {
        "head": str, "layer": str, "shape": list, "logits": str, "statistics": bool,
        "of_rows": bool,
    }  # fmt: skip
    plain = isinstance(saved, dict) and saved.get("head") == "LMHead"
    kinds |= {"arguments": dict} if plain else {"files": list}
    found = saved if isinstance(saved, dict) else {}
    wrong = [key for key, kind in kinds.items() if not isinstance(found.get(key), kind)]
    if not wrong and len(saved["shape"]) != len(Shape._fields):
        wrong = ["shape"]
    if wrong:
        raise ValueError(
            f"name: expected an entry 'lastlayer' as save_pretrained writes it in the config.json "
            f"of {name}, got one with missing or wrong {', '.join(wrong)}; save the model again"
        )


def _install_saved(model: Any, head: Head, saved: dict[str, Any]) -> None:
    how = saved["logits"], saved["statistics"], saved["of_rows"]
    _install(model, head, saved["layer"], Shape(*saved["shape"]), *how)


def _put(model: Any, name: str, layer: torch.nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, layer)


def _made(head: Any, layer: torch.nn.Linear, shape: Shape, options: dict[str, Any]) -> Head:
    """The head for a layer, from the arguments of :func:`swap_head`."""
    n_classes, in_features = layer.weight.shape
    if isinstance(head, Head):
        if options:
            raise TypeError(
                f"{next(iter(options))}: expected options only with the name or class of a head, "
                "got them with a head; pass them to its constructor"
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
        raise TypeError(f"head: expected the name of a head, a head class or a head, got {head!r}")
    taken = inspect.signature(cls).parameters
    for name, value in shape._asdict().items():
        if name in taken:
            given.setdefault(name, value)
    for name in ("n_classes", "in_features"):
        wanted = {"n_classes": n_classes, "in_features": in_features}[name]
        if given.pop(name, wanted) != wanted:
            raise TypeError(
                f"{name}: expected none, since the model determines it, got a value; leave it out"
            )
    # A tree uses counts only to initialize its biases.
    starts: set[str] = {"counts"} if hasattr(cls, "init_from_linear") else set()
    unknown = given.keys() - taken.keys() - starts
    if unknown and not any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        raise TypeError(
            f"{min(unknown)}: expected an option of {cls.__name__}, got an unknown one; options: "
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
    """The constructor's arguments: those that a recipe derives from counts, and those given."""
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
            f"counts: expected the count of each token, which {recipe.name!r} is built from, "
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
                f"head: expected {name}={wanted} as in the model, got {name}={getattr(head, name)}"
            )
    own = next(head.parameters())
    if own.device != layer.weight.device or own.dtype != layer.weight.dtype:
        raise ValueError(
            f"head: expected parameters on {layer.weight.device} in {layer.weight.dtype} as in the "
            f"model, got {own.device} and {own.dtype}; head.to(device, dtype) converts them"
        )
    if getattr(head, "ignore_index", IGNORED) != IGNORED:
        raise ValueError(
            f"head: expected ignore_index={IGNORED}, which Transformers uses, got "
            f"{head.ignore_index}"
        )
    if isinstance(head, FullSoftmax) and head.weight is layer.weight and _shape_of(head) != shape:
        raise ValueError(
            f"head: expected softcap={shape.softcap} and temperature={shape.temperature}, which "
            f"the model applies to its logits, got {head.softcap} and {head.temperature}"
        )


def _check_shape(cls: type[Head], shape: Shape, given: dict[str, Any]) -> None:
    """Check that a head with the layer's parameters also applies the model's cap and scale."""
    taken = inspect.signature(cls).parameters
    for (name, value), usual in zip(shape._asdict().items(), Shape(), strict=True):
        if value != usual and name not in taken:
            raise ValueError(
                f"head: expected one with the option {name}, since the model's logits have "
                f"{name}={value}, got {cls.__name__}, which has no such option; to do without, "
                f"pass {cls.__name__}.from_linear(model.get_output_embeddings())"
            )
        if name in taken and given.get(name, value) != value:
            raise ValueError(
                f"{name}: expected {value}, which the model applies to its logits, got "
                f"{given[name]}"
            )


def _shape_of(head: FullSoftmax) -> Shape:
    return Shape(head.softcap, head.temperature)


def _is_plain(head: Any, layer: torch.nn.Linear, shape: Shape) -> bool:
    """Whether a head is the plain softmax of the original layer."""
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
        raise ValueError("model: expected one that swap_head has changed, got one without a head")
    beams = max(config.num_beams or 1, config.num_return_sequences or 1)
    if beams > 1 or synced_gpus or config.return_dict_in_generate:
        raise ValueError(
            "custom_generate: expected greedy search or sampling of one sequence per prompt, which "
            "returns only tokens, got other options; call generate without custom_generate"
        )
    other = [type(each).__name__ for each in processors if type(each).__name__ not in _OF_SCORES]
    if other:
        raise ValueError(
            f"custom_generate: expected logits processors that need only the top k scores, got "
            f"{', '.join(other)}; call generate without custom_generate"
        )
    if config.do_sample and len(processors) and not config.top_k:
        raise ValueError(
            "top_k: expected a number of tokens to sample from, since temperature and similar "
            f"options need it, got {config.top_k}; set top_k, or leave these options out"
        )


class _State(torch.nn.Module):
    """Parameters and buffers named as in a head's ``state_dict``, for Transformers to load."""

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
                # In torch's default dtype, which Transformers sets to that of the model here.
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
    """Load a model with a head other than the plain softmax.

    The head and its tables are constructed first. Transformers loads its state together with the
    state of the model, and the head then takes it over.
    """
    folder = Path(name) / _FOLDER
    for file in saved["files"]:
        # Only the last part of the path: the configuration is not trusted.
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
            f"name: expected the state of the head in {folder}, got a different one in {name}: "
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
    """The swapped model inside wrappers: DDP, ``torch.compile`` or PEFT."""
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
