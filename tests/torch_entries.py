"""What the tests of torch.library ask of every op, on a CPU and on a GPU."""

import torch

import dtkernels
from dtkernels.runtime.bind import library_ops


def leaves(case, grad: bool = True) -> tuple:
    """The inputs of a case, those with a gradient asking for it."""
    return tuple(t.requires_grad_(grad) if t.is_floating_point() else t for t in case.inputs)


def gradients(call, inputs, grad):
    """The result and the gradients of the inputs that ask for one."""
    result = call(*inputs)
    return [result, *torch.autograd.grad(result, [t for t in inputs if t.requires_grad], grad)]


def entry_of(op: str, call) -> tuple:
    """(name, positional, named) of what torch.library is asked for by ``call()``."""
    operator = getattr(dtkernels.ops, op)
    operator = operator.operator() if hasattr(operator, "operator") else operator
    tensors, named = library_ops.entry_arguments(op, library_ops.signature(op), *operator.arguments(call))
    return op, tensors, named
