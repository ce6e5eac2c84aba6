"""Rules on the classes that a head draws."""

import math

import torch
from torch import Tensor

from lastlayer.testing._heads_suite import HeadSuite

# Standard deviations of chance that are let pass: one run in 10^9 exceeds them.
MOST_DEVIATIONS = 6.0
# Classes are pooled until this many draws are expected.
LEAST_EXPECTED = 5.0
# Equal rows that are drawn from: fewer where there are many classes.
MOST_ROWS, MOST_NUMBERS = 1000, 1_000_000


def samples_are_class_ids(suite: HeadSuite) -> None:
    head, hidden = suite.head(), suite.hidden(2, 3)
    drawn = head.sample(hidden, 50)
    rule = "sample(hidden, m) has m class ids a row"
    ids = drawn.dtype == torch.int64 and drawn.shape == (2, 3, 50)
    suite.require(rule, ids, f"got {drawn.dtype} {tuple(drawn.shape)}", hidden)
    inside = (drawn >= 0) & (drawn < suite.n_classes)
    lowest, highest = drawn.min().item(), drawn.max().item()
    suite.require(rule, inside.all(-1), f"got ids from {lowest} to {highest}", hidden)
    at_drawn = head.log_prob(hidden).gather(-1, drawn)
    rule = "a class of probability 0 is never drawn"
    suite.require(rule, (at_drawn > -math.inf).all(-1), f"got {drawn.tolist()}", hidden)
    rule = "sample(hidden) is one draw a row"
    suite.require(rule, head.sample(hidden).shape == (2, 3, 1), "of another shape", hidden)


def samples_follow_the_probabilities(suite: HeadSuite, draws: int) -> None:
    head, hidden = suite.head(), suite.hidden(3, scale=2.0)
    probs = head.log_prob(hidden).detach().double().exp()
    drawn = head.sample(hidden, draws, generator=_generator(suite))
    for row in range(3):
        rule = "draws of a row are as frequent as they are probable"
        _compare(suite, rule, drawn[row], probs[row], hidden)
    rows = min(MOST_ROWS, max(100, MOST_NUMBERS // suite.n_classes))
    alike = hidden[0].expand(rows, -1)
    drawn = head.sample(alike, 1, generator=_generator(suite)).flatten()
    rule = "rows draw on their own: among equal rows classes are as frequent as they are probable"
    _compare(suite, rule, drawn, probs[0], hidden)


def a_generator_repeats_the_samples(suite: HeadSuite) -> None:
    head, hidden = suite.head(), suite.hidden(4, scale=0.1)
    first, second = (head.sample(hidden, 20, generator=_generator(suite)) for _ in range(2))
    rule = "a generator with the same seed gives the same draws"
    suite.close(rule, first, second, 0.0, hidden)


def _generator(suite: HeadSuite) -> torch.Generator:
    return torch.Generator(suite.device).manual_seed(suite.seed)


def _compare(suite: HeadSuite, rule: str, drawn: Tensor, probs: Tensor, hidden: Tensor) -> None:
    counts = torch.bincount(drawn, minlength=len(probs)).double()
    deviations = _deviations(counts, probs * len(drawn))
    if deviations > MOST_DEVIATIONS:
        worst = int((counts / len(drawn) - probs).abs().argmax())
        detail = (
            f"{len(drawn)} draws are {deviations:.1f} standard deviations from what is expected; "
            f"class {worst} has probability {probs[worst].item():.6g} and was drawn in "
            f"{(counts[worst] / len(drawn)).item():.6g} of them"
        )
        raise suite.failure(rule, detail, hidden)


def _deviations(counts: Tensor, expected: Tensor) -> float:
    """Pearson's statistic in standard deviations, by the cube root of Wilson and Hilferty."""
    rare = expected < LEAST_EXPECTED
    counts = torch.cat([counts[~rare], counts[rare].sum().reshape(1)])
    expected = torch.cat([expected[~rare], expected[rare].sum().reshape(1)])
    # What is left of rare classes may still be less than a draw: one added to both bounds it.
    if float(expected[-1]) < LEAST_EXPECTED:
        counts[-1], expected[-1] = counts[-1] + LEAST_EXPECTED, expected[-1] + LEAST_EXPECTED
    degrees = len(counts) - 1
    if degrees == 0:
        return 0.0
    statistic = float(((counts - expected).square() / expected).sum())
    spread = 2.0 / (9.0 * degrees)
    return (math.cbrt(statistic / degrees) - (1.0 - spread)) / math.sqrt(spread)
