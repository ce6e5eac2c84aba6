"""Every map passes the public conformance suite, as function and as module."""

from functools import partial

import pytest
import torch

from lastlayer import Entmax, Sparsemax, TopKSoftmax, entmax, sparsemax, topk_softmax
from lastlayer.testing import check_map

ALPHAS = (1.0, 1.05, 1.25, 1.5, 1.75, 2.0, 3.0)


def test_sparsemax(seed):
    check_map(sparsemax, seed=seed)


@pytest.mark.thin(2)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_entmax(alpha, seed):
    check_map(partial(entmax, alpha=alpha), sparse=alpha > 1, seed=seed)


@pytest.mark.thin(2)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_entmax_with_alpha_as_a_tensor(alpha, seed):
    check_map(
        partial(entmax, alpha=torch.tensor(alpha, dtype=torch.float64)),
        sparse=alpha > 1,
        seed=seed,
    )


@pytest.mark.thin(2)
@pytest.mark.parametrize("k", [1, 2, 3, 40])
def test_topk_softmax(k, seed):
    check_map(partial(topk_softmax, k=k), seed=seed)


def test_topk_softmax_of_all_is_dense(seed):
    check_map(partial(topk_softmax, k=5000), sparse=False, seed=seed)


@pytest.mark.thin(2)
@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("name", ["sparsemax", "entmax", "topk_softmax"])
def test_forced_implementations(name, impl, seed, full):
    forced = {
        "sparsemax": partial(sparsemax, impl=impl),
        "entmax": partial(entmax, alpha=1.3, impl=impl),
        "topk_softmax": partial(topk_softmax, k=3, impl=impl),
    }
    # Naming an implementation skips torch's dispatcher, and only the dispatcher can be traced. The
    # sixty bisections of the reference take a compiler a quarter of a minute.
    traced = impl == "reference" and (full or name != "entmax")
    check_map(forced[name], compile="aot_eager" if traced else False, seed=seed)


@pytest.mark.thin(2)
@pytest.mark.parametrize("module", [Sparsemax(), Entmax(), Entmax(1.25), TopKSoftmax(3)], ids=repr)
def test_modules(module, seed):
    check_map(module, seed=seed)


def test_a_module_with_a_learned_alpha(seed):
    check_map(Entmax(1.5, learn_alpha=True).double(), seed=seed)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "function",
    [sparsemax, entmax, partial(entmax, alpha=1.25), partial(topk_softmax, k=3)],
    ids=["sparsemax", "entmax", "entmax 1.25", "topk"],
)
def test_on_a_gpu(function, seed):
    check_map(function, device="cuda", widths=(1, 2, 33, 4097, 40_000), seed=seed)
