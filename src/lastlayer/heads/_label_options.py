"""The losses of a multi-label head, and checks of what it is given."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lastlayer._labels import check_label_smoothing
from lastlayer.fused.bce import linear_bce_loss
from lastlayer.fused.zlpr import linear_zlpr_loss
from lastlayer.losses.calibration import ZLPRCalibrator
from lastlayer.losses.multilabel import asymmetric_loss, multilabel_sparsemax_loss

# From hidden states, and from scores and labels of some rows.
FUSED: dict[str, Callable[..., Tensor]] = {"zlpr": linear_zlpr_loss, "bce": linear_bce_loss}
DENSE: dict[str, Callable[..., Tensor]] = {
    "asymmetric": asymmetric_loss,
    "sparsemax": multilabel_sparsemax_loss,
}


def check_options(
    loss: Any,
    loss_options: Any,
    smoothing: Any,
    calibrator: Any,
    n_classes: int,
    ignore_index: Any,
) -> None:
    """What a multi-label head is made with beside what every linear head is."""
    _check_loss(loss, loss_options)
    check_label_smoothing(smoothing)
    _check_calibrator(calibrator, loss, n_classes)
    if ignore_index is None:
        raise TypeError("ignore_index: expected an int, the id that pads lists, got None")


def _check_loss(loss: Any, loss_options: Any) -> None:
    """A name, with options where it has any."""
    names = (*FUSED, *DENSE)
    if loss not in names:
        raise ValueError(f"loss: expected one of {', '.join(names)}, got {loss!r}")
    if loss_options and loss != "asymmetric":
        raise ValueError(
            f"loss_options: expected none for loss={loss!r}, got {dict(loss_options)}; only "
            "'asymmetric' has any"
        )
    if loss_options:
        # The loss checks them by itself, on next to nothing.
        asymmetric_loss(torch.zeros(1), torch.zeros(1), **loss_options)


def _check_calibrator(calibrator: Any, loss: str, n_classes: int) -> None:
    """One that fits the labels, or None."""
    if calibrator is None:
        return
    if not isinstance(calibrator, ZLPRCalibrator):
        raise TypeError(f"calibrator: expected a ZLPRCalibrator, got {type(calibrator).__name__}")
    if loss == "sparsemax":
        raise ValueError(
            "calibrator: expected none for loss='sparsemax', whose probabilities are one "
            "distribution over the labels, got one"
        )
    if calibrator.n_classes not in (None, n_classes):
        raise ValueError(
            f"calibrator: expected one for {n_classes} labels, or for any number, got one for "
            f"{calibrator.n_classes}"
        )


def calibrator_config(calibrator: ZLPRCalibrator) -> dict[str, Any]:
    """The arguments that make such a calibrator; what was fitted is its state."""
    return {
        "n_classes": calibrator.n_classes,
        "threshold": calibrator.threshold_kind,
        "strength": calibrator.strength,
    }


def checked_threshold(
    threshold: Any, calibrator: ZLPRCalibrator | None, n_classes: int, device: torch.device
) -> float | Tensor:
    """A number, or one a label, on the device; where none is given the calibrator's, or 0."""
    if threshold is None:
        threshold = 0.0 if calibrator is None else calibrator.threshold
    if isinstance(threshold, Tensor):
        if threshold.shape not in ((1,), (n_classes,)):
            raise ValueError(
                f"threshold: expected a number, or one a label, ({n_classes},), got "
                f"{tuple(threshold.shape)}"
            )
        return threshold.to(device)
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)):
        raise TypeError(f"threshold: expected a number or a tensor, got {type(threshold).__name__}")
    return float(threshold)
