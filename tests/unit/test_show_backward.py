# ruff: noqa: E501 (programs and texts read best on one line)
"""The derived backward as text, programs compiled to kernels alone, and what a GPU has no room for, from the command line."""

import pytest
from command_line import refused, run

from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.target import TARGETS, target
from dtkernels.lang import parse, parse_schedule
from dtkernels.show import STAGES, Subject, read, shipped

PRODUCT = """Func mm; In A, B; Var x, y; RVar k; mm[x, y] = rdot(A[x, k], B[k, y], k);
mm.block(x:128, y:256); mm.tensorize(x:128, y:256, k:64); mm.num_warps(8); mm.num_stages(5); """
ROWS = "Func t, f; In A; Var x; RVar y; t[x] = rsum(exp(A[x, y]), y); f[x, y] = A[x, y] / t[x]; t.fuse_at(f, x); f.tensorize(y:0); f.block(x:1);"


@pytest.fixture
def product(tmp_path):
    path = tmp_path / "product.dt"
    path.write_text(PRODUCT)
    return str(path)


@pytest.mark.parametrize("op", shipped())
def test_the_backward_of_every_op_is_shown_at_every_stage(op, capsys):
    subject = Subject(read(op), "h200", wanted=())  # derived once for all GPUs, and scheduled once for all stages
    texts = {stage: subject.text(stage) for stage in STAGES if stage != "ptx"}
    algorithm = subject.program.algorithm
    for gpu in TARGETS:
        schedule = default_schedule(algorithm, subject.outputs, subject.sizes, subject.types(algorithm), target(gpu))
        assert schedule.primitives and (gpu != "h200" or schedule == subject.program.schedule)
    assert all(texts.values()) and run(capsys, "show", op, "--backward", "--stage", "triton", "--gpu", "h200") == texts["triton"]


@pytest.mark.parametrize("stage", [s for s in STAGES if s != "ptx"])
def test_show_prints_each_stage_of_a_backward(stage, capsys):
    assert run(capsys, "show", "softmax", "--backward", "--stage", stage, "--gpu", "a100").endswith(Subject(read("softmax"), "a100", wanted=()).text(stage))


def test_the_backward_is_dt_text_with_a_func_for_each_gradient(capsys):
    text = run(capsys, "show", "two_mm", "--backward", "--stage", "algorithm")
    assert {"d_A", "d_B", "d_C"} <= set(parse(text).algorithm.funcs) and "d_two_mm" in parse(text).algorithm.inputs


def test_attention_backward_reads_the_sum_that_forward_saved(capsys):
    text = run(capsys, "show", "attention", "--backward", "--stage", "algebra")
    assert "total_log" in text and "exp(" in text


def test_gradients_with_respect_to_chosen_inputs_and_scalars(capsys):
    assert parse(run(capsys, "show", "dyt", "--wrt", "alpha", "--stage", "algorithm")).outputs() == ("d_alpha",)
    assert "found 'q'; allowed: A, w, b, alpha" in refused(capsys, "show", "dyt", "--wrt", "q")


def test_a_program_has_a_backward_too(product, capsys):
    schedule = run(capsys, "show", product, "--backward", "--stage", "schedule", "--shape", "512x256x128")
    assert {p.func for p in parse_schedule(schedule).primitives if p.name == "compile"} == {"d_A", "d_B"}


def test_a_backward_without_a_gradient_is_refused(tmp_path, capsys):
    (tmp_path / "f.dt").write_text("Func f; In A; Var x; f[x] = where(A[x], 1, 2);")
    assert "no input that its results depend on smoothly" in refused(capsys, "show", str(tmp_path / "f.dt"), "--backward")


def test_compile_refuses_what_the_gpu_has_no_room_for(product, tmp_path, capsys):
    out = tmp_path / "out.py"
    said = refused(capsys, "compile", product, "-o", str(out), "--gpu", "l40s")
    assert said.strip() == "mm on l40s: bytes of shared memory: found 196608; allowed: at most 101376" and not out.exists()
    assert "registers of a thread" in refused(capsys, "compile", _with(tmp_path, PRODUCT.replace("128, y:256", "512, y:256").replace("(5)", "(1)")))


def test_compile_looks_at_whole_extents_where_their_sizes_are_given(tmp_path, capsys):
    rows = _with(tmp_path, ROWS)
    assert "def f(A)" in run(capsys, "compile", rows) and "def f(A)" in run(capsys, "compile", rows, "--shape", "64x8192")
    assert "elements of one tensor: found 2097152" in refused(capsys, "compile", rows, "--shape", "64x2000000")


def test_a_kernel_alone_has_no_wrapper_and_says_how_it_is_launched(tmp_path, capsys):
    text = PRODUCT.replace("(5)", "(3)")
    with_wrapper = run(capsys, "compile", _with(tmp_path, text))
    alone = run(capsys, "compile", _with(tmp_path, text + "mm.compile_to_kernel();"))
    assert "def mm(" in with_wrapper and "def mm(" not in alone and "torch.empty" not in alone
    kernel = with_wrapper[with_wrapper.index("@triton.jit") : with_wrapper.index("\n\n\ndef mm(")]
    assert kernel in alone and "# Launch mm_kernel[(triton.cdiv(size_x, 128) * triton.cdiv(size_y, 256),)](A, B, mm_out, size_" in alone
    assert "def mm(" in run(capsys, "compile", _with(tmp_path, text + "mm.compile_to_kernel(); mm.compile();"))


def _with(folder, text) -> str:
    path = folder / "program.dt"
    path.write_text(text)
    return str(path)
