"""Names of before, until their last callers are gone."""

from lastlayer.heads.self_normalized import (
    Drift,
    chosen_scores,
    drift_of,
    log_normalizer,
    temperature_of,
)

__all__ = ["Drift", "chosen_scores", "drift_of", "log_normalizer", "temperature_of"]
