"""Heads of the sweep: each call of each registered head compared with plain torch modules."""

from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy, linear, logsigmoid

from benchmarks import driver, heads_reference
from benchmarks.driver import BACKWARD, FORWARD, Case, Inputs, Method, Results, Work
from benchmarks.heads import Problem, draw_work, seeded, zipf
from benchmarks.heads_reference import in_float64
from benchmarks.record import OURS
from lastlayer.heads import ClassData, TopK, registered
from lastlayer.heads.char_cnn import AFTER, BEGIN, END

# k of top-k; positive labels per row; rows whose log-probabilities are compared.
K, POSITIVES, COMPARED = 10, 4, 64
STEP, ALL, TARGET, TOP, SAMPLE = "step", "log_prob all", "log_prob target", f"topk {K}", "sample 1"
CALLS = (STEP, ALL, TARGET, TOP, SAMPLE)
# Options of heads besides their recipe; and a variant with another tree.
OPTIONS: dict[str, dict[str, Any]] = {"char_cnn": {"filters": ((1, 16), (2, 16), (3, 32))}}
VARIANTS = {"hierarchical two_level": ("hierarchical", {"tree": "two_level"})}


def _bce_rows(twin: Any, hidden: Tensor, lists: Tensor) -> Tensor:
    scores = linear(hidden, twin.weight, twin.bias)
    labels = torch.zeros_like(scores).scatter_(1, lists, 1.0)
    each = functional.binary_cross_entropy_with_logits(scores, labels, reduction="none")
    return each.sum(-1)


# The float64 loss of a step; for other heads it is that of a float64 copy.
FORMULAS = {
    "full": heads_reference.flat,
    "hierarchical": heads_reference.paths,
    "adaptive": heads_reference.clusters,
    "differentiated": heads_reference.bands,
    "char_cnn": heads_reference.by_log_prob,
    "sampled": heads_reference.sampled,
    "nce": heads_reference.noise,
    "bce": _bce_rows,
}
# Heads for which torch's code computes the same function, in a step and in log_prob.
SAME = {
    STEP: ("full", "char_cnn", "bce"),
    ALL: ("full", "self_normalized", "sampled", "nce", "importance", "adaptive_importance",
          "char_cnn", "bce"),
}  # fmt: skip
# Rounding decides ties between characters, and only one of them gets the gradient.
LETTERS = {"hidden": 1e-3, "weight": 1e-3}
TOLERANCES = {
    "float32": {"log_prob": 1e-3, "chi_square": 170.0},
    # Rounding of scores changes which classes are in a support.
    "bfloat16": {
        "log_prob": 5e-2,
        "chi_square": 170.0,
        "loss": 1e-2,
        "hidden": 3e-2,
        "weight": 3e-2,
    },
}  # fmt: skip


def recipes() -> dict[str, tuple[str, dict[str, Any]]]:
    """The recipe of each head and its options, by name in tables."""
    return {name: (name, OPTIONS.get(name, {})) for name in registered()} | VARIANTS


def is_multilabel(name: str) -> bool:
    """Whether the targets of a head are lists of classes."""
    return registered()[recipes()[name][0]][1].task == "multilabel"


@lru_cache(maxsize=1)
def class_data(width: int, classes: int) -> ClassData:
    """Counts by Zipf's law, and random words."""
    letters = np.random.default_rng(0).integers(97, 123, (classes, 12), dtype=np.uint8)
    lengths = 3 + np.arange(classes) % 6
    words = (bytes(row[:n]).decode() for row, n in zip(letters, lengths, strict=True))
    spellings = [f"{word}{number}" for number, word in enumerate(words)]
    return ClassData(width, np.ceil(1e6 * zipf(classes)).astype(np.int64), spellings)


@lru_cache(maxsize=1)
def built(name: str, problem: Problem) -> Any:
    """A new head, cached for all of its calls."""
    (cls, recipe), options = registered()[recipes()[name][0]], recipes()[name][1]
    data = class_data(problem.width, problem.classes)
    made = seeded(lambda: recipe.build(cls, data, options | problem.made), problem.device)
    return made.to(problem.device)


class _Plain(nn.Module):
    """The obvious torch code: a linear layer, and functions of its scores."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.linear = nn.Linear(problem.width, problem.classes, **problem.made)

    def scores(self, hidden: Tensor) -> Tensor:
        made: Tensor = self.linear(hidden)
        return made

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(self.scores(hidden), target)

    def log_probs(self, scores: Tensor) -> Tensor:
        return torch.log_softmax(scores, -1, torch.promote_types(scores.dtype, torch.float32))

    def log_prob(self, hidden: Tensor, classes: Tensor | None = None) -> Tensor:
        made = self.log_probs(self.scores(hidden))
        if classes is None:
            return made
        return made.gather(-1, classes.view(len(made), -1)).view(classes.shape)

    def topk(self, hidden: Tensor, k: int) -> TopK:
        return TopK(*self.log_prob(hidden).topk(k))

    def sample(self, hidden: Tensor, n_samples: int = 1) -> Tensor:
        probs = torch.softmax(self.scores(hidden), -1, torch.float32)
        return torch.multinomial(probs, n_samples, replacement=True)


class _PlainLabels(_Plain):
    """The same for several labels per row."""

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        scores = self.scores(hidden)
        labels = torch.zeros_like(scores).scatter_(1, target, 1.0)
        each = functional.binary_cross_entropy_with_logits
        return each(scores, labels, reduction="sum") / len(scores)

    def log_probs(self, scores: Tensor) -> Tensor:
        return logsigmoid(scores.to(torch.promote_types(scores.dtype, torch.float32)))


class _PlainSpellings(_Plain):
    """The character CNN of a head with convolutions; caches its vectors without gradients."""

    symbols: Tensor
    inside: Tensor
    kept: Tensor | None = None

    def __init__(self, head: Any) -> None:
        nn.Module.__init__(self)
        self.head = head
        texts = [word.encode()[: head.max_length] for word in head.spellings]
        longest = max(map(len, texts)) + 2
        rows = [[BEGIN, *text, END] + [AFTER] * (longest - len(text) - 2) for text in texts]
        symbols = torch.tensor(rows, device=head.bias.device)
        self.register_buffer("symbols", symbols)
        self.register_buffer("inside", (symbols != AFTER).unsqueeze(1))

    def vectors(self) -> Tensor:
        cnn, found = self.head.cnn, []
        after = functional.pad(self.symbols, (0, max(cnn.widths) - 1), value=AFTER)
        chars = cnn.chars(after).transpose(1, 2)
        for width, layer in zip(cnn.widths, cnn.filters, strict=True):
            filters = layer.weight.unflatten(1, (width, -1)).transpose(1, 2)
            seen = functional.conv1d(chars, filters, layer.bias)[..., : self.symbols.shape[1]]
            found.append(seen.masked_fill(~self.inside, -torch.inf).amax(-1))
        features = torch.cat(found, -1).relu()
        for layer in cnn.highway:
            features = layer(features)
        made: Tensor = cnn.project(features) + self.head.correct(self.head.corrections)
        return made

    def scores(self, hidden: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return linear(hidden, self.vectors(), self.head.bias)
        if self.kept is None or self.kept.dtype != hidden.dtype:
            self.kept = self.vectors()
        return linear(hidden, self.kept, self.head.bias)


def _plain(name: str, problem: Problem) -> nn.Module:
    if name == "char_cnn":
        return _PlainSpellings(built(name, problem))
    kind = _PlainLabels if is_multilabel(name) else _Plain
    return seeded(lambda: kind(problem), problem.device)


def _step(module: Any, formula: Any, problem: Problem) -> Work:
    parameters = {name: each for name, each in module.named_parameters() if each.requires_grad}
    work = driver.loss_step(module, "hidden", parameters=parameters)

    def errors(results: Results, inputs: Inputs) -> dict[str, float]:
        if formula is not None:
            exact = heads_reference.step(module, formula, problem.classes, *inputs)
        else:
            # The copy has the same random counter, so both repeat the step with the same draws.
            twin, (hidden, target) = in_float64(module), inputs
            own = dict(twin.named_parameters())
            step = driver.loss_step(twin, "hidden", parameters=own).call
            exact = step(hidden.double().requires_grad_(), target)
            results = work.call(hidden.clone().requires_grad_(), target)
        found = {
            name: driver.relative_error(results[name], each.to_dense())
            for name, each in exact.items()
            if name in results and each is not None
        }
        # np.max is NaN if any error is.
        worst = float(np.max([found.pop(name) for name in parameters if name in found]))
        return found | {"weight": worst}

    return Work(work.call, errors=errors, replayed=False)


def _log_prob(name: str, module: Any, hidden: Tensor) -> Tensor:
    """Log-probabilities in float64, by torch's code if possible, else by a float64 copy."""
    made: Tensor
    if name not in SAME[ALL] or isinstance(module, _Plain):
        made = in_float64(module).log_prob(hidden.double())
    elif name == "char_cnn":
        made = in_float64(_PlainSpellings(module)).log_prob(hidden.double())
    else:
        scores = linear(hidden.double(), module.weight.double(), module.bias.double())
        made = logsigmoid(scores) if is_multilabel(name) else torch.log_softmax(scores, -1)
    return made


def _inference(name: str, module: Any, call: str) -> Work:
    asked = {
        ALL: lambda hidden, _: {"log_prob": module.log_prob(hidden)},
        TARGET: lambda hidden, target: {"log_prob": module.log_prob(hidden, target)},
        TOP: lambda hidden, _: module.topk(hidden, K)._asdict(),
        SAMPLE: lambda hidden, _: {"ids": module.sample(hidden)},
    }[call]

    @torch.no_grad()
    def errors(results: Results, inputs: Inputs) -> dict[str, float]:
        rows = 1 if call == SAMPLE else COMPARED
        hidden, target = (each[:rows] for each in inputs)
        true = _log_prob(name, module, hidden)
        if call == SAMPLE:
            probs = true[0].exp().cpu().numpy()
            judge = draw_work(lambda n: (module.sample(hidden, n)[0], None), probs / probs.sum())
            return judge.errors({}, ()) if judge.errors else {}
        # Log-probabilities far below the largest are clamped before the comparison.
        floor = true.amax(-1, keepdim=True) - 5.0
        true = true.clamp(min=floor)
        got = results["values" if call == TOP else "log_prob"][:rows].double()
        if call == TARGET:
            true = true.gather(-1, target.view(len(target), -1)).view(target.shape)
            floor = floor.view(-1, *[1] * (target.dim() - 1))
        elif call == TOP:
            found = results["classes"][:rows]
            reached, true = true.gather(-1, found), true.topk(K).values
            if bool((found.sort(-1).values.diff(dim=-1) == 0).any()):
                return {"log_prob": torch.inf}
            got = torch.where((reached - true).abs() > (got - true).abs(), reached, got)
        return {"log_prob": float((got.clamp(min=floor) - true).abs().max())}

    return Work(torch.no_grad()(asked), errors=errors, replayed=False)


def _load(name: str, call: str, problem: Problem, *, plain: bool) -> Work:
    module = _plain(name, problem) if plain else built(name, problem)
    if call != STEP:
        return _inference(name, module.eval(), call)
    formula = None if plain else FORMULAS.get(recipes()[name][0])
    return _step(module.train(), formula, problem)


def _case(name: str, call: str, size: tuple[int, int, int], device: torch.device) -> Case:
    labels, letters = is_multilabel(name), name == "char_cnn"
    # The maxima of a character CNN can differ between bfloat16 and float64.
    dtype = "float32" if letters else driver.USUAL_DTYPE[device.type]
    problem = Problem(*size, driver.DTYPES[dtype], device)

    def draw(on: torch.device, seed: int) -> Inputs:
        hidden, target = problem.draw(on, seed)
        if not labels:
            return hidden, target
        steps = torch.arange(POSITIVES, device=on) * (problem.classes // POSITIVES)
        return hidden, (target.unsqueeze(-1) + steps) % problem.classes

    beside = {
        STEP: "linear + BCE" if labels else "linear + cross_entropy",
        TOP: "topk of log_sigmoid" if labels else "topk of log_softmax",
        SAMPLE: "multinomial of softmax",
    }.get(call, "log_sigmoid of linear" if labels else "log_softmax of linear")
    if letters and call == STEP:
        beside = "the same network in torch"
    computes = "torch" if name in SAME[STEP if call == STEP else ALL] else name
    exact = TOLERANCES[dtype] | (LETTERS if letters else {})
    load = partial(_load, name, call, problem)
    methods = (
        Method(beside, "torch", partial(load, plain=True), "torch", tolerances=exact),
        Method(name, OURS, partial(load, plain=False), computes, tolerances=exact),
    )
    direction, gradients = (BACKWARD, ("hidden",)) if call == STEP else (FORWARD, ())
    return Case(f"head {name}: {call}", size, dtype, direction, methods, draw, gradients,
                results_count=True)  # fmt: skip


def cases(size: tuple[int, int, int], device: torch.device) -> list[Case]:
    """All calls of all heads at one size; multi-label heads have no ``sample``."""
    return [
        _case(name, call, size, device)
        for name in recipes()
        for call in CALLS
        if not (call == SAMPLE and is_multilabel(name))
    ]
