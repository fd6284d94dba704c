"""Calls that someone from outside would make: what is legal is right, what is not is one line."""

import copy
import pickle
import sys
import threading

import numpy as np
import pytest
import torch

import dtkernels
from dtkernels.runtime.bind.library_ops import known

SPEC = """op: {op}
doc: {times} * A.
algorithm: |
  Func {op}; In {name}; Var x;
  {op}[x] = {times} * {name}[x];
"""


@pytest.fixture
def register(tmp_path):
    def make(op: str, times: int = 2, name: str = "A"):
        path = tmp_path / "spec.yaml"
        path.write_text(SPEC.format(op=op, times=times, name=name))
        return dtkernels.register(path)

    return make


@pytest.fixture
def by_reference(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("DTKERNELS_FALLBACK", "reference")


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(4, 6), (2, 4, 6)])
def test_a_result_may_be_changed_in_place(shape, by_reference):
    x, w = random(*shape).requires_grad_(), torch.ones(6)
    dtkernels.ops.rmsnorm(x, w).mul_(2).sum().backward()
    y = x.detach().double().requires_grad_()
    (torch.nn.functional.rms_norm(y, (6,), w.double(), 1e-6) * 2).sum().backward()
    torch.testing.assert_close(x.grad, y.grad.float())


def test_a_module_that_works_in_place_may_follow_a_patched_one(by_reference):
    model = torch.nn.Sequential(torch.nn.LayerNorm(6), torch.nn.ReLU(inplace=True))
    x = random(3, 6)
    wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    dtkernels.apply_to(model, "layernorm")
    torch.testing.assert_close(torch.autograd.grad(model(x).square().sum(), list(model.parameters())), wanted)


def test_truth_values_are_numbers_wherever_one_is_wanted():
    mask = torch.tensor([[True, False, False], [True, True, True]])
    torch.testing.assert_close(dtkernels.ops.softmax(mask), torch.softmax(mask.double(), -1).float())
    torch.testing.assert_close(dtkernels.ops.rmsnorm(mask, torch.ones(3).double()), torch.nn.functional.rms_norm(mask.double(), (3,), eps=1e-6))


REFUSED = {
    "causal is 'no'; allowed: True or False": {"causal": "no"},
    "causal is [True]; allowed": {"causal": [True]},
    "window is 3; allowed: (left, right)": {"window": 3},
    "window is (1.5, 0); allowed": {"window": (1.5, 0)},
    "window is (1, 2, 3); allowed": {"window": (1, 2, 3)},
    "offset is 1.5; allowed: an integer": {"offset": 1.5},
    "mask is torch.int64; allowed: bool or floating point": {"mask": torch.ones(4, 4, dtype=torch.int64)},
    "mask is a list; allowed: a tensor": {"mask": [[True]]},
    "sinks is a int; allowed: a tensor": {"sinks": 0},
}


@pytest.mark.parametrize("said", REFUSED)
def test_attention_refuses_in_one_line_what_is_none_of_its_arguments(said):
    q = random(1, 2, 4, 8)
    with pytest.raises(TypeError) as error:
        dtkernels.ops.attention(q, q, q, **REFUSED[said])
    assert str(error.value).startswith(f"attention: {said}") and "\n" not in str(error.value)


@pytest.mark.parametrize("value", [None, 1.0, "x", [1.0], np.ones((2, 3), np.float32)])
def test_what_is_no_tensor_is_named_in_one_line(value):
    x = random(1, 2, 3, 4)
    for said, call in (
        ("cross_entropy: logits", lambda: dtkernels.ops.cross_entropy(value, torch.zeros(2, dtype=torch.int64))),
        ("cross_entropy: target", lambda: dtkernels.ops.cross_entropy(random(2, 3), value)),
        ("rope: k", lambda: dtkernels.ops.rope(x, value, x[0], x[0])),
        ("rope: sin", lambda: dtkernels.ops.rope(x, x, x[0], value)),
        ("attention: v", lambda: dtkernels.ops.attention(x, x, value)),
    ):
        with pytest.raises(TypeError, match=f"^{said} is {'None' if value is None else f'a {type(value).__name__}'}; allowed: a tensor$"):
            call()


def test_attention_takes_numbers_and_truth_values_of_numpy():
    q = random(1, 2, 4, 8)
    same = dtkernels.ops.attention(q, q, q, causal=np.bool_(True), window=(np.int64(1), None))
    assert torch.equal(same, dtkernels.ops.attention(q, q, q, causal=True, window=(1, None)))


# -- ops of one's own ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["register", "registered_names", "__getattr__", "__class__"])
def test_an_op_that_could_not_be_reached_is_not_registered(op, register):
    with pytest.raises(dtkernels.DTError, match="dtkernels.ops has something else of this name"):
        register(op)


@pytest.mark.parametrize("op", ["größe", "\ufb01"])
def test_an_op_is_called_what_tables_and_torch_can_write(op, tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC.format(op="f", times=2, name="A").replace("op: f", f"op: {op}"), encoding="utf-8")
    with pytest.raises(dtkernels.DTError, match="op is a Python name of ASCII letters, digits and _"):
        dtkernels.register(path)


def test_an_op_may_be_called_as_an_entry_of_another(register):
    x = random(5)
    for op in (register("strange"), register("strange_forward", 3), register("strange_open", 4), register("strange_open_open", 5)):
        assert torch.equal(torch.compile(lambda x, op=op: op(x), backend="eager", fullgraph=True)(x), op(x))
    assert len({known[n].name for n in known if n.startswith("strange")}) == 4


@pytest.mark.parametrize("name", ["self", "args", "kwargs", "op"])
def test_an_input_may_have_any_name(name, register):
    op, x = register(f"named_{name}", name=name), random(5)
    assert torch.equal(op(**{name: x}), 2 * x)
    assert dtkernels.explain(op.name, **{name: x}).forward.sizes is not None
    dtkernels.warmup(op.name, **{name: x})


def test_an_op_refuses_what_the_program_would(tmp_path):
    def op(name: str, algorithm: str):
        (tmp_path / "spec.yaml").write_text(f"op: {name}\ndoc: x\nalgorithm: '{algorithm}'\n")
        return dtkernels.register(tmp_path / "spec.yaml")

    for line, call in {
        r"seven: A is \(5,\): x is 7 in the program, 5 in A; allowed: A \(..., x\)": lambda: op("seven", "Func seven; In A; Var x; Extent x = 7; seven[x] = A[x];")(random(5)),
        r"turned: A is \(4, 6\): x is 4 in A, y is 6 in A; the two are one extent; allowed: A \(..., x, y\)": lambda: op(
            "turned", "Func turned; In A; Var x, y; turned[x, y] = A[x, y] + A[y, x];"
        )(random(4, 6)),
    }.items():
        with pytest.raises(ValueError, match=f"^{line}"):
            call()
    moved = op("moved", "Func moved; In A; SIn s; Var x; moved[x] = A[x] + A[x - s];")
    for value, found in ((1.5, "1.5"), (torch.tensor(1.0), "torch.float32")):
        with pytest.raises(TypeError, match=f"^moved: s is {found}; allowed: an integer, as it stands in an index$"):
            moved(random(5), value)
    assert torch.equal(moved(random(5), 2), moved(random(5), torch.tensor(2)))


BATCHED = {
    "an extent that an input tells": ("In A; Var x; RVar z; Extent x = A[0]; f[x] = rsum(where(z <= x, A[z], 0), z);", (2, 3, 5), ()),
    "an extent that is a number": ("In A; Var x; Extent x = 5; f[x] = 2 * A[x];", (2, 3, 5), ()),
    "an extent that another input tells": ("In A, B; Var x; Extent x = B[0]; f[x] = A[x] * B[2];", (2, 3, 5), (5,)),
    "rows that pick those of another input": ("In A, B; Var x, c; f[x, c] = A[x, c] * B[x / 2, c];", (2, 3, 4, 5), (2, 5)),
}


@pytest.mark.parametrize("name", BATCHED)
def test_leading_dimensions_are_calls_of_their_own(name, tmp_path, by_reference):
    text, shape, rest = BATCHED[name]
    (tmp_path / "spec.yaml").write_text(f"op: many\ndoc: x\nalgorithm: '{f'Func many; {text}'.replace('f[', 'many[')}'\n")
    op = dtkernels.register(tmp_path / "spec.yaml")
    a, more = random(*shape), [random(*rest, seed=1)] if rest else []
    wanted = torch.stack([op(row, *more) for row in a.flatten(0, 1)]).unflatten(0, a.shape[:2])
    torch.testing.assert_close(op(a, *more), wanted)


def test_a_module_that_holds_an_op_is_copied_and_pickled(register):
    op, x = register("held"), random(5)
    module = torch.nn.Module()
    module.op = op
    assert copy.deepcopy(module).op is op and pickle.loads(pickle.dumps(module)).op is op
    text = pickle.dumps(op).replace(b"held", b"gone")
    with pytest.raises(dtkernels.DTError, match="a pickle names the op 'gone', which is not registered here: allowed: dtkernels.register"):
        pickle.loads(text)
    program = dtkernels.compile("Func f; In A; Var x; f[x] = 2 * A[x];")
    for again in (program(A=x), copy.deepcopy(program)(A=x), pickle.loads(pickle.dumps(program))(A=x)):
        assert torch.equal(again, 2 * x)


@pytest.mark.parametrize("ops", [3, None, ["attention", 3], [["attention"]]])
def test_apply_to_says_what_ops_may_be(ops):
    with pytest.raises(TypeError, match="^apply_to: ops is a name or several names; got "):
        dtkernels.apply_to(torch.nn.Linear(2, 2), ops)


def test_attention_of_torchs_own_module_is_named_with_the_reason():
    model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = random(2, 5, 8)
    before = model(x)
    report = dtkernels.apply_to(model)
    assert [(row.module, row.op, row.state) for row in report.rows] == [("self_attn", "attention", "skipped")]
    assert "nn.MultiheadAttention is one function of torch" in str(report) and torch.equal(model(x), before)


def test_a_transformers_that_lacks_the_interface_is_told_of(monkeypatch):
    transformers = pytest.importorskip("transformers")
    from dtkernels.integrations import huggingface

    config = transformers.OPTConfig(vocab_size=64, hidden_size=32, ffn_dim=64, num_hidden_layers=1, num_attention_heads=2, word_embed_proj_dim=32)
    model = transformers.OPTModel(config)
    monkeypatch.delattr(huggingface.attention, "attention_function", raising=False)
    monkeypatch.setitem(sys.modules, "dtkernels.integrations.huggingface.attention.attention_function", None)
    report = dtkernels.apply_to(model, "attention")
    assert report.rows and all(row.state == "skipped" and "this transformers lacks what is needed" in row.reason for row in report.rows)


# -- transforms, threads ---------------------------------------------------------------------------------------------------


def test_derivatives_by_batches_or_forward_are_refused_in_one_line():
    x = random(3)
    with pytest.raises(NotImplementedError, match="^softmax: torch.vmap is not supported"):
        torch.func.jacrev(dtkernels.ops.softmax)(x)
    with pytest.raises(NotImplementedError, match="^softmax: forward-mode differentiation is not supported"):
        torch.func.hessian(lambda x: dtkernels.ops.softmax(x).square().sum())(x)


def test_gradients_that_are_asked_for_several_at_once(by_reference):
    x, w, several = random(3, 6).requires_grad_(), random(6, seed=1).requires_grad_(), random(4, 3, 6, seed=2)
    found = torch.autograd.grad(dtkernels.ops.rmsnorm(x, w), (x, w), several, is_grads_batched=True)
    for i, one in enumerate(several):
        for ours, wanted in zip(found, torch.autograd.grad(dtkernels.ops.rmsnorm(x, w), (x, w), one), strict=True):
            torch.testing.assert_close(ours[i], wanted)


@pytest.mark.kernels
def test_a_compiled_program_says_that_it_has_no_gradient():
    """Its result was cut off from what it is made of, without a word."""
    program, x = dtkernels.compile("Func f, g; In A; Var x; f[x] = 2 * A[x]; g[x] = 3 * A[x]; f.compile(); g.compile();"), random(5).requires_grad_()
    with pytest.raises(RuntimeError, match="^f: a compiled program has no gradient; allowed: an op"):
        (x + program(A=x)).sum().backward()
    assert torch.equal(program.g(x).mul_(2), 6 * x) and not program(x.detach()).requires_grad
    with torch.no_grad():
        assert torch.equal(program(x), 2 * x)
    with pytest.raises(NotImplementedError, match="^f: torch.func is not supported by a compiled program"):
        torch.vmap(program)(random(2, 5))
    with pytest.raises(NotImplementedError, match="^f: torch.func is not supported by a compiled program"):
        torch.func.grad(lambda x: program(x).sum())(random(5))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="^f: forward-mode differentiation is not supported"):
        program(torch.autograd.forward_ad.make_dual(random(5), random(5)))


@pytest.mark.kernels
def test_threads_that_call_one_op_first_at_once_are_all_right():
    x, found = random(7, 33), {}
    wanted = torch.softmax(x, -1)
    together = threading.Barrier(16)

    def call(i):
        together.wait()
        try:
            found[i] = torch.allclose(dtkernels.ops.softmax(x.clone().requires_grad_()), wanted, atol=1e-6)
            program = dtkernels.compile("Func f; In A; Var x, y; f[x, y] = 2 * A[x, y]; f.tensorize(y:16);")
            found[i] = found[i] and torch.equal(program(A=x), 2 * x)
        except Exception as error:
            found[i] = repr(error)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert set(found.values()) == {True}
