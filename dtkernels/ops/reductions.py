"""Reduce a loss of each row or sequence to one number."""

import torch

from .op_decorator import only_tensors
from .option_checks import check_integer, check_range

REDUCTIONS = ("none", "sum", "mean")


def check_reduction(op: str, reduction: str) -> None:
    """Raise ValueError, one line, for a reduction that is not known."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"{op}: reduction is {reduction!r}; allowed: {', '.join(REDUCTIONS)}")


def check_loss(op: str, reduction: str, label_smoothing: float, ignore_index: int, z_loss: float = 0.0) -> None:
    """Raise, one line, for an option of a cross entropy that is out of range."""
    check_reduction(op, reduction)
    check_range(op, "label_smoothing", label_smoothing, 0, 1)
    check_range(op, "z_loss", z_loss, 0, float("inf"))
    check_integer(op, "ignore_index", ignore_index)


def reduced(rows: torch.Tensor, reduction: str, target: torch.Tensor | None = None, ignore_index: int = -100) -> torch.Tensor:
    """Return the losses, their sum, or their mean over the rows whose ``target`` is not ignored."""
    if reduction == "mean" and target is not None:
        return rows.sum() / counted(target, ignore_index).sum()
    return rows if reduction == "none" else rows.sum() if reduction == "sum" else rows.mean()


def counted(target: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Return which rows are not ignored. torch would compare with another number where the dtype cannot hold ``ignore_index``."""
    whole = torch.iinfo(target.dtype)
    return target != ignore_index if whole.min <= ignore_index <= whole.max else torch.ones_like(target, dtype=torch.bool)


def ignoring(op: str, rows: tuple[int, ...], target: torch.Tensor | None, ignore_index: int) -> dict:
    """Return the parameters of a spec that gives 0 for rows whose class is ignored. Raises, one line, where target does not have a class for each row."""
    if target is None:
        return {}
    if not isinstance(target, torch.Tensor):
        raise TypeError(f"{op}: target is {type(target).__name__}; allowed: a tensor of integers, or None")
    if target.dtype.is_floating_point or target.dtype.is_complex or target.dtype == torch.bool:
        raise TypeError(f"{op}: target is {target.dtype}; allowed: integers")
    if target.shape != rows:
        raise ValueError(f"{op}: target has a class for each row; got shapes {tuple(rows)} of the rows, {tuple(target.shape)}")
    check_integer(op, "ignore_index", ignore_index)
    return {"masked": True, "ignored": int(ignore_index)}


def normalized(op: str, inputs: str, other: str) -> dict:
    """Return the parameter of a spec whose inputs are logits or ``other``. Raises ValueError, one line, for another name."""
    if inputs not in ("logits", other):
        raise ValueError(f"{op}: inputs is {inputs!r}; allowed: logits, {other}")
    return {"normalized": True} if inputs == other else {}


def divergence_arguments(
    op: str, student: torch.Tensor, teacher: torch.Tensor, temperature: float, reduction: str, target: torch.Tensor | None, ignore_index: int, inputs: str, other: str
) -> dict:
    """Return what the specs of all divergences of rows take. Raises, one line, for bad arguments. ``other``: what ``inputs`` may be beside logits."""
    only_tensors(op, student=student, teacher=teacher)
    check_shapes(op, "(..., V)", student=student, teacher=teacher)
    check_reduction(op, reduction)
    check_range(op, "temperature", temperature, 0, float("inf"), above=True)
    more = {**ignoring(op, student.shape[:-1], target, ignore_index), **normalized(op, inputs, other)}
    if inputs != "logits" and temperature != 1:
        raise ValueError(f"{op}: temperature is {temperature} with inputs={inputs!r}, which are taken as they are; allowed: 1")
    classes = {} if target is None else {"t": target}
    return {"S": student, "T": teacher, "scale": 1 / temperature, **more, **classes}


def check_pairs(op: str, chosen: torch.Tensor, rejected: torch.Tensor, chosen_mask: torch.Tensor, rejected_mask: torch.Tensor) -> None:
    """Raise, one line, where chosen and rejected sequences are not tensors with masks of their shapes."""
    only_tensors(op, chosen=chosen, rejected=rejected, chosen_mask=chosen_mask, rejected_mask=rejected_mask)
    check_shapes(op, "(B, S)", chosen=chosen, chosen_mask=chosen_mask)
    check_shapes(op, "(B, R)", rejected=rejected, rejected_mask=rejected_mask)


def check_shapes(op: str, what: str, **tensors: torch.Tensor) -> None:
    """Raise ValueError, one line, where tensors do not have one shape. A set of shapes would fix the sizes of a compiled graph."""
    first = next(iter(tensors.values())).shape
    if any(t.shape != first for t in tensors.values()):
        raise ValueError(f"{op}: {', '.join(tensors)} have one shape, {what}; got {', '.join(str(tuple(t.shape)) for t in tensors.values())}")
