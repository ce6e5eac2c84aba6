"""What every test needs: an environment set before torch is imported, and seeds."""

import os
import zlib
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


def seed_of_the_tree() -> int:
    """Another one after every change, the same wherever the same code is tested."""
    root = Path(__file__).parents[1]
    files = sorted(path for part in ("src", "tests") for path in (root / part).rglob("*.py"))
    return zlib.crc32(b"".join(path.read_bytes() for path in files)) >> 1


SEED = int(os.environ.get("LASTLAYER_TEST_SEED") or seed_of_the_tree())

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
    if getattr(config.option, "hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(SEED)


def pytest_report_header() -> str:
    return f"lastlayer: LASTLAYER_TEST_SEED={SEED}"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    outcome = yield
    report = outcome.get_result()
    if report.failed:
        seed = getattr(item, "funcargs", {}).get("seed", SEED)
        report.sections.append(("Seed", f"repeat with LASTLAYER_TEST_SEED={seed}"))


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))


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


@pytest.fixture(autouse=True)
def _seeded(seed, monkeypatch):
    import torch

    from lastlayer.testing import _suite

    torch.manual_seed(seed)
    # The conformance suites draw seeds of their own.
    generator = torch.Generator().manual_seed(seed)
    monkeypatch.setattr(_suite, "_own_generator", lambda: generator)


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels are tested: a GPU where there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
