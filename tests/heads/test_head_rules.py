"""Every head passes the public conformance suite."""

import inspect
from functools import partial

import pytest
import torch

from lastlayer.heads import EntmaxHead, FullSoftmax, TopKSoftmaxHead
from lastlayer.testing import check_head

# Heads whose loss is minus the log-probability of the target, and those with a loss of their own.
LIKELIHOODS = {
    "softmax": partial(FullSoftmax, 7, 23),
    "two classes": partial(FullSoftmax, 1, 2),
    "no bias": partial(FullSoftmax, 7, 23, bias=False),
    "bent and cooled": partial(FullSoftmax, 7, 23, softcap=1.5, temperature=0.6, chunk_rows=4),
    "a class is ignored": partial(FullSoftmax, 7, 23, ignore_index=4),
    "every target counts": partial(FullSoftmax, 7, 23, ignore_index=None),
    "wide": partial(FullSoftmax, 5, 1201, chunk_rows="low"),
    "entmax at 1": partial(EntmaxHead, 7, 23, 1.0),
    "top of all": partial(TopKSoftmaxHead, 7, 23, 30),
}
OTHERS = {
    "smoothed": partial(FullSoftmax, 7, 23, label_smoothing=0.1, z_loss=0.01),
    "entmax": partial(EntmaxHead, 7, 23, chunk_rows=3),
    "sparsemax": partial(EntmaxHead, 7, 23, 2.0, bias=False),
    "entmax 1.25": partial(EntmaxHead, 7, 23, 1.25),
    "top 5": partial(TopKSoftmaxHead, 7, 23, 5, chunk_rows=4),
    "top 1": partial(TopKSoftmaxHead, 7, 23, 1),
}
quick = partial(check_head, compile=False)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_heads_of_a_likelihood(name, seed):
    quick(LIKELIHOODS[name], seed=seed)


@pytest.mark.parametrize("name", OTHERS)
def test_heads_with_a_loss_of_their_own(name, seed):
    quick(OTHERS[name], loss_is_nll=False, seed=seed)


@pytest.mark.parametrize("head", [FullSoftmax, EntmaxHead, TopKSoftmaxHead])
def test_the_signature_names_all_that_a_constructor_takes(head):
    taken = inspect.signature(head).parameters
    shared = {"class_weight", "ignore_index", "reduction", "chunk_rows", "device", "dtype"}
    assert all(taken[name].kind is inspect.Parameter.KEYWORD_ONLY for name in shared)
    assert taken["ignore_index"].default == -100
    assert "options" not in taken
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        head(3, 4, colour=1, **({"k": 2} if head is TopKSoftmaxHead else {}))


@pytest.mark.parametrize(
    "head", [FullSoftmax(7, 23), EntmaxHead(7, 23), TopKSoftmaxHead(7, 23, 5)], ids=repr
)
def test_compiled(head, seed):
    check_head(head, loss_is_nll=isinstance(head, FullSoftmax), draws=1000, seed=seed)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*LIKELIHOODS, *OTHERS])
def test_on_a_gpu(name, seed):
    nll = name in LIKELIHOODS
    check_head((LIKELIHOODS | OTHERS)[name], loss_is_nll=nll, device="cuda", seed=seed)


@pytest.mark.gpu
def test_memory_on_a_gpu_is_that_of_a_chunk():
    head = FullSoftmax(64, 100_000, device="cuda", dtype=torch.bfloat16, chunk_rows=256)
    hidden = torch.randn(8192, 64, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    head.topk(hidden, 5)
    head.sample(hidden, 2)
    head.log_prob(hidden, torch.arange(3, device="cuda").expand(8192, 3))
    assert torch.cuda.max_memory_allocated() - before < 40 * 256 * 100_000
