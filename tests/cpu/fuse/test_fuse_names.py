"""Fused functions that are named like ops of the package."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
FRESH = """
import torch, dtkernels

@dtkernels.fuse
def attention(x, y):
    return torch.softmax(x, -1) * y

@dtkernels.fuse
def relu_backward(x):
    return x * 2

x, q = torch.randn(4, 6), torch.randn(1, 2, 8, 16, requires_grad=True)
found = attention(x, x)
torch.testing.assert_close(found, torch.softmax(x, -1) * x)
torch.testing.assert_close(torch.compile(lambda x: attention(x, x) + relu_backward(x), backend="aot_eager")(x), found + 2 * x)

def both(q):
    return dtkernels.ops.attention(q, q, q).sum() + dtkernels.ops.relu(q).sum()

both(q).backward()
right = torch.autograd.grad(torch.nn.functional.scaled_dot_product_attention(q, q, q).sum() + torch.relu(q).sum(), q)[0]
torch.testing.assert_close(q.grad, right, rtol=1e-4, atol=1e-5)
torch.testing.assert_close(torch.autograd.grad(torch.compile(both, backend="aot_eager")(q), q)[0], right, rtol=1e-4, atol=1e-5)
print(dtkernels.ops.attention.operator().entry)
"""


def test_an_op_of_the_package_keeps_its_name_though_a_function_took_it_first():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", FRESH], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1] == "attention"
