"""Attention's forms, forward and backward, to machine code for every target; and what their wrappers allocate."""

import re

import pytest
import torch

from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.target import TARGETS, target
from dtkernels.ops.attention_forms import calls  # noqa: F401 (makes the forms known)
from dtkernels.ops.registry import shipped
from dtkernels.runtime.aot_build import known_labels
from dtkernels.runtime.build.source_cache import load_module
from dtkernels.runtime.build.triton_compile import build, record_launches

SIZES = {"b": 2, "h": 8, "m": 2048, "l": 2048, "d": 64, "n": 64, "K_1": 2, "h_in": 4}
FORMS = {
    "packed": ("attention_varlen", {"ranged": True, "keyed": True, "group": 4}, True),
    "packed with logsumexp": ("attention_varlen_lse", {"ranged": True, "keyed": True, "group": 4, "capped": True}, True),
    "segments": ("attention_segments", {"ranged": True, "keyed": True, "segmented": True, "sinks": True}, True),
    "dropout": ("attention_dropout", {"dropped": True, "causal": True}, True),
    "pages": ("attention_paged", {"valid": True, "group": 4, "page": 16}, False),
    "a cache": ("attention_lengths", {"valid": True, "keyed": True, "ends": True, "starts": True, "group": 4}, True),
}


def programs(name, params, backward, gpu):
    """The programs of a form, as the default schedule has them."""
    variant = shipped(name).variant(tuple(sorted(params.items())), frozenset(), 0)
    pair = variant.pair(("Q", "K", "V")) if backward else None
    for v in (variant, *((pair.forward, pair.backward) if pair else ())):
        sizes = {label: SIZES[label] for label in known_labels(v.algorithm)} | ({"m": 1} if name.startswith("attention_paged") else {})
        yield v, sizes, v.program(sizes, 2, gpu)


def tensors(variant, sizes):
    """Tensors on meta for a variant's inputs."""
    for name in variant.algorithm.inputs:
        shape = [sizes[x] if x else {"K": 2, "V": 2}.get(name, 4) for x in variant.signature.inputs[name]]
        if name in ("K", "V") and "table" in variant.algorithm.inputs:
            shape = [256, 2, 16, 64]
        if name == "table":
            shape = [sizes["b"], sizes["l"] // 16]
        whole = name in ("lo", "hi", "begins", "stops", "of_q", "of_k", "table", "length")
        wide = name in ("lse", "d_lse", "total_log")
        yield torch.empty(shape, dtype=torch.int32 if whole else torch.float32 if wide else torch.bfloat16, device="meta")


@pytest.mark.parametrize("gpu", ["a100", "l40s", "h200", "b200", "mi300x"])
@pytest.mark.parametrize("form", FORMS)
def test_machine_code(form, gpu):
    name, params, backward = FORMS[form]
    if gpu not in ("h200", "mi300x") and form not in ("packed", "pages"):
        pytest.skip("two forms go to every target")
    for variant, sizes, program in programs(name, params, backward, TARGETS[gpu]):
        given = [*tensors(variant, sizes), *(7 if scalar == "seed" else 0.125 for scalar in variant.algorithm.scalars)]
        found = record_launches(load_module(emit(program, "call", TARGETS[gpu]), "form"), "call", tuple(given))
        assert found and all(build(x, TARGETS[gpu]).asm for x in found)


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_allocated_for_every_pair_of_a_query_and_a_key(form):
    name, params, backward = FORMS[form]
    for _, _, program in programs(name, params, backward, target("h200")):
        made = re.findall(r"torch\.empty\(\((.*?)\),? d?t?", emit(program, target=target("h200")))
        assert made and not any("size_m" in shape and "size_l" in shape for shape in made)


def test_the_loops_of_forward_and_backward_end_where_sequences_do():
    _, forward, backward = (emit(program, target=target("a100")) for _, _, program in programs(*FORMS["packed"], target("a100")))
    for text, label in ((forward, "l"), (backward, "l"), (backward, "m")):
        assert f"for {label}_start in range({label}_begin, " in text
