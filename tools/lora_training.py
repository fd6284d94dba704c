"""Fine-tune a small language model with LoRA, unpatched and patched, with the same steps: loss curves, time and memory.

    python tools/lora_training.py --steps 200 --json lora.json --plot lora.png

The text is synthetic: sequences that repeat a random phrase of a few of the tokens, so that there is something to learn. Needs
transformers and peft; the plot needs matplotlib.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from common.require_packages import needs

    needs("lora_training", "torch", "transformers", "peft")

import peft
import torch
import transformers
from common.cli_types import Parser, at_least, device, file_to_write, share, within
from dtkernels.integrations.huggingface import patched

import dtkernels

TOKENS = 512
USED = 32  #: tokens that occur in the text: learned in a few steps; the repetition takes longer


def build(options) -> torch.nn.Module:
    """Return a Llama with random weights and LoRA on its attention and its MLP, the same in every call."""
    config = transformers.LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 32,
        num_key_value_heads=options.hidden // 64,
        # the head is frozen: logits are about 1 at every width, and the loss can fall
        initializer_range=1.1 * options.hidden**-0.5,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj"]
    lora = peft.LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules=names, lora_dropout=options.dropout)
    adapted = peft.get_peft_model(model, lora)
    return adapted.to(options.device, torch.bfloat16 if options.device == "cuda" else torch.float32).train()


def batch(options, step: int) -> torch.Tensor:
    """Return sequences of a repeated phrase."""
    generator = torch.Generator().manual_seed(step)
    phrases = torch.randint(USED, (options.batch, 8), generator=generator)
    return phrases.repeat(1, options.length // 8).to(options.device)


def train(options, seed: int, ours: bool) -> dict[str, Any]:
    """Return the losses of every step, the median time of a step in milliseconds, and the peak memory in GiB."""
    model = build(options)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=options.rate)
    torch.manual_seed(seed)  # for the dropout
    losses, times = [], []
    cuda = options.device == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    with patched(model, ops="auto" if ours else ()) as report:
        for step in range(options.steps):
            ids = batch(options, step)
            begin = time.perf_counter()
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            times.append((time.perf_counter() - begin) * 1e3)
        calls, fallbacks = dict(report.calls), dict(report.fallbacks)
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
    return {"losses": losses, "milliseconds": statistics.median(times[3:]), "peak_gib": peak, "calls": calls, "fallbacks": fallbacks}


def main(argv: list[str] | None = None) -> int:
    parser = Parser("lora_training", __doc__)
    for name, default, least in (("steps", 200, 4), ("layers", 2, 1), ("rank", 8, 1), ("batch", 8, 1)):
        parser.add_argument(f"--{name}", type=at_least(least), default=default, help=f"{least} or more; default: {default}")
    for name, default, step in (("hidden", 128, 64), ("length", 64, 8)):
        parser.add_argument(f"--{name}", type=at_least(step), default=default, help=f"a multiple of {step}; default: {default}")
    parser.add_argument("--rate", type=within(0), default=3e-3, help="of learning")
    parser.add_argument("--dropout", type=share, default=0.05, help="of LoRA: it makes the noise that curves are compared with")
    parser.add_argument("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=file_to_write, help="write losses and times here")
    parser.add_argument("--plot", type=file_to_write, help="draw the losses here: .png, .svg or .pdf")
    options = parser.parse_args(argv)
    for name, value, step in (("hidden", options.hidden, 64), ("length", options.length, 8)):
        if value % step:
            parser.error(f"argument --{name}: {value} is no multiple of {step}")
    if options.plot and (options.plot.suffix not in (".png", ".svg", ".pdf") or not find_spec("matplotlib")):
        parser.error(f"argument --plot: {options.plot}: allowed: .png, .svg, .pdf, with matplotlib installed")
    runs = {"unpatched": train(options, 1, False), "patched": train(options, 1, True), "unpatched, other seed": train(options, 2, False)}
    far, noise = (_distance(runs[name]["losses"], runs["unpatched"]["losses"]) for name in ("patched", "unpatched, other seed"))
    for name, run in runs.items():
        peak = "" if run["peak_gib"] is None else f", peak {run['peak_gib']:.2f} GiB"
        losses = f"first {run['losses'][0]:.4f} last {run['losses'][-1]:.4f}"
        print(f"{name:22} {losses}, {run['milliseconds']:.1f} ms a step{peak} {run['calls']}")
    print(f"largest difference of the losses: patched {far:.2e}, another seed of the dropout {noise:.2e}")
    about = {"gpu": torch.cuda.get_device_name() if options.device == "cuda" else "none", "dtkernels": dtkernels.__version__}
    about |= {"torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__}
    if options.json:
        options.json.write_text(json.dumps({**about, "command": " ".join(sys.argv), "runs": runs}, indent=1))
    if options.plot:
        _plot(runs, options.plot)
    return 0 if far <= max(noise, 1e-3) else 1


def _distance(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b))


def _plot(runs: dict[str, dict], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for (name, run), style in zip(runs.items(), ("-", "--", ":")):
        axes.plot(run["losses"], style, label=name)
    axes.set(xlabel="step", ylabel="loss", title="LoRA fine-tuning, patched and unpatched")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
