"""Register ops with torch.library as ``torch.ops.dtkernels.<op>``: for torch.compile, torch.export, autocast and fake tensors.

Each op has five entries, all derived from its algorithm:

``<op>``            the op as the caller sees it, opaque to the compiler; differentiable
``<op>_inference``  the same without gradients: what graphs that need none call
``<op>_open``       the op decomposed into plain torch operations, which the compiler fuses with their surroundings
``<op>_forward``    a forward that also returns what backward reads, on tensors of the declared ranks
``<op>_backward``   the derived gradient, likewise

Eager calls bypass these entries: they go from the arguments to bound kernels. An op that is registered again with another algorithm
gets new entries, ``<op>_2``: code compiled with the old op still means the old one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..bounded_cache import BoundedCache
from ..dispatch.call_cache import Repeat
from ..log import log
from ..path_counters import checking
from ..torch_support.dtypes import KERNEL_DTYPES, scalar_gradient_dtype
from ..torch_support.unsupported_autograd import refuse_forward_mode, without_derivative
from .repeated_calls import RepeatedCalls

if TYPE_CHECKING:
    from .operator import Operator
    from .variant import DifferentiablePair, Variant

NAMESPACE = "dtkernels"
VERSION = "dt_spec"  #: an argument of entries that nothing reads: which algorithm was meant, for the keys of torch's caches of compiled graphs
REMEMBERED = 1024  #: resolved pairs, by what compiled graphs say of their calls; a call that lost its pair resolves it again
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
known: dict[str, Operator] = {}  #: the ops of this process by entry name; among equal ops the latest
_defined: set[str] = set()  #: names already registered with torch.library
is_shipped: Callable[[str], bool] = frozenset[str]().__contains__  #: whether an op of the package has this name, even if nothing has called it: ops/registry.py says
make_shipped: Callable[[str], object] = dict[str, object]().get  #: makes the op of the package with this name: ops/registry.py says how
_lowered: set[str] = set()  #: entries that Inductor calls directly, or that it was not possible for
ENTRIES = ("inference", "open", "forward", "backward")


def enter(operator: Operator, shipped: bool) -> str:
    """Return the entry name of an op: its own, with a number where another algorithm or an op of the package has that name. ``shipped``: it is of the package."""
    name, number = operator.name, 1
    while _is_name_taken(name, operator) or not shipped and any(is_shipped(n) for n in _names_of_ops(name)):
        number += 1
        name = f"{operator.name}_{number}"
    known[name] = operator
    return name


def _is_name_taken(name: str, operator: Operator) -> bool:
    """Tell whether ``name``, or an entry derived from it, belongs to another op. An op may itself be named like an entry, ``<op>_forward``."""
    if name in known:
        return _definition_key(known[name]) != _definition_key(operator)
    own = _entry_names(name)
    return any(own & _entry_names(other) for other in known)


def _entry_names(name: str) -> set[str]:
    return {name, *(f"{name}_{entry}" for entry in ENTRIES)}


def _names_of_ops(entry: str) -> set[str]:
    """Return the names of ops that have an entry of this name."""
    return {entry, *(entry.removesuffix(f"_{e}") for e in ENTRIES)}


def _definition_key(operator: Operator) -> tuple:
    a = operator.manifest
    return a.spec, a.outputs, a.compiled, a.autocast


def ensure(name: str) -> None:
    """Register the entries of an op, once."""
    if name not in known and is_shipped(name):  # code that torch kept on disk may call what this process has not
        make_shipped(name)
    if name not in _defined:
        _define(name, _schema(known[name]))
        _defined.add(name)


def _schema(operator: Operator) -> str:
    """Return the schema: inputs, scalars as tensors; keyword-only: scalars as numbers, and compile-time parameters."""
    from .op_documentation import always_needed

    a = operator.spec.algorithm
    needed = always_needed(operator)
    changed = {n: f"(a{i}!)" for i, n in enumerate(filter(None, operator.manifest.written))}
    parts = [f"Tensor{changed.get(n, '')}{'' if n in needed else '?'} {n}" for n in a.inputs] + [f"Tensor? {s}" for s in a.scalars]
    for i in range(len(parts) - 1, -1, -1):
        if not parts[i].startswith("Tensor?"):
            break
        parts[i] += "=None"
    named = _number_arguments(a)
    named += [f"{'bool' if isinstance(v, bool) else 'int'} {n}={v}" for n, v in a.params] + [f"str? {VERSION}=None"]
    count = len(operator.manifest.outputs) - len(changed)
    results = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
    return f"({', '.join(parts)}, *, {', '.join(named)}) -> {results}"


def _number_arguments(algorithm) -> list[str]:
    """Return the schema of scalars as numbers. One argument each: a list could not hold the symbolic numbers of torch.compile."""
    whole = algorithm.integer_scalars()
    return [f"{'SymInt' if s in whole else 'Scalar'}? {s}_number=None" for s in algorithm.scalars]


# -- from a call to an entry ------------------------------------------------------------------------------------------


def signature(name: str) -> str:
    """Return ``entry | inputs | scalars | parameters | spec hash | written``, names separated by blanks: a string, which Dynamo treats as a constant.

    ``written`` has for each result the input that it is, ``-`` for one of its own; nothing where the op changes no input.
    """
    ensure(name)
    a = known[name].manifest
    entry = name + ("_open" if a.compiled == "fuse" and not checking() else "")  # torch's own operations check the indices of the decomposed form
    written = " ".join(t or "-" for t in a.written)
    return " | ".join([entry, " ".join(a.inputs), " ".join(a.scalars), " ".join(f"{n}={v}" for n, v in a.params), a.spec, written])


signature._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result, without importing it


def call_entry(name: str, told: str, args: tuple, kwargs: dict, opaque: bool = False):
    """Call an op through torch.library. Traceable by Dynamo. ``told`` is the op's signature text."""
    tensors, named = entry_arguments(name, told, args, kwargs)
    found = getattr(torch.ops.dtkernels, name if opaque else told.split(" ")[0])(*tensors, **named)
    return _with_written(found, told, tensors)


def _with_written(found, told: str, tensors: list):
    """Return the results of an entry, which may not return its arguments, with the inputs that it changed among them."""
    parts = told.split("|")
    inputs, written = parts[1].split(), parts[5].split()
    if not written:
        return found
    own = [] if found is None else list(found) if isinstance(found, (tuple, list)) else [found]
    results = []
    for t in written:
        results.append(own.pop(0) if t == "-" else tensors[inputs.index(t)])
    return tuple(results) if len(results) > 1 else results[0]


def _without_written(operator: Operator, results):
    """Return what an entry returns: results that are no arguments."""
    written = operator.manifest.written
    if not written:
        return results
    every = results if isinstance(results, tuple) else (results,)
    own = tuple(r for r, t in zip(every, written) if not t)
    return None if not own else own if len(own) > 1 else own[0]


def entry_arguments(name: str, told: str, args: tuple, kwargs: dict) -> tuple[list, dict]:
    """Convert the arguments of an op to those of its entry. Raises TypeError, one line, for wrong names."""
    _, inputs, scalars, params, version, _ = [part.split() for part in told.split("|")]
    names = inputs + scalars
    defaults = dict([p.split("=") for p in params])
    if len(args) > len(names):
        raise TypeError(f"{name}: {len(args)} positional arguments; allowed: {', '.join(names)}")
    given = dict(zip(names, args))
    for key, value in kwargs.items():
        if key in given or key not in names and key not in defaults:
            raise TypeError(
                f"{name}: {'repeated' if key in given else 'unknown'} argument {key!r}; allowed: {', '.join(names + list(defaults))}"
            )
        given[key] = value
    tensors = [given.get(n) for n in inputs]
    named: dict[str, Any] = {VERSION: version[0]}
    for n in scalars:
        value = given.get(n)
        number = value is not None and not isinstance(value, torch.Tensor)
        tensors.append(None if number else value)
        if number:
            named[n + "_number"] = value
    for n in defaults:
        if n in given:
            named[n] = given[n]
    return tensors, named


def _arguments(operator: Operator, args: tuple, named: dict) -> dict[str, object]:
    """Convert the arguments of an entry back to the op's own names."""
    a = operator.manifest
    given = {n: v for n, v in zip((*a.inputs, *a.scalars), args) if v is not None}
    for key, value in named.items():
        if value is not None and key != VERSION:
            given[key.removesuffix("_number") if key.removesuffix("_number") in a.scalars else key] = value
    return given


# -- entries ------------------------------------------------------------------------------------------------------------


def _define(name: str, schema: str) -> None:
    tags = (torch.Tag.pt2_compliant_tag,)
    numbers = "".join(f", {n}" for n in _number_arguments(known[name].spec.algorithm))
    inner = f"(Tensor[] values, str kind{', *' if numbers else ''}{numbers}) -> Tensor[]"
    outer = {entry: schema for entry in (name, f"{name}_inference", f"{name}_open")}
    for entry, text in (*outer.items(), (f"{name}_forward", inner), (f"{name}_backward", inner)):
        _library.define(f"{entry}{text}", tags=tags)

    run = _inference_entry(name)

    def shaped(*args, **named):
        _lower(name, "inference")
        call = known[name].bind((), _arguments(known[name], args, named))
        results = tuple(call.fitted.restore(r) for r in like_results(call.variant, call.fitted.tensors, call.scalars))
        return _without_written(known[name], results if len(results) > 1 else results[0])

    def differentiable(*args, **named):
        given = _arguments(known[name], args, named)
        refuse_forward_mode(known[name].name, given.values())
        if not (torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in given.values())):
            with torch._C._AutoDispatchBelowAutograd():
                return getattr(torch.ops.dtkernels, f"{name}_inference")(*args, **named)
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(
                f"{known[name].name}: torch.func transforms inside torch.compile are not supported; allowed: transforms of eager calls"
            )
        return recorded(known[name], (), given)

    def opened(*args, **named):
        from ..reference.evaluator import evaluate

        call = known[name].bind((), _arguments(known[name], args, named))
        variant = call.variant
        results = evaluate(variant.evaluated, call.fitted.tensors, call.scalars, variant.outputs)
        results = tuple(call.fitted.restore(r.contiguous()) for r in results)
        return _without_written(known[name], results if len(results) > 1 else results[0])

    def mapped(info, in_dims, *args, **named):
        raise vmap_error(name)

    for entry in (name, f"{name}_inference"):
        _library.impl(entry, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{entry}", shaped, lib=_library)
        torch.library.register_vmap(f"{NAMESPACE}::{entry}", mapped, lib=_library)
    _library.impl(name, differentiable, "Autograd")
    _library.impl(f"{name}_open", opened, "CompositeImplicitAutograd")
    for key, device in (("AutocastCUDA", "cuda"), ("AutocastCPU", "cpu")):
        for entry in (name, f"{name}_open"):
            _library.impl(entry, _casting(name, entry, device), key)
    for half in ("forward", "backward"):
        _library.impl(f"{name}_{half}", _direction_entry(name, half), "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}_{half}", _fake_direction_entry(name, half), lib=_library)
        torch.library.register_vmap(f"{NAMESPACE}::{name}_{half}", mapped, lib=_library)


def _inference_entry(name: str):
    def run(*args, **named):
        operator = known[name]
        named.pop(VERSION, None)
        if not named and not any([a is None for a in args]):
            found = operator.plain(args, {})
        else:  # no front function has such settings
            settings = (name, tuple([a is None for a in args]), *named, *named.values())
            tensors = tuple([a for a in args if a is not None])
            found = operator.repeat(tensors, settings)
            if found is None:
                found = operator.remembered(tensors, settings, _arguments(operator, args, named))
        return _without_written(operator, found) if operator.manifest.written else found

    return run


def repeat(name: str, entry: str, args: list, named: dict[str, Any], tensors: tuple[torch.Tensor, ...]) -> Repeat | None:
    """Return how a call of an entry that has run can be repeated; None where it cannot. ``tensors``: those among the arguments, in order."""
    if entry != "inference":
        values, kind = args
        return getattr(_graph_call(name, kind), entry).repeat(values, {n: v for n, v in named.items() if v is not None})
    operator = known[name]
    defaults = dict(operator.manifest.params)
    while args and args[-1] is None:
        args = args[:-1]
    named = {n: v for n, v in named.items() if v is not None and n != VERSION and v != defaults.get(n)}  # those that torch passed on
    if not named and not any([a is None for a in args]):
        return operator.repeatable(tuple(args), {}, tensors)
    return operator.repeatable((), _arguments(operator, tuple(args), named), tensors)


def results_of(name: str, entry: str, count: int) -> Callable | None:
    """Return a function (what ``count`` results of kernels are) -> what an entry returns; None where it is the same."""
    if entry != "inference":
        return (lambda found: (found,)) if count == 1 else None
    operator = known[name]
    return (lambda found: _without_written(operator, found)) if operator.manifest.written else None


def _lower(name: str, entry: str) -> None:
    """Let Inductor call an entry past torch's dispatcher. Tracing comes by here, so that Inductor is imported if it is to compile the graph."""
    if (title := f"{name}_{entry}") in _lowered or "torch._inductor.graph" not in sys.modules:
        return
    _lowered.add(title)
    try:
        from .inductor_lowering import lower

        lower(name, entry)
    except Exception as error:  # another torch has another Inductor, whose fallback does the same
        log.debug("dtkernels: Inductor calls %s through torch.library: %s: %s", title, type(error).__name__, error)


def _casting(name: str, entry: str, device: str):
    """Wrap an entry to cast its floating tensors as autocast requires, see ``autocast_dtype``."""

    def cast(*args, **named):
        dtype = known[name].autocast_dtype(device)
        with torch.amp.autocast(device, enabled=False):
            return getattr(torch.ops.dtkernels, entry)(*[cast_to(v, dtype) for v in args], **named)

    return cast


def cast_to(value: object, dtype: torch.dtype | None) -> object:
    """Cast a float32, float16 or bfloat16 tensor to ``dtype``; return anything else, or without a dtype, unchanged."""
    if dtype is None or not isinstance(value, torch.Tensor) or value.dtype not in KERNEL_DTYPES:
        return value
    return value.to(dtype)


def like_results(variant: Variant, tensors: dict[str, torch.Tensor], scalars: Mapping[str, object]) -> tuple[torch.Tensor, ...]:
    """Return empty tensors in the shapes, dtypes and strides of a variant's results. ``scalars``: those of the call; numbers may be left out."""
    from ...lang import expr as ex

    a, sizes, dtype = variant.algorithm, variant.signature.extents(tensors), variant.signature.result_dtype(tensors)
    device, found = next(iter(tensors.values())).device, []
    for output in variant.outputs:
        if output in a.written:
            found.append(tensors[a.written[output]])
            continue
        cast = a[output].expr
        own = getattr(torch, a.own_dtype(output)) if a.own_dtype(output) else dtype
        wide = dtype == torch.float64 and isinstance(cast, ex.Cast) and cast.dtype == "fp32"  # float64 stays float64
        own = scalar_gradient_dtype(a, output, scalars) or (torch.float64 if wide else own)
        found.append(torch.empty([sizes[label] for label in a[output].labels], dtype=own, device=device))
    return tuple(found)


# -- the two halves of a gradient ---------------------------------------------------------------------------------------


def recorded(operator: Operator, args: tuple, kwargs: dict):
    """Run a call that is differentiable through the inner entries."""
    name, call = operator.entry, operator.bind(args, kwargs)
    values: dict[str, Any] = {**call.fitted.tensors, **call.scalars}
    numbers = tuple(n for n, v in values.items() if not isinstance(v, torch.Tensor))
    every = torch._C._are_functorch_transforms_active()  # each level of functional transforms may ask for other gradients
    wanted = tuple(n for n, v in values.items() if n not in numbers and (v.is_floating_point() if every else v.requires_grad))
    params, batched, labels = call.key
    kept = call.variant.pair_for(wanted, call.fitted.tensors).gradient.products
    told = {"spec": operator.manifest.spec, "params": dict(params), "batched": sorted(batched), "labels": labels, "wanted": wanted, "kept": kept, "numbers": numbers}
    kind = json.dumps(told)
    tensors = [v for n, v in values.items() if n not in numbers]
    results = _EntryAutograd.apply(name, kind, {n: values[n] for n in numbers}, *tensors)[: len(call.variant.outputs)]
    results = tuple(call.fitted.restore(r) for r in results)
    return results if len(results) > 1 else results[0]


@dataclass(frozen=True, slots=True)
class _GraphCall:
    """What a compiled graph says of one of its calls, resolved."""

    pair: DifferentiablePair
    numbers: tuple[str, ...]  #: scalars that are Python numbers
    forward: RepeatedCalls
    backward: RepeatedCalls


_graph_calls: BoundedCache[tuple, _GraphCall] = BoundedCache(REMEMBERED)


def _graph_call(name: str, kind: str) -> _GraphCall:
    """Return the call that ``kind`` describes; cached."""
    key = (name, kind, id(known[name]))
    return _graph_calls.get(key) or _graph_calls.put(key, _resolve(name, kind))


def _resolve(name: str, kind: str) -> _GraphCall:
    told = json.loads(kind)
    variant = known[name].variant(tuple(sorted(told["params"].items())), frozenset(told["batched"]), told["labels"])
    pair, numbers = variant.pair(tuple(told["wanted"]), tuple(told["kept"])), tuple(told["numbers"])
    halves = []
    for half, title in ((pair.forward, known[name].name), (pair.backward, f"{known[name].name} backward")):
        order = [f"{n}_number" if n in numbers else None for n in (*half.signature.inputs, *half.signature.scalars)]
        halves.append(RepeatedCalls(half, title, order))
    return _GraphCall(pair, numbers, *halves)


def _direction_entry(name: str, half: str):
    def run(values: list[torch.Tensor], kind: str, **numbers) -> list[torch.Tensor]:
        return getattr(_graph_call(name, kind), half)(values, numbers)

    return run


def _fake_direction_entry(name: str, half: str):
    def shaped(values: list[torch.Tensor], kind: str, **numbers) -> list[torch.Tensor]:
        _lower(name, half)
        call = _graph_call(name, kind)
        variant = getattr(call.pair, half)
        given = [n for n in (*variant.signature.inputs, *variant.signature.scalars) if n not in call.numbers]
        named = dict(zip(given, values))
        return list(like_results(variant, {n: v for n, v in named.items() if n in variant.signature.inputs}, named))

    return shaped


def vmap_error(name: str) -> NotImplementedError:
    """Return the error that vmap over an op raises."""
    return NotImplementedError(f"{known[name].name}: torch.vmap is not supported; allowed: leading dimensions, which the op maps over by itself")


class _EntryAutograd(torch.autograd.Function):
    """Run forward and backward through the two inner entries, so that tracing sees both."""

    @staticmethod
    def forward(name: str, kind: str, numbers: dict[str, object], *values: torch.Tensor):
        call = _graph_call(name, kind)
        pair, named = call.pair, call.numbers
        a = pair.forward.signature
        own = dict(zip([n for n in pair.names if n not in named], values))
        given = [own[n] for n in (*a.inputs, *a.scalars) if n not in named]
        return tuple(getattr(torch.ops.dtkernels, f"{name}_forward")(given, kind, **_number_kwargs(numbers, a.scalars)))

    @staticmethod
    def setup_context(ctx, inputs, output):
        name, kind, numbers, *values = inputs
        call = _graph_call(name, kind)
        pair, named = call.pair, call.numbers
        names = [n for n in pair.names if n not in named]
        found = {**dict(zip(names, values)), **dict(zip(pair.forward.outputs, output))}
        a = pair.backward.signature
        ctx.name, ctx.kind, ctx.like = name, kind, {n: (v.shape, v.dtype) for n, v in zip(names, values)}
        ctx.kept = tuple(n for n in (*a.inputs, *a.scalars) if n in found)
        ctx.numbers = _number_kwargs(numbers, a.scalars)
        ctx.save_for_backward(*(found[n] for n in ctx.kept))
        ctx.mark_non_differentiable(*output[len(pair.public) :])

    @staticmethod
    def backward(ctx, *grads):
        call = _graph_call(ctx.name, ctx.kind)
        pair, named = call.pair, call.numbers
        a, saved = pair.backward.signature, ctx.saved_tensors  # read once: checkpointing allows no second access
        found = dict(zip(ctx.kept, saved)) | {pair.gradient.adjoints[o]: g for o, g in zip(pair.public, grads)}
        values = [found[n] for n in (*a.inputs, *a.scalars) if n not in named]
        results = getattr(torch.ops.dtkernels, f"{ctx.name}_backward")(values, ctx.kind, **ctx.numbers)
        made = dict(zip(pair.gradient.grads, results))
        shaped = tuple(made[n].reshape(shape).to(dtype) if n in made else None for n, (shape, dtype) in ctx.like.items())
        return (None, None, None, *without_derivative(known[ctx.name].name, shaped, (*saved, *grads)))

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(f"{known[ctx.name].name}: forward-mode differentiation is not supported; allowed: backward")

    @staticmethod
    def vmap(info, in_dims, name: str, *values):
        raise vmap_error(name)


def _number_kwargs(given: dict[str, object], wanted: tuple[str, ...]) -> dict[str, object]:
    """Return the wanted numbers under the inner entries' argument names."""
    return {f"{n}_number": v for n, v in given.items() if n in wanted}
