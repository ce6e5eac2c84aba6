"""The harness behind ``lastlayer bench``: verify a result, then time it beside its peers.

A family of functions says what its cases are, how inputs are drawn and what the truth is: one
folder each, :mod:`lastlayer.bench.maps`, :mod:`lastlayer.bench.fused` and
:mod:`lastlayer.bench.heads`. Everything beside these folders is shared by all families.
"""
