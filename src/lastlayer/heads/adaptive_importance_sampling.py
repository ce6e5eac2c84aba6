"""Importance sampling from a proposal that follows the model while it trains."""

import math
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer._torch import accumulation_dtype
from lastlayer.heads._checks import check_hidden
from lastlayer.heads._ess import RunningWeights, Stopped, draw_until
from lastlayer.heads._ess_loss import Options, loss_of_groups
from lastlayer.heads._sampled import Batch, SampledOptions
from lastlayer.heads._sampled_checks import check_adaptive_sampler, check_context, check_targets
from lastlayer.heads._sampled_loss import Draws, SampledProblem
from lastlayer.heads.importance_sampling import ImportanceSampling
from lastlayer.samplers import AdaptiveNGram, fork


class AdaptiveImportanceSampling(ImportanceSampling):
    r"""Importance sampling whose proposal is an n-gram model that learns from the network.

    A fixed proposal falls behind as the network trains: weights become uneven, and more and more
    draws are needed for the same effective sample size. Here each row draws from
    :class:`lastlayer.samplers.AdaptiveNGram` given the words before it, until its effective sample
    size is ``target_ess``; the scores of what it drew then move the proposal of that context
    towards the network's own probabilities. Nothing beyond those classes has to be scored.

    The estimator, the stopping and the fall-back to all classes are those of
    :class:`ImportanceSampling`. ``forward`` takes the context beside hidden and target; in eval
    mode it is not looked at, and the loss is exact.

    Choose it for language models with many classes where the last one or two words say much about
    the next. Every row has its own draws, which takes more memory traffic a draw than one product
    for all rows: it pays where few draws are enough.

    Cost: rows × draws × in_features, three times in a training step; the host waits once a block.
    ``torch.compile(fullgraph=True)`` does not take it.

    Args:
        in_features: how many numbers a hidden state has.
        n_classes: how many classes there are.
        counts: how frequent each class is, one number a class, for the unigram of the proposal.
        order: 2 for unigram and bigram, 3 for the trigram as well.
        target_ess: the effective sample size that each row is to reach.
        n_samples: draws in a block.
        max_samples: draws after which a row takes all classes; None for 32 blocks.
        contexts: how many contexts of each length the proposal remembers.
        width: how many classes it remembers of each.
        rate: how far a step moves the proposal of a context.
        bias: whether each class has a bias.
        sparse: whether gradients of weight and bias are row-sparse.
        seed: of the draws.
        per_rank: whether the processes of ``torch.distributed`` draw different classes. Each has a
            proposal of its own in any case, which learns from its own rows.
        ignore_index: rows with this target count for nothing; None where every target counts.
        reduction: "mean" over the rows that count, "sum" or "none".
        chunk_rows: rows of scores held at a time where all classes are taken, "auto" or "low".
        device: where the parameters are made.
        dtype: of the parameters.

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
            in_features,
            n_classes,
            sampler,
            n_samples,
            target_ess=target_ess,
            max_samples=max_samples,
            **options,
        )

    def _check_sampler(self) -> None:
        check_adaptive_sampler(self.sampler, self.n_classes)

    def forward(self, hidden: Tensor, target: Tensor, context: Tensor | None = None) -> Tensor:
        """In training mode the estimated loss; in eval mode the exact cross entropy.

        Args:
            hidden: ``(*batch, in_features)``.
            target: class ids ``(*batch)`` or ``(*batch, p)``, int64.
            context: the words before, ``(*batch, order - 1)``, the nearest one last, -1 for none;
                None where nothing is known, which draws from the unigram and teaches nothing.
        """
        check_hidden(self, hidden)
        check_targets(self, hidden, target)
        if context is not None:
            check_context(hidden, context, self.sampler.order)
        if not self.training:
            return self._exact_loss(hidden, target)
        if self._steps.is_recomputed():
            raise RuntimeError(
                "AdaptiveImportanceSampling cannot be recomputed by torch.utils.checkpoint: its "
                "proposal has learned from the first pass; call it outside of what is checkpointed"
            )
        batch = self._batch(hidden, target)
        shape = batch.hidden.shape[0], self.sampler.order - 1
        words = batch.target.new_full(shape, -1) if context is None else context.reshape(shape)
        loss = self._adapted_loss(batch, words, self._counter())
        self._count_step()
        return loss

    def _adapted_loss(self, batch: Batch, context: Tensor, counter: Tensor) -> Tensor:
        most = self._most_blocks()
        n = batch.hidden.shape[0]
        drawn = _Drawn(n, batch.hidden)
        weights = RunningWeights(
            n, batch.hidden.new_empty(0, dtype=accumulation_dtype(batch.hidden.dtype))
        )

        @torch.no_grad()
        def add_block(block: int, rows: Tensor) -> None:
            ids, log_prob = self.sampler.sample_with_log_prob(
                self.n_samples, context=context[rows], counter=fork(counter, block)
            )
            scores = self._scores(batch.hidden[rows], ids)
            drawn.add(rows, ids, log_prob, scores)
            x = scores - log_prob
            weights.add(rows, torch.logsumexp(x, -1), torch.logsumexp(2 * x, -1))

        counted = (batch.target >= 0).any(-1)
        stopped = draw_until(self.target_ess or 0.0, most, counted, weights, add_block)
        problem = self._problem(batch, Draws(batch.target[:0, 0], weights.ess[:0]))

        def draws_of(used: int, rows: Tensor) -> Draws:
            ids, log_prob, _ = drawn.of(used, rows)
            return Draws(ids, log_prob + math.log(used * self.n_samples))

        loss = loss_of_groups(
            problem, stopped, draws_of, Options(self.reduction, self.sparse, self.chunk_rows)
        )
        self._teach(problem, context, stopped, drawn)
        self._keep(stopped)
        return loss.reshape(batch.shape) if self.reduction == "none" else loss

    @torch.no_grad()
    def _teach(
        self, problem: SampledProblem, context: Tensor, stopped: Stopped, drawn: "_Drawn"
    ) -> None:
        """Moves the proposal towards the network, by what each row has scored."""
        for used in stopped.blocks.unique().tolist():
            rows = (stopped.blocks == used).nonzero().squeeze(1)
            if used:
                ids, _, scores = drawn.of(used, rows)
                target = problem.target[rows]
                # A place without a target names one that is there: a class counts once.
                target = torch.where(target < 0, target.amax(-1, keepdim=True), target)
                of_target = self._scores(problem.hidden[rows], target)
                self.sampler.update(
                    context[rows], torch.cat([ids, target], 1), torch.cat([scores, of_target], 1)
                )

    def _scores(self, hidden: Tensor, ids: Tensor) -> Tensor:
        made: Tensor = kernels.products.scores(
            "auto", hidden.detach(), self.weight.detach(), self.bias, ids
        )
        return made

    def config(self) -> dict[str, Any]:
        config = super().config()
        sampler = config.pop("sampler")["arguments"]
        names = ("order", "contexts", "width", "rate")
        return {**config, **{name: sampler[name] for name in names}}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "AdaptiveImportanceSampling":
        # The counts are part of the sampler's state.
        return cls(counts=np.ones(config["n_classes"]), **config)


class _Drawn:
    """What was drawn for each row, a block after the other."""

    def __init__(self, n_rows: int, hidden: Tensor) -> None:
        self._nowhere = torch.zeros(n_rows, dtype=torch.int64, device=hidden.device)
        self._blocks: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def add(self, rows: Tensor, ids: Tensor, log_prob: Tensor, scores: Tensor) -> None:
        """A block for some rows, ``(rows, n)`` each."""
        place = self._nowhere.clone()
        place[rows] = torch.arange(len(rows), device=rows.device)
        self._blocks.append((place, ids, log_prob, scores))

    def of(self, used: int, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, log-probabilities and scores of the first blocks, ``(rows, used * n)``."""
        some = [tuple(each[place[rows]] for each in block) for place, *block in self._blocks[:used]]
        ids, log_prob, scores = (torch.cat(each, 1) for each in zip(*some, strict=True))
        return ids, log_prob, scores
