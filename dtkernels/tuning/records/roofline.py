"""Bound the time of a call from below: the bytes that it must move and the products that it must make, by the GPU's rates."""

from __future__ import annotations

import math

from ...autoschedule.cost.coefficients import rates_of
from ...codegen.target import Target
from . import inputs_and_reference
from .problems import TuningProblem, time_model, variants_of


def roofline(work: TuningProblem, to: Target) -> float:
    """Return the microseconds of a call that moves every input and output once and multiplies at full rate, whichever takes longer.

    The roofline model is that of Williams, Waterman and Patterson (2009). The bandwidth is the datasheet's, the rate of products that of
    the cost model. Masks count as if nothing were masked.
    """
    _, variant = variants_of(work.group)
    algorithm, sizes = variant.algorithm, inputs_and_reference.itemsizes(work)
    moved = sum(inputs_and_reference.elements(work, n) * sizes[n] for n in (*algorithm.inputs, *variant.outputs))
    products = [p for f in time_model(work.group).known.outline.funcs for p in f.products]
    multiplied = sum(2.0 * math.prod(work.extents.get(x, 1) for x in {*p.labels, *p.reduced}) for p in products)
    rates = rates_of(to.arch)[0]
    rate = (rates.wide_rate if work.group.itemsize > 2 else rates.rate) * to.multiprocessors
    return max(moved / to.bandwidth * 1e6, multiplied / rate)
