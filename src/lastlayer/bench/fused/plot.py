"""Times and memory of all methods as a PNG."""

from functools import partial

from lastlayer.bench import bars

times_and_memory = partial(
    bars.times_and_memory, of="fused losses", time="forward + backward, ms", log_memory=True
)
