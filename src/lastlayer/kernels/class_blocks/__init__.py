"""The largest score of each block of classes, from scores that are not kept, on CUDA.

There is none for the CPU: elsewhere all scores are made and sorted. README.md has more.
"""
