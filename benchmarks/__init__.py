"""Measures lastlayer beside its peers: ``python -m benchmarks FAMILY`` from the repository root.

Every result is verified against a float64 reference before it is timed. ``driver`` does that for
all families; ``maps``, ``fused``, ``heads``, ``multilabel`` and ``contrastive`` list the cases.
"""
