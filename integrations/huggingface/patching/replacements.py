"""Put replacements into attributes of modules, and take each out again: exactly, in any order.

A replacement is a functools.partial whose first argument notes what the attribute held before. Where several reports replaced one
attribute, these notes are a chain from the newest to what was there at first, and a replacement leaves it from any place.
"""

from __future__ import annotations

import types
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from .report import PatchReport

FORWARDS = ("forward", "_old_forward")  # accelerate's hooks move a module's forward from the first to the second, and back


class Noted:
    """The first argument of a replacement. ``before``: what the attribute held, None where the module had none."""

    before: Any = None


def note_of(held: object) -> Noted | None:
    """Return the note of a replacement; None for anything else."""
    return held.args[0] if isinstance(held, partial) and held.args and isinstance(held.args[0], Noted) else None


def put(module: nn.Module, slot: str, ours: partial, report: PatchReport) -> None:
    """Replace an attribute of a module; `undo` of the report takes this replacement out, whatever other reports do before."""
    report.on_undo(partial(take_out, weakref.ref(module), FORWARDS if slot in FORWARDS else (slot,), ours.args[0]))
    place(module, slot, ours)


def place(module: nn.Module, slot: str, ours: partial) -> None:
    """Replace an attribute of a module, for `take_out` to undo."""
    ours.args[0].before = vars(module).get(slot)
    vars(module)[slot] = ours


def take_out(ref: weakref.ref[nn.Module], places: tuple[str, ...], note: Noted) -> None:
    """Take the replacement with this note out of the first of the places that has it; what others have put there since stays."""
    module = ref()
    if module is None:
        return
    for slot in places:
        above, held = None, vars(module).get(slot)
        while (its := note_of(held)) is not None and its is not note:
            above, held = its, its.before
        if its is None:
            continue
        if above is not None:
            above.before = note.before
        elif note.before is not None:
            vars(module)[slot] = note.before
        elif slot == "_old_forward":  # a hook came after the patch and expects a bound method here
            vars(module)[slot] = types.MethodType(type(module).forward, module)
        else:
            del vars(module)[slot]
        return
