"""The project's files agree with each other."""

import os
import re
import shutil
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "lastlayer"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
WORKFLOW = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
LAYERS, KERNELS = PYPROJECT["tool"]["importlinter"]["contracts"]


def test_the_version_is_stated_once():
    assert metadata.version("lastlayer") == PROJECT["version"]
    assignment = re.compile(r"^\s*__version__\s*(:.*)?=\s*[\"']\d+\.\d", re.MULTILINE)
    stated = [path for path in PACKAGE.rglob("*.py") if assignment.search(path.read_text())]
    assert stated == []
    assert "\nversion:" not in (ROOT / "CITATION.cff").read_text()


def test_the_changelog_knows_the_version():
    assert PROJECT["version"] in (ROOT / "CHANGELOG.md").read_text()


def test_import_linter_knows_every_module():
    assert LAYERS["exhaustive"]


def test_every_implementation_is_kept_from_the_others():
    files = {f"lastlayer.kernels.*.{name}" for name in ("reference", "triton", "cpu")}
    assert KERNELS["type"] == "independence"
    assert set(KERNELS["modules"]) == files


@pytest.mark.parametrize(
    "folder",
    sorted(path.parent for path in PACKAGE.glob("kernels/*/__init__.py")),
    ids=lambda folder: folder.name,
)
def test_each_kernel_has_its_reference_and_its_derivation(folder):
    names = {path.name for path in folder.iterdir()}
    assert names >= {"reference.py", "README.md"}
    assert names & {"triton.py", "cpu.py"}


def test_the_workflow_tests_what_the_package_promises():
    promised = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    (matrix,) = re.findall(r"python: \[(.*)\]", WORKFLOW)
    assert re.findall(r"3\.\d+", matrix) == promised
    assert PROJECT["requires-python"] == f">={promised[0]}"


def test_the_oldest_torch_of_the_workflow_is_the_bound():
    (torch,) = [r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "torch"]
    (oldest,) = re.findall(r'torch: \["torch==([\d.]+)", "torch"\]', WORKFLOW)
    assert Version(oldest) in torch.specifier
    assert str(torch.specifier) == f">={oldest.removesuffix('.0')}"
    pinned = Requirement((ROOT / "constraints.txt").read_text().splitlines()[-1])
    assert next(iter(pinned.specifier)).version in torch.specifier


def test_the_examples_in_the_readme_run():
    names = {}
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(example, "README.md", "exec"), names)


def test_links_between_the_documents_lead_somewhere():
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        text = (ROOT / name).read_text()
        local = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
        assert [link for link in local if not (ROOT / link).exists()] == []


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_sets_up_once_and_again_when_the_requirements_change(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)

    def plan(target="test"):
        command = ["make", "--dry-run", "--no-print-directory", target]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        ).stdout

    first = plan()
    assert first.index("install --quiet -c constraints.txt torch==") < first.index(
        "install --quiet -c constraints.txt -e"
    )
    assert first.rindex("pip install") < first.index("ruff check")
    assert '-e ".[test,docs,lab]"' in first
    assert '-e ".[lab]"' in plan("demo")

    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".ready").touch()
    assert "pip install" not in plan()
    (tmp_path / ".venv" / ".lab").touch()
    assert "pip install" not in plan("demo")

    now = (tmp_path / ".venv" / ".ready").stat().st_mtime
    os.utime(tmp_path / "constraints.txt", (now + 10, now + 10))
    assert plan() == first


class Case:
    """What pytest collects of a test with two parameters, which is marked ``thin(n)``."""

    def __init__(self, n, **params):
        self.nodeid = f"test[{params}]"
        self.callspec = SimpleNamespace(params=params)
        self.marker = pytest.mark.thin(n).mark

    def get_closest_marker(self, name):
        return self.marker if name == "thin" else None


@pytest.mark.parametrize(("n", "rows", "columns"), [(3, 5, 4), (4, 8, 2), (2, 1, 9), (9, 1, 1)])
def test_thinned_cases_have_both_ends_and_every_value(pytestconfig, n, rows, columns):
    conftest = pytestconfig.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    cases = [Case(n, a=a, b=b) for a in range(rows) for b in range(columns)]
    kept = [case for case in cases if case not in conftest.thinned(cases)]
    assert kept[0] is cases[0]
    assert kept[-1] is cases[-1]
    room = -(-len(cases) // n)
    assert room <= len(kept) <= room + rows
    for name, values in (("a", rows), ("b", columns)):
        seen = {case.callspec.params[name] for case in kept}
        assert values > room or len(seen) == values


def test_the_nightly_run_takes_every_case_and_a_seed_of_its_own():
    for variable in ("LASTLAYER_TEST_SEED", "LASTLAYER_TEST_FULL"):
        assert re.search(rf"{variable}: .*event_name == 'schedule'", WORKFLOW)


def test_ci_runs_make_test():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().rstrip().endswith("make test")
