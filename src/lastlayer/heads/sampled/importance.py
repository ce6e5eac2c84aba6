"""Self-normalised importance sampling, with a fixed proposal or one that follows the model."""

import math
from collections.abc import Sequence
from typing import Any, Self, Unpack

import numpy as np
import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer._checks import check_int, check_positive, check_tensor
from lastlayer._torch import accumulation_dtype, in_backward, in_dtype
from lastlayer.fused import linear_cross_entropy
from lastlayer.fused.sampled import Correction, Rule, sampled_loss
from lastlayer.heads.recipes import Recipe, sampled_recipe
from lastlayer.heads.sampled.base import SampledHead, SampledOptions
from lastlayer.samplers import AdaptiveNGram, Sampler, fork

SELF_NORMALISED = Rule(with_target=False, drop_hits=False)
# Blocks after which a row gives up where max_samples does not say.
_BLOCKS = 32
# Ids and log-probabilities of some draws.
_Block = tuple[Tensor, Tensor]
# Blocks that rows with draws of their own take in a first step before the host looks whether they
# have enough; after that as many again.
_BLOCKS_AT_FIRST = 4


class ImportanceSampling(SampledHead):
    r"""A softmax whose gradient is estimated from draws with their weights normalised.

    .. math:: \nabla L \approx -\nabla \theta_y
              + \frac{1}{R} \sum_{j=1}^m r_j \nabla \theta_{v_j},
              \qquad r_j = \frac{e^{\theta_{v_j}}}{q(v_j)}, \quad R = \sum_j r_j

    The loss has this gradient: it is :math:`\log \frac{R}{m} - \theta_y`, the cross entropy with
    its normaliser estimated. :math:`R / m` is unbiased, its logarithm is too low by about half of
    its relative variance; both biases fall as 1/m. A loss can be below 0, where the target has
    more than the estimated whole.

    How much the draws of a row are worth is its effective sample size, :math:`R^2 / \sum_j r_j^2`:
    m where all weights are equal, 1 where one has all. ``head.ess`` has that of the last training
    step. With ``target_ess`` each row goes on drawing, a block of ``n_samples`` at a time, until
    it is reached; a row that has not reached it after ``max_samples`` takes all classes instead.

    Choose :class:`SampledSoftmax` where a fixed number of samples will do: it counts the target
    with certainty, which is as good here and never below 0. Choose this one to control the
    quality of each row's estimate.

    Cost: as :class:`SampledSoftmax`. With ``target_ess`` a fourth product, the host waits once per
    block, and ``torch.compile(fullgraph=True)`` does not take it.

    Args:
        in_features: size of the hidden state.
        n_classes: number of classes.
        sampler: what is drawn from, such as ``samplers.Unigram(counts)``.
        n_samples: number of classes drawn in a step, or in a block.
        target_ess: the effective sample size that each row is to reach; None for one block.
        max_samples: draws after which a row takes all classes; None for 32 blocks. It is rounded
            up to whole blocks.
        options: ``bias``, ``sparse``, ``seed``, ``per_rank``, ``ignore_index``, ``reduction``,
            ``chunk_rows``, ``device`` and ``dtype``, as of :class:`SampledSoftmax`. Where a row
            takes all classes, row-sparse gradients have every row.

    Example:
        >>> import torch
        >>> from lastlayer import samplers
        >>> sampler = samplers.Unigram(1.0 / torch.arange(1, 1001))
        >>> head = ImportanceSampling(16, 1000, sampler, 50, target_ess=100)
        >>> hidden, target = torch.randn(8, 16), torch.randint(1000, (8,))
        >>> head(hidden, target).backward()
        >>> bool((head.ess >= 100).all())
        True

    Reference:
        Yoshua Bengio and Jean-Sébastien Senécal, Quick training of probabilistic neural nets by
        importance sampling, AISTATS 2003.
    """

    recipes: tuple[Recipe, ...] = (
        sampled_recipe("importance", "self-normalised importance sampling", rank=33),
    )
    n_drawn: Tensor | None
    """Draws of each row in the last training step, ``(n,)``; None before."""
    took_all: Tensor | None
    """Which rows took all classes then, bool ``(n,)``."""

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        sampler: Sampler | None = None,
        n_samples: int = 1024,
        *,
        target_ess: float | None = None,
        max_samples: int | None = None,
        **options: Unpack[SampledOptions],
    ) -> None:
        super().__init__(in_features, n_classes, sampler, n_samples, **options)
        _check_stopping(target_ess, self.n_samples, max_samples)
        self.target_ess, self.max_samples = target_ess, max_samples
        self.n_drawn = self.took_all = None

    def _correction(self) -> Correction | None:
        if self.target_ess is not None:
            return None
        return Correction(SELF_NORMALISED, less=math.log(self.n_samples))

    def _loss_of_step(
        self, rows: Tensor, target: Tensor, rng_counter: Tensor, *_given: Tensor
    ) -> Tensor:
        if self.target_ess is not None:
            drawn = self._blocks(rows, target, rng_counter)
            return self._loss_of_blocks(rows, target, *drawn)
        ids, log_prob = self._draw(rng_counter, rows.dtype)
        log_expected = log_prob + math.log(self.n_samples)
        return self._compare(rows, target, ids, log_expected, SELF_NORMALISED)

    @torch.no_grad()
    def _blocks(
        self, rows: Tensor, target: Tensor, rng_counter: Tensor
    ) -> tuple[list[_Block], Tensor, Tensor]:
        """Draw a block at a time for the rows that have not reached ``target_ess``.

        The host waits once per block, to know which rows go on.

        Returns:
            The blocks, how many of them each row used, ``(n,)``, and which rows did not reach it;
            a row that does not count used none.
        """
        enough, counts = self.target_ess or 0.0, (target >= 0).any(-1)
        used = torch.zeros_like(counts, dtype=torch.int64)
        log_sum = rows.new_full(rows.shape[:1], -torch.inf, dtype=accumulation_dtype(rows.dtype))
        log_squares, ess = log_sum.clone(), torch.zeros_like(log_sum)
        blocks: list[_Block] = []
        some = counts.nonzero().squeeze(1)
        while len(some) and len(blocks) < self._most_blocks():
            counter = fork(rng_counter, len(blocks))
            block, more, squares = self._block(counter, rows[some], target[some])
            blocks.append(block)
            log_sum[some] = torch.logaddexp(log_sum[some], more)
            log_squares[some] = torch.logaddexp(log_squares[some], squares)
            used[some] += 1
            ess = torch.where(log_sum == -torch.inf, 0.0, (2 * log_sum - log_squares).exp())
            # A NaN will not become a number with more draws.
            some = some[ess[some] < enough]
        took_all = (ess < enough) & counts
        self.ess, self.n_drawn, self.took_all = ess, used * self.n_samples, took_all
        return blocks, used, took_all

    def _most_blocks(self) -> int:
        return _BLOCKS if self.max_samples is None else -(-self.max_samples // self.n_samples)

    def _block(
        self, rng_counter: Tensor, rows: Tensor, target: Tensor
    ) -> tuple[_Block, Tensor, Tensor]:
        """Ids and log-probabilities of a block; log Σ r and log Σ r² of rows, up to a constant."""
        ids, log_prob = self._draw(rng_counter, rows.dtype)
        # The loss is log Σ r less the target's score, which is the same in every block.
        log_sum, ess = sampled_loss(
            rows, self.weight, self.bias, target, ids, log_prob, SELF_NORMALISED,
            reduction="none", chunk_rows=self.chunk_rows,
        )  # fmt: skip
        return (ids, log_prob), log_sum, 2 * log_sum - ess.log()

    def _loss_of_blocks(
        self, rows: Tensor, target: Tensor, blocks: list[_Block], used: Tensor, took_all: Tensor
    ) -> Tensor:
        """Rows with the same number of blocks together; those that gave up by all classes."""
        groups: list[tuple[Tensor, ...]] = []
        # A row that took all classes is in no group.
        counts = torch.where(took_all, 0, used)
        for n_blocks in counts.unique().tolist():
            if n_blocks:
                ids, log_prob = (torch.cat(each) for each in zip(*blocks[:n_blocks], strict=True))
                some = (counts == n_blocks).nonzero().squeeze(1)
                groups.append((some, ids, log_prob + math.log(n_blocks * self.n_samples)))
        return self._loss_of_groups(rows, target, groups, took_all)

    def _loss_of_groups(
        self, rows: Tensor, target: Tensor, groups: Sequence[tuple[Tensor, ...]], took_all: Tensor
    ) -> Tensor:
        """The loss of groups of rows: which ones, their draws, and what these are expected."""
        alone = self.reduction == "none"
        how: dict[str, Any] = {"reduction": "none" if alone else "sum"}
        how["chunk_rows"] = self.chunk_rows
        parts: list[tuple[Tensor, Tensor]] = []

        def compare(
            some: Tensor, ids: Tensor, log_expected: Tensor, scores: Tensor | None = None
        ) -> None:
            loss, _ = sampled_loss(
                rows[some], self.weight, self.bias, target[some], ids, log_expected,
                SELF_NORMALISED, scores=scores, sparse=self.sparse, **how,
            )  # fmt: skip
            parts.append((some, loss))

        for group in groups:
            compare(*group)
        some = took_all.nonzero().squeeze(1)
        if len(some) and (self.sparse or target.shape[1] > 1):
            # All classes as if they were drawn: the gradient is row-sparse like that of the others.
            everything = torch.arange(self.n_classes, device=rows.device)
            compare(some, everything, torch.zeros_like(everything, dtype=torch.float32))
        elif len(some):
            bias = None if self.bias is None else in_dtype(self.bias, rows.dtype)
            loss = linear_cross_entropy(
                rows[some], in_dtype(self.weight, rows.dtype), target[some].squeeze(1), bias,
                ignore_index=None, **how,
            )  # fmt: skip
            parts.append((some, loss))
        loss = rows.new_zeros(len(rows) if alone else (), dtype=accumulation_dtype(rows.dtype))
        for some, of_some in parts:
            loss = loss.index_copy(0, some, of_some) if alone else loss + of_some
        if self.reduction == "mean":
            loss = loss / (target >= 0).any(-1).sum().clamp(min=1)
        if not parts and torch.is_grad_enabled():
            # No row counts: the gradient is 0, but there is one.
            for each in (rows, *self.parameters()):
                loss = loss + each[:0].sum()
        return loss


def _check_stopping(target_ess: Any, n_samples: int, max_samples: Any) -> None:
    """A number to reach, and draws after which a row gives up: a block at least."""
    if target_ess is None:
        if max_samples is not None:
            raise ValueError(
                f"max_samples: expected None without target_ess, got {max_samples}; every row "
                "draws n_samples then"
            )
        return
    check_positive("target_ess", target_ess)
    most = n_samples * _BLOCKS if max_samples is None else check_int("max_samples", max_samples)
    if most < n_samples:
        raise ValueError(
            f"max_samples: expected at least n_samples={n_samples}, one block, got {most}"
        )
    if target_ess > most:
        raise ValueError(
            f"target_ess: expected at most max_samples={most}, which is reached where all weights "
            f"are equal, got {target_ess}"
        )


class AdaptiveImportanceSampling(ImportanceSampling):
    r"""Importance sampling whose proposal is an n-gram model that learns from the network.

    A fixed proposal falls behind as the network trains: weights become uneven, and more and more
    draws are needed for the same effective sample size. Here each row draws from
    :class:`lastlayer.samplers.AdaptiveNGram` given the words before it, until its effective sample
    size is ``target_ess``; the scores of what it drew then move the proposal of that context
    towards the network's own probabilities. Nothing beyond those classes has to be scored.

    The estimator, the stopping and the fall-back to all classes are those of
    :class:`ImportanceSampling`. ``forward`` takes the context beside hidden and target; in eval
    mode it is not looked at, and the loss is exact. Under ``torch.no_grad()`` the proposal does
    not learn.

    Choose it for language models with many classes where the last one or two words say much about
    the next. Every row has its own draws, which takes more memory traffic per draw than one
    product for all rows: it pays where few draws are enough.

    Cost: rows × draws × in_features, three times in a training step; the host waits once, and again
    where the rows need more blocks than in the last step. ``torch.compile(fullgraph=True)`` does
    not take it.

    Args:
        in_features: size of the hidden state.
        n_classes: number of classes.
        counts: how frequent each class is, one number per class, for the unigram of the proposal.
        order: 2 for unigram and bigram, 3 for the trigram as well.
        target_ess: the effective sample size that each row is to reach.
        n_samples: draws in a block.
        max_samples: draws after which a row takes all classes; None for 32 blocks.
        contexts: how many contexts of each length the proposal remembers.
        width: how many classes it remembers of each.
        rate: how far a step moves the proposal of a context.
        options: ``bias``, ``sparse``, ``seed``, ``per_rank``, ``ignore_index``, ``reduction``,
            ``chunk_rows``, ``device`` and ``dtype``, as of :class:`ImportanceSampling`. Each
            process has a proposal of its own, which learns from its own rows.

    Example:
        >>> import torch
        >>> counts = 1.0 / torch.arange(1, 1001)
        >>> head = AdaptiveImportanceSampling(16, 1000, counts, target_ess=20)
        >>> hidden, words = torch.randn(8, 16), torch.randint(1000, (9,))
        >>> loss = head(hidden, words[1:], context=words[:-1, None])
        >>> bool((head.ess >= 20).all() or head.took_all.any())
        True

    Reference:
        Yoshua Bengio and Jean-Sébastien Senécal, Adaptive importance sampling to accelerate
        training of a neural probabilistic language model, IEEE Transactions on Neural Networks
        19(4), 2008.
    """

    recipes = (
        Recipe(
            "adaptive_importance", "importance sampling whose proposal learns",
            defaults={"sparse": True}, rank=34,
            from_data=lambda data, _given: {"counts": data.positive_counts()},
        ),
    )  # fmt: skip
    draws_for_each_row = True
    sampler: AdaptiveNGram

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        counts: Any,
        *,
        order: int = 2,
        target_ess: float = 50.0,
        n_samples: int = 50,
        max_samples: int | None = None,
        contexts: int = 16_384,
        width: int = 256,
        rate: float = 0.1,
        **options: Unpack[SampledOptions],
    ) -> None:
        sampler = AdaptiveNGram(counts, order, contexts=contexts, width=width, rate=rate)
        super().__init__(
            in_features, n_classes, sampler, n_samples, target_ess=target_ess,
            max_samples=max_samples, **options,
        )  # fmt: skip
        self._usual_blocks = _BLOCKS_AT_FIRST

    def _set_sampler(self, sampler: Any) -> None:
        if sampler.n_classes != self.n_classes:
            raise ValueError(
                f"counts: expected shape ({self.n_classes},), one number per class of the head, "
                f"got ({sampler.n_classes},)"
            )
        self.sampler = sampler

    def forward(self, hidden: Tensor, target: Tensor, context: Tensor | None = None) -> Tensor:
        """In training mode the estimated loss; in eval mode the exact cross entropy.

        Args:
            hidden: ``(*batch, in_features)``.
            target: class ids ``(*batch)`` or ``(*batch, p)``, of any integer dtype.
            context: the words before, ``(*batch, order - 1)``, the nearest one last, -1 for none;
                None where nothing is known, which draws from the unigram and teaches nothing.
        """
        self._check_hidden(hidden)
        order = self.sampler.order
        if context is not None:
            check_tensor("context", context)
            expected = (*hidden.shape[:-1], order - 1)
            if context.shape != expected:
                raise ValueError(
                    f"context: expected shape {expected}, the words before for order {order}, the "
                    f"nearest one last, got {tuple(context.shape)}"
                )
        if not self.training:
            return self._exact_loss(hidden, target)
        if in_backward():
            raise RuntimeError(
                "AdaptiveImportanceSampling cannot be recomputed by torch.utils.checkpoint: its "
                "proposal has learned from the first pass; call it outside of what is checkpointed"
            )
        rows, ids = self._rows(hidden, self._check_targets(hidden, target))
        given = () if context is None else (self._words(context),)
        loss = self._sampled_loss(rows, ids, *given)
        return loss.reshape(hidden.shape[:-1]) if self.reduction == "none" else loss

    def _words(self, context: Tensor) -> Tensor:
        width = self.sampler.order - 1
        return self.sampler._check_context(context.reshape(-1, width))

    def _loss_of_step(
        self, rows: Tensor, target: Tensor, rng_counter: Tensor, *given: Tensor
    ) -> Tensor:
        words = given[0] if given else target.new_full((len(rows), self.sampler.order - 1), -1)
        drawn, n_drawn, took_all = self._drawn(rows, target, words, rng_counter)
        loss = self._loss_of_drawn(rows, target, drawn, n_drawn, took_all)
        ids, _, scores = drawn
        # Without a context there is nothing to learn.
        if given and ids.numel() and torch.is_grad_enabled():
            own = kernels.products.scores(
                "auto", rows.detach(), self.weight.detach(), self.bias, target
            )
            scored = torch.cat([ids, target], 1), torch.cat([scores, own], 1)
            self.sampler._learn(words, *scored)
        return loss

    @torch.no_grad()
    def _drawn(
        self, rows: Tensor, target: Tensor, words: Tensor, rng_counter: Tensor
    ) -> tuple[list[Tensor], Tensor, Tensor | None]:
        """Ids, log-probabilities and scores of all draws, as many columns as the most of a row.

        A row that has fewer has -1, inf and 0 in the rest. The host waits after as many blocks as
        the last step took, and whenever there are twice as many.

        Returns:
            These three; how many draws each row has; which rows gave up, None if none did.
        """
        enough, most, n = self.target_ess or 0.0, self._most_blocks(), self.n_samples
        counts, dtype = (target >= 0).any(-1), accumulation_dtype(rows.dtype)
        used, ess = counts.long() - 1, torch.zeros_like(counts, dtype=dtype)
        sums = ess.new_zeros(len(rows), 3)
        sums[:, :1] = -torch.inf
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        first, reached = 0, 0
        while reached == first < most:
            blocks = min(max(first, self._usual_blocks), most - first)
            parts.append(kernels.context_lists.draw_until_(
                "auto", rows, self.weight, self.bias, words, rng_counter, self.sampler.proposal(),
                used, ess, sums, first, blocks, n, enough,
            ))  # fmt: skip
            first += blocks
            reached = int(used.max()) if len(rows) else 0
        # The next step will need about as many; one more, so that it seldom has to go on.
        self._usual_blocks = max(0, reached) + 1
        took_all = (ess < enough) & counts
        self.ess, self.n_drawn, self.took_all = ess, used.clamp_(min=0) * n, took_all
        width = max(0, reached) * n
        joined = (torch.cat(each, 1) for each in zip(*parts, strict=True))
        drawn = [each[:, :width].contiguous() for each in (joined if len(parts) > 1 else parts[0])]
        gave_up = reached == most and bool(took_all.any())
        return drawn, self.n_drawn, took_all if gave_up else None

    def _loss_of_drawn(
        self, rows: Tensor, target: Tensor, drawn: list[Tensor], n_drawn: Tensor,
        took_all: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """All rows together; without those that gave up, which take all classes."""
        ids, log_prob, scores = drawn
        expected = log_prob.add_(n_drawn.clamp(min=1).to(log_prob.dtype).log().unsqueeze(1))
        if took_all is None and ids.numel():
            loss, _ = sampled_loss(
                rows, self.weight, self.bias, target, ids, expected, SELF_NORMALISED,
                scores=scores, reduction=self.reduction, sparse=self.sparse,
            )  # fmt: skip
            return loss
        took_all = torch.zeros_like(n_drawn, dtype=torch.bool) if took_all is None else took_all
        some = ((n_drawn > 0) & ~took_all).nonzero().squeeze(1)
        groups = [(some, ids[some], expected[some], scores[some])] if len(some) else []
        return self._loss_of_groups(rows, target, groups, took_all)

    def config(self) -> dict[str, Any]:
        sampler = self.sampler.config()
        names = ("counts", "order", "contexts", "width", "rate")
        return {**super().config(), **{name: sampler[name] for name in names}}

    def _saved_config(self, config: dict[str, Any]) -> dict[str, Any]:
        # The counts are part of the sampler's state.
        return {name: value for name, value in config.items() if name != "counts"}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        return cls(counts=np.ones(config["n_classes"]), **config)
