"""Measure problems on a GPU by the suite's rules: five random inputs, its tolerances, then times with a cold L2."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import bench
import torch
from common import timing
from problem import DTYPES, TOLERANCE, Problem, as_tuple, operations, operator, problems

TRIALS = 5  #: random inputs that must be right
FAST = (0.8, 1.0, 1.5, 2.0)  #: p of fast_p
PEERS: dict[str, Callable[[Callable], Callable]] = {
    "eager": lambda fn: fn,
    "compile": lambda fn: torch.compile(fn, dynamic=False),
    "compile-max": lambda fn: torch.compile(fn, dynamic=False, mode="max-autotune-no-cudagraphs"),  # calls are captured here anyway
}


@dataclass(frozen=True)
class Case:
    """One problem in one dtype, forward, or forward and backward together."""

    level: int
    name: str
    dtype: str
    backward: bool

    def __str__(self) -> str:
        return f"{self.level}/{self.name}{' backward' if self.backward else ''} {self.dtype}"

    @property
    def problem(self) -> Problem:
        return problems(self.level)[self.name]


class Call:
    """A case with its tensors for one seed."""

    def __init__(self, case: Case, seed: int):
        self.problem, self.backward = case.problem, case.backward
        self.inputs = self.problem.tensors(self.problem.published, DTYPES[case.dtype], "cuda", seed)
        self.wanted = tuple(list(self.problem.inputs).index(name) for name in self.problem.differentiated()) if case.backward else ()
        self.grads: tuple[torch.Tensor, ...] = ()
        if self.wanted:
            with torch.no_grad():
                shapes = [(o.shape, o.dtype) for o in as_tuple(self.problem.reference(*self.inputs, *self.problem.scalars.values()))]
            self.grads = tuple(torch.rand(s, dtype=dtype, device="cuda") for s, dtype in shapes)

    def results(self, fn: Callable, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """Return the outputs of ``fn``, or the gradients; in ``dtype`` if it is given."""
        tensors, grads = self.inputs, self.grads
        if dtype is not None:
            tensors, grads = (tuple(t.to(dtype) if t.is_floating_point() else t for t in ts) for ts in (tensors, grads))
        scalars = self.problem.scalars.values()
        if not self.wanted:
            with torch.no_grad():
                return list(as_tuple(fn(*tensors, *scalars)))
        leaves = [t.detach().requires_grad_(i in self.wanted) for i, t in enumerate(tensors)]
        return list(torch.autograd.grad(as_tuple(fn(*leaves, *scalars)), [leaves[i] for i in self.wanted], grads))


def differs(got: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float, gradients: bool = False) -> str:
    """Return how results differ by more than the suite allows, "" where they do not.

    The suite has no rule for gradients. Those of weights are sums of millions of terms that cancel: what it allows absolutely is taken of their root mean square.
    """
    for ours, torchs in zip(got, expected, strict=True):
        if ours.shape != torchs.shape:
            return f"shape {tuple(ours.shape)}, expected {tuple(torchs.shape)}"
        allowed = tolerance * max(1.0, (torchs.double().norm() / max(1, torchs.numel()) ** 0.5).item()) if gradients else tolerance
        if not torch.allclose(ours, torchs.to(ours.dtype), atol=allowed, rtol=tolerance):
            return f"off by {(ours.double() - torchs.double()).abs().max().item():.2g}, allowed {allowed:.2g} absolute and {tolerance:.2g} relative"
    return ""


def error_of(got: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    """Return the norm of the difference from float64 over the norm of float64, of the worst result."""
    norms = [((g.double() - t).norm() / t.norm().clamp_min(1e-300)).item() for g, t in zip(got, truth, strict=True) if t.is_floating_point()]
    return math.nan if any(map(math.isnan, norms)) else max(norms, default=0.0)


def correctness(case: Case, op: Callable) -> dict:
    """Compare with torch on five random inputs, and of the first also with float64. ``wrong`` says what is wrong, "" if nothing is.

    A result that differs from torch's and agrees with float64 is right. So are gradients at most twice as far from float64 as torch's, as in
    sampling/checking.py: where rounding turns a comparison, as of a maximum, a whole row of them is another one, and some are sums of roundings alone.
    """
    found: dict = {"wrong": ""}
    for seed in range(TRIALS):
        call = Call(case, seed)
        got, expected = call.results(op), call.results(case.problem.reference)
        wrong = differs(got, expected, TOLERANCE[case.dtype], case.backward)
        if seed == 0 or wrong:
            try:
                truth = call.results(case.problem.reference, torch.float64)
                errors = error_of(got, truth), error_of(expected, truth)
                found |= dict(zip(("error", "eager_error"), errors)) if seed == 0 else {}
                if wrong and not differs(got, truth, TOLERANCE[case.dtype], case.backward):
                    found["eager_note"] = f"torch's own result differs from float64 by more than is allowed, ours does not; {wrong}"
                    wrong = ""
                elif wrong and case.backward and errors[0] <= 2 * errors[1]:
                    found["eager_note"] = f"both differ from float64, torch's by {errors[1]:.1e} and ours by {errors[0]:.1e} of its norm; {wrong}"
                    wrong = ""
                del truth
            except torch.OutOfMemoryError:
                found["error_note"] = "no memory for float64"
        found["wrong"] = found["wrong"] or (f"input {seed}: {wrong}" if wrong else "")
        del call, got, expected
        torch.cuda.empty_cache()
    return found


def times(case: Case, op: Callable, peers: tuple[str, ...]) -> tuple[dict[str, float], dict[str, str]]:
    """Return (microseconds by implementation, notes on those that failed or could not be captured)."""
    call, scalars, direction = Call(case, 0), tuple(case.problem.scalars.values()), "both" if case.backward else "forward"

    def prepared(make: Callable):
        fn = make(case.problem.reference)
        return bench.preparation(lambda *t: fn(*t, *scalars), call.inputs, call.wanted, direction, call.grads)

    return timing.times_by_turns({who: partial(prepared, make) for who, make in {"dtkernels": lambda fn: op, **{p: PEERS[p] for p in peers}}.items()})


def make_preparer(index: int, peers: tuple[str, ...]):
    """Make the handler of a process that compiles a case, for a later process of this machine. It times and checks nothing."""
    torch._functorch.config.donated_buffer = False
    torch.backends.cudnn.allow_tf32 = False

    def prepare(case: Case) -> None:
        call, problem = Call(case, 0), case.problem
        for fn in (operator(case.level, case.name), *(PEERS[p](problem.reference) for p in peers if p != "eager")):
            with contextlib.suppress(Exception):  # measuring tries again, and says what failed
                call.results(fn)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        torch._dynamo.reset()

    return prepare


def measure(case: Case, peers: tuple[str, ...]) -> dict:
    """Return what was found of one case: whether it is right, times, speedups, and how near it comes to the GPU's limits."""
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    op, problem = operator(case.level, case.name), case.problem
    found = correctness(case, op)
    us, notes = times(case, op, peers)
    found |= notes | {"us": us}
    if "dtkernels" not in us:
        return found | {"failed": notes["dtkernels_note"]}
    ours = us["dtkernels"]
    found["speedup"] = {who: t / ours for who, t in us.items() if who != "dtkernels"}
    if not case.backward:
        dtype = DTYPES[case.dtype]
        moved = problem.bytes(problem.published, dtype.itemsize)
        flops = operations(problem, op.spec.algorithm, problem.published)
        limit = max(timing.copy_time(min(moved, 4 << 30)) * max(1.0, moved / (4 << 30)), flops / timing.product_rate(dtype) * 1e6 if flops else 0.0)
        found |= {"bytes": moved, "flops": flops, "fraction": limit / ours}
    return found


def line(case: Case, found: dict) -> str:
    """Format one row of the table."""
    if "failed" in found:
        return f"{str(case):58} FAILED {found['failed']}"
    ours = found["us"]["dtkernels"]
    peers = " ".join(f"{who} {t:9.1f} ({found['speedup'][who]:.2f})" for who, t in found["us"].items() if who != "dtkernels")
    said = [f"WRONG {found['wrong']}"] if found["wrong"] else []
    said += [f"of limit {found['fraction']:.2f}"] if "fraction" in found else []
    said += [f"error {found['error']:.1e} (eager {found['eager_error']:.1e})"] if "error" in found else []
    said += [f"{k}: {v}" for k, v in found.items() if k.endswith("_note")]
    return f"{str(case):58} ours {ours:9.1f} {peers} {' '.join(said)}".rstrip()


def fast(found: dict[str, dict], who: str, p: float, asked: int) -> float:
    """Return fast_p against one peer, or against the fastest of all ("best"): the share of all problems asked for that are right and
    more than ``p`` times as fast as the peer. One that was refused or failed counts as not fast."""
    speedups = [r["speedup"] for r in found.values() if not r.get("wrong") and r.get("speedup")]
    ratios = [min(s.values()) if who == "best" else s[who] for s in speedups if who == "best" or who in s]
    return sum(ratio > p for ratio in ratios) / asked if asked else math.nan


def summary(found: dict[str, dict], peers: tuple[str, ...], asked: int) -> str:
    """Return how many were measured, failed and were wrong, and fast_p for each peer."""
    failed, wrong = (sum(bool(r.get(k)) for r in found.values()) for k in ("failed", "wrong"))
    said = [f"{len(found)} of {asked} cases; failed {failed}, wrong {wrong}"]
    for who in (*peers, *(["best"] if len(peers) > 1 else [])):
        ratios = [min(s.values()) if who == "best" else s[who] for r in found.values() if (s := r.get("speedup")) and (who == "best" or who in s)]
        mean = math.exp(statistics.fmean(map(math.log, ratios))) if ratios else math.nan
        shares = ", ".join(f"fast_{p:g} {fast(found, who, p, asked):.2f}" for p in FAST)
        said.append(f"{who:11} {shares}; geometric mean of its time over ours {mean:.2f}")
    return "\n".join(said)
