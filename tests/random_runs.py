"""One random case: compiled and run by its schedule, and as an op by default schedules with its gradients; all against float64."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import float64_gradients
import numpy as np
import torch
from oracle import LARGEST, SMALLEST, STEP, Value, as_numpy, compared, dtype_name, evaluate, mismatches, outputs_of
from random_cases import SCALARS, Case

import dtkernels
from dtkernels.codegen.analysis.normalized_products import normalized_products
from dtkernels.lang import DTError, Primitive, Program, Schedule, parse
from dtkernels.lang.algorithm import Algorithm
from dtkernels.lang.schedule import Share
from dtkernels.lang.spec import Spec
from dtkernels.runtime.bind.operator import Operator

#: how rules begin by which a drawn schedule may be refused, as it is drawn without knowing every loop that comes of it.
#: An algorithm is never refused, so that any other refusal is a fault.
MAY_REFUSE = (
    "a Func fused into the loop it reduces over is used there before it is finished", "a Func is fused where what it is made from is known",
    "a Func is fused into one that comes after it", "a reduction is finished before the loops of the output go on",
    "an output is computed over all its labels", "a compiled Func that is fused needs its host", "kernels run one after another",
    "fuse_at a loop inside which its labels are bound", "a stored Func is made from", "a loop is unrolled or has specialized warps",
    "a kernel has clusters or specialized warps", "ping_pong needs", "descriptor", "specialize_warps needs", "specialize_warps names a loop", "unroll names a loop", "two_tiles names a label",
    "stages names a loop", "split", "block(", "one label of a kernel", "stage names an input", "align is for", "parts_at", "accumulate_at", "tail is for", "stream is for", "a tail cuts",
    "merge names labels of the result, or labels of one sum", "store", "evict names a tensor", "what is compiled reads a tensor",  # which a parameter leaves out
    "a tile of a product is", "a scan runs along one tile",
    "approximate(", "map walks the blocks of labels", "tensorize belongs to the Func whose loop it tiles",  # which the algebra, or another Func's loop, leaves without effect
)  # fmt: skip


NOISE = 1e-14  #: of torch.autograd in float64, where terms of about 1 cancel: ours may be exactly 0 there
MOST_STEPS = 5000  #: loads and stores of a case in the interpreter, which takes about a millisecond for each and what is around it


@dataclass(frozen=True)
class Outcome:
    """What came of a case: ``right``, ``nothing to compare``, ``refused``, ``unexpected refusal`` or ``too long``; ``rule`` of a refusal.

    ``as_op``: the same of the program as an op.
    """

    kind: str
    rule: str = ""
    as_op: str = ""


class Wrong(AssertionError):
    """A result is further from float64 than rounding explains."""


def run(case: Case, device: str = "cpu") -> Outcome:
    """Compile, run and compare. Raises Wrong, or what went wrong otherwise.

    In the interpreter a case that loads more often than ``MOST_STEPS`` ends as ``too long``: nothing is said of it.
    """
    if device != "cpu":
        return _run(case, device)
    import bounds

    bounds.steps_left = MOST_STEPS
    try:
        return _run(case, device)
    except Exception as error:
        if bounds.TooManySteps.__name__ not in str(error):
            raise
        return Outcome("too long")
    finally:
        bounds.steps_left = float("inf")


def _run(case: Case, device: str) -> Outcome:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        program, text = case.program, str(case.program)
        if parse(text) != program or str(parse(text)) != text:
            raise Wrong(f"reads back as another program:\n{parse(text)}")
        found = _by_schedule(case, device)
        if found.rule.startswith("what is compiled reads a tensor"):
            return found
        if case.wanted or found.kind != "right" or case.seed % 4 == 0:
            return replace(found, as_op=_as_op(case, device))
        return found


def _by_schedule(case: Case, device: str) -> Outcome:
    text = str(case.program)
    try:
        compiled = dtkernels.compile(text, params=case.params)
        tensors, scalars = case.tensors(device), case.scalars(device)
        read = compiled.prepared.algorithm  # what only another variant reads, or a constant condition leaves out, is no argument
        arguments = {n: tensors[n] for n in read.inputs} | {n: scalars[n] for n in read.scalars}
        results = outputs_of(compiled, **arguments)
    except DTError as refused:
        if "\n" in str(refused):
            raise Wrong(f"a refusal of several lines: {refused}") from refused
        empty = any(said in refused.rule for said in ("which has no programs here", "is stored in a loop over")) and not all(t.numel() for t in case.tensors().values())
        expected = empty or refused.rule.startswith(MAY_REFUSE) or device != "cpu" and (" on " in refused.rule or refused.rule.endswith(": clusters"))
        return Outcome("refused" if expected else "unexpected refusal", refused.rule)
    except ValueError as refused:  # known only when the program runs
        if "which are empty: leave out" not in str(refused) or all(t.numel() for t in case.tensors().values()):
            raise
        return Outcome("refused", "a Func is stored inside empty loops")
    want = expected_of(case, _errors_of_approximations(case))
    kind = "right"
    for func, got in results.items():
        kind = _compare(func, got, want[func]) and kind
        if not compared(want[func]):
            kind = "nothing to compare"
    return Outcome(kind)


def _compare(what: str, got: torch.Tensor, want: Value) -> bool:
    if dtype_name(got) not in STEP:
        raise Wrong(f"{what} is {got.dtype}")
    if wrong := mismatches(as_numpy(got), want, dtype_name(got)):
        raise Wrong(f"{what}: {len(wrong)} of {want.v.size} wrong, first {wrong[0]}")
    return True


def _dtypes(case: Case) -> dict[str, str]:
    return {n: str(i.dtype).removeprefix("torch.") for n, i in case.inputs.items() if i.dtype.is_floating_point}


#: function -> the relative error of its approximation (docs/schedules.md)
APPROXIMATION_ERRORS = {"tanh": 2.0**-10, "erfc": 2.0**-15, **dict.fromkeys(("log", "log2", "log1p", "expm1"), 2.0**-17)}


def _errors_of_approximations(case: Case) -> dict[str, float]:
    """The relative error of each function that the schedule asks for."""
    args = [a for p in case.program.schedule.primitives if p.name == "approximate" for a in p.args]
    narrow = any(d != "float32" for d in _dtypes(case).values())
    shared = dict.fromkeys(("exp", "exp2", "sigmoid", "tanh"), 1e-4 if narrow else 4e-7) if any(isinstance(a, Share) for a in args) else {}
    return shared | {fn: error for fn, error in APPROXIMATION_ERRORS.items() if fn in args}


def expected_of(case: Case, approximate: dict[str, float] | None = None) -> dict[str, Value]:
    """Every Func of the program by the oracle."""
    arrays = {n: as_numpy(t) for n, t in case.tensors().items()}
    return evaluate(str(case.program), arrays, SCALARS, params=case.params, dtypes=_dtypes(case), approximate=approximate, stored=_stored(case),
                    underflow=True)  # fmt: skip


def _stored(case: Case, algorithm: Algorithm | None = None) -> dict[str, str]:
    """Funcs that others may read back as they were stored, outputs and products, and the coarsest dtype that they may have."""
    outputs, coarsest = case.program.outputs(), max(_dtypes(case).values(), key=STEP.__getitem__, default="float32")
    products = normalized_products(algorithm or case.program.algorithm)
    return dict.fromkeys((*(outputs if len(outputs) > 1 else ()), *sorted(products)), coarsest) if coarsest != "float32" else {}


# -- as an op -------------------------------------------------------------------------------------------------------------


def _as_op(case: Case, device: str) -> str:
    """The program without its schedule as an op, whose kernels the default schedule schedules, and the gradients that are wanted."""
    outputs = case.program.outputs()
    program = Program(case.program.algorithm, Schedule(tuple(Primitive(o, "compile") for o in outputs)))
    op = Operator(Spec("random_program", "A random program.", program))
    tensors, scalars = case.tensors(device), case.scalars(device)
    leaves = [n for n in case.wanted if (tensors | scalars)[n] is not None]
    given = {n: v.detach().requires_grad_() if n in leaves else v for n, v in {**tensors, **{n: scalars[n] for n in program.algorithm.scalars}}.items()}
    before = dtkernels.paths().get("random_program", {}).get("reference", 0)
    results = op(**given, **case.params)
    results = results if isinstance(results, tuple) else (results,)
    # the reference's: several results of inputs of which one is empty, and inputs that are read none of which is floating-point
    with torch.no_grad():
        bound = op.bind((), given | case.params)
    read = bound.fitted.tensors.values()
    by_kernel = all(t.numel() for t in tensors.values()) and any(t.is_floating_point() for t in read)
    if by_kernel and dtkernels.paths()["random_program"].get("reference", 0) != before:
        raise Wrong("the op ran its reference, not a kernel")
    want = expected_of(case)
    for name, got in zip(outputs, results, strict=True):
        _compare(f"{name} of the op", got, want[name])
    differentiable = [(o, r) for o, r in zip(outputs, results) if r.requires_grad]
    finite = all(np.isfinite(want[o].v).all() for o, _ in differentiable)
    if not leaves or not differentiable or not finite:  # the gradient of a NaN is anything
        return "right"
    derived = bound.variant.pair_for(tuple(n for n in leaves if n in {**bound.fitted.tensors, **bound.scalars}), bound.fitted.tensors)
    return _gradients(case, {n: given[n] for n in leaves}, differentiable, derived)


def _gradients(case: Case, leaves: dict[str, torch.Tensor], results: Sequence[tuple[str, torch.Tensor]], derived) -> str:
    """Gradients of ``results`` for ``leaves`` against those of torch.autograd in float64, within the errors of the derived backward."""
    generator = torch.Generator().manual_seed(case.seed)
    adjoints = {o: (torch.rand(r.shape, generator=generator) * 2 - 1).to(r.dtype) for o, r in results}
    found = torch.autograd.grad([r for _, r in results], list(leaves.values()), [adjoints[o].to(r.device) for o, r in results], allow_unused=True)
    truth = _autograd(case, tuple(leaves), adjoints)
    bounds = _bounds_of_gradients(case, derived, dict(results), adjoints)
    said = "nothing to compare"
    for (name, leaf), got, exact in zip(leaves.items(), found, truth):
        exact = np.zeros(tuple(leaf.shape)) if exact is None else exact.numpy().reshape(tuple(leaf.shape))
        got = torch.zeros_like(leaf) if got is None else got
        if (got.dtype, got.shape) != (leaf.dtype, leaf.shape):
            raise Wrong(f"gradient of {name} is {got.dtype} {tuple(got.shape)}")
        error = bounds[name].reshape(exact.shape) if name in bounds else np.zeros(exact.shape)
        error = np.where(np.isfinite(exact) & ~np.isnan(error), error + NOISE, np.inf)
        value = Value((), exact, error)
        if name in SCALARS:  # the gradient of a number is stored in the dtype of inputs or results
            coarsest = max((*_dtypes(case).values(), *(dtype_name(r) for _, r in results)), key=STEP.__getitem__)
            value.e += STEP[coarsest] * np.abs(np.where(np.isfinite(exact), exact, 0)) + SMALLEST[coarsest]
        _compare(f"gradient of {name}", got.detach(), value)
        said = "right" if compared(value) else said
    return said


def _autograd(case: Case, wanted: tuple[str, ...], adjoints: dict[str, torch.Tensor]) -> list[torch.Tensor | None]:
    inputs = {n: t.double() if t.is_floating_point() else t for n, t in case.tensors().items()}
    scalars = {n: torch.tensor(float(v), dtype=torch.float64) for n, v in SCALARS.items()}
    leaves = {n: (inputs | scalars)[n].detach().clone().requires_grad_() for n in wanted}
    inputs |= {n: t for n, t in leaves.items() if n in inputs}
    scalars |= {n: t for n, t in leaves.items() if n in scalars}
    values = float64_gradients.Evaluation(case.program.algorithm, inputs, scalars, case.params).run()
    used = [o for o in adjoints if values[o].requires_grad]
    if not used:
        return [None] * len(wanted)
    return list(torch.autograd.grad([values[o] for o in used], list(leaves.values()), [adjoints[o].double() for o in used], allow_unused=True))


def _bounds_of_gradients(case: Case, derived, results: dict[str, torch.Tensor], adjoints: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """How far each gradient may be off: the oracle's errors of the backward as derived, of what its forward saves."""
    arrays = {n: as_numpy(t) for n, t in case.tensors().items()}
    dtypes = _dtypes(case)
    halves, forward, backward = derived.gradient, derived.forward.plain, derived.backward.plain
    saved = evaluate(forward, {n: arrays[n] for n in forward.inputs}, SCALARS, dtypes=dtypes, underflow=True, stored=_stored(case, forward))
    errors = {}
    for name in halves.outputs:
        if name in backward.inputs:
            dtype = dtype_name(results[name]) if name in results else "float32"
            v, e = saved[name].v, saved[name].e
            arrays[name], errors[name] = v, e + STEP[dtype] * np.where(np.isfinite(v), np.abs(v), 0) + (np.abs(v) > LARGEST[dtype]) * 1e38
            dtypes[name] = dtype
    for output, name in halves.adjoints.items():
        if name in backward.inputs:
            given = adjoints.get(output)
            arrays[name] = as_numpy(given) if given is not None else np.zeros(saved[output].v.shape)
            dtypes[name] = dtype_name(given) if given is not None else "float32"
    read = backward.inputs
    if not halves.grads:
        return {}
    back = evaluate(backward, {n: arrays[n] for n in read}, SCALARS, dtypes={n: d for n, d in dtypes.items() if n in read}, errors=errors, underflow=True,
                    stored=dict.fromkeys(normalized_products(backward), max(dtypes.values(), key=STEP.__getitem__)), rounded=frozenset(read) - set(case.inputs))  # fmt: skip
    return {name: back[func].e for name, func in halves.grads.items()}
