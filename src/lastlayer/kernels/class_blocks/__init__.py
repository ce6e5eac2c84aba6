"""The largest score of each block of classes, from scores that are not kept, on CUDA.

There is no other implementation: elsewhere all scores are made and sorted. README.md has more.
"""
