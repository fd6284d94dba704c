"""Time whole Hugging Face models, random weights: a training step and generate, patched against sdpa, torch.compile and Liger.

    python tools/bench_models.py --models llama,opt --lengths 2048,8192 --json out.json
    python tools/bench_models.py --models llama --work train --variants sdpa,liger,dtkernels,dtkernels:all,dtkernels:attention:rope
    python tools/bench_models.py --models toy --lengths 16 --tokens 64 --new 4 --repeats 1 --variants sdpa,dtkernels    # seconds, on a CPU too

A variant is a patch and, with +compile, torch.compile: sdpa (none), liger (its patch of that model, all of it), dtkernels
(ops="auto"), dtkernels:OP:OP (these ops alone). Variants take turns on the same weights, in the order given and then in the
opposite one, since a process that has run one model for long is no fresh one; the loss of each and the tokens of each are
compared with those of the first.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

if __name__ == "__main__":
    from common.require_packages import needs

    needs("bench_models", "torch", "transformers")

import torch
import transformers
from common.cli_types import Parser, at_least, device, file_to_write, several, some_of
from dtkernels.integrations.huggingface import patched
from dtkernels.integrations.huggingface.apply import OPS

import dtkernels

TOKENS = 32768


def _llama(length: int, hidden: int, layers: int, heads: int, key_heads: int) -> dict:
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers, "head_dim": hidden // heads}
    return sizes | {"num_attention_heads": heads, "num_key_value_heads": key_heads, "max_position_embeddings": length}


def _opt(length: int, hidden: int, layers: int, heads: int) -> dict:
    sizes = {"hidden_size": hidden, "ffn_dim": 4 * hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return sizes | {"word_embed_proj_dim": hidden, "max_position_embeddings": length, "dropout": 0.0}


#: model -> (class, config) of a shape; the toy is for trying this script
SHAPES: dict[str, tuple[str, Callable[[int], dict]]] = {
    "llama": ("Llama", lambda n: _llama(n, 2048, 16, 32, 8)),
    "opt": ("OPT", lambda n: _opt(n, 2048, 24, 32)),
    "toy": ("Llama", lambda n: _llama(n, 64, 2, 4, 2)),
    "toy-opt": ("OPT", lambda n: _opt(n, 64, 2, 4)),
}
VARIANTS = ("sdpa", "dtkernels", "dtkernels:all", "liger", "sdpa+compile", "dtkernels+compile")


@dataclass
class Figure:
    """One kind of work of one model by one variant: the median over all rounds, and that of each; the highest peak."""

    model: str
    work: str
    length: int
    batch: int
    variant: str
    milliseconds: float | None
    peak_gib: float | None
    agreement: str  # with the first variant: the loss, or the share of equal tokens
    fallbacks: int = 0
    note: str = ""
    rounds: list[float] = field(default_factory=list)  #: medians, ms
    times: list[float] = field(default_factory=list)  #: all of them, ms


def variants(text: str) -> tuple[str, ...]:
    """Variants separated by commas, as argparse takes them."""
    found = tuple(dict.fromkeys(text.split(",")))
    for variant in found:
        name, *ops = variant.removesuffix("+compile").split(":")
        if name not in ("sdpa", "liger", "dtkernels") or ops and name != "dtkernels":
            raise argparse.ArgumentTypeError(f"unknown variant {variant!r}; allowed: sdpa, liger, dtkernels, dtkernels:OP, each with +compile")
        for op in ops:
            if op not in (*OPS, "auto", "all"):
                raise argparse.ArgumentTypeError(f"unknown op {op!r} in {variant!r}; allowed: {', '.join(OPS)}, auto, all")
    return found


def build(name: str, length: int, device: str, dtype: torch.dtype):
    """A causal language model of a shape with random weights, the same each time."""
    kind, config = SHAPES[name]
    made = getattr(transformers, f"{kind}Config")(vocab_size=TOKENS, pad_token_id=0, bos_token_id=1, eos_token_id=2, **config(length + 128))
    torch.manual_seed(0)
    with torch.device(device):
        return getattr(transformers, f"{kind}ForCausalLM")(made).to(dtype)


def clocked(work: Callable[[], object], repeats: int, device: str) -> tuple[list[float], float | None]:
    """Times of calls on the wall clock, ms, and on a GPU the peak of memory, GiB."""
    cuda, times = device == "cuda", []
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        if cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return times, torch.cuda.max_memory_allocated() / 2**30 if cuda else None


def training(model, ids: torch.Tensor, compiled: bool, mask: torch.Tensor | None) -> Callable[[], float]:
    """Forward, backward and an AdamW step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=ids.is_cuda)
    called = torch.compile(model) if compiled else model
    model.train()

    def step() -> float:
        loss = called(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def generating(model, ids: torch.Tensor, new: int, compiled: bool) -> Callable[[], torch.Tensor]:
    """Greedy generation of ``new`` tokens; compiled: through transformers' static cache, which it compiles itself."""
    model.eval()
    cache = {"cache_implementation": "static"} if compiled else {}

    def run() -> torch.Tensor:
        return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False, **cache)

    return run


def measure(options, name: str, work: str, length: int) -> list[Figure]:
    """Every variant of one line, in turn."""
    batch = max(1, options.tokens // length)
    figures = [Figure(name, work, length, batch, variant, None, None, "") for variant in options.variants]
    truth: dict[str, object] = {}
    for turn in range(options.rounds):
        for figure in reversed(figures) if turn % 2 else figures:
            try:
                _one(options, figure, truth)
            except Exception as problem:  # a variant that cannot run is reported, not hidden
                figure.note = f"{type(problem).__name__}: {' '.join(str(problem).split())[:120]}"
            gc.collect()
            torch._dynamo.reset()
            if options.device == "cuda":
                torch.cuda.empty_cache()
            print(line(figure), flush=True)
            _write(options, figures)
    return figures


@contextmanager
def under(variant: str, model) -> Iterator[object]:
    """The model with the patch of a variant; yields our report, None where the patch is not ours."""
    name, *ops = variant.removesuffix("+compile").split(":")
    if name == "dtkernels":
        with patched(model, ops=ops or "auto") as report:
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
    """Liger's patch for this kind of model; what it changes in transformers' modeling file is put back."""
    import liger_kernel.transformers

    modeling = sys.modules[type(model).__module__]
    before = dict(vars(modeling))
    try:
        getattr(liger_kernel.transformers, f"apply_liger_kernel_to_{model.config.model_type}")(model=model)
        yield
    finally:
        vars(modeling).update(before)


def _one(options, figure: Figure, truth: dict[str, object]) -> None:
    compiled = figure.variant.endswith("+compile")
    model = build(figure.model, figure.length, options.device, torch.bfloat16 if options.device == "cuda" else torch.float32)
    ids = torch.randint(3, TOKENS, (figure.batch, figure.length), generator=torch.Generator().manual_seed(1)).to(options.device)
    with under(figure.variant, model) as report:
        mask = torch.ones_like(ids) if options.mask else None
        run = training(model, ids, compiled, mask) if figure.work == "train" else generating(model, ids, options.new, compiled)
        first = run()
        truth.setdefault("first", first)
        figure.agreement = _agreement(first, truth["first"], figure.length)
        run()  # warm
        times, peak = clocked(run, options.repeats, options.device)
        figure.times += times
        figure.rounds.append(statistics.median(times))
        figure.milliseconds = statistics.median(figure.times)
        figure.peak_gib = None if peak is None else max(peak, figure.peak_gib or 0.0)
        if report is not None:
            figure.fallbacks = report.fallbacks.total()
            figure.note = ", ".join(f"{op}: {n}" for op, n in report.calls.items())


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
    """One figure as text."""
    ms = "-" if f.milliseconds is None else f"{f.milliseconds:.1f}"
    peak = "" if f.peak_gib is None else f"{f.peak_gib:.2f} GiB"
    what = f"{f.model:8} {f.work:9} S={f.length:<6} B={f.batch:<3} {f.variant:24}"
    rounds = "/".join(f"{r:.0f}" for r in f.rounds)
    return f"{what} {ms:>9} ms  by rounds {rounds}  {peak:>10}  {f.agreement}  fell back {f.fallbacks}  {f.note}"


def main(argv: list[str] | None = None) -> int:
    parser = Parser("bench_models", __doc__)
    parser.add_argument("--models", type=some_of(SHAPES), default=("llama", "opt"), help=f"comma-separated: {', '.join(SHAPES)}")
    parser.add_argument("--work", type=some_of(("train", "generate")), default=("train", "generate"), help="comma-separated: train, generate")
    parser.add_argument("--lengths", type=several(at_least(1)), default=(2048, 8192), help="tokens of a sequence, or of a prompt")
    parser.add_argument("--variants", type=variants, default=VARIANTS, help="comma-separated, see above")
    parser.add_argument("--tokens", type=at_least(1), default=8192, help="tokens of a batch: the batch size is this over the length")
    parser.add_argument("--new", type=at_least(1), default=64, help="tokens to generate")
    parser.add_argument("--mask", action="store_true", help="train with an attention_mask of ones, as data collators give it; generate always has one")
    parser.add_argument("--repeats", type=at_least(1), default=5)
    parser.add_argument(
        "--rounds", type=at_least(1), default=2, help="how often every variant has its turn, every second time in the opposite order"
    )
    parser.add_argument("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=file_to_write, help="write every figure here")
    options = parser.parse_args(argv)
    for name in options.models:
        for work in options.work:
            for length in options.lengths:
                _done.extend(measure(options, name, work, length))
    return 0


if __name__ == "__main__":
    sys.exit(main())
