"""A softmax over the target and a few drawn classes."""

import math
from typing import Any, Unpack

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.heads._sampled import Batch, SampledHead, SampledOptions
from lastlayer.heads._sampled_checks import check_choice, check_positive
from lastlayer.heads._sampled_loss import Draws, Rule, SampledProblem
from lastlayer.heads._sampled_tail import Tail
from lastlayer.samplers import Sampler

CORRECTIONS = ("exact", "classic", "none")


class SampledSoftmax(SampledHead):
    r"""A softmax trained over the target and ``n_samples`` classes drawn for all rows together.

    .. math:: L = \log\Bigl(e^{\theta_y} + \sum_{d \ne y} e^{\theta_d - \log w_d}\Bigr) - \theta_y,
              \qquad w_d = \frac{m\,q(d)}{1 - q(y)}, \qquad \theta = (W h + b) / T

    A draw stands for all classes that were not drawn, so its score is corrected by how often it
    is expected. The target is there with certainty: it is not corrected, it is left out of the
    proposal, and draws of it do not count; m is the number of draws that do. The sum is then an
    unbiased estimate of the full one, and the gradient's bias falls as 1/m.

    Choose it for training with 100,000 classes or more, with ``samplers.Unigram(counts)`` and a
    few thousand samples. In eval mode the loss is the exact one, and so are ``log_prob``, ``topk``
    and ``sample``.

    Cost: a training step three products of rows × in_features × n_samples, however many classes
    there are. Without ``sparse=True`` a gradient of the weight's size is filled; with it gradients
    have the classes that were drawn or are a target, for :class:`lastlayer.optim.RowAdagrad`,
    :class:`lastlayer.optim.RowAdam` or torch's own. On a CPU they are coalesced. On a GPU they have
    a slot for each draw and each target, of which the first of a class has its gradient and the
    others 0, so that nothing waits for how many classes there are.

    Args:
        in_features: how many numbers a hidden state has.
        n_classes: how many classes there are.
        sampler: what is drawn from, such as ``samplers.Unigram(counts)``; None for all classes
            alike. With a head it may also have as many classes as are left, and draws only those.
        n_samples: how many classes are drawn in a step.
        correction: "exact" as above. "classic", as in TensorFlow, corrects the target's score by
            :math:`-\log m q(y)` as well. "none" corrects nothing, and learns another model.
        head_classes: how many of the first classes are always counted, or a list of class ids.
            They are exact, and draws of them are left out; a few hundred of the most frequent
            ones make the estimate better at the same cost.
        unique: draw different classes; each is corrected by the probability that it is drawn.
        temperature: T, divides the scores, in training as in prediction.
        bias: whether each class has a bias.
        sparse: whether gradients of weight and bias are row-sparse.
        seed: of the draws.
        per_rank: whether the processes of ``torch.distributed`` draw different classes. By default
            they draw the same.
        ignore_index: rows with this target count for nothing; None where every target counts.
        reduction: "mean" over the rows that count, "sum" or "none".
        chunk_rows: rows of scores held at a time, "auto" or "low".
        device: where the parameters are made.
        dtype: of the parameters.

    Example:
        >>> import torch
        >>> from lastlayer import samplers
        >>> counts = 1.0 / torch.arange(1, 10_001)
        >>> head = SampledSoftmax(16, 10_000, samplers.Unigram(counts), 64, sparse=True)
        >>> hidden, target = torch.randn(8, 16), torch.randint(10_000, (8,))
        >>> head(hidden, target).backward()
        >>> head.weight.grad.is_sparse
        True
        >>> exact = head.eval()(hidden, target)

    Reference:
        Yoshua Bengio and Jean-Sébastien Senécal, Quick training of probabilistic neural nets by
        importance sampling, AISTATS 2003; Khrylchenko et al., Correcting the LogQ correction:
        revisiting sampled softmax for large-scale retrieval, 2025, arXiv:2507.09331.
    """

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        sampler: Sampler | None = None,
        n_samples: int = 1024,
        *,
        correction: str = "exact",
        head_classes: int | list[int] | Tensor = 0,
        unique: bool = False,
        temperature: float = 1.0,
        **options: Unpack[SampledOptions],
    ) -> None:
        check_choice("correction", correction, CORRECTIONS)
        check_positive("temperature", temperature)
        self._head_classes = head_classes
        super().__init__(in_features, n_classes, sampler, n_samples, **options)
        self.correction, self.unique, self.temperature = correction, unique, temperature
        if unique and n_samples > self.sampler.n_classes:
            raise ValueError(
                f"n_samples: expected at most {self.sampler.n_classes}, the classes of the "
                f"sampler, since each is drawn once with unique=True, got {n_samples}"
            )

    def _check_sampler(self) -> None:
        self.tail = Tail(self._head_classes, self.n_classes, self.sampler)

    def _always_counted(self) -> int:
        return self.tail.n_head

    def _drawn(self, counter: Tensor) -> tuple[Tensor, Tensor]:
        ids, log_prob = self.tail.draw(self.sampler, self.n_samples, counter, unique=False)
        return ids, log_prob

    def _loss_of_step(self, batch: Batch, counter: Tensor) -> Tensor:
        tail, dtype = self.tail, accumulation_dtype(batch.hidden.dtype)
        ids, log_prob = tail.draw(self.sampler, self.n_samples, counter, self.unique, dtype)
        log_expected = torch.zeros_like(log_prob) if self.correction == "none" else log_prob
        if tail.n_head:
            log_expected = torch.where(log_prob == -torch.inf, torch.inf, log_expected)
            ids = torch.cat([tail.head_ids, ids])
            log_expected = torch.cat([log_expected.new_zeros(tail.n_head), log_expected])
        problem = SampledProblem(
            batch.hidden,
            self.weight,
            self.bias,
            batch.target,
            Draws(ids, log_expected, tail.n_head),
            Rule(average=self.correction == "exact" and not self.unique),
            temperature=self.temperature,
        )
        if self.correction == "exact" and not self.unique:
            left = tail.log_left(self.sampler, batch.target, dtype)
            problem = problem._replace(shift=left)
        elif self.correction == "classic":
            problem = self._classic(problem)
        return self._reduced(batch, problem)

    def _classic(self, problem: SampledProblem) -> SampledProblem:
        """Targets and draws alike by how often they are expected."""
        target, dtype = problem.target.clamp(min=0), accumulation_dtype(problem.hidden.dtype)
        expected = self.tail.log_prob(self.sampler, target, self.n_samples, self.unique)
        if not self.unique:
            log_draws = math.log(self.n_samples)
            expected = expected + log_draws
            shift = expected.new_full(target.shape[:1], -log_draws, dtype=dtype)
            problem = problem._replace(shift=shift)
        if self.tail.n_head:
            expected = expected.masked_fill(self.tail.is_head(target), 0.0)
        return problem._replace(target_log_expected=expected.to(dtype))

    def _exact_options(self) -> dict[str, Any]:
        return {**super()._exact_options(), "temperature": self.temperature}

    def _log_probs(self, scores: Tensor) -> Tensor:
        return torch.log_softmax(scores / self.temperature, -1)

    def config(self) -> dict[str, Any]:
        given = self._head_classes
        return {
            **super().config(),
            "correction": self.correction,
            "head_classes": given if isinstance(given, int) else self.tail.head_ids.tolist(),
            "unique": self.unique,
            "temperature": self.temperature,
        }
