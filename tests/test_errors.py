"""Bad input: a ValueError or TypeError that names the argument, what was expected, what came."""

import math
import re
from functools import partial

import pytest
import torch

import lastlayer
from lastlayer import (
    Entmax,
    EntmaxLoss,
    SparsemaxLoss,
    TopKSoftmax,
    TopKSoftmaxLoss,
    entmax,
    entmax_loss,
    entmax_support,
    fenchel_young_loss,
    sparsemax,
    sparsemax_loss,
    topk_softmax,
    topk_softmax_loss,
)

SCORES = torch.zeros(2, 3)
IDS = torch.tensor([0, 2])
MAPS = {
    "sparsemax": sparsemax,
    "entmax": entmax,
    "topk_softmax": partial(topk_softmax, k=2),
}
LOSSES = {
    "sparsemax_loss": sparsemax_loss,
    "entmax_loss": entmax_loss,
    "topk_softmax_loss": partial(topk_softmax_loss, k=2),
    "fenchel_young_loss": partial(
        fenchel_young_loss,
        predict=lambda s: torch.softmax(s, -1),
        entropy=lambda p: torch.special.entr(p).sum(-1),
    ),
}
with_each_map = pytest.mark.parametrize("function", MAPS.values(), ids=MAPS)
with_each_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def raises(kind, *parts):
    """An error of this kind whose message has all parts, in this order."""
    return pytest.raises(kind, match=".*".join(re.escape(part) for part in parts))


@with_each_map
class TestMaps:
    @pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
    def test_scores_of_a_wrong_dtype(self, function, dtype):
        parts = ("scores: expected a floating dtype", f"got {dtype}", "scores.float()")
        with raises(TypeError, *parts):
            function(torch.zeros(2, 3, dtype=dtype))

    @pytest.mark.parametrize("scores", [[1.0, 2.0], 3.0, None])
    def test_scores_that_are_no_tensor(self, function, scores):
        got = f"got {type(scores).__name__}"
        with raises(TypeError, "scores: expected a torch.Tensor", got):
            function(scores)

    def test_scores_without_a_dimension(self, function):
        with raises(ValueError, "scores: expected at least one dimension", "0-dimensional"):
            function(torch.tensor(1.0))

    @pytest.mark.parametrize("dim", [2, -3, 99])
    def test_dim_out_of_range(self, function, dim):
        with raises(ValueError, "dim: expected -2 to 1", "(2, 3)", f"got {dim}"):
            function(SCORES, dim=dim)

    @pytest.mark.parametrize("dim", [0.0, None, True, "last"])
    def test_dim_of_a_wrong_type(self, function, dim):
        with raises(TypeError, "dim: expected an int", f"got {type(dim).__name__}"):
            function(SCORES, dim=dim)

    @pytest.mark.parametrize("shape", [(3, 2), (4,), (1, 2, 3)])
    def test_mask_of_another_shape(self, function, shape):
        parts = ("mask: expected a shape that broadcasts to", "(2, 3)", f"got {shape}")
        with raises(ValueError, *parts):
            function(SCORES, mask=torch.ones(shape, dtype=torch.bool))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
    def test_mask_of_another_dtype(self, function, dtype):
        parts = (
            "mask: expected dtype torch.bool",
            "True for allowed",
            f"got {dtype}",
            "mask.bool()",
        )
        with raises(TypeError, *parts):
            function(SCORES, mask=torch.ones(2, 3, dtype=dtype))

    def test_mask_that_is_no_tensor(self, function):
        with raises(TypeError, "mask: expected a bool tensor", "got list"):
            function(SCORES, mask=[True, True, False])

    @pytest.mark.parametrize("impl", ["cuda", "", None, "Triton"])
    def test_an_unknown_implementation(self, function, impl):
        parts = ("impl: expected 'auto' or one of", f"got {impl!r}", "'auto' selects")
        with raises(ValueError, *parts):
            function(SCORES, impl=impl)

    def test_an_implementation_that_cannot_run(self, function):
        parts = ("impl: 'triton' cannot run", "torch.float64", "impl='auto' or impl='reference'")
        if lastlayer.kernels.available()["triton"] is not None:
            parts = ("impl: 'triton' cannot run", "impl='auto' or impl='reference'")
        with raises(ValueError, *parts):
            function(SCORES.double(), impl="triton")
        with raises(ValueError, "impl: 'cpu' cannot run", "the scores are on 'meta'"):
            function(SCORES.to("meta"), impl="cpu")


@pytest.mark.parametrize("alpha", [0.5, 0.0, -1.0, math.nan, math.inf, 1 - 1e-9])
@pytest.mark.parametrize(
    "call",
    [
        lambda a: entmax(SCORES, a),
        lambda a: entmax_support(SCORES, a),
        lambda a: entmax_loss(SCORES, IDS, a),
        Entmax,
        EntmaxLoss,
    ],
    ids=["entmax", "entmax_support", "entmax_loss", "Entmax", "EntmaxLoss"],
)
def test_alpha_below_one_or_not_a_number(call, alpha):
    with raises(ValueError, "alpha: expected at least 1", "1 is softmax", f"got {alpha}"):
        call(alpha)
    with raises(ValueError, "alpha: expected at least 1", "got", "learn_alpha=True"):
        call(torch.tensor([[1.5], [alpha]], dtype=torch.float64))


@pytest.mark.parametrize("alpha", ["1.5", None, True, [1.5], 1 + 2j])
def test_alpha_of_a_wrong_type(alpha):
    for call in (lambda: entmax(SCORES, alpha), lambda: entmax_loss(SCORES, IDS, alpha)):
        with raises(TypeError, "alpha: expected a number or a floating tensor", "got"):
            call()


def test_alpha_tensors_that_do_not_fit():
    with raises(TypeError, "alpha: expected a number or a floating tensor", "torch.int64"):
        entmax(SCORES, torch.tensor(2))
    parts = ("alpha: expected a shape that broadcasts to (2, 1)", "one alpha per row", "got (3,)")
    for call in (entmax, entmax_support):
        with raises(ValueError, *parts):
            call(SCORES, torch.full((3,), 1.5))
    with raises(ValueError, *parts):
        entmax_loss(SCORES, IDS, torch.full((3,), 1.5))


def test_an_alpha_that_is_learned_starts_above_one():
    parts = ("alpha: expected more than 1 with learn_alpha=True", "got 1.0", "start at 1.5")
    with raises(ValueError, *parts):
        Entmax(1.0, learn_alpha=True)


@pytest.mark.parametrize("k", [0, -1])
def test_k_below_one(k):
    calls = (
        lambda: topk_softmax(SCORES, k),
        lambda: topk_softmax_loss(SCORES, IDS, k),
        lambda: TopKSoftmax(k),
        lambda: TopKSoftmaxLoss(k),
    )
    for call in calls:
        with raises(ValueError, "k: expected at least 1", f"got {k}", "full softmax"):
            call()


@pytest.mark.parametrize("k", [2.0, None, True, "3"])
def test_k_of_a_wrong_type(k):
    with raises(TypeError, "k: expected an int", f"got {type(k).__name__}"):
        topk_softmax(SCORES, k)


def test_max_support():
    with raises(ValueError, "max_support: expected at least 1", "got 0"):
        entmax_support(SCORES, 1.5, 0)
    with raises(TypeError, "max_support: expected an int", "got float"):
        entmax_support(SCORES, 1.5, 8.0)
    with raises(ValueError, "max_support: expected at least 3", "got 2", "raise it"):
        entmax_support(SCORES, 1.5, 2)


@with_each_loss
class TestLosses:
    @pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
    def test_scores_of_a_wrong_dtype(self, loss, dtype):
        with raises(TypeError, "scores: expected a floating dtype", f"got {dtype}"):
            loss(torch.zeros(2, 3, dtype=dtype), IDS)

    @pytest.mark.parametrize("wrong", [3, -1, -99, 10**9])
    def test_a_target_out_of_range(self, loss, wrong):
        parts = ("target: expected class ids from 0 to 2", "ignore_index=-100", f"got {wrong}")
        with raises(ValueError, *parts):
            loss(SCORES, torch.tensor([0, wrong]))

    def test_targets_of_a_wrong_dtype(self, loss):
        with raises(TypeError, "target: expected integer class ids", "torch.bool", ".long()"):
            loss(SCORES, torch.tensor([True, False]))

    @pytest.mark.parametrize("ignore_index", [1.0, "none", True])
    def test_an_ignore_index_of_a_wrong_type(self, loss, ignore_index):
        got = f"got {type(ignore_index).__name__}"
        with raises(TypeError, "ignore_index: expected an int, or None", got):
            loss(SCORES, IDS, ignore_index=ignore_index)

    def test_every_target_counts_without_an_ignore_index(self, loss):
        with raises(ValueError, "target: expected class ids from 0 to 2, got -100"):
            loss(SCORES, torch.tensor([0, -100]), ignore_index=None)

    def test_soft_targets_are_not_told_to_be_class_ids(self, loss):
        """Rounding a distribution to integers would make all of its entries class 0."""
        with pytest.raises(ValueError, match="target: expected distributions") as error:
            loss(SCORES, torch.full((2, 3), 0.5))
        assert "long()" not in str(error.value)

    def test_targets_that_are_no_tensor(self, loss):
        with raises(TypeError, "target: expected a torch.Tensor", "got list"):
            loss(SCORES, [0, 1])

    def test_targets_of_another_shape(self, loss):
        with raises(ValueError, "target: expected shape (2,)", "row of scores", "got (3,)"):
            loss(SCORES, torch.tensor([0, 1, 2]))
        parts = ("target: expected distributions of the shape of scores (2, 3)", "got (2,)")
        with raises(ValueError, *parts, "class ids must have an integer dtype"):
            loss(SCORES, IDS.float())

    def test_a_negative_distribution(self, loss):
        target = torch.tensor([[0.5, 0.5, 0.0], [1.5, -0.5, 0.0]])
        with raises(ValueError, "target: expected distributions with no negative", "got -0.5"):
            loss(SCORES, target)

    @pytest.mark.parametrize("total", [0.0, 0.9, 1.01, 3.0])
    def test_a_distribution_that_does_not_sum_to_one(self, loss, total):
        target = torch.full((2, 3), total / 3)
        parts = ("target: expected distributions that sum to 1", f"got a sum of {total:g}")
        with raises(ValueError, *parts, "target.sum(-1, keepdim=True)"):
            loss(SCORES, target)

    def test_a_distribution_with_a_nan(self, loss):
        target = torch.tensor([[0.5, 0.5, 0.0], [math.nan, 0.5, 0.5]])
        with raises(ValueError, "target: expected distributions", "got nan"):
            loss(SCORES, target)

    @pytest.mark.parametrize("reduction", ["elementwise_mean", "", None, "Mean"])
    def test_an_unknown_reduction(self, loss, reduction):
        parts = ("reduction: expected one of ('mean', 'sum', 'none')", f"got {reduction!r}")
        with raises(ValueError, *parts):
            loss(SCORES, IDS, reduction=reduction)

    def test_class_weights_that_do_not_fit(self, loss):
        with raises(
            ValueError, "class_weight: expected shape (3,)", "one weight per class", "got (2,)"
        ):
            loss(SCORES, IDS, class_weight=torch.ones(2))
        with raises(TypeError, "class_weight: expected a floating tensor", "got torch.int64"):
            loss(SCORES, IDS, class_weight=torch.ones(3, dtype=torch.int64))
        with raises(TypeError, "class_weight: expected a floating tensor", "got list"):
            loss(SCORES, IDS, class_weight=[1.0, 1.0, 1.0])
        with raises(ValueError, "class_weight: expected requires_grad=False"):
            loss(SCORES, IDS, class_weight=torch.ones(3, requires_grad=True))


def test_modules_refuse_a_reduction_when_they_are_made():
    for make in (SparsemaxLoss, EntmaxLoss, partial(TopKSoftmaxLoss, 2)):
        with raises(ValueError, "reduction: expected one of", "got 'avg'"):
            make(reduction="avg")


@pytest.mark.gpu
def test_values_on_a_gpu_are_checked_inside_debug():
    scores, target = SCORES.cuda(), torch.full((2, 3), 0.5, device="cuda")
    sparsemax_loss(scores, target)
    with lastlayer.debug(), raises(ValueError, "target: expected distributions that sum to 1"):
        sparsemax_loss(scores, target)
    with lastlayer.debug(), raises(ValueError, "max_support: expected at least 3"):
        entmax_support(scores, 1.5, 2)
    assert entmax_support(scores, 1.5, 2).size.tolist() == [3, 3]


def test_debug_is_left_as_it_was_found():
    from lastlayer._torch import values_are_checked

    meta = torch.empty(1, device="meta")
    with lastlayer.debug():
        assert not values_are_checked(meta)
    assert values_are_checked(torch.zeros(1))
