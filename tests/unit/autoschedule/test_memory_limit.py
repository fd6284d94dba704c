"""What kernels keep between them. Of a last layer, as the host half of the emitted file says: no matrix of logits, forward or backward."""

import math

import pytest
import torch

from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.target import target
from dtkernels.lang import parse
from dtkernels.lang.schedule import Program, Sizes
from dtkernels.runtime.launch.wrapper_recorder import host_text, record
from dtkernels.runtime.reference.evaluator import extents
from dtkernels.show import Subject, Written

LIMIT = 256 << 20
HIDDEN, VOCABULARY = 4096, 128256
SUM = "log(rsum(exp(z[x, y]), y))"
HEAD = "Func z, out; In H, W, t; Var x; RVar y, k; z[x, y] = rdot(H[x, k], W[y, k], k);"
LAYERS = {
    "plain": HEAD + f"out[x] = {SUM} - z[x, t[x]];",
    "ignored": HEAD + f"out[x] = cast(where(t[x] == -100, 0, {SUM} - z[x, t[x]]), fp32);",
    "bias": HEAD.replace("W, t;", "W, t, b;").replace(", k);", ", k) + b[y];") + f"out[x] = {SUM} - z[x, t[x]];",
    "softcap": HEAD.replace(" Var x;", " SIn cap; Var x;").replace("= rdot(H[x, k], W[y, k], k)", "= cap * tanh(rdot(H[x, k], W[y, k], k) / cap)") + f"out[x] = {SUM} - z[x, t[x]];",
    "smoothing": HEAD + f"out[x] = {SUM} - 0.9 * z[x, t[x]] - 0.1 * rmean(z[x, y], y);",
    "z_loss": HEAD.replace("out;", "lse, out;") + f"lse[x] = {SUM}; out[x] = lse[x] - z[x, t[x]] + 0.0001 * lse[x] * lse[x];",
    "mean": HEAD.replace("out;", "loss, out;").replace(" Var x; RVar y", " RVar x, y") + f"loss[x] = {SUM} - z[x, t[x]]; out[] = rmean(loss[x], x);",
}


def allocated(layer: str, sizes: dict[str, int], backward: bool) -> dict[str, int]:
    """Bytes of the outputs and of everything else that the wrapper of the default schedule allocates."""
    program = parse(LAYERS[layer])
    wanted = tuple(n for n in program.algorithm.inputs if n != "t") if backward else None
    subject = Subject(Written(layer, program, scheduled=False), "h200", sizes, "bf16", {}, wanted)
    source = emit(subject.program, "call", subject.target, True)
    algorithm = subject.program.algorithm
    args = [torch.empty([sizes[label] for label in algorithm.plain_labels(t)], dtype=torch.int64 if t == "t" else torch.bfloat16, device="meta") for t in algorithm.inputs]
    notes = record(host_text(source), (*args, *[1.0] * len(algorithm.scalars)))
    outputs = {id(t) for t in notes.results}
    return {kind: sum(math.prod(t.shape) * t.itemsize for t in notes.allocated if (id(t) in outputs) == own) for kind, own in (("outputs", True), ("rest", False))}


@pytest.mark.parametrize("rows", [1000, 4096, 8192])
@pytest.mark.parametrize("layer", LAYERS)
def test_backward_holds_no_more_than_the_limit_beside_the_gradients(layer, rows):
    sizes = {"x": rows, "y": VOCABULARY, "k": HIDDEN}
    found = allocated(layer, sizes, backward=True)
    assert found["outputs"] >= 2 * HIDDEN * (VOCABULARY + rows), "gradients of hidden and weight"
    assert 0 < found["rest"] <= LIMIT + (1 << 20)  # and what is one number a row


@pytest.mark.parametrize("layer", LAYERS)
def test_forward_holds_numbers_of_rows_alone(layer):
    found = allocated(layer, {"x": 8192, "y": VOCABULARY, "k": HIDDEN}, backward=False)
    assert found["outputs"] + found["rest"] <= 8192 * (4 * 32 + 3 * 4 * VOCABULARY // 256 + 12), "three numbers a row and tile of 256 columns at most"


def test_the_limit_can_be_set(monkeypatch):
    sizes = {"x": 8192, "y": VOCABULARY, "k": HIDDEN}
    monkeypatch.setenv("DTKERNELS_MEMORY_LIMIT", "0")
    assert allocated("plain", sizes, backward=True)["rest"] == 2 * 8192 * VOCABULARY, "all of the gradient of the logits"
    monkeypatch.setenv("DTKERNELS_MEMORY_LIMIT", "1024")
    assert LIMIT < allocated("plain", sizes, backward=True)["rest"] <= 1024 << 20


def test_small_layers_are_in_one_piece():
    program = Subject(Written("plain", parse(LAYERS["plain"]), scheduled=False), "h200", {"x": 2048, "y": 32000, "k": 512}, "bf16", {}, ("H", "W")).program
    assert not any(p.name == "chunk" for p in program.schedule.primitives)


HEADS = """Func s, e, t, out; In Q, K, V; Var b, h, m, n; RVar l, d; s[b, h, m, l] = rdot(Q[b, h, m, d], K[b, h, l, d], d); e[b, h, m, l] = exp(s[b, h, m, l]);
t[b, h, m] = rsum(e[b, h, m, l], l); out[b, h, m, n] = rdot(e[b, h, m, l], V[b, h, l, n], l) / t[b, h, m];"""


@pytest.mark.parametrize("batch, heads, label, piece", [(32, 32, "b", 4), (1024, 1, "b", 128), (2, 512, "h", 64)])
def test_scores_of_long_heads_are_kept_for_a_few_batches_at_once(batch, heads, label, piece):
    """A piece of batches reads its own keys and values, one of rows those of all: 42 ms on an H100 in pieces of 128 rows of 32 x 32 heads."""
    sizes = {"b": batch, "h": heads, "m": 512, "n": 1024, "l": 512, "d": 1024}
    schedule = Subject(Written("out", parse(HEADS), scheduled=False), "h100", sizes, "fp32").program.schedule
    assert {p.func: (p.args[0].label, p.args[0].size) for p in schedule.primitives if p.name == "chunk"} == dict.fromkeys(("s", "e"), (label, piece))


SOFTMAX = """Func y, total, f; In X, W, shift; Var b, o, v; RVar c, r; Extent v = 2 * X[2] + W[2] - 3;
y[b, o, v] = rdot(where((v + 1 - r) % 2 == 0, X[b, c, (v + 1 - r) / 2], 0), W[c, o, r], c, r);
total[b, v] = rsum(exp(y[b, o, v]), o); f[b, o, v] = exp(y[b, o, v]) / total[b, v] + shift[o];"""


def pieces_of_phases(batch: int, itemsize: int) -> dict[str, tuple[str, int]]:
    """Return what is in pieces where a softmax of a transposed convolution is asked for, and its sums: Func -> label and size."""
    prepared = prepare_algorithm(parse(SOFTMAX).algorithm, ("f", "total"))
    sizes = extents(prepared, {n: torch.empty(s, device="meta") for n, s in (("X", (batch, 64, 4096)), ("W", (64, 128, 4)), ("shift", (128,)))})
    schedule = default_schedule(prepared, ("f", "total"), sizes, itemsize, target("h200"))
    assert lower(Program(prepared, schedule))
    return {p.func: (p.args[0].label, p.args[0].size) for p in schedule.primitives if isinstance(p, Sizes) and p.name == "chunk"}


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("limit", ["", "1", "32", "256"])
def test_phases_that_a_result_in_order_is_made_of_are_not_cut_apart(limit, itemsize, monkeypatch):
    """The kernel of the last phases stores the result, which has no label of phases."""
    monkeypatch.setenv("DTKERNELS_MEMORY_LIMIT", limit)
    assert pieces_of_phases(64, itemsize) == {}


def test_phases_are_kept_for_a_part_of_a_batch_at_once(monkeypatch):
    monkeypatch.setenv("DTKERNELS_MEMORY_LIMIT", "256")
    assert pieces_of_phases(512, 2) == {"y_phases": ("b", 128)}
