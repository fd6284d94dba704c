"""Every op, in every element type, to machine code for four kinds of GPU, without one: what the compiled kernels say.

One test compiles one kernel and asks all there is to ask of it.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import pytest

GPUS = ("a100", "h200", "b200", "mi300x")
DTYPES = ("fp32", "fp16", "bf16")

#: id -> op, shape, parameters
CASES = {
    "relu": ("relu", (1 << 24,), {}),
    "softmax": ("softmax", (16384, 8192), {}),
    "dyt": ("dyt", (16384, 8192), {}),
    "mmsigmoid": ("mmsigmoid", (4096, 4096, 4096), {}),
    "two_mm": ("two_mm", (8192, 4096, 16, 4096), {}),
    "attention": ("attention", (4, 32, 4096, 128, 4096, 128), {}),
    "causal": ("attention", (4, 32, 4096, 128, 4096, 128), {"causal": True}),
    "rmsnorm": ("rmsnorm", (16384, 4096), {}),
    "layernorm": ("layernorm", (16384, 4096), {}),
    "swiglu": ("swiglu", (1 << 24,), {}),
    "geglu": ("geglu", (1 << 24,), {}),
    "rope": ("rope", (4, 32, 4096, 128, 8), {}),
    "cross_entropy": ("cross_entropy", (8192, 32768), {}),
}
#: with every option at once; compiled for fewer GPUs
OPTIONS = {"options": ("attention", (4, 32, 4096, 128, 4096, 128), {"starts": True, "ends": True, "capped": True, "sinks": True})}
#: calls whose schedule is a candidate of rules/chain_candidates.py, or packs groups of any size
CHAINS = {
    "group of 19": ("attention", (4, 19, 1, 112, 7486, 112), {"group": 19}),
    "group of 5": ("attention", (3, 40, 1, 128, 7777, 128), {"group": 5}),
    "group of 3": ("attention", (1, 24, 1, 192, 25400, 192), {"group": 3}),
    "group of 71": ("attention", (1, 71, 1, 64, 2048, 64), {"group": 71}),
    "short": ("attention", (128, 16, 77, 64, 77, 64), {"causal": True}),
}
ROWS = ("relu", "softmax", "dyt", "rmsnorm", "layernorm", "swiglu", "geglu", "rope")
PRODUCTS = ("mmsigmoid", "two_mm", "attention", "causal")
#: GPU -> the instruction with which its matrix units multiply halves
MATRIX_UNITS = {"a100": r"mma\.sync", "h200": r"wgmma\.mma_async", "b200": r"tcgen05\.mma", "mi300x": r"v_mfma"}
#: 16 bytes or more in one instruction
WIDE_LOAD = r"ld\.global\S*\.v(4\.[bu]32|2\.[bu]64|8\.b32|4\.b64)|(global|buffer)_load_dwordx4"
WIDE_STORE = r"st\.global\S*\.v(4\.[bu]32|2\.[bu]64|8\.b32|4\.b64)|(global|buffer)_store_dwordx4"


#: compiled in fp16 for other GPUs than an H200 too: schedules and loads are those of bf16, as wide; these convert, multiply, and do both
HALVES = ("softmax", "mmsigmoid", "causal")


def every(cases=CASES, dtypes=DTYPES, gpus=GPUS):
    """Parametrise over the product, with ids such as softmax-bf16-h200; fp16 away from an H200 for HALVES alone."""
    wanted = [(c, d, g) for c in cases for d in dtypes for g in gpus if d != "fp16" or g == "h200" or c in HALVES]
    return pytest.mark.parametrize("case, dtype, gpu", [pytest.param(*w, id="-".join(w)) for w in wanted])


def compile_one(case: str, dtype: str, gpu: str) -> list[dict]:
    """What there is to know about the machine code of each kernel of one case."""
    from dtkernels.show import Subject, machine_code, read

    op, shape, params = (CASES | OPTIONS | CHAINS)[case]
    subject = Subject(read(op), gpu, shape, dtype, params)
    found = []
    for launch, compiled in machine_code(subject):
        text = compiled.asm["amdgcn" if gpu == "mi300x" else "ptx"]
        facts = {"kernel": compiled.metadata.name, "shared": compiled.metadata.shared, "limit": subject.target.shared_bytes}
        facts["binary"] = len(compiled.asm["hsaco" if gpu == "mi300x" else "cubin"])
        facts["target"] = re.search(r"\.target (\w+)|amdhsa-unknown-(\w+)|amdgcn-amd-amdhsa--(\w+)", text).group(0)
        facts["product"] = "tl.dot" in launch.kernel.src or launch.kernel.is_gluon()  # what merges parts has none
        facts["matrix units"] = len(re.findall(MATRIX_UNITS[gpu], text))
        facts["few rows"] = len(re.findall(MATRIX_UNITS["a100"], text))  # up to 32 rows are too few for a warp group
        facts["wide loads"], facts["wide stores"] = (len(re.findall(p, text)) for p in (WIDE_LOAD, WIDE_STORE))
        facts["spilled"] = spilled(compiled.asm["cubin"]) if gpu == "h200" else None
        found.append(facts)
    return found


def spilled(cubin: bytes) -> dict[str, int]:
    """Bytes of stack and of local memory that a thread takes."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        usage = subprocess.run([tool, "--dump-resource-usage", f.name], capture_output=True, text=True, check=True).stdout
    return {what: int(re.search(rf"{what}:(\d+)", usage).group(1)) for what in ("STACK", "LOCAL")}


# -- tests ------------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def empty_caches(tmp_path, monkeypatch):
    """Everything is compiled anew."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("DTKERNELS_CACHE", str(tmp_path / "dtkernels"))


@every()
def test_compiles_to_what_the_gpu_wants(case, dtype, gpu):
    """It fits; on an H200 it spills no register; products of halves use the matrix units; rows move 16 bytes at once."""
    marks = {"a100": "sm_80", "h200": "sm_90a", "b200": "sm_100a", "mi300x": "gfx942"}
    kernels = compile_one(case, dtype, gpu)
    assert kernels
    for facts in kernels:
        assert facts["binary"] and facts["target"].endswith(marks[gpu])
        assert facts["shared"] <= facts["limit"], facts
        assert facts["spilled"] == ({"STACK": 0, "LOCAL": 0} if gpu == "h200" else None), facts
        assert facts["matrix units"] or not facts["product"] or dtype == "fp32", facts
        assert facts["wide loads"] and facts["wide stores"] or case not in ROWS, facts
    assert case not in PRODUCTS or any(facts["product"] for facts in kernels)


@every(cases=OPTIONS, dtypes=["bf16"], gpus=["h200", "mi300x"])
def test_options_of_attention_fit_too(case, dtype, gpu):
    (facts,) = compile_one(case, dtype, gpu)
    assert facts["shared"] <= facts["limit"] and facts["matrix units"]
    assert facts["spilled"] in (None, {"STACK": 0, "LOCAL": 0})


@every(cases=CHAINS, dtypes=["bf16"])
def test_candidates_of_chains_fit_and_multiply_on_the_matrix_units(case, dtype, gpu):
    kernels = compile_one(case, dtype, gpu)
    assert any(facts["product"] for facts in kernels)
    for facts in kernels:
        assert facts["shared"] <= facts["limit"], facts
        assert facts["matrix units"] or facts["few rows"] or not facts["product"], facts
        assert facts["spilled"] is None or facts["spilled"]["STACK"] <= 64, facts
