"""Replications of published results with this library: ``python -m studies`` lists them.

There is one file per result; ``frame.py`` has the shared code. Not part of the wheel.
"""
