"""The base class of all heads, with shared checks, chunks, top-k, sampling and saving."""

import inspect
import json
import math
from abc import ABC, abstractmethod
from numbers import Real
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
    """A module on hidden states that records its constructor arguments, for saving and loading."""

    in_features: int
    sparse: bool = False
    # Set by lastlayer.parallel.ClassParallel: class parameters are DTensors, of which each process
    # has a shard, and losses give each process only its own part of the gradient of hidden.
    _is_spread = False
    __signature__: inspect.Signature

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        # The constructor's signature, where `*args` and `**options` stand for parameters of the
        # parent's.
        _, *own = inspect.signature(cls.__init__).parameters.values()
        variable = {each.kind for each in own} & {_ARGS, _OPTIONS}
        taken = {each.name: each for each in own if each.kind not in variable}
        if _OPTIONS in variable:
            parent = next(each for each in cls.__mro__[1:] if issubclass(each, SavedModule))
            for name, each in inspect.signature(parent).parameters.items():
                if each.kind is each.KEYWORD_ONLY or (_ARGS in variable and each.kind < _ARGS):
                    taken.setdefault(name, each)
        # As Python requires: positional before keyword-only, required before optional.
        ordered = sorted(taken.values(), key=lambda e: (e.kind, e.default is not e.empty))
        cls.__signature__ = inspect.Signature(ordered)
        if made_by_fsdp(cls):
            gather_in_methods(cls)

    def config(self) -> dict[str, Any]:
        """Constructor arguments: ``cls(**head.config())`` makes such a head, without its state.

        They are the attributes with the names of the constructor's parameters; device and dtype are
        left out.
        """
        made = {}
        for name, taken in self.__signature__.parameters.items():
            if name not in ("device", "dtype") and hasattr(self, name):
                value = getattr(self, name)
                # `bias=True` in the constructor becomes a parameter of that name.
                asks = isinstance(taken.default, bool) and isinstance(value, Tensor | None)
                made[name] = value is not None if asks else value
        return made

    def save(self, folder: str | Path) -> None:
        """Writes the state and :meth:`config` to a folder: ``model.safetensors``, ``config.json``.

        The folder is created if needed. If ``fully_shard`` has sharded the head, the full
        parameters are saved: all processes must call this, and the first one writes.
        """
        folder, safetensors = Path(folder), _safetensors()
        state, writes = whole_state(self)
        if not writes:
            return
        self.save_config(folder)
        state = {name: value.contiguous() for name, value in state.items()}
        safetensors.save_file(state, str(folder / _STATE))

    def save_config(self, folder: str | Path) -> None:
        """Writes :meth:`config` without the state, for a state that is saved elsewhere.

        For example with the state of a whole model. The folder is created if needed.
        """
        folder, config, kind = Path(folder), self._saved_config(self.config()), type(self)
        name = (kind.__bases__[-1] if made_by_fsdp(kind) else kind).__name__
        arguments = {"head": name, "arguments": config}
        text = json.dumps(arguments, indent=2, default=_as_json_number) + "\n"
        folder.mkdir(parents=True, exist_ok=True)
        self._save_extra(folder)
        (folder / _CONFIG).write_text(text, encoding="utf-8")

    @classmethod
    def load_config(cls, folder: str | Path, *, device: str | torch.device | None = None) -> Self:
        """Makes a head with fresh parameters from what :meth:`save_config` or :meth:`save` wrote.

        Args:
            folder: folder with the saved config.
            device: device of the parameters; "meta" allocates no memory.
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
        """Loads a head that :meth:`save` wrote, without unpickling anything.

        Args:
            folder: folder with the saved head.
            device: device of the parameters.

        Returns:
            A head of the class that was saved. This must be the class itself or a subclass, so
            ``Head.load`` loads any head. Import your own class before you load it.
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
                f"be read: {error}; it may be incomplete: save or copy it again"
            ) from error
        try:
            # assign=True: the parameters take the dtypes of the file.
            head.load_state_dict(state, assign=True)
            head = head.to(device)
            head._make_ready()
        except ValueError as error:
            raise ValueError(
                f"folder: expected the state of this head, got a modified {folder / _STATE}: "
                f"{error}"
            ) from error
        return head

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Makes a head from the config that :meth:`save` wrote, without its state."""
        return cls(**config)

    def _saved_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """The part of :meth:`config` that is saved as JSON."""
        return config

    def _save_extra(self, folder: Path) -> None:
        """Writes constructor arguments that JSON cannot hold; by default there are none."""

    @classmethod
    def _load_extra(cls, folder: Path) -> dict[str, Any]:  # noqa: ARG003 - for heads that write
        """Reads the arguments that :meth:`_save_extra` wrote, by name."""
        return {}

    def extra_repr(self) -> str:
        """The positional arguments of the constructor, and options that are not the default."""
        return self._shown(self.config())

    def _shown(self, config: dict[str, Any]) -> str:
        """Formats a config for ``extra_repr``; a head may leave out long values."""
        shown = []
        for name, value in config.items():
            taken = self.__signature__.parameters.get(name)
            if isinstance(value, Tensor):
                shown.append(f"{name}=<{tuple(value.shape)}>")
            elif taken is None or taken.kind is not taken.KEYWORD_ONLY or taken.default != value:
                shown.append(f"{name}={value!r}")
        return ", ".join(shown)

    def init_bias_from_counts(self, counts: Any) -> None:
        """Initialises the biases from class frequencies, which speeds up the start of training.

        At hidden state 0 the head then predicts the class frequencies.

        Args:
            counts: number of occurrences of each class, or their frequencies, ``(n_classes,)``; 0
                is treated as 0.5, or as half of the smallest count above 0 if that is less.
        """
        raise NotImplementedError(
            f"init_bias_from_counts: expected a head with biases, got {type(self).__name__}, which "
            "has none"
        )

    def _check_hidden(self, hidden: Any) -> None:
        """Checks the last dimension, the device and the dtype of hidden states."""
        check_scores(hidden, name="hidden")
        if hidden.shape[-1] != self.in_features:
            raise ValueError(
                f"hidden: expected shape (*batch, {self.in_features}), the in_features of the head "
                f"in the last dimension, got {tuple(hidden.shape)}"
            )
        # Looking for a parameter in submodules takes some microseconds.
        parameters = self._parameters
        parameter = next(iter(parameters.values())) if parameters else None
        if parameter is None:
            parameter = next(self.parameters())
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
                "hidden: expected a head with full parameters, got shards, which FSDP2 leaves "
                "outside of forward; call fully_shard(head) before fully_shard(model), so that the "
                "head's methods gather them"
            )


class Head(SavedModule, ABC):
    """Base class of output layers: from hidden states ``(*batch, in_features)`` to many classes.

    Every head has a training loss, :meth:`forward`; normalised log-probabilities,
    :meth:`log_prob`; the k most probable classes, :meth:`topk`; and random classes,
    :meth:`sample`. A subclass must define the first two. By default the other two call
    :meth:`log_prob` on one chunk of rows at a time; a subclass may override them.
    :func:`lastlayer.testing.check_head` checks the behaviour that is documented here.

    A subclass calls ``self._check_hidden(hidden)`` first. Tables that follow from the
    constructor's arguments, such as index tensors, are built in ``_make_tables(self, device)`` as
    plain attributes, not as buffers. They are then correct and on the right device even after the
    meta device, ``to_empty``, ``load_state_dict(assign=True)`` and the loaders of other libraries.

    Train through ``head(hidden, target)``, so that the hooks of DDP and FSDP fire.

    Args:
        in_features: size of the hidden state.
        n_classes: number of classes.
        ignore_index: rows with this target have loss 0 and no gradient; None to ignore no rows.
        reduction: "mean" over the rows that are not ignored (0 if there are none), "sum" or
            "none". It is an attribute and can be changed at any time.
    """

    recipes: tuple[Recipe, ...] = ()
    """How the lab and the benchmarks construct this head from data."""
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
        """Returns the k most probable classes, exactly as a sort of all log-probabilities would.

        Ties are broken by class id, lower first. If fewer than k classes have a nonzero
        probability, the remaining values are -inf. No gradient is recorded.

        Args:
            hidden: ``(*batch, in_features)``.
            k: from 1 to ``n_classes``.
        """
        rows, k = self._check_rows(hidden), self._check_k(k)
        values, classes = self._rows_topk(rows, k)
        shape = *hidden.shape[:-1], k
        return TopK(in_shape(values, shape), in_shape(classes, shape))

    def _rows_topk(self, rows: Tensor, k: int) -> tuple[Tensor, ...]:
        """Values and classes ``(n, k)`` of rows; heads with a faster method override this."""
        chunks = row_chunks(rows, self.n_classes, self.chunk_rows, TOP_COPIES)
        best = [top_classes(self.log_prob(rows[part]), k) for part in chunks]
        return tuple(map(torch.cat, zip(*best, strict=True)))

    @torch.no_grad()
    def sample(
        self, hidden: Tensor, n_samples: int = 1, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draws classes from the probabilities of each row, independently and with replacement.

        Args:
            hidden: ``(*batch, in_features)``.
            n_samples: draws per row.
            generator: random generator on the device of hidden; None for torch's default one.

        Returns:
            Class ids ``(*batch, n_samples)``, int64. A row without valid probabilities, for
            example because of a NaN, raises on a CPU and inside ``lastlayer.debug()``; otherwise
            it is all -1.
        """
        rows = self._check_rows(hidden)
        n_samples = check_int("n_samples", n_samples)
        check_generator(generator, hidden.device)
        # All random numbers at once, so that the result does not depend on the chunk size.
        shape = self._numbers_per_draw * rows.shape[0], n_samples
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64, device=rows.device)
        drawn = self._rows_sample(rows, *uniform.chunk(self._numbers_per_draw))
        return checked_draws(in_shape(drawn, (*hidden.shape[:-1], n_samples)))

    def _rows_sample(self, rows: Tensor, *uniform: Tensor) -> Tensor:
        """Class ids from uniform numbers ``(n, n_samples)`` in [0, 1); -1 for invalid rows."""
        chunks = row_chunks(rows, self.n_classes, self.chunk_rows, DRAW_COPIES)
        drawn = [drawn_by(self.log_prob(rows[part]), uniform[0][part]) for part in chunks]
        return torch.cat(drawn)

    def _check_rows(self, hidden: Any) -> Tensor:
        """Checked hidden states as rows, ``(n, in_features)``."""
        self._check_hidden(hidden)
        rows: Tensor = hidden if hidden.dim() == 2 else hidden.reshape(-1, self.in_features)
        return rows

    def _check_target(self, hidden: Tensor, target: Any) -> Tensor:
        """Checks the reduction and the targets ``(*batch)``; returns the targets as int64."""
        return self._target_and_ignored(hidden, target)[0]

    def _target_and_ignored(self, hidden: Tensor, target: Any) -> tuple[Tensor, int | None]:
        """Checked targets, and the id to ignore: None if no target has it."""
        check_reduction(self.reduction)
        return check_target_ids(target, hidden, self.n_classes, self.ignore_index)

    def _check_classes(self, hidden: Tensor, classes: Any) -> tuple[Tensor, tuple[int, ...]]:
        """Chosen classes as one list per row, ``(n, k)``, and the shape of the result."""
        ids = check_ids("classes", classes, None, self.n_classes, like=hidden)
        batch = tuple(hidden.shape[:-1])
        if ids.shape != batch and (ids.dim() != len(batch) + 1 or ids.shape[:-1] != batch):
            expected = ", ".join(map(str, batch))
            raise ValueError(
                f"classes: expected shape ({expected}), one class id per row, or "
                f"({expected}{', ' if batch else ''}k) for hidden of shape {tuple(hidden.shape)}, "
                f"got {tuple(ids.shape)}; for one list for all rows use classes.expand(*batch, k)"
            )
        k = 1 if ids.shape == batch else ids.shape[-1]
        return in_shape(ids, (math.prod(batch), k)), tuple(ids.shape)

    def _check_k(self, k: Any) -> int:
        return check_int("k", k, most=self.n_classes, note="the head's n_classes")


class ScoredHead(Head):
    """Base class of heads that compute log-probabilities from rows and a few tensors, in chunks.

    A subclass defines :meth:`_score_tensors`. Unless it is a softmax over
    ``rows @ weight.T + bias``, it also defines :meth:`_log_probs` or :meth:`_rows_log_prob`.
    Scores are float32 even if the head has half precision. For chosen classes only one chunk of
    scores is held at a time, and backward recomputes it.
    """

    # Memory of a chunk in multiples of its scores, the scores included.
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
        """Biases whose probabilities are the class frequencies; float64 on the CPU."""
        return log_frequencies(counts, self.n_classes, torch.empty(0, dtype=torch.float64))

    @abstractmethod
    def _score_tensors(self, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        """All differentiable inputs of :meth:`_rows_log_prob` besides the rows, in ``dtype``."""

    def _rows_log_prob(self, rows: Tensor, chosen: Tensor | None, *tensors: Any) -> Tensor:
        """Log-probabilities of all classes, or of ``chosen`` ones (rows, k); differentiable."""
        log_probs = self._log_probs(wide_scores(rows, *tensors))
        return log_probs if chosen is None else log_probs.gather(-1, chosen)

    def _log_probs(self, scores: Tensor) -> Tensor:
        """Log-probabilities from scores ``(rows, n_classes)``, differentiable.

        By default a softmax, after the soft cap and the temperature of heads that have them.
        """
        softcap, temperature = self._softcap_and_temperature()
        if softcap:
            capped = softcap * torch.tanh(scores / softcap)
            # The soft cap must not unmask a class that has a bias of -inf.
            scores = capped.masked_fill(scores == -math.inf, -math.inf)
        return log_softmax(scores if temperature == 1.0 else scores / temperature)

    def _softcap_and_temperature(self) -> tuple[float, float]:
        """Soft cap and temperature applied to the scores before the softmax; a cap of 0 is none."""
        return 0.0, 1.0

    def _layer(self, weight: Any, bias: Tensor | None) -> Layer:
        """The layer of the tensors of :meth:`_score_tensors`, for heads that are a softmax."""
        return Layer(weight, bias, *self._softcap_and_temperature(), self.chunk_rows)

    def _softmax_layer(
        self, rows: Tensor, tensors: tuple[Any, ...] | None = None, k: int = 0
    ) -> Layer | None:
        """The layer, if a kernel can predict for these rows; None if chunks must be used.

        Chunks are used if a head overrides the log-probabilities, if k is too large, while a
        compiler traces, and on devices without kernels.
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
        # Chosen classes are recomputed in backward, from parameters that must not change before.
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
        """Computes :meth:`_rows_log_prob`, without gradients by a kernel that stores no scores."""
        recording = chosen is None or torch.is_grad_enabled()
        layer = None if recording else self._softmax_layer(rows, tensors)
        if layer is None or chosen is None:
            return self._rows_log_prob(rows, chosen, *tensors)
        return log_probs_of(rows, layer, chosen)

    def _goes_by_itself(self, rows: Tensor, chosen: Tensor) -> bool:  # noqa: ARG002
        """Whether :meth:`_rows_log_prob` needs no chunks for chosen classes."""
        return False

    def _write_log_probs(self, out: Tensor, rows: Tensor, *tensors: Any) -> None:
        """Writes log-probabilities of all classes into a contiguous matrix, without gradient."""
        for part in row_chunks(rows, self.n_classes, self.chunk_rows, self._copies):
            out[part] = self._rows_log_prob(rows[part], None, *tensors)


def checked_draws(classes: Tensor) -> Tensor:
    """Returns ``classes`` ``(*batch, m)``; raises if a row had no valid probabilities."""
    if values_are_checked(classes) and classes.numel():
        # A numpy reduction takes a fifth of torch's host time.
        values = as_numpy(classes if classes.is_cpu else classes.cpu())
        if np.minimum.reduce(values, axis=None) < 0:
            first = tuple((classes < 0).any(-1).nonzero()[0].tolist())
            raise ValueError(
                f"hidden: expected rows with valid probabilities, got none at position {first}; "
                "check hidden and the head's parameters for NaN or inf"
            )
    return classes


def in_shape(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``tensor.reshape(shape)``, without its host time if the shape is already right."""
    return tensor if tensor.shape == shape else tensor.reshape(shape)


def deformed_log(logs: Tensor, alpha: float) -> Tensor:
    """Scores that entmax maps to probabilities with these logarithms.

    ``(p ** (alpha - 1) - 1) / (alpha - 1)``; at alpha = 1 the logarithms themselves.
    """
    excess = alpha - 1.0
    return torch.expm1(excess * logs) / excess if excess else logs


def log_frequencies(counts: Any, n_classes: int, like: Tensor) -> Tensor:
    """Log of each class's relative frequency, finite even for count 0; in the dtype of ``like``."""
    given = torch.from_numpy(as_counts(counts, n_classes))
    given = given.clamp(min=count_for_zero(given))
    return in_dtype(given.log() - given.sum().log(), like.dtype).to(like.device)


def count_for_zero(counts: Tensor) -> float:
    """What a count of 0 is treated as; counts may be frequencies, of which 0.5 exceeds most."""
    return min(0.5, float(counts[counts > 0].min()) / 2.0)


def init_uniform_(fan_in: int, *parameters: Tensor | None) -> None:
    """Initialises parameters uniformly within ±1/√fan_in, as ``nn.Linear`` does."""
    bound = 1.0 / math.sqrt(fan_in)
    for each in parameters:
        if each is not None:
            torch.nn.init.uniform_(each, -bound, bound)


def all_in_dtype(dtype: torch.dtype, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Converts tensors to ``dtype``, differentiably; None stays None."""
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
        f"import the class and call {name}.load(folder)"
    )


def _below(cls: type[Any]) -> list[type[Any]]:
    return [each for child in cls.__subclasses__() for each in (child, *_below(child))]


def _as_json_number(value: Any) -> Any:
    """A number that JSON does not know, such as one of numpy, as one of Python's."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Real):
        return float(value)
    raise TypeError(f"expected an argument that JSON can hold, got {type(value).__name__}")


def _safetensors() -> ModuleType:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "saving and loading heads needs the package safetensors; install it with "
            'pip install "lastlayer[save]"'
        ) from error
    return safetensors.torch
