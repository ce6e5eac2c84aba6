"""The harness behind ``lastlayer bench``: verify a result, then time it beside its peers.

A family of functions says what its cases are, how inputs are drawn and what the truth is, in a
folder of its own, whose ``run`` is a :class:`lastlayer.bench.command.Command`. Everything beside
these folders is shared: :mod:`lastlayer.bench.cases` by all families, and
:mod:`lastlayer.bench.losses` by those of losses with gradients.
"""
