"""Print a Program as a Python file that imports only torch and triton: kernels, and a wrapper for each compiled Func."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ...lang.algorithm import Algorithm
from ...lang.errors import DTError
from ...lang.schedule import Program
from ..analysis.dtype_propagation import value_inputs
from ..analysis.product_types import Operands
from ..held_terms import FLOAT8_DEPTH
from ..ir.nest import Kernel
from ..pipeline import forms, lower, prelower
from ..target import Target
from ..transforms.warp_specialize.plan import WarpSpecializedKernel
from .gluon.expr import COPY, IMPORTS, TMA_ADD, helper
from .gluon.kernel import print_gluon
from .host_helpers import SUPPORT
from .host_wrapper import Wrapper, launch_comment, plain_labels
from .triton.functions import HELPERS
from .triton.kernel import KernelText, dimension_names, print_kernel


def emit(program: Program, entry: str | None = None, target: Target | None = None, uniform: bool | None = None) -> str:
    """Return the file for a prepared program (algebra done, schedule complete).

    A wrapper for each compiled Func, or for ``compile_to_kernel()`` a comment on how to launch its kernels; with ``entry``,
    one wrapper of that name that returns all outputs. With ``target`` kernels may be printed by the backend that this GPU has
    (backend_select.py); the file runs elsewhere too, by pointers. ``uniform``: inputs have one dtype, or are brought to it first, as in
    prebuilt kernels; by default where there is an ``entry``. Otherwise each product has the dtype of its own operands.
    """
    program = prelower(program)
    kernels = lower(program)
    found = forms(kernels, target, program.pieces is None, frozenset(program.algorithm.float8_buffers) if program.algorithm.has_float8 else None)
    operands = Operands.of(program.algorithm, kernels, entry is not None if uniform is None else uniform)
    by_pointers = (print_kernel(f.pointers, program.algorithm, operands) for f in found if f.pointers)
    texts = {k.name: text for k, text in zip(kernels, by_pointers)}
    reached = [one for k in kernels for one in (k, *k.tail)]
    described_texts = {k.name: _print_form(f.descriptors, program.algorithm, operands) for k, f in zip(reached, found) if f.descriptors}
    everything = (*texts.values(), *described_texts.values())
    _check_kernel_names(program, (t.source for t in everything))
    if entry is not None:
        wrappers = [Wrapper(program, kernels, operands, texts, described_texts, entry, program.outputs(), target=target).text()]
    else:
        hosts = {w: k.func for k in kernels for w in k.writes}
        groups = {root: tuple(o for o in program.outputs() if hosts[o] == root) for root in _roots(program, kernels)}
        alone = program.without_wrapper()
        several = len(groups) > 1
        wrappers = [
            launch_comment(program, kernels, texts, outputs)
            if alone.issuperset(outputs)
            else Wrapper(program, kernels, operands, texts, described_texts, root if root in outputs else outputs[0], outputs, several, target).text()
            for root, outputs in groups.items()
        ]
    used = "\n".join(w for w in wrappers if not w.startswith("#"))
    helpers = sorted({h for t in everything if not t.warps for h in t.helpers})
    minimum = FLOAT8_DEPTH if any("max_num_imprecise_acc" in t.source for t in everything) else 16 if any("tl.dot" in t.source for t in everything) else 1
    gluon = [t for t in everything if t.warps]
    descriptor = "from triton.tools.tensor_descriptor import TensorDescriptor\n" if "tensor_map(" in used else ""
    parts = ["import torch\nimport triton\nimport triton.language as tl\n" + descriptor + (IMPORTS if gluon else "")]
    parts += [text for call, text in (("tma_add(", TMA_ADD), ("copy_to_shared(", COPY)) if any(call in t.source for t in gluon)]
    parts += [HELPERS[h] for h in helpers]
    parts += [helper(h) for h in sorted({h for t in gluon for h in t.helpers})]
    parts += [
        text.replace("{minimum}", str(minimum))
        for name, text in SUPPORT.items()
        if f"{name}(" in used or f"({name})" in used
    ]
    parts += ["\n" + t.source for t in everything]
    return "\n".join(p if p.startswith("import") else "\n" + p.lstrip("\n") for p in parts + wrappers)


def _print_form(form: Kernel | WarpSpecializedKernel, algorithm: Algorithm, operands: Operands) -> KernelText:
    printer = print_gluon if isinstance(form, WarpSpecializedKernel) else print_kernel
    return printer(form, algorithm, operands)  # type: ignore[arg-type]  # each takes its own form


def _check_kernel_names(program: Program, sources: Iterable[str]) -> None:
    """Refuse a tensor or scalar under the name of a kernel: in the wrapper, its parameter would hide the kernel."""
    made = {name for source in sources for name in re.findall(r"^def (\w+)\(", source, re.MULTILINE)}
    for name in (*program.algorithm.inputs, *program.algorithm.scalars, *program.algorithm.funcs):
        if name in made:
            raise DTError("a name that the emitted file uses itself", found=f"{name!r}, a kernel", allowed="another name")


def _roots(program: Program, kernels: tuple[Kernel, ...]) -> tuple[str, ...]:
    """Return the kernels that get a wrapper: those that write an output, in the order the outputs were asked for."""
    hosts = {w: k.func for k in kernels for w in k.writes}
    return tuple(dict.fromkeys(hosts[o] for o in program.outputs()))


__all__ = ["dimension_names", "emit", "plain_labels", "value_inputs"]
