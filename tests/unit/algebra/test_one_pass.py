# ruff: noqa: E501 (programs read best on one line)
"""How often the kernels of a backward read what is large, counted in the emitted text, and what the algebra leaves them to do."""

import re

import pytest
from command_line import run

from dtkernels.algebra.autodiff.gradient import gradient
from dtkernels.algebra.pipeline import differentiable_form
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.ir.nest import Loop, statements
from dtkernels.codegen.pipeline import lower
from dtkernels.lang import parse

COLUMNS = """Func f, g; In A, w; Var x, y; f[y] = rsum(A[x, y], x); g[x, y] = A[x, y] * w[y];
g.fuse_at(f, x); f.tensorize(x:2, y:0); f.split(x:{parts}); f.compile(); g.compile();"""


def kernels(capsys, op, shape, dtype="bf16", *more) -> dict[str, str]:
    """Each kernel of the backward of ``op``, by name, as emitted."""
    text = run(capsys, "show", op, "--backward", "--stage", "triton", "--gpu", "h200", "--shape", shape, "--dtype", dtype, *more)
    found = re.findall(r"@triton\.jit\ndef (\w+_kernel)\((.*?)(?=\n\n\n|\Z)", text, re.DOTALL)
    assert found
    return dict(found)


def count(what: str, tensor: str, text: str) -> int:
    """How many loads from, or stores to, ``tensor`` there are in ``text``."""
    return len(re.findall(rf"tl\.{what}\(\s*{tensor}_ptr\b", text))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("size", [1024, 4096, 8192])
@pytest.mark.parametrize("op", ["rmsnorm", "layernorm"])
def test_sums_along_rows_and_down_columns_read_each_row_once(op, size, dtype, capsys):
    found = kernels(capsys, op, f"8192x{size}", dtype)
    assert set(found) == {"d_w_part_kernel", "d_w_kernel"}
    rows, merge = found["d_w_part_kernel"], found["d_w_kernel"]
    for large in ("A", f"d_{op}"):
        assert count("load", large, rows) == 1 and count("load", large, merge) == 0
    assert count("store", "d_A", rows) == 1 and count("store", "d_w", merge) == 1
    assert rows.index("for x") < rows.index("tl.load(\n            d_")  # every row in the loop, the weight before it
    assert rows.index(" w = tl.load(") < rows.index("for x")


def test_rows_that_no_program_can_hold_are_read_by_two_kernels(capsys):
    found = kernels(capsys, "rmsnorm", "8192x16384", "fp32")
    assert sum(count("load", "A", text) for text in found.values()) == 2
    assert {"d_A_kernel", "d_w_part_kernel", "d_w_kernel"} == set(found)


@pytest.mark.parametrize("wanted, read", [("A", 1), ("w", 1)])
def test_one_gradient_alone_reads_once_too(wanted, read, capsys):
    found = kernels(capsys, "rmsnorm", "8192x4096", "bf16", "--wrt", wanted)
    assert sum(count("load", "A", text) for text in found.values()) == read


@pytest.mark.parametrize("op", ["swiglu", "geglu"])
def test_outputs_made_element_by_element_of_the_same_inputs_share_a_kernel(op, capsys):
    (text,) = kernels(capsys, op, "16777216").values()
    for block in text.split("    else:\n"):  # a whole one, and the last
        assert [count("load", t, block) for t in ("A", "B", f"d_{op}")] == [1, 1, 1]
        assert [count("store", t, block) for t in ("d_A", "d_B")] == [1, 1]


def test_the_gradient_of_logits_is_one_pass(capsys):
    found = kernels(capsys, "cross_entropy", "8192x32768").values()  # a kernel of numbers, one a row, may come before it
    assert sum(count("load", "A", text) for text in found) == 1 and sum(count("store", "d_A", text) for text in found) == 1


@pytest.mark.parametrize("op, single", [("rmsnorm", ["square_kept"]), ("layernorm", ["mean_kept", "variance_kept"]),
                                        ("cross_entropy", ["d_cross_entropy", "total_log"])])  # fmt: skip
def test_what_is_float32_by_itself_does_not_make_gradients_float32(op, single, capsys):
    text = run(capsys, "show", op, "--backward", "--stage", "triton", "--shape", "1024x1024")
    assert "dtype = A.dtype" in text
    for name in single:
        assert f"{name}_ptr" in text and f"promote_types(dtype, {name}.dtype)" not in text


def test_a_merge_of_whole_rows_is_cut_into_columns():
    part, merge = lower(parse(COLUMNS.format(parts=48)))
    assert [(g.label, g.block) for g in part.grid] == [("x_part", 1)]
    assert [(g.label, g.block) for g in merge.grid] == [("y", 32)]
    loop = next(s for s in merge.body if hasattr(s, "reduces"))
    assert loop.axis.tile == 16, "as many parts at once as 48 is a multiple of, among powers of two"


@pytest.mark.parametrize("parts, at_once, columns", [(48, 16, 64), (4, 4, 256), (256, 32, 32), (7, 1, 512)])
def test_a_merge_in_blocks_of_columns_takes_as_many_parts_at_once(parts, at_once, columns):
    text = COLUMNS.format(parts=parts).replace("f.tensorize(x:2, y:0);", "f.block(y:512); f.tensorize(x:2, y:512);")
    _, merge = lower(parse(text))
    assert [(g.label, g.block) for g in merge.grid] == [("y", columns)]
    assert next(s for s in merge.body if hasattr(s, "reduces")).axis.tile == at_once


def test_deviations_from_the_mean_sum_to_nothing():
    head = "Func m, v, f; In A; Var x; RVar y; m[x] = rmean(A[x, y], y); "
    a = parse(head + "v[x] = rmean((A[x, y] - m[x]) * (A[x, y] - m[x]), y); f[x, y] = (A[x, y] - m[x]) * rsqrt(v[x]);").algorithm
    backward = gradient(differentiable_form(a, ("f",)), ("f",), ("A",)).backward
    assert "rsum(A[x, y] - " not in str(backward) and "rsum(d_f[x, y], y)" in str(backward)
    a = parse(head + "v[x] = rmean((A[x, y] - 2 * m[x]) * (A[x, y] - 2 * m[x]), y); f[x, y] = (A[x, y] - m[x]) * rsqrt(v[x]);").algorithm
    backward = gradient(differentiable_form(a, ("f",)), ("f",), ("A",)).backward
    assert "rsum(A[x, y] - 2 * " in str(backward), "these do not"


def test_a_sum_takes_its_maximum_into_its_own_pass_before_the_pass_that_writes():
    """The second sweep is beside the first, not around it: its label has the name of the one that the sum runs over."""
    (kernel,) = lower(parse("""Func m, total, f; In A; Var x; RVar y;
        m[x] = rmax(A[x, y], y); total[x] = rsum(exp(A[x, y] - m[x]), y); f[x, y] = exp(A[x, y] - m[x]) / total[x];
        m.fuse_at(total, y); total.fuse_at(f, x); f.block(x:1); f.tensorize(x:1, y:1024);"""))  # fmt: skip
    loops = [s for s in statements(kernel.body) if isinstance(s, Loop)]
    assert [s for s in kernel.body if isinstance(s, Loop)] == loops and [s.reduces for s in loops] == [True, False]


@pytest.mark.parametrize("way, readings", [((), {"A": 2}), (("--backward",), {"d_softmax": 2, "softmax": 2})])
def test_what_a_long_row_is_read_from_again_stays_in_the_caches_until_then(way, readings, capsys):
    """The default schedule asks for it where a row is longer than registers hold: kept by every loop that reads it but the last."""
    text = run(capsys, "show", "softmax", *way, "--gpu", "h200", "--shape", "2048x65536")
    for tensor, times in readings.items():
        loads = re.findall(rf"tl\.load\(\s*{tensor}_ptr.*?\)\.to\(tl\.float32\)", text, re.DOTALL)
        assert [re.findall('"evict_(.*?)"', load) for load in loads] == [["last"]] * (times - 1) + [["first"]]
    assert "evict" not in run(capsys, "show", "softmax", *way, "--gpu", "h200", "--shape", "2048x8192")
    assert "num_warps(16)" in run(capsys, "show", "softmax", *way, "--gpu", "mi300x", "--shape", "2048x65536", "--stage", "schedule"), "of 64 threads"



@pytest.mark.parametrize("program, policies", [
    ("Func f; In A; Var x, y; f[x, y] = 2 * A[x, y]; f.block(x:1, y:64); f.tensorize(x:1, y:64);", "first"),
    ("Func f; In A; Var x; RVar y; f[x] = rsum(A[x, y], y); f.block(x:1); f.tensorize(x:1, y:64);", "first"),
    ("Func r, s, f; In A; Var x, y; r[x] = rmax(A[x, y], y); s[x] = rsum(A[x, y] - r[x], y); f[x, y] = A[x, y] / s[x] + A[x, y + 1]; r.fuse_at(f, x); s.fuse_at(f, x); f.block(x:1); f.tensorize(x:1, y:64);", "last last first first"),
    ("Func s, f; In A; Var b, x, y; s[b, x] = rsum(A[b, x, y], y); f[b, x, y] = A[b, x, y] / s[b, x]; s.fuse_at(f, x); f.block(b:1); f.tensorize(b:1, x:1, y:64);", "last first"),
])  # fmt: skip
def test_the_last_loop_that_reads_a_tensor_lets_it_go(program, policies):
    text = emit(parse(program + "f.evict(A:reread);"))
    assert re.findall('eviction_policy="evict_(.*?)"', text) == policies.split()


@pytest.mark.parametrize("u", ["maximum(u[x, y], 0)", "u[x, y] * sigmoid(u[x, y])"])
def test_a_bias_is_summed_where_the_gradient_is_made_whatever_it_is_made_of(u, tmp_path, capsys):
    """Its gradient and its argument are Funcs of their own, which are no reason to read both tensors twice."""
    path = tmp_path / "own.yaml"
    path.write_text(f"op: own\ndoc: x\nalgorithm: |\n  Func u, own; In A, z; Var x, y; u[x, y] = A[x, y] + z[y]; own[x, y] = {u};\n")
    found = kernels(capsys, str(path), "8192x11008")
    assert set(found) <= {"d_z_part_kernel", "d_z_kernel"}
    rows = found.get("d_z_part_kernel", found["d_z_kernel"])
    assert [count("load", t, rows) for t in ("A", "d_own")] == [1, 1] and count("store", "d_A", rows) == 1
