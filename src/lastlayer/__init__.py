"""Maps, losses and heads for models that choose among many classes."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lastlayer import attention, fused, heads, optim, parallel, samplers, trees, vectors
    from lastlayer._torch import debug
    from lastlayer.losses import (
        EntmaxLoss,
        InfoNCELoss,
        Mixed,
        NegativeQueue,
        SparsemaxLoss,
        TopKSoftmaxLoss,
        ZLPRCalibrator,
        ZLPRLoss,
        asymmetric_loss,
        bce_loss,
        entmax_loss,
        fenchel_young_loss,
        info_nce,
        mixup,
        mixup_from_indices,
        multilabel_sparsemax_loss,
        multilabel_sparsemax_predict,
        nce_loss,
        negative_sampling_loss,
        smooth_labels,
        sparsemax_loss,
        topk_softmax_loss,
        zlpr_loss,
        zlpr_loss_from_indices,
        zlpr_probability,
    )

    # Imported from the modules themselves: type checkers would take maps.entmax for the module.
    from lastlayer.maps.entmax import Entmax, entmax
    from lastlayer.maps.sparsemax import Sparsemax, sparsemax
    from lastlayer.maps.support import Support, entmax_support
    from lastlayer.maps.topk import TopKSoftmax, topk_softmax

try:
    __version__ = version("lastlayer")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"

# Names are imported at first use, so that `lastlayer --help` does not wait for torch. Names that
# are not listed here are from lastlayer.losses.
_MAPS = (
    "Entmax", "Sparsemax", "Support", "TopKSoftmax", "entmax", "entmax_support", "sparsemax",
    "topk_softmax",
)  # fmt: skip
_HOME = {"debug": "lastlayer._torch", **dict.fromkeys(_MAPS, "lastlayer.maps")}
# Subpackages whose names are not exported at the top level, such as lastlayer.heads.EntmaxHead.
_PACKAGES = ("attention", "fused", "heads", "optim", "parallel", "samplers", "trees", "vectors")

__all__ = [
    "Entmax",
    "EntmaxLoss",
    "InfoNCELoss",
    "Mixed",
    "NegativeQueue",
    "Sparsemax",
    "SparsemaxLoss",
    "Support",
    "TopKSoftmax",
    "TopKSoftmaxLoss",
    "ZLPRCalibrator",
    "ZLPRLoss",
    "asymmetric_loss",
    "attention",
    "bce_loss",
    "debug",
    "entmax",
    "entmax_loss",
    "entmax_support",
    "fenchel_young_loss",
    "fused",
    "heads",
    "info_nce",
    "mixup",
    "mixup_from_indices",
    "multilabel_sparsemax_loss",
    "multilabel_sparsemax_predict",
    "nce_loss",
    "negative_sampling_loss",
    "optim",
    "parallel",
    "samplers",
    "smooth_labels",
    "sparsemax",
    "sparsemax_loss",
    "topk_softmax",
    "topk_softmax_loss",
    "trees",
    "vectors",
    "zlpr_loss",
    "zlpr_loss_from_indices",
    "zlpr_probability",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"lastlayer.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'lastlayer' has no attribute {name!r}")
    value = getattr(import_module(_HOME.get(name, "lastlayer.losses")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
