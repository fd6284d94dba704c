"""Predict the time of a schedule at given sizes, from what its kernels do and a few measured rates of the GPU."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

from .coefficients import FLOAT8, Rates, RatesOfKinds, rates_of
from .kernel_config import KernelConfig
from .kernel_plan import KernelPlan, plans
from .outline import Known
from .work import Work

if TYPE_CHECKING:
    from ...codegen.target import Target

GROUP = 4  #: warps that multiply together
FITTED_TO = 4.8e12  #: bytes a second of the GPU, an H200, whose bandwidth the rates state
GROUP_ROWS = 64  #: rows of their tile
LONG_LOOP = 8  #: iterations from which on products hide the loads of a pipelined loop
WARP = 32  #: threads
HIDDEN_LAUNCH = 3.8  #: microseconds of a launch beside the kernel before it: the sums of 2, 3 and 4 predicted times were 3.9, 7.5 and 11.5 us above calls on an H100, of one 0.3 below
#: the time of products whose operands are computed of loads of 2 bytes, relative to what is predicted: 1.3 to 1.6 in attention's gradients on an H100, 0.95 in a sigmoid's.
#: From 1.45 on the fastest of several ways to fuse is found for 8 of 9 such gradients
COMPUTED = 1.5
#: the same of products alone, whose operands of 16 bits are made of tiles stored in float32: 1.4 to 2.1 of times on an H200 that memory does not take (shared_heads_trials.json)
WIDENED = 1.7
#: the time of a product in 16 bits that sums an operand's elements beside it, relative to the product alone: 287 us for 186 (8192 x 8192 x 1024), 1114 for 655 and 971 for 633
#: on an H100. The tile has to reach registers, and the matrix units wait
SUMMED = 1.53
#: the time of a product through boxes with single elements between their tiles, relative to that through boxes of two dimensions: 233 us for 175 and 248 for 190 on an H100
PARTED_BOX = 1.33
PARTED_ALONE = 1.1  #: products of tiles in parts by specialized warps, which issue both parts before they wait: 78 times of 14 sizes on an H200
IN_TURNS = 0.9  #: the time of two consumers in turn, relative to what other kernels of their tiles would take: with it the choice among 11 forms takes 1.016 of the best at 20 sizes on an H200
#: registers asked for over those there are, above which loads of single elements wait for one another, and what that costs: ptxas keeps 2.7 KB of a thread on the stack. 128 such
#: loads of a thread took 4 to 14 times as long as predicted (39 times of sums of up to 128 rows of odd length, an H200)
CRAMPED, ONE_BY_ONE = 1.2, 8.0
TRIED = 0.74  #: the time of float32 products on an H100 with Triton 3.6, relative to the fitted rate
DEEP = 32  #: terms in a step of three TF32 products from which on they take no longer
#: what more than 128 rows, and more than 64 columns, of a tile of such add to their time: tiles of 128 x 64 took 0.84 to 0.96, and 0.89 to 0.99, of it at six sizes on an H100
LARGER = 0.07, 0.07
TURN = 0.014  #: microseconds of an addition to an element of memory to which others add too: 8192 each took 117 us, 1182 each 22 (an H200)
#: instructions of a warp that sums over pairs, relative to those that wait for one another: its sums do not. 4096 x 4096 distances of 64 terms took 138 us on an H200
#: where 231 had been predicted, 3000 x 2040 of 30 33 where 43 were; beside a product, by one program of a multiprocessor, 407
INDEPENDENT = 4.0
FEW_HELD = 2  #: programs of a multiprocessor, of which registers and shared memory leave no doubt
ACROSS = 23  #: columns beside which rows that lie across the sum double the time: 2317 us, 1757 along it, by 64 columns of 2048 x 4096 x 8192; 1985 and 1790 by 128
ACCUMULATORS = 64  #: sums of a thread beside which both parts of operands have registers


def predicted_time(schedule: str, known: Known, sizes: dict[str, int], itemsize: int, target: Target) -> float:
    """Return the microseconds of ``schedule`` at ``sizes``, all its kernels one after another, each launched while the one before it runs if the GPU can."""
    asked, times = tuple(sizes.items()), []
    for plan in plans(schedule, known):
        times.append(_time(plan, asked, itemsize, target))
    hidden = HIDDEN_LAUNCH * (len(times) - 1) if target.has_dependent_launch else 0.0
    return max(sum(times) - hidden, rates_of(target.arch)[1].launch)


def kernels_in_one_step(schedule: str, known: Known, sizes: dict[str, int], itemsize: int, target: Target) -> tuple[bool, ...]:
    """Return for each kernel of ``schedule`` whether it goes over its rows in one step: no product, and no second step of its loop."""
    asked = tuple(sizes.items())
    works = (_work(plan, asked, itemsize, target) for plan in plans(schedule, known))
    return tuple(not work.products and work.steps <= 1 for work in works)


@lru_cache(maxsize=8192)
def _time(plan: KernelPlan, sizes: tuple[tuple[str, int], ...], itemsize: int, target: Target) -> float:
    work = _work(plan, sizes, itemsize, target)
    return kernel_time(work, plan.config, rates_for(work, rates_of(target.arch)), target)


@lru_cache(maxsize=1024)
def _work(plan: KernelPlan, sizes: tuple[tuple[str, int], ...], itemsize: int, target: Target) -> Work:
    return plan.at(dict(sizes), itemsize, target, rates_of(target.arch)[0].live)


def rates_for(work: Work, rates: RatesOfKinds) -> Rates:
    """Return the rates of a kernel's kind."""
    if work.rows:
        return rates.chains if work.products > 1 and not work.paired else rates.products
    return rates.streams if work.products else rates.rows


def kernel_time(work: Work, config: KernelConfig, c: Rates, target: Target) -> float:
    """Return the microseconds of one kernel.

    Registers of streamed products are estimated to a fifth. Where all their programs just run at once, the time is the mean of that and of one fewer at once.
    """
    taken = _time_of(work, config, c, target)
    if work.products and not work.rows and work.held > FEW_HELD and (work.held - 1) * target.multiprocessors < work.programs <= work.held * target.multiprocessors:
        taken = (taken + _time_of(work._replace(held=work.held - 1), config, c, target)) / 2
    return taken


def _time_of(work: Work, config: KernelConfig, c: Rates, target: Target) -> float:
    work = work._replace(multiplied=work.multiplied * float32_factor(work, config))
    cores, slots = target.multiprocessors, work.held * target.multiprocessors
    busy, waiting, bandwidth = _busy(work, config, c), _load_latency(work, config, c), c.bandwidth * target.bandwidth / FITTED_TO
    sharp = c.pipelined if work.rows and not work.short and config.stages > 2 and work.steps >= LONG_LOOP else c.rounds
    if config.persistent and work.rows and work.steps > 1 and not work.fetched:
        busy, waiting = busy * c.refilled, waiting * c.refilled
    alone = _overlapped(busy, waiting, sharp)
    full, rest = _rounds(work, config, slots)
    again = waiting - c.start if config.persistent else waiting  # its next block's first loads run beside the results of the last
    crowded = _overlapped(work.held * busy, again, sharp)
    computing = c.start + full * crowded
    if rest:
        last = _overlapped(-(-rest // cores) * busy, waiting, sharp)
        if config.tail and full and 2 * rest <= slots:  # a kernel of its own, in pieces of the blocks; the first kernel runs a fuller wave
            again = -(-config.pieces * rest // cores)
            last = c.launch / 2 + _overlapped(c.quartered * again * busy / config.pieces, -(-again // 2) * waiting, c.rounds)
        if config.stream and full and (streamed := _streamed(rest, busy, waiting, config, c, (cores, slots))) is not None:
            last = streamed
        hidden = c.overlap * (not config.persistent) if full else 0.0
        computing += last * (1 - hidden) + hidden * crowded * rest / slots
    computing = max(computing, c.start + work.longest * alone)
    computing *= WIDENED if work.widened and work.rows else 1.0
    ahead = max(1, config.stages - 1) if work.rows and work.steps > 1 else 1
    flying = min(work.programs, slots) * max(work.tile_bytes, 32.0) * ahead
    moving = (work.memory + c.strip * work.strips + c.stored_strip * work.stored_strips + c.run * work.runs) / (bandwidth * flying / (flying + c.flying))
    if (work.held == 1 or not work.products) and ahead == 1 and not (config.persistent and config.stages_of) and full:
        moving += c.exposed * full * alone / work.held  # nothing is loaded while the program computes, or less
    moving *= 1 + c.skew / max(1.0, work.programs / slots) if work.steps > 1 else 1.0
    beginning = 0.0 if config.persistent else (c.begin + c.begin_warp * config.warps) * work.programs / cores
    slower = COMPUTED if work.computed and work.rows else SUMMED if work.summed and work.rows and work.itemsize == 2 and not work.ordinary else 1.0
    slower *= PARTED_BOX if work.parted_boxes and work.fetched else 1.0
    slower *= 1 + ONE_BY_ONE * (work.spilled - CRAMPED) if work.narrow and work.rows and work.products == 1 and work.spilled > CRAMPED else 1.0
    shared = work.passes * work.programs / (c.passes * min(cores, work.programs))  # other programs of a multiprocessor load meanwhile
    took = c.launch + _overlapped(_overlapped(_overlapped(computing, moving, c.sharp), beginning, c.inner), shared, c.inner) * slower
    took = max(took, c.launch + TURN * work.meeting)
    if work.merged:
        took += work.merges * c.merge + 2 * work.merged / c.merge_rate + (c.merge_part + c.merge_single * work.one_by_one) * work.parts
    if work.sums:  # a kernel that clears and one that converts
        took += 2 * c.merge * work.sums + work.cleared / bandwidth
    if work.copied:
        took += c.merge * work.copies + work.copied / bandwidth
    return took


def _rounds(work: Work, config: KernelConfig, slots: int) -> tuple[float, int]:
    """Return rounds of programs, and the programs of a last one. Persistent programs of specialized warps share long and short loops evenly, in pairs or in order."""
    if not (config.specialized and config.persistent and work.longest > 1 and work.programs > slots):
        return divmod(work.programs, slots)
    return work.programs / slots if config.order else 2.0 * -(-work.programs // (2 * slots)), 0


def _streamed(rest: int, busy: float, waiting: float, config: KernelConfig, c: Rates, machine: tuple[int, int]) -> float | None:
    """Return the microseconds of a last wave of ``rest`` blocks whose sums are split, and of the kernel that merges the parts; None where they are not."""
    parts = math.prod(n for _, n in config.stream)
    each = parts * (config.pieces if config.tail else 1)
    cores, slots = machine
    again, elements = -(-each * rest // cores), math.prod(size for _, size in config.blocks)
    if -(-each * rest // slots) >= each:  # the wrapper leaves it to the first kernel
        return None
    merging = c.merge + 2 * 4 * rest * parts * elements / c.merge_rate + c.merge_part * parts
    return c.launch / 2 + _overlapped(again * busy / each, again * waiting / each, c.rounds) + merging


def _overlapped(a: float, b: float, sharp: float) -> float:
    """Return a little more than the larger one: what overlaps does so imperfectly."""
    return float((a**sharp + b**sharp) ** (1 / sharp))


def _busy(work: Work, config: KernelConfig, c: Rates) -> float:
    """Return the microseconds of a multiprocessor that one program takes."""
    computing = max(work.heavy / c.special + work.light / c.plain, work.issued * config.warps / c.slots)
    loading = (work.moved + work.written + 2 * work.added) / c.l2_rate + _requests(work, c) / c.request_rate + work.short_stores / c.store_rate
    if not work.rows:
        loading *= c.passed if config.stages_of and not work.products else 1.0
        return _overlapped(computing, loading, c.inner) * (1 + c.spills * (work.spilled - 1))
    multiplying, slower = _overlapped(work.multiplied / _rate(work, c) * _shape(work, config, c), loading, c.inner), 1 + c.spills * (work.spilled - 1)
    if config.specialized and work.products == 2:
        return _overlapped(multiplying, computing * c.overlapped, c.concurrent) * slower + c.next_block
    if config.ping_pong:  # one warpgroup computes while the other multiplies
        return IN_TURNS * _overlapped(multiplying, computing * c.beside, c.inner) * slower
    restart = c.restart if config.specialized and work.products > 3 and work.longest > 1 else 0.0
    return (multiplying + computing * c.beside) * slower + restart


def _rate(work: Work, c: Rates) -> float:
    narrow = c.rate * (FLOAT8 if work.float8 else 1.0)
    return c.ordinary_rate if work.ordinary else c.tripled_rate if work.tripled else c.wide_rate if work.itemsize > 2 else narrow


def _requests(work: Work, c: Rates) -> float:
    """Return the number of loads of threads, short ones weighted by their cost."""
    return (0.0 if work.fetched else work.requests) + work.short * c.narrow * (c.ragged if work.merged else 1.0)


def _shape(work: Work, config: KernelConfig, c: Rates) -> float:
    """Return how much longer than at best the matrix units take for tiles of this shape."""
    rows, columns, groups = max(work.rows, work.columns), min(work.rows, work.columns), config.warps / GROUP
    shape = 1.0 + c.few_rows / max(rows, 16) + c.few_columns / max(columns, 8)
    if work.tripled and not work.ordinary:
        return _tripled_shape(work, config, c)
    if work.itemsize > 2 or work.ordinary:
        return shape
    if groups < 1:
        shape *= c.few_warps
    elif rows < GROUP_ROWS:
        shape *= c.old_units
    elif work.rows < GROUP_ROWS * groups and work.products > 1:
        shape *= c.crowded
    if groups >= 1 and work.rows > GROUP_ROWS * groups:
        shape *= c.doubled
    if config.persistent and work.paired:
        shape *= c.paired
    shape *= (c.lone if config.persistent and groups <= 1 else 1.0) * (1.0 if not work.parted else PARTED_ALONE if config.specialized and not config.ping_pong else c.parted)
    if work.products == 1:
        few = c.half if 2 * work.rows >= GROUP_ROWS else c.low
        shape *= c.tall if work.rows > work.columns else few if work.rows < GROUP_ROWS <= work.columns else 1.0
    if config.specialized and work.products > 1:
        shape *= c.specialized * (c.several if work.products > 2 else 1.0) * (c.many if work.products > 3 else 1.0)
    return shape


def _tripled_shape(work: Work, config: KernelConfig, c: Rates) -> float:
    """Return how much longer than at best three TF32 products take for tiles of this shape.

    A warp group multiplies 64 rows or more. It reads columns from shared memory along the sum: others are turned round on the way, for each block of rows
    again, element by element where masks keep them from being loaded in vectors. Rows that lie across the sum reach registers element by element too.
    """
    rows, columns = work.rows, work.columns
    groups, each = config.warps / GROUP, work.products * rows * columns / (WARP * config.warps)
    shape = c.shallow if work.depth < DEEP else 1.0
    if each > ACCUMULATORS:
        shape *= c.crammed
    if groups < 1 or rows < GROUP_ROWS:
        return shape * c.old_tripled * (1.0 + c.few_rows / max(rows * columns / 64, 16))
    shape *= c.crammed if rows < 16 * config.warps and columns > 64 else 1.0 + 6.0 / rows + LARGER[0] * (rows > 128) + LARGER[1] * (columns > 64)
    shape *= 1.0 + ACROSS / columns if work.across else 1.0
    if work.crossed:
        shape += c.turned * columns / rows
        shape *= c.masked if work.masked else 1.0
    return shape


def float32_factor(work: Work, config: KernelConfig) -> float:
    """Return how much longer single float32 products take than the rates say.

    Threads that read columns along the sum meet in the same banks of shared memory, the more often the fewer sums each has. Fitted after the rates, to 73
    products on an H100.
    """
    if work.itemsize < 4 or work.tripled or work.ordinary or not work.rows or work.products > 1:
        return 1.0
    each = work.rows * work.columns / (WARP * config.warps)
    return TRIED * (1.0 if work.crossed else max(1.0, 0.75 + 80 / each))


def _load_latency(work: Work, config: KernelConfig, c: Rates) -> float:
    """Return the microseconds that a program takes by itself, waiting for its loads."""
    stages = config.stages if work.rows else max(config.all_of("stages_of").values(), default=1)
    if work.products and (work.narrow or work.pairs or config.persistent and not work.fetched):
        stages = 1  # loads wait for one another in registers; those of a sum over pairs are in a loop inside the product's
    ahead = max(1.0, min(stages - 1.0, work.steps))
    found = c.start + c.gather * work.gathered + work.steps * (c.latency / ahead + c.step * max(1, work.products) + c.sync * config.warps)
    found += _requests(work, c) / (c.warp_rate * config.warps) + work.issued / (c.issue * (INDEPENDENT if work.pairs else 1.0))
    if work.rows:  # products of one iteration that follow on one another
        found += work.multiplied / _rate(work, c) * c.alone * (c.few_warps if config.warps < GROUP and work.itemsize < 4 else 1.0)
        found += c.serial * (work.heavy / c.special + work.light / c.plain) / config.warps
    return found
