"""Heads that tell data from noise: noise-contrastive estimation, and word2vec's variant of it."""

import math
from numbers import Real
from typing import Any, Self, Unpack

import torch
from torch import Tensor
from torch.nn import Parameter

from lastlayer._checks import check_real
from lastlayer._torch import accumulation_dtype
from lastlayer.fused.sampled import Correction, Rule
from lastlayer.heads.recipes import sampled_recipe
from lastlayer.heads.sampled.base import SampledHead, SampledOptions
from lastlayer.heads.self_normalized import Drift, chosen_scores, drift_of, log_normalizer
from lastlayer.samplers import Sampler

LEARNED = "learned"
# Draws that are the target of their row are noise all the same.
_NOISE = Rule(logistic=True, drop_hits=False)


class NoiseContrastive(SampledHead):
    r"""Class vectors trained to tell what was observed from k classes drawn as noise.

    .. math:: L = -\log \sigma(a_y) - \sum_{j=1}^{k} \log \sigma(-a_{d_j}), \qquad
              a_c = s_c - \log Z - \log k\,q(c)

    The model says :math:`p(c \mid h) = e^{s_c} / Z` with one Z for all rows, which is what the loss
    teaches it: it is least where :math:`s_c - \log Z = \log p_\text{data}(c \mid h)`. So a trained
    model gives log-probabilities that need no sum over the classes,
    :meth:`unnormalized_log_prob`; :meth:`drift` says how good they are. ``log_prob``, ``topk``,
    ``sample`` and the loss in eval mode are normalised and exact.

    Choose it where single classes are to be scored fast after training, as in reranking. As an
    estimate of the softmax gradient it needs more samples than :class:`SampledSoftmax`, and noise
    that is close to the data: take ``samplers.Unigram(counts)``.

    Three things decide whether it works, and are seen to here. The biases start at
    :math:`\log q(c) + \log Z`: from biases near 0 the model would claim the probability 1 for every
    class, and be busy with that for long. Where the noise is not as frequent as the data,
    ``init_bias_from_counts`` takes the frequencies of the data instead of q. A draw that is the
    target of its row counts as noise all the same, and one that comes twice counts twice. And k is
    the number of draws, 1 observation to k, also where rows share them.

    Cost: one product of rows × n_samples × in_features and two more for gradients; see
    :meth:`SampledSoftmax.explain`.

    Args:
        in_features: size of the hidden state.
        n_classes: number of classes.
        sampler: q, what noise is drawn from, such as ``samplers.Unigram(counts)``.
        n_samples: k, draws per step, shared by all rows.
        log_z: log Z, a number, or "learned" for a parameter that starts at 0. 0 makes scores
            log-probabilities; without a bias :math:`\log` of n_classes is the better start.
        options: ``bias``, ``sparse``, ``seed``, ``per_rank``, ``ignore_index``, ``reduction``,
            ``chunk_rows``, ``device`` and ``dtype``, as of :class:`SampledSoftmax`.

    Example:
        >>> import torch
        >>> from lastlayer import samplers
        >>> counts = 1.0 / torch.arange(1, 1001)
        >>> head = NoiseContrastive(16, 1000, samplers.Unigram(counts), n_samples=64)
        >>> hidden, target = torch.randn(8, 16), torch.randint(1000, (8,))
        >>> head(hidden, target).backward()
        >>> head.unnormalized_log_prob(hidden, target).shape
        torch.Size([8])

    Reference:
        Gutmann and Hyvärinen, Noise-contrastive estimation, AISTATS 2010; Mnih and Teh, A fast and
        simple algorithm for training neural probabilistic language models, ICML 2012,
        arXiv:1206.6426.
    """

    recipes = (sampled_recipe("nce", "noise-contrastive estimation", compared=("nce",), rank=31),)
    weighs_draws = False
    log_z: Tensor | float

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        sampler: Sampler | None = None,
        n_samples: int = 1024,
        *,
        log_z: float | str = 0.0,
        **options: Unpack[SampledOptions],
    ) -> None:
        # Not asked of the attribute: parametrizations and functional_call put a plain tensor there.
        self.learns_log_z = _is_learned(log_z)
        super().__init__(in_features, n_classes, sampler, n_samples, **options)
        self.log_z = Parameter(self.weight.new_zeros(1)) if isinstance(log_z, str) else float(log_z)
        self._start_bias()

    def reset_parameters(self) -> None:
        """Fresh class vectors, as those of ``nn.Linear``; biases at log q + log Z."""
        super().reset_parameters()
        # In the constructor parameters come before the sampler.
        if "sampler" in self._modules:
            if isinstance(self.log_z, Tensor):
                torch.nn.init.zeros_(self.log_z)
            self._start_bias()

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear | torch.nn.Embedding, **options: Any) -> Self:
        """A head that shares the parameters of a layer; its biases keep their values."""
        head = super().from_linear(linear, **options)
        if head.learns_log_z:
            head.log_z = Parameter(head.weight.new_zeros(1))
        return head

    def _scores_from_counts(self, counts: Any) -> Tensor:
        logs = super()._scores_from_counts(counts)
        return logs + self._log_z_as(logs)

    @torch.no_grad()
    def _start_bias(self) -> None:
        if self.bias is not None and self.bias.device.type != "meta":
            log_q = _log_q(self.sampler, torch.float64)
            self.bias.copy_(log_q + (0.0 if self.learns_log_z else self._log_z_as(log_q)))

    def _correction(self) -> Correction:
        log_z = 0.0 if isinstance(self.log_z, Tensor) else self.log_z
        return Correction(_NOISE, targets=1, less=math.log(self.n_samples) + log_z)

    def _reads_targets(self) -> bool:
        return True

    def _row_shift(self, rows: Tensor) -> Tensor | None:
        log_z = self.log_z
        return -log_z.expand(rows.shape[0]) if isinstance(log_z, Tensor) else None

    def _loss_of_step(self, rows: Tensor, target: Tensor, rng_counter: Tensor) -> Tensor:
        ids, log_q = self._draw(rng_counter, rows.dtype)
        less = self._correction().less
        of_target = self.sampler._log_targets(target, log_q.dtype) + less
        return self._compare(
            rows, target, ids, log_q + less, _NOISE, target_log_expected=of_target,
            row_shift=self._row_shift(rows),
        )  # fmt: skip

    def unnormalized_log_prob(self, hidden: Tensor, classes: Tensor) -> Tensor:
        """s − log Z of chosen classes: their log-probabilities where the model has learned its Z.

        It looks at no other class, as :meth:`SelfNormalized.unnormalized_log_prob`, whose arguments
        and result are the same.
        """
        scores = chosen_scores(self, hidden, classes)
        return scores - self._log_z_as(scores)

    def drift(self, hidden: Tensor) -> Drift:
        """How far log Z of these rows is from the model's; see :meth:`SelfNormalized.drift`."""
        return drift_of(self._row_log_z(hidden))

    def _row_log_z(self, hidden: Tensor) -> Tensor:
        exact = log_normalizer(self, hidden)
        return exact - self._log_z_as(exact)

    def _log_z_as(self, like: Tensor) -> Tensor | float:
        log_z = self.log_z
        return log_z.detach().to(like) if isinstance(log_z, Tensor) else log_z

    def config(self) -> dict[str, Any]:
        return {**super().config(), "log_z": LEARNED if self.learns_log_z else self.log_z}


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
    all the same, without which the optimum would be another one. ``init_bias_from_counts`` sets
    the biases to the optimum at the hidden state 0, the log of frequency over :math:`k\,q`.

    Cost: one product of rows × n_samples × in_features and two more for gradients; see
    :meth:`SampledSoftmax.explain`.

    Args:
        in_features: size of the hidden state.
        n_classes: number of classes.
        sampler: q, what noise is drawn from.
        n_samples: k, draws per step, shared by all rows.
        options: ``bias``, ``sparse``, ``seed``, ``per_rank``, ``ignore_index``, ``reduction``,
            ``chunk_rows``, ``device`` and ``dtype``, as of :class:`SampledSoftmax`.

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

    recipes = (
        sampled_recipe(
            "negative", "negative sampling of word2vec", n_samples=64, power=0.75,
            compared=("negative",), rank=32,
        ),
    )  # fmt: skip
    weighs_draws = False
    _reads_log_prob = False

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        sampler: Sampler | None = None,
        n_samples: int = 64,
        **options: Unpack[SampledOptions],
    ) -> None:
        super().__init__(in_features, n_classes, sampler, n_samples, **options)

    def _scores_from_counts(self, counts: Any) -> Tensor:
        return super()._scores_from_counts(counts) - self._log_expected().cpu()

    def _log_expected(self) -> Tensor:
        """log k q of all classes, in float64."""
        return _log_q(self.sampler, torch.float64) + math.log(self.n_samples)

    def _correction(self) -> Correction:
        return Correction(_NOISE, corrects=False)

    def _loss_of_step(self, rows: Tensor, target: Tensor, rng_counter: Tensor) -> Tensor:
        ids = self._draw_ids(rng_counter)
        nothing = torch.zeros(ids.shape, device=ids.device)
        return self._compare(rows, target, ids, nothing, _NOISE)

    def _draw_ids(self, rng_counter: Tensor) -> Tensor:
        """Classes of a step alone: the loss does not read their log-probabilities."""
        with torch.no_grad():
            return self.sampler._draw(self.n_samples, rng_counter, None)

    def _exact_loss(self, hidden: Tensor, target: Any) -> Tensor:
        return self._loss_of_log_prob(hidden, target)

    def _score_tensors(self, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        weight, bias = super()._score_tensors(dtype)
        log_q = _log_q(self.sampler, accumulation_dtype(dtype))
        return weight, log_q if bias is None else bias + log_q

    def _row_log_z(self, hidden: Tensor) -> Tensor:
        """log of the sum of k q e^s, which is 0 at the optimum."""
        added = self._log_expected()
        biases = added if self.bias is None else added + self.bias.detach()
        return log_normalizer(self, hidden, biases.to(self.weight.dtype))


def _log_q(sampler: Sampler, dtype: torch.dtype) -> Tensor:
    """Of all classes."""
    return sampler._log_prob_of_all().to(dtype)


def _is_learned(log_z: Any) -> bool:
    if isinstance(log_z, str):
        if log_z != LEARNED:
            raise ValueError(f"log_z: expected a number or {LEARNED!r}, got {log_z!r}")
        return True
    if isinstance(log_z, bool) or not isinstance(log_z, Real):
        raise TypeError(f"log_z: expected a number or {LEARNED!r}, got {type(log_z).__name__}")
    check_real("log_z", log_z)
    return False
