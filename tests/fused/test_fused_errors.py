"""Bad input: an error that names the argument, what was expected, what came, and the remedy."""

import re
from functools import partial

import pytest
import torch
from unfused import LOSSES

import lastlayer
from lastlayer.fused import (
    linear_cross_entropy,
    linear_entmax_loss,
    linear_statistics,
    linear_topk_softmax_loss,
)

HIDDEN = torch.zeros(2, 3)
WEIGHT = torch.zeros(5, 3)
TARGET = torch.tensor([0, 4])
BIAS = torch.zeros(5)
FUNCTIONS = {**LOSSES, "statistics": linear_statistics}
with_each_loss = pytest.mark.parametrize("loss", FUNCTIONS.values(), ids=FUNCTIONS)
with_options = pytest.mark.parametrize(
    "loss", [linear_cross_entropy, linear_statistics], ids=["cross_entropy", "statistics"]
)


def raises(kind, *parts):
    """An error of this kind whose message has all parts, in this order."""
    return pytest.raises(kind, match=".*".join(re.escape(part) for part in parts))


@with_each_loss
class TestTensors:
    @pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
    def test_dtypes_that_are_not_floating(self, loss, dtype):
        with raises(TypeError, "hidden: expected a floating dtype", f"got {dtype}"):
            loss(HIDDEN.to(dtype), WEIGHT, TARGET)
        with raises(TypeError, "weight: expected a floating dtype", f"got {dtype}"):
            loss(HIDDEN, WEIGHT.to(dtype), TARGET)
        with raises(TypeError, "bias: expected a floating dtype", f"got {dtype}"):
            loss(HIDDEN, WEIGHT, TARGET, BIAS.to(dtype))

    def test_what_is_no_tensor(self, loss):
        with raises(TypeError, "hidden: expected a torch.Tensor, got list"):
            loss([[0.0]], WEIGHT, TARGET)
        with raises(TypeError, "weight: expected a torch.Tensor, got Linear"):
            loss(HIDDEN, torch.nn.Linear(3, 5), TARGET)
        with raises(TypeError, "target: expected a torch.Tensor, got list"):
            loss(HIDDEN, WEIGHT, [0, 4])
        with raises(TypeError, "bias: expected a torch.Tensor, got bool"):
            loss(HIDDEN, WEIGHT, TARGET, True)

    def test_dtypes_that_differ(self, loss):
        parts = ("expected the dtype of hidden, torch.float32, got torch.float64", "convert")
        with raises(TypeError, "weight: ", *parts, "torch.autocast"):
            loss(HIDDEN, WEIGHT.double(), TARGET)
        with raises(TypeError, "bias: ", *parts):
            loss(HIDDEN, WEIGHT, TARGET, BIAS.double())

    def test_devices_that_differ(self, loss):
        parts = ("expected the device of hidden, cpu, got meta",)
        for name, arguments in {
            "weight": (HIDDEN, WEIGHT.to("meta"), TARGET),
            "target": (HIDDEN, WEIGHT, TARGET.to("meta")),
            "bias": (HIDDEN, WEIGHT, TARGET, BIAS.to("meta")),
        }.items():
            with raises(ValueError, f"{name}: ", *parts):
                loss(*arguments)
        for name in ("class_weight", "row_weight", "weight_grad"):
            given = {"class_weight": BIAS, "row_weight": torch.zeros(2), "weight_grad": WEIGHT}
            with raises(ValueError, f"{name}: ", *parts):
                loss(HIDDEN, WEIGHT, TARGET, **{name: given[name].to("meta")})

    def test_shapes_that_do_not_match(self, loss):
        with raises(ValueError, "hidden: expected shape (*batch, 3)", "(5, 3)", "got (2, 4)"):
            loss(torch.zeros(2, 4), WEIGHT, TARGET)
        with raises(ValueError, "weight: expected shape (n_classes, in_features)", "got (15,)"):
            loss(HIDDEN, torch.zeros(15), TARGET)
        with raises(ValueError, "bias: expected shape (5,)", "got (3,)"):
            loss(HIDDEN, WEIGHT, TARGET, torch.zeros(3))
        with raises(ValueError, "target: expected shape (2,)", "one class id per row", "got (3,)"):
            loss(HIDDEN, WEIGHT, torch.zeros(3, dtype=torch.long))
        with raises(ValueError, "target: expected shape (2,)", "got (2, 1)"):
            loss(HIDDEN, WEIGHT, TARGET[:, None])
        with raises(ValueError, "hidden: expected at least one dimension"):
            loss(torch.tensor(1.0), WEIGHT, TARGET)

    def test_no_classes(self, loss):
        with raises(ValueError, "weight: expected at least one class", "got shape (0, 3)"):
            loss(HIDDEN, torch.zeros(0, 3), TARGET)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
    def test_target_of_a_wrong_dtype(self, loss, dtype):
        with raises(TypeError, "target: expected integer class ids", str(dtype)):
            loss(HIDDEN, WEIGHT, TARGET.to(dtype))

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
    def test_target_of_any_integer_dtype(self, loss, dtype):
        given, same = loss(HIDDEN, WEIGHT, TARGET.to(dtype)), loss(HIDDEN, WEIGHT, TARGET)
        torch.testing.assert_close(given, same)

    def test_distributions_are_told_where_to_go(self, loss):
        with raises(TypeError, "target: expected integer class ids", "a loss on scores"):
            loss(HIDDEN, WEIGHT, torch.full((2, 5), 0.2))

    @pytest.mark.parametrize("wrong", [5, -1, 1000, -99])
    def test_target_out_of_range(self, loss, wrong):
        target = torch.zeros(3, 4, dtype=torch.long)
        target[0, 1] = -100
        target[1, 2] = target[2, 0] = wrong
        parts = ("target: expected class ids from 0 to 4, or ignore_index=-100", f"got {wrong}")
        with raises(ValueError, *parts, "at position (1, 2)"):
            loss(torch.zeros(3, 4, 3), WEIGHT, target)

    def test_nothing_is_ignored_where_that_is_said(self, loss):
        target = torch.tensor([1, -100])
        with raises(ValueError, "expected class ids from 0 to 4, got -100 at position (1,)"):
            loss(HIDDEN, WEIGHT, target, ignore_index=None)
        with raises(ValueError, "or ignore_index=7, got -100 at position (1,)"):
            loss(HIDDEN, WEIGHT, target, ignore_index=7)

    def test_class_weight(self, loss):
        for wrong in (torch.zeros(4), torch.zeros(5, 1), torch.tensor(1.0)):
            shape = tuple(wrong.shape)
            with raises(ValueError, "class_weight: expected shape (5,)", f"got {shape}"):
                loss(HIDDEN, WEIGHT, TARGET, class_weight=wrong)
        for wrong, got in ((torch.zeros(5, dtype=torch.long), "torch.int64"), ([1.0] * 5, "list")):
            with raises(TypeError, "class_weight: expected a floating tensor", f"got {got}"):
                loss(HIDDEN, WEIGHT, TARGET, class_weight=wrong)

    def test_row_weight(self, loss):
        for wrong in (torch.zeros(3), torch.zeros(2, 1), torch.tensor(1.0)):
            parts = ("row_weight: expected the shape of target, (2,)", f"got {tuple(wrong.shape)}")
            with raises(ValueError, *parts):
                loss(HIDDEN, WEIGHT, TARGET, row_weight=wrong)
        for wrong, got in ((torch.ones(2, dtype=torch.bool), "torch.bool"), (2.0, "float")):
            with raises(TypeError, "row_weight: expected a floating tensor", f"got {got}"):
                loss(HIDDEN, WEIGHT, TARGET, row_weight=wrong)

    def test_weight_grad(self, loss):
        with raises(TypeError, "weight_grad: expected a tensor to add to, got bool", "zeros"):
            loss(HIDDEN, WEIGHT, TARGET, weight_grad=True)
        with raises(TypeError, "weight_grad: expected torch.float32, got torch.float64"):
            loss(HIDDEN, WEIGHT, TARGET, weight_grad=WEIGHT.double())
        halves = HIDDEN.bfloat16(), WEIGHT.bfloat16(), TARGET
        with raises(TypeError, "expected torch.bfloat16 or torch.float32, got torch.float16"):
            loss(*halves, weight_grad=WEIGHT.half())
        with raises(TypeError, "weight_grad: expected torch.float64, got torch.float32"):
            loss(HIDDEN.double(), WEIGHT.double(), TARGET, weight_grad=WEIGHT)
        with raises(ValueError, "weight_grad: expected shape (5, 3)", "got (3, 5)"):
            loss(HIDDEN, WEIGHT, TARGET, weight_grad=torch.zeros(3, 5))
        with raises(ValueError, "weight_grad: expected shape (5, 3)", "rows that are contiguous"):
            loss(HIDDEN, WEIGHT, TARGET, weight_grad=torch.zeros(3, 5).t())

    def test_weight_grad_inside_compile(self, loss):
        torch.compiler.reset()
        compiled = torch.compile(
            partial(loss, weight_grad=WEIGHT.clone()), backend="eager", fullgraph=True
        )
        # torch wraps it in an exception of its own.
        with pytest.raises(Exception, match=r"weight_grad: cannot be used inside torch\.compile"):
            compiled(HIDDEN, WEIGHT, TARGET)


@with_each_loss
class TestOptions:
    @pytest.mark.parametrize("reduction", ["batchmean", None, "", 1])
    def test_reduction(self, loss, reduction):
        with raises(ValueError, "reduction: expected one of", f"got {reduction!r}"):
            loss(HIDDEN, WEIGHT, TARGET, reduction=reduction)

    @pytest.mark.parametrize("ignore_index", [1.0, "none", True, [1]])
    def test_ignore_index(self, loss, ignore_index):
        got = f"got {type(ignore_index).__name__}"
        with raises(TypeError, "ignore_index: expected an int, or None", got):
            loss(HIDDEN, WEIGHT, TARGET, ignore_index=ignore_index)

    @pytest.mark.parametrize("chunk_rows", [0, -1])
    def test_chunk_rows_below_one(self, loss, chunk_rows):
        with raises(ValueError, "chunk_rows: expected at least 1", f"got {chunk_rows}"):
            loss(HIDDEN, WEIGHT, TARGET, chunk_rows=chunk_rows)

    @pytest.mark.parametrize("chunk_rows", ["high", "8", True, 8.0, None])
    def test_chunk_rows_of_a_wrong_type(self, loss, chunk_rows):
        got = f"got {type(chunk_rows).__name__} {chunk_rows!r}"
        with raises(TypeError, "chunk_rows: expected an int, 'auto' or 'low'", got):
            loss(HIDDEN, WEIGHT, TARGET, chunk_rows=chunk_rows)

    def test_options_are_named(self, loss):
        with pytest.raises(TypeError, match="positional argument"):
            loss(HIDDEN, WEIGHT, TARGET, None, -100)


@with_options
class TestCrossEntropyOptions:
    @pytest.mark.parametrize(
        ("name", "value", "expected"),
        [
            ("label_smoothing", -0.1, "from 0 to 1"),
            ("label_smoothing", 1.1, "from 0 to 1"),
            ("label_smoothing", float("nan"), "from 0 to 1"),
            ("z_loss", -1e-4, "at least 0"),
            ("z_loss", float("inf"), "at least 0"),
            ("softcap", 0.0, "above 0"),
            ("softcap", -30, "above 0"),
            ("temperature", 0.0, "above 0"),
            ("temperature", -1.0, "above 0"),
            ("temperature", float("nan"), "above 0"),
        ],
    )
    def test_numbers_out_of_range(self, loss, name, value, expected):
        with raises(ValueError, f"{name}: expected ", expected, f"got {value}"):
            loss(HIDDEN, WEIGHT, TARGET, **{name: value})

    @pytest.mark.parametrize("name", ["label_smoothing", "z_loss", "softcap", "temperature"])
    @pytest.mark.parametrize("value", ["1", True, torch.tensor(0.5)])
    def test_what_is_no_number(self, loss, name, value):
        with raises(TypeError, f"{name}: expected a number, got {type(value).__name__}"):
            loss(HIDDEN, WEIGHT, TARGET, **{name: value})


@pytest.mark.parametrize("alpha", [0.99, 0, -2.0, float("inf"), float("nan")])
def test_alpha_out_of_range(alpha):
    with raises(ValueError, "alpha: expected at least 1", f"got {alpha}"):
        linear_entmax_loss(HIDDEN, WEIGHT, TARGET, alpha=alpha)


def test_alpha_cannot_be_learned_here():
    with raises(TypeError, "alpha: expected a number, got", "Tensor", "lastlayer.entmax_loss"):
        linear_entmax_loss(HIDDEN, WEIGHT, TARGET, alpha=torch.tensor(1.5))
    with raises(TypeError, "alpha: expected a number"):
        linear_entmax_loss(HIDDEN, WEIGHT, TARGET, alpha="1.5")


@pytest.mark.parametrize("function", [linear_topk_softmax_loss, linear_statistics])
def test_k(function):
    for wrong in (0, -3):
        with raises(ValueError, "k: expected at least 1", f"got {wrong}"):
            function(HIDDEN, WEIGHT, TARGET, k=wrong)
    for wrong in (2.0, "2", True, torch.tensor(2)):
        with raises(TypeError, "k: expected an int", f"got {type(wrong).__name__}"):
            function(HIDDEN, WEIGHT, TARGET, k=wrong)


@pytest.mark.gpu
@with_each_loss
def test_targets_on_a_gpu_are_checked_in_debug(loss):
    problem = HIDDEN.cuda(), WEIGHT.cuda(), torch.tensor([0, 77]).cuda()
    with lastlayer.debug(), raises(ValueError, "got 77 at position (1,)"):
        loss(*problem)


@pytest.mark.parametrize(
    "make",
    [
        lambda w: torch.zeros(1, 3).expand(6, 3),
        lambda w: torch.zeros(20).as_strided((6, 3), (1, 1)),
        lambda w: torch.zeros(3, 6).t(),
        lambda w: w,
        lambda w: w.detach(),
    ],
    ids=["expanded", "overlapping", "transposed", "the weight", "a view of it"],
)
def test_memory_that_no_gradient_can_be_added_to(make):
    weight = torch.randn(6, 3, requires_grad=True)
    kept = weight.detach().clone()
    with pytest.raises(ValueError, match="weight_grad: expected"):
        linear_cross_entropy(
            torch.randn(4, 3), weight, torch.randint(6, (4,)), weight_grad=make(weight)
        )
    assert torch.equal(weight, kept)
