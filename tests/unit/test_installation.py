"""What an installation lacks, and where the environment points: one line that says so."""

import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dtkernels import doctor, show
from dtkernels.cli import main
from dtkernels.runtime.build import source_cache
from dtkernels.runtime.folders import folder_named
from dtkernels.runtime.log import forget
from dtkernels.runtime.select import table_loader
from dtkernels.runtime.tables.table import Gpu

ROOT = Path(__file__).parents[2]
H200 = Gpu("NVIDIA H200", 90, 132, 4.8e12)


@pytest.fixture(autouse=True)
def anew():
    table_loader.forget()
    folder_named.cache_clear()
    yield
    table_loader.forget()
    folder_named.cache_clear()


def bare(*argv) -> subprocess.CompletedProcess:
    """A Python without what pip installs."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-S", *map(str, argv)], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_the_doctor_names_what_is_missing_before_anything_else_can_run():
    found = bare("-m", "dtkernels", "doctor")
    assert found.returncode == 1 and found.stderr == ""
    assert {"WARN pyyaml is not installed, but required", "WARN torch is not installed: 2.10 or newer is required"} <= set(found.stdout.splitlines())


def test_any_other_command_says_what_is_missing_in_one_line():
    found = bare("-m", "dtkernels", "show", "relu")
    assert found.returncode == 2 and found.stdout == ""
    assert found.stderr == "dtkernels: yaml is not installed; python -m dtkernels doctor says what else is not\n"


@pytest.mark.parametrize("tool", ["tune", "build", "check_tables", "bench_models", "lora_training"])
def test_a_tool_says_what_is_missing_in_one_line_and_begins_nothing(tool):
    found = bare(ROOT / "tools" / f"{tool}.py", "--help")
    assert found.returncode == 1 and found.stdout == "" and found.stderr.count("\n") == 1
    assert found.stderr.startswith(f"{tool}: not installed: torch")


def test_the_doctor_gets_by_without_any_folder_that_can_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DTKERNELS_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    source_cache._temporary.cache_clear()
    assert any(line.startswith("WARN cache folder: none is writable") for line in doctor.report())
    source_cache._temporary.cache_clear()


def test_a_folder_that_triton_cannot_write_is_named_with_the_variable_that_moves_it(monkeypatch, capsys):
    def denied(subject):
        raise PermissionError(13, "Permission denied", "~")

    monkeypatch.setattr(show, "machine_code", denied)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert main(["explain", "relu", "--build"]) == 2
    assert capsys.readouterr().err == "dtkernels: ~: Permission denied; TRITON_CACHE_DIR and DTKERNELS_CACHE say where to write\n"


def test_a_kernel_that_lacks_triton_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("DTKERNELS_CACHE", str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match=r"^f: a kernel cannot run: Triton .*, and needs no_such_module: pip install no_such_module$"):
        source_cache.load_module("import no_such_module\n", "f")


# -- folders that the environment names --------------------------------------------------------------------------------------


def rows(op: str) -> int:
    return len(table_loader.op_table(op, H200).rows)


def test_tables_named_from_here_are_found_after_the_process_goes_elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("DTKERNELS_TABLES", "schedule_tables")
    assert rows("softmax") > 0
    monkeypatch.chdir(tmp_path)
    assert rows("relu") > 0


def test_a_folder_under_home_is_named_as_a_shell_would(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DTKERNELS_CACHE", "~/some/cache")
    assert source_cache.cache_dir() == tmp_path / "some" / "cache"


@pytest.mark.parametrize("inside, said", [("", "no folder in it has a gpu.yaml"), ("nvidia_h200", "it is one table; name the folder that it lies in")])
def test_a_folder_without_tables_is_told_of_once(inside, said, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("DTKERNELS_TABLES", str(ROOT / "schedule_tables" / inside if inside else tmp_path))
    forget()
    with caplog.at_level(logging.WARNING, "dtkernels"):
        assert rows("softmax") == rows("relu") == 0
    assert len(caplog.messages) == 1 and said in caplog.messages[0]
