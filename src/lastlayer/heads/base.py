"""The contract of all heads, and what they share: checks, chunks, top-k, draws, saving."""

import inspect
import json
import math
from abc import ABC, abstractmethod
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from lastlayer import kernels
from lastlayer._checks import (
    as_counts,
    check_generator,
    check_ids,
    check_ignore_index,
    check_int,
    check_reduction,
    check_scores,
    check_target_ids,
)
from lastlayer._processes import is_dtensor
from lastlayer._tables import TabledModule
from lastlayer._torch import (
    accumulation_dtype,
    as_numpy,
    autocast_dtype,
    in_autocast_dtype,
    in_dtype,
    is_eager,
    values_are_checked,
    without_autocast,
)
from lastlayer.fused.prediction import (
    DRAW_COPIES,
    TOP_COPIES,
    Layer,
    all_log_probs,
    best_classes,
    draw_classes,
    drawn_by,
    is_predictable,
    log_probs_of,
    log_softmax,
    top_classes,
)
from lastlayer.fused.recompute import in_chunks
from lastlayer.fused.scores import fits_one_cpu_product, row_chunks, wide_scores
from lastlayer.heads.distributed import (
    check_sparse,
    gather_in_methods,
    made_by_fsdp,
    whole_state,
)
from lastlayer.heads.recipes import Recipe

_CONFIG, _STATE = "config.json", "model.safetensors"
_ARGS, _OPTIONS = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


class TopK(NamedTuple):
    """The best classes of each row, the best one first."""

    values: Tensor
    """Log-probabilities, ``(*batch, k)``."""
    classes: Tensor
    """Their class ids, int64, ``(*batch, k)``."""


class SavedModule(TabledModule):
    """A module on hidden states that says what makes it, and that can be saved and loaded."""

    in_features: int
    sparse: bool = False
    # Set by lastlayer.parallel.ClassParallel: class parameters are DTensors, a part of them in each
    # process, and losses leave each process its part of the gradient of hidden.
    _is_spread = False
    __signature__: inspect.Signature

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        # That of the constructor, with what its ``*args`` and ``**options`` hand on to its parent.
        _, *own = inspect.signature(cls.__init__).parameters.values()
        variable = {each.kind for each in own} & {_ARGS, _OPTIONS}
        taken = {each.name: each for each in own if each.kind not in variable}
        if _OPTIONS in variable:
            parent = next(each for each in cls.__mro__[1:] if issubclass(each, SavedModule))
            for name, each in inspect.signature(parent).parameters.items():
                if each.kind is each.KEYWORD_ONLY or (_ARGS in variable and each.kind < _ARGS):
                    taken.setdefault(name, each)
        # As Python orders them: by position, then by name; what has to be given first.
        ordered = sorted(taken.values(), key=lambda e: (e.kind, e.default is not e.empty))
        cls.__signature__ = inspect.Signature(ordered)
        if made_by_fsdp(cls):
            gather_in_methods(cls)

    def config(self) -> dict[str, Any]:
        """The constructor's arguments: ``cls(**head.config())`` makes such a head, without state.

        They are the attributes of the same names, but for device and dtype.
        """
        made = {}
        for name, taken in self.__signature__.parameters.items():
            if name not in ("device", "dtype") and hasattr(self, name):
                value = getattr(self, name)
                # ``bias=True`` asks for a parameter of that name.
                asks = isinstance(taken.default, bool) and isinstance(value, Tensor | None)
                made[name] = value is not None if asks else value
        return made

    def save(self, folder: str | Path) -> None:
        """Write the state, ``model.safetensors``, and :meth:`config`; makes the folder.

        A head that ``fully_shard`` has sharded is saved whole: all processes call this, and the
        first one writes.
        """
        folder, safetensors = Path(folder), _safetensors()
        state, writes = whole_state(self)
        if not writes:
            return
        self.save_config(folder)
        state = {name: value.contiguous() for name, value in state.items()}
        safetensors.save_file(state, str(folder / _STATE))

    def save_config(self, folder: str | Path) -> None:
        """Write :meth:`config` without the state; makes the folder.

        For those who keep the state elsewhere, such as with that of a whole model.
        """
        folder, config, kind = Path(folder), self._saved_config(self.config()), type(self)
        name = (kind.__bases__[-1] if made_by_fsdp(kind) else kind).__name__
        text = json.dumps({"head": name, "arguments": config}, indent=2) + "\n"
        folder.mkdir(parents=True, exist_ok=True)
        self._save_extra(folder)
        (folder / _CONFIG).write_text(text, encoding="utf-8")

    @classmethod
    def load_config(cls, folder: str | Path, *, device: str | torch.device | None = None) -> Self:
        """A head with fresh parameters, as :meth:`save_config` or :meth:`save` wrote it.

        Args:
            folder: where it was saved.
            device: of its parameters; "meta" for a head that takes no memory yet.
        """
        folder = Path(folder)
        if not (folder / _CONFIG).is_file():
            raise FileNotFoundError(
                f"folder: expected {_CONFIG}, as save writes it, got {folder}, which has no "
                f"{_CONFIG}"
            )
        try:
            made_of = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
            name, arguments = made_of["head"], made_of["arguments"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"folder: expected {_CONFIG} as save writes it, got {folder / _CONFIG}, which "
                f"cannot be read: {error}"
            ) from error
        made = _class_named(name, cls, folder)
        if device is not None:
            arguments = {**arguments, "device": device}
        head: Self = made.from_config({**arguments, **made._load_extra(folder)})
        return head

    @classmethod
    def load(cls, folder: str | Path, *, device: str | torch.device = "cpu") -> Self:
        """The head that :meth:`save` wrote. Nothing is unpickled.

        Args:
            folder: where it was saved.
            device: of its state.

        Returns:
            A head of the class that was saved, which is this one or derives from it, so that
            ``Head.load`` takes them all. A class of your own has to be imported before.
        """
        folder, safetensors = Path(folder), _safetensors()
        for name in (_CONFIG, _STATE):
            if not (folder / name).is_file():
                raise FileNotFoundError(
                    f"folder: expected {_CONFIG} and {_STATE}, as save writes them, got {folder}, "
                    f"which has no {name}"
                )
        head = cls.load_config(folder)
        try:
            state = safetensors.load_file(str(folder / _STATE), str(torch.device(device)))
        except Exception as error:
            if isinstance(error, (OSError, MemoryError)):
                raise
            raise ValueError(
                f"folder: expected {_STATE} as save writes it, got {folder / _STATE}, which cannot "
                f"be read: {error}; it may have been cut off while it was written or copied"
            ) from error
        try:
            # The tensors themselves become the state: they bring their dtype along.
            head.load_state_dict(state, assign=True)
            head = head.to(device)
            head._make_ready()
        except ValueError as error:
            raise ValueError(f"folder: {folder / _STATE} was altered: {error}") from error
        return head

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """A head from what :meth:`save` wrote of :meth:`config`, without its state."""
        return cls(**config)

    def _saved_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """What of :meth:`config` goes into JSON."""
        return config

    def _save_extra(self, folder: Path) -> None:
        """Write arguments of the constructor that JSON cannot hold; here there are none."""

    @classmethod
    def _load_extra(cls, folder: Path) -> dict[str, Any]:  # noqa: ARG003 - for heads that write
        """The arguments that :meth:`_save_extra` wrote, by name."""
        return {}

    def extra_repr(self) -> str:
        """What the constructor takes by position, and options that are not as by default."""
        return self._shown(self.config())

    def _shown(self, config: dict[str, Any]) -> str:
        """For ``extra_repr``; a head may leave out what is long."""
        shown = []
        for name, value in config.items():
            taken = self.__signature__.parameters.get(name)
            if isinstance(value, Tensor):
                shown.append(f"{name}=<{tuple(value.shape)}>")
            elif taken is None or taken.kind is not taken.KEYWORD_ONLY or taken.default != value:
                shown.append(f"{name}={value!r}")
        return ", ".join(shown)

    def init_bias_from_counts(self, counts: Any) -> None:
        """Start at the class frequencies, the cheapest speed-up: biases become log frequencies.

        At the hidden state 0 the head then predicts the class frequencies.

        Args:
            counts: how often each class occurs, ``(n_classes,)``; a count of 0 counts as a half.
        """
        raise NotImplementedError(
            f"init_bias_from_counts: {type(self).__name__} has no biases to start from counts"
        )

    def _check_hidden(self, hidden: Any) -> None:
        """Hidden states of the head's width, on its device and in its dtype."""
        check_scores(hidden, name="hidden")
        if hidden.shape[-1] != self.in_features:
            raise ValueError(
                f"hidden: expected shape (*batch, {self.in_features}), in_features of the head "
                f"last, got {tuple(hidden.shape)}"
            )
        own = next(iter(self._parameters.values()), None)
        # Those of submodules are some microseconds away.
        parameter = next(self.parameters()) if own is None else own
        if hidden.device != parameter.device:
            raise ValueError(
                f"hidden: expected the device of the head, {parameter.device}, got "
                f"{hidden.device}; move one of them with .to(device)"
            )
        if hidden.dtype != parameter.dtype and autocast_dtype(hidden) is None:
            raise TypeError(
                f"hidden: expected the dtype of the head, {parameter.dtype}, got {hidden.dtype}; "
                "convert one of them, or use torch.autocast"
            )
        if torch.compiler.is_dynamo_compiling() or parameter.device != self._ready_on:
            self._be_ready()
        if self.sparse:
            check_sparse(self)
        if type(parameter) is not Parameter and not self._is_spread and is_dtensor(parameter):
            raise RuntimeError(
                "hidden: expected a head with whole parameters, got shards, as FSDP2 leaves them "
                "outside of forward; call fully_shard(head) before fully_shard(model), and the "
                "methods of the head gather them"
            )


class Head(SavedModule, ABC):
    """An output layer: from hidden states ``(*batch, in_features)`` to one of many classes.

    Every head has a training loss, :meth:`forward`; normalised log-probabilities,
    :meth:`log_prob`; its best classes, :meth:`topk`; and random ones, :meth:`sample`. A head of
    your own defines the first two. It gets the other two from :meth:`log_prob` of a chunk of rows
    at a time, and may do better. :func:`lastlayer.testing.check_head` checks all that is promised
    here.

    A head of your own calls ``self._check_hidden(hidden)`` first. Tables that follow from the
    constructor's arguments, such as indices, it makes in ``_make_tables(self, device)`` as plain
    attributes, not as buffers: they are then there, and on the right device, also after the meta
    device, ``to_empty``, ``load_state_dict(assign=True)`` and the loaders of other libraries.

    Train through ``head(hidden, target)``, so that the hooks of DDP and FSDP fire.

    Args:
        in_features: size of the hidden state.
        n_classes: number of classes.
        ignore_index: rows with this target have loss 0 and no gradient; None where every target
            counts.
        reduction: "mean" over the rows that count, 0 where there are none; "sum" or "none". It is
            an attribute and can be changed at any time.
    """

    recipes: tuple[Recipe, ...] = ()
    """How the lab and the benchmarks make such a head from data."""
    chunk_rows: int | str = "auto"
    _numbers_per_draw = 1

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        *,
        ignore_index: int | None = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        check_reduction(reduction)
        self.in_features = check_int("in_features", in_features)
        self.n_classes = check_int("n_classes", n_classes)
        self.ignore_index, self.reduction = check_ignore_index(ignore_index), reduction

    @abstractmethod
    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The training loss in float32, or in float64 from float64.

        Args:
            hidden: ``(*batch, in_features)``.
            target: class ids ``(*batch)``, of any integer dtype.
        """

    @abstractmethod
    def log_prob(self, hidden: Tensor, classes: Tensor | None = None) -> Tensor:
        """Normalised log-probabilities in float32, or in float64 from float64.

        ``head.log_prob(hidden, target)`` is the log-likelihood of each row.

        Args:
            hidden: ``(*batch, in_features)``.
            classes: class ids of any integer dtype: ``(*batch)``, one per row, or ``(*batch, k)``;
                None for all classes. A list shared by all rows is ``classes.expand(*batch, k)``.

        Returns:
            ``(*batch)``, ``(*batch, k)`` or ``(*batch, n_classes)``; -inf for a class of
            probability 0.
        """

    @torch.no_grad()
    def topk(self, hidden: Tensor, k: int) -> TopK:
        """The k most probable classes, exactly as a sort of all log-probabilities has them.

        Of equal log-probabilities the lower class id comes first. Where fewer than k classes have
        a probability, the rest has the value -inf. No gradient is recorded.

        Args:
            hidden: ``(*batch, in_features)``.
            k: from 1 to ``n_classes``.
        """
        rows, k = self._check_rows(hidden), self._check_k(k)
        values, classes = self._rows_topk(rows, k)
        shape = *hidden.shape[:-1], k
        return TopK(in_shape(values, shape), in_shape(classes, shape))

    def _rows_topk(self, rows: Tensor, k: int) -> tuple[Tensor, ...]:
        """Values and classes ``(n, k)`` of rows; for heads that know a better way."""
        chunks = row_chunks(rows, self.n_classes, self.chunk_rows, TOP_COPIES)
        best = [top_classes(self.log_prob(rows[part]), k) for part in chunks]
        return tuple(map(torch.cat, zip(*best, strict=True)))

    @torch.no_grad()
    def sample(
        self, hidden: Tensor, n_samples: int = 1, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Independent draws from the probabilities of each row, with replacement.

        Args:
            hidden: ``(*batch, in_features)``.
            n_samples: draws per row.
            generator: source of randomness, on the device of hidden; torch's own otherwise.

        Returns:
            Class ids ``(*batch, n_samples)``, int64. A row without probabilities, as a NaN
            makes it, is an error on a CPU and inside ``lastlayer.debug()``, and else all -1.
        """
        rows = self._check_rows(hidden)
        n_samples = check_int("n_samples", n_samples)
        check_generator(generator, hidden.device)
        # All random numbers at once: what is drawn does not depend on the size of the chunks.
        shape = self._numbers_per_draw * rows.shape[0], n_samples
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64, device=rows.device)
        drawn = self._rows_sample(rows, *uniform.chunk(self._numbers_per_draw))
        return checked_draws(in_shape(drawn, (*hidden.shape[:-1], n_samples)))

    def _rows_sample(self, rows: Tensor, *uniform: Tensor) -> Tensor:
        """Class ids of rows, -1 for none, from numbers ``(n, n_samples)`` in [0, 1)."""
        chunks = row_chunks(rows, self.n_classes, self.chunk_rows, DRAW_COPIES)
        drawn = [drawn_by(self.log_prob(rows[part]), uniform[0][part]) for part in chunks]
        return torch.cat(drawn)

    def _check_rows(self, hidden: Any) -> Tensor:
        """Checked hidden states as rows, ``(n, in_features)``."""
        self._check_hidden(hidden)
        rows: Tensor = hidden if hidden.dim() == 2 else hidden.reshape(-1, self.in_features)
        return rows

    def _check_target(self, hidden: Tensor, target: Any) -> Tensor:
        """One class id per row, or the ignored one, as int64; and the reduction."""
        return self._target_and_ignored(hidden, target)[0]

    def _target_and_ignored(self, hidden: Tensor, target: Any) -> tuple[Tensor, int | None]:
        """The same, and the id that is ignored: None where every target is known to count."""
        check_reduction(self.reduction)
        return check_target_ids(target, hidden, self.n_classes, self.ignore_index)

    def _check_classes(self, hidden: Tensor, classes: Any) -> tuple[Tensor, tuple[int, ...]]:
        """Chosen classes as one list per row, ``(n, k)``, and the shape of a result for them."""
        ids = check_ids("classes", classes, None, self.n_classes, like=hidden)
        batch = tuple(hidden.shape[:-1])
        if ids.shape != batch and (ids.dim() != len(batch) + 1 or ids.shape[:-1] != batch):
            expected = ", ".join(map(str, batch))
            raise ValueError(
                f"classes: expected shape ({expected}), one class id per row, or "
                f"({expected}{', ' if batch else ''}k) for hidden of shape {tuple(hidden.shape)}, "
                f"got {tuple(ids.shape)}; a list for all rows is classes.expand(*batch, k)"
            )
        k = 1 if ids.shape == batch else ids.shape[-1]
        return in_shape(ids, (math.prod(batch), k)), tuple(ids.shape)

    def _check_k(self, k: Any) -> int:
        return check_int("k", k, most=self.n_classes, note="the head's n_classes")


class ScoredHead(Head):
    """A head whose log-probabilities come from rows and a few tensors, chunk by chunk.

    It defines :meth:`_score_tensors`, and :meth:`_log_probs` or :meth:`_rows_log_prob` where it is
    no softmax over ``rows @ weight.T + bias``. Scores are float32 also where the head is in half
    precision. For chosen classes memory is that of a chunk, and backward makes its scores again.
    """

    # Numbers held for each score of a chunk, itself included.
    _copies = 4.0
    _bias_name = "bias"

    @torch.no_grad()
    def init_bias_from_counts(self, counts: Any) -> None:
        name = self._bias_name
        bias = getattr(self, name, None)
        if bias is None:
            raise ValueError(
                f"init_bias_from_counts: expected a head with biases, got {type(self).__name__} "
                f"with {name}=False; make it with {name}=True"
            )
        bias.copy_(self._scores_from_counts(counts))

    def _scores_from_counts(self, counts: Any) -> Tensor:
        """What the map turns into the class frequencies, for each bias; float64 on the CPU."""
        return log_frequencies(counts, self.n_classes, torch.empty(0, dtype=torch.float64))

    @abstractmethod
    def _score_tensors(self, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        """Everything differentiable that :meth:`_rows_log_prob` needs beside rows, in ``dtype``."""

    def _rows_log_prob(self, rows: Tensor, chosen: Tensor | None, *tensors: Any) -> Tensor:
        """Log-probabilities of all classes, or of ``chosen`` ones (rows, k); differentiable."""
        log_probs = self._log_probs(wide_scores(rows, *tensors))
        return log_probs if chosen is None else log_probs.gather(-1, chosen)

    def _log_probs(self, scores: Tensor) -> Tensor:
        """The log of the map of scores ``(rows, n_classes)``, differentiable.

        By default the softmax after a soft cap and a temperature, of heads that have these.
        """
        softcap, temperature = self._softcap_and_temperature()
        if softcap:
            capped = softcap * torch.tanh(scores / softcap)
            # A cap must not bring back a class that a bias of -inf masks.
            scores = capped.masked_fill(scores == -math.inf, -math.inf)
        return log_softmax(scores if temperature == 1.0 else scores / temperature)

    def _softcap_and_temperature(self) -> tuple[float, float]:
        """What scores go through before the softmax; 0 for no cap."""
        return 0.0, 1.0

    def _layer(self, weight: Any, bias: Tensor | None) -> Layer:
        """From the tensors of :meth:`_score_tensors`, for a head that is a softmax over scores."""
        return Layer(weight, bias, *self._softcap_and_temperature(), self.chunk_rows)

    def _softmax_layer(
        self, rows: Tensor, tensors: tuple[Any, ...] | None = None, k: int = 0
    ) -> Layer | None:
        """The layer, where predictions for these rows have kernels; None where they go by chunks.

        That is for a head with other rules for log-probabilities, for k best classes where these
        are too many, while a compiler traces, and on devices without kernels.
        """
        kind = type(self)
        by_rule = kind._log_probs is ScoredHead._log_probs
        by_rule &= kind._rows_log_prob is ScoredHead._rows_log_prob
        if not by_rule or not is_predictable(rows, k):
            return None
        return self._layer(*(tensors or self._score_tensors(rows.dtype)))

    def _rows_topk(self, rows: Tensor, k: int) -> tuple[Tensor, ...]:
        some = in_autocast_dtype(rows)
        layer = self._softmax_layer(some, k=k)
        with without_autocast(rows):
            if layer is not None:
                return best_classes(some, layer, k)
            if fits_one_cpu_product(some, self.n_classes, self.chunk_rows):
                tensors = self._score_tensors(some.dtype)
                return top_classes(self._rows_log_prob(some, None, *tensors), k)
        return super()._rows_topk(rows, k)

    def _rows_sample(self, rows: Tensor, *uniform: Tensor) -> Tensor:
        some = in_autocast_dtype(rows)
        layer = self._softmax_layer(some)
        with without_autocast(rows):
            if layer is not None:
                return draw_classes(some, layer, uniform[0])
            if fits_one_cpu_product(some, self.n_classes, self.chunk_rows):
                tensors = self._score_tensors(some.dtype)
                return drawn_by(self._rows_log_prob(some, None, *tensors), uniform[0])
        return super()._rows_sample(rows, *uniform)

    def log_prob(self, hidden: Tensor, classes: Tensor | None = None) -> Tensor:
        rows = in_autocast_dtype(self._check_rows(hidden))
        if classes is None:
            chosen, shape = None, (*hidden.shape[:-1], self.n_classes)
        else:
            chosen, shape = self._check_classes(hidden, classes)
        tensors = self._score_tensors(rows.dtype)
        few = fits_one_cpu_product(rows, self.n_classes, self.chunk_rows)
        # Those of chosen classes are made again in backward, from parameters that must not change.
        few = few and (chosen is None or not torch.is_grad_enabled())
        with without_autocast(hidden):
            by = self._rows_log_prob if few else self._log_prob_in_chunks
            return in_shape(by(rows, chosen, *tensors), shape)

    def _log_prob_in_chunks(self, rows: Tensor, chosen: Tensor | None, *tensors: Any) -> Tensor:
        """:meth:`_rows_log_prob` of any number of rows, in bounded memory."""
        recording = torch.is_grad_enabled() and any(
            each is not None and each.requires_grad for each in (rows, *tensors)
        )
        layer = None if recording else self._softmax_layer(rows, tensors)
        if layer is not None and chosen is not None:
            return log_probs_of(rows, layer, chosen)
        if layer is not None:
            return all_log_probs(rows, layer)
        if recording and chosen is None:
            return self._rows_log_prob(rows, None, *tensors)
        if chosen is None and is_eager(rows):
            size = rows.shape[0], self.n_classes
            made = kernels.empty(size, accumulation_dtype(rows.dtype), rows.device)
            self._write_log_probs(made, rows, *tensors)
            return made
        if chosen is not None and self._goes_by_itself(rows, chosen):
            chunks = [slice(0, rows.shape[0])]
        else:
            chunks = list(row_chunks(rows, self.n_classes, self.chunk_rows, self._copies))
        return in_chunks(self._log_prob_of_chunk, rows, [chosen], tensors, chunks)

    def _log_prob_of_chunk(self, rows: Tensor, chosen: Tensor | None, *tensors: Any) -> Tensor:
        """:meth:`_rows_log_prob`, where nothing is recorded by a kernel that keeps no scores."""
        recording = chosen is None or torch.is_grad_enabled()
        layer = None if recording else self._softmax_layer(rows, tensors)
        if layer is None or chosen is None:
            return self._rows_log_prob(rows, chosen, *tensors)
        return log_probs_of(rows, layer, chosen)

    def _goes_by_itself(self, rows: Tensor, chosen: Tensor) -> bool:  # noqa: ARG002
        """Whether :meth:`_rows_log_prob` of chosen classes takes any number of rows."""
        return False

    def _write_log_probs(self, out: Tensor, rows: Tensor, *tensors: Any) -> None:
        """Those of all classes, without a gradient, into a matrix that is contiguous."""
        for part in row_chunks(rows, self.n_classes, self.chunk_rows, self._copies):
            out[part] = self._rows_log_prob(rows[part], None, *tensors)


def checked_draws(classes: Tensor) -> Tensor:
    """``classes`` ``(*batch, m)``; an error where a row has nothing to draw from."""
    if values_are_checked(classes) and classes.numel():
        # In numpy: a reduction costs the host a fifth of torch's.
        values = as_numpy(classes if classes.is_cpu else classes.cpu())
        if np.minimum.reduce(values, axis=None) < 0:
            first = tuple((classes < 0).any(-1).nonzero()[0].tolist())
            raise ValueError(
                f"hidden: expected states with probabilities to draw from, got none at position "
                f"{first}; look for NaN or inf in hidden and in the head's parameters"
            )
    return classes


def in_shape(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``tensor.reshape(shape)``, which costs a microsecond even where there is nothing to do."""
    return tensor if tensor.shape == shape else tensor.reshape(shape)


def deformed_log(logs: Tensor, alpha: float) -> Tensor:
    """Scores that entmax turns into the probabilities of these logarithms.

    ``(p ** (alpha - 1) - 1) / (alpha - 1)``, at alpha 1 the logarithms themselves.
    """
    excess = alpha - 1.0
    return torch.expm1(excess * logs) / excess if excess else logs


def log_frequencies(counts: Any, n_classes: int, like: Tensor) -> Tensor:
    """The log of each class's share, finite where a count is 0; in the dtype of ``like``."""
    given = torch.from_numpy(as_counts(counts, n_classes)).clamp(min=0.5)
    return in_dtype((given / given.sum()).log(), like.dtype).to(like.device)


def init_uniform_(fan_in: int, *parameters: Tensor | None) -> None:
    """Within ±1/√fan_in, as those of ``nn.Linear``."""
    bound = 1.0 / math.sqrt(fan_in)
    for each in parameters:
        if each is not None:
            torch.nn.init.uniform_(each, -bound, bound)


def all_in_dtype(dtype: torch.dtype, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """What is there in another dtype, differentiable."""
    return tuple([
        each if each is None or each.dtype == dtype else each.to(dtype) for each in tensors
    ])  # fmt: skip


def _class_named(name: str, cls: type[Any], folder: Path) -> type[Any]:
    if cls.__name__ == name:
        return cls
    found = [each for each in _below(cls) if each.__name__ == name]
    if len(found) == 1:
        return found[0]
    trouble = "no such class is imported" if not found else f"{len(found)} classes have this name"
    raise ValueError(
        f"folder: expected a saved {cls.__name__}, got {name!r} in {folder}, and {trouble}; "
        f"call load on the class that was saved: {name}.load(folder)"
    )


def _below(cls: type[Any]) -> list[type[Any]]:
    return [each for child in cls.__subclasses__() for each in (child, *_below(child))]


def _safetensors() -> ModuleType:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "saving and loading heads needs the package safetensors; install it with "
            'pip install "lastlayer[save]"'
        ) from error
    return safetensors.torch
