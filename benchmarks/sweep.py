"""Every public call compared with the obvious torch code, worst ratio first.

A call on scores or on a linear layer is one line of :data:`SPECS`; heads are those of the registry.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import cross_entropy, linear, logsigmoid

from benchmarks import driver, sweep_heads, table
from benchmarks.driver import BACKWARD, FORWARD, Call, Case, Family, Inputs, Method, Results, Work
from benchmarks.multilabel import _zlpr_rows as zlpr_rows
from benchmarks.record import OURS, Record
from benchmarks.sweep_heads import POSITIVES, K
from benchmarks.table import EMPTY, Grid
from lastlayer import fused, losses, maps
from lastlayer.heads import in_batch_softmax_loss
from lastlayer.maps.support import Support
from lastlayer.maps.tsallis import tsallis_entropy

# max_support of entmax_support; standard deviation of the scores.
MOST, SPREAD = 64, 3.0
# More classes than the support of any row of such scores.
_SUPPORTED = 1024
# Ratios above this count as slower, or as more memory.
BAR = 1.1
# Below this many bytes memory is not compared: resident memory on a CPU is noisy.
_LEAST_BYTES = {"cuda": 1_000_000, "cpu": 32_000_000}


class Size(NamedTuple):
    """Rows, hidden size, classes."""

    rows: int
    width: int
    classes: int


SIZES = {
    "cpu": (Size(8, 16, 100), Size(64, 64, 1000), Size(255, 127, 20003)),
    "cuda": (Size(256, 256, 10_000), Size(4096, 512, 32_000), Size(4095, 512, 50_257)),
}
# Time budget of a run, in seconds.
SECONDS = {"cpu": 360.0, "cuda": 240.0}

# Public names that are not timed, and why.
NOT_TIMED = {
    **dict.fromkeys(
        ("Entmax", "Sparsemax", "TopKSoftmax", "EntmaxLoss", "SparsemaxLoss", "TopKSoftmaxLoss",
         "ZLPRLoss", "InfoNCELoss"), "a module that calls the function of the same name",
    ),
    **dict.fromkeys(("Support", "Statistics", "Mixed"), "a tuple of results"),
    **dict.fromkeys(
        ("attention", "fused", "heads", "optim", "parallel", "samplers", "trees", "vectors"),
        "a package",
    ),
    **dict.fromkeys(
        ("mixup", "mixup_from_indices", "smooth_labels"), "prepares labels before the step"
    ),
    "NegativeQueue": "holds the keys of earlier steps",
    "ZLPRCalibrator": "is fitted once, on held-out data",
    "debug": "a context that checks values",
}  # fmt: skip

# Why a call takes longer than torch's, by a part of its title; the first match is used.
_NODES = "every node of the tree must be computed"
_AGAIN = "the scores of the best classes are recomputed exactly, one by one"
_HOST = "host time: argument checks, and Python code around the kernels"
REASONS = {
    "adaptive_importance: step": "each row scores its own draws, one class vector at a time",
    "hierarchical: log_prob all": _NODES,
    "two_level: log_prob all": _NODES,
    " 8×": _HOST,
    " 64×": _HOST,
    "zlpr_probability": "the scores are doubled first: one pass more than a sigmoid",
    "fenchel_young_loss": "computed in float32, torch's code in the dtype of the scores",
    "in_batch_softmax_loss": "not profiled; its scores are float32, torch's bfloat16",
    "negative_sampling_loss": "computed in float32, torch's code in the dtype of the scores",
    "nce_loss": "computed in float32, torch's code in the dtype of the scores",
    "learnable alpha": "powers with one exponent per row, and the gradient of alpha",
    "dim 0": "the scores are transposed and back",
    "asymmetric_loss": "another function: two logarithms and four divisions per score",
    "linear_topk": _AGAIN,
    "linear_entmax": "the host waits for the lists of classes in the support",
    "head entmax: step": "the host waits for the lists of classes in the support",
    "head sparsemax: step": "the host waits for the lists of classes in the support",
    "head topk: step": _AGAIN,
    "sparsemax_labels: step": "float32 scores, and a dense matrix of labels",
    "adaptive: log_prob target": "rows are grouped by cluster: the host waits for the group sizes",
    "reduction none": "backward scales the gradient of the scores by row: one more pass",
    ": step": _HOST,
    " 256×": "probably host time; not profiled one by one",
}

NOTES = f"""\
- Every public map, loss and fused function, and for every registered head a step (forward +
  backward), `log_prob` of all classes and of the targets, `topk({K})` and `sample()`, compared with
  the obvious torch code. *Other function* marks torch code that computes a different function of
  the same shape, because torch does not have this one. A character CNN is compared with the same
  network of torch modules. torch's losses use the dtype of the scores; its log-probabilities are
  float32.
- A shape is rows × hidden size × classes, or rows × classes of scores, which are N(0, {SPREAD:g}²).
- Verified: results and gradients, against torch code in float64 if that computes the same, and
  otherwise against the reference implementation or the head itself in float64; draws by a χ² test.
- Times are the 20th percentile, which is less affected by other processes than the median.
- The table lists the calls with a ratio of time or memory above {BAR}, worst first. Memory is
  beyond inputs and parameters; results and gradients count.
"""


# Inputs that get a gradient, and names of the last input if that is the upstream gradient.
_LEAVES = ("scores", "alpha", "hidden", "weight", "query", "key", "positive", "negative")
_UPSTREAM = ("upstream", "of_rows")


def draw(takes: Sequence[str], size: Size, dtype: str, generator: torch.Generator) -> Inputs:
    """Draws the inputs of the given names."""
    rows, width, classes = size
    on: dict[str, Any] = {"device": generator.device}
    wide = torch.promote_types(driver.DTYPES[dtype], torch.float32)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return driver.normal(shape, generator).mul_(scale).to(driver.DTYPES[dtype])

    def ids(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator, **on)

    def lists() -> Tensor:
        within = classes // POSITIVES
        return ids(within, rows, POSITIVES) + within * torch.arange(POSITIVES, **on)

    def labels() -> Tensor:
        return dense_labels(normal(rows, classes), lists())

    made: dict[str, Callable[[], Tensor]] = {
        "scores": lambda: normal(rows, classes, scale=SPREAD),
        "upstream": lambda: normal(rows, classes),
        "of_rows": lambda: normal(rows),
        # One alpha per row: the gradient of a single alpha is a sum over rows that may cancel.
        "alpha": lambda: torch.full((rows, 1), 1.5, dtype=wide, **on),
        "mask": lambda: normal(rows, classes) > -1.0,
        "ids": lambda: ids(classes, rows),
        "lists": lists,
        "labels": labels,
        "distribution": lambda: labels() / POSITIVES,
        "weight": lambda: normal(classes, width, scale=SPREAD / width**0.5),
        "positive": lambda: normal(rows),
        "log_q": lambda: logsigmoid(normal(width).to(wide)),
    }
    return tuple(made[name]() if name in made else normal(rows, width) for name in takes)


@dataclass(frozen=True)
class Spec:
    """One call on scores or a linear layer.

    Attributes:
        name: the public name, and a variant after a comma.
        takes: names of the inputs. If the last is "upstream" or "of_rows", it is the upstream
            gradient of the result; otherwise the result is a loss.
        plain: torch code on the same inputs; ``beside`` is its name in tables.
        exact: the function of ``ours``, in float64; None if ``plain`` computes the same.
        forward: whether to run without gradients.
        half: tolerances in half precision that differ from the default.
    """

    name: str
    takes: str
    ours: Call
    plain: Call
    beside: str
    exact: Call | None = None
    forward: bool = False
    half: Mapping[str, float] = field(default_factory=dict)

    def case(
        self, size: Size, dtype: str, *, compiled: bool = False, replayed: bool = False
    ) -> Case:
        """A case with torch's code, ours, and optionally torch's code compiled."""
        names = self.takes.split()
        gradients = () if self.forward else tuple(name for name in names if name in _LEAVES)
        shape = (size.rows, size.width) if names[0] in ("query", "positive") else size[::2]
        computes = "torch" if self.exact is None else self.name

        def reference(computed: str, inputs: Inputs) -> Results:
            wide = tuple(x.double() if x.is_floating_point() else x for x in inputs)
            exact = self.plain if computed == "torch" or self.exact is None else self.exact
            return _call(exact, gradients, names[-1], *case.leaves(wide))

        def work(function: Call) -> Work:
            return Work(partial(_call, function, gradients, names[-1]), replayed=replayed)

        loose = self.half if dtype == "bfloat16" else {}
        methods = [
            Method(self.beside, "torch", lambda: work(self.plain), "torch"),
            Method(self.name, OURS, lambda: work(self.ours), computes, tolerances=loose),
        ]
        if compiled:
            name = f"{self.beside}, compiled"
            methods.append(
                Method(name, "torch", lambda: work(driver.compiled(self.plain)), "torch")
            )
        case = Case(
            self.name, tuple(size) if "weight" in names else shape, dtype,
            FORWARD if self.forward else BACKWARD, tuple(methods),
            lambda on, seed: draw(names, size, dtype, torch.Generator(on).manual_seed(seed)),
            gradients, reference, _compared, results_count=True,
        )  # fmt: skip
        return case


def _call(function: Call, gradients: Sequence[str], last: str, *inputs: Tensor) -> Results:
    """Results by name, and the gradients of the inputs named in ``gradients``."""
    weighted = last in _UPSTREAM
    with torch.set_grad_enabled(bool(gradients)):
        made: Any = function(*(inputs[:-1] if weighted else inputs))
    loss: Any = getattr(made, "loss", made)
    if gradients:
        loss.backward(inputs[-1].to(loss.dtype) if weighted else None)
    name = "loss" if gradients and last != "upstream" else "probs"
    results: dict[str, Any] = made._asdict() if hasattr(made, "_asdict") else {name: loss}
    results = {name: each.detach() for name, each in results.items()}
    for name, leaf in zip(gradients, inputs, strict=False):
        results[name], leaf.grad = leaf.grad, None
    return results


def _compared(_: Method, results: Results, exact: Results, inputs: Inputs) -> dict[str, float]:
    """Relative errors; for a support, the relative error of its dense probabilities."""
    if "indices" in results:
        zeros = inputs[0].new_zeros(inputs[0].shape, dtype=torch.float64)
        made = zeros.scatter_add(-1, results["indices"], results["values"].double())
        true = zeros.scatter_add(-1, exact["indices"], exact["values"])
        return {"probs": driver.relative_error(made, true)}
    # Ids are not compared: rounding decides between nearly equal scores.
    wanted: dict[str, Any] = dict(exact)
    return {
        name: driver.relative_error(results[name], each)
        for name, each in wanted.items()
        if each is not None and each.is_floating_point()
    }


def dense_labels(scores: Tensor, lists: Tensor) -> Tensor:
    """Dense 0/1 labels from lists of classes, in the dtype and shape of the scores."""
    return torch.zeros_like(scores).scatter_(1, lists, 1.0)


def _softmax(scores: Tensor, *_: Tensor) -> Tensor:
    return torch.softmax(scores, -1)


def _masked(scores: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(scores.masked_fill(~mask, -torch.inf), -1)


def _bce(scores: Tensor, labels: Tensor) -> Tensor:
    each = functional.binary_cross_entropy_with_logits
    return each(scores, labels, reduction="sum") / len(scores)


def _listed(loss: Call) -> Call:
    return lambda scores, lists: loss(scores, dense_labels(scores, lists))


def _on_linear(loss: Call, **options: Any) -> Call:
    return lambda hidden, weight, target: loss(linear(hidden, weight), target, **options)


def _zlpr(scores: Tensor, labels: Tensor) -> Tensor:
    rows: Tensor = zlpr_rows(scores, labels > 0)
    return rows.mean()


def _asymmetric(scores: Tensor, labels: Tensor) -> Tensor:
    chance, below = torch.sigmoid(scores), (torch.sigmoid(scores) - 0.05).clamp(min=0)
    on = (1 - chance) * logsigmoid(scores)
    return -torch.where(labels > 0, on, below**4 * torch.log1p(-below)).sum(-1).mean()


def _entropy(probs: Tensor) -> Tensor:
    return -torch.xlogy(probs, probs).sum(-1)


def _exact_map(scores: Tensor, alpha: float | Tensor) -> Tensor:
    """The reference implementation on the best classes, which include the support."""
    best, where = scores.topk(min(_SUPPORTED, scores.shape[-1]))
    probs = maps.entmax(best, alpha, impl="reference")
    return torch.zeros_like(scores).scatter(-1, where, probs)


def _exact_entmax(alpha: float) -> Call:
    predict, entropy = partial(_exact_map, alpha=alpha), partial(tsallis_entropy, alpha=alpha)
    return lambda scores, target: losses.fenchel_young_loss(scores, target, predict, entropy)


def _exact_topk(scores: Tensor, target: Tensor) -> Tensor:
    predict = partial(maps.topk_softmax, k=K, impl="reference")
    return losses.fenchel_young_loss(scores, target, predict, _entropy)


def _by_hand(scores: Tensor, target: Tensor) -> Tensor:
    """A Fenchel-Young loss in torch: with constant probabilities its gradient is correct."""
    probs = _softmax(scores.detach())
    at_target = scores.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return ((probs * scores).sum(-1) - at_target + _entropy(probs)).mean()


def _pairs(query: Tensor, key: Tensor, temperature: float = 1.0) -> Tensor:
    own = torch.arange(len(query), device=query.device)
    return cross_entropy(query @ key.t() / temperature, own)


def _normalized_pairs(query: Tensor, key: Tensor) -> Tensor:
    return _pairs(functional.normalize(query), functional.normalize(key), 0.07)


def _negatives(positive: Tensor, negative: Tensor) -> Tensor:
    return -(logsigmoid(positive) + logsigmoid(-negative).sum(-1)).mean()


def _noise(positive: Tensor, negative: Tensor, log_q: Tensor) -> Tensor:
    log_k = math.log(negative.shape[-1])
    return _negatives(positive - log_q[0] - log_k, negative - log_q - log_k)


def _statistics(hidden: Tensor, weight: Tensor, target: Tensor) -> fused.Statistics:
    scores = linear(hidden, weight)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    sums = scores.logsumexp(-1)
    at_target = scores.gather(-1, target.unsqueeze(-1))
    log_prob = at_target.squeeze(-1) - sums
    with torch.no_grad():
        entropy = sums - (torch.softmax(scores, -1) * scores).sum(-1)
        best, in_top = scores.argmax(-1), (scores > at_target).sum(-1) < 5
    return fused.Statistics(-log_prob.mean(), log_prob, entropy, sums, best, in_top)


_MAP, _LOSS, _LABELS = "scores upstream", "scores ids", "scores labels"
_LINEAR, _LISTS = "hidden weight ids", "hidden weight lists"
_FORWARD: dict[str, Any] = {"forward": True}
# Rounding of scores to bfloat16 changes which classes are in a support.
_TIES = {"loss": 1e-2, "hidden": 0.2, "weight": 0.2}
SPECS = (
    Spec("sparsemax", _MAP, maps.sparsemax, _softmax, "softmax",
         partial(_exact_map, alpha=2.0)),
    Spec("sparsemax, dim 0", _MAP, partial(maps.sparsemax, dim=0), partial(torch.softmax, dim=0),
         "softmax", partial(maps.sparsemax, dim=0, impl="reference")),
    Spec("sparsemax, masked", "scores mask upstream", lambda s, m: maps.sparsemax(s, mask=m),
         _masked, "masked_fill + softmax",
         lambda s, m: maps.sparsemax(s, mask=m, impl="reference")),
    *(
        Spec(f"entmax, alpha {alpha}", _MAP, partial(maps.entmax, alpha=alpha), _softmax, "softmax",
             partial(_exact_map, alpha=alpha))
        for alpha in (1.5, 1.3)
    ),
    Spec("entmax, learnable alpha", "scores alpha upstream", maps.entmax, _softmax, "softmax",
         _exact_map, half={"alpha": 5e-2}),
    Spec("topk_softmax", _MAP, partial(maps.topk_softmax, k=K), _softmax, "softmax",
         partial(maps.topk_softmax, k=K, impl="reference")),
    Spec("entmax_support", "scores", partial(maps.entmax_support, max_support=MOST),
         lambda s: Support(*torch.topk(torch.softmax(s, -1), MOST), s),
         "topk of softmax", partial(maps.entmax_support, max_support=MOST, impl="reference"),
         **_FORWARD),
    Spec("sparsemax_loss", _LOSS, losses.sparsemax_loss, cross_entropy, "cross_entropy",
         _exact_entmax(2.0)),
    *(
        Spec(f"entmax_loss, alpha {alpha}", _LOSS, partial(losses.entmax_loss, alpha=alpha),
             cross_entropy, "cross_entropy", _exact_entmax(alpha))
        for alpha in (1.5, 1.3)
    ),
    Spec("entmax_loss, distributions", "scores distribution", losses.entmax_loss, cross_entropy,
         "cross_entropy", _exact_entmax(1.5)),
    Spec("topk_softmax_loss", _LOSS, partial(losses.topk_softmax_loss, k=K), cross_entropy,
         "cross_entropy", _exact_topk),
    Spec("fenchel_young_loss", _LOSS,
         lambda s, t: losses.fenchel_young_loss(s, t, _softmax, _entropy), _by_hand,
         "map, entropy and scores at the target"),
    Spec("multilabel_sparsemax_loss", _LABELS, losses.multilabel_sparsemax_loss, _bce, "BCE",
         lambda s, t: _exact_entmax(2.0)(s, t / POSITIVES)),
    Spec("multilabel_sparsemax_predict", "scores",
         lambda s: losses.multilabel_sparsemax_predict(s).to(s.dtype),
         lambda s: (torch.softmax(s, -1) > 0.1).to(s.dtype), "softmax > 0.1",
         lambda s: (maps.sparsemax(s, impl="reference") > 0).double(), **_FORWARD),
    Spec("zlpr_loss", _LABELS, losses.zlpr_loss, _bce, "BCE", _zlpr),
    Spec("zlpr_loss_from_indices", "scores lists", losses.zlpr_loss_from_indices, _listed(_bce),
         "BCE of dense labels", _listed(_zlpr)),
    Spec("zlpr_probability", "scores", losses.zlpr_probability, lambda s: torch.sigmoid(2 * s),
         "sigmoid of 2 × scores", **_FORWARD),
    Spec("bce_loss", _LABELS, losses.bce_loss, _bce, "BCE"),
    Spec("asymmetric_loss", _LABELS, losses.asymmetric_loss, _bce, "BCE", _asymmetric),
    Spec("info_nce", "query key", losses.info_nce, _normalized_pairs, "products + cross_entropy",
         half={"loss": 1e-2, "query": 3e-2, "key": 3e-2}),
    Spec("in_batch_softmax_loss", "query key", partial(in_batch_softmax_loss, correction="none"),
         _pairs, "products + cross_entropy"),
    Spec("negative_sampling_loss", "positive negative", losses.negative_sampling_loss, _negatives,
         "logsigmoid"),
    Spec("nce_loss", "positive negative log_q",
         lambda p, n, q: losses.nce_loss(p, n, q[0], q), _noise, "logsigmoid"),
    Spec("linear_cross_entropy", _LINEAR, fused.linear_cross_entropy, _on_linear(cross_entropy),
         "linear + cross_entropy"),
    Spec("linear_cross_entropy, smoothing", _LINEAR,
         partial(fused.linear_cross_entropy, label_smoothing=0.1),
         _on_linear(cross_entropy, label_smoothing=0.1), "linear + cross_entropy"),
    Spec("linear_cross_entropy, reduction none", f"{_LINEAR} of_rows",
         partial(fused.linear_cross_entropy, reduction="none"),
         _on_linear(cross_entropy, reduction="none"), "linear + cross_entropy"),
    Spec("linear_statistics", _LINEAR, fused.linear_statistics, _statistics,
         "linear + log_softmax, entropy, logsumexp"),
    Spec("linear_entmax_loss", _LINEAR, fused.linear_entmax_loss, _on_linear(cross_entropy),
         "linear + cross_entropy", _on_linear(_exact_entmax(1.5)), half=_TIES),
    Spec("linear_topk_softmax_loss", _LINEAR, partial(fused.linear_topk_softmax_loss, k=K),
         _on_linear(cross_entropy), "linear + cross_entropy", _on_linear(_exact_topk), half=_TIES),
    Spec("linear_zlpr_loss", _LISTS, fused.linear_zlpr_loss, _on_linear(_listed(_bce)),
         "linear + BCE", _on_linear(_listed(_zlpr))),
    Spec("linear_bce_loss", _LISTS, fused.linear_bce_loss, _on_linear(_listed(_bce)),
         "linear + BCE"),
)  # fmt: skip


def _cases(device: torch.device, quick: bool) -> list[Case]:
    dtype, sizes = driver.USUAL_DTYPE[device.type], SIZES[device.type][: 1 if quick else None]
    return [
        case
        for size in sizes
        for case in (
            *(spec.case(size, dtype) for spec in SPECS), *sweep_heads.cases(size, device)
        )
    ]  # fmt: skip


def memory_ratio(ours: Record, base: Record) -> float | None:
    """The ratio of peak memory; None if both are too small to measure reliably."""
    least = _LEAST_BYTES[ours.device_type]
    if ours.peak_bytes is None or base.peak_bytes is None:
        return None
    if max(ours.peak_bytes, base.peak_bytes) < least:
        return None
    return ours.peak_bytes / max(base.peak_bytes, least)


def reason(record: Record) -> str:
    """Why a call is slower than torch's."""
    if not record.p20_ms:
        return EMPTY
    return next((why for name, why in REASONS.items() if name in record.title), EMPTY)


def shown(records: Sequence[Record], *, misses: bool) -> list[Grid]:
    """One table, worst ratio first, of all calls, or of those above the bar with the reason."""
    rows: list[tuple[float, float, list[str]]] = []
    for base, *rest in table.by_case(records):
        if not rest or base.label != base.baseline:
            continue
        ours = rest[0]
        time, memory = table.over(ours, base, "p20_ms"), memory_ratio(ours, base)
        other = "" if ours.computes == base.computes else " (other function)"
        cells = [
            ours.title, table.timed(ours, table.milliseconds(ours.p20_ms)),
            table.data_size(ours.peak_bytes), base.method + other,
            table.milliseconds(base.p20_ms), table.data_size(base.peak_bytes),
            table.ratio(time), table.ratio(memory), reason(ours),
        ]  # fmt: skip
        # A call that was not timed is sorted first.
        rows.append((time or (0.0 if ours.median_ms else math.inf), memory or 0.0, cells))
    rows.sort(key=lambda row: max(row[:2]), reverse=True)
    slow, large = sum(row[0] > BAR for row in rows), sum(row[1] > BAR for row in rows)
    title = (
        f"{slow} of {len(rows)} calls take more than {BAR} times torch's time, "
        f"{large} more than {BAR} times its memory"
    )
    headings = ["call", "ms", "memory", "torch", "ms", "memory", "time ÷", "memory ÷", "why"]
    if misses:
        return [Grid(title, headings, [row[2] for row in rows if max(row[:2]) > BAR])]
    return [Grid(title, headings[:-1], [row[2][:-1] for row in rows])]


FAMILY = Family("sweep", "Every call", _cases, NOTES, shown=shown, seconds=SECONDS, seed=1616)
