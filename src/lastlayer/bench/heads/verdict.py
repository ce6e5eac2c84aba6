"""What the verification of a head finds."""

from dataclasses import dataclass

from lastlayer.bench.verify import Verdict


@dataclass(frozen=True, kw_only=True)
class HeadVerdict(Verdict):
    """What a verification found; see :class:`lastlayer.bench.heads.record.HeadRecord`."""

    settings: str = ""
    parameters: int | None = None
    peak_bytes: int | None = None
    loss_error: float | None = None
    hidden_error: float | None = None
    weight_error: float | None = None
    value_error: float | None = None
    classes_differ: int | None = None
    replayed_ms: float | None = None
