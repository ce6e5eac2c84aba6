"""The head of word2vec."""

import math
from typing import Unpack

import torch
from torch import Tensor

from lastlayer.heads._log_z import log_normalizer
from lastlayer.heads._sampled import Batch, SampledHead, SampledOptions
from lastlayer.heads._sampled_loss import Draws, Rule, SampledProblem
from lastlayer.samplers import Sampler


class NegativeSampling(SampledHead):
    r"""Class vectors trained as in word2vec: the target up, k drawn classes down.

    .. math:: L = -\log \sigma(s_y) - \sum_{j=1}^{k} \log \sigma(-s_{d_j})

    It is not a probability model. The loss estimates no likelihood, for any k, and the softmax of
    the scores is not what the classes occur with: the loss is least where

    .. math:: s_c = \log \frac{p_\text{data}(c \mid h)}{k\,q(c)},

    the pointwise mutual information less :math:`\log k` where q are the frequencies of the classes.
    That is what makes the vectors good, and it says how to get probabilities back: at the
    optimum :math:`p(c \mid h) = k\,q(c)\,e^{s_c}` sums to 1, so that

    .. math:: \log p(c \mid h) = s_c + \log q(c) - \log \sum_j q(j)\,e^{s_j}

    is exact there, and normalised anywhere. ``log_prob``, ``topk``, ``sample`` and the loss in eval
    mode are those of this calibrated model, with the q of the sampler. ``to_linear`` gives
    the scores as they are.

    Choose it to learn vectors of words or items. For probabilities take
    :class:`NoiseContrastive`, which is the same with :math:`\log k\,q` inside, or
    :class:`SampledSoftmax`. 5 to 20 draws suffice for small data and 2 to 5 for large where each
    row has its own; shared by a batch of rows take more. The noise of word2vec is
    ``samplers.Unigram(counts, power=0.75)``. A draw that is the target of its row counts as noise
    all the same, without which the optimum would be another one.

    Cost: one product of rows × n_samples × in_features and two more for gradients; see
    :meth:`SampledSoftmax.explain`.

    Args:
        in_features: how many numbers a hidden state has.
        n_classes: how many classes there are.
        sampler: q, what noise is drawn from; None for ``Uniform(n_classes)``.
        n_samples: k, draws a step, shared by all rows.
        bias: whether each class has a bias.
        sparse: whether gradients of weight and bias are row-sparse, as those of
            :class:`SampledSoftmax`; for :class:`lastlayer.optim.RowAdagrad` and the like.
        seed: of the draws.
        per_rank: whether the processes of ``torch.distributed`` draw different noise.
        ignore_index: rows with this target count for nothing; None where every target counts.
        reduction: "mean" over the rows that count, "sum" or "none".
        chunk_rows: rows of scores held at a time, "auto" or "low".
        device: where the parameters are made.
        dtype: of the parameters.

    Example:
        >>> import torch
        >>> from lastlayer import samplers
        >>> counts = 1.0 / torch.arange(1, 1001)
        >>> noise = samplers.Unigram(counts, power=0.75)
        >>> head = NegativeSampling(16, 1000, noise, n_samples=20, bias=False)
        >>> hidden, target = torch.randn(8, 16), torch.randint(1000, (8,))
        >>> head(hidden, target).backward()
        >>> bool((head.log_prob(hidden).exp().sum(-1) - 1).abs().max() < 1e-5)
        True

    Reference:
        Mikolov et al., Distributed Representations of Words and Phrases and their Compositionality,
        NeurIPS 2013, arXiv:1310.4546; Levy and Goldberg, Neural Word Embedding as Implicit Matrix
        Factorization, NeurIPS 2014.
    """

    weighs_draws = False

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        sampler: Sampler | None = None,
        n_samples: int = 64,
        **options: Unpack[SampledOptions],
    ) -> None:
        super().__init__(in_features, n_classes, sampler, n_samples, **options)

    def _loss_of_step(self, batch: Batch, counter: Tensor) -> Tensor:
        ids = self.sampler.sample(self.n_samples, counter=counter)
        draws = Draws(ids, torch.zeros(ids.shape, device=ids.device))
        rule = Rule(logistic=True, drop_hits=False)
        problem = SampledProblem(batch.hidden, self.weight, self.bias, batch.target, draws, rule)
        return self._reduced(batch, problem)

    def _exact_loss(self, hidden: Tensor, target: Tensor) -> Tensor:
        several = target.dim() == hidden.dim()
        classes = target if several else target.unsqueeze(-1)
        there = torch.ones_like(classes, dtype=torch.bool)
        if self.ignore_index is not None:
            there = classes != self.ignore_index
        counts = there.any(-1)
        # A NaN in a row that does not count would reach gradients as 0 · NaN.
        rows = torch.where(counts.unsqueeze(-1), hidden, 0.0)
        log_prob = self.log_prob(rows, torch.where(there, classes, 0))
        losses = -torch.where(there, log_prob, 0.0).sum(-1) / there.sum(-1).clamp(min=1)
        if self.reduction == "none":
            return losses
        total = losses.sum()
        return total / counts.sum().clamp(min=1) if self.reduction == "mean" else total

    def _log_probs(self, scores: Tensor) -> Tensor:
        return torch.log_softmax(scores + self._log_q(scores.dtype), -1)

    def _log_q(self, dtype: torch.dtype) -> Tensor:
        everything = torch.arange(self.n_classes, device=self.sampler.device)
        return self.sampler.log_prob(everything, dtype=dtype)

    def _row_log_z(self, hidden: Tensor) -> Tensor:
        """log of the sum of k q e^s, which is 0 at the optimum."""
        dtype = self.weight.dtype
        added = self._log_q(torch.float64) + math.log(self.n_samples)
        biases = added if self.bias is None else added + self.bias.detach()
        return log_normalizer(self, hidden, biases.to(dtype))
