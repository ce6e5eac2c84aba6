"""``lastlayer bench fused``: losses on a linear layer beside torch and the peers."""

from lastlayer.bench.command import Command
from lastlayer.bench.fused import cases, plot, tables
from lastlayer.bench.fused.family import Fused

run = Command(
    family=Fused,
    plan=cases.plan,
    tables=lambda records: [tables.comparison(records)],
    legend=tables.LEGEND,
    notes=tables.notes,
    draw=plot.times_and_memory,
)
