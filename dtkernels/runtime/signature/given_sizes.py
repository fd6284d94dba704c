"""Complete the extents that a user gives, in order or by label, to the extent of every label. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ...lang.errors import DTError

if TYPE_CHECKING:
    from ...lang.algorithm import Algorithm


def label_order(algorithm: Algorithm, output: str) -> tuple[str, ...]:
    """Return the output's labels, then the other labels in order of declaration."""
    own = algorithm[output].labels
    return own + tuple(label for label in algorithm.labels if label not in own)


def free_labels(algorithm: Algorithm, output: str) -> tuple[str, ...]:
    """Return the labels whose extents a user gives: no constants, and one label per shared extent."""
    from ...lang.extents.formulas import follows_from_labels

    found: list[str] = []
    for label in label_order(algorithm, output):
        if _constant(algorithm, label) is None and not algorithm.tied_labels(label) & set(found) and not follows_from_labels(algorithm, label):
            found.append(label)
    return tuple(found)


def sizes_in_order(algorithm: Algorithm, output: str, shape: Sequence[int], what: str) -> dict[str, int]:
    """Return the extent of every label from those of ``free_labels``, in order. Raises DTError where the count differs."""
    free = free_labels(algorithm, output)
    if len(shape) != len(free):
        few = f"{len(free)} extent{'s' if len(free) != 1 else ''}" + (f": {', '.join(free)}" if free else "")
        raise DTError(f"a shape of {what} has an extent for each label", found="x".join(map(str, shape)) or "none", allowed=few)
    return _filled(algorithm, output, dict(zip(free, shape)))


def sizes_by_label(algorithm: Algorithm, output: str, given: Mapping[str, int], what: str) -> dict[str, int]:
    """Return the extent of every label from those given by name. Raises DTError for an unknown, missing or contradictory one."""
    from ...lang.extents.formulas import follows_from_labels, size_of_labels

    order, free = label_order(algorithm, output), free_labels(algorithm, output)
    for label, size in given.items():
        if label not in order:
            raise DTError(f"{what} has no label of this name", found=repr(label), allowed=", ".join(order))
        if (constant := _constant(algorithm, label)) not in (None, size):
            raise DTError(f"the extent of {label} in {what}", found=str(size), allowed=f"{constant}, as the program says")
        for other in sorted(algorithm.tied_labels(label) & set(given)):
            if given[other] != size:
                raise DTError(f"{label} and {other} of {what} are one extent", found=f"{label}={size}, {other}={given[other]}", allowed="the same")
        implied = size_of_labels(algorithm, label, given) if follows_from_labels(algorithm, label) else size
        if implied not in (None, size):
            raise DTError(f"the extent of {label} in {what}", found=str(size), allowed=f"{implied}, as the program says")
    missing = [label for label in free if not algorithm.tied_labels(label) & set(given)]
    if missing:
        raise DTError(f"the sizes of {what} name each label", found=f"none for {', '.join(missing)}", allowed=", ".join(free))
    return _filled(algorithm, output, given)


def _constant(algorithm: Algorithm, label: str) -> int | None:
    """Return the constant extent of a label, or of one that shares its extent; None without one."""
    return next((n for other in sorted(algorithm.tied_labels(label)) if (n := algorithm.constant_extent(other)) is not None), None)


def _filled(algorithm: Algorithm, output: str, given: Mapping[str, int]) -> dict[str, int]:
    """Complete the given extents with those that follow from them."""
    from ...lang.extents.formulas import size_of_labels

    found = {}
    for label in label_order(algorithm, output):
        constant = _constant(algorithm, label)
        tied = next((given[other] for other in sorted(algorithm.tied_labels(label)) if other in given), None)
        size = constant if constant is not None else given[label] if label in given else tied
        size = size if size is not None else size_of_labels(algorithm, label, given)
        if size is None or size < 0:
            raise DTError(f"the extent of {label}", found=str(size), allowed="0 or more, from the sizes that are given")
        found[label] = size
    return found


__all__ = ["free_labels", "label_order", "sizes_by_label", "sizes_in_order"]
