"""Conformance suites: the rules that every map, loss, head and sampler here keeps, for yours too.

Each suite draws fresh inputs, raises ``AssertionError`` at the first rule that is broken, and says
which rule, on which input, by how much and with which seed.
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
