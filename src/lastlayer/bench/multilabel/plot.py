"""Times and memory of all methods as a PNG."""

from functools import partial

from lastlayer.bench import bars

times_and_memory = partial(
    bars.times_and_memory, of="losses of many labels", time="ms", log_memory=False
)
