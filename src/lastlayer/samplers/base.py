"""The contract of all samplers."""

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
    """The log-probability of each, of the same shape."""


class Drawn(NamedTuple):
    """Draws without replacement."""

    ids: Tensor
    """Different class ids, int64 ``(n,)``."""
    log_expected: Tensor
    """Log-probability that a class is among them, which is how often it is expected."""


class Sampler(TabledModule, ABC):
    """A distribution over the classes, from which negatives are drawn.

    :meth:`sample` draws exactly with the probabilities of :meth:`log_prob`. A sampler of your own
    defines ``_draw(n, rng_counter, context)``, which gives ids int64 ``(n,)``, or ``(rows, n)``
    with a context, and ``_log_prob(ids, context)`` in float64; arguments are checked before. Where
    its constructor takes more than ``n_classes`` it defines :meth:`config`, and where that has
    arrays, which are part of the state, ``_saved_config`` and :meth:`from_config` as well.
    :func:`lastlayer.testing.check_sampler` checks that all of it fits together.

    Draws follow from an RNG counter ``(seed, step)``: the same one gives the same draws on a CPU,
    on a GPU, in a backward pass and in a resumed run, and without a context the first draws do not
    depend on how many are asked for. Without a counter, seed and step are drawn from ``generator``
    or from torch's own.

    Args:
        n_classes: number of classes, at most 2^31.
    """

    needs_context: bool = False
    # Buffers that are read by ``_entries`` alone, so that each process may have a part of them.
    spreadable: tuple[str, ...] = ()
    # Set by lastlayer.parallel where these are DTensors: what reads entries of all processes.
    _spread: Any = None
    _inclusion: Inclusion | None = None

    def __init__(self, n_classes: int) -> None:
        super().__init__()
        self.n_classes = check_int("n_classes", n_classes, most=MOST_CLASSES)
        # Says where the sampler is, also where it has nothing to keep.
        self.register_buffer("_here", torch.empty(0), persistent=False)

    @property
    def device(self) -> torch.device:
        """Where ids are drawn."""
        here: Tensor = self.get_buffer("_here")
        return here.device

    def _state_device(self) -> torch.device | None:
        # Its own marker may still be on the meta device.
        return next((each.device for each in self.buffers() if each.numel()), self.device)

    def _follow(self, device: torch.device | None) -> None:
        if device is not None and self.device != device:
            self._buffers["_here"] = torch.empty(0, device=device)
            self._inclusion = None
        super()._follow(device)

    @abstractmethod
    def _draw(self, n: int, rng_counter: Tensor, context: Tensor | None, /) -> Tensor:
        """``n`` ids per context from the bits of ``rng_counter``, int64 ``(2,)``."""

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
        """Independent draws with replacement.

        Args:
            n: number of draws, per context where there is one.
            context: what came before, for a sampler that ``needs_context``.
            generator: source of randomness, on the device of the sampler; torch's own otherwise.
            rng_counter: instead of that, seed and step: two ints, or int64 ``(2,)`` on the device
                of the sampler, which nothing waits for.

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
        """What :meth:`sample` draws, and the log-probability of each draw in float32."""
        n, context, rng_counter = self._checked(n, context, generator, rng_counter)
        return self._draw_both(n, rng_counter, context)

    def _draw_both(self, n: int, rng_counter: Tensor, context: Tensor | None, /) -> Sampled:
        ids = self._draw(n, rng_counter, context)
        return Sampled(ids, self._log_prob(ids, context).float())

    def _draw_wide(self, n: int, rng_counter: Tensor, context: Tensor | None, /) -> Sampled:
        """As :meth:`_draw_both`, with log-probabilities in float64."""
        ids = self._draw(n, rng_counter, context)
        return Sampled(ids, self._log_prob(ids, context))

    def _entries(self, name: str, places: Tensor, *, drawn: bool = False) -> Tensor:
        """``table[places]`` of one of the ``spreadable`` tables.

        Args:
            name: of the table.
            places: rows of it, of any shape.
            drawn: whether they follow from an RNG counter: all processes then ask for the same.
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
        """How kernels draw by themselves: a kind of ``kernels.rng``, two tables, the classes.

        None for a sampler whose ``_draw`` they do not know, such as a subclass that replaces it.
        """
        return None

    @torch.no_grad()
    def log_prob(
        self, ids: Tensor, context: Tensor | None = None, *, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """The log-probability of classes, exactly that with which they are drawn.

        Args:
            ids: class ids of any shape; with a context ``(rows, n)`` or ``(rows,)``.
            context: what came before, for a sampler that ``needs_context``.
            dtype: of the result; it is computed in float64.
        """
        context = self._check_context(context)
        return self._log_prob(self._check_ids("ids", ids), context).to(dtype)

    @torch.no_grad()
    def log_complement(
        self, target: Tensor, context: Tensor | None = None, *, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """log(1 − q(y)): the log-probability that a draw is not the target.

        Args:
            target: class ids of any shape; a negative one is none, and has 0.
            context: what came before, for a sampler that ``needs_context``.
            dtype: of the result; it is computed in float64.
        """
        context = self._check_context(context)
        return self._log_complement(self._check_ids("target", target, True), context, dtype)

    def _log_targets(self, target: Tensor, dtype: torch.dtype, /) -> Tensor:
        """Log-probabilities of targets; any number for a negative one."""
        return self._log_prob(target.clamp(min=0), None).to(dtype)

    def _log_complement(
        self, target: Tensor, context: Tensor | None, dtype: torch.dtype, /
    ) -> Tensor:
        others = torch.log(-torch.expm1(self._log_prob(target.clamp(min=0), context)))
        return torch.where(target < 0, 0.0, others).to(dtype)

    def without(self, target: Tensor, ids: Tensor, context: Tensor | None = None) -> Tensor:
        """Log-probabilities of classes where the target of each row is left out of the draw.

        The target has probability 0 and all others more: log q(d) − log(1 − q(y)).

        Args:
            target: class ids ``(*batch)``; with a context ``(rows,)``.
            ids: class ids ``(n,)``, the same for every row; with a context ``(rows, n)``.
            context: what came before, for a sampler that ``needs_context``.

        Returns:
            float32 ``(*batch, n)``, with -inf where an id is the target.
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
        """Draws without replacement: a class is among them with a probability that is known.

        That probability is min(1, c·q) with c such that n are expected. A table of it is made once
        for each ``n``, in O(n_classes).

        Args:
            n: how many different classes, at most ``n_classes``.
            method: "fixed" draws exactly n, one from each of n equally probable stretches of the
                classes: classes within a stretch are never drawn together. "poisson" decides for
                each class on its own, so that the number varies around n; it looks at all classes
                and waits for a GPU.
            generator: as for :meth:`sample`.
            rng_counter: as for :meth:`sample`.

        Returns:
            The ids, and for each the logarithm of how often it is expected. In "fixed" they are in
            the order of the classes.
        """
        check_choice("method", method, METHODS)
        inclusion = self._inclusion_of(n)
        ids = inclusion.draw(method, as_rng_counter(rng_counter, generator, self.device))
        return Drawn(ids, inclusion.log_prob(ids))

    @torch.no_grad()
    def log_expected(self, ids: Tensor, n: int) -> Tensor:
        """The log-probability that a class is among the draws of ``unique(n)``, in float32.

        Args:
            ids: class ids of any shape.
            n: number of different classes that are drawn.
        """
        return self._inclusion_of(n).log_prob(self._check_ids("ids", ids))

    def _inclusion_of(self, n: int) -> Inclusion:
        if self.needs_context:
            raise ValueError(
                f"unique: expected a sampler without context, got {type(self).__name__}, whose "
                "draws are with replacement"
            )
        n = check_int("n", n, most=self.n_classes)
        if torch.compiler.is_dynamo_compiling() or self._ready_on is None:
            self._be_ready()
        if self._inclusion is None or not self._inclusion.fits(n, self.device):
            self._inclusion = Inclusion(self._log_prob_of_all().exp(), n)
        return self._inclusion

    def config(self) -> dict[str, Any]:
        """The constructor's arguments: ``cls(**sampler.config())`` draws the same."""
        return {"n_classes": self.n_classes}

    def _saved_config(self) -> dict[str, Any]:
        """What of :meth:`config` goes into JSON: without arrays, which are part of the state."""
        return self.config()

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """A sampler from what was saved of :meth:`config`; its state is still to be loaded."""
        return cls(**config)

    @classmethod
    def _on_meta(cls, config: dict[str, Any]) -> Self:
        """As :meth:`from_config`, with large tables on the meta device where that is possible."""
        return cls.from_config(config)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self._saved_config().items())

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._inclusion = None
        super()._load_from_state_dict(*args, **kwargs)

    def _check_context(self, context: Any) -> Tensor | None:
        """The context as :meth:`_draw` takes it."""
        if context is not None:
            raise ValueError(
                f"context: expected None, since {type(self).__name__} does not look at it, "
                f"got {type(context).__name__}"
            )
        return None

    def _check_ids(self, name: str, ids: Any, optional: bool = False) -> Tensor:
        """Class ids of any shape as int64, on the device of the sampler; or -1 if ``optional``."""
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
