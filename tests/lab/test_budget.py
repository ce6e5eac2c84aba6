"""Budgets as text, and the points at which a run is told and judged."""

import pytest

from lastlayer.lab.budget import Budget, Schedule
from lastlayer.lab.errors import LabError


@pytest.mark.parametrize(
    ("text", "kind", "amount"),
    [
        ("30s", "seconds", 30), ("0.5s", "seconds", 0.5), ("2m", "seconds", 120),
        ("2000steps", "steps", 2000), ("1 step", "steps", 1), ("3epochs", "epochs", 3),
        ("0.5epochs", "epochs", 0.5),
    ],
)  # fmt: skip
def test_budgets_are_read(text, kind, amount):
    assert Budget.parse(text) == Budget(kind, amount)


@pytest.mark.parametrize("text", ["", "30", "s", "-3s", "0steps", "2.5steps", "3 weeks", "1e3s"])
def test_other_budgets_are_refused(text):
    with pytest.raises(LabError, match="--budget: expected"):
        Budget.parse(text)


def test_every_budget_is_a_number_of_steps():
    assert Budget.parse("3epochs").steps(70) == 210
    assert Budget.parse("0.001epochs").steps(70) == 1
    assert Budget.parse("3s").steps(70, slowest_ms=20.0) == 150
    assert Budget.parse("1s").steps(70, slowest_ms=5000.0) == 1
    with pytest.raises(ValueError, match="slowest_ms"):
        Budget.parse("3s").steps(70)


@pytest.mark.parametrize("steps", [1, 2, 7, 100, 12345])
def test_steps_lead_from_point_to_point_to_the_end(steps):
    schedule = Schedule(steps)
    assert 0 in schedule.judged
    step, passed = 0, set()
    while ahead := schedule.steps_to_next(step):
        assert ahead >= 1
        step += ahead
        passed.add(step)
    assert step == steps
    assert steps in schedule.judged
    assert steps in schedule.told
    assert passed == (schedule.judged | schedule.told) - {0}
