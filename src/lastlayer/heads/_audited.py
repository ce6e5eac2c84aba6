"""The methods of heads that say what their samples are worth, and what they cost."""

from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from lastlayer.heads._audit import audit
from lastlayer.heads._audit_report import Audit
from lastlayer.heads._explain import Explanation, explain

if TYPE_CHECKING:
    from lastlayer.heads._compared import ComparedHead
    from lastlayer.heads._sampled import SampledHead


class Audited:
    """Of a :class:`ComparedHead`, whatever its loss is."""

    def audit(self, hidden: Tensor, target: Tensor, n_draws: int = 64, **given: Any) -> Audit:
        """Compare the gradient of the training loss with that of the exact loss, on one batch.

        The training loss is drawn ``n_draws`` times, as the next steps would draw it, and its mean
        gradient with respect to hidden, class vectors and biases is compared with the gradient of
        the exact loss, that of eval mode. The head is left as it was, its counter included.

        Cost: n_draws training steps and an exact one. Beside those it holds the exact and the mean
        gradient, twice the size of hidden and of the class vectors, however many draws there are.

        Args:
            hidden: ``(*batch, in_features)``.
            target: class ids ``(*batch)``, as in training.
            n_draws: how often to draw, at least 2. A bias is seen down to the deviation of one
                step divided by the root of this number. Two are enough for a head that leaves
                nothing to chance, whose deviation is 0.
            given: what else the head takes by name in training, such as a context.

        Returns:
            An ``Audit``; ``print(head.audit(hidden, target).table())``.
        """
        return audit(cast("ComparedHead", self), hidden, target, n_draws, **given)


class Explained:
    """Of a :class:`SampledHead`."""

    def explain(self, audit: Audit | None = None, *, n_rows: int = 1024) -> Explanation:
        """What a training step costs beside a full softmax, and how many samples to draw.

        Numbers are counted, not measured. The sample count follows from the effective sample size
        that an audit found; without one it is a first guess from the number of classes.

        Args:
            audit: what :meth:`audit` gave.
            n_rows: hidden states in a step.

        Returns:
            An ``Explanation``; ``print(head.explain())``.
        """
        return explain(cast("SampledHead", self), audit, n_rows=n_rows)
