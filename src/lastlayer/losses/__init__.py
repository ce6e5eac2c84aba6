"""Losses of scores (logits) and targets, as functions and modules."""

from lastlayer.losses.calibration import ZLPRCalibrator
from lastlayer.losses.contrastive import InfoNCELoss, info_nce
from lastlayer.losses.entmax import (
    EntmaxLoss,
    SparsemaxLoss,
    TopKSoftmaxLoss,
    entmax_loss,
    sparsemax_loss,
    topk_softmax_loss,
)
from lastlayer.losses.fenchel_young import fenchel_young_loss
from lastlayer.losses.multilabel import (
    Mixed,
    asymmetric_loss,
    bce_loss,
    mixup,
    mixup_from_indices,
    multilabel_sparsemax_loss,
    multilabel_sparsemax_predict,
    smooth_labels,
)
from lastlayer.losses.noise import nce_loss, negative_sampling_loss
from lastlayer.losses.queue import NegativeQueue
from lastlayer.losses.zlpr import ZLPRLoss, zlpr_loss, zlpr_loss_from_indices, zlpr_probability

__all__ = [
    "EntmaxLoss",
    "InfoNCELoss",
    "Mixed",
    "NegativeQueue",
    "SparsemaxLoss",
    "TopKSoftmaxLoss",
    "ZLPRCalibrator",
    "ZLPRLoss",
    "asymmetric_loss",
    "bce_loss",
    "entmax_loss",
    "fenchel_young_loss",
    "info_nce",
    "mixup",
    "mixup_from_indices",
    "multilabel_sparsemax_loss",
    "multilabel_sparsemax_predict",
    "nce_loss",
    "negative_sampling_loss",
    "smooth_labels",
    "sparsemax_loss",
    "topk_softmax_loss",
    "zlpr_loss",
    "zlpr_loss_from_indices",
    "zlpr_probability",
]
