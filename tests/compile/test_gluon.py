"""The Gluon backend, compiled for compute capability 9.0 without a GPU: what it takes, what comes out, what it leaves to Triton."""

import os
import re
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from attention_sweep import apart, one_sweep
from gluon_programs import CAUSAL, PRODUCT, PRODUCTS, SCORE, WINDOW, attention, product

from dtkernels.algebra.pipeline import prepare
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.target import target
from dtkernels.codegen.transforms.warp_specialize.backend_select import backend
from dtkernels.lang import parse
from dtkernels.lang.parser import parse_schedule
from dtkernels.lang.schedule import Program
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
    **{name: (product(name), [(3000, 3072), (3072, 5000)]) for name in PRODUCTS if name != "whole"},
    "parts and numbers of columns": (product("parts of 160", "tanh(rdot(A[x, k], B[k, y], k) + b[y])").replace("A, B;", "A, B, b;"), [(3000, 3072), (3072, 5000), (5000,)]),
    "parts of a transposed product": (product("parts of 144", "sigmoid(rdot(A[k, x], B[y, k], k))"), [(3072, 3000), (5000, 3072)]),
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
    assert int(re.search(r"STACK:(\d+)", usage).group(1)) <= 32, usage
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


IN_BULK = "d_K.descriptor(Q, d_attention, K, V, d_Q); d_K.persistent(); d_K.stages(m:3); d_K.specialize_warps(m); d_K.num_warps(8);"
SCALARS = 400  #: bytes that a thread may spill: what the loops around hold; two products of a step are 256 more
#: parameters, columns, more of the schedule, loops over the queries, bytes that a thread may spill
SWEEPS = {
    "full": ({}, 128, "", 2, SCALARS),
    "causal": ({"causal": True}, 128, "", 3, SCALARS),
    "narrow": ({"causal": True}, 64, "", 3, 40),  # 0 before what products start from was loaded a step ahead
    "shared heads": ({"group": 4}, 128, "", 2, SCALARS),
    "split": ({"causal": True, "group": 4}, 112, "d_K.split(h_in:2);", 3, SCALARS + 8),
}


def swept(params: dict, columns: int, more: str, rows: int = 1000) -> list:
    """The launches of attention's gradients of keys and values for bfloat16 heads."""
    program = one_sweep(params, 128, 64, more=IN_BULK + more)
    heads = 8 // params.get("group", 1)
    given = {n: torch.empty(2, heads if n in ("K", "V") else 8, rows, columns, dtype=torch.bfloat16, device="meta") for n in program.algorithm.inputs}
    given["total_log"] = torch.empty(2, 8, rows, device="meta")
    module = load_module(emit(program, "call", H200, True), "gluon")
    return record_launches(module, "call", (*given.values(), *(0.1 for _ in program.algorithm.scalars)))


@pytest.mark.parametrize("name", SWEEPS)
def test_consumers_add_products_over_their_rows_to_memory(name):
    """Four products of rows and one over them in each step, none waited for by another; what is added goes by the copy engine."""
    params, columns, more, loops, spilled = SWEEPS[name]
    (launch,) = (x for x in swept(params, columns, more) if "gluon" in x.kernel.__name__)
    compiled = build(launch, H200)
    ptx = compiled.asm["ptx"]
    assert compiled.metadata.shared <= H200.shared_bytes
    assert "cp.reduce.async.bulk.tensor" in ptx and "cp.async.mbarrier.arrive.noinc" in ptx
    assert ptx.count("cp.reduce.async.bulk.tensor") == 2 * loops, "one in each loop of each consumer"
    usage = re.search(r"STACK:(\d+)", machine_code(compiled, "cubin", "cuobjdump", "--dump-resource-usage"))
    assert usage and int(usage[1]) <= spilled, usage


@pytest.mark.parametrize("params, columns", [({"causal": True}, 256), ({"causal": True, "group": 4}, 224), ({"group": 4}, 128)])
def test_gradients_of_wide_heads_and_of_heads_that_share_keys_fit_consumers(params, columns):
    """Loops whose masks do not nest are run one by one, as those inside a loop over heads are."""
    program = apart(params, columns)
    shapes = {n: (2, 8 // params.get("group", 1) if n in ("K", "V") else 8, 1000, columns) for n in program.algorithm.inputs}
    given = {n: torch.empty(shape, dtype=torch.bfloat16, device="meta") for n, shape in shapes.items()} | {"total_log": torch.empty(2, 8, 1000, device="meta")}
    module = load_module(emit(program, "call", H200, True), "apart")
    launches = [x for x in record_launches(module, "call", [*given.values(), *([0.1] * len(program.algorithm.scalars))]) if "gluon" in x.kernel.__name__]
    assert [x.kernel.__name__ for x in launches] == ["d_Q_gluon_kernel", "d_K_gluon_kernel", "d_V_gluon_kernel"]
    for launch in launches:
        compiled = build(launch, H200)
        usage = re.search(r"STACK:(\d+)", machine_code(compiled, "cubin", "cuobjdump", "--dump-resource-usage"))
        assert compiled.metadata.shared <= H200.shared_bytes and usage and int(usage[1]) <= SCALARS, launch.kernel.__name__


def test_a_store_replays_additions_in_bulk_without_triton():
    program = one_sweep({"causal": True}, 128, 64, more=IN_BULK)
    given = {n: torch.empty(2, 8, 1000, 128, dtype=torch.bfloat16, device="meta") for n in program.algorithm.inputs}
    given["total_log"] = torch.empty(2, 8, 1000, device="meta")
    args = (*given.values(), *(0.1 for _ in program.algorithm.scalars))
    source = emit(program, "call", H200, True)
    names = [x.kernel for x in record(host_text(source), args).launches]
    assert names == ["d_total_kernel", "d_Q_sum_zero_kernel", "d_K_gluon_kernel", "d_Q_kernel"]
    words = {**given, "total_log": torch.empty(2, 8, 1000, dtype=torch.bfloat16, device="meta")}
    args = (*words.values(), *(0.1 for _ in program.algorithm.scalars))
    assert "d_K_gluon_kernel" not in [x.kernel for x in record(host_text(source), args).launches], "numbers of 2 bytes are not copied by words"


def test_gradients_of_keys_that_heads_share_are_specialized_without_sums_in_memory():
    """The loop over heads lies around that over queries, and the producer walks both."""
    algorithm = one_sweep({"group": 4}, 128, 64).algorithm
    fused = "".join(f"{f}.fuse_at(d_Q, l); " for f in ("scores", "e", "d_e", "d_scores")) + "d_V.fuse_at(d_K, h_in);"
    text = fused + """d_K.block(b:1, K_1:1, l:128); d_K.tensorize(b:1, K_1:1, l:128, d:0, n:0, m:64, h_in:1); d_K.reorder(h_in, m);
    d_Q.block(b:1, h:1, m:64); d_Q.tensorize(b:1, h:1, m:64, l:64, d:0, n:0); d_total.tensorize(n:0);
    d_K.descriptor(Q, d_attention, K, V); d_K.persistent(); d_K.stages(m:3); d_K.specialize_warps(m); d_K.num_warps(8); d_Q.compile(); d_K.compile(); d_V.compile();"""
    program = Program(algorithm, parse_schedule(text))
    assert [backend(k, H200) for k in lower(program) if k.name == "d_K"] == [("gluon", "2 consumers of 64 rows of l")]
    emitted = emit(program, "call", H200, True)
    producer = emitted[emitted.index("def d_K_gluon_producer") : emitted.index("def d_K_gluon_kernel")]
    assert producer.index("for h_in in range(") < producer.index("for m_start in range(") and "copy_to_shared(total_log_row.index(slot)" in producer


LEFT = {
    "it adds to a sum in memory, not through a descriptor": IN_BULK.replace(", d_Q)", ")"),
    "products take 256 registers of a thread; 200 are left for them": IN_BULK + "d_K.tensorize(b:1, h:1, l:128, d:0, n:0, m:128);",
    "d_Q_sum is not added to in boxes of 64 or 128 rows": IN_BULK + "d_K.tensorize(b:1, h:1, l:128, d:0, n:0, m:32);",
    "K, which d_Q_sum is made of, does not stay for the whole block": IN_BULK.replace(", K, V, d_Q)", ", V, d_Q)"),
}


@pytest.mark.parametrize("reason", LEFT)
def test_sums_in_memory_that_are_left_to_triton(reason):
    text = LEFT[reason]
    program = one_sweep({}, 128, 64, more=text.split("d_K.tensorize")[0])
    if "d_K.tensorize" in text:
        rows = int(text.split("m:")[-1].split(")")[0])
        program = one_sweep({}, 128, rows, more=text.split("d_K.tensorize")[0])
    assert ("triton", reason) in [backend(k, H200) for k in lower(program) if k.name == "d_K"]
