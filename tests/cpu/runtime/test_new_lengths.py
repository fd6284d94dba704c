"""Calls at sizes never seen before, as a cache of keys that grows makes them: one schedule serves many, and what is kept is bounded."""

import math
import random

import pytest
import stand_in_gpu
import torch

import dtkernels
from dtkernels.autoschedule import default_schedule as formulas
from dtkernels.codegen.target import target
from dtkernels.ops.registry import SPECS, shipped
from dtkernels.runtime.bind.operator import Operator
from dtkernels.runtime.dispatch import call_cache, dispatcher
from dtkernels.runtime.select import shape_buckets, table_loader
from dtkernels.runtime.select.schedule_selection import Choice
from dtkernels.runtime.select.shape_buckets import ScheduleCache, bucket_anchor
from dtkernels.runtime.select.table_loader import OpTable

H200 = target("h200")


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """The sizes that the default schedule is asked for, where there is no table."""
    monkeypatch.setenv("DTKERNELS_TABLES", str(tmp_path))
    table_loader.forget()
    found, formula = [], formulas.default_schedule
    monkeypatch.setattr(formulas, "default_schedule", lambda algorithm, outputs, sizes, *rest: found.append(dict(sizes)) or formula(algorithm, outputs, sizes, *rest))
    yield found
    table_loader.forget()


def made(op: str) -> ScheduleCache:
    variant = Operator(SPECS / f"{op}.yaml").variant((), frozenset(), 0)
    return variant.dispatch.programs


def choice(**sizes: int) -> Choice:
    return Choice(OpTable(None), (), sizes)


def test_an_anchor_is_a_size_of_the_same_kind():
    for n in range(20000):
        a = bucket_anchor(n)
        assert n <= a <= n * 9 / 8 + 16 and math.gcd(a, 16) == math.gcd(n, 16) and bucket_anchor(a) == a, (n, a)
        assert (a - 1).bit_length() == (n - 1).bit_length() and (n > 16 or a == n), (n, a)
        rows = bucket_anchor(n, pitch=False)
        assert n <= rows <= n * 9 / 8 + 16 and (rows % 16 == 0) == (n % 16 == 0) and bucket_anchor(rows, pitch=False) == rows, (n, rows)
        assert rows <= n * 9 / 8 if n <= 128 else rows == a if n <= 256 else rows >= a, (n, rows)
    assert all(bucket_anchor(1 << i) == bucket_anchor(1 << i, pitch=False) == 1 << i for i in range(31))
    assert [len({bucket_anchor(n, pitch) for n in range(2048, 2113)}) for pitch in (True, False)] == [6, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_growing_cache_asks_the_default_schedule_a_handful_of_times_and_is_right(asked, dtype):
    op, generator = Operator(SPECS / "attention.yaml"), torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, 1, 16, generator=generator).to(dtype)
    for length in range(321, 337):
        k, v = torch.randn(2, 1, 2, length, 16, generator=generator).to(dtype).unbind()
        wide = [t.double() for t in (q, k, v)]
        wanted = torch.softmax(wide[0] @ wide[1].mT / 4, -1) @ wide[2]
        bound = 16 * torch.finfo(dtype).eps
        torch.testing.assert_close(op(q, k, v, scale=0.25).double(), wanted, rtol=bound, atol=bound)
    assert len(asked) == len({bucket_anchor(n, pitch=False) for n in range(321, 337)}) == 2


def test_lengths_that_nothing_divides_are_right(asked):
    op = Operator(SPECS / "softmax.yaml")
    for length in (17, 31, 33, 97, 127, 129, 257, 1021, 1031, 4099):
        x = torch.randn(3, length, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(op(x), torch.softmax(x.double(), -1).float())
    assert any(sizes["y"] not in (17, 31, 33, 97, 127, 129, 257, 1021, 1031, 4099) for sizes in asked)


def test_a_schedule_that_is_not_legal_at_the_sizes_themselves_gives_way_to_theirs(asked, monkeypatch):
    monkeypatch.setattr(shape_buckets, "bucket_anchor", lambda n, pitch: 16)
    own, large = made("softmax"), {"x": 64, "y": 1 << 21}
    assert own.default_plan(choice(x=64, y=1000), 2, H200).asked == {"x": 16, "y": 16}  # its row is held whole
    planned = own.default_plan(choice(**large), 2, H200)
    assert planned.asked == large and str(planned.program.schedule) == str(formulas.default_schedule(own.algorithm(), own.outputs, large, 2, H200))


@pytest.mark.parametrize("op", ["softmax", "mmsigmoid", "attention", "dyt"])
def test_a_schedule_does_not_depend_on_earlier_calls(op):
    labels = [n for n, source in Operator(SPECS / f"{op}.yaml").variant((), frozenset(), 0).signature.sizes.items() if not isinstance(source, int)]
    rng = random.Random(0)
    kinds = [{label: rng.choice((1, 17, 64, 1000, 1001, 1003, 4100)) for label in labels} for _ in range(6)]
    forth, back = made(op), made(op)
    first = [str(forth.default_plan(choice(**sizes), 2, H200).program.schedule) for sizes in kinds]
    assert first == [str(back.default_plan(choice(**sizes), 2, H200).program.schedule) for sizes in reversed(kinds)][::-1]


def test_labels_of_one_extent_only_stay_as_they_are():
    own = ScheduleCache(made("softmax").algorithm, ("softmax",), frozenset("y"))
    assert own.default_plan(choice(x=1001, y=1001), 2, H200).asked == {"x": bucket_anchor(1001), "y": 1001} != {"x": 1001, "y": 1001}


def test_explain_says_at_which_sizes_the_default_schedule_was_asked(asked):
    shipped.cache_clear()
    told, exact = (dtkernels.explain("softmax", torch.randn(4, n)).forward.why for n in (1001, 1024))
    assert f"made for sizes x=4 y={bucket_anchor(1001)}" in told and "default schedule" in exact and "made for" not in exact


def test_ever_new_lengths_do_not_fill_memory(monkeypatch):
    stand_in_gpu.use(monkeypatch)
    for module in (dispatcher, call_cache):
        monkeypatch.setattr(module, "REMEMBERED", 4)
    op = Operator(SPECS / "softmax.yaml")
    for length in (*range(20, 32), 20, 31):
        for _ in range(2):
            x = torch.randn(3, length, generator=torch.Generator().manual_seed(0))
            torch.testing.assert_close(op(x), torch.softmax(x, -1))
            assert len(op._call_cache.known) <= 4 and len(op.variant((), frozenset(), 0).dispatch._routes) <= 4
    assert [key[0][1] for key in op._call_cache.known] == [29, 30, 31, 20]  # the oldest go, one at a time
