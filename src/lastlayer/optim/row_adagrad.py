"""Adagrad with one sum per row."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from lastlayer import kernels
from lastlayer._checks import check_not_negative
from lastlayer._torch import accumulation_dtype
from lastlayer.optim.rows import RowOptimizer


class RowAdagrad(RowOptimizer):
    r"""Adagrad with one sum per row, not one per number; it touches only rows with a gradient.

    .. math:: G_c \leftarrow G_c + \tfrac1d \lVert g_c\rVert^2, \qquad
              w_c \leftarrow (1 - \eta\lambda)\,w_c - \frac{\eta}{\sqrt{G_c} + \epsilon}\,g_c

    for the rows c of a row-sparse gradient, such as heads with ``sparse=True`` make; all other rows
    stay as they are, to the bit. A dense gradient is one of all rows. In a parameter of one
    dimension, such as a bias, a row is a number, and the rule is that of Adagrad.

    Choose it for tables of class vectors so large that their optimiser has to be small: the sum
    takes 4 bytes per row, where Adagrad takes as much as the table and Adam twice that. It is the
    usual one for the embeddings of recommenders. As every Adagrad it slows rows down that are often
    touched and keeps rare ones fast.

    ``torch.optim.Adagrad`` takes row-sparse gradients too and leaves other rows alone. It suffices
    where there is memory for one sum per number and no weight decay is wanted, which it refuses
    for sparse gradients.

    Cost: a step reads the gradient and reads and writes the touched rows once, in one kernel. A
    gradient that is not coalesced is sorted before, and what belongs to a row is added up in
    float32; on a GPU nothing waits for that, and a step can be captured in a CUDA graph. Sums are
    float32 (float64 for float64), also for parameters in half precision, which are rounded once per
    step.

    Args:
        params: parameters, or groups of them with options of their own.
        lr: :math:`\eta`, the learning rate.
        weight_decay: :math:`\lambda`, decoupled from the gradient as in AdamW, for touched rows
            alone: a row decays as often as it is touched.
        initial_accumulator_value: :math:`G` at the start.
        eps: :math:`\epsilon`.

    Example:
        >>> import torch
        >>> table = torch.nn.Embedding(1000, 16, sparse=True)
        >>> optimizer = RowAdagrad(table.parameters(), lr=0.1)
        >>> table(torch.tensor([3, 7, 3])).square().sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[table.weight]["sum"].count_nonzero()
        tensor(2)

    Reference:
        Duchi, Hazan and Singer, Adaptive Subgradient Methods, JMLR 2011; Mudigere et al.,
        Software-Hardware Co-design for Fast and Scalable Training of Deep Learning Recommendation
        Models, ISCA 2022, arXiv:2104.05158 (one sum per row).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.01,
        *,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
    ) -> None:
        options = {
            "lr": lr,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
        }
        super().__init__(params, options)

    def _fresh_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        start, dtype = group["initial_accumulator_value"], accumulation_dtype(parameter.dtype)
        return {"sum": parameter.new_full(parameter.shape[:1], start, dtype=dtype)}

    def _update(
        self,
        impl: kernels.Impl,
        rows: Tensor,
        ids: Tensor | None,
        gradient: Tensor,
        state: dict[str, Tensor],
        group: dict[str, Any],
    ) -> None:
        options = group["lr"], group["weight_decay"], group["eps"]
        kernels.touched_rows.adagrad_(impl, rows, state["sum"], ids, gradient, *options)

    @staticmethod
    def _check_options(options: dict[str, Any]) -> None:
        for name in ("lr", "weight_decay", "initial_accumulator_value", "eps"):
            check_not_negative(name, options[name])
