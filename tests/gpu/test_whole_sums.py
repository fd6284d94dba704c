"""Attention's gradients of short sequences, by one kernel that has all keys at once, compared with float64."""

import pytest
from attention_sweep import by_default, check_gradients

from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.target import target
from dtkernels.runtime.build.source_cache import load_module

CASES = {
    "causal": ({"causal": True}, (128, 16, 77, 77, 64)),
    "all of 197": ({}, (64, 12, 197, 197, 64)),
    "other count of keys": ({}, (40, 16, 100, 60, 80)),
    "one tile": ({}, (256, 8, 32, 32, 32)),
    "heads share keys": ({"group": 3}, (138, 15, 39, 39, 224)),
    "heads share keys, causal": ({"causal": True, "group": 4}, (32, 32, 64, 64, 128)),
    "few programs": ({}, (8, 12, 128, 128, 64)),
}


@pytest.mark.parametrize("name", CASES)
def test_short_sequences(name):
    params, sizes = CASES[name]
    program = by_default(params, sizes, target("h200"))
    assert "d_Q.accumulate_at(d_K, m, ordered);" in str(program.schedule)
    check_gradients(load_module(emit(program, "call", target("h200"), True), "whole_sums"), program, params, sizes)
