"""Predict the time of a schedule at given sizes, from what its kernels do and a few measured rates of the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .coefficients import PRODUCTS, ROWS, Rates
from .kernel_config import KernelConfig
from .kernel_work import Work, plans
from .outline import Known

if TYPE_CHECKING:
    from ...codegen.target import Target

GROUP = 4  #: warps that multiply together
GROUP_ROWS = 64  #: rows of their tile


def predicted_time(schedule: str, known: Known, sizes: dict[str, int], itemsize: int, target: Target) -> float:
    """Return the microseconds of ``schedule`` at ``sizes``, all its kernels one after another."""
    total = 0.0
    for plan in plans(schedule, known):
        c = PRODUCTS if plan.products else ROWS
        total += kernel_time(plan.at(sizes, itemsize, target, c.live), plan.config, c, target)
    return max(total, ROWS.launch)


def kernel_time(work: Work, config: KernelConfig, c: Rates, target: Target) -> float:
    """Return the microseconds of one kernel."""
    busy, waiting = _busy(work, config, c), _waiting(work, config, c)
    slots, cores = work.held * target.multiprocessors, target.multiprocessors
    alone = max(busy, waiting)
    full, rest = divmod(work.programs, slots)
    crowded = max(alone, work.held * busy)
    rounds = c.start + full * crowded
    if rest:
        last = max(alone, -(-rest // cores) * busy)
        hidden = c.overlap * (not config.persistent) if full else 0.0
        rounds += last * (1 - hidden) + hidden * crowded * rest / slots
    flying = min(work.programs, slots) * max(work.tile_bytes, 32.0) * (max(1, config.stages - 1) if work.rows and work.steps > 1 else 1.0)
    moving = work.memory / (c.bandwidth * target.bandwidth / 4.8e12 * flying / (flying + c.flying))
    took = c.launch + (rounds**c.sharp + moving**c.sharp) ** (1 / c.sharp)
    if work.merged:
        took += c.merge + 2 * work.merged / c.merge_rate + c.merge_part * work.parts
    if work.copied:
        took += c.merge + work.copied / c.bandwidth
    return took


def _busy(work: Work, config: KernelConfig, c: Rates) -> float:
    """Return the microseconds of a multiprocessor that one program takes."""
    computing = work.heavy / c.special + work.light / c.plain
    requests = 0.0 if work.fetched else work.requests
    loading = (work.moved + work.written) / c.l2_rate + requests / c.request_rate * (c.narrow if work.narrow else 1.0)
    if not work.rows:
        busy = max(computing, loading) + c.serial * min(computing, loading)
        return busy * work.spilled**c.spills
    rows, columns = max(work.rows, work.columns), min(work.rows, work.columns)
    shape = 1.0 + c.few_rows / max(rows, 16) + c.few_columns / max(columns, 8)
    groups = config.warps / GROUP
    if work.itemsize > 2:
        multiplying = work.multiplied * shape / c.wide_rate
    else:
        if groups < 1:
            shape *= c.few_warps
        elif rows < GROUP_ROWS:
            shape *= c.old_units
        elif work.rows * 1.0 < GROUP_ROWS * groups and work.products > 1:
            shape *= c.crowded
        multiplying = work.multiplied * shape / c.rate * (c.specialized if config.specialized else 1.0)
    busy = max(multiplying, loading) + c.serial * min(multiplying, loading) + computing * c.beside
    return busy * work.spilled**c.spills


def _waiting(work: Work, config: KernelConfig, c: Rates) -> float:
    """Return the microseconds that a program takes by itself, waiting for its loads."""
    if work.rows:
        stages = 1 if work.narrow else config.stages
    else:
        stages = max([s for _, s in config.stages_of], default=1)
    ahead = max(1.0, min(stages - 1.0, work.steps))
    lasting = 0.0
    if work.rows:  # products of one iteration that follow on one another
        rate = c.wide_rate if work.itemsize > 2 else c.rate
        lasting = work.multiplied / rate * c.alone * (c.few_warps if config.warps < GROUP and work.itemsize < 4 else 1.0)
    return c.start + work.steps * (c.latency / ahead + c.step * work.products) + lasting
