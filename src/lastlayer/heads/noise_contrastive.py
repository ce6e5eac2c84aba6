"""A head that tells data from noise."""

import math
from typing import Any, Self, Unpack

import torch
from torch import Tensor
from torch.nn import Parameter

from lastlayer.heads._log_z import Drift, chosen_scores, drift_of, log_normalizer
from lastlayer.heads._sampled import Batch, SampledHead, SampledOptions
from lastlayer.heads._sampled_loss import Draws, Rule, SampledProblem
from lastlayer.samplers import Sampler

LEARNED = "learned"


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
    class, and be busy with that for long. A draw that is the target of its row counts as noise all
    the same, and one that comes twice counts twice. And k is the number of draws, 1 observation to
    k, also where rows share them.

    Cost: one product of rows × n_samples × in_features and two more for gradients; see
    :meth:`SampledSoftmax.explain`.

    Args:
        in_features: how many numbers a hidden state has.
        n_classes: how many classes there are.
        sampler: q, what noise is drawn from; None for ``Uniform(n_classes)``. Pass
            ``samplers.Unigram(counts)`` where classes are uneven.
        n_samples: k, draws a step, shared by all rows.
        log_z: log Z, a number, or "learned" for a parameter that starts at 0. 0 makes scores
            log-probabilities; without a bias :math:`\log` of n_classes is the better start.
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
        >>> head = NoiseContrastive(16, 1000, samplers.Unigram(counts), n_samples=64)
        >>> hidden, target = torch.randn(8, 16), torch.randint(1000, (8,))
        >>> head(hidden, target).backward()
        >>> head.unnormalized_log_prob(hidden, target.unsqueeze(-1)).shape
        torch.Size([8, 1])

    Reference:
        Gutmann and Hyvärinen, Noise-contrastive estimation, AISTATS 2010; Mnih and Teh, A fast and
        simple algorithm for training neural probabilistic language models, ICML 2012,
        arXiv:1206.6426.
    """

    log_z: Parameter | float

    weighs_draws = False

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
        _check_log_z(log_z)
        super().__init__(in_features, n_classes, sampler, n_samples, **options)
        if isinstance(log_z, str):
            self.log_z = Parameter(self.weight.new_zeros(1))
        else:
            self.log_z = float(log_z)
        self._start_bias()

    def reset_parameters(self) -> None:
        """Fresh class vectors, as those of ``nn.Linear``; biases at log q + log Z."""
        super().reset_parameters()
        # In the constructor parameters come before the sampler.
        if "sampler" in self._modules:
            if isinstance(self.log_z, Parameter):
                torch.nn.init.zeros_(self.log_z)
            self._start_bias()

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear | torch.nn.Embedding, **options: Any) -> Self:
        """A head on the very parameters of a layer, biases included, which keep their values."""
        head = super().from_linear(linear, **options)
        if isinstance(head.log_z, Parameter):
            head.log_z = Parameter(head.weight.new_zeros(1))
        return head

    @torch.no_grad()
    def _start_bias(self) -> None:
        if self.bias is None or self.bias.device.type == "meta":
            return
        everything = torch.arange(self.n_classes, device=self.bias.device)
        log_q = self.sampler.log_prob(everything, dtype=torch.float64)
        self.bias.copy_(log_q + (0.0 if isinstance(self.log_z, Parameter) else self.log_z))

    def _loss_of_step(self, batch: Batch, counter: Tensor) -> Tensor:
        ids, log_q = self.sampler.sample_with_log_prob(self.n_samples, counter=counter)
        present = batch.target.clamp(min=0)
        if batch.hidden.dtype == torch.float64:
            log_q = self.sampler.log_prob(ids, dtype=torch.float64)
        of_target = self.sampler.log_prob(present, dtype=log_q.dtype)
        less = math.log(self.n_samples)
        row_shift = None
        if isinstance(self.log_z, Parameter):
            row_shift = -self.log_z.expand(batch.hidden.shape[0])
        else:
            less += self.log_z
        problem = SampledProblem(
            batch.hidden, self.weight, self.bias, batch.target, Draws(ids, log_q + less),
            Rule(logistic=True, drop_hits=False), target_log_expected=of_target + less,
            row_shift=row_shift,
        )  # fmt: skip
        return self._reduced(batch, problem)

    def unnormalized_log_prob(self, hidden: Tensor, classes: Tensor) -> Tensor:
        """s − log Z of chosen classes: their log-probabilities where the model has learned its Z.

        It looks at no other class. No gradient is recorded.

        Args:
            hidden: ``(*batch, in_features)``.
            classes: class ids, int64: ``(*batch, k)``, or ``(k,)`` for every row.

        Returns:
            ``(*batch, k)``, float32, or float64 from float64.
        """
        scores = chosen_scores(self, hidden, classes)
        return scores - self._log_z_as(scores)

    def drift(self, hidden: Tensor) -> Drift:
        """How far the true log Z of these rows is from that of the model.

        It takes a product with all classes, and waits for the device.

        Args:
            hidden: ``(*batch, in_features)``.
        """
        return drift_of(self._row_log_z(hidden))

    def _row_log_z(self, hidden: Tensor) -> Tensor:
        exact = log_normalizer(self, hidden)
        return exact - self._log_z_as(exact)

    def _log_z_as(self, like: Tensor) -> Tensor | float:
        return self.log_z.detach().to(like.dtype) if isinstance(self.log_z, Tensor) else self.log_z

    def config(self) -> dict[str, Any]:
        learned = isinstance(self.log_z, Parameter)
        return {**super().config(), "log_z": LEARNED if learned else self.log_z}


def _check_log_z(log_z: Any) -> None:
    if isinstance(log_z, str):
        if log_z != LEARNED:
            raise ValueError(f"log_z: expected a number or {LEARNED!r}, got {log_z!r}")
    elif isinstance(log_z, bool) or not isinstance(log_z, (int, float)):
        raise TypeError(f"log_z: expected a number or {LEARNED!r}, got {type(log_z).__name__}")
    elif not math.isfinite(log_z):
        raise ValueError(f"log_z: expected a finite number, got {log_z}")
