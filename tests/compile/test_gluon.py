"""The Gluon backend, compiled for compute capability 9.0 without a GPU: what it takes, what comes out, what it leaves to Triton."""

import os
import re
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from gluon_programs import CAUSAL, PRODUCT, SCORE, WINDOW, attention

from dtkernels.algebra.pipeline import prepare
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.target import target
from dtkernels.codegen.transforms.warp_specialize.backend_select import backend
from dtkernels.lang import parse
from dtkernels.runtime.build.source_cache import load_module
from dtkernels.runtime.build.specialization import builds
from dtkernels.runtime.build.triton_compile import build, compile_kernel, plain_types, record_launches
from dtkernels.runtime.launch.wrapper_recorder import host_text, record

H200 = target("h200")


def launches(text: str, shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.bfloat16, gpu: str = "h200") -> list:
    """What the wrapper of a program launches for inputs of ``shapes``."""
    program = parse(text)
    module = load_module(emit(prepare(program), "call", target(gpu)), "gluon")
    args = [torch.empty(s, dtype=dtype, device="meta") for s in shapes]
    scalars = [0.1] * len(program.algorithm.scalars)
    return record_launches(module, "call", (*args, *scalars))


def tool(name: str, *args: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    done = subprocess.run([str(path), *args], capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


def machine_code(compiled, suffix: str, *command: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, f"kernel.{suffix}")
        code = compiled.asm[suffix]
        Path(path).write_bytes(code if isinstance(code, bytes) else code.encode())
        return tool(*command, path, *(["-o", os.path.join(folder, "out")] if suffix == "ptx" else []))


HEADS = [(2, 4, 1000, 128)] * 3


@pytest.mark.parametrize("share", [(1, 8), (1, 4), (1, 2)])
def test_a_share_of_exponentials_leaves_the_special_function_unit(share):
    def of(more: str) -> tuple[dict[str, int], str]:
        (launch,) = (x for x in launches(attention() + more, HEADS) if "gluon" in x.kernel.__name__)
        code = machine_code(build(launch, H200), "cubin", "nvdisasm", "-c")
        return {word: len(re.findall(rf"\b{word}\b", code)) for word in ("MUFU.EX2", "STL", "LDL", "STS", "LDS")}, code

    (whole, _), (fewer, code) = of(""), of(f"att.approximate(exp:{share[0]}/{share[1]});")
    rows = 8  # exponentials that are one a row, for each tile
    assert fewer["MUFU.EX2"] <= whole["MUFU.EX2"] * (1 - share[0] / share[1]) + rows * 4
    assert "FADD.FTZ.RM" in code and fewer["STL"] == fewer["LDL"] == 0 and fewer["STS"] <= whole["STS"] and fewer["LDS"] <= whole["LDS"]
TWO = """Func f; In A, B, C; Var x, y; RVar k; f[x, y] = rdot(A[x, k], B[k, y], k) * sigmoid(rdot(A[x, k], C[k, y], k));
f.block(x:64, y:128); f.tensorize(x:64, y:128, k:64); f.persistent(); f.descriptor(A, B, C, f); f.num_warps(8); f.specialize_warps(k); f.ping_pong();"""
CASES = {
    "full": (attention(), HEADS),
    "causal": (attention(CAUSAL), HEADS),
    "groups": (attention(CAUSAL, 4), [(2, 8, 515, 64), (2, 2, 515, 64), (2, 2, 515, 64)]),
    "window": (attention(WINDOW), HEADS),
    "bias": (
        attention(f"{SCORE} + bias[b, h, m, l]").replace("V; SIn", "V, bias; SIn").replace("l:128", "l:64"),
        [*HEADS, (2, 4, 1000, 1000)],
    ),
    "product": (PRODUCT, [(1000, 512), (512, 1064)]),
    "in turn": (PRODUCT.replace("x:128", "x:64") + "mm.ping_pong();", [(3000, 3072), (3072, 5000)]),
    "in turn, two products": (TWO, [(3000, 3072), (3072, 5000), (3072, 5000)]),
    "wide": (PRODUCT.replace("y:256", "y:128").replace("sigmoid", "tanh"), [(4096, 4096), (4096, 4096)]),
}


@pytest.mark.parametrize("name", CASES)
def test_it_compiles_to_what_the_units_want(name):
    """Warpgroup products that run in parallel, bulk copies, next to nothing spilled, shared memory within the limit."""
    (launch,) = launches(*CASES[name])
    assert launch.kernel.__name__.endswith("_gluon_kernel")
    compiled = build(launch, H200)
    assert compiled.metadata.shared <= H200.shared_bytes and compiled.metadata.num_warps == 12
    sass = machine_code(compiled, "cubin", "nvdisasm", "-c")
    assert "HGMMA" in sass and "UTMALDG" in sass and "UTMASTG" in sass
    usage = machine_code(compiled, "cubin", "cuobjdump", "--dump-resource-usage")
    assert int(re.search(r"STACK:(\d+)", usage).group(1)) <= 16, usage
    report = machine_code(compiled, "ptx", "ptxas", "-v", "-arch=sm_90a")
    assert "serialized" not in report, report


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_inputs_go_to_gluon(dtype):
    assert [x.kernel.__name__ for x in launches(PRODUCT, [(256, 256)] * 2, dtype)] == ["mm_gluon_kernel"]


@pytest.mark.parametrize(
    "shapes, dtype", [([(256, 256)] * 2, torch.float32), ([(256, 250), (250, 256)], torch.bfloat16)], ids=["float32", "rows not aligned"]
)
def test_what_gluon_does_not_take_goes_by_pointers(shapes, dtype):
    assert [x.kernel.__name__ for x in launches(PRODUCT, shapes, dtype)] == ["mm_kernel"]


@pytest.mark.parametrize("gpu", ["a100", "b200", "mi300x"])
def test_other_gpus_keep_the_triton_text(gpu):
    (kernel,) = lower(prepare(parse(PRODUCT)))
    assert backend(kernel, target(gpu)) == ("triton", f"{gpu}: Gluon is printed for compute capability 9.0")
    assert "gluon" not in emit(prepare(parse(PRODUCT)), "call", target(gpu))


def test_without_a_target_the_file_is_for_any_gpu():
    assert "gluon" not in emit(prepare(parse(PRODUCT)))


def test_the_build_for_any_size_and_layout_compiles():
    """64-bit sizes and strides, nothing known to be a multiple of 16: the widest build of a table's row."""
    import triton.language as tl

    (launch,) = launches(*CASES["causal"])
    widest = builds(tuple(launch.kernel.arg_names), launch.args, launch.constants, plain_types(launch), tl.int64)[-1]
    assert set(widest.types.values()) >= {"i64", "constexpr"} and not widest.multiples
    assert compile_kernel(launch.kernel, widest.types, widest.constants, widest.multiples, launch.options, H200).asm["cubin"]


def test_a_store_replays_it_without_triton():
    """The host text of the emitted file runs against stand-ins and asks for the same launch."""
    args = tuple(torch.empty(256, 256, dtype=torch.bfloat16, device="meta") for _ in range(2))
    notes = record(host_text(emit(prepare(parse(PRODUCT)), "call", H200)), args)
    assert [x.kernel for x in notes.launches] == ["mm_gluon_kernel"]
    assert notes.launches[0].constants["STAGES"] == 3 and notes.launches[0].constants["INDEX"] == "tl.int32"


def test_its_launches_are_noted_while_triton_makes_them(monkeypatch):
    """What the emitted file asks of Gluon when it is imported is there beside the stand-ins too."""
    source = emit(prepare(parse(PRODUCT)), "call", H200)
    module = load_module(source, "gluon")
    monkeypatch.setattr(module, "mm_gluon_kernel", defaultdict(lambda: lambda *args, **kwargs: "compiled"))  # whatever the grid
    args = tuple(torch.empty(1024, 1024, dtype=torch.bfloat16, device="meta") for _ in range(2))
    assert [x.compiled for x in record(host_text(source), args, module).launches] == ["compiled"]


REFUSED = {
    "no loop has specialize_warps": PRODUCT.replace("mm.specialize_warps(k);", ""),
    "128 rows for 4 consumers; 64 or 128 each": PRODUCT.replace("num_warps(8)", "num_warps(16)"),
    "32 rows for 1 consumers; 64 or 128 each": PRODUCT.replace("x:128", "x:32").replace("num_warps(8)", "num_warps(4)"),
    "products take 256 registers of a thread; 200 are left for them": PRODUCT.replace("num_warps(8)", "num_warps(4)"),
    "no product of two loaded tiles": PRODUCT.replace("B[k, y]", "exp(B[k, y])"),
    "random numbers, which Gluon does not have": attention(f"where(random(7, b, h, m, l) < 0.1, -inf, {SCORE})"),
    "a tile that is loaded through a descriptor is used outside of products": attention(f"{SCORE} + bias[b, h, m, l]")
    .replace("V; SIn", "V, bias; SIn")
    .replace("descriptor(", "descriptor(bias, "),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_refusal_is_one_line_and_triton_takes_over(reason):
    program = prepare(parse(REFUSED[reason]))
    assert ("triton", reason) in [backend(k, H200) for k in lower(program)]
    assert "gluon" not in emit(program, "call", H200)


def test_scores_are_taken_to_the_power_of_two():
    """One fused operation and one exponential for each score."""
    text = emit(prepare(parse(attention(SCORE))), "call", H200)
    consumer = text[text.index("def att_gluon_consumer") : text.index("def att_gluon_producer")]
    assert "gl.exp(" not in consumer and consumer.count("gl.exp2(s * ((scale if scale_positive else 1.0) * 1.44") == 3


def test_a_loop_that_data_bounds_is_left_to_triton():
    """The producer would have to load how far it goes: its program did not compile."""
    text = """Func s, e, t, f; In Q, K, V, N; Var b, m, n; RVar l, d; s[b, m, l] = where(l < N[b], rdot(Q[b, m, d], K[b, l, d], d), -inf);
    e[b, m, l] = exp(s[b, m, l]); t[b, m] = rsum(e[b, m, l], l); f[b, m, n] = rdot(e[b, m, l], V[b, l, n], l) / t[b, m];
    s.fuse_at(f, l); e.fuse_at(f, l); t.fuse_at(f, l); f.block(b:1, m:128); f.tensorize(b:1, m:128, d:0, n:0, l:128); f.persistent();
    f.descriptor(K, Q, V, f); f.stages(l:2); f.specialize_warps(l); f.num_warps(8);"""
    (kernel,) = [k for k in lower(prepare(parse(text))) if k.name == "f"]
    assert backend(kernel, target("h200"))[0] == "triton"
    assert "gluon" not in emit(prepare(parse(text)), "call", target("h200"))
