"""Training steps of language models of the size of Llama and GPT-2, with several losses.

Backbone, parameters and optimiser are the same for all methods; only the computation after the last
hidden states differs. Needs Transformers 4.57 or newer.
"""

import copy
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import driver, record
from benchmarks.driver import DTYPES, Call, Case, Family, Inputs, Method, Results, Work
from benchmarks.fused import CCE
from benchmarks.heads import seeded
from benchmarks.record import OURS
from lastlayer.integrations.transformers import swap_head

SECTIONS = EAGER, COMPILED = "eager", "compiled"
GPT2_SECTIONS = GPT2_EAGER, GPT2_COMPILED = "GPT-2, eager", "GPT-2, compiled"
STEP = "step"
TRANSFORMERS = "transformers"
STOCK, SWAPPED, LOW = "stock loss", "swap_head", "swap_head, low memory"
LIGER_LOSS, CCE_LOSS, CCE_EXACT = "fused linear CE", "linear CE", "linear CE, filter_eps=None"
# Relative errors against the same model in float32. All layers round to bfloat16, not only the
# loss.
_TOLERANCES = {
    "bfloat16": {"loss": 1e-3, "norm": 2e-2, "weight": 5e-2},
    "float32": {"loss": 1e-5, "norm": 1e-4, "weight": 1e-4},
}

NOTES = f"""\
- A shape is batch size × sequence length × vocabulary. The model has random weights and the
  architecture of Llama 3.2 with 1.24 billion parameters: hidden size 2048, 16 layers, 32 heads and
  8 key-value heads, intermediate size 8192, embeddings tied to the output layer, torch's scaled
  dot-product attention, no gradient checkpointing. *GPT-2* is the architecture with 124 million
  parameters, without dropout. On a CPU the model is small.
- A step is forward, backward and fused AdamW with learning rate 0, so that all methods and all
  steps use the same weights. All methods share parameters and optimiser.
- *{STOCK}* is the model of Transformers, which stores the logits. *{SWAPPED}* is
  `lastlayer.integrations.transformers.swap_head(model, "full")`, *low memory* with
  `chunk_rows="low"`. For Liger only the fused loss is enabled, not its norms, rotary embeddings and
  SwiGLU. Cut Cross-Entropy is called on the last hidden states; by default it skips gradients of
  small probabilities, and with random weights all probabilities are small.
- *{COMPILED}* is `torch.compile` of everything from tokens to the loss.
- Verified: the loss, the norm of all gradients, and the gradient of the tied embedding, against the
  stock loss of the same weights in float32.
- Memory is beyond parameters and the state of the optimiser; gradients count.
"""


class Shape(NamedTuple):
    """The sizes of a model and its batch."""

    batch: int
    length: int
    classes: int
    hidden: int
    inner: int
    layers: int
    heads: int
    key_heads: int


_ONE_B = Shape(1, 4096, 128_259, 2048, 8192, 16, 32, 8)
_GPT2 = Shape(16, 1024, 50_257, 768, 3072, 12, 12, 12)
_SMALL = Shape(1, 128, 8_003, 128, 512, 2, 4, 2)
_TINY = Shape(2, 16, 211, 32, 64, 2, 4, 2)
# Sections and shapes, by device and whether the run is quick. Compiling takes the most time.
PLAN = {
    ("cuda", False): [
        (EAGER, _ONE_B), (EAGER, _ONE_B._replace(batch=2)), (COMPILED, _ONE_B),
        (GPT2_EAGER, _GPT2), (GPT2_COMPILED, _GPT2),
    ],
    ("cuda", True): [(EAGER, _SMALL), (COMPILED, _SMALL)],
    ("cpu", False): [(EAGER, _SMALL)],
    ("cpu", True): [(EAGER, _TINY), (GPT2_EAGER, _TINY)],
}  # fmt: skip


class Trained(NamedTuple):
    """A model, and its optimiser with initialised state."""

    model: Any
    optimizer: torch.optim.Optimizer


@lru_cache(maxsize=1)
def _trained(gpt2: bool, shape: Shape, dtype: str, device: torch.device) -> Trained:
    """The model that all methods share; ``shape.batch`` is not used."""
    import transformers

    if gpt2:
        build: Any = transformers.GPT2LMHeadModel
        config: Any = transformers.GPT2Config(
            vocab_size=shape.classes, n_embd=shape.hidden, n_inner=shape.inner,
            n_layer=shape.layers, n_head=shape.heads, n_positions=shape.length,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=True,
            bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
    else:
        build = transformers.LlamaForCausalLM
        config = transformers.LlamaConfig(
            vocab_size=shape.classes, hidden_size=shape.hidden, intermediate_size=shape.inner,
            num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
            num_key_value_heads=shape.key_heads, max_position_embeddings=shape.length,
            tie_word_embeddings=True,
        )  # fmt: skip
    with device:
        model: Any = seeded(lambda: build(config), device)
    model.set_attn_implementation("sdpa")
    model.to(DTYPES[dtype]).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    for each in model.parameters():
        each.grad = torch.zeros_like(each)
    optimizer.step()
    optimizer.zero_grad()
    return Trained(model, optimizer)


def _twin(model: Any) -> Any:
    """A copy of the model that shares its parameters and can be modified."""
    return copy.deepcopy(model, {id(each): each for each in model.parameters()})


def _by_model(model: Any) -> Call:
    return lambda tokens: (
        model(input_ids=tokens, labels=tokens, use_cache=False, return_dict=True).loss
    )


def _swapped(model: Any, **options: Any) -> Call:
    return _by_model(swap_head(model, "full", **options))


def _liger(model: Any) -> Call:
    name = "apply_liger_kernel_to_llama"
    apply = driver.peer("liger-kernel", "liger_kernel.transformers", name)
    apply(
        rope=False, rms_norm=False, swiglu=False, cross_entropy=False,
        fused_linear_cross_entropy=True, model=model,
    )  # fmt: skip
    return _by_model(model)


def _cce(model: Any, **options: Any) -> Call:
    loss, weight = driver.peer(*CCE), model.lm_head.weight

    def call(tokens: Tensor) -> Tensor:
        hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        made: Tensor = loss(hidden, weight, tokens, shift=True, **options)
        return made

    return call


def _results(model: Any, loss: Tensor) -> Results:
    gradients = [each.grad for each in model.parameters()]
    norms = [torch.linalg.vector_norm(each, dtype=torch.float32) for each in gradients]
    weight = model.get_input_embeddings().weight
    return {"loss": loss.detach(), "norm": torch.stack(norms).norm(), "weight": weight.grad}


def _work(
    shape: Shape, dtype: str, device: torch.device, section: str, load: Callable[[Any], Call]
) -> Work:
    gpt2 = section in GPT2_SECTIONS
    model, optimizer = _trained(gpt2, shape._replace(batch=1), dtype, device)
    loss_of = load(_twin(model))
    if section in (COMPILED, GPT2_COMPILED):
        loss_of = torch.compile(loss_of, dynamic=False)

    def step(tokens: Tensor, *, verified: bool = False) -> Results:
        loss = loss_of(tokens)
        loss.backward()
        results = _results(model, loss) if verified else {}
        optimizer.step()
        optimizer.zero_grad()
        return results

    return Work(step, verified=partial(step, verified=True), replayed=False)


def _case(section: str, shape: Shape, device: torch.device) -> Case:
    dtype = driver.USUAL_DTYPE[device.type]
    made = partial(_work, shape, dtype, device, section)
    tokens, gpt2 = shape.batch * shape.length, section in GPT2_SECTIONS
    is_eager = section in (EAGER, GPT2_EAGER)

    def method(name: str, source: str, load: Callable[[Any], Call], scratch: int = 0) -> Method:
        return Method(
            name, source, partial(made, load), "cross_entropy", scratch,
            tolerances=_TOLERANCES[dtype],
        )  # fmt: skip

    methods = [
        method(STOCK, TRANSFORMERS, _by_model, tokens * shape.classes * 14),
        method(SWAPPED, OURS, _swapped),
    ]
    if is_eager:
        methods.append(method(LOW, OURS, partial(_swapped, chunk_rows="low")))
    if device.type == "cuda":
        if not gpt2:  # Liger has none for it.
            methods.append(method(LIGER_LOSS, "liger-kernel", _liger))
        methods.append(method(CCE_LOSS, CCE[0], _cce))
        if is_eager:
            methods.append(method(CCE_EXACT, CCE[0], partial(_cce, filter_eps=None)))

    def draw(on: torch.device, seed: int) -> Inputs:
        generator = torch.Generator(on).manual_seed(seed)
        size = shape.batch, shape.length
        return (torch.randint(shape.classes, size, generator=generator, device=on),)

    def reference(_: str, inputs: Inputs) -> Results:
        trained = _trained(gpt2, shape._replace(batch=1), dtype, device)
        model = copy.deepcopy(trained.model).float()
        loss = _by_model(model)(*inputs)
        loss.backward()
        return _results(model, loss)

    # GPT-2 has as many key-value heads as heads, and two products after attention; Llama has three.
    key_heads, products = (shape.heads, 2) if gpt2 else (shape.key_heads, 3)
    layer = shape.hidden * (2 + 2 * key_heads / shape.heads) + products * shape.inner
    parameters = shape.hidden * (shape.layers * layer + shape.classes)
    # Causal attention needs half of the products of queries and keys.
    flop = 6 * tokens * (parameters + shape.layers * shape.length * shape.hidden)
    return Case(
        section, (shape.batch, shape.length, shape.classes), dtype, STEP, tuple(methods), draw,
        reference=reference, flop=round(flop), results_count=True,
        facts={
            "parameters": round(parameters) + gpt2 * shape.length * shape.hidden,
            "settings": f"transformers {record.version(TRANSFORMERS)}",
        },
    )  # fmt: skip


def _cases(device: torch.device, quick: bool) -> list[Case]:
    return [_case(*planned, device) for planned in PLAN[device.type, quick]]


FAMILY = Family("llama", "A language model", _cases, NOTES, seed=2031)
