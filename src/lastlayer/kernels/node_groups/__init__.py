"""Choices among the children of many nodes, on CUDA: rows that are at one node are a group.

There is none for the CPU: elsewhere nodes are taken one by one, see
:mod:`lastlayer.fused.paths`. README.md has the derivation.
"""
