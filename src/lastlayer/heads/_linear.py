"""Names of before, until their last callers are gone."""

from lastlayer.heads.linear import LinearHead, LinearOptions

__all__ = ["LinearHead", "LinearOptions"]
