"""How long does the loss of a last layer take, forward and backward, and how much memory beside the gradients?

    python benchmarks/last_layer.py                                    1024 to 16384 rows of 4096 beside 128256 classes, bfloat16
    python benchmarks/last_layer.py --rows 8192 --classes 151936 --peers eager,compile,liger,torch

Each figure is the median of --repeat forward and backward passes of the mean loss, timed by events; ``held`` is the peak of memory less what is there before and less
the gradients. Losses and gradients are checked against float32 logits of --check rows at a time. ``by rows`` is the mean of our
losses of each row, whose gradients backward forms in pieces of the logits. ``torch`` is torch.nn.functional.linear_cross_entropy, where there is one.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from common import timing  # noqa: E402
from common.cli_types import Parser  # noqa: E402

import dtkernels  # noqa: E402

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
PEERS = ("eager", "compile", "liger", "torch")
MOST = 0.02  #: error of a gradient, of its largest element: bfloat16 logits of about 6 are rounded by 2^-9 of that


def eager(h: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((h @ w.T).float(), t)


def by_rows(h: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return dtkernels.ops.linear_cross_entropy(h, w, t, reduction="none").mean()


def losses(peers: list[str]) -> dict[str, Loss]:
    """Return the losses to time, ours first."""
    found: dict[str, Loss] = {"dtkernels": dtkernels.ops.linear_cross_entropy, "by rows": by_rows}
    if "eager" in peers:
        found["eager"] = eager
    if "compile" in peers:
        found["compile"] = torch.compile(eager)
    if "liger" in peers:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as liger

        found["liger"] = lambda h, w, t: liger(h, w, t)
    if "torch" in peers and hasattr(F, "linear_cross_entropy"):
        found["torch"] = lambda h, w, t: F.linear_cross_entropy(h, w, t)
    return found


def truth(h: torch.Tensor, w: torch.Tensor, t: torch.Tensor, each: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the mean loss and its gradients by float32 logits, ``each`` rows at a time."""
    total, dh, dw = torch.zeros((), device=h.device), torch.empty_like(h, dtype=torch.float32), torch.zeros_like(w, dtype=torch.float32)
    for first in range(0, len(h), each):
        rows, targets = h[first : first + each].float(), t[first : first + each]
        z = rows @ w.float().T
        total += F.cross_entropy(z, targets, reduction="sum") / len(h)
        z = z.softmax(1)
        z[torch.arange(len(targets), device=h.device), targets] -= 1
        dh[first : first + each] = z @ w.float() / len(h)
        dw += z.T @ rows / len(h)
    return total, dh, dw


def measure(loss: Loss, h: torch.Tensor, w: torch.Tensor, t: torch.Tensor, repeat: int) -> tuple[list[torch.Tensor], float, float]:
    """Return [loss, gradients], the median of milliseconds, and the bytes held beside the gradients."""
    times: list[float] = []
    for _ in range(repeat + 2):
        h.grad = w.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        value = loss(h, w, t)
        value.backward()
        end.record()
        torch.cuda.synchronize()
        held = torch.cuda.max_memory_allocated() - before - sum(g.numel() * g.itemsize for g in (h.grad, w.grad))
        times.append(start.elapsed_time(end))
    return [value.detach(), h.grad, w.grad], statistics.median(times[2:]), held


def main() -> int:
    parser = Parser("last_layer", __doc__)
    parser.add_argument("--rows", default="1024,4096,8192,16384")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--classes", type=int, default=128256)
    parser.add_argument("--peers", default=",".join(PEERS), help=f"of {', '.join(PEERS)}; empty for none")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--check", type=int, default=512, help="rows of the reference's logits at a time")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    figures: list[dict] = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, {options.hidden} columns, {options.classes} classes")
    print(f"{'rows':>6} {'':10} {'ms':>8} {'held MiB':>9} {'TFLOP/s':>8} {'error':>8}   of three products")
    for rows in map(int, options.rows.split(",")):
        torch.manual_seed(rows)
        h = torch.randn(rows, options.hidden, device="cuda").bfloat16().requires_grad_()
        w = (torch.randn(options.classes, options.hidden, device="cuda") / options.hidden**0.5 * 1.5).bfloat16().requires_grad_()
        t = torch.randint(options.classes, (rows,), device="cuda")
        wanted = truth(h.detach(), w.detach(), t, options.check)
        for name, loss in losses(options.peers.split(",")).items():
            try:
                found, ms, held = measure(loss, h, w, t, options.repeat)
            except torch.OutOfMemoryError:
                print(f"{rows:6} {name:10} out of memory", flush=True)
                continue
            error = max(float((a.float() - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted))
            tflops = 6e-9 * rows * options.hidden * options.classes / ms
            figures.append({"rows": rows, "hidden": options.hidden, "classes": options.classes, "of": name, "ms": ms, "held": held, "error": error})
            print(f"{rows:6} {name:10} {ms:8.2f} {held / 2**20:9.0f} {tflops:8.0f} {error:8.1e}{'   WRONG' if error > MOST else ''}", flush=True)
            del found
        h.grad = w.grad = None
    if options.json:
        timing.write_figures(options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
