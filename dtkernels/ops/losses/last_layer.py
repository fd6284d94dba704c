"""Check the arguments of ops that take a last layer with its hidden states."""

import torch

from ...runtime.path_counters import checking
from ..op_decorator import as_rows, compiling, only_tensors
from ..option_checks import check_range
from ..reductions import check_reduction, ignoring


def last_layer(
    op: str,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    softcap: float | None,
    lora: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> dict:
    """Return what an op of a last layer takes beside hidden states and weight: bias, softcap and LoRA, if given. Raises, one line, for bad ones."""
    only_tensors(op, hidden=hidden, weight=weight, target=target, **({} if bias is None else {"bias": bias}))
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"{op}: hidden is (..., H) and weight (V, H); got shapes {tuple(hidden.shape)}, {tuple(weight.shape)}")
    if target.shape != hidden.shape[:-1]:
        raise ValueError(f"{op}: target has a class for each row of hidden; got shapes {tuple(hidden.shape)}, {tuple(target.shape)}")
    if target.dtype.is_floating_point or target.dtype.is_complex or target.dtype == torch.bool:
        raise TypeError(f"{op}: target is {target.dtype}; allowed: integers")
    given: dict = {}
    if bias is not None:
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"{op}: bias is (V,); got shapes {tuple(weight.shape)}, {tuple(bias.shape)}")
        given |= {"biased": True, "b": bias}
    if softcap is not None:
        check_range(op, "softcap", softcap, 0, float("inf"), above=True)
        given |= {"capped": True, "cap": float(softcap)}
    if lora is not None:
        given |= _low_rank(op, hidden, weight, lora)
    return given


def _low_rank(op: str, hidden: torch.Tensor, weight: torch.Tensor, lora: tuple[torch.Tensor, torch.Tensor]) -> dict:
    """Return what an op takes for a product of low rank, checked."""
    if not isinstance(lora, (tuple, list)) or len(lora) != 2:
        raise TypeError(f"{op}: lora is {type(lora).__name__}; allowed: a pair of tensors, (..., R) and (V, R)")
    inner, outer = lora
    only_tensors(op, **{"lora[0]": inner, "lora[1]": outer})
    if outer.dim() != 2 or outer.shape[0] != weight.shape[0] or inner.shape != (*hidden.shape[:-1], outer.shape[1]):
        raise ValueError(f"{op}: lora is (..., R) and (V, R); got shapes {tuple(inner.shape)}, {tuple(outer.shape)} beside {tuple(hidden.shape)}, {tuple(weight.shape)}")
    return {"adapted": True, "P": as_rows(inner), "Q": outer}


def check_targets(op: str, target: torch.Tensor, classes: int, ignored: int | None) -> None:
    """Raise IndexError under DTKERNELS_CHECK=1 for a target that is no class."""
    if not compiling() and checking():
        from ...runtime.reference.index_checks import check_elements

        check_elements(op, "target", target, classes, ignored)


def layer_divergence_arguments(
    op: str, layers: dict[str, torch.Tensor], temperature: float, reduction: str, target: torch.Tensor | None, ignore_index: int, classes: str
) -> dict:
    """Return what the specs of all divergences of two last layers take; ``classes``: the spec's name of target. Raises, one line, for bad arguments."""
    only_tensors(op, **layers)
    hidden, weight, teacher_hidden, teacher_weight = layers.values()
    _check_layers(op, hidden, weight, teacher_hidden, teacher_weight)
    check_reduction(op, reduction)
    check_range(op, "temperature", temperature, 0, float("inf"), above=True)
    more = ignoring(op, hidden.shape[:-1], target, ignore_index)
    if target is not None:
        more[classes] = target.reshape(-1)
    student, teacher = as_rows(hidden), as_rows(teacher_hidden)
    return {"H": student, "W": weight, "G": teacher, "V": teacher_weight, "scale": 1 / temperature, **more}


def _check_layers(op: str, hidden: torch.Tensor, weight: torch.Tensor, teacher_hidden: torch.Tensor, teacher_weight: torch.Tensor) -> None:
    """Raise ValueError, one line, where two last layers do not have the same rows and classes."""
    shapes = [tuple(t.shape) for t in (hidden, weight, teacher_hidden, teacher_weight)]
    fits = all(len(h) > 0 and len(w) == 2 and h[-1] == w[1] for h, w in (shapes[:2], shapes[2:]))
    if not fits or shapes[0][:-1] != shapes[2][:-1] or shapes[1][0] != shapes[3][0]:
        wanted = "hidden (..., H), weight (V, H), teacher_hidden (..., J), teacher_weight (V, J)"
        raise ValueError(f"{op}: shapes are {wanted}; got {', '.join(map(str, shapes))}")
