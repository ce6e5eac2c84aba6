"""An adaptive n-gram sampler, which learns from the scores of the classes it has drawn."""

from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from lastlayer._checks import check_device, check_int, check_not_negative, check_scores, check_share
from lastlayer._tables import TabledModule
from lastlayer.kernels import context_lists
from lastlayer.kernels.context_lists import NO_KEY, PARTS, SHARES, UNUSED, WAYS
from lastlayer.samplers.base import MOST_CLASSES, Sampled, Sampler
from lastlayer.samplers.unigram import Unigram


class AdaptiveNGram(Sampler):
    """A mixture of unigram, bigram and trigram that follows the model during training.

    q(w | h) = Σ_k α_k q_k(w | the last k − 1 words). The unigram is given by the counts. The others
    start equal to the unigram, and learn in :meth:`update` from the scores of the classes that were
    drawn for a row. With W the set of these classes and p the softmax of their scores,

        q_k(w) ← (1 − λ) q_k(w) + λ q_k(W) p(w)   for w in W.

    The total probability of W does not change, so q_k stays normalised without an update of any
    other class. The mixture α follows the gradient of KL(p ‖ q) within W.

    Contexts are stored in a hash table on the device, each with a list of classes; classes that are
    not in the list have their unigram probability. A full list keeps the classes that differ most
    from the unigram. A context that does not fit into the hash table uses the unigram; increase
    ``contexts`` then. Probabilities are stored as integers, so :meth:`Sampler.log_prob` is exact.

    Args:
        counts: frequency of each class, one number per class, at least 0, not all 0.
        order: 2 for a mixture of unigram and bigram, 3 to add the trigram.
        contexts: number of contexts of each length that have a list; choose slightly more than
            occur.
        width: number of classes in a list. A context takes 12 bytes per class.
        rate: λ, the step size of an update.
        mixture_rate: the step size of the mixture.

    Reference:
        Yoshua Bengio and Jean-Sébastien Senécal, Adaptive importance sampling to accelerate
        training of a neural probabilistic language model, 2008.

    Example:
        >>> import torch
        >>> from lastlayer import samplers
        >>> sampler = samplers.AdaptiveNGram([1, 1, 1, 1], rate=0.5)
        >>> context = torch.tensor([[3]])
        >>> ids, scores = torch.tensor([[0, 1]]), torch.tensor([[2.0, 0.0]])
        >>> sampler.update(context, ids, scores)
        >>> sampler.log_prob(torch.arange(4)[None], context).exp()
        tensor([[0.2976, 0.2024, 0.2500, 0.2500]])
    """

    needs_context = True
    mixture: Tensor

    def __init__(
        self,
        counts: Any,
        order: int = 2,
        *,
        contexts: int = 16_384,
        width: int = 256,
        rate: float = 0.1,
        mixture_rate: float = 0.1,
    ) -> None:
        unigram = Unigram(counts)
        super().__init__(check_int("n_classes", unigram.n_classes, most=UNUSED))
        self.order = check_int("order", order, least=2, most=3)
        self.contexts = check_int("contexts", contexts, most=MOST_CLASSES)
        self.width = check_int("width", width, most=MOST_CLASSES)
        self.rate = check_share("rate", rate)
        self.mixture_rate = check_not_negative("mixture_rate", mixture_rate)
        self.unigram = unigram
        self.lists = torch.nn.ModuleList(
            ContextLists(self.contexts, self.width) for _ in range(self.order - 1)
        )
        parts = torch.full((self.order,), PARTS // self.order, device="cpu")
        parts[0] += PARTS - int(parts.sum())
        self.register_buffer("mixture", parts)

    def _draw(self, n: int, rng_counter: Tensor, context: Tensor | None) -> Tensor:
        return self._draw_both(n, rng_counter, context).ids

    def _draw_both(self, n: int, rng_counter: Tensor, context: Tensor | None) -> Sampled:
        return Sampled(*context_lists.draw("auto", context, rng_counter, self.proposal(), n))

    def _log_prob(self, ids: Tensor, context: Tensor | None) -> Tensor:
        rows = 0 if context is None else len(context)
        if ids.dim() not in (1, 2) or len(ids) != rows:
            raise ValueError(
                f"ids: expected shape ({rows}, n) or ({rows},), one row per context, "
                f"got {tuple(ids.shape)}"
            )
        wide = ids if ids.dim() == 2 else ids.unsqueeze(1)
        made: Tensor = context_lists.log_prob("auto", context, wide, self.proposal())
        return made.view(ids.shape)

    def proposal(self) -> list[Tensor]:
        """The tensors of the sampler, in the order of :mod:`lastlayer.kernels.context_lists`."""
        lists = [each for part in self.lists for each in part.buffers()]
        return [self.mixture, self.unigram.table, self.unigram.weight, *lists]

    def _check_state(self) -> None:
        for part in self.lists:
            classes: Tensor = part.get_buffer("classes")
            if bool(((classes < 0) | ((classes >= self.n_classes) & (classes != UNUSED))).any()):
                raise ValueError(
                    f"classes: expected class ids from 0 to {self.n_classes - 1} in lists of "
                    "contexts, got others"
                )

    @torch.no_grad()
    def update(self, context: Tensor, ids: Tensor, scores: Tensor) -> None:
        """Move the proposal towards the model, from the scores of a few classes per row.

        If several rows have the same context, only the last one is used.

        Args:
            context: the preceding words, int64 ``(rows, order - 1)``; -1 for no word.
            ids: the classes that were scored, ``(rows, m)``, or ``(m,)`` for all rows. Duplicates
                count once.
            scores: the scores of the model, ``(rows, m)``.
        """
        words, ids = self._check_context(context), self._check_ids("ids", ids)
        check_scores(scores)
        check_device("scores", scores, self.mixture, "the sampler")
        rows = len(words)
        if ids.dim() == 1:
            ids = ids.expand(rows, -1)
        if ids.shape != scores.shape or len(ids) != rows or ids.dim() != 2 or not ids.shape[1]:
            raise ValueError(
                f"scores: expected shape ({rows}, m), one score for each of ids "
                f"{tuple(ids.shape)}, got {tuple(scores.shape)}"
            )
        if rows:
            self._learn(words, ids, scores)

    def _learn(self, context: Tensor, ids: Tensor, scores: Tensor) -> None:
        """:meth:`update` without checks of its arguments; negative ids are padding."""
        rates = self.rate, self.mixture_rate
        context_lists.learn_("auto", context, ids, scores, self.proposal(), *rates)

    def _check_context(self, context: Any) -> Tensor:
        words = self._check_ids("context", context, True)
        if words.dim() != 2 or words.shape[1] != self.order - 1:
            raise ValueError(
                f"context: expected shape (rows, {self.order - 1}), the words before for order "
                f"{self.order}, the nearest one last, got {tuple(words.shape)}"
            )
        return words

    def config(self) -> dict[str, Any]:
        config = {**self._saved_config(), "counts": self.unigram.config()["counts"]}
        del config["n_classes"]
        return config

    def _saved_config(self) -> dict[str, Any]:
        names = ("n_classes", "order", "contexts", "width", "rate", "mixture_rate")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        others = {name: value for name, value in config.items() if name != "n_classes"}
        return cls(np.ones(config["n_classes"]), **others)


class ContextLists(TabledModule):
    """A hash table from contexts to short lists of classes, stored as integers on the device.

    A list redistributes the total unigram probability of its classes among them; all other classes
    keep their unigram probability. So the distribution is always normalised. A context without a
    list has the unigram. See :mod:`lastlayer.kernels.context_lists` for the kernels.

    Args:
        contexts: minimum number of slots; the number of buckets is rounded up to a power of two.
        width: length of a list.
    """

    keys: Tensor
    classes: Tensor
    end: Tensor
    mass: Tensor

    def __init__(self, contexts: int, width: int) -> None:
        super().__init__()
        self.bucket_bits = ((contexts + WAYS - 1) // WAYS - 1).bit_length()
        places = WAYS << self.bucket_bits
        # One more slot for contexts that were not found; its list stays empty.
        self.register_buffer("keys", torch.full((places + 1,), NO_KEY, device="cpu"))
        empty = torch.full((places + 1, width), UNUSED, dtype=torch.int32, device="cpu")
        self.register_buffer("classes", empty)
        self.register_buffer("end", torch.full((places + 1, width), SHARES, device="cpu"))
        mass = torch.zeros(places + 1, dtype=torch.int64, device="cpu")
        self.register_buffer("mass", mass)
