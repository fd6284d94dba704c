"""How long does attention take by one tile for all columns of a head, and by several that are shorter together?

    python benchmarks/attention_columns.py --json columns.json          every size and form, on a GPU of compute capability 9.0
    python benchmarks/attention_columns.py --only '80 columns'          some of the sizes

Forms: "default", the default schedule; "warps", specialized warps with one tile; "triton", Triton's text with one tile; "seven" and "five",
gradients by specialized warps in kernels of seven products, and of five that add the queries' gradient to memory. With "in two" and the
like, by several tiles. bfloat16, medians of CUDA-graph replays with a cold L2; errors are of the results' norms, against cuDNN's.
All forms are compiled by as many processes as ``--jobs`` first.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [p for p in (str(ROOT), str(ROOT / "tools"), str(ROOT / "benchmarks")) if p not in sys.path]

import attention_gradients  # noqa: E402
from attention_gradients import Case, Size  # noqa: E402
from common.cli_types import Parser, file_to_write, pattern  # noqa: E402
from common.timing import captured, gpu_time  # noqa: E402

from dtkernels.autoschedule.default_schedule import default_schedule  # noqa: E402
from dtkernels.codegen.emit.module import emit  # noqa: E402
from dtkernels.codegen.powers_of_two import UNITS, next_power_of_two, two_tiles  # noqa: E402
from dtkernels.codegen.target import target  # noqa: E402
from dtkernels.lang.errors import error_line  # noqa: E402
from dtkernels.lang.parser import parse_schedule  # noqa: E402
from dtkernels.lang.schedule import Program  # noqa: E402
from dtkernels.runtime.bind.operator import Variant  # noqa: E402
from dtkernels.runtime.build.source_cache import load_module  # noqa: E402
from dtkernels.tuning.records.problems import CallKind, variants_of  # noqa: E402

COLUMNS = (40, 80, 96, 112)
SIZES = {
    **{f"{d} columns{', causal' * causal}": Size(4, 16, 1, 2048, 2048, d, causal) for d in COLUMNS for causal in (False, True)},
    "112 columns, 22 heads share keys, short": Size(20, 44, 22, 306, 306, 112, False),
    "40 columns, 7 heads share keys, causal": Size(8, 7, 7, 6823, 6823, 40, True),
}
MORE = {
    **{f"{d} columns{', causal' * causal}": Size(4, 16, 1, 2048, 2048, d, causal) for d in (48, 72) for causal in (False, True)},
    "40 columns, 1024": Size(8, 16, 1, 1024, 1024, 40, False),
    "40 columns, 3000, causal": Size(2, 16, 1, 3000, 3000, 40, True),
    "40 columns, 8192": Size(1, 16, 1, 8192, 8192, 40, False),
    "80 columns, 500": Size(16, 16, 1, 500, 500, 80, False),
    "80 columns, 12 heads share keys in threes, 6685, causal": Size(2, 12, 3, 6685, 6685, 80, True),
    "96 columns, 1500, causal": Size(4, 32, 1, 1500, 1500, 96, True),
    "96 columns, 8192": Size(1, 16, 1, 8192, 8192, 96, False),
}
FILLED = 264  #: blocks of keys, for two rounds of an H200's multiprocessors
COMPILING = 0.6  #: part of the time, after which forms that are not compiled are left out
DIRECTIONS = ("forward", "backward")
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
TILED = "{0}.block(b:1, h:1, m:{1}); {0}.tensorize(b:1, h:1, m:{1}, d:0, n:0, l:{2}); "
WARPS = TILED.format("attention", 128, "{0}") + (
    "attention.persistent(); attention.descriptor(K, Q, V, attention); attention.stages(l:{1}); attention.specialize_warps(l); attention.num_warps(8); "
)


def variant_of(size: Size, direction: str) -> Variant:
    """Return the variant of the op's calls of this size."""
    params = (("causal", True),) * size.causal + (("group", size.group),) * (size.group > 1)
    backward = direction == "backward"
    return variants_of(CallKind("attention", direction, "bf16", params, ("Q", "K", "V") if backward else (), backward))[1]


def by_default(size: Size, direction: str) -> str:
    """Return the text of the default schedule for an H200."""
    variant, shared = variant_of(size, direction), {"K_1": size.h // size.group, "h_in": size.group} if size.group > 1 else {}
    sizes = {"b": size.b, "h": size.h, "m": size.m, "l": size.l, "d": size.d, "n": size.d, **shared}
    return str(default_schedule(variant.algorithm, variant.outputs, sizes, 2, target("h200")))


def with_tiles(text: str, labels: str) -> str:
    """Return a schedule whose kernels of products hold ``labels`` by two tiles."""
    text = re.sub(r"\w+\.two_tiles\([^)]*\);", "", text)
    for root in re.findall(r"(\w+)\.tensorize\((?=[^)]*\bd:0)(?=[^)]*\bn:0)", text):
        text += f" {root}.two_tiles({labels});" if labels else ""
    return text


def forms(size: Size, direction: str) -> Iterator[tuple[str, str]]:
    """Yield the forms of one direction, with their schedules."""
    default, several = by_default(size, direction), {"": ""}
    if sum(two_tiles(size.d, UNITS)) < next_power_of_two(size.d):
        several[", in two"] = "d, n"
    found = {"default": default}
    if direction == "forward":
        fused = "".join(re.findall(r"\w+\.fuse_at\([^)]*\);", default))
        end = "attention.compile();"
        bases = {"warps": fused + WARPS.format(128, 2) + end, "triton": fused + TILED.format("attention", 128, 64) + "attention.num_warps(8);" + end}
        bases["triton, 64 rows"] = fused + TILED.format("attention", 64, 64) + end
    else:
        programs = size.b * size.h // size.group * -(-size.l // 128)
        parts = next((p for p in (1, 2, 4, 8) if p * programs >= FILLED), 8) if size.group > 1 else 1
        bases = {"seven": attention_gradients.schedule(size, False, parts), "five": attention_gradients.schedule(size, True, parts)}
    if direction == "backward" and len(several) > 1:
        several |= {f", {label} in two": label for label in "dn"}
    found |= {name + word: with_tiles(text, labels) for name, text in bases.items() for word, labels in several.items()}
    found["default, one tile"] = with_tiles(default, "")
    if direction == "forward":  # results by one tile: narrow products take longer than their work
        found |= {f"warps, d{word}": with_tiles(bases["warps"], "d") for word, labels in several.items() if labels}
    seen = set[str]()
    for name, text in found.items():
        statements = str(sorted(re.findall(r"[^;]+;", re.sub(r"\s", "", text))))
        if statements not in seen:
            yield name, text
        seen.add(statements)


@lru_cache(maxsize=1)
def case_of(size: Size) -> Case:
    return Case(size)


def of_schedule(size: Size, direction: str, text: str) -> Callable[[], object]:
    """Return a call by a schedule."""
    case = case_of(size)
    if direction == "backward":
        return case.of_schedule(text)
    variant = variant_of(size, direction)
    module = load_module(emit(Program(variant.algorithm, parse_schedule(text)), "call", target("h200"), True), "columns")
    given = {"Q": case.q, "K": case.k, "V": case.v}
    args = [given[n] for n in variant.algorithm.inputs] + [size.d**-0.5] * len(variant.algorithm.scalars)
    return lambda: module.call(*args)


def of_peer(size: Size, direction: str, peer: str) -> Callable[[], object]:
    """Return the call of one of torch's backends."""
    case, more = case_of(size), {"is_causal": size.causal, "enable_gqa": size.group > 1}

    def forward(*inputs: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel([PEERS[peer]]):
            return F.scaled_dot_product_attention(*inputs, **more)

    if direction == "forward":
        return lambda: forward(case.q, case.k, case.v)
    inputs = [t.clone().requires_grad_() for t in (case.q, case.k, case.v)]
    result = forward(*inputs)
    return lambda: torch.autograd.grad(result, inputs, case.grad, retain_graph=True)


def compile_form(size: Size, direction: str, text: str) -> str:
    """Compile a form by calling it once; return why that failed, '' where it did not."""
    try:
        of_schedule(size, direction, text)()
        torch.cuda.synchronize()
    except Exception as error:  # the timing process says so again
        return error_line(error, 200)
    return ""


def compile_all(cases: dict[tuple[str, str], dict[str, str]], sizes: dict[str, Size], jobs: int, until: float) -> int:
    """Compile all forms; remove those that are not done in time, and return their number."""
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))
    tasks = {pool.submit(compile_form, sizes[key[0]], key[1], text): (key, form) for key, asked in cases.items() for form, text in asked.items()}
    _, late = wait(tasks, max(1.0, until - time.monotonic()))
    pool.shutdown(wait=not late, cancel_futures=True)
    for key, form in (tasks[task] for task in late):
        del cases[key][form]
    return len(late)


def tensors(result: object) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else [t for t in result if t is not None]  # type: ignore[attr-defined]


def measure(size: Size, direction: str, asked: dict[str, str], until: float) -> dict[str, object]:
    """Check and time torch's backends and the forms of one size."""
    exact = tensors(of_peer(size, direction, "cudnn")())
    made: dict[str, Callable[[], Callable[[], object]]] = {p: (lambda p=p: of_peer(size, direction, p)) for p in PEERS}
    made |= {form: (lambda text=text: of_schedule(size, direction, text)) for form, text in asked.items()}
    found = dict[str, object]()
    for form, make in made.items():
        if time.monotonic() > until:
            found[form] = "no time left"
            continue
        try:
            results = tensors(make()())[: len(exact)]
            errors = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(results, exact)]
            call, _ = captured(make)
            found[form] = {"us": round(min(gpu_time(call, 20.0) for _ in range(2)), 1), "errors": [round(e, 5) for e in errors]}
        except Exception as error:  # one form that fails ends no others
            found[form] = error_line(error, 300)
    return found


def main(argv: list[str] | None = None) -> int:
    """Compile all forms, then time them."""
    parser = Parser("attention_columns", __doc__)
    parser.add_argument("--only", type=pattern, default=re.compile(""), metavar="REGEX", help="is looked for in the names of sizes")
    parser.add_argument("--forms", type=pattern, default=re.compile(""), metavar="REGEX", help="is looked for in the names of forms")
    parser.add_argument("--more", action="store_true", help="other sizes")
    parser.add_argument("--directions", type=pattern, default=re.compile(""), metavar="REGEX", help="is looked for in forward, backward")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="processes that compile")
    parser.add_argument("--seconds", type=float, default=140.0, help="of it all; what is left over then is not timed")
    parser.add_argument("--json", type=file_to_write, help="write every figure here")
    options = parser.parse_args(argv)
    begun, sizes = time.monotonic(), MORE if options.more else SIZES
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit("attention_columns: needs a GPU of compute capability 9.0")
    asked = [(name, way) for name in sizes if options.only.search(name) for way in DIRECTIONS if options.directions.search(way)]
    cases = {(name, way): {form: text for form, text in forms(sizes[name], way) if options.forms.search(form)} for name, way in asked}
    late = compile_all(cases, sizes, options.jobs, begun + COMPILING * options.seconds)
    print(f"compiled in {time.monotonic() - begun:.0f} s; {late} forms are left out", flush=True)
    found = dict[str, object]()
    for (name, way), texts in cases.items():
        found[f"{name}, {way}"] = times = measure(sizes[name], way, texts, begun + options.seconds)
        print(f"{name}, {way}: {json.dumps(times)}", flush=True)
    if options.json:
        about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "schedules": {f"{n}, {w}": texts for (n, w), texts in cases.items()}}
        Path(options.json).write_text(json.dumps({**about, "times": found}, indent=1))
    print(f"done in {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
