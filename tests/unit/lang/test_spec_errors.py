# ruff: noqa: E501 (programs and error texts read best on one line)
"""Errors about specs: one line that names the file, the line in it, and what to write instead."""

import re

import pytest

from dtkernels.lang import DTError
from dtkernels.lang.spec import load_spec, parse_spec

HEAD = "op: twice\ndoc: d\n"
TWICE = HEAD + "algorithm: |\n  Func aux, twice; In A; Var x;\n  aux[x] = A[x];\n  twice[x] = 2 * {};\n"
PLAIN = "op: f\ndoc: d\nalgorithm: 'Func f; In A; Var x, y; Param p = 2, q = false; f[x, y] = where(q, A[x, y], p);'\n"


def refusal(text: str) -> str:
    with pytest.raises(DTError) as error:
        parse_spec(text, "s.yaml")
    assert "\n" not in str(error.value)
    return str(error.value)


RESULTS = {
    TWICE.format("A[x]"): "s.yaml:5:3: what is declared is used: found Func 'aux' is not, by the result twice; allowed: aux.compile(); twice.compile(); where it is a result too",
    TWICE.format("A[x]") + "  aux.block(x:4);\n": "s.yaml:7:3: an op gets a schedule for each call",
    TWICE.format("A[x]") + "  aux.compile();\n": "s.yaml:6:3: op names a result: found 'twice', a Func that is not compiled; allowed: twice.compile();",
    HEAD + "algorithm: |\n  Func aux, twice; In A; Var x;\n  twice[x] = A[x];\n  aux[x] = twice[x];\n": "s.yaml:6:3: what is declared is used: found Func 'aux' is not, by the result twice",
    HEAD + "algorithm: |\n  Func a, b; In A; Var x;\n  a[x] = A[x];\n  b[x] = A[x];\n": "s.yaml:5:3: what is declared is used: found Func 'a' is not, by the result b",
    TWICE.format("aux[x]") + "  twice.compile_to_kernel();\n": "s.yaml:7:3: an op gets a schedule for each call, from a table or by default: found twice.compile_to_kernel(); allowed: compile() here; ",
}


@pytest.mark.parametrize("text", RESULTS)
def test_what_an_op_returns_is_said_once(text):
    assert refusal(text).startswith(RESULTS[text])


def test_results_of_a_spec():
    assert parse_spec(TWICE.format("aux[x]")).outputs == ("twice",)
    assert parse_spec(TWICE.format("A[x]") + "  twice.compile(); aux.compile();\n").outputs == ("twice", "aux")
    unnamed = parse_spec("op: other\ndoc: d\nalgorithm: |\n  Func a, b; In A; Var x;\n  a[x] = A[x];\n  b[x] = 2 * a[x];\n")
    assert unnamed.outputs == ("b",)


STYLES = {
    "algorithm: |\n  Func f; In A; Var x;\n  # note\n\n  f[x] = B[x];\n": "7:10",
    "algorithm: |  # long\n    Func f; In A; Var x;\n    f[x] = B[x];\n": "5:12",
    "algorithm: |2\n    Func f; In A; Var x;\n    f[x] = B[x];\n": "5:12",
    "algorithm: >-\n  Func f; In A; Var x;\n  f[x] = A[x]\n\n    + B[x];\n": "7:7",
    "algorithm: Func f; In A; Var x;\n  f[x] = A[x]\n  + B[x];\n": "5:5",
    "algorithm: 'Func f; In A; Var x; f[x] = B[x];'\n": "3:41",
    'algorithm: "Func f; In A; Var x;\\n f[x] = B[x];"\n': "3:12",  # escapes: the start of the text
    "algorithm:\n  |\n  Func f; In A; Var x;\n  f[x] = B[x];\n": "6:10",
}


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("text", STYLES)
def test_lines_count_from_the_start_of_the_file(text, newline, tmp_path):
    path = tmp_path / "s.yaml"
    path.write_bytes(("op: f\ndoc: d\n" + text).replace("\n", newline).encode())
    with pytest.raises(DTError) as error:
        load_spec(path)
    assert str(error.value).startswith(f"{path}:{STYLES[text]}: undeclared tensor: found 'B'")


FAMILIES = {
    "schedules:\n- schedule: f.block(x:{long_name}); f.blok(x:4);\n  space: {long_name: [16, 32]}\n": "s.yaml:5:39: unknown schedule primitive: found 'blok'",
    "schedules:\n- schedule: f.block(x:4);\n- schedule: |  # two\n\n    f.block(x:{a});\n    f.block(x={a});\n  space: {a: [16, 32]}\n": "s.yaml:9:14: syntax: found '='; allowed: x:size",
}


@pytest.mark.parametrize("text", FAMILIES)
def test_lines_of_schedules_count_from_the_start_of_the_file(text):
    assert refusal(PLAIN + text).startswith(FAMILIES[text])


SHAPES = {
    "{sizes: {x: 4}}": "sizes has each label of the algorithm: found no y; allowed: x, y",
    "{sizes: {x: 4, y: 3, z: 4}}": "a label of the algorithm: found 'z'; allowed: x, y",
    "{sizes: {x: 4, y: 1.5}}": "size of y: found 1.5; allowed: an integer",
    "{sizes: {x: 4, y: true}}": "size of y: found True; allowed: an integer",
    "{sizes: {x: 4, y: '8'}}": "size of y: found '8'; allowed: an integer",
    "{sizes: {x: 4, y: [8, 8]}}": "size of y: found 8 twice; allowed: each size once",
    "{sizes: {x: 4, y: 8}, params: {r: 1}}": "a Param of the algorithm: found 'r'; allowed: p, q",
    "{sizes: {x: 4, y: 8}, params: {q: 1}}": "params: q: found 1; allowed: true or false",
    "{sizes: {x: 4, y: 8}, params: {p: true}}": "params: p: found True; allowed: an integer",
    "{sizes: {x: 4, y: 8}, wanted: [B]}": "an input of the algorithm: found 'B'; allowed: A",
}


@pytest.mark.parametrize("entry", SHAPES)
def test_shapes_give_every_label_one_size(entry):
    assert refusal(PLAIN + f"shapes:\n- {entry}\n") == f"s.yaml: shapes: entry 1: {SHAPES[entry]}"


def test_labels_of_one_extent_have_one_size():
    text = "op: f\ndoc: d\nalgorithm: 'Func t, f; In A; Var x, y; RVar z; Extent y = A[1]; t[x] = rsum(A[x, z], z); f[x, y] = A[x, y] / t[x];'\nshapes:\n- sizes: "
    assert refusal(text + "{x: 4, y: 8, z: 9}").endswith("labels of one extent have one size: found z 9 and y 8")
    assert refusal(text + "{x: 4, y: [8, 9], z: [8, 9]}").endswith("labels of one extent have one size: found z 8, 9 and y 8, 9")
    assert parse_spec(text + "{x: 4, y: [8, 9]}").shapes and parse_spec(text + "{x: 4, y: 8, z: 8}").shapes
    fixed = "op: f\ndoc: d\nalgorithm: 'Func f; In A; Var x; RVar k; Extent k = 3; f[x] = A[x] + rsum(A[x + k], k);'\nshapes:\n- sizes: "
    assert refusal(fixed + "{x: 4, k: 5}").endswith("labels of one extent have one size: found k 5 and Extent 3")
    assert parse_spec(fixed + "{x: 4}").shapes


def test_a_path_where_a_text_is_expected(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    import dtkernels

    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.dt").write_text("Func f; In A; Var x; f[x] = A[x];")
    for path, missing in (("nofile.dt", True), ("there.dt", False), ("a/b", True), ("op.yaml", True)):
        with pytest.raises(DTError) as error:
            dtkernels.compile(path)
        said = str(error.value)
        assert said.startswith(f"compile takes DT text: found the path '{path}'") and ("no such file is there" in said) == missing
        assert ("dtkernels.register" if path.endswith("yaml") else "read_text()") in said and "\n" not in said
    with pytest.raises(TypeError, match=r"a program is DT text; found \w*Path; allowed: its text"):
        dtkernels.compile(tmp_path / "there.dt")


def test_a_text_where_a_path_is_expected():
    pytest.importorskip("torch")
    import dtkernels

    with pytest.raises(DTError, match="^register takes the path of a YAML spec: found a text that begins 'op: twice'; allowed: the path of a file that holds it$"):
        dtkernels.register(TWICE.format("aux[x]"))
    with pytest.raises(FileNotFoundError, match=r"register takes the path of a YAML spec, and no such file is there: 'nofile\.yaml'"):
        dtkernels.register("nofile.yaml")
    with pytest.raises(TypeError, match=re.escape("register takes the path of a YAML spec; found int")):
        dtkernels.register(3)


def test_an_unused_func_is_refused_by_compile():
    pytest.importorskip("torch")
    import dtkernels

    with pytest.raises(DTError, match="t.dt:1:28: what is declared is used: found Func 'g' is not, by the result f"):
        dtkernels.compile("Func f, g; In A; Var x;    g[x] = A[x]; f[x] = A[x]; g.block(x:4);", name="t.dt")
    both = dtkernels.compile("Func f, g; In A; Var x; g[x] = A[x]; f[x] = A[x]; g.compile(); f.compile();")
    assert both.outputs == ("g", "f")


def test_a_statement_for_one_variant_is_no_mistake_in_another():
    pytest.importorskip("torch")
    import dtkernels

    text = "Func f; In A; Var x; Param p = false; f[x] = where(p, tanh(A[x]), A[x]); f.tensorize(x:16); f.approximate(tanh);"
    dtkernels.compile(text)
    dtkernels.compile(text, params={"p": True})
    with pytest.raises(DTError, match="found no tanh of a tile in the kernel of f"):
        dtkernels.compile(text.replace("Param p = false; ", "").replace("where(p, tanh(A[x]), A[x])", "A[x]"))
