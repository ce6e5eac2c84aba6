"""What every test needs: an environment set before torch is imported, seeds, and thinned cases.

Variables of the environment:
    LASTLAYER_TEST_SEED: where random inputs come from; 1 unless it is set. The nightly run sets it.
    LASTLAYER_TEST_FULL: 1 to run every case of tests that are marked ``thin``, as the nightly run
        does.
"""

import os
import zlib
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Some machines claim AMX and then fault in bfloat16 matrix products.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# Asked of the file system: asking torch would import it before the environment is set.
if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/dxg").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# They hold fixtures, no doctests, and all have the same name.
collect_ignore_glob = ["*conftest.py"]


SEED = int(os.environ.get("LASTLAYER_TEST_SEED") or 1)
FULL = os.environ.get("LASTLAYER_TEST_FULL", "") not in ("", "0")

settings.register_profile(
    "lastlayer",
    deadline=None,
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("lastlayer")


def pytest_addoption(parser):
    parser.addoption(
        "--seeds", type=int, default=1, help="run each test with so many seeds (hunts flaky tests)"
    )


def pytest_generate_tests(metafunc):
    seeds = metafunc.config.getoption("seeds")
    if seeds > 1:
        metafunc.parametrize("seed", range(SEED, SEED + seeds), ids=lambda seed: f"seed{seed}")


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "thin(n): the normal run takes about one in n of the cases (tests/conftest.py says which)",
    )
    if getattr(config.option, "hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(SEED)


def pytest_report_header() -> str:
    return f"lastlayer: LASTLAYER_TEST_SEED={SEED} LASTLAYER_TEST_FULL={int(FULL)}"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    outcome = yield
    report = outcome.get_result()
    if report.failed:
        seed = getattr(item, "funcargs", {}).get("seed", SEED)
        report.sections.append(("Seed", f"repeat with LASTLAYER_TEST_SEED={seed}"))


def pytest_collection_modifyitems(config, items):
    # Whoever names a test or a word of it wants all of its cases.
    named = config.option.keyword or any("::" in each for each in config.args)
    if not FULL and not named:
        dropped = thinned(items)
        config.hook.pytest_deselected(items=[item for item in items if item in dropped])
        items[:] = [item for item in items if item not in dropped]
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))


def thinned(items):
    """The cases that the normal run leaves out of tests marked ``thin(n)``.

    One in n stays: the first, the last, at least one for every value of a parameter that has no
    more values than cases stay, and then whatever comes first in an order that looks random and is
    the same in every run.
    """
    groups = defaultdict(list)
    for item in items:
        if (marker := item.get_closest_marker("thin")) and hasattr(item, "callspec"):
            test = item.nodeid.partition("[")[0], item.callspec.params.get("seed")
            groups[test, marker.args[0]].append(item)
    dropped = set()
    for (_, n), cases in groups.items():
        # All cases with a value of a parameter hold the same object.
        values = {
            item: {(name, id(value)) for name, value in item.callspec.params.items()}
            for item in cases
        }
        n_values = Counter(name for name, _ in set().union(*values.values()))
        room = -(-len(cases) // n)
        first, *middle, last = cases if len(cases) > 1 else cases * 2
        kept, seen = {first, last}, values[first] | values[last]
        middle.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        for item in middle:
            if any(n_values[name] <= room for name, _ in values[item] - seen):
                kept.add(item)
                seen |= values[item]
        for item in middle:
            if len(kept) < room:
                kept.add(item)
        dropped.update(item for item in cases if item not in kept)
    return dropped


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Small tensors gain nothing from threads, and workers that share cores lose much."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def seed() -> int:
    """What the random inputs of a test come from; LASTLAYER_TEST_SEED sets it."""
    return SEED


@pytest.fixture
def full() -> bool:
    """Whether every case is asked for, as in the nightly run; else a test may take fewer steps."""
    return FULL


@pytest.fixture(autouse=True)
def _seeded(seed, monkeypatch):
    import torch

    from lastlayer.testing import suite

    torch.manual_seed(seed)
    # The conformance suites draw seeds of their own.
    generator = torch.Generator().manual_seed(seed)
    monkeypatch.setattr(suite, "_own_generator", lambda: generator)


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels are tested: a GPU where there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
