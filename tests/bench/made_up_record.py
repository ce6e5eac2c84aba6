"""What made-up records of all families have in common: one run on a GPU."""

MADE_UP = dict(
    run="run 1",
    quick=False,
    device="NVIDIA H200",
    device_type="cuda",
    threads=None,
    python="3.12.3",
    torch="2.11.0",
    triton="3.6.0",
    numba="0.62.0",
    lastlayer="0.1.0",
    date="2026-11-15T09:00:00+00:00",
    seed=7,
    source="lastlayer",
    source_version="0.1.0",
    implementation="triton",
    ratio_to_ours=None,
    verified=True,
    status="ok",
)
