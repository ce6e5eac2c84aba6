"""The picture of the embedded corpus: draws pictures/frequencies.svg.

``python docs/lab_data_picture.py``; counts differ slightly between versions of Python.
"""

import platform

import numpy as np
from drawn_style import BLUE, FAINT, INK, ORANGE, new_figure, write
from matplotlib.figure import Figure

from lastlayer.heads import cutoffs_from_counts
from lastlayer.lab.data import load
from lastlayer.lab.inspect import zipf_fit


def frequencies() -> Figure:
    counts = load(min_count=1).counts
    counts = counts[counts > 0]
    fit = zipf_fit(counts)
    if fit is None:
        raise SystemExit("the corpus is too small for a slope")
    ranks = np.arange(1, len(counts) + 1)
    places = np.unique(np.geomspace(1, len(counts), 400).astype(int)) - 1
    figure = new_figure(7.5, 4)
    axes = figure.subplots()
    axes.loglog(ranks[places], counts[places], color=BLUE, linewidth=2.2, label="tokens")
    middle = int(np.sqrt(fit.ranks))
    fitted = ranks[: fit.ranks : max(1, fit.ranks // 400)]
    level = np.exp(np.log(counts[places[places < fit.ranks]]).mean())
    center = np.exp(np.log(ranks[places[places < fit.ranks]]).mean())
    line = level * (fitted / center) ** -fit.slope
    axes.loglog(fitted, line, color=ORANGE, linestyle="--", label=f"slope −{fit.slope:.2f}")
    for cutoff in cutoffs_from_counts(counts, 256):
        axes.axvline(cutoff, color=FAINT, linewidth=1)
        axes.text(cutoff * 1.06, counts[middle] * 60, f"{cutoff:,}", color="#777777", fontsize=8)
    axes.set(xlabel="rank", ylabel="how often", xlim=(1, len(counts) * 1.3))
    title = f"Source of Python {platform.python_version()}'s library, with adaptive cutoffs"
    axes.set_title(title, fontsize=10, color=INK, loc="left")
    axes.legend(loc="lower left")
    return figure


if __name__ == "__main__":
    write("frequencies.svg", frequencies, **{"font.size": 10})
