"""Rows of scores of drawn classes to a softmax or logistic loss, and to its gradient; README.md."""

from lastlayer.kernels._registry import Operation


def _fake(*_: object) -> None:
    return None


def parts_of_columns(n: int, m: int, device_type: str) -> int:
    """How many parts the sums of columns come in, one a program, for ``n`` rows of ``m``."""
    if device_type != "cuda":
        return 1
    # Programs that a GPU runs at once, or a few more.
    return max(1, min(n, (1 << 21) // max(16, 1 << (m - 1).bit_length())))


forward_ = Operation(
    "sampled_rows_",
    "(Tensor(a!) scores, Tensor(b!) gradient, Tensor(c!) first, Tensor(d!) second, "
    "Tensor(e!) columns, Tensor offset, Tensor ids, Tensor target, Tensor? shift, Tensor? exact, "
    "Tensor? row_scale, float factor, int n_exact, bool logistic, bool drop_hits, bool average, "
    "bool adds) -> ()",
    __name__,
    "forward_",
    _fake,
)
