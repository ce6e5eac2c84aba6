"""The wheel in an environment without extras: every command of the lab says which one it needs."""

import json
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from lastlayer.cli import app
from lastlayer.lab.commands import PACKAGES

ROOT = Path(__file__).parent.parent
SIZES = ["--classes", "100", "--hidden", "8", "--rows", "4"]
ARGUMENTS = {
    "compare": [], "heads": [], "inspect": [], "plan": SIZES, "show": ["run"], "report": ["out"],
    "generate": ["run"], "export": ["run", "--to", "there"],
}  # fmt: skip


def required(requirements):
    """Distributions that are installed for these requirements without extras, and for those."""
    found, open_ = {}, [*requirements]
    while open_:
        each = Requirement(open_.pop())
        wanted = each.marker is None or any(
            each.marker.evaluate({"extra": extra}) for extra in ("", *each.extras)
        )
        name = re.sub(r"[-_.]+", "-", each.name).lower()
        if not wanted or name in found:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        open_ += found[name].requires or ()
    return list(found.values())


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The Python of a virtual environment with the wheel and its dependencies alone."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    built = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    environment = folder / "environment"
    venv.EnvBuilder(with_pip=False, symlinks=sys.platform != "win32").create(environment)
    (python,) = environment.glob("*/python*.exe" if sys.platform == "win32" else "bin/python")
    asked = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    ran = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True)
    site = Path(ran.stdout.strip())
    with zipfile.ZipFile(wheel) as content:
        content.extractall(site)
    (made,) = metadata.distributions(name="lastlayer", path=[str(site)])
    base = [line for line in made.requires if "extra" not in line]
    for each in required(base):
        tops = {file.parts[0] for file in each.files or () if file.parts[0] != ".."}
        for top in tops - {"__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(each.locate_file(top))
    return python


def run(python, words, folder):
    command = [python, "-I", "-m", "lastlayer", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_every_command_is_tried():
    names = {each.name or each.callback.__name__ for each in app.registered_commands}
    assert names == {*ARGUMENTS, "doctor"}


def test_the_packages_of_the_extra_are_known():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [Requirement(line).name for line in project["optional-dependencies"]["lab"]]
    assert len(PACKAGES) == len(asked)
    assert {each.replace("-", "_") for each in asked} - {*PACKAGES} == {
        "scikit_learn", "vl_convert_python"
    }  # fmt: skip


@pytest.mark.parametrize("command", ARGUMENTS)
def test_a_command_of_the_lab_names_the_extra(bare, tmp_path, command):
    ran = run(bare, [command, *ARGUMENTS[command]], tmp_path)
    assert ran.returncode == 2, ran.stderr
    assert 'pip install "lastlayer[lab]"' in ran.stderr
    assert "Traceback" not in ran.stderr
    assert ran.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
    shown = run(bare, [command, "--help"], tmp_path)
    assert shown.returncode == 0, shown.stderr


def test_the_doctor_works_and_knows_what_is_missing(bare, tmp_path):
    ran = run(bare, ["doctor", "--json"], tmp_path)
    assert ran.returncode == 0, ran.stderr
    missing = {each["name"]: each["missing"] for each in json.loads(ran.stdout)["extras"]}
    assert any("altair" in each for each in missing["lab"])
    assert missing["ray"]
