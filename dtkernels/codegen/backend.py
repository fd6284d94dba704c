"""Which backend prints the descriptor form of a kernel: Gluon where the GPU and the nest allow it, else Triton."""

from __future__ import annotations

from ..lang.algorithm import Algorithm
from .dependent import Link
from .descriptors import described, unspecialized
from .gluon_form import Refused
from .gluon_kernel import print_gluon
from .gluon_plan import plan
from .nest import Kernel, Loop, statements
from .product_types import Operands
from .target import Target
from .triton_kernel import KernelText, print_kernel


def backend(kernel: Kernel, target: Target | None) -> tuple[str, str]:
    """("gluon" or "triton", why) for a kernel with descriptors. Gluon's text is for compute capability 9.0 alone."""
    if target is None or target.backend != "cuda" or target.arch != 90:
        return "triton", f"{target.name if target else 'no one GPU'}: Gluon is printed for compute capability 9.0"
    try:
        found = plan(described(kernel))
    except Refused as reason:
        return "triton", str(reason)
    return "gluon", f"{found.consumers} consumers of {found.share} rows of {found.rows.label}"


def print_described(kernel: Kernel, algorithm: Algorithm, operands: Operands, target: Target | None, link: Link | None = None) -> KernelText:
    """The text of the form with descriptors, by the backend that ``backend`` names; for ``link`` see ``print_kernel``."""
    if backend(kernel, target)[0] == "gluon":
        return print_gluon(plan(described(kernel)), algorithm, operands)
    return print_kernel(plain(described(kernel)), algorithm, operands, link)


def plain(kernel: Kernel) -> Kernel:
    """A kernel as Triton can compile it: it specialises warps where there are 4 alone, and not in several loops in a row."""
    loops = [s.axis.label for s in statements(kernel.body) if isinstance(s, Loop) and s.reduces and not s.tail]
    return kernel if kernel.num_warps == 4 and len(set(loops)) == len(loops) else unspecialized(kernel)
