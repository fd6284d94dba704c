"""Time whole Hugging Face models with random weights: forward, training step and generate; patched, sdpa, torch.compile and Liger.

    python tools/bench_models.py --models llama,opt --lengths 2048,8192 --json out.json
    python tools/bench_models.py --models llama --work train --variants sdpa,liger,dtkernels,dtkernels:all,dtkernels:attention:rope
    python tools/bench_models.py --models toy --lengths 16 --tokens 64 --new 4 --repeats 1 --variants sdpa,dtkernels    # seconds, on a CPU too
    python tools/bench_models.py --device cpu    # minutes: a patched model should need no more time and memory than before

    python tools/bench_models.py --models llama --work generate --lengths 2048 --rounds 1 --repeats 3 --variants sdpa,dtkernels,dtkernels+graphs,sdpa+compile

A model named TYPE-4 is of that model type of transformers, with four layers of 2048 columns.

A variant is a patch: sdpa (no patch), liger (its full patch of the model), dtkernels (ops="auto"), dtkernels:OP:OP (only these ops). A suffix
says how it runs: +compile by torch.compile, +backend by torch.compile with dtkernels.compile_backend, +backend:OP:OP with these ops replaced, and
+graphs, ours alone, by CUDA graphs in generate. Variants run in turn on the same weights, first in the given order, then in the opposite one, because
a process changes as it runs. The loss and the tokens of each are compared with those of the first variant. A table of all figures is printed last.

On a GPU the peak memory is torch's own count. On a CPU it is the growth of the resident set of a process that runs this
variant alone, from before the model is made to its highest point.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from common.require_packages import needs

    needs("bench_models", "torch", "transformers")

import torch
import transformers
from common.cli_types import Parser, at_least, device, file_to_write, several, some_of
from common.model_shapes import SHAPES, build
from dtkernels.integrations.huggingface import patched
from dtkernels.integrations.huggingface.apply import OPS
from dtkernels.integrations.torch_compile.report import forget, replacements
from dtkernels.integrations.torch_compile.table import OPS as REPLACED

import dtkernels
from dtkernels.lang.errors import error_line

WORK = ("forward", "train", "checkpoint", "generate")
#: measured unless options say otherwise
ON_GPU = {"models": ("llama", "opt"), "work": ("train", "generate"), "lengths": (2048, 8192), "tokens": 8192, "new": 64, "repeats": 5, "rounds": 2}
ON_CPU = {"models": ("small",), "work": WORK, "lengths": (2048,), "tokens": 2048, "new": 16, "repeats": 2, "rounds": 4, "variants": ("sdpa", "dtkernels", "dtkernels:all")}
CLOCKS = {"wall": time.perf_counter, "process": time.process_time}
VARIANTS = ("sdpa", "dtkernels", "dtkernels:all", "liger", "sdpa+compile", "dtkernels+compile")


@dataclass
class Figure:
    """One kind of work of one model by one variant: the median of all rounds and of each round, and the highest peak memory."""

    model: str
    work: str
    length: int
    batch: int
    variant: str
    milliseconds: float | None
    peak_gib: float | None
    agreement: str  # agreement with the first variant: the loss, or the share of equal tokens
    fallbacks: int = 0
    note: str = ""
    rounds: list[float] = field(default_factory=list)  #: medians, ms
    times: list[float] = field(default_factory=list)  #: all of them, ms


def variants(text: str) -> tuple[str, ...]:
    """Parse variants separated by commas, for argparse."""
    found = tuple(dict.fromkeys(text.split(",")))
    for variant in found:
        patch, how = _parts(variant)
        if how[:1] == ["graphs"] and patch[0] != "dtkernels":
            raise argparse.ArgumentTypeError(f"unknown variant {variant!r}; allowed with +graphs: dtkernels, dtkernels:OP")
        if patch[0] not in ("sdpa", "liger", "dtkernels") or patch[1:] and patch[0] != "dtkernels" or how not in ([], ["compile"], ["graphs"]) and how[0] != "backend":
            raise argparse.ArgumentTypeError(
                f"unknown variant {variant!r}; allowed: sdpa, liger, dtkernels, dtkernels:OP, each with +compile, +backend or +backend:OP, ours with +graphs"
            )
        for ops, allowed in ((patch[1:], OPS), (how[1:], REPLACED)):
            if unknown := [op for op in ops if op not in (*allowed, "auto", "all")]:
                raise argparse.ArgumentTypeError(f"unknown op {unknown[0]!r} in {variant!r}; allowed: {', '.join(allowed)}, auto, all")
    return found


def _parts(variant: str) -> tuple[list[str], list[str]]:
    """Split a variant into [patch, ops...] and [how it runs, ops...]: "sdpa+backend:lora" -> ["sdpa"], ["backend", "lora"]."""
    patch, _, how = variant.partition("+")
    return patch.split(":"), how.split(":") if how else []


def _compiled(called: Callable, variant: str) -> Any:
    """Return a model or function as the variant runs it: itself, or compiled."""
    _, how = _parts(variant)
    if how[:1] == ["backend"]:
        return torch.compile(called, backend=dtkernels.compile_backend.using(how[1:] or "auto"))
    return torch.compile(called) if how == ["compile"] else called


def _loss(model, variant: str, loss_alone: bool) -> Callable[..., torch.Tensor]:
    """Return (ids, further arguments) -> the loss. What the variant compiles is the model, or with ``loss_alone`` this function."""
    called = model if loss_alone else _compiled(model, variant)

    def loss(ids: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
        return called(input_ids=ids, labels=ids, use_cache=False, **given).loss

    return _compiled(loss, variant) if loss_alone else loss


def clocked(work: Callable[[], object], repeats: int, device: str, clock: Callable[[], float] = time.perf_counter) -> tuple[list[float], float | None]:
    """Time calls by ``clock``. Returns times in ms, and on a GPU the peak memory in GiB."""
    cuda, times = device == "cuda", []
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(repeats):
        begin = clock()
        work()
        if cuda:
            torch.cuda.synchronize()
        times.append((clock() - begin) * 1e3)
    return times, torch.cuda.max_memory_allocated() / 2**30 if cuda else None


def forward(model, loss: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Return the work "forward": the loss, without gradients."""
    model.eval()

    def run() -> torch.Tensor:
        with torch.no_grad():
            return loss()

    return run


def training(model, loss: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Return the work "train": forward, backward and an AdamW step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=model.device.type == "cuda")
    model.train()

    def step() -> torch.Tensor:
        found = loss()
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        return found.detach()

    return step


def generating(model, ids: torch.Tensor, new: int, compiled: bool) -> Callable[[], torch.Tensor]:
    """Return the work "generate": ``new`` tokens, greedily. Compiled, it uses transformers' static cache, which compiles itself."""
    model.eval()
    cache = {"cache_implementation": "static"} if compiled else {}

    def run() -> torch.Tensor:
        return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False, **cache)

    return run


def measure(options, name: str, work: str, length: int) -> list[Figure]:
    """Measure every variant of one line, in turn."""
    batch = max(1, options.tokens // length)
    figures = [Figure(name, work, length, batch, variant, None, None, "") for variant in options.variants]
    truth: dict[str, Any] = {}
    for turn in range(options.rounds):
        for figure in reversed(figures) if turn % 2 else figures:
            try:
                _one(options, figure, truth)
            except Exception as problem:  # a variant that cannot run is reported, not hidden
                figure.note = error_line(problem, 120)
            gc.collect()
            torch._dynamo.reset()
            if options.device == "cuda":
                torch.cuda.empty_cache()
            print(line(figure), flush=True)
            _write(options, figures)
    return figures


@contextmanager
def under(variant: str, model) -> Iterator[object]:
    """Apply the patch of a variant to the model; yields our report, or None if the patch is not ours."""
    (name, *ops), how = _parts(variant)
    if name == "dtkernels":
        with patched(model, ops=ops or "auto", graphs=how == ["graphs"]) as report:
            yield report
    elif name == "liger":
        with liger(model):
            yield None
    elif name == "sdpa":
        yield None
    else:
        raise AssertionError(f"{variant}: variants() takes no others")


@contextmanager
def liger(model) -> Iterator[None]:
    """Apply Liger's patch for this kind of model; its changes to transformers' modeling file are restored."""
    import liger_kernel.transformers

    modeling = sys.modules[type(model).__module__]
    before = dict(vars(modeling))
    try:
        getattr(liger_kernel.transformers, f"apply_liger_kernel_to_{model.config.model_type}")(model=model)
        yield
    finally:
        vars(modeling).update(before)


@contextmanager
def running(options, figure: Figure) -> Iterator[tuple[Callable[[], Any], Any]]:
    """Make a model, patch it, and yield (the work, our report)."""
    model = build(figure.model, figure.length, options.device, torch.bfloat16 if options.device == "cuda" else torch.float32)
    shape, generator = (figure.batch, figure.length), torch.Generator().manual_seed(1)
    ids = torch.randint(3, model.config.vocab_size, shape, generator=generator).to(options.device)
    with under(figure.variant, model) as report:
        given = {"attention_mask": torch.ones_like(ids)} if options.mask else {}
        if options.packed:
            given["position_ids"] = (torch.arange(figure.length, device=ids.device) % options.packed).expand_as(ids)
        if figure.work == "generate":
            if "+backend" in figure.variant:
                raise ValueError("generate compiles its own steps: +compile instead of +backend")
            yield generating(model, ids, options.new, figure.variant.endswith("+compile")), report
            return
        if figure.work == "checkpoint":
            model.gradient_checkpointing_enable()
        loss = partial(_loss(model, figure.variant, options.loss_alone), ids, given)
        yield (forward if figure.work == "forward" else training)(model, loss), report


def grown(options, figure: Figure) -> float:
    """Return by how many GiB this process's resident set grows at its peak while a model is made and works twice."""
    before = _resident("VmRSS")
    with running(options, figure) as (run, _):
        run()
        run()
    return (_resident("VmHWM") - before) / 2**20


def _resident(key: str) -> int:
    """Read a line of Linux's /proc/self/status in KiB: VmRSS (resident) or VmHWM (its peak). getrusage's peak is the parent's too."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(key)).split()[1])


def _more(options) -> list[str]:
    """Return the options of what a model is called with, for another process."""
    packed = ["--packed", str(options.packed)] if options.packed else []
    return ["--mask"] * options.mask + ["--loss-alone"] * options.loss_alone + packed


def grown_alone(options, figure: Figure) -> float:
    """Run ``grown`` in a separate process. Raises RuntimeError with that process's last line if it fails."""
    told = {"models": figure.model, "work": figure.work, "lengths": figure.length, "variants": figure.variant, "tokens": options.tokens, "new": options.new}
    command = [sys.executable, __file__, "--device", options.device, "--peak", *(part for n, v in told.items() for part in (f"--{n}", str(v)))]
    returned = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # makes glibc return a freed tensor at once
    done = subprocess.run(command + _more(options), capture_output=True, text=True, env={**os.environ, **returned})
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or "no output").splitlines()[-1])
    return float(done.stdout.split()[-1])


def _one(options, figure: Figure, truth: dict[str, Any]) -> None:
    if options.device == "cpu" and options.memory and figure.peak_gib is None and Path("/proc/self/status").exists():
        figure.peak_gib = grown_alone(options, figure)
    with running(options, figure) as (run, report):
        forget()
        first = run()
        truth.setdefault("first", first)
        figure.agreement = _agreement(first, truth["first"], figure.length)
        run()  # warm-up
        times, peak = clocked(run, options.repeats, options.device, CLOCKS[options.clock])
        figure.times += times
        figure.rounds.append(statistics.median(times))
        figure.milliseconds = statistics.median(figure.times)
        if peak is not None:
            figure.peak_gib = max(peak, figure.peak_gib or 0.0)
        if report is not None:
            figure.fallbacks = report.fallbacks.total()
            figure.note = ", ".join(f"{op}: {_taken(paths)}" for op, paths in report.paths.items())
        if "+backend" in figure.variant:
            figure.note = ", ".join(f"{op} {state}: {n}" for op, states in replacements().items() for state, n in states.items())


def _taken(paths: dict[str, int]) -> str:
    """Format paths: {"kernel": 3, "own path": 0, "reference": 1} -> "3 kernel, 1 reference"."""
    return ", ".join(f"{n} {path}" for path, n in paths.items() if n) or "0"


def _agreement(found: torch.Tensor, wanted: torch.Tensor, length: int) -> str:
    if found.dim() == 0:
        return f"loss {found.item():.5f} ({(found - wanted).abs().item() / wanted.abs().item():.1e})"
    return f"{(found[:, length:] == wanted[:, length:]).float().mean().item():.0%} of tokens"


_done: list[Figure] = []


def _liger_version() -> str:
    try:
        return importlib.metadata.version("liger-kernel")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _write(options, figures: list[Figure]) -> None:
    if options.json:
        about = {"gpu": torch.cuda.get_device_name() if options.device == "cuda" else "none", "torch": torch.__version__,
                 "transformers": transformers.__version__, "liger": _liger_version(), "dtkernels": dtkernels.__version__, "command": " ".join(sys.argv)}  # fmt: skip
        options.json.write_text(json.dumps({**about, "figures": [asdict(f) for f in _done + figures]}, indent=1))


def line(f: Figure) -> str:
    """Format one figure as text."""
    ms = "-" if f.milliseconds is None else f"{f.milliseconds:.1f}"
    peak = "" if f.peak_gib is None else f"{f.peak_gib:.2f} GiB"
    what = f"{f.model:8} {f.work:9} S={f.length:<6} B={f.batch:<3} {f.variant:24}"
    rounds = "/".join(f"{r:.0f}" for r in f.rounds)
    return f"{what} {ms:>9} ms  by rounds {rounds}  {peak:>10}  {f.agreement}  fell back {f.fallbacks}  {f.note}"


def table(figures: list[Figure]) -> list[str]:
    """Format all figures; each is compared with the first variant of its line, in time and memory."""
    rows: list[tuple[str, ...]] = [("model", "work", "S", "B", "variant", "ms", "x first", "peak MiB", "x first", "agreement", "own path")]
    first: Figure | None = None
    for f in figures:
        if first is None or (f.model, f.work, f.length) != (first.model, first.work, first.length):
            first = f
        times = [_text(f.milliseconds, "{:.1f}"), _times(f.milliseconds, first.milliseconds)]
        memory = [_text(f.peak_gib and f.peak_gib * 1024, "{:.0f}"), _times(f.peak_gib, first.peak_gib)]
        rows.append((f.model, f.work, str(f.length), str(f.batch), f.variant, *times, *memory, f.agreement or f.note, str(f.fallbacks)))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _times(value: float | None, first: float | None) -> str:
    return "-" if value is None or not first else f"{value / first:.3f}"


def main(argv: list[str] | None = None) -> int:
    parser = Parser("bench_models", __doc__)
    parser.add_argument("--models", type=some_of(SHAPES), help=f"comma-separated: {', '.join(SHAPES)}")
    parser.add_argument("--work", type=some_of(WORK), help=f"comma-separated: {', '.join(WORK)}")
    parser.add_argument("--lengths", type=several(at_least(1)), help="tokens of a sequence, or of a prompt")
    parser.add_argument("--variants", type=variants, help="comma-separated, see above")
    parser.add_argument("--tokens", type=at_least(1), help="tokens of a batch: the batch size is this over the length")
    parser.add_argument("--new", type=at_least(1), help="tokens to generate")
    parser.add_argument("--mask", action="store_true", help="train with an attention_mask of ones, as data collators give it; generate always has one")
    parser.add_argument("--packed", type=at_least(1), metavar="TOKENS", help="train on rows of packed sequences of so many tokens, told by position_ids alone")
    parser.add_argument("--loss-alone", action="store_true", help="compile a function that returns the loss, not the model, whose outputs hold the logits too")
    parser.add_argument("--repeats", type=at_least(1))
    parser.add_argument(
        "--rounds", type=at_least(1), help="turns of every variant, every second turn in the opposite order"
    )
    parser.add_argument("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="process: processor time, on a CPU that other processes share")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="on a CPU: start no process to measure the peak of memory")
    parser.add_argument("--peak", action="store_true", help="on a CPU: measure this process's own peak, of one line and one variant, and nothing else")
    parser.add_argument("--json", type=file_to_write, help="write every figure here")
    options = parser.parse_args(argv)
    for name, value in {"variants": VARIANTS, **(ON_GPU if options.device == "cuda" else ON_CPU)}.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.peak:
        (model,), (work,), (length,), (variant,) = options.models, options.work, options.lengths, options.variants
        print(grown(options, Figure(model, work, length, max(1, options.tokens // length), variant, None, None, "")))
        return 0
    for name in options.models:
        for work in options.work:
            for length in options.lengths:
                _done.extend(measure(options, name, work, length))
    print("", *table(_done), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
