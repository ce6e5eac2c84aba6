"""Sizes that are no multiple of 8: on a GPU products of these are split, and here as well."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from unfused import LOSSES, distance, entmax, make_problem, scores, topk_softmax, unfused

from lastlayer import heads
from lastlayer.fused import linear_bce_loss, linear_cross_entropy, linear_zlpr_loss
from lastlayer.fused.cross_entropy import cross_entropy_rows
from lastlayer.fused.rows import Problem, Wanted, run_chunks
from lastlayer.fused.scores import ALIGN_FROM, BYTES, LayerProducts, missing_columns
from lastlayer.losses import info_nce, zlpr_loss_from_indices
from lastlayer.samplers import Uniform

CLASSES = [1, 2, 3, 63, 64, 65, 127, 129, 191, 203]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# What gradients may be off by, as a share of their length.
WITHIN = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 1e-3}
TRUTHS = {
    "cross_entropy": lambda *given, **more: cross_entropy(*given, reduction="none"),
    "statistics": lambda *given, **more: cross_entropy(*given, reduction="none"),
    "entmax": lambda *given, **more: entmax(*given),
    "sparsemax": lambda *given, **more: entmax(*given, alpha=2.0),
    "topk_softmax": lambda *given, **more: topk_softmax(*given, k=5),
}
with_each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def split(monkeypatch):
    """Products are split as on a GPU, however small they are."""
    monkeypatch.setitem(ALIGN_FROM, "cpu", 0)


def leaves(*shapes, dtype):
    """Random tensors that need gradients, and the same in float64; scores of them are about 1."""
    given = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    given[1] /= shapes[1][1] ** 0.5
    given = [each.to(dtype).requires_grad_() for each in given]
    return given, [each.detach().double().requires_grad_() for each in given]


def check(loss, truth, given, exact):
    """The loss, and the gradients of all that is given, under a gradient that is not 1."""
    within = WITHIN[given[0].dtype]
    torch.testing.assert_close(loss.double(), truth, rtol=within, atol=within)
    found = torch.autograd.grad(1024.0 * loss.sum(), given)
    expected = torch.autograd.grad(1024.0 * truth.sum(), exact)
    for mine, true, leaf in zip(found, expected, given, strict=True):
        assert mine.shape == leaf.shape
        assert mine.is_contiguous()
        if true.norm() > 1e-9:
            # Errors of a few numbers do not average out.
            assert distance(mine, true) <= within * (3 if true.numel() < 16 else 1)
        else:
            assert mine.abs().max() <= 10 * within


class TestLayer:
    @pytest.mark.parametrize("n_classes", [1, 63, 65, 131])
    def test_where_the_number_of_classes_is_odd(self, n_classes):
        layer = LayerProducts([torch.randn(n_classes, 8)], None, 10)
        assert layer.stride % 64 == 0
        assert n_classes < layer.stride < n_classes + 64
        memory = layer.memory(5, torch.float32)
        assert layer.scores_in(memory).shape == (5, n_classes)

    @pytest.mark.parametrize("n_classes", [8, 64, 136])
    def test_nothing_is_split_elsewhere(self, n_classes):
        assert LayerProducts([torch.randn(n_classes, 8)], None, 10).stride == n_classes

    def test_small_products_are_left_alone(self, monkeypatch):
        weight = torch.randn(65, 7)
        monkeypatch.setitem(ALIGN_FROM, "cpu", 10 * 65 * 7)
        assert LayerProducts([weight], None, 10).stride == 128
        assert missing_columns(weight, 10) == 1
        assert LayerProducts([weight], None, 9).stride == 65
        assert missing_columns(weight, 9) == 0

    def test_the_cpu_is_left_alone(self, monkeypatch):
        monkeypatch.delitem(ALIGN_FROM, "cpu")
        weight = torch.randn(65, 7)
        assert LayerProducts([weight], None, 1 << 40).stride == 65
        assert missing_columns(weight, 1 << 40) == 0

    @with_each_dtype
    @pytest.mark.parametrize("sizes", [[1], [67], [3, 2, 70], [64, 65], [130, 1, 129], [0, 65, 0]])
    def test_bands_side_by_side(self, dtype, sizes):
        widths = [8, 16, 24][: len(sizes)]
        weights = [
            torch.randn(size, width).to(dtype) for size, width in zip(sizes, widths, strict=True)
        ]
        bias, hidden = torch.randn(sum(sizes)).to(dtype), torch.randn(9, sum(widths)).to(dtype)
        whole = torch.block_diag(*[weight.double() for weight in weights])
        layer = LayerProducts(weights, bias, 9)
        memory = layer.memory(12, dtype).fill_(torch.nan)
        made = layer.scores_into(memory, hidden)
        assert distance(made, hidden.double() @ whole.T + bias.double()) <= WITHIN[dtype]
        gradient = torch.randn(made.shape).to(dtype)
        made.copy_(gradient)
        padded = layer.padded(memory[:9])
        of_hidden = layer.hidden_gradient(None, padded)
        assert distance(of_hidden, gradient.double() @ whole) <= WITHIN[dtype]
        truth = gradient.double().T @ hidden.double()
        for wide in (False, True):
            totals = [torch.full_like(weight, torch.nan) for weight in weights]
            totals = [each.double() if wide and dtype == torch.float64 else each for each in totals]
            totals = [each.float() if wide and each.itemsize < 4 else each for each in totals]
            for adds in (False, True):
                layer.weight_gradient(totals, padded, hidden, adds)
            for total, rows, part in zip(totals, layer.columns, layer.parts, strict=True):
                if total.numel():
                    assert distance(total, 2 * truth[rows, part]) <= WITHIN[dtype]

    def test_one_sum_is_rounded_once(self):
        """The few classes come first, so that their sum with the rest is rounded at the end."""
        weight, gradient = torch.ones(65, 8).bfloat16(), torch.ones(1, 65).bfloat16()
        gradient[:, 64] = 1.0 / 128
        layer = LayerProducts([weight], None, 1)
        memory = layer.memory(1, torch.bfloat16)
        layer.scores_in(memory).copy_(gradient)
        made = layer.hidden_gradient(None, layer.padded(memory))
        torch.testing.assert_close(made, (gradient.double() @ weight.double()).bfloat16())


class TestRows:
    @with_each_dtype
    @pytest.mark.parametrize("n_classes", CLASSES)
    @pytest.mark.parametrize("name", LOSSES)
    @pytest.mark.thin(3)
    def test_classes(self, dtype, n_classes, name):
        given, exact = leaves((17, 16), (n_classes, 16), (n_classes,), dtype=dtype)
        target = torch.randint(n_classes, (17,))
        loss = LOSSES[name](given[0], given[1], target, given[2])
        check(loss, unfused(TRUTHS[name], exact[0], exact[1], target, exact[2]), given, exact)

    @with_each_dtype
    @pytest.mark.parametrize("width", [1, 2, 3, 7, 63, 65])
    @pytest.mark.parametrize("name", LOSSES)
    @pytest.mark.thin(3)
    def test_widths(self, dtype, width, name):
        given, exact = leaves((17, width), (67, width), (67,), dtype=dtype)
        target = torch.randint(67, (17,))
        loss = LOSSES[name](given[0], given[1], target, given[2])
        check(loss, unfused(TRUTHS[name], exact[0], exact[1], target, exact[2]), given, exact)

    @with_each_dtype
    @pytest.mark.parametrize("n", [1, 63, 65, 127, 129])
    @pytest.mark.parametrize("chunk_rows", ["auto", 64])
    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_rows(self, dtype, n, chunk_rows, reduction):
        given, exact = leaves((n, 9), (131, 9), (131,), dtype=dtype)
        target = torch.randint(131, (n,))
        target[n // 2] = -100
        more = {"reduction": reduction}
        loss = linear_cross_entropy(
            given[0], given[1], target, given[2], chunk_rows=chunk_rows, **more
        )
        truth = unfused(TRUTHS["cross_entropy"], exact[0], exact[1], target, exact[2], **more)
        check(loss, truth, given, exact)

    @with_each_dtype
    @pytest.mark.parametrize("wide", [False, True])
    @pytest.mark.parametrize("width", [8, 9])
    def test_weight_grad_is_added_to(self, dtype, wide, width):
        given, exact = leaves((40, width), (67, width), dtype=dtype)
        target = torch.randint(67, (40,))
        into = torch.ones(67, width, dtype=dtype)
        into = into.float() if wide and into.itemsize < 4 else into
        loss = linear_cross_entropy(
            *given, target, weight_grad=into, chunk_rows=16, reduction="sum"
        )
        loss.backward()
        cross_entropy(scores(*exact), target, reduction="sum").backward()
        assert distance(into, exact[1].grad + 1) <= WITHIN[dtype]
        assert distance(given[0].grad, exact[0].grad) <= WITHIN[dtype]

    @pytest.mark.parametrize("n_classes", [300, 515])
    def test_slabs(self, monkeypatch, n_classes):
        monkeypatch.setitem(BYTES, ("rows", "cpu"), (1 << 16, 1 << 12))
        given, exact = leaves((300, 9), (n_classes, 9), (n_classes,), dtype=torch.bfloat16)
        target = torch.randint(n_classes, (300,))
        loss = linear_cross_entropy(given[0], given[1], target, given[2], chunk_rows="low")
        truth = unfused(TRUTHS["cross_entropy"], exact[0], exact[1], target, exact[2])
        found = torch.autograd.grad(loss, given)
        for mine, true in zip(found, torch.autograd.grad(truth, exact), strict=True):
            assert distance(mine, true) <= 6e-3  # Gradients are added up in half precision.

    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    def test_what_is_not_finite_stays_in_its_row(self, value):
        hidden, weight, target, bias = make_problem(6, 8, 67, dtype=torch.float32)
        with torch.no_grad():
            hidden[2, 3] = value
        losses = linear_cross_entropy(hidden, weight, target, bias, reduction="none")
        others = torch.arange(6) != 2
        assert losses[others].isfinite().all()
        (found,) = torch.autograd.grad(losses[others].sum(), hidden)
        assert found[others].isfinite().all()

    def test_a_masked_row_has_no_gradient(self):
        """Also where its hidden state is infinite, times the 0 of a padded class."""
        hidden, weight = torch.zeros(2, 8), -torch.ones(65, 8)
        hidden[0, :] = torch.inf
        problem = Problem(
            hidden, weight, None, torch.tensor([1, 2]), torch.ones(2), None,
            Wanted(hidden=True, weight=True), torch.float32,
        )  # fmt: skip
        made = run_chunks(cross_entropy_rows(None, 0.0, 0.0, 0.0, 1.0), problem, 2)
        assert made.loss[0] == torch.inf
        assert (made.hidden[0] == 0).all()

    def test_padding_is_never_read(self, monkeypatch):
        """Memory that was not written to is NaN."""
        from lastlayer.fused import scores as module

        def poisoned(shape, dtype, device="cpu"):
            return torch.full(shape, torch.nan, dtype=dtype, device=device)

        monkeypatch.setattr(module, "empty", poisoned)
        given, exact = leaves((17, 16), (67, 16), (67,), dtype=torch.float64)
        target = torch.randint(67, (17,))
        for name in LOSSES:
            loss = LOSSES[name](given[0], given[1], target, given[2])
            check(loss, unfused(TRUTHS[name], exact[0], exact[1], target, exact[2]), given, exact)


class TestLabels:
    @with_each_dtype
    @pytest.mark.parametrize("n_classes", [1, 2, 3, 63, 65, 203])
    @pytest.mark.parametrize("width", [8, 9])
    @pytest.mark.parametrize("chunk_classes", ["auto", 65])
    @pytest.mark.parametrize("loss", [linear_zlpr_loss, linear_bce_loss])
    @pytest.mark.thin(3)
    def test_classes_and_widths(self, dtype, n_classes, width, chunk_classes, loss):
        given, exact = leaves((33, width), (n_classes, width), (n_classes,), dtype=dtype)
        positives = torch.randint(n_classes, (33, 1))
        made = loss(given[0], given[1], positives, given[2], chunk_classes=chunk_classes)
        values = scores(*exact)
        if loss is linear_zlpr_loss:
            truth = zlpr_loss_from_indices(values, positives)
        else:
            labels = torch.zeros_like(values).scatter_(-1, positives, 1.0)
            truth = torch.nn.functional.binary_cross_entropy_with_logits(
                values, labels, reduction="none"
            ).sum(-1)
            truth = truth.mean()
        check(made, truth, given, exact)


@with_each_dtype
@pytest.mark.parametrize(("n", "m", "width"), [(65, 65, 8), (63, 127, 9), (1, 3, 7), (66, 67, 17)])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("chunk_rows", ["auto", 32])
def test_info_nce(dtype, n, m, width, normalize, chunk_rows):
    given, exact = leaves((n, width), (m, width), dtype=dtype)
    options = {"normalize": normalize, "temperature": 0.5}
    keys, exact_keys = given[1][:n], exact[1][:n]
    more, exact_more = given[1][n:], exact[1][n:]
    made = info_nce(given[0], keys, more, chunk_rows=chunk_rows, **options)
    unit = torch.nn.functional.normalize if normalize else lambda rows: rows
    values = unit(exact[0]) @ unit(torch.cat([exact_keys, exact_more])).T / 0.5
    truth = cross_entropy(values, torch.arange(n))
    within = WITHIN[dtype]
    torch.testing.assert_close(made.double(), truth, rtol=within, atol=within)
    found, expected = torch.autograd.grad(made, given), torch.autograd.grad(truth, exact)
    for mine, true in zip(found, expected, strict=True):
        if true.norm() > 1e-9:
            assert distance(mine, true) <= within


HEADS = {
    "adaptive": lambda: heads.AdaptiveSoftmax(33, n_classes=251, cutoffs=[19, 90]),
    "differentiated": lambda: heads.DifferentiatedSoftmax(33, [(67, 17), (130, 9), (54, 7)]),
}


@with_each_dtype
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("chunk_rows", ["auto", 64])
def test_heads_of_groups(dtype, name, chunk_rows, monkeypatch):
    head = HEADS[name]()
    head.chunk_rows = chunk_rows
    exact = HEADS[name]().double()
    head.to(dtype)
    exact.load_state_dict(head.state_dict())
    hidden = torch.randn(129, 33).to(dtype).requires_grad_()
    rows = hidden.detach().double().requires_grad_()
    target = torch.randint(251, (129,))
    loss = head(hidden, target)
    (1024.0 * loss).backward()
    monkeypatch.delitem(ALIGN_FROM, "cpu")
    (1024.0 * exact(rows, target)).backward()
    pairs = zip([hidden, *head.parameters()], [rows, *exact.parameters()], strict=True)
    for mine, true in pairs:
        # A projection in half precision is rounded twice.
        assert distance(mine.grad, true.grad) <= 2 * WITHIN[dtype]


@with_each_dtype
@pytest.mark.parametrize(("n", "n_samples", "width"), [(65, 67, 8), (63, 33, 9), (3, 1, 3)])
def test_sampled_softmax(dtype, n, n_samples, width, monkeypatch):
    """The same draws, with products that are split and ones that are not."""
    head = heads.SampledSoftmax(width, 301, n_samples=n_samples, sampler=Uniform(301)).to(dtype)
    target = torch.randint(301, (n,))
    made = []
    for splits in (True, False):
        if not splits:
            monkeypatch.delitem(ALIGN_FROM, "cpu")
        again = type(head)(**head.config()).to(dtype)
        again.load_state_dict(head.state_dict())
        hidden = torch.randn(n, width, generator=torch.Generator().manual_seed(3)).to(dtype)
        loss = again(hidden.requires_grad_(), target)
        loss.backward()
        made.append([loss.detach(), hidden.grad, *(each.grad for each in again.parameters())])
    for mine, true in zip(*made, strict=True):
        torch.testing.assert_close(mine, true, rtol=WITHIN[dtype], atol=WITHIN[dtype])
