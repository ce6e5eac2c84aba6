"""Heads that train over classes which are chosen rather than drawn."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Unpack

import numpy as np
import torch
from torch import Tensor

from lastlayer._checks import as_integers, check_int
from lastlayer._torch import in_dtype
from lastlayer.fused.sampled import Rule
from lastlayer.fused.scores import row_chunks, wide_scores
from lastlayer.heads.sampled.base import ComparedHead, ComparedOptions, as_class_ids


class PartialSoftmax(ComparedHead):
    r"""A softmax trained over the k best classes and the target: only the outputs that matter.

    .. math:: L = \log \sum_{c \in T_k \cup \{y\}} e^{\theta_c} - \theta_y

    The other classes have next to no probability in a trained model, so that their share of the
    gradient is left out; nothing is corrected for that, and nothing is left to chance. The loss is
    at most the cross entropy, and equals it with k = n_classes. In eval mode it is the exact one.

    Choose it to fine-tune a model whose probabilities are concentrated, where ``sparse=True``
    leaves the optimiser few rows to touch. To train from the start choose
    :class:`SampledSoftmax`: classes that are never among the best are never pushed down.

    Cost: all scores are computed once, to find the best; the gradient looks at rows × k classes.

    Args:
        in_features: size of the hidden state.
        n_classes: number of classes.
        k: number of best classes that count.
        options: ``bias``, ``sparse``, ``ignore_index``, ``reduction``, ``chunk_rows``, ``device``
            and ``dtype``, as of :class:`SampledSoftmax`.

    Example:
        >>> import torch
        >>> head = PartialSoftmax(16, 1000, k=20, sparse=True)
        >>> hidden, target = torch.randn(8, 16), torch.randint(1000, (8,))
        >>> loss = head(hidden, target)
        >>> bool(loss <= head.eval()(hidden, target))
        True
    """

    def __init__(
        self, in_features: int, n_classes: int, k: int = 100, **options: Unpack[ComparedOptions]
    ) -> None:
        super().__init__(in_features, n_classes, **options)
        self.k = check_int("k", k, most=self.n_classes, note="the head's n_classes")

    def _sampled_loss(self, rows: Tensor, target: Tensor) -> Tensor:
        best = self._best(rows)
        if best.shape[0]:
            # Rows that do not count look at classes that another one looks at, and touch no more.
            counts = (target >= 0).any(-1)
            one = best.index_select(0, counts.long().argmax().reshape(1))
            best = torch.where(counts.unsqueeze(-1), best, one)
        return self._compare(
            rows, target, best, torch.zeros_like(best, dtype=torch.float32), Rule()
        )

    def _classes_per_step(self) -> int:
        return self.k

    @torch.no_grad()
    def _best(self, rows: Tensor) -> Tensor:
        """Class ids ``(n, k)``; which of equal scores are taken does not change the loss."""
        weight = in_dtype(self.weight, rows.dtype)
        bias = None if self.bias is None else in_dtype(self.bias, rows.dtype)
        return torch.cat([
            wide_scores(rows[part], weight, bias).topk(self.k, sorted=False).indices
            for part in row_chunks(rows, self.n_classes, self.chunk_rows, 1.0)
        ])  # fmt: skip


class Partition(NamedTuple):
    """A stretch of the training data with the classes that occur in it."""

    start: int
    stop: int
    classes: Tensor
    """int64, ascending."""


def target_partitions(
    target: Any, size: int, *, ignore_index: int | None = -100
) -> Iterator[Partition]:
    """Stretches of targets, each as long as it can be with ``size`` different classes.

    Args:
        target: class ids in the order of training, one dimension.
        size: number of classes a stretch may have; the last one has fewer, or none where all of it
            is ignored.
        ignore_index: is no class; None where every target is one.

    Example:
        >>> for part in target_partitions([3, 1, 3, 2, 2, 1, 0], 2):
        ...     print(part.start, part.stop, part.classes.tolist())
        0 3 [1, 3]
        3 6 [1, 2]
        6 7 [0]
    """
    size = check_int("size", size)
    ids = as_integers("target", target, "class ids")
    start = 0
    while start < len(ids):
        window = 2 * size
        while True:
            some = ids[start : start + window]
            counts = np.ones(len(some), bool) if ignore_index is None else some != ignore_index
            known = np.flatnonzero(counts)
            classes, first = np.unique(some[known], return_index=True)
            first = known[first]
            if len(classes) > size or start + window >= len(ids):
                break
            window *= 2
        # Where the first class too many comes.
        length = np.sort(first)[size] if len(classes) > size else len(ids) - start
        stop = int(start + length)
        kept = classes[first < length]
        yield Partition(start, stop, torch.from_numpy(kept))
        start = stop


class TargetSampling(ComparedHead):
    r"""A softmax trained over the classes of one part of the data at a time.

    .. math:: L = \log \sum_{c \in V'} e^{\theta_c} - \theta_y

    The training data is cut into stretches in which a limited number of classes :math:`V'` occurs,
    by :func:`target_partitions`; ``head.use(classes)`` before each says which. Drawing all of
    :math:`V'` evenly makes every correction the same, so that none is left: a plain softmax over
    :math:`V'`. A target that is not among them is counted beside them. Before the first ``use``
    and after ``use(None)`` all classes count. In eval mode the loss is the exact one.

    Choose it where the classes of a training step must be known ahead, such as to keep only their
    vectors on a GPU. Where they need not, :class:`SampledSoftmax` has the smaller bias: here a
    class is only ever compared with classes that occur near it.

    Cost: as :class:`FullSoftmax` with as many classes as :math:`V'` has; their vectors are
    gathered in every step.

    Args:
        in_features: size of the hidden state.
        n_classes: number of classes.
        options: ``bias``, ``sparse``, ``ignore_index``, ``reduction``, ``chunk_rows``, ``device``
            and ``dtype``, as of :class:`SampledSoftmax`.

    Example:
        >>> import torch
        >>> head = TargetSampling(16, 1000, sparse=True)
        >>> hidden, target = torch.randn(64, 16), torch.randint(1000, (64,))
        >>> for part in target_partitions(target, 20):
        ...     head.use(part.classes)
        ...     loss = head(hidden[part.start : part.stop], target[part.start : part.stop])

    Reference:
        Jean, Cho, Memisevic and Bengio, On using very large target vocabulary for neural machine
        translation, ACL 2015, arXiv:1412.2007.
    """

    classes: Tensor | None
    _used: Tensor | None

    def __init__(
        self, in_features: int, n_classes: int, **options: Unpack[ComparedOptions]
    ) -> None:
        super().__init__(in_features, n_classes, **options)
        # Part of the data, not of the model: they are not saved.
        self._used = self.classes = None

    def use(self, classes: Any) -> None:
        """Train over these classes from now on.

        Args:
            classes: different class ids, in any order; None for all.
        """
        self._used = None if classes is None else as_class_ids("classes", classes, self.n_classes)
        self._make_tables(self.weight.device)

    def _make_tables(self, device: torch.device) -> None:
        self.classes = None if self._used is None else self._used.to(device)

    def _takes_all(self) -> bool:
        return super()._takes_all() or self.classes is None

    def _sampled_loss(self, rows: Tensor, target: Tensor) -> Tensor:
        classes = self.classes
        if classes is None:
            raise RuntimeError("classes: expected those of a partition, got None; call use first")
        nothing = torch.zeros_like(classes, dtype=torch.float32)
        return self._compare(rows, target, classes, nothing, Rule())

    def _classes_per_step(self) -> int:
        return self.n_classes if self.classes is None else self.classes.shape[0]
