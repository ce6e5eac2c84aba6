"""What several files of these tests look at, made once."""

from functools import cache
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def few_samples():
    """A cost against classes is that of two steps: nobody reads it here."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("lastlayer.lab.costs.SAMPLED_SECONDS", 0.0)
        yield


@pytest.fixture(scope="session")
def nasty_report(tmp_path_factory) -> Path:
    """The folder of a comparison of eight heads, with its page; its name would be markup."""
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    from made_costs import make_costs
    from made_runs import NASTY, make

    from lastlayer.lab.report import write_report

    out = make_costs(make(tmp_path_factory.mktemp("report"), seeds=2, name=NASTY), reason=NASTY)
    assert write_report(out, pictures=False) == out / "report.html"
    return out


@pytest.fixture(scope="session")
def report_of(tmp_path_factory):
    """The folder of a comparison of a kind in ``made_runs.KINDS``, with its page."""
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    from made_runs import KINDS, make

    from lastlayer.lab.report import write_report

    @cache
    def made(kind: str) -> Path:
        out = make(tmp_path_factory.mktemp("kind"), **KINDS[kind])
        write_report(out, pictures=False)
        return out

    return made
