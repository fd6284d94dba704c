"""Print one program at each stage of compilation as text. Imports torch and Triton for machine code only."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .algebra import pipeline as algebra
from .algebra.autodiff.gradient import Gradient, gradient, savable_products
from .algebra.autodiff.rematerialization import products_to_save
from .algebra.operand_types import products
from .algebra.rules.constant_folding import bind_parameters
from .autoschedule.default_schedule import default_schedule
from .autoschedule.fit_resources import element_bytes
from .codegen.analysis.product_types import BYTES, InputTypes
from .codegen.analysis.resources import Resources, check_resources, resources, whole_extent_labels
from .codegen.emit.module import emit, plain_labels, value_inputs
from .codegen.ir.nest import Kernel
from .codegen.pipeline import check_unused_statements, lower
from .codegen.pipeline_text import forms_text, passes_text
from .codegen.target import Target, target
from .lang import expr as ex
from .lang import parse
from .lang.algorithm import Algorithm, with_operands
from .lang.checks import check_given
from .lang.errors import DTError
from .lang.extents.formulas import follows_from_labels, inputs_of, size_of_labels, smallest_dimension, source_of
from .lang.extents.sources import size_from
from .lang.schedule import Program, Schedule
from .lang.spec import load_spec
from .runtime.signature.given_sizes import label_order, sizes_by_label, sizes_in_order

SPECS = Path(__file__).resolve().parent / "specs"
STAGES = ("algorithm", "algebra", "schedule", "passes", "nest", "triton", "ptx")
DTYPES = {name: BYTES[name] for name in ("bf16", "fp16", "fp32")}  #: name -> bytes per element
DEFAULT_EXTENT = 4096
TAKEN = 65536  #: assumed extent of a dimension that is indexed by elements of an input


@dataclass(frozen=True)
class Written:
    """A program as its author wrote it. Only the algorithm of a spec is used; it gets a schedule to fit."""

    name: str
    program: Program
    scheduled: bool  #: whether it brings its own schedule
    usual: tuple[tuple[str, int], ...] = ()  #: default extents


def shipped() -> tuple[str, ...]:
    """Return the names of the shipped ops."""
    return tuple(sorted(p.stem for p in SPECS.glob("*.yaml")))


def read(what: str) -> Written:
    """Read a shipped op, a ``.yaml`` spec or a ``.dt`` program. Raises DTError, one line naming the file, and OSError."""
    path = SPECS / f"{what}.yaml" if what in shipped() else Path(what)
    if path.suffix not in (".dt", ".yaml", ".yml"):
        if near := difflib.get_close_matches(what, shipped(), 1):
            raise DTError("no such op", found=f"{what!r}; did you mean {near[0]}?")
        raise DTError("no such op", found=repr(what), allowed=", ".join(shipped()) + ", a .yaml spec or a .dt program")
    try:
        if path.suffix == ".dt":
            program = parse(path.read_text(encoding="utf-8"), str(path))
            check_given(program)
            return Written(path.stem, program, scheduled=True)
        spec = load_spec(path)
    except UnicodeDecodeError as error:
        raise DTError(f"{path}: a program is UTF-8 text", found=f"byte {error.object[error.start]:#x} at offset {error.start}") from None
    except DTError as error:
        raise error if str(path) in str(error) else _with_path(path, error) from None
    usual = next(spec.shapes[0].each()) if spec.shapes else {}
    return Written(spec.op, spec.program, scheduled=False, usual=tuple(usual.items()))


def _with_path(path: Path, error: DTError) -> DTError:
    """Add the file's name to an error without a position."""
    return DTError(f"{path}: {error.rule}", found=error.found, allowed=error.allowed)


class Subject:
    """A program with its parameters bound, for one GPU, size and dtype."""

    def __init__(
        self,
        written: Written,
        gpu: str = "h200",
        shape: tuple[int, ...] | dict[str, int] | None = None,
        dtype: str = "bf16",
        given: dict[str, object] | None = None,
        wanted: tuple[str, ...] | None = None,
    ):
        """``dtype``: of all inputs, "bf16", with exceptions by name, "bf16,slopes=fp32".

        ``wanted``: show the backward with respect to these inputs and scalars instead; () stands for every floating-point input.
        ``shape``: extents in the order of ``free_labels``, or by label. Raises DTError, one line, where anything does not fit.
        """
        self.written, self.name, self.op = written, written.name, written.name
        self.dtype, self.named = _dtypes(dtype, written.program.algorithm)
        self.target: Target = target(gpu)
        self.outputs = written.program.outputs()
        params, self.scalars = _split_given(written.program.algorithm, given or {})
        self.params = params
        self.gradient: Gradient | None = None
        self.bound = Program(bind_parameters(written.program.algorithm, params), written.program.schedule)
        self.scheduled = written.scheduled and wanted is None
        if wanted is not None:
            self._differentiate(shape, wanted)
        if self.scheduled:
            self.inline = frozenset(self.bound.schedule.fused()) - frozenset(self.outputs)
            self.program = algebra.prepare(self.bound)
            self.program = replace(self.program, algorithm=self._typed(self.program.algorithm))
            if not written.program.algorithm.params:  # a primitive without effect in one variant may have one in another
                check_unused_statements(self.program)
            self.sizes = self._extents(self.program.algorithm, shape)
        else:
            self.inline = None  # type: ignore[assignment]
            algorithm = algebra.prepare_algorithm(self.bound.algorithm, self.outputs)
            algorithm = self._typed(algorithm)
            self.sizes = self._extents(algorithm, shape) if wanted is None else self._same_extents(algorithm)
            self.program = Program(algorithm, default_schedule(algorithm, self.outputs, self.sizes, self.types(algorithm), self.target))

    def _differentiate(self, shape: tuple[int, ...] | dict[str, int] | None, wanted: tuple[str, ...]) -> None:
        """Replace the program by its derived backward."""
        a = self.written_bound = self.bound.algorithm
        self.forward_sizes = self.sizes = self._extents(algebra.prepare_algorithm(a, self.outputs), shape)
        for name in wanted:
            if name not in a.inputs + a.scalars:
                raise DTError("a gradient is with respect to an input or a scalar", found=repr(name), allowed=", ".join(a.inputs + a.scalars))
        form = algebra.differentiable_form(a, self.outputs)
        self.wanted = tuple(n for n in (*a.inputs, *a.scalars) if n in wanted) or tuple(value_inputs(a, list(a.inputs)))
        result = self.types(form)
        made = self.dtype if isinstance(result, int) else result.result(form)
        self.gradient = found = self._saving(form, BYTES[made])
        if not found.grads:
            raise DTError(f"the backward of {self.name}", found="no input that its results depend on smoothly")
        self.named |= {t: made for t in found.backward.inputs if t not in a.inputs} if self.named else {}
        self.name, self.outputs = f"{self.name} backward", tuple(found.grads.values())
        self.bound = Program(found.backward)

    def _saving(self, form: Algorithm, itemsize: int) -> Gradient:
        """Return the gradient at these extents, with the products that forward then saves."""
        products = savable_products(form, self.outputs)
        needed = gradient(form, self.outputs, self.wanted, tuple(p.name for p in products)).products
        kept = products_to_save(tuple(p for p in products if p.name in needed), self.forward_sizes, itemsize)
        return gradient(form, self.outputs, self.wanted, kept)

    def _same_extents(self, algorithm: Algorithm) -> dict[str, int]:
        """Return the extents of the backward's labels: from the same label of the forward, a tied label, or a forward input."""
        forward = self.written_bound
        tied = {x: n for label, n in self.forward_sizes.items() for x in forward.tied_labels(label)}  # labels that the algebra unified
        shapes = input_shapes(forward, tied | self.forward_sizes, scalar_values(forward, self.scalars))
        found = {}
        for label in algorithm.labels:
            group = [label, *sorted(algorithm.tied_labels(label))]
            size = next((self.sizes[t] for t in group if t in self.sizes), None) or algorithm.constant_extent(label)
            source = algorithm.extent_source(label)
            if size is None and source is None and all(t in shapes for f in algorithm.extent_formulas(label) for t, _ in inputs_of(f)):
                size = _from_shapes(algorithm, label, shapes)
            if size is None and source is not None and source[0] in shapes:
                size = shapes[source[0]][source[1]]
            found[label] = size or DEFAULT_EXTENT
        return found

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm that is lowered, after the last rule."""
        return self.program.algorithm

    def _extents(self, algorithm: Algorithm, shape: tuple[int, ...] | dict[str, int] | None) -> dict[str, int]:
        """Return the extent of every label: as requested, else the default."""
        if isinstance(shape, dict):
            return sizes_by_label(algorithm, self.outputs[0], shape, self.name)
        if shape is not None:
            return sizes_in_order(algorithm, self.outputs[0], shape, self.name)
        usual = dict(self.written.usual)
        order = label_order(algorithm, self.outputs[0])
        free = {x: usual.get(x) or algorithm.constant_extent(x) or DEFAULT_EXTENT for x in order if not follows_from_labels(algorithm, x)}
        return {x: free[x] if x in free else size_of_labels(algorithm, x, free) or DEFAULT_EXTENT for x in order}

    def kernels(self) -> tuple[Kernel, ...]:
        """Return the loop nests, in execution order."""
        return lower(self.program)

    def types(self, algorithm: Algorithm) -> int | InputTypes:
        """Return bytes per element of the inputs, or the dtype of each where they differ."""
        return self.every_type(algorithm) if self.named else DTYPES[self.dtype]

    def every_type(self, algorithm: Algorithm) -> InputTypes:
        """Return the dtype of each input: masks and integers have their own, others the requested one."""
        nodes = [n for d in algorithm.definitions for n in d.expr.walk()]
        cast = {n.arg.tensor for n in nodes if isinstance(n, ex.Cast) and isinstance(n.arg, ex.Access)}
        usual = {t: "int64" if t in algorithm.integer_inputs() else "bool" for t in algorithm.inputs}
        usual |= dict.fromkeys([*value_inputs(algorithm, list(algorithm.inputs)), *(t for t in algorithm.inputs if t in cast)], self.dtype)
        return InputTypes(tuple((t, self.named.get(t, usual[t])) for t in algorithm.inputs))

    def itemsizes(self) -> dict[str, int]:
        """Return bytes per element of every buffer that is not always float32."""
        return element_bytes(with_operands(self.algorithm, self.program.schedule.subjects()), self.outputs, self.types(self.algorithm))

    def _typed(self, algorithm: Algorithm) -> Algorithm:
        """Return ``algorithm`` with the inputs that are float8, and those that were said to hold integers."""
        return replace(self.every_type(algorithm).typed(algorithm), integral=frozenset(t for t, dtype in self.named.items() if dtype in ex.INTEGERS))

    def check(self, every: bool = True) -> None:
        """Raise DTError where a kernel exceeds the GPU's resources. ``every=False``: only kernels whose use does not depend on sizes."""
        for kernel in self.kernels():
            if every or not whole_extent_labels((kernel,)):
                check_resources(kernel, self.sizes, self.itemsizes(), self.target)

    def resources(self, kernel: Kernel) -> Resources:
        """Estimate the resources of a program of ``kernel``."""
        return resources(kernel, self.sizes, self.itemsizes(), self.target)

    def title(self) -> str:
        """Format name, sizes, dtypes and GPU on one line."""
        sizes = ", ".join(f"{label} {size}" for label, size in self.sizes.items())
        dtypes = ", ".join([self.dtype, *(f"{t} {dtype}" for t, dtype in self.named.items())])
        return f"{self.name}: {sizes}; {dtypes}; {self.target.name}"

    def text(self, stage: str) -> str:
        """Return the program at ``stage``, one of STAGES."""
        return {
            "algorithm": lambda: str(self.written.program.algorithm if self.name == self.written.name else self.bound.algorithm),
            "algebra": self._algebra,
            "schedule": self._schedule,
            "passes": lambda: passes_text(self.program, self.target),
            "nest": lambda: forms_text(self.kernels(), self.target),
            "triton": lambda: emit(self.program, target=self.target),
            "ptx": lambda: "\n".join(_listing(self, *made) for made in machine_code(self)),
        }[stage]().rstrip("\n") + "\n"  # fmt: skip

    def _algebra(self) -> str:
        derived = self.name != self.written.name
        before = self.bound.algorithm if derived else self.written.program.algorithm
        parts = [f"# {'as derived from the forward' if derived else 'as written'}\n{before}"]
        for rule, after in algebra.stages(self.bound.algorithm, self.outputs, inline=self.inline):
            if str(after) != str(before):
                parts.append(f"# {rule.name}: {rule.summary}\n{after}")
                before = after
        return "\n\n".join(parts)

    def _schedule(self) -> str:
        if self.scheduled:
            said = str(self.program.schedule) or "# no statement: one program that loops over single elements"
        else:
            said = f"# default schedule for {self.title()}\n{self.program.schedule}"
        return "\n".join([said, *self._products()])

    def _products(self) -> list[str]:
        """Return one line per matrix product: the dtypes of its operands and of its accumulator."""
        types = self.every_type(self.algorithm)
        return [f"# in {func}: {dot} multiplies {types.operand(wanted)}, adds in fp32" for func, dot, wanted in products(self.algorithm)]


def _dtypes(text: str, algorithm: Algorithm) -> tuple[str, dict[str, str]]:
    """Parse the dtypes of inputs: "bf16,slopes=fp32" -> the default and the exceptions. Raises DTError."""
    usual, *others = text.split(",")
    named = {name: dtype for name, _, dtype in (other.partition("=") for other in others)}
    if usual not in DTYPES:
        raise DTError("the dtype of inputs", found=repr(usual), allowed=", ".join(DTYPES))
    for name, dtype in named.items():
        if name not in algorithm.inputs:
            raise DTError("a dtype is that of an input", found=repr(name), allowed=", ".join(algorithm.inputs))
        if dtype not in BYTES:
            raise DTError(f"the dtype of {name}", found=repr(dtype), allowed=", ".join(BYTES))
    return usual, named


def _split_given(algorithm: Algorithm, given: dict[str, object]) -> tuple[dict, dict]:
    """Split ``given`` into compile-time parameters and scalar inputs. Raises DTError."""
    params = [name for name, _ in algorithm.params]
    for name in given:
        if name not in params and name not in algorithm.scalars:
            raise DTError("unknown parameter", found=repr(name), allowed=", ".join([*params, *algorithm.scalars]) or "none")
    whole = algorithm.integer_scalars()
    for name, value in given.items():
        if name in algorithm.scalars and (isinstance(value, bool) or name in whole and value != int(value)):  # type: ignore[call-overload]
            raise DTError(f"scalar {name} is {'an integer, as it stands in an index' if name in whole else 'a number'}", found=str(value).lower())
    return {n: v for n, v in given.items() if n in params}, {n: v for n, v in given.items() if n not in params}


# -- machine code -----------------------------------------------------------------------------------------------------


def arguments(subject: Subject) -> tuple:
    """Return the arguments of the wrapper: tensors without storage in the shapes that ``sizes`` imply, then scalars."""
    import torch

    a = subject.algorithm
    scalars = scalar_values(a, subject.scalars)
    shapes = input_shapes(a, subject.sizes, scalars)
    dtypes = {t: getattr(torch, ex.TORCH_NAMES.get(dtype, dtype)) for t, dtype in subject.every_type(a).of}
    return (*(torch.empty(shapes[t], dtype=dtypes[t], device="meta") for t in a.inputs), *scalars.values())


def scalar_values(algorithm: Algorithm, given: dict[str, Any]) -> dict[str, int | float]:
    """Return a number for each scalar input: the given one, else 1 inside an index and 0.5 elsewhere."""
    integers = algorithm.integer_scalars()
    return {s: int(given.get(s, 1)) if s in integers else float(given.get(s, 0.5)) for s in algorithm.scalars}


def input_shapes(algorithm: Algorithm, sizes: dict[str, int], scalars: dict[str, int | float]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each input: the extents of plain labels, or the largest index plus one for computed indices."""
    shapes = {}
    for tensor in algorithm.inputs:
        labels = plain_labels(algorithm, tensor)
        named = set(algorithm.labels) - sizes.keys()  # of Funcs that nothing needs
        uses = [a.index for d in algorithm.definitions for a in ex.accesses(d.expr) if a.tensor == tensor and not ex.free_labels(a) & named]
        reach = [max((_range(index[dim], sizes, scalars)[1] for index in uses), default=0) + 1 for dim in range(len(labels))]
        sized = [smallest_dimension(algorithm, tensor, dim, sizes, max(1, n)) if algorithm.formulas else max(1, n) for dim, n in enumerate(reach)]
        shapes[tensor] = tuple(sizes[label] if label else n for label, n in zip(labels, sized))
    return shapes


def _from_shapes(algorithm: Algorithm, label: str, shapes: dict[str, tuple[int, ...]]) -> int | None:
    """Return the extent that a formula gives for inputs of these shapes."""
    found = algorithm.extent_formulas(label)
    return size_from(source_of(found[0]), {t: SimpleNamespace(shape=s) for t, s in shapes.items()}, label) if found else None


def _range(index: ex.Expr, sizes: dict[str, int], scalars: dict[str, int | float]) -> tuple[int, int]:
    """Return the smallest and the largest value of an index."""
    match index:
        case ex.Label(name):
            return 0, sizes[name] - 1
        case ex.Len(name):
            return sizes[name], sizes[name]
        case ex.Const(value):
            return int(value), int(value)
        case ex.Scalar(name):
            return int(scalars[name]), int(scalars[name])
        case ex.Access():
            return 0, TAKEN - 1
        case ex.Unary("-", arg):
            low, high = _range(arg, sizes, scalars)
            return -high, -low
        case ex.Binary(op, left, right):
            a, b = _range(left, sizes, scalars), _range(right, sizes, scalars)
            if op == "+":
                return a[0] + b[0], a[1] + b[1]
            if op == "-":
                return a[0] - b[1], a[1] - b[0]
            if op == "%":
                return 0, max(b[1], 1) - 1
            if op == "/" and b[0] <= 0 <= b[1]:
                raise DTError("an index is divided by 0", found=str(index), at=index.pos)
            ends = [x * y if op == "*" else x // y for x in a for y in b]
            return min(ends), max(ends)
    raise DTError("the extent of a computed index", found=str(index), allowed="labels, integers, SIn, len() and + - * / %", at=index.pos)


def machine_code(subject: Subject) -> list[tuple]:
    """Return (launch, compiled kernel) for each kernel that the wrappers launch. Needs Triton's compiler but no GPU."""
    from .runtime.build.aligned_launch import compile_known
    from .runtime.build.source_cache import load_module
    from .runtime.build.triton_compile import record_launches

    subject.check()
    module = load_module(emit(_with_wrappers(subject.program), target=subject.target), subject.name)
    wrappers = [o for o in subject.program.outputs() if callable(getattr(module, o, None))]
    values = arguments(subject)
    launches = [launch for w in wrappers for launch in record_launches(module, w, values)]
    return [(launch, compile_known(launch, subject.target)) for launch in launches]


def _with_wrappers(program: Program) -> Program:
    """Add wrappers to Funcs that are compiled to a kernel alone: a wrapper determines the arguments of the launch."""
    named = (replace(p, name="compile") if p.name == "compile_to_kernel" else p for p in program.schedule.primitives)
    return Program(program.algorithm, Schedule(tuple(named)))


def _listing(subject: Subject, launch, compiled) -> str:
    """Format machine code with a comment on its launch."""
    comment, stage = (";", "amdgcn") if subject.target.backend == "hip" else ("//", "ptx")
    grid = "x".join(map(str, launch.grid))
    m = compiled.metadata
    facts = f"{comment} {m.name}: {grid} programs of {m.num_warps} warps, {m.shared} bytes of shared memory"
    return f"{facts}\n{compiled.asm[stage]}"
