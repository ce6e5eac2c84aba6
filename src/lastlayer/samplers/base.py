"""The base class of all samplers."""

import math
from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from lastlayer._checks import check_choice, check_ids, check_int
from lastlayer._tables import TabledModule
from lastlayer.samplers.counters import as_rng_counter
from lastlayer.samplers.unique import METHODS, Inclusion

MOST_CLASSES = 2**31
RngCounter = tuple[int, int] | Tensor


class Sampled(NamedTuple):
    """Draws with replacement."""

    ids: Tensor
    """Class ids, int64."""
    log_prob: Tensor
    """The log-probability of each id; same shape as ``ids``."""


class Drawn(NamedTuple):
    """Draws without replacement."""

    ids: Tensor
    """Unique class ids, int64 ``(n,)``."""
    log_expected: Tensor
    """Log of the inclusion probability of each class, which is also its expected count."""


class Sampler(TabledModule, ABC):
    """A distribution over classes, from which negatives are drawn.

    :meth:`sample` draws with exactly the probabilities of :meth:`log_prob`. A subclass implements
    ``_draw(n, rng_counter, context)``, which returns int64 ids ``(n,)``, or ``(rows, n)`` with a
    context, and ``_log_prob(ids, context)`` in float64; their arguments have been checked. If its
    constructor has more arguments than ``n_classes``, it overrides :meth:`config`; if some of them
    are arrays, which are part of the state, also ``_saved_config`` and :meth:`from_config`.
    :func:`lastlayer.testing.check_sampler` checks a subclass.

    Draws are a function of an RNG counter ``(seed, step)``: the same counter gives the same draws
    on a CPU, on a GPU, in a backward pass and in a resumed run. Without a context, the first draws
    do not depend on the number of draws. If no counter is given, seed and step are drawn from
    ``generator``, or from torch's default generator.

    Args:
        n_classes: number of classes, at most 2^31.
    """

    needs_context: bool = False
    # Buffers that are only read by ``_entries``, so that they may be sharded over processes.
    spreadable: tuple[str, ...] = ()
    # Set by lastlayer.parallel if these buffers are DTensors: reads entries of all processes.
    _spread: Any = None
    _inclusion: Inclusion | None = None

    def __init__(self, n_classes: int) -> None:
        super().__init__()
        self.n_classes = check_int("n_classes", n_classes, most=MOST_CLASSES)
        # Marks the device of the sampler, even if it has no other buffers.
        self.register_buffer("_here", torch.empty(0), persistent=False)

    @property
    def device(self) -> torch.device:
        """The device on which ids are drawn."""
        here: Tensor = self.get_buffer("_here")
        return here.device

    def _state_device(self) -> torch.device | None:
        # `_here` may still be on the meta device.
        return next((each.device for each in self.buffers() if each.numel()), self.device)

    def _follow(self, device: torch.device | None) -> None:
        if device is not None and self.device != device:
            self._buffers["_here"] = torch.empty(0, device=device)
            self._inclusion = None
        super()._follow(device)

    @abstractmethod
    def _draw(self, n: int, rng_counter: Tensor, context: Tensor | None, /) -> Tensor:
        """Draw ``n`` ids, per context if there is one; ``rng_counter`` is int64 ``(2,)``."""

    @abstractmethod
    def _log_prob(self, ids: Tensor, context: Tensor | None, /) -> Tensor:
        """Log-probabilities of ids in float64."""

    @torch.no_grad()
    def sample(
        self,
        n: int,
        *,
        context: Tensor | None = None,
        generator: torch.Generator | None = None,
        rng_counter: RngCounter | None = None,
    ) -> Tensor:
        """Draw classes independently, with replacement.

        Args:
            n: number of draws, per context if there is one.
            context: the context of each row, for a sampler with ``needs_context``.
            generator: random generator on the device of the sampler; torch's default if None.
            rng_counter: seed and step instead of a generator: two ints, or int64 ``(2,)`` on the
                device of the sampler, which avoids a host sync.

        Returns:
            Class ids, int64 ``(n,)``; with a context ``(rows, n)``.
        """
        n, context, rng_counter = self._checked(n, context, generator, rng_counter)
        return self._draw(n, rng_counter, context)

    @torch.no_grad()
    def sample_with_log_prob(
        self,
        n: int,
        *,
        context: Tensor | None = None,
        generator: torch.Generator | None = None,
        rng_counter: RngCounter | None = None,
    ) -> Sampled:
        """The draws of :meth:`sample`, with the log-probability of each in float32."""
        n, context, rng_counter = self._checked(n, context, generator, rng_counter)
        return self._draw_both(n, rng_counter, context)

    def _draw_both(self, n: int, rng_counter: Tensor, context: Tensor | None, /) -> Sampled:
        ids = self._draw(n, rng_counter, context)
        return Sampled(ids, self._log_prob(ids, context).float())

    def _draw_wide(self, n: int, rng_counter: Tensor, context: Tensor | None, /) -> Sampled:
        """Like :meth:`_draw_both`, with log-probabilities in float64."""
        ids = self._draw(n, rng_counter, context)
        return Sampled(ids, self._log_prob(ids, context))

    def _entries(self, name: str, places: Tensor, *, drawn: bool = False) -> Tensor:
        """``table[places]`` for one of the ``spreadable`` tables, which may be sharded.

        Args:
            name: name of the table.
            places: row indices of any shape.
            drawn: whether indices follow from an RNG counter, so all processes have the same ones.
        """
        if self._spread is None:
            return self.get_buffer(name)[places]
        found: Tensor = self._spread.entries(name, self.get_buffer(name), places, drawn)
        return found

    def _log_prob_of_all(self) -> Tensor:
        """Log-probabilities of all classes in float64."""
        everything = torch.arange(self.n_classes, device=self.device)
        if self._spread is None:
            return self._log_prob(everything, None)
        with self._spread.asked_by("all"):
            return self._log_prob(everything, None)

    def _tables(self) -> tuple[int, Tensor | None, Tensor | None, int] | None:
        """For kernels that draw: the kind in ``kernels.rng``, two tables, number of classes.

        None if they cannot draw as ``_draw`` does, such as for a subclass that replaces it.
        """
        return None

    @torch.no_grad()
    def log_prob(
        self, ids: Tensor, context: Tensor | None = None, *, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """The exact log-probability with which classes are drawn.

        Args:
            ids: class ids of any shape; with a context ``(rows, n)`` or ``(rows,)``.
            context: the context of each row, for a sampler with ``needs_context``.
            dtype: dtype of the result; it is computed in float64.
        """
        context = self._check_context(context)
        return self._log_prob(self._check_ids("ids", ids), context).to(dtype)

    @torch.no_grad()
    def log_complement(
        self, target: Tensor, context: Tensor | None = None, *, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """log(1 − q(y)): the log-probability that a draw is not the target.

        Args:
            target: class ids of any shape; negative ids mean no target and give 0.
            context: the context of each row, for a sampler with ``needs_context``.
            dtype: dtype of the result; it is computed in float64.
        """
        context = self._check_context(context)
        return self._log_complement(self._check_ids("target", target, True), context, dtype)

    def _log_targets(self, target: Tensor, dtype: torch.dtype, /) -> Tensor:
        """Log-probabilities of targets; arbitrary for negative ids."""
        return self._log_prob(target.clamp(min=0), None).to(dtype)

    def _log_complement(
        self, target: Tensor, context: Tensor | None, dtype: torch.dtype, /
    ) -> Tensor:
        others = torch.log(-torch.expm1(self._log_prob(target.clamp(min=0), context)))
        return torch.where(target < 0, 0.0, others).to(dtype)

    def without(self, target: Tensor, ids: Tensor, context: Tensor | None = None) -> Tensor:
        """Log-probabilities of classes, given that a draw is not the target of its row.

        This is log q(d) − log(1 − q(y)) for a class d and target y, and -inf for d = y.

        Args:
            target: class ids ``(*batch)``; with a context ``(rows,)``.
            ids: class ids ``(n,)``, the same for every row; with a context ``(rows, n)``.
            context: the context of each row, for a sampler with ``needs_context``.

        Returns:
            float32 ``(*batch, n)``.
        """
        target = self._check_ids("target", target)
        others = self.log_complement(target, context, dtype=torch.float64)
        log_prob = self.log_prob(ids, context, dtype=torch.float64) - others[..., None]
        return log_prob.masked_fill_(ids == target[..., None], -math.inf).float()

    @torch.no_grad()
    def unique(
        self,
        n: int,
        *,
        method: str = "fixed",
        generator: torch.Generator | None = None,
        rng_counter: RngCounter | None = None,
    ) -> Drawn:
        """Draw classes without replacement, with known inclusion probabilities.

        A class with probability q is drawn with probability min(1, c·q), where c is such that the
        expected number of classes is n. A table of these probabilities is computed in O(n_classes)
        whenever ``n`` changes.

        Args:
            n: number of unique classes, at most ``n_classes``.
            method: "fixed" draws exactly n classes, one from each of n consecutive intervals of
                equal probability, so two classes inside the same interval are never drawn together.
                "poisson" decides for each class independently, so the number of classes varies
                around n; it takes O(n_classes) time and a host sync.
            generator: as for :meth:`sample`.
            rng_counter: as for :meth:`sample`.

        Returns:
            The ids in ascending order, and the log of the inclusion probability of each.
        """
        check_choice("method", method, METHODS)
        inclusion = self._inclusion_of(n)
        ids = inclusion.draw(method, as_rng_counter(rng_counter, generator, self.device))
        return Drawn(ids, inclusion.log_prob(ids))

    @torch.no_grad()
    def log_expected(self, ids: Tensor, n: int) -> Tensor:
        """The log-probability that ``unique(n)`` draws a class, in float32.

        Args:
            ids: class ids of any shape.
            n: number of unique classes.
        """
        return self._inclusion_of(n).log_prob(self._check_ids("ids", ids))

    def _inclusion_of(self, n: int) -> Inclusion:
        if self.needs_context:
            raise ValueError(
                f"unique: expected a sampler without context, got {type(self).__name__}; use "
                "sample, which draws with replacement"
            )
        n = check_int("n", n, most=self.n_classes)
        if torch.compiler.is_dynamo_compiling() or self._ready_on is None:
            self._be_ready()
        if self._inclusion is None or not self._inclusion.fits(n, self.device):
            self._inclusion = Inclusion(self._log_prob_of_all().exp(), n)
        return self._inclusion

    def config(self) -> dict[str, Any]:
        """The arguments of the constructor: ``cls(**sampler.config())`` gives the same draws."""
        return {"n_classes": self.n_classes}

    def _saved_config(self) -> dict[str, Any]:
        """:meth:`config` for JSON, without arrays, which are part of the state."""
        return self.config()

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """A sampler from a saved config; load its ``state_dict`` afterwards."""
        return cls(**config)

    @classmethod
    def _on_meta(cls, config: dict[str, Any]) -> Self:
        """Like :meth:`from_config`, with large tables on the meta device if possible."""
        return cls.from_config(config)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self._saved_config().items())

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._inclusion = None
        super()._load_from_state_dict(*args, **kwargs)

    def _check_context(self, context: Any) -> Tensor | None:
        """Check the context, and convert it for :meth:`_draw`."""
        if context is not None:
            raise ValueError(
                f"context: expected None, since {type(self).__name__} takes no context, "
                f"got {type(context).__name__}"
            )
        return None

    def _check_ids(self, name: str, ids: Any, optional: bool = False) -> Tensor:
        """Class ids of any shape as int64; if ``optional``, negative ids are allowed, as -1."""
        if torch.compiler.is_dynamo_compiling() or self._ready_on is None:
            self._be_ready()
        some = optional and isinstance(ids, Tensor) and ids.dtype.is_signed
        given, like = ids.clamp(min=0) if some else ids, self.get_buffer("_here")
        known = check_ids(name, given, None, self.n_classes, like=like, of="the sampler")
        return torch.where(ids < 0, -1, known) if some else known

    def _checked(
        self,
        n: int,
        context: Tensor | None,
        generator: torch.Generator | None,
        rng_counter: RngCounter | None,
    ) -> tuple[int, Tensor | None, Tensor]:
        if torch.compiler.is_dynamo_compiling() or self._ready_on is None:
            self._be_ready()
        context = self._check_context(context)
        n = check_int("n", n, most=MOST_CLASSES)
        return n, context, as_rng_counter(rng_counter, generator, self.device)
