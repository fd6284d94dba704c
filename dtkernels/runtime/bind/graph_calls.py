"""Call entries from the code that Inductor generates: guards lead a repeated call straight to its kernels, past torch's dispatcher.

Generated code makes one function for each call where it is loaded, and calls that in place of ``torch.ops.dtkernels.rmsnorm_inference``:

    dtkernels_buf2 = graph_call("rmsnorm", "inference", (Ellipsis, Ellipsis, None), {"eps_number": 1e-06}, [((16, 64), (64, 1), True)])
    buf2 = dtkernels_buf2(buf1, arg1_1)

Whatever is no repetition, and whatever the guards cannot tell, goes through torch.library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch._C._dynamo.guards import assert_size_stride

from ..dispatch.call_cache import Repeat
from ..path_counters import counter
from ..torch_support.tensor_guards import never_matches
from ..torch_support.tf32 import allows_tf32
from . import library_ops
from .repeated_calls import RECENT

LEARNED = 64  #: kinds that one call learns: where every call is of a new one, learning is not worth its time
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_modes = torch._C._len_torch_dispatch_stack
#: guards of the tensors, TF32 (None: any), numbers after the tensors, order of the kernels' values (None: as they are), launch, counts, what to make of results
_Kind = tuple[Callable[..., bool], "bool | None", tuple, "Callable | None", Callable, dict[str, int], "Callable | None"]
_UNKNOWN: _Kind = never_matches, None, (), None, never_matches, {}, None


def graph_call(name: str, entry: str, args: tuple, named: dict[str, Any], layouts: Sequence[tuple[tuple, tuple, bool] | None] = ()) -> Callable:
    """Return a function of what stands at each ``...`` among ``args`` and ``named``, in order, that calls an entry of an op.

    ``layouts`` has shape, strides and alignment that generated code relies on, for each result; None where it checks them itself.
    torch keeps generated code on disk: what it once passed here must go on to work.
    """
    latest = _UNKNOWN  #: one object, since another thread may replace it between guards and launch
    kinds: tuple[_Kind, ...] = ()
    remaining = LEARNED

    def call(*given):
        same, tf32, numbers, pick, launch, count, finish = latest
        if same(*given) and (tf32 is None or tf32 == allows_tf32()):  # as in ``_repeated``, without the call of a function
            values = given + numbers
            if (found := launch(values if pick is None else pick(values))) is not None:
                count["gpu"] += 1
                return found if finish is None else finish(found)
        return other(given)

    def other(given: tuple):
        nonlocal latest, kinds, remaining
        for kind in kinds:
            if (found := _repeated(kind, given)) is not None:
                latest = kind
                return found[0]
        filled = _filled(args, named, given)
        library_ops.ensure(name)
        results = getattr(torch.ops.dtkernels, f"{name}_{entry}")(*filled[0], **filled[1])
        _check(name, results, layouts)  # bound kernels allocate no others
        if remaining and not _modes() and given and all([type(v) in _PLAIN for v in given]):  # else a number varies, or a tensor has no data
            remaining -= 1
            if (again := library_ops.repeat(name, entry, *filled, given)) is not None:
                latest = _kind(again, library_ops.results_of(name, entry, len(again.bound.results)))
                kinds = (latest, *kinds[: RECENT - 1])
        return results

    return call


def _check(name: str, results: Any, layouts: Sequence[tuple[tuple, tuple, bool] | None]) -> None:
    """Raise AssertionError where a result is not as generated code takes it to be."""
    for found, layout in zip(results if isinstance(results, (list, tuple)) else (results,), layouts):
        if layout is not None:
            shape, strides, aligned = layout
            assert_size_stride(found, shape, strides, name)
            if aligned and found.data_ptr() & 15:
                raise AssertionError(f"{name}: a result is not aligned to 16 bytes")


def _kind(again: Repeat, finish: Callable | None) -> _Kind:
    places, bound = again.places, again.bound
    straight = places == list(range(len(places)))
    pick = None if straight else itemgetter(*places) if len(places) > 1 else lambda values: (values[places[0]],)
    return again.same, again.tf32, again.numbers, pick, bound.alone() or bound.together(), counter(again.title), finish


def _repeated(kind: _Kind, given: tuple) -> tuple | None:
    """Return the results of a call of this kind as the only element; None where it is of another kind."""
    same, tf32, numbers, pick, launch, count, finish = kind
    if not same(*given) or tf32 is not None and tf32 != allows_tf32():
        return None
    values = given + numbers
    if (found := launch(values if pick is None else pick(values))) is None:
        return None
    count["gpu"] += 1
    return (found if finish is None else finish(found),)


def _filled(args: tuple, named: dict[str, Any], given: tuple) -> tuple[list, dict[str, Any]]:
    """Return the arguments of an entry with ``given`` in the places of ``...``."""
    following = iter(given)
    return [_placed(a, following) for a in args], {n: _placed(v, following) for n, v in named.items()}


def _placed(value: object, following: Iterator) -> object:
    if isinstance(value, list):
        return [_placed(v, following) for v in value]
    return next(following) if value is ... else value
