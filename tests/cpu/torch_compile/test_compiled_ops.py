"""Every op inside torch.compile and torch.export: one graph, forward and backward, for every length, and under both kinds of checkpointing."""

from functools import partial

import pytest
import torch
from compiled_op_cases import CASES
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dtkernels import ops

LENGTHS = (7, 13)  # no other size of the cases: torch.compile takes equal sizes for one


@pytest.fixture(autouse=True)
def reference(monkeypatch):
    """Eager torch on the same algorithm: what is tested here is how calls get there."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    torch._dynamo.reset()


def results(call, inputs) -> list[torch.Tensor]:
    """The results of a call, and the gradients of a sum of their sines."""
    found = call(*inputs)
    found = list(found) if isinstance(found, tuple) else [found]
    wanted = [t for t in inputs if t.requires_grad]
    return [*found, *torch.autograd.grad(sum(r.sin().sum() for r in found if r.requires_grad), wanted)]


BESIDE = {"register", "ring_attention", "ring_positions"}  #: not an op; exchanges with other processes, which breaks a graph


def test_no_op_is_left_out():
    assert {name.split(" ")[0] for name in CASES} == {*ops.__all__} - BESIDE


@pytest.mark.parametrize("name", CASES)
def test_one_graph_for_every_length(name):
    case = CASES[name]
    compiled = torch.compile(case.run, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in LENGTHS:
            inputs = case.inputs(length)
            torch.testing.assert_close(results(compiled, inputs), results(case.run, inputs))


#: with sizes in a choice, with ranges of keys, in pieces, decomposed, with checks of several shapes
KINDS = ["attention softcap", "attention packed", "linear_cross_entropy", "rmsnorm", "kl_divergence"]


@pytest.mark.parametrize("name", KINDS)
def test_exported_for_every_length(name):
    case = CASES[name]
    inputs, longer = (case.inputs(length) for length in LENGTHS)

    class Call(torch.nn.Module):
        def forward(self, *inputs):
            return case.run(*inputs)

    length = torch.export.Dim("length", min=3)
    with torch.no_grad():
        program = torch.export.export(Call(), inputs, dynamic_shapes=(case.dynamic_shapes(length),), strict=False)
        torch.testing.assert_close(program.module()(*longer), case.run(*longer))


def policy(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if "dtkernels" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


WAYS = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "not reentrant": partial(checkpoint, use_reentrant=False),
    "selective": partial(checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["attention lse", "linear_cross_entropy", "rmsnorm"])
def test_checkpointed_in_a_graph(name, way):
    case = CASES[name]
    inputs = case.inputs(LENGTHS[0])
    compiled = torch.compile(lambda *given: WAYS[way](case.run, *given), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(results(compiled, inputs), results(case.run, inputs))
