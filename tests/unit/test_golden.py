"""Loop nests and Triton text, held against tests/golden. Torch is not needed.

After a change that is meant:  pytest tests/unit/test_golden.py --update-golden  and read the diff.
"""

import difflib
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from dtkernels.show import Subject, read, shipped

GOLDEN = Path(__file__).parents[1] / "golden"
PROGRAMS = {path.stem: path for path in sorted((GOLDEN / "programs").glob("*.dt"))}
STAGES = ("nest", "triton")

#: ops at the first shape of their spec
OF_FIRST_SHAPE = (
    "attention_residual", "logprobs", "normalize", "rotary", "rotary_pairs", "mix_streams", "modulated_rmsnorm", "multi_token_attention", "multimodal_rope", "weighted_cross_entropy",
    "add_rmsnorm", "cosine_distance", "cpo", "dpo", "embedding", "grouped_linear", "grouped_mm", "grouped_swiglu", "groupnorm", "grpo", "jsd", "kl_divergence", "kto",
    "linear_cross_entropy", "linear_jsd", "linear_kl", "linear_logprobs", "linear_logsumexp",
    "orpo", "packed_glu", "partial_rope", "polynorm", "qk_norm_rope", "relu_squared", "simpo", "sparsemax", "sum_rows", "tvd",
)  # fmt: skip
#: golden name -> op, shape, parameters
OPS = {
    "op_relu": ("relu", (1 << 24,), {}),
    "op_softmax": ("softmax", (16384, 8192), {}),
    "op_dyt": ("dyt", (16384, 8192), {}),
    "op_mmsigmoid": ("mmsigmoid", (4096, 4096, 4096), {}),
    "op_two_mm": ("two_mm", (8192, 4096, 16, 4096), {}),
    "op_lora": ("lora", (8192, 4096, 16, 4096), {}),
    "op_gate": ("gate", (4096, 4096, 4096), {"biased": True, "gates": True}),
    "op_attention": ("attention", (4, 32, 4096, 128, 4096, 128), {}),
    "op_attention_causal": ("attention", (4, 32, 4096, 128, 4096, 128), {"causal": True}),
    "op_attention_window": ("attention", (4, 32, 4096, 128, 4096, 128), {"starts": True, "ends": True, "sinks": True}),
    "op_rmsnorm": ("rmsnorm", (16384, 4096), {}),
    "op_layernorm": ("layernorm", (16384, 4096), {}),
    "op_swiglu": ("swiglu", (1 << 24,), {}),
    "op_geglu": ("geglu", (1 << 24,), {}),
    "op_rope": ("rope", (4, 32, 4096, 128, 8), {}),
    "op_cross_entropy": ("cross_entropy", (8192, 32768), {}),
    "op_linear_cross_entropy_lora": ("linear_cross_entropy", None, {"adapted": True}),
    **{f"op_{name}": (name, None, {}) for name in OF_FIRST_SHAPE},
}
CASES = [*OPS, *PROGRAMS]


@cache
def subject(name: str) -> Subject:
    if name in PROGRAMS:
        return Subject(read(str(PROGRAMS[name])))
    op, shape, params = OPS[name]
    return Subject(read(op), "h200", shape, "bf16", params)


@pytest.mark.parametrize("name, stage", [(name, stage) for name in CASES for stage in STAGES])
def test_text_is_the_golden_one(name, stage, request):
    path, now = GOLDEN / f"{name}.{stage}.txt", subject(name).text(stage)
    if request.config.getoption("--update-golden", default=False):
        path.write_text(now)
    golden = path.read_text() if path.exists() else ""
    diff = "".join(difflib.unified_diff(golden.splitlines(True), now.splitlines(True), f"golden/{path.name}", "now"))
    assert now == golden, f"if this is meant: pytest tests/unit/test_golden.py --update-golden\n{diff}"


def test_every_golden_file_has_a_case(request):
    wanted = {f"{name}.{stage}.txt" for name in CASES for stage in STAGES}
    for path in GOLDEN.glob("*.txt"):
        if request.config.getoption("--update-golden", default=False) and path.name not in wanted:
            path.unlink()
    assert {path.name for path in GOLDEN.glob("*.txt")} == wanted


def test_every_shipped_op_has_a_golden_file():
    assert {op for op, _, _ in OPS.values()} == set(shipped())


PRINT_ALL = """
import sys
sys.path.insert(0, sys.argv[1])
from test_golden import CASES, STAGES, subject
for name in CASES:
    for stage in (*STAGES, "algebra", "schedule") if name.startswith("op_") else STAGES:
        print(name, stage, subject(name).text(stage), sep="\\n")
print("torch" in sys.modules)
"""


def printed(seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", PRINT_ALL, str(Path(__file__).parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_processes_print_the_same_without_torch():
    """Whatever the order in which sets come."""
    first, second = printed("0"), printed("4242")
    assert first == second
    assert first.endswith("\nFalse\n")
