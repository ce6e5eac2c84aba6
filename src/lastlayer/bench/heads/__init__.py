"""``lastlayer bench heads``: structured heads beside the full softmax and torch's own."""

from lastlayer.bench.command import Command
from lastlayer.bench.heads import cases, plot, tables
from lastlayer.bench.heads.family import Heads
from lastlayer.bench.heads.problem import SEED

run = Command(
    family=Heads,
    plan=cases.plan,
    tables=tables.all_of,
    legend=tables.LEGEND,
    draw=plot.time_against_classes,
    drawn=cases.AGAINST,
    seed=SEED,
)
