"""Ring attention over two and three processes, by kernels in the interpreter; and what it refuses."""

import pytest
import torch
from ring_cases import CASES
from several import run_together

import dtkernels
from dtkernels import ops

IN_THREE = ("zigzag_causal", "plain_causal", "windows", "what_no_pair_needs_stays")
IN_TWO = ("zigzag_causal", "full_and_softcap", "half_precision", "only_the_result", "segments", "processes_that_disagree")


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Cases in one set of processes for each number of them: starting them takes longer than a case."""
    sets = {2: list(IN_TWO), 3: list(IN_THREE)}
    together = {n: run_together("cpu", names, tmp_path_factory.mktemp("ring"), file="ring_cases.py", world=n, interpret=True) for n, names in sets.items()}
    return {(n, case): text for n, found in together.items() for case, text in found.items()}


@pytest.mark.parametrize("processes, case", [*((2, c) for c in IN_TWO), *((3, c) for c in IN_THREE)])
def test_several_processes(said, processes, case):
    assert not said[processes, case]


def test_every_case_runs():
    assert {*IN_TWO, *IN_THREE} == {*CASES}


def test_one_process_needs_no_group():
    q, k, v = (torch.randn(1, h, 6, 8, requires_grad=True) for h in (4, 2, 2))
    found, wanted = ops.ring_attention(q, k, v, causal=True), ops.attention(q, k, v, causal=True)
    torch.testing.assert_close(found, wanted)
    for a, b in zip(*(torch.autograd.grad(r.square().sum(), (q, k, v)) for r in (found, wanted))):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("operator, shape, makes", [(ops.relu_squared.operator(), (60,), 0), (ops.softmax.operator(), (3, 20), 1)], ids=["relu_squared", "softmax"])
def test_gradients_without_autograd(operator, shape, makes):
    """Backward of an op by itself: that of a squared ReLU reads the input, that of a softmax what forward makes."""
    x, adjoint = torch.randn(shape, requires_grad=True), torch.randn(shape)
    (name,) = operator.manifest.inputs
    (wanted,) = torch.autograd.grad(operator(x), x, adjoint)
    before = sum(dtkernels.paths().get(operator.name, {}).values())
    (found,) = operator.gradients((name,), {operator.manifest.outputs[0]: adjoint}, **{name: x})
    assert torch.equal(found, wanted) and not found.requires_grad
    assert sum(dtkernels.paths().get(operator.name, {}).values()) - before == makes
    with pytest.raises(ValueError, match="gradients of inputs with further dimensions; allowed: the ranks that the op declares"):
        operator.gradients((name,), {operator.manifest.outputs[0]: adjoint[None]}, **{name: x[None]})


def test_what_is_refused_is_one_line():
    q, p = torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 4, 8)
    for call, said in (
        (lambda: ops.ring_attention(q, q, q), "5 tokens in a process; allowed: an even number of them in the order 'zigzag'"),
        (lambda: ops.ring_attention(q, q, q, order="striped"), "order is 'striped'; allowed: 'zigzag', 'plain'"),
        (lambda: ops.ring_attention(q[0], q, q), r"q is \(B, H, M, D\), k \(B, G, M, D\)"),
        (lambda: ops.ring_positions(4, order="last"), "order is 'last'"),
        (lambda: ops.ring_attention(p, p, p, window=(-1, None)), "a window reaches 0 or more keys"),
        (lambda: ops.ring_attention(p, p, p, segments=torch.zeros(5).int()), r"segments has shape \(5,\); allowed: \(4,\) or \(1, 4\)"),
        (lambda: ops.ring_attention(p, p, p, sinks=torch.zeros(3)), r"sinks has one number a head, shape \(2,\)"),
        (lambda: ops.ring_attention(p, p[:, :0], p[:, :0]), "the heads of k and v divide those of q"),
    ):
        with pytest.raises(ValueError, match=said) as error:
            call()
        assert "\n" not in str(error.value)
    with pytest.raises(TypeError, match="ring_attention: segments is torch.float32; allowed: integers"):
        ops.ring_attention(p, p, p, segments=torch.zeros(4))
    with pytest.raises(TypeError, match="ring_attention: scale is a tensor; allowed: a number"):
        ops.ring_attention(p, p, p, scale=torch.ones(()))
