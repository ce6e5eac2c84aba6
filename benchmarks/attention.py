"""Attention with sparse weights, compared with torch's softmax attention and AdaSplash."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import driver
from benchmarks.driver import BACKWARD, Case, Family, Inputs, Method, Results, Work
from benchmarks.record import OURS
from lastlayer import entmax
from lastlayer.attention import sparse_attention

# Queries and keys per block; number of queries per head whose results are verified.
BLOCK, VERIFIED = 64, 8
# AdaSplash 1 takes ten times as long as the others, so longer texts are left out.
LONGEST_FIRST = 4096
ALPHAS = {"softmax": 1.0, "entmax 1.5": 1.5, "sparsemax": 2.0, "entmax 1.3": 1.3}
# For sparse blocks: number of groups of keys, and the score of keys that a query attends to.
GROUPS, GAIN = 20, 8.0

NOTES = f"""\
- A shape is sequence length × heads × head size, with batch size 1; queries, keys and values are
  N(0, 1). forward+backward computes the gradients of all three.
- *Blocks* is the share of {BLOCK} × {BLOCK} blocks of weights that are constructed to be empty: the
  keys of a block have one of {GROUPS} orthogonal directions, and the queries of a block have a
  score of about {GAIN:g} with the keys of some directions and about 0 with the others. *Random*
  scores have no such blocks.
- Verified: outputs and gradients of {VERIFIED} queries of each head, against float64 with all of
  their weights.
- torch's attention is softmax, another function of the same shape.
"""


class Size(NamedTuple):
    """Sequence length, number of heads, and head size."""

    length: int
    heads: int
    size: int


SIZES = {
    "cuda": tuple(
        Size(length, 16, size) for size in (64, 128) for length in (512, 4096, 4099, 16384, 32768)
    ),
    "cpu": (Size(128, 4, 32), Size(1023, 4, 64)),
}
# The share of empty blocks by the name of a section; None for random scores.
SECTIONS = {"random": None, "60% of blocks empty": 0.6, "85% of blocks empty": 0.85}


def draw(size: Size, empty: float | None, dtype: torch.dtype, device: Any, seed: int) -> Inputs:
    """Queries, keys and values, ``(1, heads, length, size)``."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = 1, size.heads, size.length, size.size
    query, key, value, upstream = (
        torch.randn(shape, generator=generator, device=device) for _ in range(4)
    )
    if empty is not None:
        blocks = -(-size.length // BLOCK)
        # Orthogonal directions: a query of some groups has a score of about 0 with all others.
        square = torch.randn(size.heads, size.size, size.size, generator=generator, device=device)
        centres = torch.linalg.qr(square).Q[:, :GROUPS]
        order = torch.rand(2, size.heads, blocks, GROUPS, generator=generator, device=device)
        group = order[0].argmax(-1)
        # A block of queries always attends to its own group of keys.
        order[1].scatter_(-1, group.unsqueeze(-1), 2.0)
        chosen = order[1].argsort(-1, descending=True)[..., : round((1 - empty) * GROUPS)]
        wide = torch.stack([centres[head][chosen[head]].sum(1) for head in range(size.heads)])
        own = torch.stack([centres[head][group[head]] for head in range(size.heads)])
        place = torch.arange(size.length, device=device) // BLOCK
        key = own[:, place][None] + 0.1 * key / size.size**0.5
        query = GAIN * size.size**0.5 * wide[:, place][None] + query
    return tuple(each.to(dtype) for each in (query, key, value, upstream))


def _rows(length: int, device: Any) -> Tensor:
    return torch.linspace(0, length - 1, VERIFIED, device=device).long()


def exact(computes: str, inputs: Inputs, causal: bool) -> Results:
    """Outputs and gradients of some queries in float64, with all of their weights."""
    query, key, value, upstream = (each.double() for each in inputs)
    rows = _rows(query.shape[2], query.device)
    some = query[:, :, rows].requires_grad_()
    scores = some @ key.mT * query.shape[-1] ** -0.5
    if causal:
        ahead = torch.arange(key.shape[2], device=key.device) > rows[:, None]
        scores = scores.masked_fill(ahead, -torch.inf)
    out = entmax(scores, ALPHAS[computes]) @ value
    (of_query,) = torch.autograd.grad(out, some, upstream[:, :, rows])
    return {"out": out.detach(), "query": of_query}


def _work(function: Callable[[Tensor, Tensor, Tensor], Any]) -> Work:
    def call(query: Tensor, key: Tensor, value: Tensor, upstream: Tensor) -> Results:
        leaves = [each.detach().requires_grad_() for each in (query, key, value)]
        out = function(*leaves)
        grads = torch.autograd.grad(out, leaves, upstream)
        return {"out": out.detach(), "query": grads[0]}

    def verified(*inputs: Tensor) -> Results:
        rows = _rows(inputs[0].shape[2], inputs[0].device)
        return {name: each[:, :, rows] for name, each in call(*inputs).items()}

    return Work(call, verified=verified)


def _of_adasplash(version: int, causal: bool) -> Work:
    function = driver.peer("adasplash", "adasplash", f"adasplash_v{version}")
    # Version 2 is always causal and supports only alpha 1.5.
    return _work(partial(function, is_causal=causal) if version == 1 else function)


def _case(size: Size, section: str, causal: bool, dtype: str) -> Case:
    def ours(alpha: float) -> Work:
        return _work(partial(sparse_attention, alpha=alpha, is_causal=causal))

    methods = [
        Method(
            "softmax", "torch",
            lambda: _work(partial(scaled_dot_product_attention, is_causal=causal)), "softmax",
        )
    ]  # fmt: skip
    methods += [
        Method(name, OURS, partial(ours, alpha), name)
        for name, alpha in ALPHAS.items()
        if name != "softmax"
    ]
    for version in (2, 1) if causal else (1,):
        if version == 2 or size.length <= LONGEST_FIRST:
            made = partial(_of_adasplash, version, causal)
            methods.append(Method(f"adasplash {version}", "adasplash", made, "entmax 1.5"))
    products = 2 * size.heads * size.length**2 * size.size * 7 // (2 if causal else 1)
    return Case(
        f"{section}{', causal' if causal else ''}", tuple(size), dtype, BACKWARD, tuple(methods),
        partial(draw, size, SECTIONS[section], driver.DTYPES[dtype]),
        reference=partial(exact, causal=causal), flop=products,
    )  # fmt: skip


def _cases(device: torch.device, quick: bool) -> list[Case]:
    on_gpu = device.type == "cuda"
    sizes = SIZES[device.type][: 1 if quick else None]
    return [
        _case(size, section, causal, "bfloat16" if on_gpu else "float32")
        for size in sizes
        for section, empty in SECTIONS.items()
        for causal in (False, True)
        # On a GPU, non-causal attention is measured at two lengths only.
        if causal or not on_gpu or (size.length in (4096, 32768) and empty != 0.6)
    ]


FAMILY = Family("attention", "Sparse attention", _cases, NOTES, seed=1706)
