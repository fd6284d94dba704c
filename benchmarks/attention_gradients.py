"""How long do attention's gradients take by several schedules of the same program, beside cuDNN's?

    python benchmarks/attention_gradients.py                                     every size and form, on a GPU of compute capability 9.0
    python benchmarks/attention_gradients.py --only 'heads share' --profile      the kernels of each form, too

Forms: "op" is what a call gets; "specialized", kernels of the queries' and of the keys' gradients by specialized warps, seven products;
"sweep", one kernel of five products that adds the queries' gradient to memory; "sweep, parts N", the same with heads in N parts.
bfloat16, medians of CUDA-graph replays with a cold L2; errors are of the results' norms, against torch's own in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [p for p in (str(ROOT), str(ROOT / "tools")) if p not in sys.path]

from common.cli_types import Parser, file_to_write, pattern  # noqa: E402
from common.timing import captured, gpu_time  # noqa: E402

import dtkernels  # noqa: E402
from dtkernels.codegen.emit.module import emit  # noqa: E402
from dtkernels.codegen.target import target  # noqa: E402
from dtkernels.lang.errors import error_line  # noqa: E402
from dtkernels.lang.parser import parse_schedule  # noqa: E402
from dtkernels.lang.schedule import Program  # noqa: E402
from dtkernels.runtime.build.source_cache import load_module  # noqa: E402
from dtkernels.tuning.records.problems import CallKind, variants_of  # noqa: E402


class Size(NamedTuple):
    """Batches, heads, heads that share keys, queries, keys, columns."""

    b: int
    h: int
    group: int
    m: int
    l: int  # noqa: E741
    d: int
    causal: bool


SIZES = {
    "full": Size(4, 32, 1, 4096, 4096, 128, False),
    "causal": Size(4, 32, 1, 4096, 4096, 128, True),
    "16 heads share keys": Size(22, 16, 16, 1664, 1664, 128, False),
    "4 heads share keys, causal": Size(4, 32, 4, 4096, 4096, 128, True),
    "14 heads share keys, short": Size(4, 56, 14, 447, 447, 112, False),
    "64 columns": Size(4, 32, 1, 4096, 4096, 64, False),
    "96 columns": Size(4, 16, 1, 2048, 2048, 96, False),
    "1500 positions": Size(4, 32, 1, 1500, 1500, 128, False),
    "1500 positions, causal": Size(4, 32, 1, 1500, 1500, 128, True),
    "16384 positions, causal": Size(1, 32, 1, 16384, 16384, 128, True),
}
SPECIALIZED = "{0}.persistent(); {0}.stages({1}:3); {0}.specialize_warps({1}); {0}.num_warps(8); "


def schedule(size: Size, sweep: bool, parts: int = 1) -> str:
    """Return the text of a form."""
    inner = ["scores", "e", "d_e", "d_scores", *(("seen", "d_seen") if size.causal else ())]
    heads, loops = ("K_1", "h_in:1, m:64") if size.group > 1 else ("h", "m:64")
    host, loop = ("d_K", "m") if sweep else ("d_Q", "l")
    text = "".join(f"{f}.fuse_at({host}, {loop}); " for f in inner) + f"d_V.fuse_at(d_K, {'h_in' if size.group > 1 else 'm'}); "
    text += "d_total.block(b:1, h:1, m:32); d_total.tensorize(n:0, b:1, h:1, m:32); "
    text += f"d_K.block(b:1, {heads}:1, l:128); d_K.tensorize(b:1, {heads}:1, l:128, d:0, n:0, {loops}); " + SPECIALIZED.format("d_K", "m")
    text += "d_K.reorder(h_in, m); " if size.group > 1 else ""
    text += f"d_K.split(h_in:{parts}); " if parts > 1 else ""
    if sweep:
        text += "d_Q.accumulate_at(d_K, m); d_Q.block(b:1, h:1, m:32); d_Q.tensorize(b:1, h:1, m:32, d:0); d_K.descriptor(Q, d_attention, K, V, d_Q); "
    else:
        gathered = ", d_K, d_V" if parts == 1 else ""
        text += f"d_K.descriptor(Q, d_attention, K, V{gathered}); d_Q.block(b:1, h:1, m:128); d_Q.tensorize(b:1, h:1, m:128, d:0, n:0, l:64); "
        text += "d_Q.descriptor(K, V, Q, d_attention, d_Q); " + SPECIALIZED.format("d_Q", "l")
    return text + "d_Q.compile(); d_K.compile(); d_V.compile();"


def forms(size: Size) -> Iterator[tuple[str, str]]:
    """Yield the forms of a size, with their schedules."""
    yield "specialized", schedule(size, False)
    yield "sweep", schedule(size, True)
    yield from ((f"sweep, parts {n}", schedule(size, True, n)) for n in (2, 4) if size.group >= n)


class Case:
    """Inputs of one size, and what computes their gradients."""

    def __init__(self, size: Size):
        self.size = size
        torch.manual_seed(0)
        shapes = [(size.b, h, n, size.d) for h, n in ((size.h, size.m), (size.h // size.group, size.l), (size.h // size.group, size.l), (size.h, size.m))]
        self.q, self.k, self.v, self.grad = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes)
        with torch.no_grad(), sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]):
            self.result = F.scaled_dot_product_attention(self.q, self.k, self.v, is_causal=size.causal, enable_gqa=size.group > 1)
        self.log = torch.stack([self._log_sums(b) for b in range(size.b)])

    def _log_sums(self, b: int) -> torch.Tensor:
        """Return the logarithms of one batch's sums of exponentials, head by head: all scores would not fit."""
        rows = torch.arange(self.size.m, device="cuda")[:, None] < torch.arange(self.size.l, device="cuda")
        found = []
        for h in range(self.size.h):
            scores = (self.q[b, h] @ self.k[b, h // self.size.group].T).float() * self.size.d**-0.5
            found.append(torch.logsumexp(scores.masked_fill(rows, -torch.inf) if self.size.causal else scores, -1))
        return torch.stack(found)

    def of_torch(self) -> Callable[[], object]:
        """Return the backward of cuDNN."""
        inputs = [t.clone().requires_grad_() for t in (self.q, self.k, self.v)]
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            result = F.scaled_dot_product_attention(*inputs, is_causal=self.size.causal, enable_gqa=self.size.group > 1)
        return lambda: torch.autograd.grad(result, inputs, self.grad, retain_graph=True)

    def of_op(self) -> Callable[[], object]:
        """Return the op's backward."""
        inputs = [t.clone().requires_grad_() for t in (self.q, self.k, self.v)]
        result = dtkernels.ops.attention(*inputs, causal=self.size.causal)
        return lambda: torch.autograd.grad(result, inputs, self.grad, retain_graph=True)

    def of_schedule(self, text: str) -> Callable[[], object]:
        """Return the gradients for Q, K and V by a schedule."""
        params = (("causal", True),) * self.size.causal + (("group", self.size.group),) * (self.size.group > 1)
        variant = variants_of(CallKind("attention", "backward", "bf16", params, ("Q", "K", "V"), True))[1]
        program = Program(variant.algorithm, parse_schedule(text))
        module = load_module(emit(program, "call", target("h200"), True), "gradients")
        given = {"Q": self.q, "K": self.k, "V": self.v, "d_attention": self.grad, "total_log": self.log, "attention": self.result}
        args = [given[n] for n in variant.algorithm.inputs] + [self.size.d**-0.5] * len(variant.algorithm.scalars)
        order = [program.outputs().index(o) for o in ("d_Q", "d_K", "d_V")]

        def call() -> list[torch.Tensor]:
            results = module.call(*args)
            return [results[i] for i in order]

        return call


def kernels(call: Callable[[], object]) -> dict[str, float]:
    """Return the microseconds of each kernel of a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return {e.key[:40]: round(e.device_time_total, 1) for e in seen.key_averages()}


def measure(name: str, size: Size, options: argparse.Namespace) -> dict[str, object]:
    """Check and time the forms of one size; print a line for each."""
    case, found = Case(size), dict[str, object]()
    exact = case.of_torch()()
    made = {"cudnn": case.of_torch, "op": case.of_op, **{form: (lambda text=text: case.of_schedule(text)) for form, text in forms(size)}}
    for form, make in made.items():
        try:
            errors = [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(make()(), exact)]
            call, _ = captured(make)
            us = min(gpu_time(call) for _ in range(2))
            found[form] = {"us": us, "errors": errors, "kernels": kernels(call) if options.profile else {}}
            print(f"{name}: {form} {us:.1f} us, errors {', '.join(f'{e:.5f}' for e in errors)} {found[form]['kernels'] or ''}", flush=True)
        except Exception as error:  # one form that fails ends no others
            found[form] = error_line(error, 300)
            print(f"{name}: {form} failed: {found[form]}", flush=True)
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the sizes asked for."""
    parser = Parser("attention_gradients", __doc__)
    parser.add_argument("--only", type=pattern, default=re.compile(""), metavar="REGEX", help="is looked for in the names of sizes")
    parser.add_argument("--profile", action="store_true", help="the time of each kernel, too")
    parser.add_argument("--json", type=file_to_write, help="write every figure here")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit("attention_gradients: needs a GPU of compute capability 9.0")
    found = {name: measure(name, size, options) for name, size in SIZES.items() if options.only.search(name)}
    if options.json:
        Path(options.json).write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "sizes": found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
