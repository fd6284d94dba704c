"""What is one computation under several names: found where it is one, left alone where it is not."""

import pytest

from dtkernels.algebra.pipeline import prepare, prepare_algorithm
from dtkernels.algebra.rules.canonicalize import extract_nested_reductions
from dtkernels.algebra.rules.label_unification import unify_labels
from dtkernels.lang import parse
from dtkernels.lang.spec import parse_spec


def read(declared: str, text: str):
    return parse(f"{declared} {text}").algorithm


def lines(algorithm) -> list[str]:
    return [str(d) for d in algorithm.definitions]


ONE = "Func t, f; In A; Var x, y; RVar z;"
LEFT = {
    "another dimension": ("Func t, f; In A; Var x, y; RVar z;", "t[x] = rsum(A[z, x], z); f[x, y] = A[x, y] * t[x];"),
    "another tensor": ("Func t, f; In A, B; Var x, y; RVar z;", "t[x] = rsum(B[x, z], z); f[x, y] = A[x, y] * t[x];"),
    "moved": ("Func t, f; In A, v, w; Var x, y; RVar z;", "t[x] = rsum(A[x, z + 1] * w[z], z); f[x, y] = A[x, y + 1] * v[y] * t[x];"),
    "compared with it": ("Func f; In A; Var x, y; RVar z;", "f[x, y] = A[x, y] * rsum(where(z < y, A[x, z], 0), z);"),
    "inside a sum over it": ("Func f; In A; Var x; RVar y, z;", "f[x] = rsum(A[x, y] * rsum(A[x, z], z), y);"),
    "of a length that is said": ("Func t, f; In A; Extent z = 3; Var x, y; RVar z;", "t[x] = rsum(A[x, z], z); f[x, y] = A[x, y] * t[x];"),
}  # fmt: skip


@pytest.mark.parametrize("why", LEFT)
def test_labels_of_other_things_keep_their_names(why):
    algorithm = read(*LEFT[why])
    assert lines(unify_labels(algorithm)) == lines(algorithm)


def test_lengths_go_with_the_label():
    algorithm = read(ONE, "t[x] = rsum(A[x, z], z) / len(z); f[x, y] = A[x, y] - t[x] + len(z);")
    assert lines(unify_labels(algorithm)) == ["t[x] = rsum(A[x, y], y) / len(y);", "f[x, y] = A[x, y] - t[x] + len(y);"]


def test_names_that_are_swapped_between_two_sums_end():
    """What is made first has the names of what is made of it."""
    algorithm = read(
        "Func s, t, f; In A, w; Var x; RVar y, z;",
        "s[x] = rsum(A[x, y], y); t[x] = rsum(A[x, z] * s[x] + len(y), z); f[x] = rsum(A[x, y] * t[x] * s[x] + len(z), y) + w[x];",
    )
    assert lines(unify_labels(algorithm)) == [
        "s[x] = rsum(A[x, y], y);",
        "t[x] = rsum(A[x, y] * s[x] + len(y), y);",
        "f[x] = rsum(A[x, y] * t[x] * s[x] + len(y), y) + w[x];",
    ]


@pytest.mark.parametrize(
    "named", ["schedules:\n- schedule: t.fuse_at(f, x); f.tensorize(y:0, z:0);", "shapes:\n- sizes: {x: 4, y: 4, z: 4}"]
)
def test_what_a_spec_names_keeps_its_name(named):
    text = "op: f\ndoc: softmax\nalgorithm: |\n  Func t, f; In A; Var x, y; RVar z;\n  t[x] = rsum(exp(A[x, z]), z); f[x, y] = exp(A[x, y]) / t[x];\n"
    assert "z" not in prepare_algorithm(parse_spec(text).algorithm, ("f",)).labels
    assert "z" in prepare_algorithm(parse_spec(text + named).algorithm, ("f",)).labels


def test_a_program_with_a_schedule_keeps_its_labels():
    program = parse(
        ONE + " t[x] = rsum(exp(A[x, z]), z); f[x, y] = exp(A[x, y]) / t[x]; f.block(x:1); f.tensorize(y:64); t.tensorize(z:64);"
    )
    assert "z" in prepare(program).algorithm.labels


def test_equal_reductions_are_hoisted_once():
    a = read("Func f; In A; Var x; RVar y, z;", "f[x] = rsum(exp(A[x, y] - rmax(A[x, z], z)) * rmax(A[x, z], z), y);")
    assert lines(extract_nested_reductions(a)) == ["f_max[x] = rmax(A[x, z], z);", "f[x] = rsum(exp(A[x, y] - f_max[x]) * f_max[x], y);"]


def test_a_product_that_a_func_is_made_from_is_not_made_again():
    names, dot = "Func s, t, f; In A, B; Var x; RVar y, k;", "rdot(A[x, k], B[k, y], k)"
    assert lines(extract_nested_reductions(read(names, f"s[x, y] = {dot}; t[x] = rsum(exp({dot}) * s[x, y], y); f[x, y] = exp({dot}) / t[x];"))) == [
        f"s[x, y] = {dot};", "t[x] = rsum(exp(s[x, y]) * s[x, y], y);", "f[x, y] = exp(s[x, y]) / t[x];"]  # fmt: skip


def test_a_product_of_what_stands_beside_is_its_own():
    """Two results that need not be in one kernel do not wait for each other."""
    algorithm = read(
        "Func s, t; In A, B; Var x; RVar y, k;",
        "s[x] = rsum(exp(rdot(A[x, k], B[k, y], k)), y); t[y] = rsum(exp(rdot(A[x, k], B[k, y], k)), x);".replace(
            "Var x; RVar y", "Var x, y; RVar"
        ),
    )
    assert [d.name for d in extract_nested_reductions(algorithm).definitions] == ["s_dot", "s", "t_dot", "t"]


def test_a_sum_along_a_label_of_another_extent_is_its_own():
    """Of what is read beside a label nothing tells its extent."""
    a = read("Func g, f; In A, B, C; Var x, c; RVar y, k;",
             "g[x] = rsum(A[x + 1, k], k); f[c] = rsum(rsum(A[y + 1, k], k) * B[y, c], y) + rsum(g[x] * C[x], x);")  # fmt: skip
    assert [d.name for d in extract_nested_reductions(a).definitions] == ["g", "f_sum", "f"]


def test_a_result_keeps_the_extent_of_a_label_that_no_access_has_any_more():
    """``y`` is a label of ``f``; only the sum that is renamed told how long it is."""
    algorithm = unify_labels(read("Func t, f; In A, B; Var y, z; RVar x;", "t[] = rsum(A[y], y) + rsum(A[x] * B[x], x); f[y, z] = t[] + B[z];"))
    assert lines(algorithm)[0] == "t[] = rsum(A[z], z) + rsum(A[z] * B[z], z);"
    assert algorithm.extents == (("y", "A", 0),)
