"""``lastlayer bench multilabel``: losses of many labels beside torch and the peers."""

from lastlayer.bench.command import Command
from lastlayer.bench.multilabel import cases, plot, tables
from lastlayer.bench.multilabel.family import Multilabel

run = Command(
    family=Multilabel,
    plan=cases.plan,
    tables=tables.all_of,
    legend=tables.LEGEND,
    draw=plot.times_and_memory,
)
