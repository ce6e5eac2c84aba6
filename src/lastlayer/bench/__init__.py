"""The harness behind ``lastlayer bench``: verify a result, then time it beside its peers.

A family of functions (:mod:`lastlayer.bench.maps` is the first) says what its cases are, how inputs
are drawn and what the truth is; everything else here is shared by all families.
"""
