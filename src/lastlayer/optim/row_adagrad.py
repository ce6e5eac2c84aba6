"""Adagrad with one accumulator per row."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from lastlayer import kernels
from lastlayer._checks import check_not_negative
from lastlayer._torch import accumulation_dtype
from lastlayer.optim.rows import RowOptimizer


class RowAdagrad(RowOptimizer):
    r"""Adagrad with one accumulator per row instead of one per element, for row-sparse gradients.

    .. math:: G_c \leftarrow G_c + \tfrac1d \lVert g_c\rVert^2, \qquad
              w_c \leftarrow (1 - \eta\lambda)\,w_c - \frac{\eta}{\sqrt{G_c} + \epsilon}\,g_c

    for the rows c of a row-sparse gradient, such as that of heads with ``sparse=True``; all other
    rows stay unchanged, bit for bit. A dense gradient updates all rows. In a 1-dimensional
    parameter, such as a bias, each row is one element, and the update is that of Adagrad.

    Choose it for tables of class vectors so large that the optimiser state has to be small: it
    takes 4 bytes per row, where Adagrad takes as much memory as the table and Adam twice that. It
    is the usual optimiser for the embeddings of recommenders. As in any Adagrad the effective
    learning rate falls for frequently touched rows and stays high for rare ones.

    ``torch.optim.Adagrad`` also takes row-sparse gradients and leaves other rows unchanged. It
    suffices if there is memory for one accumulator per element and no weight decay is wanted, which
    it does not support for sparse gradients.

    Cost: a step reads the gradient once, and reads and writes the touched rows once, in one kernel.
    A gradient that is not coalesced is sorted first, and the entries of a row are summed in
    float32; on a GPU this needs no host sync, and a step can be captured in a CUDA graph.
    Accumulators are float32 (float64 for float64 parameters). Half-precision parameters are rounded
    once per step.

    Args:
        params: parameters, or parameter groups.
        lr: the learning rate, :math:`\eta`.
        weight_decay: :math:`\lambda`, decoupled from the gradient as in AdamW. A row decays only in
            steps that touch it.
        initial_accumulator_value: initial value of :math:`G`.
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
