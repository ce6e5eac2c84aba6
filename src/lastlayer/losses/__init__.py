"""Scores and targets to a loss."""

from lastlayer.losses.calibration import ZLPRCalibrator
from lastlayer.losses.contrastive import InfoNCELoss, info_nce
from lastlayer.losses.entmax import EntmaxLoss, SparsemaxLoss, entmax_loss, sparsemax_loss
from lastlayer.losses.fenchel_young import fenchel_young_loss
from lastlayer.losses.logistic import asymmetric_loss, binary_cross_entropy_loss
from lastlayer.losses.multilabel_sparsemax import (
    multilabel_sparsemax_loss,
    multilabel_sparsemax_predict,
)
from lastlayer.losses.nce import nce_loss
from lastlayer.losses.negative_sampling import negative_sampling_loss
from lastlayer.losses.queue import NegativeQueue
from lastlayer.losses.soft_targets import Mixed, mixup, mixup_from_indices, smooth_labels
from lastlayer.losses.topk import TopKSoftmaxLoss, topk_softmax_loss
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
    "binary_cross_entropy_loss",
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
