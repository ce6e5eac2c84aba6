"""All that a comparison found, as JSON for people who want to draw it another way."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lastlayer.lab.results import Results
from lastlayer.lab.verdict import Verdict


def everything(results: Results, verdict: Verdict) -> dict[str, Any]:
    """What was asked, what each run gave, and what the page makes of it."""
    asked = results.comparison
    made: dict[str, Any] = jsonable({
        "schema": 1,
        "verdict": verdict.sentence,
        "findings": list(verdict.findings),
        "notes": list(verdict.notes),
        "recommended": None if verdict.recommended is None else verdict.recommended.title,
        "steps_needed": verdict.needed,
        "baseline": asked.baseline,
        "ranked_by": results.metric.key,
        "equal_seconds": results.equal_seconds,
        "equal_steps": results.equal_steps,
        "command": list(asked.command),
        "created": asked.created,
        "data": asked.data,
        "model": asked.model,
        "budget": asked.budget,
        "settings": asked.settings,
        "device": asked.device,
        "versions": asked.versions,
        "git": asked.git,
        "seeds": list(asked.seeds),
        "heads": [
            {
                "rank": s.rank, "head": s.title, "spec": s.head.spec, "family": s.head.family,
                "status": s.status, "gain": s.gain,
                "means": {key: asdict(found) for key, found in s.estimates.items()},
                "at_equal_time": None if s.at_equal_seconds is None else asdict(s.at_equal_seconds),
                "at_equal_steps": None if s.at_equal_steps is None else asdict(s.at_equal_steps),
            }
            for s in results.summaries
        ],
        "runs": [
            {
                "head": run.head.title, "seed": run.seed, "status": run.status,
                "reason": run.reason, **run.numbers, "test": run.test,
                "by_decile": run.by_decile, "calibration": run.calibration,
                "valid": [point.values for point in run.valid],
            }
            for run in asked.runs
        ],
        "costs": None if results.costs is None else asdict(results.costs),
    })  # fmt: skip
    return made


def jsonable(value: Any) -> Any:
    """The same value as JSON can hold it: no NaN, no infinity, no other types."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int | bool):
        return value
    return str(value)
