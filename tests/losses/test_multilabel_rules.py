"""Every multi-label loss keeps the rules that they share."""

from functools import partial

import pytest

from lastlayer.losses.multilabel import asymmetric_loss, bce_loss, multilabel_sparsemax_loss
from lastlayer.losses.zlpr import zlpr_loss
from lastlayer.testing import check_multilabel_loss

LOSSES = {
    "zlpr": (zlpr_loss, {}),
    "bce": (bce_loss, {}),
    "asl": (asymmetric_loss, {"convex": False}),
    "asl without margin": (partial(asymmetric_loss, margin=0.0), {"convex": False}),
    "sparsemax": (multilabel_sparsemax_loss, {"derivatives": False}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_rules_hold(name, seed):
    loss, options = LOSSES[name]
    check_multilabel_loss(loss, seed=seed, **options)


def test_a_broken_rule_is_named(seed):
    def clipped(scores, target, **options):
        return zlpr_loss(scores, target.double().clamp(1e-7, 1 - 1e-7), **options)

    with pytest.raises(AssertionError, match="-inf has loss 0 if the label is 0"):
        check_multilabel_loss(clipped, seed=seed, compile=False)
