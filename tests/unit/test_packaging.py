"""What an install holds: Python of every room, specs and tables, under the names they are imported by."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"dtkernels": "dtkernels", "schedule_tables": "dtkernels/schedule_tables", "integrations": "dtkernels/integrations"}
SHIPPED = {".py", ".yaml", ".safetensors", ".typed"}


def run(*command, cwd: Path) -> str:
    done = subprocess.run([sys.executable, *map(str, command)], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy: a build leaves files behind, and must not pick up those of an earlier one."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    # A table as a GPU's folder holds it, so that this is tested before the first GPU is tuned.
    (source / "schedule_tables" / "sample_gpu").mkdir()
    (source / "schedule_tables" / "sample_gpu" / "ops.yaml").write_text("rows: []\n")
    (source / "schedule_tables" / "sample_gpu" / "kernels.safetensors").write_bytes(b"")
    run("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out, source, cwd=out)
    (built,) = out.glob("dtkernels-*.whl")
    return built


def in_the_tree() -> set[str]:
    """Every file of ours that has to be installed, by its place in the install."""
    return {
        str(PurePosixPath(place, path.relative_to(ROOT / folder).as_posix()))
        for folder, place in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SHIPPED and "__pycache__" not in path.parts
    }


def test_the_wheel_holds_every_file(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    missing = sorted(in_the_tree() - held)
    assert not missing, "not in the wheel; a new folder belongs into [tool.setuptools] of pyproject.toml: " + ", ".join(missing)


def test_the_wheel_holds_specs_tables_and_integrations(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    assert any(name.startswith("dtkernels/specs/") and name.endswith(".yaml") for name in held)
    assert {"dtkernels/integrations/__init__.py", "dtkernels/schedule_tables/__init__.py"} <= held
    assert {f"dtkernels/schedule_tables/sample_gpu/{name}" for name in ("ops.yaml", "kernels.safetensors")} <= held


def test_the_wheel_holds_nothing_else(wheel):
    """No top-level `integrations` or `tests` to collide with another package's."""
    assert {name.split("/")[0].split("-")[0] for name in zipfile.ZipFile(wheel).namelist()} == {"dtkernels"}


def test_the_metadata_says_what_it_is(wheel):
    held = zipfile.ZipFile(wheel)
    (folder,) = {name.split("/")[0] for name in held.namelist() if ".dist-info/" in name}
    told = held.read(f"{folder}/METADATA").decode().partition("\n\n")[0].splitlines()
    version = re.search(r'__version__ = "(.*)"', (ROOT / "dtkernels" / "__init__.py").read_text())
    assert version is not None
    for line in (f"Version: {version[1]}", "License-Expression: Apache-2.0", "Requires-Python: >=3.10", "Classifier: Programming Language :: Python :: 3 :: Only"):
        assert line in told
    assert any(name.endswith("/LICENSE") for name in held.namelist()) and wheel.stat().st_size < 40 << 20


WHERE = """
import sys; sys.path[:0] = {path}
import dtkernels, dtkernels.integrations, dtkernels.schedule_tables
from importlib.resources import files
assert any(spec.name.endswith(".yaml") for spec in (files("dtkernels") / "specs").iterdir()), "no specs"
print(*(module.__file__ for module in (dtkernels, dtkernels.integrations, dtkernels.schedule_tables)), sep="\\n")
"""


def places(path: list[str], cwd: Path) -> list[Path]:
    return [Path(line).parent for line in run("-c", WHERE.format(path=path), cwd=cwd).split()]


def test_installed_from_the_wheel_it_imports(wheel, tmp_path):
    site = tmp_path / "site"
    run("-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", site, wheel, cwd=tmp_path)
    inside = site / "dtkernels"
    assert places([str(site)], tmp_path) == [inside, inside / "integrations", inside / "schedule_tables"]


def test_as_installed_here_it_imports(tmp_path):
    """`make env` installs in place (`pip install -e .`): the imports come from this checkout, wherever Python starts."""
    found = places([], tmp_path)
    elsewhere = [place for place in found if not place.is_relative_to(ROOT)]
    if elsewhere:
        pytest.skip(f"this environment holds an install from elsewhere: {elsewhere[0]}")
    assert found == [ROOT / "dtkernels", ROOT / "integrations", ROOT / "schedule_tables"]


def test_a_checkout_is_whole_beside_an_install_of_another(tmp_path):
    """Python started in a clone takes the clone's package before any install's, and its other rooms with it."""
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tmp_path / "clone" / folder, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    clone = tmp_path / "clone"
    assert places([str(clone)], tmp_path) == [clone / "dtkernels", clone / "integrations", clone / "schedule_tables"]
