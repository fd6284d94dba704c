"""The tuner and what people do to it: wrong options and shapes, Ctrl-C at any moment, a full disk, damaged files in its folder."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tools"))

from dtkernels.runtime.aot_build import meta_tensors  # noqa: E402
from dtkernels.runtime.reference import evaluator  # noqa: E402
from dtkernels.tuning import tune as tune_tool  # noqa: E402
from dtkernels.tuning.records import problems  # noqa: E402
from dtkernels.tuning.records.journal import Journal, Time  # noqa: E402
from dtkernels.tuning.records.measurement_store import read_matrices  # noqa: E402
from dtkernels.tuning.records.write_table import set_aside  # noqa: E402

OPTIONS = [
    ("--budget 0", "'0' is no time"),
    ("--budget 0.0h", "is no time"),
    ("--stop-after -1", "is no time"),
    ("--workers 0", "'0' is no whole number from 1 on"),
    ("--jobs -1", "'-1' is no whole number from 0 on"),
    ("--limit nan", "'nan' is no number above 0"),
    ("--regret 0", "'0' is no number above 0.999"),
    ("--dtypes bf16,fp8", "unknown 'fp8'; allowed: bf16, fp16, fp32"),
    ("--dtypes ", "unknown ''"),
    ("--gpu z9", "invalid choice: 'z9'"),
    ("--shapes {tmp}", "Is a directory"),
    ("--out {tmp}/file", "File exists"),
    ("--out {tmp}/file/in", "Not a directory"),
    ("--out {tmp}/damaged", "relu.yaml: not YAML"),
    ("--ops ", "--ops names none; allowed: all, add_rmsnorm, attention"),
    ("--ops ,", "--ops names none"),
    ("--ops no_such_op", "no op 'no_such_op'"),
    ("--ops /nowhere.yaml", "no such file: /nowhere.yaml"),
    ("--shapes /nowhere.yaml", "/nowhere.yaml: No such file"),
    ("--budget soon", "'soon' is no time"),
]


def refused(capsys, *argv: str) -> str:
    """The line with which a command is refused."""
    with pytest.raises(SystemExit) as end:
        tune_tool.main(list(argv))
    assert end.value.code
    return [*capsys.readouterr().err.splitlines(), *([end.value.code] if isinstance(end.value.code, str) else [])][-1]


@pytest.mark.parametrize("asked, said", OPTIONS)
def test_a_wrong_option_is_one_line(asked, said, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "relu.yaml").write_text("- [")
    name, _, value = asked.format(tmp=tmp_path).partition(" ")
    assert said in refused(capsys, "--dry-run", "--ops", "relu", "--out", str(tmp_path / "out"), "--jobs", "1", "--from", "none", name, value)


def test_a_gpu_is_pretended_in_a_dry_run_only(capsys):
    assert "a100 is what --dry-run pretends" in refused(capsys, "--gpu", "a100", "--ops", "relu")


SHAPES = {
    "": "maps ops to lists of shapes",
    "- 1": "maps ops to lists of shapes",
    "hello": "maps ops to lists of shapes",
    "relu:\n\t- 1": ":2:1: not YAML",
    "relu: [": "not YAML",
    'relu: "a': "not YAML",
    "relu: *x": "undefined alias",
    "relu: !!python/object/apply:os.system [ls]": "could not determine a constructor",
    "relu: 2026-99-99": "not YAML: found month must be in 1..12",
    "relu: []\nrelu: []": "the key 'relu' again",
    "? [a]\n: 1": "unhashable key",
    "relu:\0": "not YAML",
    "[" * 9000: "not YAML",
    '{"relu": [{"sizes": {"x": 64}}]': "not YAML",
    "relux:\n- sizes: {x: 4}": "no such op: found 'relux'; allowed: add_rmsnorm, attention",
    "1: []": "no such op: found 1",
    "relu: 5": "shapes is a list: found int",
    "relu: {sizes: {x: 4}}": "shapes is a list: found dict",
    "relu: &a [*a]": "entry 1 is a mapping: found list",
    "relu:\n- {}": "sizes maps labels to extents",
    "relu:\n- sizes: {x: 4}\n- sizes: 4": "entry 2: sizes maps labels to extents",
    "relu:\n- sizes: {x: -4}": "size of x: found -4; allowed: 1 to 2^40",
    "relu:\n- sizes: {x: []}": "size of x: found none",
    "relu:\n- sizes: {x: 1.5}": "size of x: found 1.5",
    "relu:\n- sizes: {x: true}": "size of x: found True",
    "relu:\n- sizes: {x: " + "9" * 40 + "}": "allowed: 1 to 2^40",
    "relu:\n- sizes: {4: 4}": "have names: found 4",
    "relu:\n- sizes: {null: 4}": "have names: found None",
    "relu:\n- sizes: {x: 4, zz: 5}": "the label 'zz'; allowed: x",
    "relu:\n- sizes: {y: 4}": "the label 'y'; allowed: x",
    "relu:\n- sizes: {x: 4}\n  size: 4": "unknown key: found 'size'",
    "relu:\n- sizes: {x: 4}\n  params: {causal: true}": "the parameter 'causal'",
    "relu:\n- sizes: {x: 4}\n  params: [1]": "params maps names",
    "relu:\n- sizes: {x: 4}\n  wanted: [Q]": "the gradient of 'Q'; allowed: A",
    "relu:\n- sizes: {x: 4}\n  wanted: 3": "wanted: found 3",
    "relu:\n- sizes: {x: 4}\n  dtypes: [fp8]": "dtypes: found 'fp8'",
    "relu:\n- sizes: {x: 4}\n  directions: [up]": "directions: found 'up'",
    "relu:\n- sizes: {x: 4}\n  held_out: maybe": "held_out is true or false",
    "attention:\n- sizes: {b: 1, h: 2, m: 4, l: 4, d: 8, n: 8}\n  params: {group: true}": "parameter group is int: found True",
    "attention:\n- sizes: {b: 1, h: 2, m: 4, l: 4, d: 8, n: 8}\n  params: {causal: 7}": "parameter causal is bool: found 7",
    "softmax:\n- sizes: {x: 4, y: 4}": "no shapes for relu, attention",
    b"\xff\xfe": "UTF-8 text: found byte 0xff at offset 0",
}


@pytest.mark.parametrize("text", SHAPES, ids=lambda t: repr(t)[:40])
def test_shapes_that_are_wrong_are_one_line(text, tmp_path):
    path = tmp_path / "shapes.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SystemExit) as end:
        tune_tool.all_problems(tune_tool.arguments(["--dry-run", "--ops", "relu,attention", "--shapes", str(path)]))
    assert SHAPES[text] in end.value.code and "\n" not in end.value.code


def test_what_is_refused_leaves_the_journal_of_an_earlier_run_where_it_is(tmp_path, capsys):
    (tmp_path / "journal.jsonl").write_text("of an earlier run")
    said = refused(capsys, "--dry-run", "--ops", "relu", "--out", str(tmp_path), "--jobs", "1", "--from", str(tmp_path / "nowhere"))
    assert "nowhere: no such folder" in said
    assert [p.name for p in tmp_path.iterdir()] == ["journal.jsonl"] and (tmp_path / "journal.jsonl").read_text() == "of an earlier run"


# -- files ----------------------------------------------------------------------------------------------------------------


def test_what_is_set_aside_never_takes_the_place_of_another(tmp_path):
    for n in (1, 2, 3):
        (tmp_path / "journal.jsonl").write_text(str(n))
        assert set_aside(tmp_path / "journal.jsonl").name == f"journal.{n}.old"
    assert [(tmp_path / f"journal.{n}.old").read_text() for n in (1, 2, 3)] == ["1", "2", "3"]


class Full:
    """A file on a disk that is full within the next line."""

    def __init__(self, file):
        self.file, self.writes = file, 0

    def write(self, data: bytes) -> int:
        self.writes += 1
        if self.writes == 1:
            return self.file.write(data[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    def __getattr__(self, name: str):
        return getattr(self.file, name)


def test_a_full_disk_loses_the_line_in_hand_only(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, {"gpu": "G"})
    journal.put("w\x1fa", "p\x1fa", Time(1.0, 2.0))
    before, journal._file = path.read_bytes(), Full(journal._file)
    with pytest.raises(OSError, match="No space"):
        journal.put("w\x1fa", "p\x1fb", Time(1.0, 2.0))
    journal.spent(3.0)  # as a run does that ends
    assert path.read_bytes() == before
    again = Journal(path, {"gpu": "G"})
    again.put("w\x1fa", "p\x1fb", Time(1.0, 2.0))
    assert len(Journal(path, {"gpu": "G"}).times) == 2


@pytest.mark.parametrize("line", [b"\xff\n", b"5\n", b'["h",5]\n', b'["t",0,0,1,1]\n', b"{}\n", b'["w"]\n', b"[" * 3000 + b"\n"])
def test_a_damaged_journal_is_refused_with_its_line(tmp_path, line):
    path = tmp_path / "journal.jsonl"
    Journal(path, {"gpu": "G"}).close()
    path.write_bytes(path.read_bytes() + line)
    with pytest.raises(ValueError, match="journal.jsonl:2: damaged"):
        Journal(path, {"gpu": "G"})


# -- whole runs -------------------------------------------------------------------------------------------------------------


def started(out: Path, *more: str) -> subprocess.Popen:
    shapes = out.parent / "shapes.yaml"
    shapes.write_text("relu:\n- {sizes: {x: 4096}, directions: [forward]}\n")
    fixed = ["--dry-run", "--gpu", "h200", "--ops", "relu", "--shapes", str(shapes), "--dtypes", "bf16", "--jobs", "1", "--from", "none", "--rounds", "1", "--out", str(out)]
    command = [sys.executable, str(ROOT / "tools" / "tune.py"), *fixed, *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def test_a_run_that_measures_nothing_leaves_the_tables_and_a_damaged_matrix_is_set_aside(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "relu.yaml").write_text("[]\n")
    (out / "measurements.safetensors").write_bytes(b"\x10" + bytes(40))
    nothing = started(out, "--budget", "0.1s")
    assert "nothing was measured, tables stay as they are" in nothing.communicate(timeout=300)[1] and nothing.returncode == 1
    assert (out / "relu.yaml").read_text() == "[]\n"
    run = started(out, "--budget", "900s")
    _, told = run.communicate(timeout=300)
    assert run.returncode == 0, told
    assert "the journal of an earlier run is now" in told and (out / "journal.1.old").exists()
    assert "no measurements of this version" in told and (out / "measurements.1.old").read_bytes() == b"\x10" + bytes(40)
    assert read_matrices(out / "measurements.safetensors")[1] and (out / "relu.yaml").read_text() != "[]\n"


@pytest.mark.parametrize("moment", ["importing", "starting workers"])
def test_control_c_while_it_starts_is_one_line(tmp_path, moment):
    """As at a terminal: every process of the group hears it."""
    out = tmp_path / "out"
    run = started(out, "--budget", "900s", "--pause", "0.5")
    end = time.monotonic() + 120
    while time.monotonic() < end and run.poll() is None and not out.exists() and moment != "importing":
        time.sleep(0.02)
    time.sleep(0.5)  # Python itself has started
    os.killpg(run.pid, signal.SIGINT)
    told, errors = run.communicate(timeout=120)
    assert run.returncode == 130 and "Traceback" not in told + errors and "KeyboardInterrupt" not in errors
    assert errors.strip().splitlines()[-1].startswith("tune: ")


def test_an_op_whose_sizes_do_not_say_all_is_left_out_of_all_and_refused_by_name(capsys):
    """The number of matrices that data picks from is no label of these specs."""
    found = tune_tool.all_problems(tune_tool.arguments(["--dtypes", "bf16"]))
    said, ops = capsys.readouterr().err, {work.group.op for work in found}
    assert re.search(r"^tune: .*grouped_mm.*: their specs give no length of what they index", said, re.MULTILINE)
    assert "grouped_mm" not in ops and {"softmax", "attention", "linear_cross_entropy"} <= ops
    with pytest.raises(SystemExit, match="its shapes give no size of W_0; given: m, n, k"):
        tune_tool.all_problems(tune_tool.arguments(["--ops", "grouped_mm"]))


def test_sizes_of_labels_that_the_algebra_makes_follow_from_those_of_the_op(tmp_path):
    path = tmp_path / "upconv.yaml"
    path.write_text(
        "op: upconv\ndoc: A transposed convolution.\nalgorithm: |\n  Func upconv; In X, W; Var b, o, v; RVar c, r; Extent v = 2 * X[2] + W[2] - 2;\n"
        "  upconv[b, o, v] = rdot(where((v - r) % 2 == 0, X[b, c, (v - r) / 2], 0), W[c, o, r], c, r);\n"
        "shapes:\n  - {sizes: {b: 4, o: 64, c: 64, v: 257, r: 3}, directions: [forward, backward], dtypes: [bf16]}\n"
    )
    spec = problems.operator_of(str(path)).spec
    found = problems.problems_of(str(path), spec.shapes)
    assert [w.group.direction for w in found] == ["forward", "backward"]
    for work in found:
        forward, variant = problems.variants_of(work.group)
        tensors = meta_tensors(forward, variant, dict(work.extents), torch.bfloat16)
        assert tensors["X"].shape == (4, 64, 128), "the size for which the formula gives 257, not what indices reach"
        assert evaluator.extents(variant.algorithm, tensors) == dict(work.extents)
