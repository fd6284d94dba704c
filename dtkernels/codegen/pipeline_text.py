"""Format the pipeline for people to read: a program and its kernels after each pass, and the kernels as they are printed."""

from __future__ import annotations

from collections.abc import Iterator

from ..lang.schedule import Program
from . import pipeline
from .ir.nest import Kernel, nest_text
from .target import Target
from .transforms.warp_specialize.plan import WarpSpecializedKernel


def passes_text(program: Program, target: Target | None = None) -> str:
    """Return the program, then the nest of each kernel, after every pass that changed it."""
    return "\n\n".join(_paragraphs(program, target))


def _paragraphs(program: Program, target: Target | None) -> Iterator[str]:
    before: dict[str, str] = {}
    for func, name, left in pipeline.stages(program, target):
        text = f"{left.algorithm}\n{left.schedule}".rstrip() if isinstance(left, Program) else "\n\n".join(map(form_text, left))
        title = f"# {func}: {name}" if func else f"# {name}"
        if text == before.get(func):
            yield f"{title} (unchanged)"
        else:
            yield f"{title}\n{text}"
        if not name.startswith("printed"):
            before[func] = text


def forms_text(kernels: tuple[Kernel, ...], target: Target | None = None) -> str:
    """Return the nests that are printed: each kernel by pointers, then through descriptors where its schedule wants that."""
    found = []
    for form in pipeline.forms(kernels, target):
        found += [form_text(k) for k in (form.pointers, form.descriptors) if k is not None]
    return "\n\n".join(found)


def form_text(form: Kernel | WarpSpecializedKernel) -> str:
    """Return one kernel as indented text; of warp-specialized ones also who does what."""
    if isinstance(form, Kernel):
        return nest_text(form)
    rings = ", ".join(f"{ring.name} ({', '.join(t.name for t in ring.tiles)})" for ring in form.rings)
    roles = f"1 producer warp, {form.consumers} consumer warpgroups of {form.share} rows of {form.rows.label}"
    return f"{nest_text(form.kernel)}\n  warp-specialized: {roles}; {form.stages} stages of {rings}"
