# ruff: noqa: E501 (programs and error texts read best on one line)
"""Schedules, several outputs, the emitted file, and inputs that do not fit."""

import ast
import os
import subprocess
import sys

import bounds  # noqa: F401 (an access outside the tensors raises)
import numpy as np
import pytest
import torch
from oracle import check
from small_programs import ATTENTION_SCHEDULES, CAUSAL, random, unary

import dtkernels

# -- schedules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("x, y", [(16, 16), (43, 19), (1, 1), (3, 50)])
@pytest.mark.parametrize("order", ["", "f.map(y, x);", "f.map(x, y);", "f.map(x:x1/4, y, x1);", "f.map(x:x1/3, y, x1);", "f.map(x:x1/8, y:y1/4, x1, y1);", "f.map(x:x1/2, y:y1/4, y1, x1);",
                                   "f.map(x:x1/2, x1, y);", "f.map(y, x:x1/4, x1);", "f.map(x:x1/100, y, x1);", "f.map(y);", "f.map(x:x1/1, y, x1);"])  # fmt: skip
def test_map(order, x, y):
    """Any walk over the blocks, partial last groups included, computes every element."""
    a = random((x, y)) + 10
    check(f"Func f; In A; Var x, y; f[x, y] = 2 * A[x, y]; f.block(x:4, y:4); f.tensorize(x:4, y:4); {order}", a)


@pytest.mark.parametrize("sizes", [(4, 8, 16), (5, 9, 11), (1, 3, 40)])
def test_dimensions_that_loads_lack(sizes):
    h, s, d = sizes
    text = "Func g, f; In A, c, w; Var h, s, d; g[h, s, d] = A[h, s, d] + c[s, d] * w[s, d]; f[h, s, d] = g[h, s, d] * A[h, s, (d + len(d) / 2) % len(d)] - c[s, d];"
    check(text + "g.fuse_at(f, d); f.block(h:4, s:8, d:16); f.tensorize(h:4, s:8, d:16);", *random((h, s, d), (s, d), (s, d)))


@pytest.mark.parametrize("order", ["f.map(x:x1/2, y:y1/2, z:z1/2, z1, y1, x1);", "f.map(z, x:x1/2, y, x1);", "f.map(x:x1/2, y:y1/3, y1, z, x1);"])
def test_map_of_three_labels(order):
    check(f"Func f; In A; Var x, y, z; f[x, y, z] = 2 * A[x, y, z]; f.block(x:1, y:2, z:4); f.tensorize(y:2, z:4); {order}", random((3, 7, 11)))


@pytest.mark.parametrize("order", ["f.reorder(y, x);", "f.reorder(x, y);", "f.reorder(y);"])
def test_reorder(order):
    check(f"Func f; In A, w; Var x, y; f[x, y] = A[x, y] * w[y]; f.block(x:4, y:8); f.tensorize(x:2, y:4); {order}", random((5, 19)), random((19,)))


def test_every_fusion_of_a_chain():
    text = "Func a, b, f; In A; Var x, y; a[x, y] = A[x, y] + 1; b[x, y] = a[x, y] * a[x, y]; f[x, y] = b[x, y] - a[x, y]; f.block(x:4, y:8); f.tensorize(x:4, y:4); "
    for a in ("", "a.fuse_at(f, x);", "a.fuse_at(f, y);", "a.fuse_at(b, x);", "a.fuse_at(b, y);"):
        for b in ("", "b.fuse_at(f, x);", "b.fuse_at(f, y);"):
            try:
                check(text + a + b, random((5, 11)))
            except dtkernels.DTError as refused:
                assert a and not b, (a, b, refused)  # a lies inside the kernel of b, which is not f's


@pytest.mark.parametrize("fused", ["", "t.fuse_at(f, x);", "t.fuse_at(f, y);"])
def test_unfused_funcs_are_kernels_of_their_own(fused):
    text = "Func t, f; In A; Var x, y; t[x, y] = exp(A[x, y]); f[x, y] = t[x, y] + 1; f.tensorize(y:4);" + fused
    check(text, random((3, 5)))
    assert dtkernels.compile(text).source.count("@triton.jit") == (1 if fused else 2)


def test_num_warps_and_stages_reach_the_launch():
    source = dtkernels.compile(unary("A[x]", "f.block(x:8); f.tensorize(x:8); f.num_warps(16); f.num_stages(5);")).source
    assert "num_warps=16" in source and "num_stages=5" in source


# -- several outputs ----------------------------------------------------------------------------------------------------

TWO = "Func g, f; In A; Var x, y; g[x, y] = exp(A[x, y]); f[x, y] = g[x, y] * 2; f.block(x:4, y:8); f.tensorize(x:4, y:8); "


def test_two_outputs_of_one_kernel():
    text = TWO + "g.fuse_at(f, x); f.compile(); g.compile();"
    a = random((5, 11))
    check(text, a)
    compiled = dtkernels.compile(text)
    assert compiled.source.count("@triton.jit") == 1
    f, g = compiled(a)
    torch.testing.assert_close(f, 2 * torch.exp(a))
    torch.testing.assert_close(g, torch.exp(a))


def test_outputs_come_in_the_order_of_the_compile_statements():
    a = random((5, 11))
    g, f = dtkernels.compile(TWO + "g.fuse_at(f, x); g.compile(); f.compile();").f(a)
    torch.testing.assert_close(f, 2 * torch.exp(a))
    torch.testing.assert_close(g, torch.exp(a))


def test_two_outputs_of_two_kernels():
    text = TWO + "f.compile(); g.compile();"
    a = random((5, 11))
    check(text, a)
    compiled = dtkernels.compile(text)
    torch.testing.assert_close(compiled.f(a), 2 * torch.exp(a))
    torch.testing.assert_close(compiled.g(a), torch.exp(a))


def test_statistics_as_second_output():
    """What training attention saves: the output and the row's log-sum-exp."""
    text = """Func lse, p, f; In A; Var x; RVar y;
    lse[x] = log(rsum(exp(A[x, y]), y)); f[x, y] = exp(A[x, y] - lse[x]); p[x] = rmax(A[x, y], y);
    lse.fuse_at(f, x); f.block(x:2); f.tensorize(x:2, y:8); p.block(x:2); p.tensorize(x:2, y:8); f.compile(); lse.compile(); p.compile();"""
    check(text, random((5, 19)))


def test_last_func_is_compiled_by_default():
    text = "Func g, f; In A; Var x; g[x] = 2 * A[x]; f[x] = g[x] + 1; "
    assert dtkernels.compile(text)(torch.ones(2)).tolist() == [3.0, 3.0]
    assert dtkernels.compile(text + "g.compile(); f.compile();")(torch.ones(2)).tolist() == [2.0, 2.0]


# -- the emitted file ---------------------------------------------------------------------------------------------------

EMITTED = """Func d, my_func; In B, A; SIn s, r; Var x, y;
d[x, y] = A[x, y] - B[x, y];
my_func[x, y] = s * d[x, y] + r * A[x, y];
my_func.block(x:4, y:8); my_func.tensorize(x:4, y:8); d.fuse_at(my_func, y); my_func.compile();"""


def test_emitted_file_stands_alone(tmp_path):
    (tmp_path / "emitted.py").write_text(dtkernels.compile(EMITTED).source)
    (tmp_path / "use.py").write_text("""
import importlib.util, inspect, sys
assert importlib.util.find_spec("dtkernels") is None
import torch, emitted
assert list(inspect.signature(emitted.my_func).parameters) == ["B", "A", "s", "r"]
a, b = torch.arange(15.).reshape(3, 5), torch.ones(3, 5)
torch.testing.assert_close(emitted.my_func(b, a, 2, torch.tensor(0.5)), 2 * (a - b) + 0.5 * a)
assert "dtkernels" not in sys.modules
print("right")
""")
    site = str(tmp_path)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": site}
    # -S: no .pth files, so an editable install of dtkernels is not on the path; the packages are added by hand
    packages = [p for p in sys.path if p.endswith("site-packages")]
    start = f"import sys; sys.path[:0] = {[site, *packages]!r}; import runpy; runpy.run_path('use.py')"
    done = subprocess.run([sys.executable, "-S", "-E", "-c", start], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout == "right\n", done.stderr


def test_emitted_file_imports_torch_and_triton_only():
    for text in (EMITTED, CAUSAL + ATTENTION_SCHEDULES["streaming"]):
        tree = ast.parse(dtkernels.compile(text).source)
        names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names} | {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        assert names == {"torch", "triton", "triton.language"}


def test_wrapper_takes_keywords_and_checks_their_number():
    f = dtkernels.compile(EMITTED)
    a, b = random((3, 5), (3, 5))
    torch.testing.assert_close(f(A=a, B=b, s=1, r=0), a - b)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        f(a, b, 1)


def test_compile_is_the_same_from_run_to_run():
    assert dtkernels.compile(EMITTED).source == dtkernels.compile(EMITTED).source


# -- inputs that do not fit -----------------------------------------------------------------------------------------------

MM = "Func mm; In A, B; Var x, y; RVar k; mm[x, y] = rdot(A[x, k], B[k, y], k);"


@pytest.mark.parametrize(
    "shapes, said",
    [
        (((3, 4), (5, 6)), "mm: B has 5 along k, another input has 4"),
        (((3, 4), (4,)), "mm: B has 2 dimensions (k, y); got shape (4,)"),
        (((3, 4, 1), (4, 6)), "mm: A has 2 dimensions (x, k); got shape (3, 4, 1)"),
    ],
)
def test_wrong_shapes(shapes, said):
    with pytest.raises(ValueError) as error:
        dtkernels.compile(MM)(*(torch.zeros(s) for s in shapes))
    assert str(error.value) == said


def test_one_label_twice():
    text = "Func f; In A; Var x; f[x] = A[x, x]; f.tensorize(x:0);"
    check(text, random((5, 5)))
    with pytest.raises(ValueError, match="^f: A has 6 along x, another input has 5$|^f: A has 6 along x.*5"):
        dtkernels.compile(text)(torch.zeros(5, 6))


def test_wrong_shape_through_a_shared_label():
    f = dtkernels.compile("Func f; In A, w; Var x, y; f[x, y] = A[x, y] * w[y];")
    with pytest.raises(ValueError, match="^f: w has 4 along y, another input has 3$"):
        f(torch.zeros(2, 3), torch.zeros(4))
    with pytest.raises(ValueError, match="^f: w has 1 along y, another input has 3$"):
        f(torch.zeros(2, 3), torch.zeros(1))


def test_wrong_dtype():
    with pytest.raises(TypeError, match="^mm: B is torch.float64; allowed: float32, float16, bfloat16, and bool or integers for masks$"):
        dtkernels.compile(MM)(torch.zeros(3, 4), torch.zeros(4, 5, dtype=torch.float64))


def test_numpy_is_no_tensor():
    with pytest.raises((TypeError, AttributeError, ValueError)):
        dtkernels.compile(MM)(np.zeros((3, 4)), np.zeros((4, 5)))
