"""What the compiler does not see: values that are wrong, strides, and arguments without effect."""

import re
from functools import partial

import pytest
import torch
from unfused import LOSSES

import lastlayer
from lastlayer.fused import (
    cross_entropy,
    linear_bce_loss,
    linear_cross_entropy,
    linear_statistics,
    linear_zlpr_loss,
)
from lastlayer.fused.rows import NOT_SPREAD
from lastlayer.heads import FullSoftmax, SampledSoftmax

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
FUNCTIONS = {**LOSSES, "statistics": linear_statistics}
LABEL_LOSSES = {"zlpr": linear_zlpr_loss, "bce": linear_bce_loss}
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
with_each_loss = pytest.mark.parametrize("loss", FUNCTIONS.values(), ids=FUNCTIONS)
with_each_label_loss = pytest.mark.parametrize("loss", LABEL_LOSSES.values(), ids=LABEL_LOSSES)
with_each_layout = pytest.mark.parametrize("layout", ["weight", "hidden", "both", "gaps"])


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()


def compiled(function, backend="aot_eager", **options):
    return torch.compile(partial(function, **options), fullgraph=True, backend=backend)


def raises(kind, *parts):
    """An error of this kind whose message has all parts, in this order."""
    return pytest.raises(kind, match=".*".join(re.escape(part) for part in parts))


def strided(n, d, v, layout, dtype=torch.float32):
    """Hidden states and class vectors, of which some are no contiguous memory."""
    hidden, weight = torch.randn(n, d, dtype=dtype), torch.randn(v, d, dtype=dtype)
    if layout == "gaps":
        hidden, weight = hidden.repeat(1, 2)[:, ::2], weight.repeat(1, 2)[:, :d]
    if layout in ("hidden", "both"):
        hidden = hidden.t().contiguous().t()
    if layout in ("weight", "both"):
        weight = weight.t().contiguous().t()
    return hidden, weight


@with_each_loss
class TestTargets:
    @pytest.mark.parametrize("wrong", [11, 50_000_000, -1])
    def test_out_of_range(self, loss, wrong):
        problem = torch.randn(4, 5), torch.randn(11, 5), torch.tensor([1, -100, wrong, 3])
        message = re.escape(
            f"target: expected class ids from 0 to 10, or ignore_index=-100, got {wrong} at "
            "position (2,)"
        )
        with pytest.raises(ValueError, match=message):
            loss(*problem)
        with pytest.raises(ValueError, match=message):
            compiled(loss)(*problem)

    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_out_of_range_with_class_weight_and_gradients(self, loss, reduction):
        problem = torch.randn(4, 5, requires_grad=True), torch.randn(11, 5)
        step = compiled(loss, reduction=reduction, class_weight=torch.rand(11), ignore_index=None)
        with raises(ValueError, "target: expected class ids from 0 to 10, got 11 at position (1,)"):
            step(*problem, torch.tensor([1, 11, 2, 3]))

    def test_an_ignore_index_that_is_out_of_range(self, loss):
        hidden, weight, target = torch.randn(4, 5), torch.randn(11, 5), torch.tensor([1, 99, 2, 3])
        ours, truth = (
            made if isinstance(made, torch.Tensor) else made.loss
            for made in (
                compiled(loss, ignore_index=99)(hidden, weight, target),
                loss(hidden, weight, target, ignore_index=99),
            )
        )
        torch.testing.assert_close(ours, truth)


@with_each_label_loss
class TestPositives:
    def test_out_of_range(self, loss):
        for wrong in (11, -1):
            lists = torch.tensor([[1, -100], [2, wrong]])
            with raises(ValueError, "positives: expected class ids from 0 to 10", f"got {wrong}"):
                compiled(loss)(torch.randn(2, 5), torch.randn(11, 5), lists)

    def test_offsets_that_lead_outside(self, loss):
        def step(hidden, weight, lists, offsets):
            return loss(hidden, weight, lists, offsets=offsets)

        given = torch.randn(2, 5), torch.randn(11, 5), torch.tensor([1, 2, 3])
        with raises(ValueError, "offsets: expected to increase from 0 to 3", "got [0, 1, 9000000]"):
            compiled(step)(*given, torch.tensor([0, 1, 9_000_000]))

    def test_values_that_are_no_labels(self, loss):
        def step(hidden, weight, lists, values):
            return loss(hidden, weight, lists, values=values)

        given = torch.randn(2, 5), torch.randn(11, 5), torch.tensor([[1], [2]])
        with raises(ValueError, "values: expected labels in [0, 1], got 2.0"):
            compiled(step)(*given, torch.tensor([[1.0], [2.0]]))


class TestStrides:
    @with_each_layout
    @pytest.mark.parametrize("ignored", [0, 3])
    @pytest.mark.parametrize(
        ("name", "options", "statistics"),
        [
            ("cross_entropy", (0.1, 0.0, 0.0, 1.0), (0, 0)),
            ("cross_entropy_statistics", (0.0, 0.0, 0.0, 1.0), (3, 2)),
            ("entmax", (1.5,), (0, 0)),
            ("topk_softmax", (3.0,), (0, 0)),
        ],
    )
    def test_of_rows(self, name, options, statistics, ignored, layout):
        hidden, weight = strided(9, 6, 11, layout)
        target = torch.randint(11, (9, 2))[:, 0]
        target[:ignored] = -100
        self.check_rows(hidden, weight, target, name, options, statistics, "4")

    @with_each_layout
    @pytest.mark.parametrize("ignored", [0, 3])
    def test_of_slabs(self, layout, ignored, monkeypatch):
        hidden, weight = strided(300, 6, 150, layout, torch.bfloat16)
        target = torch.randint(150, (300,))
        target[:ignored] = -100
        ran = []
        monkeypatch.setattr("lastlayer.fused.rows.rows_at_a_time", lambda *_: 16)
        slabs = cross_entropy._run_slabs
        monkeypatch.setattr(
            cross_entropy, "_run_slabs", lambda *given: ran.append(1) or slabs(*given)
        )
        self.check_rows(
            hidden, weight, target, "cross_entropy", (0.0, 0.0, 0.0, 1.0), (0, 0), "low"
        )
        assert ran

    def check_rows(self, hidden, weight, target, name, options, statistics, chunk_rows):
        bias = torch.randn(weight.shape[0], 2).to(hidden.dtype)[:, 0]
        for reduction, upstream in (("mean", None), ("none", torch.rand(hidden.shape[0]))):
            torch.library.opcheck(
                torch.ops.lastlayer.linear_loss.default,
                (
                    [hidden, weight, bias, target, None, None, None], upstream, name, options,
                    -100, chunk_rows, False, *NOT_SPREAD, reduction, [True, True, True],
                ),
                test_utils=["test_schema", "test_faketensor"],
            )  # fmt: skip

    @with_each_layout
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    @pytest.mark.parametrize("name", [*LABEL_LOSSES, "asymmetric"])
    def test_of_labels(self, name, dtype, layout):
        hidden, weight = strided(5, 6, 11, layout, dtype)
        numbers = [4.0, 1.0, 0.05, 1.0] if name == "asymmetric" else []
        bias, positives = torch.randn(11, dtype=dtype), torch.randint(11, (5, 3))
        for reduction, upstream in (("mean", None), ("none", None), ("none", torch.rand(5))):
            torch.library.opcheck(
                torch.ops.lastlayer.linear_label_loss.default,
                (
                    [hidden, weight, bias, positives, None, None], upstream, name, 0.0, -100, "4",
                    numbers, *NOT_SPREAD, reduction, [True, True, True],
                ),
                test_utils=["test_schema", "test_faketensor"],
            )  # fmt: skip

    @pytest.mark.parametrize("name", ["cross_entropy", "zlpr"])
    def test_inductor_with_a_transposed_weight(self, name):
        loss = {"cross_entropy": linear_cross_entropy, "zlpr": linear_zlpr_loss}[name]
        hidden = torch.randn(5, 4).t().requires_grad_()
        weight = torch.randn(5, 11, requires_grad=True)
        target = torch.randint(11, (4,) if name == "cross_entropy" else (4, 2))

        def step(hidden, weight, target):
            return loss(hidden, weight.t(), target)

        leaves = hidden, weight
        ours, truth = (
            torch.autograd.grad(function(hidden, weight, target), leaves)
            for function in (compiled(step, "inductor"), step)
        )
        torch.testing.assert_close(ours, truth)


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
class TestFloat8:
    @with_each_loss
    def test_of_a_fused_loss(self, loss, dtype):
        given = {
            "hidden": torch.zeros(2, 3), "weight": torch.zeros(5, 3), "bias": torch.zeros(5)
        }  # fmt: skip
        for name, tensor in given.items():
            parts = f"{name}: expected torch.float16, ", f"got {dtype}", f"{name}.float()"
            with raises(TypeError, *parts):
                loss(**{**given, name: tensor.to(dtype)}, target=torch.tensor([0, 4]))

    @with_each_label_loss
    def test_of_a_fused_label_loss(self, loss, dtype):
        with raises(TypeError, "hidden: expected torch.float16, ", f"got {dtype}"):
            loss(torch.zeros(2, 3).to(dtype), torch.zeros(5, 3).to(dtype), torch.zeros(2, 1).long())

    def test_of_scores(self, dtype):
        for function in (lastlayer.sparsemax, lastlayer.entmax):
            with raises(TypeError, "scores: expected torch.float16, ", f"got {dtype}"):
                function(torch.zeros(2, 3).to(dtype))
        with raises(TypeError, "scores: expected torch.float16, ", f"got {dtype}"):
            lastlayer.sparsemax_loss(torch.zeros(2, 3).to(dtype), torch.tensor([0, 1]))


@with_each_loss
def test_class_weight_that_needs_a_gradient(loss):
    problem = torch.randn(4, 5), torch.randn(11, 5), torch.tensor([1, 2, 10, 3])
    weights = torch.rand(11, requires_grad=True)
    with raises(ValueError, "class_weight: expected requires_grad=False", "detach()"):
        loss(*problem, class_weight=weights)
    loss(*problem, class_weight=weights.detach())
    with torch.no_grad():
        loss(*problem, class_weight=weights)


class TestFromLinear:
    @pytest.mark.parametrize("head", [FullSoftmax, SampledSoftmax])
    @pytest.mark.parametrize(
        ("name", "value"),
        [("device", "cpu"), ("dtype", torch.float64), ("bias", False), ("n_classes", 3)],
    )
    def test_what_the_layer_decides(self, head, name, value):
        expected = (
            f"{name}: expected no such argument, since it follows from the layer, got {value!r}"
        )
        with raises(TypeError, expected):
            head.from_linear(torch.nn.Linear(5, 7), **{name: value})

    def test_a_layer_without_parameters_as_yet(self):
        lazy = torch.nn.LazyLinear(7)
        with raises(
            ValueError, "linear: expected a layer with initialised parameters", "LazyLinear"
        ):
            FullSoftmax.from_linear(lazy)
        lazy(torch.zeros(1, 5))
        assert FullSoftmax.from_linear(lazy).in_features == 5

    def test_a_sparse_weight(self):
        linear = torch.nn.Linear(5, 7)
        linear.weight = torch.nn.Parameter(linear.weight.detach().to_sparse())
        with raises(TypeError, "linear: expected a dense weight", "torch.sparse_coo", "to_dense"):
            FullSoftmax.from_linear(linear)
