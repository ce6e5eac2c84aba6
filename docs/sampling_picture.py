"""Bias and noise of sampled gradients: ``python docs/sampling_picture.py`` draws the picture."""

from collections.abc import Callable

import torch
from drawn_style import BLUE, GREEN, INK, ORANGE, VERMILION, new_figure, write
from matplotlib.figure import Figure
from pictures import STYLE

from lastlayer import heads, samplers

CLASSES, WIDTH, ROWS, DRAWS = 2000, 16, 32, 600
SAMPLES = [8, 16, 32, 64, 128, 256, 512, 1024]
COUNTS = 1.0 / torch.arange(1, CLASSES + 1)
Make = Callable[[int], heads.SampledSoftmax | heads.ImportanceSampling]


def _unigram() -> samplers.Unigram:
    return samplers.Unigram(COUNTS)


KINDS: dict[str, tuple[Make, str, str]] = {
    "sampled softmax": (lambda n: heads.SampledSoftmax(WIDTH, CLASSES, _unigram(), n), BLUE, "o-"),
    "sampled softmax, classic correction": (
        lambda n: heads.SampledSoftmax(WIDTH, CLASSES, _unigram(), n, correction="classic"),
        ORANGE,
        "s--",
    ),
    "importance sampling": (
        lambda n: heads.ImportanceSampling(WIDTH, CLASSES, _unigram(), n),
        GREEN,
        "^-.",
    ),
    "sampled softmax, uniform proposal": (
        lambda n: heads.SampledSoftmax(WIDTH, CLASSES, samplers.Uniform(CLASSES), n),
        VERMILION,
        "v:",
    ),
}


def sampling() -> Figure:
    """Bias and deviation of the gradient of hidden states by number of samples."""
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH)
    weight, bias = torch.randn(CLASSES, WIDTH) * 0.4, COUNTS.log()
    probs = torch.softmax(hidden @ weight.T + bias, -1)
    target = torch.multinomial(probs, 1)[:, 0]
    figure = new_figure(9.5, 3.8)
    of_bias, of_noise = figure.subplots(1, 2, sharey=True)
    for name, (make, colour, style) in KINDS.items():
        errors = []
        for n in SAMPLES:
            head = make(n)
            with torch.no_grad():
                head.weight.copy_(weight)
                head.bias.copy_(bias)
            errors.append(head.audit(hidden, target, n_draws=DRAWS).gradients["hidden"])
        of_noise.plot(SAMPLES, [e.relative_deviation for e in errors], style, color=colour)
        # A bias that is not distinguishable from chance is not drawn.
        known = [e.relative_bias if e.bias > e.least_bias else float("nan") for e in errors]
        of_bias.plot(SAMPLES, known, style, color=colour, label=name)
    for panel, power in ((of_bias, -1.0), (of_noise, -0.5)):
        line = [1.6 * (n / SAMPLES[0]) ** power for n in SAMPLES]
        panel.plot(SAMPLES, line, color="#AAAAAA", lw=1, zorder=1)
        panel.annotate(
            "1/n" if power == -1.0 else "1/√n", (SAMPLES[2], line[2]), xytext=(4, 4),
            textcoords="offset points", color="#777777", fontsize=9,
        )  # fmt: skip
        panel.set(xscale="log", yscale="log", xlabel="classes drawn per step, n")
        panel.set_xticks(SAMPLES[::2], [f"{n:,}" for n in SAMPLES[::2]])
        panel.minorticks_off()
    of_bias.set(title="bias of the gradient", ylabel="relative to the exact gradient's norm")
    of_noise.set(title="noise: standard deviation of one step's gradient")
    of_bias.set_ylim(1e-3, 10)
    figure.legend(loc="outside lower center", ncols=4, fontsize=9, labelcolor=INK)
    return figure


if __name__ == "__main__":
    write("sampling.svg", sampling, **STYLE)
