"""The dtype of a product's operands is that of the product alone: by rule, in emitted text, in schedules, in gradients."""

import re

import pytest
from command_line import run
from operand_programs import ALIBI, FUSED, RULE, product

import dtkernels
from dtkernels.algebra.autodiff.gradient import gradient
from dtkernels.algebra.operand_types import products
from dtkernels.algebra.pipeline import differentiable_form, prepare, prepare_algorithm
from dtkernels.autoschedule.cost.outline import Known
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.autoschedule.fit_resources import element_bytes
from dtkernels.codegen.analysis.product_types import InputTypes, typed_buffers
from dtkernels.codegen.target import target
from dtkernels.lang import parse

HEADS = """Func s, e, d, att; In Q, K, V, slopes; Var b, h, m, n; RVar l, k;
s[b, h, m, l] = rdot(Q[b, h, m, k], K[b, h, l, k], k) * 0.125 + slopes[h] * (l - m);
e[b, h, m, l] = exp(s[b, h, m, l]); d[b, h, m] = rsum(e[b, h, m, l], l);
att[b, h, m, n] = rdot(e[b, h, m, l], V[b, h, l, n], l) / d[b, h, m];"""
LARGE = {"b": 4, "h": 32, "m": 4096, "n": 128, "l": 4096, "k": 128}


def types(**given: str) -> InputTypes:
    return InputTypes(tuple(given.items()))


def multiplied(algorithm, given: InputTypes) -> list[str]:
    return [given.operand(wanted) for _, _, wanted in products(algorithm)]


def dots(source: str) -> list[str]:
    return [line.strip() for line in source.splitlines() if "tl.dot(" in line]


@pytest.mark.parametrize("name", RULE)
def test_the_rule(name):
    text, dtypes, expected = RULE[name]
    assert multiplied(prepare(parse(text)).algorithm, types(**dtypes)) == expected


@pytest.mark.parametrize(
    "expr, dtypes, expected",
    [
        ("rdot(A[x, k], W[y, k], k)", {"A": "e4m3", "W": "e4m3"}, "e4m3"),
        ("rdot(A[x, k] * s[x], W[y, k], k)", {"A": "e5m2", "W": "e5m2", "s": "fp32"}, "e5m2"),  # the scale has left the sum
        ("rdot(A[x, k], W[y, k], k)", {"A": "e4m3", "W": "e5m2"}, "fp16"),
        ("rdot(A[x, k], W[y, k], k)", {"A": "bf16", "W": "e4m3"}, "bf16"),
        ("rdot(A[x, k], W[y, k], k)", {"A": "int8", "W": "e4m3"}, "fp32"),
        ("rdot(A[x, k] * s[k], W[y, k], k)", {"A": "e4m3", "W": "e4m3", "s": "bf16"}, "bf16"),  # nothing is rounded to float8
        ("rdot(A[x, k] * A[x, k], W[y, k], k)", {"A": "e4m3", "W": "e4m3"}, "fp32"),
        ("rdot(A[x, k] * s[k], W[y, k], k)", {"A": "fp16", "W": "e4m3", "s": "fp32"}, "fp32"),
        ("rdot(A[x, k], W[y, k] * s[k], k)", {"A": "fp16", "W": "e4m3", "s": "fp32"}, "fp16"),
        ("rdot(where(x < k, A[x, k], 0), -W[y, k], k)", {"A": "e4m3", "W": "e4m3"}, "e4m3"),
        ("rdot(where(x < k, A[x, k], 0.3), W[y, k], k)", {"A": "e4m3", "W": "e4m3"}, "fp32"),
        ("rdot(cast(A[x, k] * s[k], e4m3), W[y, k], k)", {"A": "bf16", "W": "e4m3", "s": "fp32"}, "e4m3"),
        ("rdot(cast(A[x, k], bf16), W[y, k], k)", {"A": "e4m3", "W": "e4m3"}, "bf16"),
    ],
)  # fmt: skip
def test_the_rule_of_float8(expr, dtypes, expected):
    given = types(**dtypes)
    algorithm = given.typed(prepare(parse(product(expr, ", ".join(dtypes)))).algorithm)
    assert multiplied(algorithm, given) == [expected]
    wide = {d for d in dtypes.values() if d in ("bf16", "fp16", "fp32")}
    assert given.result(algorithm) == (wide.pop() if len(wide) == 1 else "fp32")


def test_a_float32_bystander_leaves_operands_alone():
    """Its input is not among those that the wrapper brings to one dtype, and no operand is widened."""
    source = dtkernels.compile(ALIBI + FUSED).source
    assert "Q, K, V = Q.to(K_Q_dtype), K.to(K_Q_dtype), V.to(V_dtype)" in source
    assert "slopes.to(" not in source and all("to(tl.float32)" not in line for line in dots(source))
    assert [re.search(r"tl\.dot\((.*?), (.*?), ", line).groups() for line in dots(source)][:2] == [("Q", "tl.trans(K)"), ("e.to(V.dtype)", "V")]


def test_an_input_of_products_of_two_types_is_converted_by_each():
    source = dtkernels.compile(RULE["an input of two products"][0]).source
    assert [re.search(r"tl\.dot\((\S+),", line)[1] for line in dots(source)] == ["A.to(W.dtype)", "A.to(V.dtype)"]
    assert "A = A.to(" not in source and "A if A.is_floating_point() else A.float()" in source


def test_buffers_between_kernels_are_stored_as_products_take_them():
    program = prepare(parse(RULE["a Func between kernels"][0]))
    given = types(A="bf16", W="bf16", g="fp32")
    assert given.operand(typed_buffers(program.algorithm)["h"]) == "bf16"
    assert element_bytes(program.algorithm, ("out",), given) | {} == {"A_rows": 2, "W_rows": 2, "g_rows": 4, "A": 2, "W": 2, "g": 4, "h": 2, "out": 4}
    assert "h_out = torch.empty((size_x, size_k), dtype=W_dtype" in dtkernels.compile(RULE["a Func between kernels"][0]).source


COPIED = """Func u, f, r; In A, B, W; Var x, y; RVar k; u[x, k] = A[x, k] * B[x, k]; f[x, y] = rdot(u[x, k], W[y, k], k);
r[x, k] = u[x, k]; f.compile(); r.compile();"""


def test_what_products_take_and_a_result_copies_is_stored_as_both_round_it():
    program = prepare(parse(COPIED))
    assert element_bytes(program.algorithm, ("f", "r"), 2)["u"] == 2
    assert "u" not in element_bytes(program.algorithm, ("f", "r"), types(A="fp32", B="fp32", W="bf16")), "a result in float32 shows what a product's operand loses"
    read_elsewhere = COPIED.replace("r[x, k] = u[x, k]", "r[x, k] = u[x, k] + 1")
    assert "u" not in element_bytes(prepare(parse(read_elsewhere)).algorithm, ("f", "r"), 2)


BESIDE = "Func u, f, r; In A; Var x, y; RVar k; u[x, y] = A[x, y] * A[x, y]; f[x, y] = u[x, y] + rdot(u[x, k], u[k, y], k); r[x, y] = f[x, y]; f.compile(); r.compile();"


@pytest.mark.parametrize("text", [COPIED, COPIED.replace("r[x, k] = u[x, k]", "r[x, k] = u[x, k] + 1"), BESIDE])
def test_the_cost_model_counts_the_bytes_that_are_stored(text):
    """Also where one definition reads an element and has a product of others."""
    algorithm = prepare(parse(text)).algorithm
    assert Known.of(algorithm, ("f", "r")).narrow == {t for t in element_bytes(algorithm, ("f", "r"), 2) if t in algorithm} - {"f", "r"}


@pytest.mark.parametrize("gpu", ["a100", "h200", "b200", "mi300x"])
def test_the_schedule_is_that_of_the_product(gpu):
    """Descriptors of what is stored may differ: results are float32."""
    a = prepare_algorithm(parse(HEADS).algorithm, ("att",))

    def by(itemsize) -> list[str]:
        return [s for s in str(default_schedule(a, ("att",), LARGE, itemsize, target(gpu))).splitlines() if ".descriptor(" not in s]

    mixed = types(Q="bf16", K="bf16", V="bf16", slopes="fp32")
    assert mixed.main(a, LARGE) == "bf16" and by(mixed) == by(2) and by(mixed) != by(4)
    all_wide = types(Q="fp32", K="fp32", V="fp32", slopes="bf16")
    assert all_wide.main(a, LARGE) == "fp32" and by(all_wide) == by(4)


def test_the_product_with_the_most_work_decides():
    a = prepare_algorithm(parse(product("rdot(A[x, k], W[y, k], k) + rdot(B[x, l], C[y, l], l)", "A, W, B, C").replace("RVar k", "RVar k, l").split(" out.block")[0]).algorithm, ("out",))
    given = types(A="bf16", W="bf16", B="fp32", C="fp32")
    assert given.main(a, {"x": 512, "y": 512, "k": 4096, "l": 16}) == "bf16"
    assert given.main(a, {"x": 512, "y": 512, "k": 16, "l": 4096}) == "fp32"


@pytest.mark.parametrize("adjoint", ["bf16", "fp32"])
def test_gradients_of_a_product_are_products_of_its_type(adjoint):
    """Whatever dtype the result was returned in: the adjoint stands for the result."""
    form = differentiable_form(parse(HEADS).algorithm, ("att",))
    g = gradient(form, ("att",), ("Q", "K", "V", "slopes"))
    backward = prepare_algorithm(g.backward, tuple(g.grads.values()))
    given = {t: "bf16" for t in ("Q", "K", "V")} | {"slopes": "fp32"}
    given |= {t: adjoint for t in backward.inputs if t not in given}
    assert set(multiplied(backward, types(**given))) == {"bf16"}


def test_a_product_that_is_handed_over_keeps_its_type():
    """LoRA beside a float32 residual: forward hands float32 to backward, whose products are of 16 bits."""
    text = "Func t, out; In Y, X, A, B; Var m, n; RVar k, l; t[m, l] = rdot(X[m, k], A[l, k], k); out[m, n] = Y[m, n] + rdot(t[m, l], B[n, l], l);"
    g = gradient(differentiable_form(parse(text).algorithm, ("out",)), ("out",), ("X", "A", "B"), ("t",))
    backward = prepare_algorithm(g.backward, tuple(g.grads.values()))
    given = {"X": "bf16", "A": "bf16", "B": "bf16"} | {t: "fp32" for t in backward.inputs if t not in "XAB"}
    assert "t" in backward.inputs and set(multiplied(backward, types(**given))) == {"bf16"}


def test_the_gradient_of_what_feeds_no_product_is_float32_where_results_are_cast():
    text = "Func out; In X, W, b; Var m, n; RVar k; out[m, n] = cast(rdot(X[m, k], W[n, k], k) + b[n], bf16);"
    g = gradient(differentiable_form(parse(text).algorithm, ("out",)), ("out",), ("X", "W", "b"))
    assert [str(d.expr).endswith(", fp32)") for d in g.backward.definitions if d.name in g.grads.values()] == [False, False, True]


def test_each_product_is_shown_with_its_dtype(capsys, tmp_path):
    path = tmp_path / "alibi.dt"
    path.write_text(ALIBI + FUSED)
    said = run(capsys, "show", path, "--stage", "schedule", "--dtype", "bf16,slopes=fp32")
    assert said.splitlines()[-2:] == [
        "# in s: rdot(Q[m, k], K[l, k], k) multiplies bf16, adds in fp32",
        "# in att: rdot(e[m, l], V[l, n], l) multiplies bf16, adds in fp32",
    ]
    said = run(capsys, "show", path, "--stage", "schedule", "--dtype", "bf16,V=fp32")
    assert "V[l, n], l) multiplies fp32" in said and "K[l, k], k) multiplies bf16" in said
    assert "multiplies" not in run(capsys, "show", "softmax", "--stage", "schedule")
