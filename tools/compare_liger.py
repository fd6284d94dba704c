"""Compare dtkernels with Liger: values, Liger's own tests run with our functions, and time and memory on a GPU.

    python tools/compare_liger.py                                 times and memory of every function of both, at the sizes of Liger's benchmarks
    python tools/compare_liger.py --functions rmsnorm,rope --rows 2048,8192 --json out.json
    python tools/compare_liger.py --check                         values and gradients of both at small sizes; no GPU is needed
    python tools/compare_liger.py --tests PATH                    the tests of the checkout of Liger at PATH, with our functions in place of its own
    python tools/compare_liger.py --missing                       the functions that Liger has and we lack

Liger is needed: `pip install liger-kernel`, or for --tests a checkout. --check without a GPU runs Liger's kernels in Triton's interpreter, as
far as it can. Exit status: 0, or 1 where a value differs or a test fails for no reason that is known, or 2 where nothing could be run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
sys.path[:0] = [p for p in (str(TOOLS),) if p not in sys.path]

from common.cli_types import Parser, at_least, file_to_write, folder_to_read, several, some_of, within  # noqa: E402
from common.require_packages import needs  # noqa: E402
from liger import OPS  # noqa: E402

#: modules of Liger's tests whose functions have a counterpart; the others test its patching, other GPUs' compilers, or what we lack
TESTS = (
    "attn_res", "cross_entropy", "dyt", "embedding", "fused_add_rms_norm", "fused_linear_cross_entropy", "fused_linear_jsd",
    "fused_linear_scaled_cross_entropy", "fused_neighborhood_attention", "geglu", "group_norm", "grpo_loss", "jsd", "kl_div", "layer_norm", "llama4_rope",
    "mhc", "modulated_rms_norm", "multi_token_attention", "poly_norm", "qwen2vl_mrope", "relu_squared", "rms_norm", "rope", "softmax", "sparsemax",
    "swiglu", "tiled_mlp", "tvd",
)  # fmt: skip
#: tests that fail for a reason that lies outside our functions: module, function, a part of the parameters, the reason
UNDERSTOOD = (
    ("layer_norm", "test_liger_layer_norm", "dtype1", "bf16: torch's gradient of the weight is further from float64 than ours, on a CPU"),
    ("modulated_rms_norm", "test_correctness", "dtype1", "bf16: its formula rounds between steps and adds in bf16, further from float64 than ours"),
    ("poly_norm", "test_correctness", "dtype1", "bf16: its formula rounds between steps and adds in bf16, further from float64 than ours"),
    ("fused_linear_scaled_cross_entropy", "test_frontend_is_exported_from_ops_root", "", "it asks for the name of Liger's module"),
)
CHUNKED = ("cpo_loss", "dpo_loss", "jsd_loss", "kto_loss", "orpo_loss", "simpo_loss")


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("compare_liger", __doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="compare values and gradients at small sizes")
    what.add_argument("--tests", type=folder_to_read, metavar="PATH", help="run the tests of a checkout of Liger with our functions")
    what.add_argument("--missing", action="store_true", help="list what Liger has and we lack")
    parser.add_argument("--functions", type=some_of(("all", *OPS)), default=("all",), help=f"all, or comma-separated ops of ours: {', '.join(OPS)}")
    parser.add_argument("--rows", type=several(at_least(1)), default=(1024, 2048, 4096, 8192), help="tokens, comma-separated")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16")
    parser.add_argument("--milliseconds", type=within(0), default=100.0, help="of measuring, for each function and round")
    parser.add_argument("--modules", type=several(str), default=(), help="of --tests: names of test modules, such as rms_norm,jsd")
    parser.add_argument("--largest", type=at_least(1), default=1 << 22, help="of --tests: leave out a test whose sizes multiply to more")
    parser.add_argument("--seconds", type=at_least(1), default=120, help="of --tests: a test that takes longer fails")
    parser.add_argument("--json", type=file_to_write, help="write what was found here")
    return parser.parse_args(argv)


# -- Liger's tests ------------------------------------------------------------------------------------------------------


def run_tests(options: argparse.Namespace) -> int:
    """Run the tests in a process of its own, print the count of each module and every failure, and return the exit status."""
    root: Path = options.tests.resolve()
    wanted = options.modules or (*TESTS, *CHUNKED)
    files = [f for name in wanted for f in (root / f"test/{folder}/test_{name}.py" for folder in ("transformers", "chunked_loss")) if f.is_file()]
    if not files:
        print(f"compare_liger: no tests of {', '.join(wanted)} in {root}: not a checkout of Liger", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        paths = [str(root), *([str(root / "src")] if (root / "src/liger_kernel").is_dir() else []), str(TOOLS), *filter(None, [os.environ.get("PYTHONPATH")])]
        settings = {"RESULTS": str(results), "SECONDS": str(options.seconds), "LARGEST": str(options.largest)}
        environment = {"DTKERNELS_FALLBACK": "reference", **os.environ, "PYTHONPATH": os.pathsep.join(paths), **{f"LIGER_TESTS_{k}": v for k, v in settings.items()}}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "liger.plugin", "--rootdir", str(root), "--tb=no", "--continue-on-collection-errors"]
        ran = subprocess.run([*command, *map(str, files)], cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if not results.is_file():
            print(f"compare_liger: the tests could not be run: {ran.stdout.strip().splitlines()[-1] if ran.stdout.strip() else 'no output'}", file=sys.stderr)
            return 2
        found = json.loads(results.read_text())
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    print(summary(found))
    return 1 if any(o["outcome"] == "failed" and not understood(node) for node, o in found["outcomes"].items()) else 0


def understood(node: str) -> str:
    """Return why a test fails that is known to, or nothing."""
    module, _, test = node.partition("::")
    name, _, parameters = test.partition("[")
    return next((why for m, n, part, why in UNDERSTOOD if Path(module).stem == f"test_{m}" and name == n and part in parameters), "")


def summary(found: dict) -> str:
    """Format the count of each module, the reasons of what was left out, and every failure."""
    modules: dict[str, Counter] = {}
    reasons: Counter = Counter()
    for node, result in found["outcomes"].items():
        modules.setdefault(Path(node.split("::")[0]).stem.removeprefix("test_"), Counter())[result["outcome"]] += 1
        if result["outcome"] == "skipped":
            reasons[" ".join("..." if word.isdigit() else word for word in result["reason"].split())] += 1
    kinds = ("passed", "failed", "skipped", "xfailed")
    lines = [f"{'module':36}" + "".join(f"{kind:>9}" for kind in kinds)]
    lines += [f"{name:36}" + "".join(f"{counts[kind]:9}" for kind in kinds) for name, counts in modules.items()]
    total = sum(modules.values(), Counter())
    lines.append(f"{'all':36}" + "".join(f"{total[kind]:9}" for kind in kinds))
    lines += ["", "left out:", *(f"{count:6}  {reason}" for reason, count in reasons.most_common())] if reasons else []
    failed = {node: result["reason"] for node, result in found["outcomes"].items() if result["outcome"] == "failed"}
    known = Counter(f"{node.split('[')[0]}: {why}" for node in failed if (why := understood(node)))
    lines += ["", "failed, and understood:", *(f"{count:6}  {what}" for what, count in known.items())] if known else []
    rest = [f"  {node}: {reason}" for node, reason in failed.items() if not understood(node)]
    lines += ["", "failed:", *rest] if rest else []
    lines += ["", "calls: " + ", ".join(f"{op} {count}" for op, count in sorted(found["calls"].items()))]
    return "\n".join(lines)


# -- values and times ---------------------------------------------------------------------------------------------------


def _names(options: argparse.Namespace) -> list[str]:
    from liger.cases import CASES
    from liger.substitution import FUNCTIONS

    return [name for name in CASES if "all" in options.functions or FUNCTIONS[name][0] in options.functions]


def check(options: argparse.Namespace) -> int:
    """Compare values and gradients of every function, and print one line for each."""
    import torch
    from liger.measure import compared
    from liger.substitution import FUNCTIONS, functions

    device, theirs = "cuda" if torch.cuda.is_available() else "cpu", functions()
    found = []
    for name in _names(options):
        if name not in theirs:
            state, reason = "not run", "this Liger has no such function"
        else:
            state, reason = compared(name, theirs, device, torch.float32, 1e-4)
        found.append({"function": name, "op": FUNCTIONS[name][0], "state": state, "reason": reason})
        print(f"{FUNCTIONS[name][0]:24}{name:42}{state:9}{reason}", flush=True)
    counts = Counter(f["state"] for f in found)
    print(f"\n{counts['same']} same, {counts['differs']} differ, {counts['not run']} not run")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 1 if counts["differs"] else 0 if counts["same"] else 2


def measure(options: argparse.Namespace) -> int:
    """Time every function of both on the GPU, and print the table."""
    import torch

    if not torch.cuda.is_available():
        print("compare_liger: no GPU: torch.cuda.is_available() is False; --check and --tests need none", file=sys.stderr)
        return 2
    from liger.measure import DIRECTIONS, measured, table
    from liger.substitution import functions, missing

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[options.dtype]
    theirs, figures = functions(), []
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "command": " ".join(sys.argv), "missing": missing()}
    for name in _names(options):
        for rows in options.rows if name in theirs else ():
            for direction in DIRECTIONS:
                figures += measured(name, theirs, rows, dtype, direction, options.milliseconds)
                print(table(figures[-2:]).splitlines()[1], file=sys.stderr, flush=True)
                if options.json:
                    options.json.write_text(json.dumps({**about, "figures": [asdict(f) for f in figures]}, indent=1))
    print(table(figures))
    print(about)
    return 0


def main(argv: list[str] | None = None) -> int:
    options = _options(argv)
    needs("compare_liger", "torch", "transformers", *(() if options.tests else ("liger_kernel",)))
    if options.tests:
        return run_tests(options)
    if options.missing:
        from liger.substitution import missing

        found = missing()
        print(*(f"{name:48}{reason}" for name, reason in found.items()), sep="\n")
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))
        return 0
    if not options.check:
        return measure(options)
    import torch

    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":  # Triton reads it when it is imported
        return subprocess.run([sys.executable, *sys.argv], env={**os.environ, "TRITON_INTERPRET": "1", "DTKERNELS_FALLBACK": "reference"}).returncode
    return check(options)


if __name__ == "__main__":
    sys.exit(main())
