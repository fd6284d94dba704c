"""Calls of compiled graphs on a GPU that is not there: launches do nothing, and record what they are given."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]
HEAD = """
import ctypes, stand_in_driver, torch, dtkernels
stand_in_driver.use()
from dtkernels.runtime.bind.operator import Operator
from dtkernels.runtime.bind.variant import Variant
from dtkernels.runtime.launch import bound_launch
launched = []
graphs = False
bound_launch.driver().launch = lambda config, function, params, extra: launched.append(list(params)) or 0
general = []
def noting(kind, name):
    plain = getattr(kind, name)
    def noted(*args, **kwargs):
        general.append(name)
        return plain(*args, **kwargs)
    setattr(kind, name, noted)
noting(Operator, "bind")
noting(Variant, "forward")
def steps():
    found = (len(launched), general.count("forward") if graphs else len(general))
    launched.clear(), general.clear()
    return found
"""
INFERENCE = """
dtkernels.ops.rmsnorm.operator()
from dtkernels.runtime.bind import library_ops
library_ops.ensure("rmsnorm")
entry = torch.ops.dtkernels.rmsnorm_inference
x, w = torch.randn(16, 1024).bfloat16(), torch.randn(1024).bfloat16()
entry(x, w, eps_number=1e-5)
entry(x, w, eps_number=1e-5)
steps()
shapes = [entry(x, w, eps_number=1e-5).shape]
again = steps()
def eps():
    return sorted(ctypes.c_float.from_address(p).value for p in launched[0] if 1e-7 < ctypes.c_float.from_address(p).value < 1e-2)
entry(x, w, eps_number=1e-3)
other = eps()
number = steps()
entry(x, w, eps_number=1e-5, offset=1)
offset = steps()
wide = torch.randn(16, 2048).bfloat16()
shapes.append(entry(wide, torch.randn(2048).bfloat16(), eps_number=1e-5).shape)
size = steps()
entry(x, w, eps_number=1e-5)
back = steps()
flat = torch.randn(16 * 1024 + 1).bfloat16()
entry(flat[1:].view(16, 1024), w, eps_number=1e-5)
unaligned = steps()
print([tuple(s) for s in shapes], again, [round(e, 6) for e in other], number, offset[1] > 0, size[1] > 0, back, unaligned[1] > 0)
"""
GRADIENTS = """
graphs = True  # the outer entry binds each call; a compiled graph calls the inner ones alone
dtkernels.ops.softmax.operator()
from dtkernels.runtime.bind import library_ops
library_ops.ensure("softmax")
x = torch.randn(16, 1024).bfloat16().requires_grad_()
def step():
    torch.ops.dtkernels.softmax(x).backward(torch.ones(16, 1024).bfloat16())  # through the two entries of graphs
for _ in range(2):
    step()
steps()
before = dtkernels.paths()
step()
repeated, after = steps(), dtkernels.paths()
counted = [after[n]["gpu"] - before[n]["gpu"] for n in ("softmax", "softmax backward")]
torch.use_deterministic_algorithms(True)
step()
print(repeated, counted, steps()[1] > 0)
"""


def output(text: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    done = subprocess.run([sys.executable, "-c", HEAD + text], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_a_call_without_gradients_goes_straight_to_its_kernel():
    """Other numbers reach the kernel; other parameters, sizes and alignments are bound anew."""
    assert output(INFERENCE) == "[(16, 1024), (16, 2048)] (1, 0) [0.001] (1, 0) True True (1, 0) True"


def test_forward_and_backward_of_a_graph_go_straight_to_their_kernels():
    assert output(GRADIENTS) == "(2, 0) [1, 1] True"
