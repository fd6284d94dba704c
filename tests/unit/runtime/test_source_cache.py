"""Where emitted source is kept: whatever is wrong with the folder, a kernel's module is loaded."""

import errno
import logging
import os
import tempfile
from pathlib import Path

import pytest

from dtkernels.runtime.build import source_cache
from dtkernels.runtime.log import forget


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """A cache and a temporary folder of the test's own."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("DTKERNELS_CACHE", str(tmp_path / "cache"))
    forget()
    source_cache._temporary.cache_clear()
    yield tmp_path
    source_cache._temporary.cache_clear()


def loaded(number: int) -> Path:
    """A module that was not loaded before, and is right; its file."""
    module = source_cache.load_module(f"value = {number}\n", "some")
    assert module.value == number
    return Path(module.__file__)


def test_a_module_is_read_again_from_its_file(folders):
    path = loaded(1)
    assert path.parent == folders / "cache" and [p.name for p in path.parent.iterdir() if p.is_file()] == [path.name]


@pytest.mark.parametrize("contents", [b"\xff\xfe\x00", b"", b"value = 0\n"])
def test_a_file_that_is_damaged_is_written_anew(folders, contents):
    source = f"value = {len(contents) + 10}\n"
    name = source_cache._in(folders, source, "some.py").name
    (folders / name).write_bytes(contents)
    assert source_cache._in(folders, source, name).read_text() == source


def test_a_folder_in_its_place_and_a_full_disk_cost_one_warning(folders, monkeypatch, caplog):
    real = os.replace

    def full(part, path):
        if str(path).startswith(str(folders / "cache")):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(part, path)

    with caplog.at_level(logging.WARNING, logger="dtkernels"):
        (folders / "cache").mkdir()
        monkeypatch.setattr(os, "replace", full)
        for number in (20, 21):
            assert loaded(number).parent == folders / "temporary" / f"dtkernels-{os.getuid()}"
        monkeypatch.undo()
    assert [r.message.count("No space left on device") for r in caplog.records] == [1]
    assert not list((folders / "cache").iterdir())


def test_a_user_without_a_home_gets_the_temporary_folder_and_one_warning(folders, monkeypatch, caplog):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("DTKERNELS_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with caplog.at_level(logging.WARNING, logger="dtkernels"):
        assert loaded(30).parent == loaded(31).parent == folders / "temporary" / f"dtkernels-{os.getuid()}"
    assert ["this user has no home" in r.message for r in caplog.records] == [True]


def test_a_temporary_folder_that_others_may_write_to_is_not_used(folders, monkeypatch):
    shared = folders / "temporary" / f"dtkernels-{os.getuid()}"
    shared.mkdir()
    shared.chmod(0o777)
    (folders / "file").write_text("")
    monkeypatch.setenv("DTKERNELS_CACHE", str(folders / "file"))
    path = loaded(40)
    assert path.parent.parent == folders / "temporary" and path.parent != shared and path.parent.stat().st_mode & 0o077 == 0


def test_a_module_is_loaded_again_where_the_interpreter_is_chosen_anew(monkeypatch):
    source = "from dtkernels.runtime.path_counters import interpreting\nvalue = interpreting()\n"
    for chosen in ("1", "0", "1"):
        monkeypatch.setenv("TRITON_INTERPRET", chosen)
        assert source_cache.load_module(source, "some").value == (chosen == "1")
