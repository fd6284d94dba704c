"""Attention over caches in float8 and int8 with scales, and what appends to caches, to machine code; and what they allocate."""

import re
from dataclasses import replace

import pytest
import torch

from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.target import TARGETS, target
from dtkernels.ops.attention_forms import calls  # noqa: F401 (makes the forms known)
from dtkernels.ops.registry import shipped
from dtkernels.runtime.aot_build import known_labels
from dtkernels.runtime.build.source_cache import load_module
from dtkernels.runtime.build.triton_compile import build, record_launches

SIZES = {"b": 2, "h": 8, "m": 1, "l": 2048, "d": 64, "n": 64, "h_in": 2, "g": 2, "t": 1, "p": 128, "K_1": 2}
CACHE, PAGES, WHOLE = (2, 2, 2048, 64), (300, 2, 16, 64), torch.int32
SHAPES = {
    "Q": (2, 8, 1, 64), "length": (2,), "table": (2, 128), "at": (2,),
    "k_head": (2, 2), "v_head": (2, 2), "new_k": (2, 2, 1, 64), "new_v": (2, 2, 1, 64),
}  # fmt: skip
LOOKED_UP = {"valid": True, "group": 4}
FORMS = {
    "a cache in int8": ("attention_lengths", {**LOOKED_UP, "k_by_head": True, "v_by_head": True}, torch.int8),
    "a cache in float8 with a scale for each token": ("attention_lengths_lse", {**LOOKED_UP, "k_by_token": True, "v_by_token": True}, torch.float8_e4m3fn),
    "pages in float8": ("attention_paged", {**LOOKED_UP, "page": 16, "v_by_number": True}, torch.float8_e5m2),
    "pages in int8 with a scale for each token": ("attention_paged", {**LOOKED_UP, "page": 16, "k_by_token": True, "v_by_token": True}, torch.int8),
    "new keys": ("append_cache", {}, torch.bfloat16),
    "new keys of pages in float8": ("append_pages", {"page": 16, "k_by_head": True, "v_by_head": True}, torch.float8_e4m3fn),
    "new keys and scales of pages in int8": ("append_pages_scaled", {"page": 16, "k_whole": True, "v_whole": True}, torch.int8),
}  # fmt: skip


def source_and_values(form, gpu):
    name, params, dtype = FORMS[form]
    variant = shipped(name).variant(tuple(sorted(params.items())), frozenset(), 0)
    cache = PAGES if "page" in params else CACHE
    values = {}
    for x in variant.algorithm.inputs:
        kind = dtype if x in ("K", "V") else torch.float32 if x.endswith(("head", "token")) else WHOLE if x in ("length", "table", "at") else torch.bfloat16
        values[x] = torch.empty(cache if x in ("K", "V") else cache[:3] if x.endswith("token") else SHAPES[x], dtype=kind, device="meta")
    sizes = {x: SIZES[x] for x in known_labels(variant.algorithm)}
    program = variant.program(sizes, 2, gpu)
    float8 = tuple((x, {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}[dtype]) for x in ("K", "V")) if dtype.is_floating_point and dtype.itemsize == 1 else ()
    integral = frozenset(x for x, t in values.items() if not t.is_floating_point())
    program = replace(program, algorithm=replace(program.algorithm, float8=float8, integral=integral))
    return emit(program, "call", gpu, uniform=False), (*values.values(), *(0.125 for _ in variant.algorithm.scalars))


ON_BOTH = ("a cache in int8", "pages in float8", "new keys of pages in float8")


@pytest.mark.parametrize("form, gpu", [*((form, "h200") for form in FORMS), *((form, "a100") for form in ON_BOTH)])
def test_machine_code(form, gpu):
    source, values = source_and_values(form, TARGETS[gpu])
    found = record_launches(load_module(source, "caches"), "call", values)
    if form.startswith("new keys"):  # caches and scales are written at one place each
        assert len(found) == (2 if "scales" in form else 1)
    assert found and all(build(x, TARGETS[gpu]).asm for x in found)


@pytest.mark.parametrize("form", [f for f in FORMS if "new keys" not in f])
def test_nothing_is_allocated_for_every_key(form):
    source, _ = source_and_values(form, target("h200"))
    made = re.findall(r"torch\.empty\(\((.*?)\),? d?t?", source)
    assert made and not any("size_l" in shape for shape in made)
