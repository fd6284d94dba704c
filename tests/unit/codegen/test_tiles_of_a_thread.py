"""The formula keeps tensors small enough for a thread to hold, or nearly: Triton takes minutes for what it spills."""

from dtkernels.codegen.analysis.resources import MOST_OF_A_THREAD
from dtkernels.lang import parse
from dtkernels.show import Subject, Written


def test_a_product_computed_element_by_element_is_in_narrow_tiles():
    """The gradient for ``B`` at ``x - y`` has a product of three dimensions, which the matrix units do not take."""
    program = parse("""Func a, f; In A, B, C; Var x, y, z; RVar k; a[z, x, k] = A[k, z, x] * C[k];
    f[z, x, y] = rdot(a[z, x, k], B[y, z, k], k) * B[y, x - y, x + x];""")
    subject = Subject(Written("narrow", program, scheduled=False), "h200", (16, 5, 40, 40), "fp32", wanted=("A", "B", "C"))
    for kernel in subject.kernels():
        found = subject.resources(kernel)
        assert found.largest <= MOST_OF_A_THREAD * found.threads
