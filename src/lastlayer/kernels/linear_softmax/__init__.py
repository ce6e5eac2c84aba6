"""Softmax over class scores that are computed tile by tile and never stored, on CUDA.

On other devices chunks of scores are stored, see :mod:`lastlayer.fused.rows`. README.md has the
derivation.
"""
