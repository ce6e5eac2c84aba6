"""The self-normalised importance sampling of Bengio and Senécal."""

import math
from typing import Any, Unpack

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.heads._ess import BLOCKS, RunningWeights, Stopped, check_stopping, draw_until
from lastlayer.heads._ess_loss import SELF_NORMALISED, Options, loss_of_groups
from lastlayer.heads._sampled import Batch, SampledHead, SampledOptions
from lastlayer.heads._sampled_loss import Draws, SampledProblem, sampled_loss
from lastlayer.samplers import Sampler, fork


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

    Cost: as :class:`SampledSoftmax`. With ``target_ess`` a fourth product, the host waits once a
    block, and ``torch.compile(fullgraph=True)`` does not take it.

    Args:
        in_features: how many numbers a hidden state has.
        n_classes: how many classes there are.
        sampler: what is drawn from, such as ``samplers.Unigram(counts)``; None for all classes
            alike.
        n_samples: how many classes are drawn in a step, or in a block.
        target_ess: the effective sample size that each row is to reach; None for one block.
        max_samples: draws after which a row takes all classes; None for 32 blocks. It is rounded
            up to whole blocks.
        bias: whether each class has a bias.
        sparse: whether gradients of weight and bias are row-sparse, as those of
            :class:`SampledSoftmax`. Where a row takes all classes they have every row.
        seed: of the draws.
        per_rank: whether the processes of ``torch.distributed`` draw different classes.
        ignore_index: rows with this target count for nothing; None where every target counts.
        reduction: "mean" over the rows that count, "sum" or "none".
        chunk_rows: rows of scores held at a time, "auto" or "low".
        device: where the parameters are made.
        dtype: of the parameters.

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
        check_stopping(target_ess, n_samples, max_samples)
        self.target_ess, self.max_samples = target_ess, max_samples
        self.n_drawn = self.took_all = None

    def _loss_of_step(self, batch: Batch, counter: Tensor) -> Tensor:
        if self.target_ess is None:
            return self._reduced(batch, self._problem(batch, self._block(counter, batch)))
        return self._stopped_loss(batch, counter)

    def _problem(self, batch: Batch, draws: Draws) -> SampledProblem:
        return SampledProblem(
            batch.hidden, self.weight, self.bias, batch.target, draws, SELF_NORMALISED
        )

    def _block(self, counter: Tensor, batch: Batch) -> Draws:
        ids, log_prob = self.sampler.sample_with_log_prob(self.n_samples, counter=counter)
        if batch.hidden.dtype == torch.float64:
            log_prob = self.sampler.log_prob(ids, dtype=torch.float64)
        return Draws(ids, log_prob + math.log(self.n_samples))

    def _stopped_loss(self, batch: Batch, counter: Tensor) -> Tensor:
        blocks: list[Draws] = []
        counted = (batch.target >= 0).any(-1)
        like = batch.hidden.new_empty(0, dtype=accumulation_dtype(batch.hidden.dtype))
        weights = RunningWeights(batch.hidden.shape[0], like)

        @torch.no_grad()
        def add_block(block: int, rows: Tensor) -> None:
            blocks.append(self._block(fork(counter, block), batch))
            some = Batch(batch.hidden[rows], batch.target[rows], rows.shape)
            # Less the target's score, which is the same in every block.
            made = sampled_loss(self._problem(some, blocks[-1]), "none", chunk_rows=self.chunk_rows)
            weights.add(rows, made.loss, 2 * made.loss - made.ess.log())

        enough = self.target_ess or 0.0
        stopped = draw_until(enough, self._most_blocks(), counted, weights, add_block)

        def draws_of(used: int, _rows: Tensor) -> Draws:
            ids = torch.cat([each.ids for each in blocks[:used]])
            log_expected = torch.cat([each.log_expected for each in blocks[:used]])
            return Draws(ids, log_expected + math.log(used))

        nothing = Draws(batch.target.new_empty(0), like)
        options = Options(self.reduction, self.sparse, self.chunk_rows)
        loss = loss_of_groups(self._problem(batch, nothing), stopped, draws_of, options)
        self._keep(stopped)
        return loss.reshape(batch.shape) if self.reduction == "none" else loss

    def _keep(self, stopped: Stopped) -> None:
        """What a step leaves to look at."""
        self.ess, self.n_drawn = stopped.ess, stopped.blocks * self.n_samples
        self.took_all = ~stopped.reached

    def _most_blocks(self) -> int:
        return BLOCKS if self.max_samples is None else -(-self.max_samples // self.n_samples)

    def config(self) -> dict[str, Any]:
        return {
            **super().config(),
            "target_ess": self.target_ess,
            "max_samples": self.max_samples,
        }
