"""The project's files agree with each other."""

import os
import re
import shutil
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "lastlayer"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
WORKFLOW = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
LAYERS, KERNELS = PYPROJECT["tool"]["importlinter"]["contracts"]

# Elsewhere fused/ does the same work with more memory.
CUDA_ONLY = (
    "linear_softmax",
    "entmax_flat",
    "node_groups",
    "class_blocks",
    "sampled_targets",
    "span_sums",
)


def test_the_version_is_stated_once():
    assert metadata.version("lastlayer") == PROJECT["version"]
    assignment = re.compile(r"^\s*__version__\s*(:.*)?=\s*[\"']\d+\.\d", re.MULTILINE)
    stated = [path for path in PACKAGE.rglob("*.py") if assignment.search(path.read_text())]
    assert stated == []
    assert "\nversion:" not in (ROOT / "CITATION.cff").read_text()


def test_the_changelog_knows_the_version():
    assert PROJECT["version"] in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("extra", PROJECT["optional-dependencies"])
def test_each_extra_is_documented(extra):
    assert f'pip install "lastlayer[{extra}]"' in (ROOT / "README.md").read_text()


def test_contributors_read_the_order_that_import_linter_holds():
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    assert " → ".join(LAYERS["layers"]) in contributing
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
def test_each_kernel_has_its_three_implementations_and_its_derivation(folder):
    names = {path.name for path in folder.iterdir()}
    assert names >= {"reference.py", "triton.py", "README.md"}
    assert ("cpu.py" in names) == (folder.name not in CUDA_ONLY)


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


def test_the_example_in_the_readme_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names = {}
    exec(compile(example, "README.md", "exec"), names)
    probs, grad = names["probs"].detach(), names["scores"].grad
    assert probs[0, -1] == 0
    expected = probs.clone()
    expected[0, 1] -= 1
    assert abs(grad - expected).max() < 1e-6
    assert capsys.readouterr().out


def test_links_between_the_documents_lead_somewhere():
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        text = (ROOT / name).read_text()
        local = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
        assert [link for link in local if not (ROOT / link).exists()] == []


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_sets_up_once_and_again_when_the_requirements_change(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)

    def plan():
        command = ["make", "--dry-run", "--no-print-directory", "test"]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        ).stdout

    first = plan()
    assert first.index("install --quiet -c constraints.txt torch==") < first.index(
        "install --quiet -c constraints.txt -e"
    )
    assert first.rindex("pip install") < first.index("ruff check")

    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".ready").touch()
    assert "pip install" not in plan()

    now = (tmp_path / ".venv" / ".ready").stat().st_mtime
    os.utime(tmp_path / "constraints.txt", (now + 10, now + 10))
    assert plan() == first


def test_ci_runs_make_test():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().rstrip().endswith("make test")
