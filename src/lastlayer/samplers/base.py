"""The contract of all samplers."""

import math
from abc import ABC, abstractmethod
from typing import Any, Self

import torch
from torch import Tensor

from lastlayer.samplers._checks import check_ids, check_number
from lastlayer.samplers._counters import as_counter
from lastlayer.samplers._drawn import Drawn, Sampled
from lastlayer.samplers._inclusion import METHODS, Inclusion

Counter = tuple[int, int] | Tensor


class Sampler(torch.nn.Module, ABC):
    """A distribution over the classes that negatives are drawn from.

    What :meth:`log_prob` says is what :meth:`sample` draws with. A sampler of your own defines
    ``_draw(n, counter, context)``, which gives ids int64 ``(n,)``, or ``(rows, n)`` where it looks
    at a context, and ``_log_prob(ids, context)`` in float64; arguments are checked before.
    :func:`lastlayer.testing.check_sampler` checks that they fit together.

    Chance comes from a counter ``(seed, step)``: the same counter gives the same draws on a CPU, on
    a GPU, in a backward pass and in a resumed run, and without a context the first draws do not
    depend on how many are asked for. Without a counter, seed and step are taken from ``generator``
    or from torch.

    Args:
        n_classes: how many classes there are.
    """

    needs_context: bool = False
    _inclusion: Inclusion | None = None

    def __init__(self, n_classes: int) -> None:
        super().__init__()
        self.n_classes = check_number("n_classes", n_classes)
        # Says where the sampler is, also where it has nothing to keep.
        self.register_buffer("_here", torch.empty(0), persistent=False)

    @property
    def device(self) -> torch.device:
        """Where ids are drawn."""
        here: Tensor = self.get_buffer("_here")
        return here.device

    @abstractmethod
    def _draw(self, n: int, counter: Tensor, context: Tensor | None, /) -> Tensor:
        """``n`` ids a context from the bits of ``counter``, int64 ``(2,)``."""

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
        counter: Counter | None = None,
    ) -> Tensor:
        """Independent draws with replacement.

        Args:
            n: how many.
            context: what came before, for a sampler that ``needs_context``.
            generator: where chance comes from, on the device of the sampler; torch's own
                otherwise.
            counter: instead of that, seed and step: two ints, or int64 ``(2,)`` on the device of
                the sampler, which nothing has to wait for.

        Returns:
            Class ids, int64 ``(n,)``; with a context ``(rows, n)``.
        """
        n, counter = self._checked(n, context, generator, counter)
        return self._draw(n, counter, context)

    @torch.no_grad()
    def sample_with_log_prob(
        self,
        n: int,
        *,
        context: Tensor | None = None,
        generator: torch.Generator | None = None,
        counter: Counter | None = None,
    ) -> Sampled:
        """What :meth:`sample` draws, and the log-probability of each draw in float32."""
        n, counter = self._checked(n, context, generator, counter)
        return self._draw_both(n, counter, context)

    def _draw_both(self, n: int, counter: Tensor, context: Tensor | None, /) -> Sampled:
        ids = self._draw(n, counter, context)
        return Sampled(ids, self._log_prob(ids, context).float())

    @torch.no_grad()
    def log_prob(
        self,
        ids: Tensor,
        context: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """The log-probability of classes, exactly that with which they are drawn.

        Args:
            ids: class ids, int64, of any shape; with a context ``(rows, n)`` or ``(rows,)``.
            context: what came before, for a sampler that ``needs_context``.
            dtype: of the result; it is computed in float64.
        """
        self._check_context(context)
        check_ids(self, "ids", ids)
        return self._log_prob(ids, context).to(dtype)

    @torch.no_grad()
    def log_complement(
        self,
        target: Tensor,
        context: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """log(1 − q(y)): the log-probability that a draw is not the target.

        Args:
            target: class ids, int64, of any shape; a negative one is none, and has 0.
            context: what came before, for a sampler that ``needs_context``.
            dtype: of the result; it is computed in float64.
        """
        self._check_context(context)
        check_ids(self, "target", target, least=None)
        return self._log_complement(target, context, dtype)

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
        check_ids(self, "target", target)
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
        counter: Counter | None = None,
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
            counter: as for :meth:`sample`.

        Returns:
            The ids, and for each the logarithm of how often it is expected. In "fixed" they are in
            the order of the classes.
        """
        if method not in METHODS:
            raise ValueError(f"method: expected one of {METHODS}, got {method!r}")
        inclusion = self._inclusion_of(n)
        ids = inclusion.draw(method, as_counter(counter, generator, self.device))
        return Drawn(ids, inclusion.log_prob(ids))

    @torch.no_grad()
    def log_expected(self, ids: Tensor, n: int) -> Tensor:
        """The log-probability that a class is among the draws of ``unique(n)``, in float32.

        Args:
            ids: class ids, int64, of any shape.
            n: how many different classes are drawn.
        """
        check_ids(self, "ids", ids)
        return self._inclusion_of(n).log_prob(ids)

    def _inclusion_of(self, n: int) -> Inclusion:
        if self.needs_context:
            raise ValueError(
                f"unique: expected a sampler without context, got {type(self).__name__}, whose "
                "draws are with replacement"
            )
        n = check_number("n", n, most=self.n_classes)
        if self._inclusion is None or not self._inclusion.fits(n, self.device):
            everything = torch.arange(self.n_classes, device=self.device)
            self._inclusion = Inclusion(self._log_prob(everything, None).exp(), n)
        return self._inclusion

    def config(self) -> dict[str, Any]:
        """The arguments that make such a sampler, as JSON can hold them; without its state."""
        return {"n_classes": self.n_classes}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """A sampler from what :meth:`config` gave; its state is still to be loaded."""
        return cls(**config)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.config().items())

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._inclusion = None
        super()._load_from_state_dict(*args, **kwargs)

    def _check_context(self, context: Any) -> None:
        if context is not None:
            raise ValueError(
                f"context: expected None, since {type(self).__name__} does not look at it, "
                f"got {type(context).__name__}"
            )

    def _checked(
        self,
        n: int,
        context: Tensor | None,
        generator: torch.Generator | None,
        counter: Counter | None,
    ) -> tuple[int, Tensor]:
        self._check_context(context)
        return check_number("n", n), as_counter(counter, generator, self.device)
