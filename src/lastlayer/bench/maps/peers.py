"""The maps of other packages."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lastlayer.bench.cases import Call, Method
from lastlayer.bench.peers import attribute

# The entmax package sorts only the k largest scores first; on shorter rows it sorts them all.
_ENTMAX_FIRST_K = 512
# Liger's rows must fit in one Triton block.
LIGER_WIDEST = 65536


def entmax_exact(name: str, computes: str) -> Method:
    """``entmax.sparsemax`` or ``entmax.entmax15``, by partial sort."""

    def load() -> Call:
        function = attribute("entmax", "entmax", name)

        def call(scores: Tensor) -> Any:
            first_k = _ENTMAX_FIRST_K if scores.shape[-1] > _ENTMAX_FIRST_K else None
            return function(scores, dim=-1, k=first_k)

        return call

    return Method(name, "entmax", computes, load)


def entmax_bisect(alpha: float, computes: str) -> Method:
    """``entmax.entmax_bisect``, by 50 bisections."""

    def load() -> Call:
        function = attribute("entmax", "entmax", "entmax_bisect")
        return lambda scores: function(scores, alpha=alpha, dim=-1)

    return Method(f"entmax_bisect {alpha:g}", "entmax", computes, load)


def liger_sparsemax() -> Method:
    """Liger's sparsemax, by a full sort."""

    def load() -> Call:
        function = attribute("liger-kernel", "liger_kernel.ops.sparsemax", "LigerSparsemaxFunction")
        return lambda scores: function.apply(scores, -1)

    return Method("sparsemax", "liger-kernel", "sparsemax", load)


def adasplash(name: str, computes: str) -> Method:
    """AdaSplash's row kernels at their default settings."""

    def load() -> Call:
        function: Callable[[Tensor], Any] = attribute("adasplash", "adasplash", name)
        return function

    return Method(name, "adasplash", computes, load)
