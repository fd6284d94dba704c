"""Every op, in every element type, to machine code for four kinds of GPU, without one: what the compiled kernels say.

The kernels are compiled by two processes that this file starts as a script; the tests read what those report.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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
ROWS = ("relu", "softmax", "dyt", "rmsnorm", "layernorm", "swiglu", "geglu", "rope")
PRODUCTS = ("mmsigmoid", "two_mm", "attention", "causal")
#: GPU -> the instruction with which its matrix units multiply halves
MATRIX_UNITS = {"a100": r"mma\.sync", "h200": r"wgmma\.mma_async", "b200": r"tcgen05\.mma", "mi300x": r"v_mfma"}
#: 16 bytes or more in one instruction
WIDE_LOAD = r"ld\.global\S*\.v(4\.[bu]32|2\.[bu]64|8\.b32|4\.b64)|(global|buffer)_load_dwordx4"
WIDE_STORE = r"st\.global\S*\.v(4\.[bu]32|2\.[bu]64|8\.b32|4\.b64)|(global|buffer)_store_dwordx4"


def key(case: str, dtype: str, gpu: str) -> str:
    return f"{case}-{dtype}-{gpu}"


def every(cases=CASES, dtypes=DTYPES, gpus=GPUS, known: tuple[str, str] | None = None):
    """Parametrise over the product, with ids such as softmax-bf16-h200. ``known``: a pattern of ids that fail, and why they do."""
    params = []
    for value in ((case, dtype, gpu) for case in cases for dtype in dtypes for gpu in gpus):
        fails = known is not None and re.fullmatch(known[0], key(*value))
        marks = [pytest.mark.xfail(reason=known[1], strict=True)] if fails else []
        params.append(pytest.param(*value, id=key(*value), marks=marks))
    return pytest.mark.parametrize("case, dtype, gpu", params)


# -- in the compiling process -----------------------------------------------------------------------------------------


def compile_one(case: str, dtype: str, gpu: str) -> list[dict]:
    """What there is to know about the machine code of each kernel of one case."""
    from dtkernels.show import Subject, machine_code, read

    op, shape, params = (CASES | OPTIONS)[case]
    subject = Subject(read(op), gpu, shape, dtype, params)
    found = []
    for _, compiled in machine_code(subject):
        text = compiled.asm["amdgcn" if gpu == "mi300x" else "ptx"]
        facts = {"kernel": compiled.metadata.name, "shared": compiled.metadata.shared, "limit": subject.target.shared_bytes}
        facts["binary"] = len(compiled.asm["hsaco" if gpu == "mi300x" else "cubin"])
        facts["target"] = re.search(r"\.target (\w+)|amdhsa-unknown-(\w+)|amdgcn-amd-amdhsa--(\w+)", text).group(0)
        facts["matrix units"] = len(re.findall(MATRIX_UNITS[gpu], text))
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


def compile_all(keys: list[str]) -> None:
    for name in keys:
        try:
            said = compile_one(*name.split("-"))
        except Exception as error:  # one that fails is one test's failure
            said = f"{type(error).__name__}: {error}"
        print(json.dumps({name: said}), flush=True)


# -- in the testing process -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled(request, tmp_path_factory):
    """case -> dtype -> GPU -> facts, for the tests that were asked for; compiled anew, two at a time."""
    asked = [item.callspec.params for item in request.session.items if item.path == Path(__file__) and hasattr(item, "callspec")]
    keys = list(dict.fromkeys(key(p["case"], p["dtype"], p["gpu"]) for p in asked))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    workers = []
    for part in filter(None, (keys[::2], keys[1::2])):
        caches = tmp_path_factory.mktemp("caches")  # empty, so that everything is compiled
        own = {"TRITON_CACHE_DIR": str(caches / "triton"), "DTKERNELS_CACHE": str(caches / "dtkernels")}
        command = [sys.executable, __file__, *part]
        workers.append(subprocess.Popen(command, env=environment | own, stdout=subprocess.PIPE, text=True))
    found = {}
    for worker in workers:
        out, _ = worker.communicate(timeout=900)
        assert worker.returncode == 0
        for line in out.splitlines():
            found |= json.loads(line)

    def facts(case: str, dtype: str, gpu: str) -> list[dict]:
        said = found[key(case, dtype, gpu)]
        assert isinstance(said, list), said
        return said

    return facts


@every()
def test_compiles_and_fits_into_shared_memory(compiled, case, dtype, gpu):
    marks = {"a100": "sm_80", "h200": "sm_90a", "b200": "sm_100a", "mi300x": "gfx942"}
    kernels = compiled(case, dtype, gpu)
    assert kernels
    for facts in kernels:
        assert facts["binary"] and facts["target"].endswith(marks[gpu])
        assert facts["shared"] <= facts["limit"], facts


@every(cases=OPTIONS, dtypes=["bf16"], gpus=["h200", "mi300x"])
def test_options_of_attention_fit_too(compiled, case, dtype, gpu):
    (facts,) = compiled(case, dtype, gpu)
    assert facts["shared"] <= facts["limit"] and facts["matrix units"]
    assert facts["spilled"] in (None, {"STACK": 0, "LOCAL": 0})


@every(gpus=["h200"])
def test_spills_no_register(compiled, case, dtype, gpu):
    assert [facts["spilled"] for facts in compiled(case, dtype, gpu)] == [{"STACK": 0, "LOCAL": 0}] * len(compiled(case, dtype, gpu))


@every(cases=PRODUCTS, dtypes=("fp16", "bf16"))
def test_products_of_halves_use_the_matrix_units(compiled, case, dtype, gpu):
    assert all(facts["matrix units"] for facts in compiled(case, dtype, gpu))


@every(cases=ROWS)
def test_rows_move_16_bytes_at_once(compiled, case, dtype, gpu):
    assert all(facts["wide loads"] and facts["wide stores"] for facts in compiled(case, dtype, gpu))


if __name__ == "__main__":
    compile_all(sys.argv[1:])
