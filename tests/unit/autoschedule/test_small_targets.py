"""A part of a GPU, as an instance of a partitioned one is: default schedules fit it, and predictions grow as it shrinks."""

from dataclasses import replace

import pytest

from dtkernels.autoschedule.cost.predicted_time import predicted_time
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.target import target
from dtkernels.tuning.records.problems import CallKind, TuningProblem, time_model, variants_of
from dtkernels.tuning.search.candidates import split_by_kernel
from dtkernels.tuning.workers.compile_worker import CpuWorker

WHOLE = target("h100")
PARTS = {n: replace(WHOLE, multiprocessors=n, bandwidth=WHOLE.bandwidth * n / 132, l2_bytes=WHOLE.l2_bytes * n // 132) for n in (66, 16)}
#: op -> (sizes that fill a GPU many times over, sizes of a few blocks)
SIZES = {
    "relu": ({"x": 1 << 27}, {"x": 300}),
    "softmax": ({"x": 16384, "y": 8192}, {"x": 3, "y": 100}),
    "dyt": ({"x": 16384, "y": 8192}, {"x": 3, "y": 100}),
    "mmsigmoid": ({"x": 4096, "y": 4096, "k": 4096}, {"x": 40, "y": 24, "k": 100}),
    "two_mm": ({"m": 8192, "n": 4096, "k": 4096, "l": 16}, {"m": 64, "n": 128, "k": 32, "l": 32}),
    "attention": ({"b": 4, "h": 32, "m": 4096, "l": 4096, "d": 128, "n": 128}, {"b": 1, "h": 2, "m": 40, "l": 70, "d": 64, "n": 64}),
}


def problem(op, sizes, direction):
    kind = CallKind(op, direction, "bf16")
    labels = variants_of(kind)[1].algorithm.labels
    return TuningProblem(kind, tuple((label, sizes[label]) for label in labels if label in sizes))


def chosen(work, to):
    """(the default schedule on ``to``, its predicted microseconds there)"""
    own = variants_of(work.group)[1]
    text = str(default_schedule(own.algorithm, own.outputs, work.extents, work.group.itemsize, to))
    return text, predicted_time(text, time_model(work.group).known, work.extents, work.group.itemsize, to)


@pytest.mark.parametrize("op", SIZES)
def test_a_part_of_a_gpu_has_schedules_that_fit_and_takes_as_much_longer(op):
    for sizes, large in zip(SIZES[op], (True, False)):
        work = problem(op, sizes, "forward")
        own = variants_of(work.group)[1]
        assert {*own.algorithm.labels} == {*work.extents}, "every extent is known"
        _, whole = chosen(work, WHOLE)
        last = whole
        for count, part in PARTS.items():
            text, time = chosen(work, part)
            made = split_by_kernel(own.algorithm, own.outputs, text)
            assert CpuWorker(part).fits(work, made, None), text
            assert time >= 0.99 * last, (count, time, last)
            assert not large or 0.8 < time / whole / (132 / count) < 1.3, (count, time, whole)
            last = time
