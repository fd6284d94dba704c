"""``python -m dtkernels``: what it prints, and one line and exit code 2 for what it refuses. Machine code is in tests/compile."""

import ast
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import refused, run

import dtkernels
from dtkernels import doctor
from dtkernels.cli import main
from dtkernels.codegen.target import TARGETS
from dtkernels.lang import parse, parse_schedule
from dtkernels.runtime.path_counters import interpreting
from dtkernels.show import STAGES, Subject, input_shapes, read, scalar_values, shipped

DOUBLE = "Func y; In A; Var i; y[i] = 2 * A[i]; y.block(i:1024); y.tensorize(i:1024);"
SPEC = """op: triple
doc: Three times A.
algorithm: |
  Func triple; In A; Var i; Param twice = false;
  triple[i] = where(twice, 6, 3) * A[i];
"""


@pytest.fixture
def double(tmp_path) -> Path:
    path = tmp_path / "double.dt"
    path.write_text(DOUBLE)
    return path


def process(*argv, **environment) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "dtkernels", *map(str, argv)]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120)


# -- compile ----------------------------------------------------------------------------------------------------------


def test_compile_writes_a_file_that_imports_torch_and_triton_only(double, tmp_path, capsys):
    output = tmp_path / "out.py"
    assert run(capsys, "compile", double, "-o", output) == ""
    tree = ast.parse(output.read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert imported == {"torch", "triton", "triton.language"}
    assert not any(isinstance(node, ast.ImportFrom) for node in ast.walk(tree))
    assert "y" in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_compile_without_an_output_prints_the_same_file(double, tmp_path, capsys):
    run(capsys, "compile", double, "-o", tmp_path / "out.py")
    assert run(capsys, "compile", double, "--gpu", "a100") == (tmp_path / "out.py").read_text()


def test_compile_takes_parameters(tmp_path, capsys):
    path = tmp_path / "p.dt"
    path.write_text("Func y; In A; Var i; Param n = 2; y[i] = n * A[i];")
    assert "3 * A" in run(capsys, "compile", path, "--param", "n=3")


def test_compile_replaces_a_file_whole_and_keeps_its_permissions(double, tmp_path, capsys):
    output = tmp_path / "out.py"
    output.write_text("old")
    output.chmod(0o640)
    before = output.stat().st_ino
    run(capsys, "compile", double, "-o", output)
    assert output.stat().st_ino != before  # another file took its place: nobody saw half of one
    assert stat.S_IMODE(output.stat().st_mode) == 0o640
    assert sorted(p.name for p in tmp_path.iterdir()) == ["double.dt", "out.py"]


def test_a_new_file_has_the_usual_permissions(double, tmp_path, capsys):
    mask = os.umask(0o027)
    try:
        run(capsys, "compile", double, "-o", tmp_path / "out.py")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "out.py").stat().st_mode) == 0o640


def test_a_link_keeps_pointing_at_the_file_it_names(double, tmp_path, capsys):
    (tmp_path / "link.py").symlink_to(tmp_path / "out.py")
    run(capsys, "compile", double, "-o", tmp_path / "link.py")
    assert (tmp_path / "link.py").is_symlink() and (tmp_path / "out.py").is_file()


def test_a_refused_program_leaves_the_old_file(double, tmp_path, capsys):
    output = tmp_path / "out.py"
    output.write_text("old")
    double.write_text("Func y; In A; Var i;\n  y[i] = B[i];")
    assert refused(capsys, "compile", double, "-o", output).startswith(f"{double}:2:10: undeclared tensor: found 'B'; allowed: ")
    assert output.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["double.dt", "out.py"]


def test_compile_does_not_replace_its_own_program(double, capsys):
    assert "would replace the program" in refused(capsys, "compile", double, "-o", double)
    assert double.read_text() == DOUBLE


# -- what is refused --------------------------------------------------------------------------------------------------

BAD = [
    (["compile", "none.dt"], "none.dt: No such file or directory"),
    (["compile", "."], ".: compile takes a .dt program"),
    (["compile", "folder.dt"], "folder.dt: Is a directory"),
    (["compile", "good.dt", "-o", "nowhere/out.py"], "nowhere: no such folder"),
    (["compile", "good.dt", "-o", "folder.dt"], "folder.dt: is a folder"),
    (["compile", "good.dt", "--gpu", "h300"], "unknown GPU: found 'h300'; allowed: a100, l40s, h100, h200, b200, mi300x"),
    (["compile", "good.dt", "--param", "n=3"], "unknown parameter: found 'n'; allowed: none"),
    (["compile", "syntax.dt"], "syntax.dt:2:3: syntax: found "),
    (["compile", "unused.dt"], "what is declared is used: found In 'B' is not"),
    (["compile", "bytes.dt"], "bytes.dt: a program is UTF-8 text: found byte 0xff at offset 1"),
    (["compile", "deep.dt"], "nested too deeply"),
    (["compile", "empty.dt"], "a program defines at least one Func"),
    (["compile", "spec.yaml"], "spec.yaml: compile takes a .dt program"),
    (["compile"], "the following arguments are required: FILE.dt"),
    (["show", "sotfmax"], "no such op: found 'sotfmax'; did you mean softmax?"),
    (["show", "xyzzy"], "no such op: found 'xyzzy'; allowed: add_rmsnorm, attention, "),
    (["show", "none.yaml"], "none.yaml: No such file or directory"),
    (["show", "key.yaml"], "key.yaml: unknown key: found 'extra'"),
    (["show", "parameters.yaml"], "parameters.yaml: parameters is a mapping of names to texts: found int"),
    (["show", "dtypes.yaml"], "dtypes.yaml: dtypes: found 'int3'; allowed: fp32, fp16, bf16"),
    (["show", "twice.yaml"], "twice.yaml:4:1: not YAML: found the key 'doc' again"),
    (["show", "keyword.yaml"], "keyword.yaml: op is a Python name of ASCII letters, digits and _: found 'lambda'"),
    (["show", "nothing.yaml"], "nothing.yaml: an op reads a tensor: found no In in its algorithm"),
    (["show", "bytes.yaml"], "bytes.yaml: a spec is UTF-8 text: found byte 0xff at offset 1"),
    (["show", "algorithm.yaml"], "algorithm.yaml:3:41: undeclared tensor: found 'B'"),
    (["show", "softmax", "--shape", "4096"], "a shape of softmax has an extent for each label: found 4096; allowed: 2 extents: x, y"),
    (["show", "mmsigmoid", "--shape", "1x2x3x4"], "found 1x2x3x4; allowed: 3 extents: x, y, k"),
    (["show", "mmsigmoid", "--shape", "64x64"], "found 64x64; allowed: 3 extents: x, y, k"),
    (["compile", "good.dt", "--shape", "64x64"], "a shape of good has an extent for each label: found 64x64; allowed: 1 extent: i"),
    (["explain", "attention", "--backward", "--shape", "4x4096"], "allowed: 6 extents: b, h, m, n, l, d"),
    (["show", "softmax", "--sizes", "x=4"], "the sizes of softmax name each label: found none for y; allowed: x, y"),
    (["explain", "softmax", "--sizes", "x=4,y=4,z=4"], "softmax has no label of this name: found 'z'; allowed: x, y"),
    (["compile", "good.dt", "--sizes", "j=4"], "good has no label of this name: found 'j'; allowed: i"),
    (["compile", "tied.dt", "--sizes", "i=4,j=5"], "i and j of tied are one extent: found i=4, j=5; allowed: the same"),
    (["compile", "constant.dt", "--sizes", "i=4,j=5"], "the extent of j in constant: found 5; allowed: 3, as the program says"),
    (["compile", "constant.dt", "--shape", "4x3"], "found 4x3; allowed: 1 extent: i"),
    (["show", "softmax", "--sizes", "x=4,x=5"], "the sizes name x twice: 4 and 5"),
    (["show", "softmax", "--sizes", "x=4,y=0"], "each from 1 to 2^31 - 1, such as x=4096,y=8192; found 'y=0'"),
    (["show", "softmax", "--sizes", "x=-4"], "found 'x=-4'"),
    (["show", "softmax", "--sizes", "x=nan"], "found 'x=nan'"),
    (["show", "softmax", "--sizes", "4096x4096"], "found '4096x4096'"),
    (["show", "softmax", "--sizes", ""], "found ''"),
    (["show", "softmax", "--sizes", "x=4,y=4", "--shape", "4x4"], "not allowed with argument --s"),
    (["explain", "softmax", "--gpu", "h300"], "unknown GPU: found 'h300'"),
    (["explain", "sotfmax"], "no such op: found 'sotfmax'"),
    (["explain", "softmax", "--wrt", "B"], "a gradient is with respect to an input or a scalar: found 'B'; allowed: A"),
    (["explain", "attention", "--param", "causal=3"], "parameter causal is bool: found 3"),
    (["explain", "attention", "--backward", "--param", "group=true"], "parameter group is"),
    (["show", "softmax", "--shape", "4096xx"], "a shape is extents from 1 to 2^31 - 1"),
    (["show", "softmax", "--shape", "0x1"], "a shape is extents from 1 to 2^31 - 1"),
    (["show", "softmax", "--shape", "9" * 5000], "a shape is extents from 1 to 2^31 - 1"),
    (["show", "softmax", "--dtype", "fp8"], "argument --dtype: invalid choice"),
    (["show", "softmax", "--stage", "sass"], "argument --stage: invalid choice"),
    (["show", "attention", "--param", "causal"], "a parameter is name=value"),
    (["show", "attention", "--param", "causal=3"], "parameter causal is bool: found 3"),
    (["show", "attention", "--param", "cau=true"], "unknown parameter: found 'cau'; allowed: causal, starts, ends, masked, "),
    (["show", "attention", "--param", "causal=true", "--param", "causal=false"], "--param: causal is given twice: True and False"),
    (["show", "attention", "--param", "scale=nan"], "a parameter is name=value with true, false or a finite number; found 'scale=nan'"),
    (["show", "attention", "--param", "scale=1e999"], "found 'scale=1e999'"),
    (["show", "attention", "--param", "scale=true"], "scalar scale is a number: found true"),
    (["show", "grouped.dt", "--param", "g=0.5"], "scalar g is an integer, as it stands in an index: found 0.5"),
    (["compile", "good.dt", "-o", "/proc/x.py"], "/proc/x.py: cannot be written"),
    (["show", "empty.yaml"], "empty.yaml: a spec is a mapping: found NoneType"),
    (["show", "folder.yaml"], "folder.yaml: Is a directory"),
    (["show", "list.yaml"], "list.yaml:2:1: not YAML"),
    (["explain", "none.yaml"], "none.yaml: No such file or directory"),
    (["explain", "bytes.yaml"], "bytes.yaml: a spec is UTF-8 text"),
    (["explain", "softmax", "--gpu"], "argument --gpu: expected one argument"),
    (["explain", "softmax", "--shape", "nan"], "a shape is extents from 1 to 2^31 - 1"),
    (["explain", "softmax", "--shape", "-4x4"], "argument --shape: expected one argument"),
    (["explain"], "the following arguments are required: OP_OR_FILE"),
    (["doctor", "stray"], "unrecognized arguments: stray"),
    (["tuned"], "invalid choice: 'tuned'"),
    (["tune", "--minutes", "0"], "'0' is no number of minutes above 0"),
    ([], "the following arguments are required: COMMAND"),
]


@pytest.mark.parametrize("argv, line", BAD, ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "")
def test_bad_input_is_refused_in_one_line(argv, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    files = {
        "good.dt": DOUBLE,
        "syntax.dt": "Func y;\n  ]",
        "unused.dt": "Func y; In A, B; Var i; y[i] = A[i];",
        "deep.dt": f"Func y; In A; Var i; y[i] = {'(' * 20000}A[i];",
        "empty.dt": "",
        "grouped.dt": "Func y; In A, B; SIn g; Var i; y[i] = A[i / g] + B[i];",
        "empty.yaml": "",
        "list.yaml": "- [\n",
        "tied.dt": "Func y; In A; Var i, j; y[i, j] = A[i, j] + A[j, i];",
        "constant.dt": "Func y; In A; Var i; RVar j; Extent j = 3; y[i] = rsum(A[i] * j, j);",
        "spec.yaml": SPEC,
        "key.yaml": SPEC + "extra: 1\n",
        "parameters.yaml": SPEC + "parameters: 3\n",
        "dtypes.yaml": SPEC + "dtypes: [int3]\n",
        "twice.yaml": "op: y\ndoc: y\nalgorithm: 'Func y; In A; Var i; y[i] = A[i];'\ndoc: z\n",
        "nothing.yaml": "op: y\ndoc: y\nalgorithm: 'Func y; Var i; Extent i = 3; y[i] = i;'\n",
        "keyword.yaml": "op: lambda\ndoc: y\nalgorithm: 'Func y; In A; Var i; y[i] = A[i];'\n",
        "algorithm.yaml": "op: y\ndoc: y\nalgorithm: 'Func y; In A; Var i; y[i] = B[i];'\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "bytes.dt").write_bytes(b"F\xff\xfe")
    (tmp_path / "bytes.yaml").write_bytes(b"o\xff\xfe")
    (tmp_path / "folder.dt").mkdir()
    (tmp_path / "folder.yaml").mkdir()
    said = refused(capsys, *argv)
    assert line in said
    if len(argv) == 2 and argv[1].endswith((".dt", ".yaml")) and "deep" not in argv[1]:
        assert said.startswith(argv[1])  # whatever is wrong with a file, its name comes first


def test_a_process_that_refuses_ends_with_2_and_no_traceback(tmp_path):
    done = process("compile", tmp_path / "none.dt", "-o", tmp_path / "out.py")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{tmp_path / 'none.dt'}: No such file or directory\n")


def test_a_reader_that_stops_is_no_error(double):
    shell = f"{sys.executable} -m dtkernels show attention --stage algebra | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], env=os.environ, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "# as written\n", "")


# -- show -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", shipped())
@pytest.mark.parametrize("gpu", TARGETS)
def test_every_op_is_shown_at_every_stage_for_every_gpu(op, gpu, capsys):
    subject = Subject(read(op), gpu)  # scheduled once for all stages
    texts = {stage: subject.text(stage) for stage in STAGES[:-1]}
    assert all(texts.values())
    if gpu == "h200":
        assert run(capsys, "show", op, "--stage", "triton", "--gpu", gpu) == texts["triton"]


@pytest.mark.parametrize("gpu", TARGETS)
def test_show_prints_each_stage(gpu, capsys):
    subject = Subject(read("softmax"), gpu)
    for stage in STAGES[:-1]:
        assert run(capsys, "show", "softmax", "--stage", stage, "--gpu", gpu).endswith(subject.text(stage))


def test_the_algorithm_is_dt_text(capsys):
    assert parse(run(capsys, "show", "attention", "--stage", "algorithm")) == read("attention").program


def test_the_schedule_is_dt_text_that_fits_shape_and_gpu(capsys):
    small = run(capsys, "show", "mmsigmoid", "--stage", "schedule", "--shape", "32x32x32")
    large = run(capsys, "show", "mmsigmoid", "--stage", "schedule", "--shape", "4096x4096x4096")
    assert small.splitlines()[0] == "# default schedule for mmsigmoid: x 32, y 32, k 32; bf16; h200"
    assert parse_schedule(small) != parse_schedule(large)


def test_algebra_names_each_rule_that_changed_something(capsys):
    text = run(capsys, "show", "softmax", "--stage", "algebra")
    rules = [line for line in text.splitlines() if line.startswith("# ")]
    assert rules[0] == "# as written" and [r.split(":")[0] for r in rules[1:]] == ["# subtract_maxima"]
    assert parse(text.split("\n\n")[-1]).algorithm == Subject(read("softmax")).algorithm


def test_the_default_stage_is_the_emitted_file(capsys):
    assert run(capsys, "show", "relu") == run(capsys, "show", "relu", "--stage", "triton")
    assert "@triton.jit\ndef relu_kernel(" in run(capsys, "show", "relu")


def test_a_program_is_shown_with_its_own_schedule(double, capsys):
    assert run(capsys, "show", double, "--stage", "schedule") == "y.block(i:1024);\ny.tensorize(i:1024);\n"
    assert run(capsys, "show", double) == run(capsys, "compile", double)
    assert "grid i:1024" in run(capsys, "show", double, "--stage", "nest")


def test_a_program_without_a_schedule_says_so(tmp_path, capsys):
    (tmp_path / "y.dt").write_text("Func y; In A; Var i; y[i] = 2 * A[i];")
    assert run(capsys, "show", tmp_path / "y.dt", "--stage", "schedule").startswith("# no statement")


def test_a_spec_file_is_shown_like_an_op(tmp_path, capsys):
    (tmp_path / "triple.yaml").write_text(SPEC)
    assert "3 * A" in run(capsys, "show", tmp_path / "triple.yaml", "--shape", "4096")
    assert "6 * A" in run(capsys, "show", tmp_path / "triple.yaml", "--param", "twice=true")


def test_a_spec_is_shown_at_its_first_shape(tmp_path, capsys):
    (tmp_path / "triple.yaml").write_text(SPEC + "shapes:\n- {sizes: {i: 77}}\n- {sizes: {i: 99}}\n")
    assert "i 77" in run(capsys, "show", tmp_path / "triple.yaml", "--stage", "schedule")


def test_parameters_choose_the_variant(capsys):
    shape = ("--shape", "1x8x1024x64x1024x64", "--stage", "nest")
    plain, causal = (run(capsys, "show", "attention", *shape, "--param", f"causal={value}") for value in ("false", "true"))
    assert plain == run(capsys, "show", "attention", *shape) != causal


def test_bf16_and_fp32_get_different_tiles(capsys):
    one, other = (run(capsys, "show", "mmsigmoid", "--stage", "schedule", "--dtype", dtype).split("\n", 1)[1] for dtype in ("bf16", "fp32"))
    assert one != other


def test_text_needs_neither_torch_nor_triton():
    code = "import sys; from dtkernels.cli import main; main(['show', 'softmax']); print({'torch', 'triton'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "set()", done.stderr


# -- sizes of inputs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "definition, shape",
    [
        ("y[i, j] = A[j, i] + C[i, j];", (5, 7)),
        ("y[i, j] = A[i + 3, j] + C[i, j];", (10, 5)),
        ("y[i, j] = A[2 * i + j, 4] + C[i, j];", (17, 5)),
        ("y[i, j] = A[i / 2, len(i) - 1 - i] + C[i, j];", (4, 7)),
        ("y[i, j] = A[i / g, -j + 6] + C[i, j];", (2, 7)),
        ("y[i, j] = A[i, j] + A[i + 1, j] + C[i, j];", (7, 5)),
    ],
)
def test_an_input_is_as_large_as_its_largest_index(definition, shape):
    scalar = "SIn g; " if "g" in definition else ""
    algorithm = parse(f"Func y; In A, C; {scalar}Var i, j; {definition}").algorithm
    assert input_shapes(algorithm, {"i": 7, "j": 5}, {"g": 4}) == {"A": shape, "C": (7, 5)}


def test_scalars_are_integers_inside_an_index():
    algorithm = parse("Func y; In A, C; SIn s, g; Var h, i; y[h, i] = s * A[h / g, i] + C[h, i];").algorithm
    assert scalar_values(algorithm, {}) == {"s": 0.5, "g": 1}
    assert scalar_values(algorithm, {"s": 2, "g": 4}) == {"s": 2.0, "g": 4}
    assert input_shapes(algorithm, {"h": 8, "i": 3}, {"s": 0.5, "g": 4}) == {"A": (2, 3), "C": (8, 3)}


def test_inputs_of_grouped_queries_have_fewer_heads():
    shape = (1, 8, 3, 5, 6, 7)
    subject = Subject(read("attention"), shape=shape, given={"group": 4})
    group = scalar_values(subject.algorithm, subject.scalars)
    assert input_shapes(subject.algorithm, subject.sizes, group)["K"] == (1, 2, 6, 7)


# -- explain, doctor, version -----------------------------------------------------------------------------------------


def test_sizes_by_name_are_those_in_order(capsys):
    named = run(capsys, "show", "mmsigmoid", "--sizes", "k=512, y=64,x=128", "--stage", "schedule")
    assert named == run(capsys, "show", "mmsigmoid", "--shape", "128x64x512", "--stage", "schedule")
    assert named.startswith("# default schedule for mmsigmoid: x 128, y 64, k 512;")


def test_labels_that_share_an_extent_are_given_once_and_constants_not_at_all(tmp_path, capsys):
    (tmp_path / "y.dt").write_text("Func y; In A; Var i, j; RVar k; Extent k = 3; y[i, j] = rsum(A[i, j] * A[j, i] * k, k);")
    for asked in (("--shape", "64"), ("--sizes", "j=64"), ("--sizes", "i=64,j=64,k=3")):
        assert run(capsys, "explain", tmp_path / "y.dt", *asked).startswith("y: i 64, j 64, k 3;")


def test_explain_of_a_program_names_its_own_schedule(double, tmp_path, capsys):
    assert "schedule: the program's own" in run(capsys, "explain", double, "--shape", "4096")
    (tmp_path / "y.dt").write_text("Func y; In A; Var i; y[i] = 2 * A[i];")
    assert "schedule: none is given" in run(capsys, "explain", tmp_path / "y.dt")


def test_doctor_says_ok_or_warn_about_each_fact(capsys):
    lines = run(capsys, "doctor").splitlines()
    assert all(line.startswith(("OK   ", "WARN ")) for line in lines)
    packages = ("dtkernels", "python", "torch", "triton", "transformers")
    for fact in (*packages, "GPU", "cache folder", "TRITON_INTERPRET", "ptxas", "C compiler"):
        assert sum(line[5:].startswith(fact) for line in lines) >= 1, fact


@pytest.mark.parametrize(
    "versions, warned",
    [
        ({"triton": (3, 6, 0), "numpy": (2, 4, 1)}, True),
        ({"triton": (3, 6, 0), "numpy": (2, 3, 9)}, False),
        ({"triton": (3, 9, 0), "numpy": (2, 4, 1)}, False),
    ],
)
def test_doctor_knows_the_interpreter_crash(versions, warned, monkeypatch):
    monkeypatch.setattr(doctor, "version", lambda package: versions.get(package))
    lines = [line for line in doctor.report() if "numpy" in line]
    assert [line.startswith("WARN") for line in lines] == [warned]


def test_doctor_finds_what_is_missing(monkeypatch):
    monkeypatch.setattr(doctor, "version", lambda package: None)
    lines = list(doctor.report())
    assert "WARN torch is not installed: 2.10 or newer is required" in lines
    assert "OK   transformers is not installed: optional" in lines


def test_doctor_sees_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert any(line.startswith("WARN TRITON_INTERPRET: set") for line in doctor.report())


def test_doctor_warns_where_the_cache_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DTKERNELS_CACHE", str(tmp_path / "file"))
    assert any(line.startswith(f"WARN cache folder: {tmp_path / 'file'} is not writable") for line in doctor.report())


def test_version_and_help(capsys):
    for argv, said in ((["--version"], f"dtkernels {dtkernels.__version__}\n"), (["show", "--help"], "--stage"), (["--help"], "doctor")):
        with pytest.raises(SystemExit) as end:
            main(argv)
        assert end.value.code == 0 and said in capsys.readouterr().out


def test_machine_code_is_refused_in_the_interpreter(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "unset TRITON_INTERPRET" in refused(capsys, "show", "relu", "--stage", "ptx")


@pytest.mark.parametrize("value, on", [("1", True), ("true", True), ("ON", True), ("0", False), ("", False), ("2", False)])
def test_the_interpreter_is_on_where_triton_takes_it_to_be(value, on, monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert interpreting() == triton.knobs.runtime.interpret == on
    assert any(line.startswith("WARN TRITON_INTERPRET: set") for line in doctor.report()) == on


def test_explain_counts_the_blocks_of_several_labels_as_one(capsys, tmp_path):
    (tmp_path / "y.dt").write_text("Func y; In A; Var i, j; y[i, j] = 2 * A[i, j]; y.merge(p, i, j); y.block(p:1024); y.tensorize(p:1024);")
    assert "7 programs (7 along p)" in run(capsys, "explain", tmp_path / "y.dt", "--shape", "100,70")
