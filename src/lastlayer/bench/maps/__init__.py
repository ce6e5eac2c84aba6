"""``lastlayer bench maps``: sparsemax, entmax and top-k softmax beside torch and the peers."""

from lastlayer.bench.command import Command
from lastlayer.bench.maps import cases, plot, tables
from lastlayer.bench.maps.family import Maps

run = Command(
    family=Maps,
    plan=cases.plan,
    tables=tables.all_of,
    legend=tables.LEGEND,
    draw=plot.bandwidth_against_width,
    drawn="widths",
    plan_to_draw={"widths": True},
)
