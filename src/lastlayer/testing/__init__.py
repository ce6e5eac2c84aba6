"""Conformance tests for maps, losses, heads and samplers, including your own.

Each test draws random inputs and raises ``AssertionError`` at the first rule that is broken. The
error gives the rule, the input, the size of the error, and the seed.
"""

from lastlayer.testing.heads import check_head
from lastlayer.testing.losses import check_loss
from lastlayer.testing.maps import check_map
from lastlayer.testing.multilabel import check_multilabel_head, check_multilabel_loss
from lastlayer.testing.samplers import check_sampler

__all__ = [
    "check_head",
    "check_loss",
    "check_map",
    "check_multilabel_head",
    "check_multilabel_loss",
    "check_sampler",
]
