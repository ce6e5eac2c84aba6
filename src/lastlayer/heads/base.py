"""The contract of all heads."""

import inspect
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from lastlayer._checks import check_reduction
from lastlayer.heads._checks import check_count, check_generator, check_hidden, check_ignore_index
from lastlayer.heads._rows import row_chunks
from lastlayer.heads._sampling import COPIES as SAMPLING_COPIES
from lastlayer.heads._sampling import check_drawn, draw_classes
from lastlayer.heads._saving import load_head, save_head
from lastlayer.heads._top import COPIES as TOP_COPIES
from lastlayer.heads._top import top_classes


class TopK(NamedTuple):
    """The best classes of each row, the best one first."""

    values: Tensor
    """Log-probabilities, ``(*batch, k)``."""
    classes: Tensor
    """Their class ids, int64, ``(*batch, k)``."""


class Head(torch.nn.Module, ABC):
    """The end of a network: from hidden states ``(*batch, in_features)`` to one of many classes.

    Every head has a training loss, :meth:`forward`; normalised log-probabilities,
    :meth:`log_prob`; its best classes, :meth:`topk`; and random ones, :meth:`sample`. A head of
    your own defines the first two. It gets the other two from :meth:`log_prob` of a chunk of rows
    at a time, and may do better. :func:`lastlayer.testing.check_head` checks all that is promised
    here.

    Train through ``head(hidden, target)``, so that the hooks of DDP and FSDP fire.

    Args:
        in_features: how many numbers a hidden state has.
        n_classes: how many classes there are.
        ignore_index: rows with this target have loss 0 and no gradient; None where every target
            counts.
        reduction: "mean" over the rows that count, 0 where there are none; "sum" or "none". It is
            an attribute and can be changed at any time.
    """

    chunk_rows: int | str = "auto"

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        *,
        ignore_index: int | None = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        check_count("in_features", in_features)
        check_count("n_classes", n_classes)
        check_ignore_index(ignore_index)
        check_reduction(reduction)
        self.in_features, self.n_classes = in_features, n_classes
        self.ignore_index, self.reduction = ignore_index, reduction

    @abstractmethod
    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The training loss in float32, or in float64 from float64.

        Args:
            hidden: ``(*batch, in_features)``.
            target: class ids ``(*batch)``, int64.
        """

    @abstractmethod
    def log_prob(self, hidden: Tensor, classes: Tensor | None = None) -> Tensor:
        """Normalised log-probabilities in float32, or in float64 from float64.

        Args:
            hidden: ``(*batch, in_features)``.
            classes: class ids, int64: ``(*batch, k)``, or ``(k,)`` for every row; None for all
                classes.

        Returns:
            ``(*batch, n_classes)``, or ``(*batch, k)`` for chosen classes; -inf for a class of
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
        check_hidden(self, hidden)
        check_count("k", k, most=self.n_classes)
        rows = hidden.reshape(-1, self.in_features)
        chunks = row_chunks(rows, self.n_classes, self.chunk_rows, TOP_COPIES)
        best = [top_classes(self.log_prob(rows[part]), k) for part in chunks]
        values, classes = (torch.cat(each) for each in zip(*best, strict=True))
        shape = *hidden.shape[:-1], k
        return TopK(values.reshape(shape), classes.reshape(shape))

    @torch.no_grad()
    def sample(
        self, hidden: Tensor, n_samples: int = 1, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Independent draws from the probabilities of each row, with replacement.

        Args:
            hidden: ``(*batch, in_features)``.
            n_samples: draws a row.
            generator: where chance comes from, on the device of hidden; torch's own otherwise.

        Returns:
            Class ids ``(*batch, n_samples)``, int64. A row without probabilities, as a NaN
            makes it, is an error on a CPU and inside ``lastlayer.debug()``, and else all -1.
        """
        check_hidden(self, hidden)
        check_count("n_samples", n_samples)
        check_generator(generator, hidden)
        rows = hidden.reshape(-1, self.in_features)
        # All chance at once: what is drawn does not depend on the size of the chunks.
        chance = torch.rand(
            rows.shape[0], n_samples, dtype=torch.float64, device=rows.device, generator=generator
        )
        chunks = row_chunks(rows, self.n_classes, self.chunk_rows, SAMPLING_COPIES)
        drawn = [draw_classes(self.log_prob(rows[part]), chance[part]) for part in chunks]
        classes = torch.cat(drawn).reshape(*hidden.shape[:-1], n_samples)
        check_drawn(classes)
        return classes

    def config(self) -> dict[str, Any]:
        """The arguments that make such a head, as JSON can hold them; without its state."""
        return {
            "in_features": self.in_features,
            "n_classes": self.n_classes,
            "ignore_index": self.ignore_index,
            "reduction": self.reduction,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """A head from what :meth:`config` gave; its state is still to be loaded."""
        return cls(**config)

    def save(self, folder: str | Path) -> None:
        """Write ``model.safetensors``, the state, and ``config.json``, what :meth:`config` gives.

        Args:
            folder: made where it does not exist.
        """
        save_head(self, Path(folder))

    @classmethod
    def load(cls, folder: str | Path, *, device: str | torch.device = "cpu") -> Self:
        """The head that :meth:`save` wrote. Nothing is unpickled.

        Args:
            folder: where it was saved.
            device: where its state goes.

        Returns:
            A head of the class that was saved, which is this one or derives from it, so that
            ``Head.load`` takes them all. A class of your own has to be imported before.
        """
        return load_head(cls, Path(folder), torch.device(device))

    def _save_extra(self, folder: Path) -> None:
        """Write arguments of the constructor that JSON cannot hold; here there are none."""

    @classmethod
    def _load_extra(cls, folder: Path) -> dict[str, Any]:  # noqa: ARG003 — for heads that write
        """The arguments that :meth:`_save_extra` wrote, by name."""
        return {}

    def extra_repr(self) -> str:
        """What the constructor takes by position, and options that are not as by default."""
        taken = inspect.signature(type(self)).parameters
        return ", ".join(
            f"{name}={value!r}"
            for name, value in self.config().items()
            if name not in taken
            or taken[name].kind is not inspect.Parameter.KEYWORD_ONLY
            or taken[name].default != value
        )
