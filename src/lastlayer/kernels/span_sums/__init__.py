"""The two sums of ZLPR over all spans of a text, and their gradients, on CUDA.

There is no other implementation: elsewhere tiles of scores are stored, see
:mod:`lastlayer.heads._span_loss`. README.md has the derivation.

``query`` and ``key`` are float32 ``(texts, types, n, depth)``, with one type where all share them.
The score of the span from i to j is ``<query_i, key_j>``, and what start and end add to it where
biases are given, ``(texts, types, n)``. ``mask`` is bool ``(texts, n)``, True for tokens.
``target`` are bools ``(texts, types, n, n)``, or int64 cells ``(texts, m)``, each ``(type · n +
start) · n + end``, or -1 for none.
"""
