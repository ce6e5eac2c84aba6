"""Every way to end a network: maps, losses and heads for models that choose among many classes."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lastlayer import fused, heads, optim, samplers, trees
    from lastlayer._debug import debug
    from lastlayer.losses import (
        EntmaxLoss,
        SparsemaxLoss,
        TopKSoftmaxLoss,
        entmax_loss,
        fenchel_young_loss,
        nce_loss,
        negative_sampling_loss,
        sparsemax_loss,
        topk_softmax_loss,
    )

    # From the modules themselves: beside them type checkers take maps.entmax for the module.
    from lastlayer.maps.entmax import Entmax, entmax
    from lastlayer.maps.sparsemax import Sparsemax, sparsemax
    from lastlayer.maps.support import Support, entmax_support
    from lastlayer.maps.topk import TopKSoftmax, topk_softmax

try:
    __version__ = version("lastlayer")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"

# Names are imported at first use, so that `lastlayer --help` does not wait for torch.
_HOME = {
    "debug": "lastlayer._debug",
    "entmax": "lastlayer.maps",
    "entmax_support": "lastlayer.maps",
    "sparsemax": "lastlayer.maps",
    "topk_softmax": "lastlayer.maps",
    "Entmax": "lastlayer.maps",
    "Sparsemax": "lastlayer.maps",
    "Support": "lastlayer.maps",
    "TopKSoftmax": "lastlayer.maps",
    "entmax_loss": "lastlayer.losses",
    "fenchel_young_loss": "lastlayer.losses",
    "nce_loss": "lastlayer.losses",
    "negative_sampling_loss": "lastlayer.losses",
    "sparsemax_loss": "lastlayer.losses",
    "topk_softmax_loss": "lastlayer.losses",
    "EntmaxLoss": "lastlayer.losses",
    "SparsemaxLoss": "lastlayer.losses",
    "TopKSoftmaxLoss": "lastlayer.losses",
}
# Packages with public names of their own: lastlayer.heads.Entmax is not lastlayer.Entmax.
_PACKAGES = ("fused", "heads", "optim", "samplers", "trees")

__all__ = [
    "Entmax",
    "EntmaxLoss",
    "Sparsemax",
    "SparsemaxLoss",
    "Support",
    "TopKSoftmax",
    "TopKSoftmaxLoss",
    "debug",
    "entmax",
    "entmax_loss",
    "entmax_support",
    "fenchel_young_loss",
    "fused",
    "heads",
    "nce_loss",
    "negative_sampling_loss",
    "optim",
    "samplers",
    "sparsemax",
    "sparsemax_loss",
    "topk_softmax",
    "topk_softmax_loss",
    "trees",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"lastlayer.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'lastlayer' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
