"""``dtkernels.explain(..., gpu=...)`` says on a CPU what a GPU would run, as the command line does."""

import pytest
import torch

import dtkernels
from dtkernels import lookup, show
from dtkernels.lang import DTError


def meta(*shape: int, grad: bool = False, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad)


CALLS = [
    ("softmax", lambda g, t: (meta(16384, 8192, grad=g, dtype=t),), {}, "x=16384,y=8192", {}),
    ("relu", lambda g, t: (meta(4096, 4096, grad=g, dtype=t),), {}, "x=16777216", {}),
    ("rmsnorm", lambda g, t: (meta(2048, 1024, grad=g, dtype=t), meta(1024, grad=g, dtype=t)), {}, "x=2048,y=1024", {}),
    ("mmsigmoid", lambda g, t: (meta(512, 1024, grad=g, dtype=t), meta(1024, 640, grad=g, dtype=t)), {}, "x=512,y=640,k=1024", {}),
    ("two_mm", lambda g, t: (meta(64, 32, grad=g, dtype=t), meta(32, 16, grad=g, dtype=t), meta(16, 128, grad=g, dtype=t)), {}, "m=64,n=128,l=16,k=32", {}),
    ("attention", lambda g, t: [meta(2, 16, 2048, 128, grad=g, dtype=t)] * 3, {"causal": True}, "b=2,h=16,m=2048,n=128,l=2048,d=128", {"causal": True}),
]


@pytest.mark.parametrize("gpu", ["h200", "h100", "a100", "mi300x"])
@pytest.mark.parametrize("grad", [False, True], ids=["forward", "both"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("op, args, given, sizes, params", CALLS, ids=[c[0] for c in CALLS])
def test_python_and_the_command_line_say_the_same(op, args, given, sizes, params, dtype, grad, gpu):
    told = dtkernels.explain(op, *args(grad, {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]), gpu=gpu, **given)
    written = show.read(op)
    named = {label: int(n) for label, n in (part.split("=") for part in sizes.split(","))}
    wanted = tuple(n for n in written.program.algorithm.inputs if n != "bounds") if grad else None
    if grad and op == "attention":
        wanted = ("Q", "K", "V")
    subject = show.Subject(written, gpu, named, dtype, params, wanted)
    table, found = lookup.decisions(subject)
    assert told.table == table
    for ours, theirs in zip(found, [told.forward, told.backward], strict=False):
        assert str(ours) == str(theirs)
    assert len(found) == 1 + (told.backward is not None)


def test_no_tensor_needs_data_and_none_is_made():
    told = dtkernels.explain("softmax", meta(1 << 20, 1 << 16), gpu="h200")
    assert told.gpu == "h200" and told.table == "nvidia_h200" and told.forward.sizes == {"x": 1 << 20, "y": 1 << 16}


def test_a_cpu_without_a_gpu_named_says_how_to_ask(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    assert 'gpu="h200" says what that GPU would run' in str(dtkernels.explain("softmax", torch.zeros(4, 4)))
    told = dtkernels.explain("softmax", torch.zeros(4, 4, dtype=torch.float64), gpu="h200")
    assert told.forward.path == "reference" and "on this dtype" in told.forward.why


@pytest.mark.parametrize("gpu", ["h300", 3, ""])
def test_an_unknown_gpu_is_one_line(gpu):
    with pytest.raises(DTError, match="unknown GPU: found .*; allowed: a100, l40s, h100") as error:
        dtkernels.explain("softmax", torch.zeros(4, 4), gpu=gpu)
    assert "\n" not in str(error.value)


def test_an_op_with_an_argument_of_that_name_gets_it(tmp_path):
    (tmp_path / "mine.yaml").write_text("op: mine\ndoc: y\nalgorithm: 'Func mine; In A, gpu; Var i; mine[i] = A[i] * gpu[i];'\n")
    op = dtkernels.register(tmp_path / "mine.yaml")
    assert dtkernels.explain(op, A=torch.zeros(4), gpu=torch.zeros(4)).forward.sizes in ({"i": 4}, {})


def test_source_refuses_extents_that_do_not_fit():
    with pytest.raises(ValueError, match="a shape of mmsigmoid has an extent for each label: found 64x64; allowed: 3 extents: x, y, k"):
        dtkernels.ops.mmsigmoid.source(shape=(64, 64))
    assert "@triton.jit" in dtkernels.ops.mmsigmoid.source(shape=(64, 64, 64)) and "@triton.jit" in dtkernels.ops.relu.source()
