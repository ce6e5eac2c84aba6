"""Published results, measured again with this library: ``python -m studies`` lists them.

One file per result; ``frame.py`` has what they share. Not part of the wheel.
"""
