"""Every variable of the environment that the source reads is known, documented and reported with whether it is usable."""

import os
import re
import shutil
from pathlib import Path

import pytest

from dtkernels import doctor, environment
from dtkernels.cli import main
from dtkernels.runtime.folders import folder_named
from dtkernels.runtime.select import table_loader

ROOT = Path(__file__).parents[2]
TABLES = ROOT / "schedule_tables"
READ = re.compile(r"""(?:environ(?:\.get|\.setdefault|\.pop)?\s*[(\[]|getenv\()\s*["'](\w+)["']""")
OURS = re.compile(r"\bDTKERNELS_[A-Z_]+\b")



def sources(*folders: str) -> str:
    return "\n".join(p.read_text() for folder in folders for p in sorted((ROOT / folder).rglob("*.py")) if p.name not in ("environment.py", "test_environment.py"))


@pytest.fixture(autouse=True)
def anew(monkeypatch):
    for name in (n for n in os.environ if n.startswith("DTKERNELS_")):
        monkeypatch.delenv(name)
    table_loader.forget()
    folder_named.cache_clear()
    yield
    table_loader.forget()
    folder_named.cache_clear()


def test_every_variable_that_the_package_reads_is_known():
    read = set(READ.findall(sources("dtkernels", "integrations")))
    assert {"DTKERNELS_TABLES", "DTKERNELS_CACHE", "DTKERNELS_LOG", "TRITON_INTERPRET", "CC"} <= read  # the pattern finds some
    assert read <= set(environment.BY_NAME)


def test_every_variable_of_ours_that_stands_anywhere_is_known():
    written = set(OURS.findall(sources("dtkernels", "integrations", "tools", "benchmarks", "tests") + (ROOT / "Makefile").read_text()))
    assert written - set(environment.BY_NAME) <= {"DTKERNELS_TABELS", "DTKERNELS_XYZZY", "DTKERNELS_"}


def test_every_variable_of_ours_that_is_known_is_read():
    read = set(READ.findall(sources("dtkernels", "integrations", "tests")))
    assert {n for n in environment.BY_NAME if n.startswith("DTKERNELS_")} <= read


def test_the_page_lists_them_as_the_source_has_them():
    page = ROOT / "docs" / "configuration.md"
    assert page.read_text() == environment.page(page.read_text()), "python -m dtkernels.environment docs/configuration.md"
    assert all(page.read_text().count(f"| `{v.name}` |") == 1 for v in environment.VARIABLES)


def told(monkeypatch, name: str, value: str) -> tuple[bool, str]:
    """What is reported of one variable."""
    monkeypatch.setenv(name, value)
    (found,) = [(good, text) for good, text in environment.variable_reports() if text.startswith(f"{name}=")]
    assert "\n" not in found[1]
    return found


@pytest.fixture
def places(tmp_path, monkeypatch) -> dict[str, str]:
    """Folders and files to point at, by name."""
    monkeypatch.setenv("DTKERNELS_TRUST_TABLES", "1")  # the copies lie outside the package
    (tmp_path / "file").write_text("")
    for name in ("empty", "good", "corrupt", "rows", "store", "nogpu"):
        (tmp_path / name).mkdir()
    for name in ("good", "corrupt", "rows", "store"):
        (tmp_path / name / "nvidia_h200").mkdir()
        for part in ("nvidia_h200/gpu.yaml", "nvidia_h200/relu.yaml", "sm_90/relu.safetensors"):
            shutil.copy(TABLES / part, tmp_path / name / "nvidia_h200")
    (tmp_path / "corrupt" / "nvidia_h200" / "gpu.yaml").write_text("- [")
    (tmp_path / "rows" / "nvidia_h200" / "relu.yaml").write_text("op: relu\n")
    (tmp_path / "store" / "nvidia_h200" / "relu.safetensors").write_bytes(b"\x08\0\0")
    (tmp_path / "nogpu" / "nvidia_h200").mkdir()
    return {"tmp": str(tmp_path)}


UNUSABLE = [
    ("DTKERNELS_TABLES", "{tmp}/nowhere", "{tmp}/nowhere: no such folder; every op takes the default schedule"),
    ("DTKERNELS_TABLES", "{tmp}/file", "{tmp}/file: a file; name a folder of tables"),
    ("DTKERNELS_TABLES", "{tmp}/empty", "{tmp}/empty: no folder in it has a gpu.yaml"),
    ("DTKERNELS_TABLES", "{tmp}/nogpu", "{tmp}/nogpu: no folder in it has a gpu.yaml"),
    ("DTKERNELS_TABLES", "{tmp}/good/nvidia_h200", "it is one table; name the folder that it lies in"),
    ("DTKERNELS_TABLES", "{tmp}/corrupt", "{tmp}/corrupt/nvidia_h200/gpu.yaml: a mapping of name, arch, multiprocessors, bandwidth"),
    ("DTKERNELS_TABLES", "{tmp}/rows", "{tmp}/rows/nvidia_h200/relu.yaml: a table is a list of rows; found dict"),
    ("DTKERNELS_TABLES", "{tmp}/store", "{tmp}/store/nvidia_h200/relu.safetensors: "),
    ("DTKERNELS_CACHE", "{tmp}/file", "{tmp}/file: a file, where a folder is needed"),
    ("DTKERNELS_CACHE", "{tmp}/file/below", "{tmp}/file: a file, where a folder is needed"),
    ("DTKERNELS_CACHE", "/proc/below", "/proc: cannot be written"),
    ("XDG_CACHE_HOME", "{tmp}/file", "{tmp}/file: a file, where a folder is needed"),
    ("DTKERNELS_LOG", "loud", "'loud' is none of debug, info, warning, error; nothing is printed"),
    ("DTKERNELS_FALLBACK", "none", "'none' is none of own, reference"),
    ("DTKERNELS_TABELS", "x", "nothing reads it; did you mean DTKERNELS_TABLES?"),
    ("DTKERNELS_XYZZY", "x", "nothing reads it; allowed: DTKERNELS_TABLES, DTKERNELS_CACHE, DTKERNELS_LOG"),
    ("dtkernels_cache", "x", "nothing reads it; did you mean DTKERNELS_CACHE?"),
    ("DTKERNEL_TABLES", "x", "nothing reads it; did you mean DTKERNELS_TABLES?"),
    ("TRITON_INTERPRET", "maybe", "'maybe' is taken for false; allowed: 1 or 0"),
    ("TRITON_CACHE_DIR", "{tmp}/file", "Triton can compile nothing"),
    ("TRITON_PTXAS_PATH", "{tmp}/file", "{tmp}/file: is no program that can be run"),
    ("TRITON_PTXAS_PATH", "{tmp}/none", "{tmp}/none: no such program"),
    ("TRITON_LIBDEVICE_PATH", "{tmp}", "{tmp}: a folder"),
    ("TRITON_OVERRIDE_DIR", "{tmp}/none", "{tmp}/none: no such folder"),
    ("CC", "no-such-compiler -O2", "no-such-compiler: no such program"),
]


@pytest.mark.parametrize("name, value, said", UNUSABLE, ids=[f"{name}={value}" for name, value, _ in UNUSABLE])
def test_what_is_not_usable_is_named(name, value, said, places, monkeypatch):
    good, text = told(monkeypatch, name, value.format(**places))
    assert not good and said.format(**places) in text


USABLE = [
    ("DTKERNELS_TABLES", str(TABLES), "tables of nvidia_a100, nvidia_b200, nvidia_h100, nvidia_h200, nvidia_l40s"),
    ("DTKERNELS_TABLES", "{tmp}/good", "tables of nvidia_h200"),
    ("DTKERNELS_TABLES", "", "empty, which is as if it were not set"),
    ("DTKERNELS_CACHE", "{tmp}/good", "can be written"),
    ("DTKERNELS_CACHE", "{tmp}/to/be/made", "will be made"),
    ("DTKERNELS_LOG", "INFO", "as asked"),
    ("TRITON_INTERPRET", "1", "on"),
    ("TRITON_ENABLE_ASAN", "0", "one of Triton's own, not looked at"),
    ("CC", "python3 -O2", "a program"),
]


@pytest.mark.parametrize("name, value, said", USABLE, ids=[f"{name}={value}" for name, value, _ in USABLE])
def test_what_is_usable_is_reported_too(name, value, said, places, monkeypatch):
    good, text = told(monkeypatch, name, value.format(**places))
    assert good and said in text


def test_nothing_is_written_where_it_is_only_looked_at(monkeypatch, tmp_path):
    told(monkeypatch, "DTKERNELS_CACHE", str(tmp_path / "made"))
    assert list(tmp_path.iterdir()) == []


def test_the_exit_status_says_whether_all_is_usable(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(doctor, "_facts", lambda: iter([(True, "all is well")]))
    assert main(["doctor"]) == 0
    monkeypatch.setenv("DTKERNELS_TABLES", str(tmp_path))
    assert main(["doctor"]) == 1
    assert f"WARN DTKERNELS_TABLES={tmp_path}: " in capsys.readouterr().out


def test_no_gpu_and_the_interpreter_are_no_fault(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    faults = [fact.text for fact in doctor.facts() if fact.fault]
    assert not any(text.startswith(("GPU", "TRITON_INTERPRET")) for text in faults)


def test_broken_tables_of_the_package_are_a_fault(places, monkeypatch):
    monkeypatch.setattr(table_loader, "package_tables", lambda: Path(places["tmp"]) / "corrupt")
    assert any(fact.fault and "gpu.yaml" in fact.text for fact in doctor.facts())
