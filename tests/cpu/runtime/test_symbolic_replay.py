"""Calls at sizes never seen before take what was noted of a wrapper: row, kernels, numbers and grids are those of the wrapper itself."""

import json
import math
import random
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from dtkernels.runtime.launch.symbolic_replay import Allocating, Shaped, Tape, Unknown, stand_ins, template_key
from dtkernels.runtime.launch.wrapper_recorder import record
from dtkernels.runtime.select import row_ranking
from dtkernels.runtime.select.table_loader import forget, op_table
from dtkernels.runtime.tables.table import Gpu

ROOT = Path(__file__).parents[3]

SAME = """
import json, random, sys, torch, traceback, dtkernels, stand_in_driver
stand_in_driver.use()
torch.cuda.get_device_properties = lambda device: type("", (), {"multi_processor_count": 132})
from dtkernels.runtime.dispatch import dispatcher
D, seen = dispatcher.Dispatcher, {"forward": [0, 0], "backward": [0, 0]}
again = D._replay_template

def told(bound):
    held = {slot: key for key, slot in bound._slots.items()}
    numbers = [n & (1 << 64) - 1 for n in bound._raw()]
    slot = lambda p: numbers[p] if held[p][0] == "raw" else held[p][:2]
    maps = [(tuple(shape), tuple(strides), how) for _, shape, strides, how in bound._maps]
    plans = [([slot(p) for p in places], tuple(grid), entry) for places, grid, entry, _ in bound._plans]
    return plans, bound.allocations, [tuple(s) for s in bound._strides], bound.grain, bound._overlaps, bound.results, maps

def compared(self, tensors, scalars):
    found, counts = again(self, tensors, scalars), seen[self.subject.direction]
    counts[1] += 1
    if found is not None:
        trace, D._trace = D._trace, lambda *args: None
        wanted = self._stored(self.choose(tensors), tensors, scalars, coarse=False)
        D._trace = trace
        assert wanted is not None, [t.shape for t in tensors.values()]
        (route, results), (full, right) = found, wanted
        assert route.candidate == full.candidate and route.kind == full.kind
        assert told(route.launch) == told(full.launch), [t.shape for t in tensors.values()]
        assert [(r.shape, r.stride(), r.dtype) for r in results] == [(r.shape, r.stride(), r.dtype) for r in right]
        counts[0] += 1
    return found

D._replay_template = compared
T = lambda *shape: torch.empty(shape, dtype=torch.bfloat16)
some = lambda: rng.choice((rng.randrange(900, 1200), 16 * rng.randrange(60, 80), 8 * rng.randrange(120, 160), 1024))
def attending(keys, one_query):
    heads = 8 if one_query else 32
    return [T(1, 32, 1 if one_query else keys, 128), T(1, heads, keys, 128), T(1, heads, keys, 128)], {"scale": rng.random(), "causal": not one_query}

def counts_of(op, call, gradients):
    global rng
    rng = random.Random(0)
    seen.update(forward=[0, 0], backward=[0, 0])
    for i in range(40):
        inputs, given = eval(call, globals(), {"i": i, "gradients": gradients})
        inputs = [t.requires_grad_(gradients) for t in inputs]
        result = getattr(dtkernels.ops, op)(*inputs, **given)
        if gradients:
            torch.autograd.grad(result, inputs, torch.zeros_like(result))
    return *seen["forward"], *seen["backward"]

found, calls = {}, json.loads(sys.argv[1])
for op, call in calls.items():
    try:
        found[op] = counts_of(op, call, sys.argv[2] == "True")
    except Exception:
        found[op] = traceback.format_exc()[-2000:]
print(json.dumps(found))
"""
CALLS = {
    "softmax": "([T(some(), some())], {})",
    "relu": "([T(some(), 2048)], {})",
    "dyt": "([T(some(), 1024), T(1), T(1024), T(1024)], {})",
    "rmsnorm": "([T(some(), 4096), T(4096)], {})",
    "mmsigmoid": "([T(16 * rng.randrange(56, 64), 1024), T(1024, 1024)], {})",
    "two_mm": "([T(some(), 4096), T(4096, 16), T(16, 4096)], {})",
    "attention": "attending(rng.choice((4096, 64 * rng.randrange(60, 70), 4000 + i)), not gradients)",
}


@cache
def counted(gradients: bool) -> dict[str, list[int] | str]:
    """For each op how often a template was taken and asked for, forward and backward, or what failed; in one process."""
    command = [sys.executable, "-c", SAME, json.dumps(CALLS), str(gradients)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "HOME": "/nonexistent"})
    assert not done.returncode, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("op", CALLS)
def test_what_was_noted_gives_what_the_wrapper_gives(op, gradients):
    found = counted(gradients)[op]
    assert not isinstance(found, str), found
    taken, asked, taken_back, asked_back = found
    assert taken * 6 >= asked and taken_back * 6 >= asked_back and (taken_back if gradients else taken), found  # few sizes have schedules of their own


def test_a_table_asked_at_one_length_after_another_takes_the_rows_that_it_lists():
    forget()
    table = op_table("attention", Gpu("NVIDIA H200", 90, 132))
    rng = random.Random(0)
    for key in {r.key for r in table.rows}:
        agree = [r for r in table.rows if r.key == key]
        sizes = dict(rng.choice(agree).sizes)
        for _ in range(40):
            sizes["l"] = max(1, sizes["l"] + rng.choice((1, 1, 1, 16, -64, sizes["l"])))
            usable = [c for c in row_ranking.candidates(agree, key, sizes, agree[0].spec) if not c.refused]
            found = table.nearest(key, sizes, agree[0].spec, None, lambda: None)
            assert (found and found.row.schedule) == (usable[0].row.schedule if usable else None), (key, sizes)


def test_a_tape_gives_nothing_where_a_comparison_comes_out_otherwise():
    tape = Tape()
    n, m = tape.take(100), tape.take(7)
    blocks = -(-n // 16) * m
    assert n % 16 and not n % 10 and max(n, m) is n and (m - 1).bit_length() == 3 and 1 < m != n
    computed = tape.function((blocks, (n, 5), [m + 2]))
    assert computed([100, 7]) == (49, (100, 5), (9,)) == (blocks.value, (n.value, 5), (9,))
    assert computed([130, 6]) == (54, (130, 5), (8,))
    assert not any(map(computed, ([160, 7], [101, 7], [100, 10], [100, 1])))
    assert computed([7, 7]) is None


@pytest.mark.parametrize("taken", [range, float, math.sqrt, lambda n: [0] * n, lambda n: (1, 2)[n], lambda n: 1 << n, lambda n: n / 2, lambda n: n == 1.0])
def test_what_is_no_arithmetic_of_whole_numbers_is_refused(taken):
    with pytest.raises((TypeError, Unknown)):
        taken(Tape().take(1))


HOST = """
import torch
def call(A):
    A = A.to(torch.float32)
    out = {made}
    return out
"""


@pytest.mark.parametrize("made", ["torch.zeros_like(A)", "A.contiguous()", "torch.empty_like(A)", "torch.zeros((4,))", "torch.empty((A.shape[0],), dtype=A.dtype, device=A.device)"])
def test_a_wrapper_that_does_more_than_allocate_is_refused(made):
    allocating = Allocating()
    _, values = stand_ins((torch.empty(3, 4),))
    if made.startswith("torch.empty(("):
        (result,) = record(HOST.format(made=made), values, None, allocating).results
        assert type(result) is Shaped and allocating.allocated == [result]
        _, values = stand_ins((torch.empty(3, 4).half(),))
    with pytest.raises((AttributeError, TypeError, Unknown)):
        record(HOST.format(made=made), values, None, allocating)


def test_kinds_tell_apart_what_notes_hang_on():
    x = torch.empty(3, 4)
    kinds = [(x,), (x[0],), (x.half(),), (x, 1), (x, 2), (x, True), (x, 1.0), (x, x), (x.to("meta"),)]
    assert len({template_key(values) for values in kinds}) == len(kinds) and template_key((x, 0.5)) == template_key((x[:2].t(), 2.5))
