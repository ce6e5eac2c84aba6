"""Rows of scores with wide supports, in place to the gradient of their entmax loss, on CUDA.

There is no other implementation: elsewhere probabilities are made first, see
:mod:`lastlayer.kernels.entmax_rows`. README.md has the derivation.
"""
