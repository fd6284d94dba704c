"""Time three forms of an op under torch.compile, alone and in a chain: one kernel, opened for Inductor to fuse, and torch's own expression.

python tools/bench_torch_compile.py --json out.json
python tools/bench_torch_compile.py --ops relu,softmax --boundary    the host's time for one call inside a graph instead
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from common.cli_types import Parser, at_least, file_to_write, some_of
from common.timing import write_figures

SHAPES = ((16384, 4096), (4096, 16384), (1024, 4096))
F = torch.nn.functional
NATIVE = {
    "relu": torch.relu,
    "softmax": lambda x: torch.softmax(x, -1),
    "dyt": lambda x, w, b, a: torch.tanh(a * x) * w + b,
    "rmsnorm": lambda x, w, e: F.rms_norm(x, x.shape[-1:], w, 1e-5),
    "layernorm": lambda x, w, b, e: F.layer_norm(x, x.shape[-1:], w, b, 1e-5),
    "swiglu": lambda x, u: F.silu(x) * u,
    "geglu": lambda x, u: F.gelu(x, approximate="tanh") * u,
}
#: inputs of each op after the first: rows of weights (w), one number (1), another tensor of the same shape (x)
MORE = {"relu": "", "softmax": "", "dyt": "ww1", "rmsnorm": "w1", "layernorm": "ww1", "swiglu": "x", "geglu": "x"}
CALLS = 64  #: of one op in a graph whose calls are timed
LIBRARY = torch.library.Library("bench", "FRAGMENT")
CHAINS = {
    "alone": lambda f, x, y, *more: f(x, *more),
    "chain": lambda f, x, y, *more: f(x * 0.5 + y, *more) * y,
}


def forms(op: str) -> dict:
    """Return name -> the op as a function that torch.compile traces."""
    import dtkernels.ops
    from dtkernels.runtime.bind import library_ops

    getattr(dtkernels.ops, op).operator()
    library_ops.ensure(op)
    return {"kernel": getattr(torch.ops.dtkernels, op), "fuse": getattr(torch.ops.dtkernels, f"{op}_open"), "torch": NATIVE[op]}


def times(op: str, shape: tuple[int, int], chain: str) -> list[dict]:
    """Return times of forward, and of forward and backward, of each form in milliseconds."""
    from triton.testing import do_bench

    x, y = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    more = [
        torch.full({"w": shape[1:], "1": (1,), "x": shape}[m], 1e-5 if m == "1" else 0.5, device="cuda", dtype=x.dtype) for m in MORE[op]
    ]
    found = []
    for name, form in forms(op).items():
        torch._dynamo.reset()

        def work(x, y, *more, form=form):
            return CHAINS[chain](form, x, y, *more)

        compiled = torch.compile(work, fullgraph=True)
        with torch.no_grad():
            forward = do_bench(lambda compiled=compiled: compiled(x, y, *more), return_mode="median")
        leaves = [t.clone().requires_grad_(t.numel() > 1 or op == "dyt") for t in (x, *more)]
        grad = torch.randn_like(x)

        def both(leaves=leaves, compiled=compiled, grad=grad):
            torch.autograd.grad(compiled(leaves[0], y, *leaves[1:]), [t for t in leaves if t.requires_grad], grad)

        line = {
            "op": op,
            "shape": shape,
            "where": chain,
            "form": name,
            "forward_us": forward * 1e3,
            "both_us": do_bench(both, return_mode="median") * 1e3,
        }
        print(line, flush=True)
        found.append(line)
    return found


def boundary(op: str) -> list[dict]:
    """Return the host's microseconds for one call inside a graph: of the op, and of an operator that only allocates its result.

    A graph holds CALLS of them in a row on 512 bytes, which the GPU computes faster than the host launches them. With gradients a call
    is a forward and a backward; the operator that only allocates has none.
    """
    more = [torch.full({"w": (128,), "1": (1,), "x": (2, 128)}[m], 0.5, device="cuda", dtype=torch.bfloat16) for m in MORE[op]]
    x = torch.randn(2, 128, device="cuda", dtype=torch.bfloat16)
    found = []
    for name, form in (("kernel", forms(op)["kernel"]), ("allocates", _allocates())):
        torch._dynamo.reset()

        def chain(x, *more, form=form, rest=name == "kernel"):
            for _ in range(CALLS):
                x = form(x, *(more if rest else ()))
            return x

        compiled = torch.compile(chain, fullgraph=True)
        with torch.no_grad():
            line = {"op": op, "form": name, "forward_us": _host_us(lambda compiled=compiled: compiled(x, *more))}
        if name == "kernel":
            leaf, grad = x.clone().requires_grad_(), torch.randn_like(x)
            line["both_us"] = _host_us(lambda compiled=compiled, leaf=leaf, grad=grad: torch.autograd.grad(compiled(leaf, *more), leaf, grad))
        print(line, flush=True)
        found.append(line)
    return found


def _allocates() -> Callable:
    """Return an operator that allocates a tensor like its argument and does nothing else: what torch alone takes for a call."""
    if not hasattr(torch.ops.bench, "allocates"):
        LIBRARY.define("allocates(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl("allocates", torch.empty_like, "CompositeExplicitAutograd")
    return torch.ops.bench.allocates


def _host_us(run: Callable) -> float:
    """Return the median host time of one of the CALLS of a run."""
    times = []
    for repeat in range(60):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        if repeat >= 10:
            times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6 / CALLS


def main(argv: list[str] | None = None) -> int:
    parser = Parser("bench_torch_compile", __doc__)
    parser.add_argument("--json", type=file_to_write, help="write the figures here")
    parser.add_argument("--ops", type=some_of(NATIVE), default=tuple(NATIVE), help=f"comma-separated: {', '.join(NATIVE)}")
    parser.add_argument("--shapes", type=at_least(1), default=len(SHAPES), metavar="N", help="only the first N shapes")
    parser.add_argument("--boundary", action="store_true", help="time the host for one call inside a graph")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench_torch_compile: no GPU: torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    figures = []
    for op in options.ops if options.boundary else ():
        figures += boundary(op)
        if options.json:
            write_figures(options.json, figures)
    for op in () if options.boundary else options.ops:
        for shape in SHAPES[: options.shapes]:
            for chain in CHAINS:
                try:
                    figures += times(op, shape, chain)
                except Exception as error:  # one form that fails must not lose the rest
                    print(op, shape, chain, type(error).__name__, str(error).splitlines()[:3], flush=True)
                if options.json:
                    write_figures(options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
