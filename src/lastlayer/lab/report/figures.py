"""All figures of the page."""

from lastlayer.lab.report.cost_figures import against_classes, step_time
from lastlayer.lab.report.figure import Figure
from lastlayer.lab.report.inside_figures import calibration, deciles, support
from lastlayer.lab.report.quality_figures import curves, equal, tradeoff
from lastlayer.lab.results import Results

_ALL = (tradeoff, equal, curves, deciles, calibration, support, step_time, against_classes)


def all_figures(results: Results) -> tuple[Figure, ...]:
    """Those that there is anything to show for, in the order of the page."""
    made = (figure(results) for figure in _ALL)
    return tuple(figure for figure in made if figure.views)
