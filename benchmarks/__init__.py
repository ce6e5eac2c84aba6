"""Benchmarks of lastlayer and its peers: ``python -m benchmarks FAMILY`` from the repository root.

Every result is verified against a float64 reference before it is timed. ``driver`` does this for
all families; ``maps``, ``fused``, ``heads``, ``multilabel`` and ``contrastive`` list the cases.
"""
