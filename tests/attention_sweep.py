"""Attention's backward: programs with schedules, in one sweep over the queries, by a kernel for each gradient and by default, and the gradients in float64."""

from __future__ import annotations

import math

import torch

from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.target import Target
from dtkernels.lang.parser import parse_schedule
from dtkernels.lang.schedule import Program, Schedule
from dtkernels.lang.schedule_checks import check_schedule
from dtkernels.ops.registry import shipped
from dtkernels.runtime.bind.variant import Variant

OUTPUTS = ("d_Q", "d_K", "d_V")


def backward(params: dict) -> Variant:
    """The gradients for Q, K and V, derived."""
    return shipped("attention").variant(tuple(sorted(params.items())), frozenset(), 0).pair(("Q", "K", "V")).backward


def one_sweep(params: dict, keys: int, rows: int, span: int = 0, order: str = "", more: str = "") -> Program:
    """The gradients for Q, K and V: blocks of ``span`` keys in tiles of ``keys``, 0 for all at once, a loop over the queries, d_Q accumulated."""
    algorithm = backward(params).algorithm
    grouped = params.get("group", 1) > 1
    heads, inner = ("K_1", ", h_in:1") if grouped else ("h", "")
    text = f"""d_V.fuse_at(d_K, {'h_in' if grouped else 'm'}); d_Q.accumulate_at(d_K, m{order});
    d_K.block(b:1, {heads}:1{f', l:{span or keys}' if keys else ''}); d_K.tensorize(b:1, {heads}:1, l:{keys}, d:0, n:0, m:{rows}{inner}); {'d_K.reorder(h_in, m);' if grouped else ''}
    d_Q.block(b:1, h:1, m:32); d_Q.tensorize(b:1, h:1, m:32, d:0); {more}
    {'' if 'd_total' in more else 'd_total.block(b:1, h:1, m:32); d_total.tensorize(b:1, h:1, m:32, n:0);'}"""
    fused = "".join(f"{f}.fuse_at(d_K, m); " for f in algorithm.funcs if f not in (*OUTPUTS, "d_total"))
    schedule = parse_schedule(fused + text + "".join(f"{o}.compile();" for o in OUTPUTS))
    check_schedule(schedule, algorithm)
    return Program(algorithm, Schedule(schedule.primitives))


def arguments(program: Program, params: dict, sizes: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> tuple[list, list[torch.Tensor]]:
    """Numbers for the wrapper, and the gradients that they have in float64."""
    b, h, m, l, d = sizes  # noqa: E741
    torch.manual_seed(seed)
    shared = h // params.get("group", 1)
    q, k, v, grad = (torch.randn(shape).to(dtype) for shape in ((b, h, m, d), (b, shared, l, d), (b, shared, l, d), (b, h, m, d)))
    numbers = {"scale": 1 / math.sqrt(d), "cap": 3.0, "first": -9, "last": 5}
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    keys, values = (t.repeat_interleave(h // shared, 1) for t in wide[1:])
    scores = numbers["scale"] * wide[0] @ keys.transpose(-1, -2)
    scores = numbers["cap"] * torch.tanh(scores / numbers["cap"]) if params.get("capped") else scores
    i, j = torch.arange(m)[:, None], torch.arange(l)[None]
    seen = torch.ones(m, l, dtype=torch.bool)
    for name, holds in (("causal", j <= i), ("starts", j >= i + numbers["first"]), ("ends", j <= i + numbers["last"])):
        seen &= holds if params.get(name) else True
    scores = scores.masked_fill(~seen, -math.inf)
    logs = torch.logsumexp(scores, -1)
    result = torch.exp(scores - torch.where(logs > -math.inf, logs, 0.0)[..., None]) @ values
    result.backward(grad.double())
    given = {"Q": q, "K": k, "V": v, "d_attention": grad, "total_log": logs.detach().float(), "attention": result.detach().to(dtype), **numbers}
    return [given[n] for n in (*program.algorithm.inputs, *program.algorithm.scalars)], [t.grad for t in wide]


def apart(params: dict, columns: int, more: str = "") -> Program:
    """The gradients for Q, K and V by a kernel each, all of specialized warps; heads of ``columns`` columns."""
    algorithm = backward(params).algorithm
    grouped = params.get("group", 1) > 1
    heads, inner, around = ("K_1", ", h_in:1", "{0}.reorder(h_in, m); ") if grouped else ("h", "", "")
    step = 32 if columns > 128 else 64
    text = "".join(f"{f}.fuse_at(d_Q, l); " for f in algorithm.funcs if f not in (*OUTPUTS, "d_total"))
    text += "d_total.block(b:1, h:1, m:32); d_total.tensorize(b:1, h:1, m:32, n:0); "
    kernels = {"d_Q": ("h", "m", "l", step, "", "K, V, Q, d_attention"), "d_K": (heads, "l", "m", step, inner, "K, V, Q, d_attention"), "d_V": (heads, "l", "m", 64, inner, "K, Q, d_attention")}
    for func, (head, row, loop, tile, nested, read) in kernels.items():
        text += f"{func}.block(b:1, {head}:1, {row}:128); {func}.tensorize(b:1, {head}:1, {row}:128, d:0, n:0, {loop}:{tile}{nested}); {func}.descriptor({read}); "
        text += f"{func}.persistent(); {func}.stages({loop}:2); {func}.specialize_warps({loop}); {func}.num_warps(8); " + (around.format(func) if nested else "")
    schedule = parse_schedule(text + more + "".join(f"{o}.compile();" for o in OUTPUTS))
    check_schedule(schedule, algorithm)
    return Program(algorithm, Schedule(schedule.primitives))


def by_default(params: dict, sizes: tuple[int, ...], target: Target) -> Program:
    """The gradients for Q, K and V by the default schedule for batches, heads, queries, keys and columns of 16 bits."""
    b, h, m, l, d = sizes  # noqa: E741
    algorithm = backward(params).algorithm
    group = params.get("group", 1)
    extents = {"b": b, "h": h, "m": m, "l": l, "d": d, "n": d} | ({"K_1": h // group, "h_in": group} if group > 1 else {})
    return Program(algorithm, default_schedule(algorithm, OUTPUTS, extents, 2, target))


def check_gradients(module, program, params: dict, sizes: tuple[int, ...]) -> None:
    """Compare the gradients for Q, K and V of a wrapper, on the GPU, with those in float64."""
    given, exact = arguments(program, params, sizes, torch.bfloat16)
    found = module.call(*(x.cuda() if isinstance(x, torch.Tensor) else x for x in given))
    for got, right in zip(found, exact):
        error = (got.double().cpu() - right).norm() / right.norm()
        assert error <= 2.0**-7, "operands and results are rounded to 8 bits, some of them twice"
