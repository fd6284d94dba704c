"""Time the experts of mixtures in transformers: patched by apply_to, and by transformers' own eager, batched_mm and grouped_mm.

    python benchmarks/experts.py                 all layers and sizes, under 100 s on an H100 with 8 cores
    python benchmarks/experts.py --layers qwen3_30b,many --tokens 1,8,64,512
    python benchmarks/experts.py --smoke         tiny sizes on a CPU, where ops run their reference: that the script works, no times
    python benchmarks/experts.py --json out.json also the numbers

One line for each layer, number of tokens and direction: the median in microseconds by each implementation, with its error in the norm against
the same layer in float32, and in brackets the peak of memory beside weights and inputs. A "graph" line times replays of a CUDA graph, for which
eager is left out: its loop waits for the device. At the end: the kernels of ours with the most time.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SMOKE = "--smoke" in sys.argv
if SMOKE:
    os.environ["DTKERNELS_FALLBACK"] = "reference"
os.environ.setdefault("DTKERNELS_CACHE", tempfile.mkdtemp(prefix="experts"))  # the processes that compile share it

import torch  # noqa: E402
import transformers  # noqa: E402

import dtkernels  # noqa: E402

HIDDEN = 32 if SMOKE else 2048
#: layer -> experts, width between, experts of a token, dtype of their weights
LAYERS = {
    "mixtral": (8, 64 if SMOKE else 4096, 2, torch.float32),
    "qwen3_moe": (64, 24 if SMOKE else 768, 8, torch.bfloat16),
    "qwen3_30b": (128, 24 if SMOKE else 768, 8, torch.bfloat16),
    "many": (256, 24 if SMOKE else 1408, 8, torch.bfloat16),
    "gpt_oss": (32, 48 if SMOKE else 2048, 4, torch.bfloat16),
}
TOKENS = (48, 16) if SMOKE else (4096, 16384, 16)
DECODING = 64  #: tokens up to which there is no backward, but a CUDA graph
DEVICE = "cpu" if SMOKE else "cuda"
BATCHED = 8 << 30  #: bytes that batched_mm may take for copies of weights


def layer(name: str) -> torch.nn.Module:
    """Return the experts module of a layer, in bfloat16."""
    experts, inner, each, _ = LAYERS[name]
    sizes = {"hidden_size": HIDDEN, "intermediate_size": inner, "moe_intermediate_size": inner, "num_experts_per_tok": each}
    if name == "mixtral":
        config = transformers.MixtralConfig(**sizes, num_local_experts=experts)
        cls = transformers.models.mixtral.modeling_mixtral.MixtralExperts
    elif name != "gpt_oss":
        config = transformers.Qwen3MoeConfig(**sizes, num_experts=experts)
        cls = transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts
    else:
        config = transformers.GptOssConfig(**sizes, num_local_experts=experts)
        cls = transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts
    torch.manual_seed(0)
    made = cls(copy.deepcopy(config)).to(DEVICE, torch.bfloat16)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=HIDDEN**-0.5)
    return made


def inputs(name: str, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states, chosen experts and their weights, of a router with random logits."""
    experts, _, each, dtype = LAYERS[name]
    generator = torch.Generator(DEVICE).manual_seed(tokens)
    hidden = torch.randn(tokens, HIDDEN, device=DEVICE, dtype=torch.bfloat16, generator=generator)
    value, index = torch.randn(tokens, experts, device=DEVICE, generator=generator).softmax(-1).topk(each)
    return hidden, index, (value / value.sum(-1, keepdim=True)).to(dtype)


def implementations(name: str, tokens: int) -> list[str]:
    """Return the implementations that a number of tokens allows."""
    experts, inner, each, _ = LAYERS[name]
    small = tokens * each * inner * 3 * HIDDEN * 2 <= BATCHED
    return ["ours", "eager", *(["batched_mm"] if small else []), "grouped_mm"]


def runner(made: torch.nn.Module, implementation: str, given: tuple, backward: bool):
    """Return a function that runs the layer once, and its results: the output, and with ``backward`` the gradients."""
    if implementation == "ours":
        report = dtkernels.apply_to(made, ops="experts")
        if not (report.patched or report.already):
            raise SystemExit(f"ours: {report}")
    else:
        made.config._experts_implementation = implementation
    hidden, index, weights = given
    if not backward:

        def forward():
            with torch.no_grad():
                return (made(hidden, index, weights),)

        return forward
    hidden, weights = hidden.detach().requires_grad_(), weights.detach().requires_grad_()
    adjoint = torch.randn(hidden.shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1)).to(hidden.dtype)
    leaves = [hidden, weights, *made.parameters()]

    def both():
        out = made(hidden, index, weights)
        return (out.detach(), *torch.autograd.grad(out, leaves, adjoint))

    return both


def fresh(made: torch.nn.Module) -> torch.nn.Module:
    """Return a module with the same weights that nobody patched."""
    other = copy.copy(made)
    vars(other)["config"] = copy.deepcopy(made.config)
    vars(other).pop("forward", None)
    return other


def median(run, seconds: float) -> float:
    """Return the median in microseconds of calls with a cold L2 cache."""
    if DEVICE == "cpu":
        return float("nan")
    flush = torch.empty(64 << 20, dtype=torch.int32, device=DEVICE)
    for _ in range(2):
        run()
    times, end = [], time.monotonic() + seconds
    while time.monotonic() < end or len(times) < 3:
        flush.zero_()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return statistics.median(times)


def peak(run) -> float:
    """Return the peak in MiB beside what was allocated before."""
    if DEVICE == "cpu":
        return float("nan")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def captured(run):
    """Return a function that replays a CUDA graph of a call."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def truth(made: torch.nn.Module, given: tuple, backward: bool) -> tuple[torch.Tensor, ...]:
    """Return what the layer's own loop gives in float32."""
    exact = fresh(made)
    vars(exact)["_parameters"] = {name: torch.nn.Parameter(p.detach().float()) for name, p in made._parameters.items()}
    hidden, index, weights = given
    return runner(exact, "eager", (hidden.float(), index, weights.float()), backward)()


def error(found: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> float:
    """Return the largest error in the norm among the results."""
    return max(((a.float() - b).norm() / b.norm()).item() for a, b in zip(found, right, strict=True))


def line(name: str, tokens: int, kind: str, seconds: float) -> dict:
    """Time one layer at one number of tokens by all implementations, and print the line."""
    made, given, backward = layer(name), inputs(name, tokens), kind == "both"
    right = truth(made, given, backward)
    found: dict[str, dict] = {}
    for implementation in implementations(name, tokens):
        if kind == "graph" and (implementation == "eager" or DEVICE == "cpu"):
            continue
        try:
            run = runner(fresh(made), implementation, given, backward)
            wrong = error(run(), right)
            run = captured(run) if kind == "graph" else run
            found[implementation] = {"us": median(run, seconds), "error": wrong, "MiB": peak(run)}
        except (RuntimeError, ValueError, NotImplementedError) as problem:
            found[implementation] = {"problem": f"{type(problem).__name__}: {str(problem).splitlines()[0][:90]}"}
    cells = [f"{n} {x['us']:9.1f} e{x['error']:.1e} ({x['MiB']:.0f})" if "us" in x else f"{n} {x['problem']}" for n, x in found.items()]
    peers = [x["us"] for n, x in found.items() if n != "ours" and "us" in x]
    ratio = f"  fastest peer/ours {min(peers) / found['ours']['us']:.2f}" if peers and "us" in found["ours"] else ""
    print(f"{name:9} {tokens:6} {kind:7} {'  '.join(cells)}{ratio}", flush=True)
    if "us" in found.get("ours", {}) and "eager" in found and not found["ours"]["error"] <= 1.5 * found["eager"]["error"] + 1e-3:
        print(f"  WRONG: ours is further from float32 than eager, {found['ours']['error']:.1e} to {found['eager']['error']:.1e}", flush=True)
    return {"layer": name, "tokens": tokens, "kind": kind, **found}


def warm(name: str, tokens: int) -> None:
    """Compile what a layer needs at a number of tokens, into the caches on disk."""
    made, given = layer(name), inputs(name, tokens)
    for backward in (False, True) if tokens > DECODING else (False,):
        runner(fresh(made), "ours", given, backward)()


def prepare(layers: list[str], counts: list[int]) -> None:
    """Compile all sizes at once, a process for each."""
    start = time.monotonic()
    cases = [(name, tokens) for name in layers for tokens in counts]
    workers = [subprocess.Popen([sys.executable, __file__, "--warm", name, str(tokens)]) for name, tokens in cases]
    for worker in workers:
        try:
            worker.wait(max(1.0, 50 - (time.monotonic() - start)))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
    print(f"# compiled in {time.monotonic() - start:.0f} s", flush=True)


def kernels(name: str, tokens: int) -> None:
    """Print where the time of ours goes, forward and backward."""
    run = runner(layer(name), "ours", inputs(name, tokens), True)
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    rows = sorted(profile.key_averages(), key=lambda row: -row.self_device_time_total)[:12]
    print(f"# {name} {tokens}, forward and backward: " + ", ".join(f"{row.key[:40]} {row.self_device_time_total:.0f}" for row in rows), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on a CPU")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--seconds", type=float, default=90, help="stop before the next line after this long")
    parser.add_argument("--layers", default="mixtral,qwen3_moe,gpt_oss", help=", ".join(LAYERS))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="numbers of tokens")
    parser.add_argument("--warm", nargs=2, metavar=("LAYER", "TOKENS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.warm:
        warm(options.warm[0], int(options.warm[1]))
        return
    start, found = time.monotonic(), []
    layers, counts = options.layers.split(","), [int(n) for n in options.tokens.split(",")]
    if unknown := [name for name in layers if name not in LAYERS]:
        parser.error(f"no layer {', '.join(unknown)}; there are {', '.join(LAYERS)}")
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    print(f"# {device}, torch {torch.__version__}, transformers {transformers.__version__}; hidden {HIDDEN}; microseconds, error in the norm, (MiB)", flush=True)
    if not SMOKE:
        prepare(layers, counts)
    cases = [(name, tokens, kind) for kind in ("both", "forward") for tokens in counts if tokens > DECODING for name in layers]
    cases += [(name, tokens, kind) for tokens in counts if tokens <= DECODING for kind in ("graph", "forward") for name in layers]
    for case in cases:
        if not SMOKE and time.monotonic() - start > options.seconds - 8:
            print(f"# no time left for {case}", flush=True)
            continue
        found.append(line(*case, seconds=0.15))
    if DEVICE == "cuda" and time.monotonic() - start < options.seconds:
        for name in layers:
            kernels(name, max(counts))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
