"""Softmax over class scores that are made and forgotten tile by tile, on CUDA.

There is no other implementation: elsewhere chunks of scores are stored, see
:mod:`lastlayer.fused.rows`. README.md has the derivation.
"""
