"""Checked indices on a GPU: calls that kernels repeat are checked too, and a CUDA graph captures no check."""

import logging

import pytest
import torch

import dtkernels

GATHER = "Func f; In W, t; Var x, y; f[x, y] = W[t[x], y]; f.block(x:1, y:64); f.tensorize(y:64);"
SPEC = "op: gather_rows\ndoc: d\nalgorithm: 'Func f; In W, t; Var x, y; f[x, y] = W[t[x], y];'\n"
WRONG = r"index t\[x\] is 4 at x = 1; allowed along dimension 0 of W: 0 to 3"


@pytest.fixture
def tensors():
    w = torch.arange(12.0, device="cuda").reshape(4, 3)
    return w, torch.tensor([0, 3], device="cuda"), torch.tensor([0, 4], device="cuda")


def test_a_program_is_checked_at_every_call(tensors):
    w, right, wrong = tensors
    program = dtkernels.compile(GATHER, check_indices=True)
    for _ in range(3):
        assert torch.equal(program(w, right), w[right])
        with pytest.raises(IndexError, match=WRONG):
            program(w, wrong)


def test_an_op_is_checked_at_every_call(tensors, tmp_path, monkeypatch):
    monkeypatch.setenv("DTKERNELS_CHECK", "1")
    (tmp_path / "gather_rows.yaml").write_text(SPEC)
    op, (w, right, wrong) = dtkernels.register(tmp_path / "gather_rows.yaml"), tensors
    for source in (w, w.clone().requires_grad_()):
        for _ in range(3):
            assert torch.equal(op(source, right).detach(), w[right])
            with pytest.raises(IndexError, match=WRONG):
                op(source, wrong)


def test_a_graph_captures_no_check(tensors, caplog):
    w, right, _ = tensors
    program = dtkernels.compile(GATHER, check_indices=True)
    program(w, right)
    graph = torch.cuda.CUDAGraph()
    with caplog.at_level(logging.WARNING, "dtkernels"), torch.cuda.graph(graph):
        result = program(w, right)
    graph.replay()
    assert torch.equal(result, w[right]) and "not checked while a CUDA graph is captured" in caplog.text
