"""Programs that store values in elements of an input that data picks, ``f[x, y] = write(e, K[t[x], y]);``, against torch's index_put."""

import os
import re
import subprocess
import sys
from pathlib import Path

import bounds  # noqa: F401 (an access outside the tensors raises)
import pytest
import torch

import dtkernels
from dtkernels.lang.errors import DTError

ROWS = "Func put; In N, K, t; Var x, y; put[x, y] = write(2 * N[x, y], K[t[x], y]);"
SCHEDULES = ["", "put.block(x:4, y:16); put.tensorize(x:4, y:16);", "put.block(x:1, y:64); put.tensorize(y:32); put.map(y, x);", "put.block(x:8); put.tensorize(x:4, y:0);"]


def rows(count=7, width=37, most=11, seed=0):
    torch.manual_seed(seed)
    return torch.randn(count, width), torch.randn(most, width), torch.randperm(most)[:count]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rows_go_where_data_says_and_others_stay(schedule):
    values, target, place = rows()
    place[2], place[4] = 11, -1  # outside: they are left out
    wanted, inside = target.clone(), (place >= 0) & (place < 11)
    wanted[place[inside]] = 2 * values[inside]
    found = dtkernels.compile(ROWS + schedule)(N=values, K=target, t=place)
    assert found is target and torch.equal(target, wanted)


def test_a_condition_and_an_index_of_several_labels():
    text = "Func put; In N, K, t; SIn s; Var x, y; put[x, y] = write(N[x, y], K[t[x] / 3, y, (t[x] + s) % 4], N[x, y] > 0 and t[x] != 5);"
    torch.manual_seed(0)
    values, target, place = torch.randn(6, 20), torch.randn(4, 20, 4), torch.tensor([0, 3, 7, 5, 10, 20])
    wanted = target.clone()
    for x in (0, 1, 2, 4):
        on = values[x] > 0
        wanted[int(place[x]) // 3, on, (int(place[x]) + 2) % 4] = values[x, on]
    dtkernels.compile(text)(N=values, K=target, t=place, s=2)
    assert torch.equal(target, wanted)


def test_a_view_of_a_larger_tensor():
    values, _, place = rows(5, 12, 9)
    whole = torch.randn(9, 3, 24)
    wanted, view = whole.clone(), whole[:, 1, ::2]
    wanted[place, 1, ::2] = 2 * values
    dtkernels.compile(ROWS + SCHEDULES[1])(N=values, K=view, t=place)
    assert torch.equal(whole, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_an_input_that_is_written_keeps_its_dtype(dtype):
    values, target, place = rows()
    values, target = values.bfloat16().float(), target.to(dtype)  # the interpreter does not round to bfloat16 as GPUs do
    wanted = target.clone()
    bits = torch.uint8 if dtype.itemsize == 1 else torch.int16
    wanted.view(bits)[place] = (2 * values).to(dtype).view(bits)
    dtkernels.compile(ROWS)(N=values, K=target, t=place)
    assert target.dtype == dtype and torch.equal(target.float(), wanted.float())


def test_integers_by_a_cast():
    values, _, place = rows()
    target = torch.zeros(11, 37, dtype=torch.int8)
    wanted = target.clone()
    wanted[place] = (values * 40).round().clamp(-127, 127).to(torch.int8)
    dtkernels.compile("Func put; In N, K, t; Var x, y; put[x, y] = write(cast(round(clamp(40 * N[x, y], -127, 127)), int8), K[t[x], y]);")(N=values, K=target, t=place)
    assert torch.equal(target, wanted)


SUMS = """Func top, scale, put; In N, K, S, t; Var x; RVar y;
top[x] = rmax(abs(N[x, y]), y);
scale[x] = write(top[x] / 127, S[t[x]]);
put[x, y] = write(N[x, y] / top[x], K[t[x], y]);
scale.compile(); put.compile();"""


@pytest.mark.parametrize("count, width", [(7, 37), (1, 5000), (40, 3)])
def test_values_made_of_reductions(count, width, tmp_path):
    (tmp_path / "scaled_rows.yaml").write_text("op: scaled_rows\ndoc: rows by their largest element\nalgorithm: |\n" + "".join(f"  {line}\n" for line in SUMS.splitlines()))
    op = dtkernels.register(tmp_path / "scaled_rows.yaml")
    values, target, place = rows(count, width, count + 3)
    scales = torch.zeros(count + 3)
    wanted, largest = target.clone(), values.abs().amax(1)
    wanted[place] = values / largest[:, None]
    found = op(N=values, K=target, S=scales, t=place)
    assert found[0] is scales and found[1] is target
    torch.testing.assert_close(target, wanted, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(scales[place], largest / 127, atol=0, rtol=1e-6)
    assert not scales[[i for i in range(count + 3) if i not in place]].any()


@pytest.fixture
def op(tmp_path):
    (tmp_path / "write_rows.yaml").write_text(f"op: write_rows\ndoc: rows\nalgorithm: |\n  {ROWS}\n")
    return dtkernels.register(tmp_path / "write_rows.yaml")


@pytest.mark.parametrize("interpreted", [True, False])
def test_an_op_returns_what_it_changed(op, interpreted, monkeypatch):
    if not interpreted:
        monkeypatch.delenv("TRITON_INTERPRET")
    values, target, place = rows()
    place[0] = 99
    wanted = target.clone()
    wanted[place[1:]] = 2 * values[1:]
    before = op.entry and dtkernels.paths().get("write_rows", {}).get("reference", 0)
    assert op(values, target, place) is target and torch.equal(target, wanted)
    assert dtkernels.paths()["write_rows"]["reference"] - before == (not interpreted)
    assert op(torch.empty(0, 37), target, place[:0]) is target and torch.equal(target, wanted)


ON_A_GPU = """
import stand_in_driver, torch, dtkernels
stand_in_driver.use()
op = dtkernels.register({path!r})
values, place = torch.randn(4, 64), torch.arange(4)
for target in (torch.zeros(9, 64), torch.zeros(9, 64), torch.zeros(9, 128)[:, ::2]):
    for _ in range(2):
        assert op(values, target, place) is target
bound = [route.launch.results for v in op._variants.values() for route in v.dispatch._routes.values()]
print(bound, len(op._call_cache.known), dtkernels.paths()["write_rows"]["gpu"])
"""


def test_bound_kernels_return_the_argument_that_they_change(op, tmp_path):
    """By a driver whose launches do nothing: what is tested is what a repeated call passes and returns."""
    tests = Path(__file__).parents[2]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])}
    text = ON_A_GPU.format(path=str(tmp_path / "write_rows.yaml"))
    done = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[(-2,), (-2,)] 2 6", done.stderr[-2000:]


def test_torch_compile_sees_the_change(op):
    def twice(values, target, place):
        op(values, target, place)
        return target.sum(), op(values[:2], target, place[2:4])

    values, target, place = rows()
    other = target.clone()
    wanted = twice(values, other, place)
    found = torch.compile(twice, fullgraph=True, backend="aot_eager")(values, target, place)
    assert torch.equal(target, other) and torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


def test_what_a_call_refuses(op, monkeypatch):
    values, target, place = rows()
    with pytest.raises(NotImplementedError, match="it changes K and has no gradient; allowed: torch.no_grad()"):
        op(values.requires_grad_(), target, place)
    values = values.detach()
    for wrong, said in ((torch.zeros(1, 37).expand(11, 37), "K is written and is an expanded or negated view"), (values, "K is written and shares memory with N, which is read")):
        with pytest.raises(ValueError, match=said):
            op(values, wrong, place)
    monkeypatch.setenv("DTKERNELS_CHECK", "1")
    with pytest.raises(IndexError, match=r"K\[t\[x\], y\]: index t\[x\] is 11 at x = 3; allowed along dimension 0 of K: 0 to 10"):
        op(values, target, place.index_fill(0, torch.tensor(3), 11))


WRONG = {
    "put[x, y] = 1 + write(N[x, y], K[t[x], y]);": "a write is all of a definition",
    "put[x, y] = write(N[x, y]);": "write takes a value, an element of an In",
    "put[x, y] = write(N[x, y], 3, t[x] > 0);": "a write names the element that it changes",
    "put[x, y] = write(N[x, y], put[x, y]);": "a Func is defined before it is used|a write changes an In",
    "put[x, y] = write(N[x, y], K[t[x], 0]);": "every label of a write is in its index.*without y",
    "put[x, y] = write(N[x, y] + K[x, y], K[t[x], y]);": "what a program writes it does not read",
    "put[x, y] = write(N[x, y], K[t[x], y], N[x, y] + 1);": "a boolean is wanted here",
    "put[x, y] = write(N[x, y] > 0, K[t[x], y]);": "a number is wanted here",
}  # fmt: skip


@pytest.mark.parametrize("definition", WRONG)
def test_what_the_language_refuses(definition):
    with pytest.raises(DTError, match=WRONG[definition]) as error:
        dtkernels.compile(f"Func put; In N, K, t; Var x, y; {definition}")
    assert "\n" not in str(error.value)


def test_a_write_is_a_result_of_its_own():
    text = "Func put, f; In N, K, t; Var x, y; put[x, y] = write(N[x, y], K[t[x], y]); f[x, y] = {};"
    with pytest.raises(DTError, match="a write is a result: found put, read by f"):
        dtkernels.compile(text.format("put[x, y]"))
    with pytest.raises(DTError, match="a write is a result: found put is not"):
        dtkernels.compile(text.format("N[x, y]"))
    with pytest.raises(DTError, match="an In is written by one Func: found K by put and f"):
        dtkernels.compile(text.format("write(N[x, y], K[x, y])") + "put.compile(); f.compile();")


def test_a_write_reads_back_as_it_was_written():
    text = "Func put; In N, K, t; Var x, y; put[x, y] = write(N[x, y], K[t[x] / 2, y], t[x] > 0);"
    program = dtkernels.lang.parser.parse(text)
    assert dtkernels.lang.parser.parse(str(program)) == program


@pytest.mark.parametrize("schedule", ["", "f.block(x:4, y:16); f.tensorize(y:16);", "f.block(x:4); f.tensorize(y:0);", "f.block(x:4, y:48); f.tensorize(y:48);", "f.block(x:16); f.tensorize(x:4);"])
def test_rows_past_the_end_of_a_block_write_nothing(schedule):
    A, K, t = torch.randn(5, 3), torch.randn(8, 3), torch.tensor([3, 4, 0, 6, 7])  # the row that data picks past the end would be 0
    expected = K.clone().index_copy(0, t, 2 * A)
    assert torch.equal(dtkernels.compile("Func f; In A, K, t; Var x, y; f[x, y] = write(2 * A[x, y], K[t[x], y]);" + schedule)(A=A, K=K, t=t), expected)


def test_an_input_that_is_written_is_not_copied():
    with pytest.raises(dtkernels.DTError, match="stage copies an input that is read alone: found K, which is written; allowed: A"):
        dtkernels.compile("Func f; In A, K, t; Var x, y; f[x, y] = write(2 * A[x, y], K[t[x], y]); f.stage(K:y);")


def test_what_no_program_may_write_is_refused():
    program = dtkernels.compile("Func f; In A, K, t; Var x; f[x] = write(A[x], K[t[x]]);")
    a, places = torch.arange(5.0), torch.tensor([1, 2, 3, 4, 0])
    for memory, message in (
        (a, "f: K is written and shares memory with A, which is read; allowed: A.clone()"),
        (torch.zeros(1).expand(5), "f: K is written and is an expanded or negated view; allowed: a tensor with memory of its own"),
        (torch.zeros(5, requires_grad=True), "f: K is written and is a leaf that requires a gradient; allowed: K.detach(), or torch.no_grad()"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            program(A=a, K=memory, t=places)
    leaf = torch.zeros(5, requires_grad=True)
    with torch.no_grad():
        program(A=a, K=leaf, t=places)
    assert torch.equal(leaf.detach()[places], a)
