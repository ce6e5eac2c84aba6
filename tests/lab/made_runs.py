"""A folder of runs as `lastlayer compare` writes it, made up by a formula instead of training."""

import json
import math
import random
from pathlib import Path

# spec, step ms, memory, head parameters, final nll
HEADS = (
    ("full", 21.0, 690.0, 2_570_000, 5.05),
    ("adaptive:cutoffs=1000,4000", 9.5, 410.0, 900_000, 4.92),
    ("hierarchical", 7.9, 395.0, 2_560_000, 5.02),
    ("differentiated", 12.0, 430.0, 1_100_000, 5.06),
    ("sampled:n_samples=256", 6.5, 380.0, 2_570_000, 5.21),
    ("nce", 6.8, 380.0, 2_570_000, 5.33),
    ("entmax", 25.0, 700.0, 2_570_000, 5.31),
    ("topk:k=64", 24.0, 700.0, 2_570_000, 5.40),
)
SPARSE = ("entmax", "topk")
ODD_TOKENS = (
    "\n",
    "\t",
    " ",
    "",
    "</script><img src=x onerror=alert(1)>",
    "&amp;",
    "é\u200b",
    "def",
)
NASTY = '</script><img src=x onerror="window.hacked=1">&\u2028'
CLASSES = 10_000


def make(
    out: Path,
    *,
    heads: int = 8,
    seeds: int = 3,
    task: str = "lm",
    statuses: dict[str, str] | None = None,
    name: str = "made-up <corpus>",
    noise: float = 0.01,
    steps: int = 3000,
    late: dict[str, float] | None = None,
) -> Path:
    """Write the folder.

    Args:
        out: where to.
        heads: how many of HEADS.
        seeds: how many.
        task: "lm" or "multilabel".
        statuses: what became of a run, by "<slug>-s<seed>" or by slug; "unfinished" leaves out the
            result, "not started" the folder.
        name: of the data.
        noise: how far seeds differ, in nats.
        steps: of each run.
        late: by slug, how many nats a head would gain over the last quarter of its steps; next to
            none where it is not named.
    """
    chosen = HEADS[:heads]
    entries = [
        {
            "spec": spec,
            "label": label(spec),
            "slug": slug(spec),
            "family": slug(spec),
            "arguments": {},
        }
        for spec, *_ in chosen
    ]
    out.mkdir(parents=True, exist_ok=True)
    compare = {
        "schema": 1,
        "command": ["lastlayer", "compare", "my data.txt", "--seeds", str(seeds)],
        "created": "2026-11-15T12:00:00+00:00",
        "data": {"name": name, "task": task, "classes": CLASSES, "tokens": 4_800_000},
        "model": {"kind": "lstm", "hidden": 256, "layers": 1},
        "budget": {"kind": "steps", "amount": steps},
        "baseline": {"name": "unigram", "test": {"perplexity": 900.0, "eps_perplexity": 905.0}},
        "heads": entries,
        "seeds": list(range(seeds)),
        "device": {"type": "cpu", "name": "Intel Xeon", "threads": 2},
        "versions": {"python": "3.11.7", "torch": "2.13.0", "lastlayer": "0.1.0"},
        "git": "0123abc",
        "settings": {"batch": 64, "lr": 0.001},
    }
    (out / "compare.json").write_text(json.dumps(compare))
    statuses = statuses or {}
    for head in chosen:
        for seed in range(seeds):
            run_name = f"{slug(head[0])}-s{seed}"
            status = statuses.get(run_name) or statuses.get(slug(head[0])) or "ok"
            if status != "not started":
                more = (late or {}).get(slug(head[0]), 0.0)
                _write_run(out / "runs" / run_name, head, seed, status, task, noise, steps, more)
    return out


def slug(spec: str) -> str:
    return spec.split(":", maxsplit=1)[0]


def label(spec: str) -> str:
    return spec.replace(":", " ")


def _write_run(folder, head, seed, status, task, noise, steps, late) -> None:
    spec, step_ms, memory, parameters, final = head
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(f"{spec} {seed}")
    shared = random.Random(seed).gauss(0, noise)
    nll = final + shared + draw.gauss(0, noise)
    seconds = steps * step_ms / 1000
    sparse = slug(spec) in SPARSE
    lines = []
    reached = 1.0 if status == "ok" else 0.5
    for i in range(1, 41):
        share = reached * i / 40
        at = {
            "step": round(share * steps),
            "seconds": share * seconds,
            "tokens": round(share * steps) * 1280,
        }
        loss = nll + 4.0 * math.exp(-12.0 * share) + 4.0 * late * (1 - share)
        lines.append({"kind": "train", **at, "loss": loss + draw.gauss(0, 0.05)})
        if i % 4 == 0 or i in (1, 2):
            lines.append({"kind": "valid", **at, **_valid(task, loss, sparse)})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.json").write_text(json.dumps({"spec": spec, "seed": seed, "batch": 64}))
    if status == "unfinished":
        return
    result = {
        "head": spec, "label": label(spec), "slug": slug(spec), "family": slug(spec), "seed": seed,
        "status": status, "reason": "" if status == "ok" else f"it was {status} at step {steps}",
        "steps": steps, "seconds": seconds, "tokens": steps * 1280,
        "step_ms": step_ms * (1 + draw.gauss(0, 0.01)), "step_ms_low": step_ms * 0.93,
        "step_ms_mean": step_ms * 1.05, "load": 0.6, "epochs": steps / 1000, "lr": 0.006,
        "bias": "class frequencies",
        "step_ms_high": step_ms * 1.12, "tokens_per_second": 1280 / step_ms * 1000,
        "peak_memory_mb": memory, "parameters": parameters + 3_000_000,
        "head_parameters": parameters,
    }  # fmt: skip
    if status == "ok":
        result["test"] = _test(task, nll, sparse, draw)
        result["explorer"] = (_explorer if task == "lm" else _label_explorer)(spec, draw)
    (folder / "result.json").write_text(json.dumps(result))


def _valid(task, nll, sparse) -> dict:
    if task == "multilabel":
        return {"loss": nll, "micro_f1": math.exp(-nll / 6), "precision_at_1": math.exp(-nll / 8)}
    smooth = {"eps_nll": nll + 0.1, "eps_perplexity": math.exp(nll + 0.1)}
    likelihood = (
        {"nll": None, "perplexity": None} if sparse else {"nll": nll, "perplexity": math.exp(nll)}
    )
    return {**likelihood, **smooth, "top1": math.exp(-nll / 4), "top10": math.exp(-nll / 8)}


def _test(task, nll, sparse, draw) -> dict:
    if task == "multilabel":
        return {"loss": nll, "micro_f1": math.exp(-nll / 6), "precision_at_1": math.exp(-nll / 8)}
    bins = []
    for i in range(10):
        confidence = (i + 0.5) / 10
        accuracy = max(0.0, min(1.0, confidence * 0.9 + draw.gauss(0, 0.02)))
        bins.append(
            {"confidence": confidence, "accuracy": accuracy, "count": int(20_000 / (i + 1) ** 2)}
        )
    deciles = [
        {"decile": i + 1, "count": 10_000,
         "nll": None if sparse and i > 7 else nll * (0.3 + 0.17 * i),
         "eps_nll": nll * (0.3 + 0.17 * i), "top1": max(0.0, 0.75 - 0.012 * nll * i)}
        for i in range(10)
    ]  # fmt: skip
    return {
        "nll": None if sparse else nll, "perplexity": None if sparse else math.exp(nll),
        "eps_perplexity": math.exp(nll + 0.1),
        "top1": math.exp(-nll / 4), "top10": math.exp(-nll / 8),
        "coverage": 0.94 if sparse else 1.0, "support": 42.0 if sparse else float(CLASSES),
        "calibration_error": 0.03 + abs(draw.gauss(0, 0.01)), "calibration": bins,
        "by_decile": deciles,
    }  # fmt: skip


def _explorer(spec, draw) -> list[dict]:
    entries = []
    for i in range(6):
        context = ["for", " ", "i", " ", "in", " ", "range", "(", ODD_TOKENS[i % len(ODD_TOKENS)]]
        left, top = 1.0, []
        for token in ("len", "\n", "n", ")", "</script>", "self", "  ", "0", "x" * 70, "b"):
            p = left * draw.uniform(0.15, 0.4)
            left -= p
            top.append({"token": token, "p": p})
        path = None
        if spec.startswith("hierarchical"):
            path = [{"node": n, "direction": n % 2, "p": draw.uniform(0.6, 1.0)} for n in range(7)]
        entries.append({"context": context, "target": "len", "top": top, "path": path})
    return entries


def _label_explorer(_spec, draw) -> list[dict]:
    entries = []
    for i in range(6):
        names = ("science fiction", "drama", NASTY, "", "b")
        right = names[: i % 4]
        top = [{"label": name, "p": draw.random(), "predicted": n < 2, "right": name in right}
               for n, name in enumerate(names[1:])]  # fmt: skip
        below = [{"label": name, "p": 0.01, "predicted": False, "right": True}
                 for name in right[:1]]  # fmt: skip
        features = [{"name": name, "value": n - 1.25} for n, name in enumerate(ODD_TOKENS)]
        entries.append({
            "features": features, "standardised": i > 0, "labels": list(right),
            "n_labels": len(right) + (i == 5), "n_predicted": 2, "n_found": len(right[1:]),
            "top": top, "below": below,
        })  # fmt: skip
    return entries


def _every(status: str) -> dict[str, str]:
    return {slug(head[0]): status for head in HEADS}


KINDS = {
    "one seed": {"heads": 2, "seeds": 1},
    "labels": {"heads": 3, "seeds": 2, "task": "multilabel"},
    "all failed": {"heads": 2, "seeds": 2, "statuses": _every("nan")},
    "nothing yet": {"heads": 2, "seeds": 2, "statuses": _every("not started")},
    "some failed": {
        "heads": 3,
        "seeds": 2,
        "statuses": {"full": "out of memory", "adaptive-s1": "unfinished"},
    },
    "one head": {"heads": 1, "seeds": 1},
    "no head": {"heads": 0, "seeds": 1},
}
"""Comparisons of all kinds, as arguments of :func:`make`."""
