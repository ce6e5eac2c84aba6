"""Adam that updates only the rows that have a gradient."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer._checks import check_choice, check_not_negative, check_real
from lastlayer._torch import accumulation_dtype
from lastlayer.optim.rows import RowOptimizer

MISSED = ("skip", "decay")


class RowAdam(RowOptimizer):
    r"""Adam for row-sparse gradients: updates only touched rows, with a step count for each row.

    .. math::
        m \leftarrow \beta_1^{\Delta} m + (1 - \beta_1)\,g, \qquad
        v \leftarrow \beta_2^{\Delta} v + (1 - \beta_2)\,g^2, \qquad
        w \leftarrow (1 - \eta\lambda)\,w -
        \eta\,\frac{m / (1 - \beta_1^{t})}{\sqrt{v / (1 - \beta_2^{t})} + \epsilon}

    for the rows of a row-sparse gradient, such as that of heads with ``sparse=True``; all other
    rows and their moments stay unchanged, bit for bit. ``missed`` says how steps count in which a
    row has no gradient:

    * ``missed="skip"``: missed steps do not count. :math:`\Delta = 1`, and t counts the steps that
      touched the row: each row is updated exactly as by ``torch.optim.AdamW`` in these steps. The
      first update of a row has the size of the learning rate, however late it is.
    * ``missed="decay"``: missed steps count as steps with gradient 0. :math:`\Delta` is the number
      of steps since the row was last touched, and t counts all steps: moments are exactly those of
      Adam with dense gradients. Only the updates in missed steps are left out, in which Adam would
      move the row by its old mean. A row that is touched after a long time moves
      :math:`(1-\beta_1)/\sqrt{1-\beta_2}` times as far: 3.2 learning rates with the default betas.

    A dense gradient updates all rows, as ``torch.optim.AdamW`` does, so that one optimiser serves a
    whole model.

    Choose it for class vectors and embeddings if Adagrad becomes too slow late in training. It
    stores two moments per element; :class:`RowAdagrad` stores one number per row.

    ``torch.optim.SparseAdam`` also updates touched rows only. It suffices if all parameters have
    sparse gradients, which it requires, and all rows are touched often. Its moments skip missed
    steps while its t counts all steps, so that a row first touched late in training moves 3.2
    learning rates; it has no weight decay.

    Cost: a step reads the gradient once, and reads and writes the touched rows and their moments
    once, in one kernel. A gradient that is not coalesced is sorted first, and the entries of a row
    are summed in float32; on a GPU this needs no host sync, and a step can be captured in a CUDA
    graph. Moments are float32 (float64 for float64 parameters). Half-precision parameters are
    rounded once per step. The step counts take 4 bytes per row.

    Args:
        params: parameters, or parameter groups.
        lr: the learning rate, :math:`\eta`.
        betas: :math:`\beta_1` and :math:`\beta_2`.
        eps: :math:`\epsilon`.
        weight_decay: :math:`\lambda`, decoupled from the gradient as in AdamW. A row decays only in
            steps that touch it.
        missed: how steps count in which a row has no gradient, "skip" or "decay".

    Example:
        >>> import torch
        >>> table = torch.nn.Embedding(1000, 16, sparse=True)
        >>> optimizer = RowAdam(table.parameters(), lr=0.01)
        >>> table(torch.tensor([3, 7, 3])).square().sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[table.weight]["row_step"].nonzero().flatten()
        tensor([3, 7])

    Reference:
        Kingma and Ba, Adam, ICLR 2015, arXiv:1412.6980; Loshchilov and Hutter, Decoupled Weight
        Decay Regularization, ICLR 2019, arXiv:1711.05101.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        missed: str = "skip",
    ) -> None:
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "missed": missed,
        }
        super().__init__(params, options)

    def _fresh_state(self, parameter: Tensor, _group: dict[str, Any]) -> dict[str, Tensor]:
        # Moments are contiguous, since kernels index them by row. The step count is on the device
        # of the parameter, so that it needs no host sync.
        dtype, layout = accumulation_dtype(parameter.dtype), torch.contiguous_format
        moment = torch.zeros_like(parameter, dtype=dtype, memory_format=layout)
        return {
            "exp_avg": moment,
            "exp_avg_sq": moment.clone(),
            "row_step": parameter.new_zeros(parameter.shape[:1], dtype=torch.int32),
            "step": parameter.new_zeros((), dtype=torch.int64),
        }

    def _update(
        self,
        impl: kernels.Impl,
        rows: Tensor,
        ids: Tensor | None,
        gradient: Tensor,
        state: dict[str, Tensor],
        group: dict[str, Any],
    ) -> None:
        decays = group["missed"] == "decay"
        step = state["step"].add_(1)
        moments = state["exp_avg"], state["exp_avg_sq"]
        if ids is not None:
            first, second = (each.view(rows.shape) for each in moments)
            moments = first, second
        kernels.touched_rows.adam_(
            impl, rows, *moments, state["row_step"], step, ids, gradient, group["lr"],
            group["weight_decay"], *group["betas"], group["eps"], decays,
        )  # fmt: skip

    @staticmethod
    def _check_options(options: dict[str, Any]) -> None:
        for name in ("lr", "weight_decay", "eps"):
            check_not_negative(name, options[name])
        betas = options["betas"]
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise TypeError(f"betas: expected two numbers, got {betas!r}")
        for beta in betas:
            check_real("betas", beta, "a number from 0 to less than 1", lambda x: 0.0 <= x < 1.0)
        check_choice("missed", options["missed"], MISSED)
