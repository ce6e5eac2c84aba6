"""``lastlayer bench contrastive``: InfoNCE over a batch of pairs beside torch and the peers."""

from lastlayer.bench.command import Command
from lastlayer.bench.contrastive import cases, plot, tables
from lastlayer.bench.contrastive.family import Contrastive

run = Command(
    family=Contrastive,
    plan=cases.plan,
    tables=lambda records: [tables.comparison(records)],
    legend=tables.LEGEND,
    draw=plot.against_batch,
)
