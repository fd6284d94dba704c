"""Gathered elements and diagonals under the default schedule, forward and gradients, to machine code for sm_90 without a GPU."""

import pytest
import torch
from gluon_programs import SCORE, attention
from indexed_forms import FORMS

import dtkernels
from dtkernels.algebra.pipeline import prepare
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.target import target
from dtkernels.lang import parse
from dtkernels.runtime.build.source_cache import load_module
from dtkernels.runtime.build.triton_compile import build, record_launches

H200 = target("h200")
CHOSEN = ("router", "infonce", "clip", "diag", "trace", "bdiag1", "bdiag2", "diagmul", "aaprod", "bag", "baglse", "gdot", "gdot1", "nested", "attpos", "attpaged")


def launches(program, tensors: list) -> list:
    return record_launches(load_module(emit(program, "call", H200), "indexed"), "call", tuple(tensors))


def extents(algorithm, shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
    known = {label: n for t in algorithm.inputs for label, n in zip(algorithm.plain_labels(t), shapes[t]) if label}
    known |= {label: shapes[t][dim] if t else dim for label, t, dim in algorithm.extents}
    return {label: next(known[x] for x in (label, *algorithm.tied_labels(label)) if x in known) for label in algorithm.labels}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CHOSEN)
def test_forward_and_gradients_compile(name, dtype, tmp_path):
    text, _, _, given = FORMS[name]
    (path := tmp_path / "form.yaml").write_text(f"op: compiled_{name}\ndoc: as in torch\nalgorithm: |\n  {text}\n")
    forward = dtkernels.register(path).variant((), frozenset(), 0)
    integers = {n for n, s in given.items() if s[0] == "index"}
    pair = forward.pair(tuple(n for n in given if n not in integers))
    shapes = {n: s[2:] if n in integers else s for n, s in given.items()}
    saved = pair.forward.algorithm
    sizes = extents(saved, shapes)
    made = {o: tuple(sizes[x] for x in saved[o].labels) for o in pair.forward.outputs}
    shapes |= made | {f"d_{o}": shape for o, shape in made.items()}
    for variant in (forward, pair.forward, pair.backward):
        inputs = variant.algorithm.inputs
        program = variant.program(extents(variant.algorithm, shapes), dtype.itemsize, H200)
        tensors = [torch.empty(shapes[n], dtype=torch.int64 if n in integers else dtype, device="meta") for n in inputs]
        found = launches(program, tensors)
        assert found and all(build(x, H200).asm["cubin"] for x in found)


@pytest.mark.parametrize("more", ["W[t[l]]", "W[t[m]]", "W[t[b]]", "W[t[m] - l]", "where(t[l] == t[m], W[t[m]], 0)"])
def test_gathered_elements_where_warps_are_specialized(more):
    """Integers stay integers; a score past the extent is masked though ``l`` stands in the index of an index alone."""
    text = attention(f"{SCORE} + {more}").replace("In Q, K, V;", "In Q, K, V, W, t;")
    half = {"dtype": torch.bfloat16, "device": "meta"}
    t = torch.empty(2 if "t[b]" in more else 300, dtype=torch.int32, device="meta")
    program = prepare(parse(text))
    found = launches(program, [*[torch.empty(2, 4, 300, 128, **half)] * 3, torch.empty(99, **half), t, 0.1])
    assert [x.kernel.__name__ for x in found] == ["att_gluon_kernel"]
    assert build(found[0], H200).asm["cubin"]
    if more == "W[t[l]]":
        assert "mask=l_ok & (t >= 0) & (t < W_size_0)" in emit(program, "call", H200)
