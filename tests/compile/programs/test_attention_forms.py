"""Attention's forms, forward and backward, to machine code for every target; and what their wrappers allocate."""

import pytest
from attention_form_programs import SIZES, Allocated, arguments, programs

import dtkernels
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.target import TARGETS, target
from dtkernels.runtime.build.source_cache import load_module
from dtkernels.runtime.build.triton_compile import build, record_launches

FORMS = {
    "packed": ("attention_varlen", {"ranged": True, "keyed": True, "group": 4}, True),
    "packed with logsumexp": ("attention_varlen_lse", {"ranged": True, "keyed": True, "group": 4, "capped": True}, True),
    "segments": ("attention_segments", {"ranged": True, "keyed": True, "segmented": True, "sinks": True}, True),
    "flags of keys": ("attention_flags", {"flagged": True, "causal": True, "group": 4}, True),
    "dropout": ("attention_dropout", {"dropped": True, "causal": True}, True),
    "pages": ("attention_paged", {"valid": True, "group": 4, "page": 16}, False),
    "a cache": ("attention_lengths", {"valid": True, "keyed": True, "ends": True, "starts": True, "group": 4}, True),
}


@pytest.mark.parametrize("gpu", ["a100", "l40s", "h200", "b200", "mi300x"])
@pytest.mark.parametrize("form", FORMS)
def test_machine_code(form, gpu):
    name, params, backward = FORMS[form]
    if gpu not in ("h200", "mi300x") and form not in ("packed", "pages"):
        pytest.skip("two forms go to every target")
    for variant, sizes, program in programs(name, params, backward, TARGETS[gpu]):
        found = record_launches(load_module(emit(program, "call", TARGETS[gpu]), "form"), "call", arguments(variant, sizes))
        assert found and all(build(x, TARGETS[gpu]).asm for x in found)


ALIBI = {"score": "s + slope[h] * (l - m)", "mask": "l <= m", "inputs": "slope"}
DOCUMENTS = {"mask": "doc[b, m] == doc[b, l] and l <= m or l < prefix[b]", "inputs": "doc prefix"}
LENGTHS = {"valid": True, "ends": True}
#: those above and: the op, or what a user writes, parameters, whether it has a gradient
MORE = {
    "one matrix": ("attention", {"causal": True, "capped": True, "sinks": True}, True),
    "a window": ("attention", {"starts": True, "ends": True, "group": 4}, True),
    "a mask and a bias": ("attention", {"masked": True, "biased": True}, True),
    "logsumexp": ("attention_lse", {"causal": True}, True),
    "packed with dropout": ("attention_varlen", {"ranged": True, "keyed": True, "dropped": True}, True),
    "a step of ring attention": ("attention_part", {"ranged": True, "keyed": True, "segmented": True, "group": 4}, True),
    "a cache with scales": ("attention_lengths", {**LENGTHS, "k_by_token": True, "v_by_head": True, "group": 4}, False),
    "pages with logsumexp": ("attention_paged_lse", {**LENGTHS, "starts": True, "page": 16, "group": 4}, False),
    "a score of a user": (ALIBI, {}, True),
    "a mask of a user": (DOCUMENTS, {"group": 4}, True),
}


@pytest.mark.parametrize("form", [*FORMS, *MORE])
def test_what_is_allocated_grows_with_the_length_not_with_its_square(form):
    """The wrapper runs on tensors without memory, of one length and of eight times that, with the schedule of a long sequence."""
    op, params, backward = (FORMS | MORE)[form]
    op = op if isinstance(op, str) else dtkernels.attention_spec(**op, name=f"memory_{form.replace(' ', '_')}").operator
    for variant, _, program in programs(op, params, backward, target("h200"), SIZES | {"m": 16384, "l": 16384}):
        module, made = load_module(emit(program, "call", target("h200")), "memory"), []
        for length in (4096, 32768):
            given = arguments(variant, SIZES | {"m": length, "l": length})
            with Allocated() as allocated:
                record_launches(module, "call", given)
            made.append(allocated.bytes)
        assert 0 < made[1] <= 8 * made[0], made


def test_the_loops_of_forward_and_backward_end_where_sequences_do():
    _, forward, backward = (emit(program, target=target("a100")) for _, _, program in programs(*FORMS["packed"], target("a100")))
    for text, label in ((forward, "l"), (backward, "l"), (backward, "m")):
        assert f"for {label}_start in range({label}_begin, " in text or f"{label}_start = tl.cast({label}_begin, INDEX)" in text  # the latter goes through all heads
