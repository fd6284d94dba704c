"""Print the wrapper of a compiled Func: a Python function that checks sizes, allocates outputs and launches kernels."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from ...algebra.operand_types import CAST, OperandType
from ...lang import expr as ex
from ...lang.algorithm import IN_INDEX, Algorithm
from ...lang.errors import DTError
from ...lang.extents.formulas import inputs_of, source_of
from ...lang.extents.sources import source_text
from ...lang.schedule import Merge, Program
from ..analysis.buffer_reuse import reused_buffers
from ..analysis.dtype_propagation import product_inputs, value_inputs
from ..analysis.empty_loops import written_inside
from ..analysis.product_types import Operands, products_of
from ..analysis.resources import MOST_UNROLLED
from ..ir.nest import Kernel, has_matrix_product, unrolled_product
from ..target import Target
from .triton.grid import BEFORE, block_count, programs_per_block, resident_programs
from .triton.kernel import Box, KernelText

#: elements that rows of an aligned buffer are a multiple of: 128 bytes of 16 bits. Products that loaded tiles of rows at multiples of 32 bytes, as their
#: vectors ask for, took 4 to 12% longer on an H100
PITCH = 64
VECTORS = 16  #: the same of rows whose length is known when a kernel is compiled, which are short: a few vectors of channels


class Wrapper:
    """The Python function that allocates outputs and launches."""

    def __init__(
        self,
        program: Program,
        kernels: tuple[Kernel, ...],
        operands: Operands,
        texts: dict[str, KernelText],
        described: dict[str, KernelText],
        name: str,
        outputs: tuple[str, ...],
        several: bool = False,
        target: Target | None = None,
    ):
        self.algorithm: Algorithm = program.algorithm
        self.counted = {label: (other, size) for label, other, size in program.counted}
        self.pieces = program.pieces
        self.merged = {p.label: p.parts for p in program.schedule.primitives if isinstance(p, Merge)}
        self.accumulated = {a.func: a for a in program.accumulated if not a.complete}
        self.copied = {a.result: a.func for a in program.accumulated if a.plain}  #: results of float32 that are the sum itself
        self.aligned = {p.func for p in program.schedule.primitives if p.name == "align"}
        self.short_rows = frozenset(x for p in program.schedule.primitives if p.name == "specialize" for x in program.schedule.names(p.func, "specialize"))
        self.stored = frozenset(p.func for p in program.schedule.primitives if p.name == "store")
        self.name, self.outputs, self.several, self.target = name, outputs, several, target
        self.operands, self.texts, self.described = operands, texts, described
        hosts = tuple(k.func for k in kernels if set(k.writes) & set(outputs))
        needed = self.algorithm.needed_by(outputs + hosts)
        while more := self._computed_along(kernels, set(needed)):
            needed = self.algorithm.needed_by((*needed, *more))
        self.kernels = [k for k in kernels if k.func in needed]
        told = {tensor for _, tensor, _ in self.algorithm.extents}
        told |= {tensor for _, formula in self.algorithm.formulas for tensor, _ in inputs_of(formula)}
        self.reused = reused_buffers(self.kernels, self.algorithm, frozenset((*outputs, *self.aligned)))
        self.written = {w: t for k in self.kernels for w in k.writes if (t := self.algorithm.written.get(w))}
        self.reads = [t for t in self.algorithm.inputs if t in told or t in self.written.values() or any(t in k.reads for k in self.kernels)]
        self.scalars = [s for s in self.algorithm.scalars if any(s in k.scalars for k in self.kernels)]
        self.sizing = [*self.reads, *self._extent_only_inputs()]  #: what is asked for its extents
        if not self.reads:
            raise DTError("what is compiled reads a tensor", found=f"none in {name}", allowed="an In", at=self.algorithm[outputs[0]].pos)

    def text(self) -> str:
        name = self.name
        lines = [f"def {name}({', '.join(self._signature())}):"]
        lines += [f'    """{self._doc()}"""']
        lines += self._sizes(name)
        lines += self._scalars(name)
        lines += self._promotions()
        lines += self._float8()
        lines += self._order_of_sums()
        allocated: set[str] = set()
        for k in self.kernels:
            lines += self._allocate(k, allocated)
            allocated |= set(k.writes)
        for k in self.kernels:
            lines += self._written(k)
        if any(text.dependent for text in self._texts()):
            lines.append(f"    dependent = overlapping({self.reads[0]}, {self.kernels[0].writes[0]}_out)")
        before, inside, after = self._around_loop()
        for k in before:
            lines += self._launch(k)
        lines += self._loop(inside) if inside else []
        for k in after:
            lines += self._launch(k)
        lines.append(f"    return {', '.join(f'{o}_out' for o in self.outputs)}")
        return "\n".join(lines) + "\n"

    def _order_of_sums(self) -> list[str]:
        """Return the check that torch does not ask for a fixed order of additions where there is none."""
        written = {w for k in self.kernels for w in k.writes}
        return [f"    in_any_order({self.name!r}, {a.result!r})" for a in self.accumulated.values() if a.func in written and not a.ordered]

    def _float8(self) -> list[str]:
        """Return the line that asks whether the GPU has float8, where a kernel must know."""
        asked = any("has_float8" in value for text in self._texts() for _, value in (*text.arguments, *text.constants))
        able = f"float8_units({self.reads[0]})" if self.target is None or self.target.has_float8 else "False"
        return [f"    has_float8 = {able}"] if asked else []

    def _written(self, kernel: Kernel) -> list[str]:
        """Return the check that what is stored from inside loops is written: a loop may be empty."""
        lines = []
        stored = self.stored - self.accumulated.keys()  # what is added to is cleared before
        plain = frozenset(f for f in stored if f in self.algorithm and not {*self.algorithm[f].labels} & {*self.counted})  # no parts of sums
        for func, labels in written_inside(kernel, self.algorithm, plain).items():
            lines.append(f"    if {func}_out.numel() and not ({' and '.join(f'size_{x}' for x in labels)}):")
            where = " or ".join(labels)
            lines.append(f'        raise ValueError("{self.name}: {func} is stored inside loops over {where}, which are empty: leave out {func}.store()")')
        return lines

    def _around_loop(self) -> tuple[list[Kernel], list[Kernel], list[Kernel]]:
        """Return the kernels before the loop over pieces, in it and after it, each in order."""
        inside = [k for k in self.kernels if self.pieces and k.func in self.pieces.roots]
        made, after = {w for k in inside for w in k.writes}, []
        for k in self.kernels:
            if k not in inside and made & set(k.reads):
                after.append(k)
                made |= set(k.writes)
        return [k for k in self.kernels if k not in inside and k not in after], inside, after

    def _loop(self, kernels: list[Kernel]) -> list[str]:
        """Return the loop over pieces. Inside, tensors and the size along the label have the names of the whole."""
        p = self.pieces
        assert p is not None
        touched = {t for k in kernels for t in (*k.reads, *k.writes)}
        views = [(t if t in self.algorithm.inputs else f"{t}_out", t in p.kept, dims) for t, dims in p.views if t in touched]
        parts = [(w, tuple(i for i, x in enumerate(w.labels, 1) if x == p.label)) for k in kernels for w in k.workspaces if w.name in k.writes]
        views += [(f"{w.name}_out", True, along) for w, along in parts if along]
        names, size = ", ".join(v for v, _, _ in views), f"size_{p.label}"
        taken, suffix = {*self.algorithm.inputs, *self.algorithm.scalars}, "_whole"
        while any(f"{v}{suffix}" in taken for v, _, _ in views):
            suffix += "_"
        whole = ", ".join(f"{v}{suffix}" for v, _, _ in views)
        lines = [f"    size_{p.whole}, {whole} = {size}, {names}"]
        lines += [f"    for size_{p.first} in range(0, max(size_{p.whole}, 1), {p.size}):"]
        lines += [f"        {size} = min({p.size}, size_{p.whole} - size_{p.first})"]
        merged = {label: " * ".join(f"size_{x}" for x in parts) for label, parts in self.merged.items() if p.label in parts}
        lines += [f"        size_{label} = {product}" for label, product in merged.items()]
        for name, kept, dims in views:
            lines.append(f"        {name} = piece({name}{suffix}, {dims}, {0 if kept else f'size_{p.first}'}, {size})")
        for k in kernels:
            lines += textwrap.indent("\n".join(self._launch(k)), "    ").split("\n")
        lines.append(f"    {size}, {names} = size_{p.whole}, {whole}")
        return [*lines, *(f"    size_{label} = {product}" for label, product in merged.items())]

    def _computed_along(self, kernels: Sequence[Kernel], needed: set[str]) -> set[str]:
        """Return the Funcs besides ``needed`` whose kernels run.

        They store one of these, or are read by a kernel that also stores another.
        """
        storing = {k.func for k in kernels if set(k.writes) & needed}
        read = {r for k in kernels if k.func in needed for r in k.reads if r in self.algorithm}
        return (storing | read) - needed

    def _texts(self) -> list[KernelText]:
        """Return every form of every kernel that this launches."""
        return [forms[k.name] for k in self.kernels for forms in (self.texts, self.described) if k.name in forms]

    def _signature(self) -> list[str]:
        found, optional = [], False
        for names, used in ((self.algorithm.inputs, self.sizing), (self.algorithm.scalars, self.scalars)):
            for n in names:
                optional = optional or (self.several and n not in used)
                found.append(f"{n}=None" if optional else n)
        return found

    def _doc(self) -> str:
        defs = [str(self.algorithm[f]).rstrip(";") for f in self.algorithm.needed_by(self.outputs)]
        return defs[0] if len(defs) == 1 else defs[-1] + ", where\n\n" + "".join(f"        {d}\n" for d in defs[:-1]) + "    "

    def _sizes(self, name: str) -> list[str]:
        """Emit the extents of all labels that a kernel or an output needs, from the inputs that are read."""
        tensors = []
        read = {a.tensor for d in self.algorithm.definitions for a in ex.accesses(d.expr)}
        for t in self.sizing:
            labels = [repr(label) if label else "None" for label in plain_labels(self.algorithm, t)]
            labels += [] if t in read else [f"*[None] * ({t}.dim() - {len(labels)})"]  # only its extents count
            tensors.append(f"({t!r}, {self._checked(t)}, ({', '.join(labels)}{',' if len(labels) == 1 else ''}))")
        lines = [f"    sizes = extents({name!r}, [{', '.join(tensors)}])"]
        integers = [t for t in self.reads if t in self.algorithm.integer_inputs()]
        reasons = {t: self.algorithm.reason_for_integers(t) for t in integers}
        lines += [f"    integer_operands({name!r}, {t!r}, {t}, {why!r})" for t, why in reasons.items() if why != IN_INDEX]
        integers = [t for t in integers if reasons[t] == IN_INDEX]
        lines += [f"    whole_numbers({name!r}, {', '.join(f'{t}={t}' for t in integers)})"] if integers else []
        lines += self._extent_checks(name)
        for label in self._labels():
            if self.pieces and label in (self.pieces.first, self.pieces.whole):
                continue  # set by the loop over pieces
            if label in self.counted:
                lines.append(f"    size_{label} = triton.cdiv(size_{self.counted[label][0]}, {self.counted[label][1]})")
                continue
            if (constant := self.algorithm.constant_extent(label)) is not None:
                lines.append(f"    size_{label} = {constant}")
                continue
            alike = (label, *sorted(self.algorithm.tied_labels(label)))
            tied = next((t for t in alike if any(t in plain_labels(self.algorithm, r) for r in self.sizing)), None)
            if tied is None:
                lines += self._computed_extent(name, label)
                continue
            lines.append(f"    size_{label} = sizes[{tied!r}]")
        return lines

    def _checked(self, tensor: str) -> str:
        """Return an input as ``extents`` takes it: of float8 the bits."""
        form = dict(self.algorithm.float8).get(tensor)
        return tensor if form is None else f"float8_bits({self.name!r}, {tensor!r}, {tensor}, torch.{ex.FLOAT8[form].torch})"

    def _computed_extent(self, name: str, label: str) -> list[str]:
        """Return the lines that compute the extent of ``label`` from sizes of inputs."""
        source = source_of(self.algorithm.extent_formulas(label)[0])
        return [
            f"    size_{label} = {source_text(source, python=True)}",
            f"    if size_{label} < 0:",
            f'        raise ValueError(f"{name}: the extent of {label} is {{size_{label}}}: {source_text(source)}; allowed: 0 or more")',
        ]

    def _extent_checks(self, name: str) -> list[str]:
        """Return the lines that refuse inputs whose extents disagree with each other or with the program."""
        told, lines = dict.fromkeys(label for t in self.sizing for label in plain_labels(self.algorithm, t) if label), []
        while told:
            first = next(iter(told))
            group = [label for label in told if label in self.algorithm.tied_labels(first)]
            told = dict.fromkeys(label for label in told if label not in group)
            constant = self.algorithm.constant_extent(first)
            sizes = [f"sizes[{label!r}]" for label in group]
            if len(group) > 1 or constant is not None:
                found = ", ".join(f"{{{size}}} along {label}" for label, size in zip(group, sizes))
                one = "one extent" if constant is None else f"extent {constant}"
                lines.append(f"    if not {' == '.join([*sizes, *([] if constant is None else [str(constant)])])}:")
                lines.append(
                    f'        raise ValueError(f"{name}: {", ".join(group)} {"has" if len(group) == 1 else "have"} {one}; inputs have {found}")'
                )
            for source in (source_of(f) for f in self.algorithm.extent_formulas(first)):
                lines.append(f"    if {sizes[0]} != {source_text(source, python=True)}:")
                wanted = f"{source_text(source)}, which is {{{source_text(source, python=True)}}}"
                lines.append(f'        raise ValueError(f"{name}: {group[0]} has extent {wanted}; inputs have {{{sizes[0]}}}")')
        return lines

    def _labels(self) -> dict[str, None]:
        """Return labels whose extents the launches need."""
        found = dict.fromkeys(label for k in self.kernels for label in self._labels_of(k))
        later = {label: other for label, (other, _) in self.counted.items() if label in found}
        cut = {self.pieces.label: None} if self.pieces else {}
        return dict.fromkeys([*(x for x in found if x not in later), *later.values(), *later, *cut])

    def _extent_only_inputs(self) -> tuple[str, ...]:
        """Return the inputs that no kernel reads but that alone define the extent of a label."""
        known = {label for r in self.reads for label in plain_labels(self.algorithm, r)}
        lost = [x for x in self._labels() if self.algorithm.constant_extent(x) is None and not known & self.algorithm.tied_labels(x)]
        lost = [x for x in lost if not self.algorithm.formulas_of(x)]
        sources = (self.algorithm.extent_source(label) for label in lost)
        return tuple(dict.fromkeys(source[0] for source in sources if source))

    def _labels_of(self, kernel: Kernel) -> list[str]:
        return [
            *(label for w in kernel.writes for label in self._shape(kernel, w)),
            *self.texts[kernel.name].labels,
            *(label for k in (kernel, *kernel.tail) if k.name in self.described for label in self.described[k.name].labels),
            *(g.label for k in (kernel, *kernel.tail) for g in k.grid if g.label in self.merged or not self._stores_own_places(kernel)),  # in blocks of 1 it is no argument
        ]

    def _only_adds(self, kernel: Kernel) -> bool:
        """Return whether a kernel stores no result of its own, and adds to sums that another one has cleared."""
        return kernel.writes[0] in self.accumulated and bool({*kernel.reads} - {*kernel.writes})

    def _stores_own_places(self, kernel: Kernel) -> bool:
        """Return whether the sizes of what a kernel writes are those of its grid."""
        return not self._only_adds(kernel) and (kernel.func in kernel.writes or any(w.name in kernel.writes for w in kernel.workspaces))

    def _shape(self, kernel: Kernel, buffer: str) -> tuple[str, ...]:
        """Return labels of a buffer that a kernel writes; a workspace has its parts before them."""
        return (
            next(w.labels for w in kernel.workspaces if w.name == buffer)
            if buffer not in self.algorithm
            else self.algorithm[buffer].labels
        )

    def _scalars(self, name: str) -> list[str]:
        lines = []
        integers = self.algorithm.integer_scalars()
        for s in self.scalars:
            kind = "int" if s in integers else "float"
            lines.append(f"    if isinstance({s}, torch.Tensor) and {s}.numel() != 1:")
            lines.append(f'        raise ValueError(f"{name}: {s} is a number or a one-element tensor; got shape {{tuple({s}.shape)}}")')
            lines.append(f"    {s} = {s} if isinstance({s}, torch.Tensor) else {kind}({s})")
        return lines

    def _promotions(self) -> list[str]:
        """Return the dtype of the results and of products. Inputs of products are brought to theirs."""
        floats = [t for t in value_inputs(self.algorithm, self.reads) if t not in self.algorithm.float8_buffers]
        lines = [f"    dtype = {floats[0]}.dtype" if floats else "    dtype = torch.float32"]
        lines += [f"    dtype = torch.promote_types(dtype, {t}.dtype)" for t in floats[1:]]
        lines += ["    dtype = dtype if dtype.is_floating_point else torch.float32"] if floats else []
        multiplied = any("tl.dot" in self.texts[k.name].source for k in self.kernels)
        lines += self._operand_types(multiplied)
        return lines + ((self._cast_to_result_dtype(floats) if self.operands.uniform else self._cast_to_operand_dtypes()) if multiplied else [])

    def _cast_to_result_dtype(self, floats: list[str]) -> list[str]:
        """Return lines that cast all inputs to the results' dtype, except integers that no product reads: that dtype may not hold them."""
        taken = product_inputs(self.algorithm) - self.algorithm.integral
        values = (f"{t}.to(dtype)" + ("" if t in taken else f" if {t}.is_floating_point() else {t}") for t in floats)
        return [f"    {', '.join(floats)} = {', '.join(values)}"] if len(floats) > 1 else []

    def _cast_to_operand_dtypes(self) -> list[str]:
        """Return lines that cast inputs to the dtype of the products that read them, or to a floating-point one for several types."""
        values = {t: f"{t}.to({self.operands.variable(self.operands.held[t])})" for t in self.reads if t in self.operands.held}
        values |= {t: f"{t} if {t}.is_floating_point() else {t}.float()" for t in self.reads if t in self.operands.loose}
        return [f"    {', '.join(values)} = {', '.join(values.values())}"] if values else []

    def _operand_types(self, multiplied: bool) -> list[str]:
        """Return a variable for each type of products that is not the results'. Where no product is on the matrix units, buffers alone have one."""
        wanted: list[OperandType | None] = []
        if multiplied:
            wanted += [self.operands.type_of(dot) for k in self.kernels for one in (k, *k.tail) for dot in products_of(one)]
            wanted += [self.operands.held[t] for t in self.reads if t in self.operands.held and not self.operands.uniform]
        wanted += [self.operands.held[w] for k in self.kernels for w in k.writes if self._is_stored_narrow(w)]
        found = []
        for t in (t for t in dict.fromkeys(wanted) if t is not None):
            if t.float8:
                found.append(f"    {self.operands.variable(t)} = torch.{ex.FLOAT8[t.float8].torch}")
                continue
            sides = [self._promoted(sources) for sources in (t.sources, t.otherwise)]
            found.append(f"    {self.operands.variable(t)} = operand_dtype({', '.join(s for s in sides if s)})")
        return found

    def _is_stored_narrow(self, buffer: str) -> bool:
        """Return whether a kernel writes ``buffer`` in the type of the products that read it, or in the results' dtype."""
        return buffer in self.operands.held and buffer not in self.outputs and (buffer in self.algorithm.operands or not isinstance(self.algorithm[buffer].expr, ex.Cast))

    def _promoted(self, sources: tuple[str, ...]) -> str:
        """Return a list of tensors and dtypes in the wrapper; "" for none."""
        values = [s if s in self.reads else f"torch.{ex.TORCH_NAMES[s.removeprefix(CAST)]}" for s in sources if s in self.reads or s.startswith(CAST)]
        return f"[{', '.join(values)}]" if values else ""

    def _allocate(self, kernel: Kernel, allocated: set[str]) -> list[str]:
        """Return the lines that allocate the buffers that a kernel writes, except those already ``allocated``."""
        lines, held = [], self.operands.held
        for space in (w for w in kernel.workspaces if w.name in kernel.writes):
            parts = str(space.parts) if space.parts else "triton.cdiv(size_{}, {})".format(*space.blocks)
            shape = ", ".join([parts, *self._held(space.name, space.labels, kernel)]) + ("" if space.labels else ",")
            lines.append(f"    {space.name}_out = torch.empty(({shape}), dtype=torch.{space.dtype}, device={self.reads[0]}.device)")
        for w in (w for w in kernel.writes if w in self.algorithm and w not in allocated):
            if w in self.written:
                lines.append(f"    {w}_out = {self.written[w]}")
                continue
            d = self.algorithm[w]
            extents = self._held(w, d.labels, kernel)
            if w in self.aligned and extents:
                pitch = (VECTORS if d.labels[-1] in self.short_rows else PITCH) * (2 if w in self.algorithm.float8_buffers else 1)
                extents[-1] = f"-(-{extents[-1]} // {pitch}) * {pitch}"
            shape = ", ".join(extents) + ("," if len(d.labels) == 1 else "")
            dtype = (
                "torch.float32"
                if w in self.accumulated
                else f"scalar_dtype({scalar})"
                if (scalar := dict(self.algorithm.scalar_gradients).get(w)) in self.scalars
                else f"torch.{own}"
                if (own := self.algorithm.own_dtype(w))
                else "dtype"
                if w in self.outputs
                else self.operands.variable(held[w])
                if self._is_stored_narrow(w)
                else "torch.float32"
            )
            if w in self.copied and dtype == "torch.float32":
                lines.append(f"    {w}_out = {self.copied[w]}_out")
                continue
            same = f"{self.copied[w]}_out if {dtype} == torch.float32 else " if w in self.copied else ""
            if w in self.reused and w not in self.aligned:
                same = f"{self.reused[w]}_out if {dtype} == {self.reused[w]}_out.dtype else "
            lines.append(f"    {w}_out = {same}torch.empty(({shape}), dtype={dtype}, device={self.reads[0]}.device)")
        return lines

    def _held(self, buffer: str, labels: Sequence[str], kernel: Kernel) -> list[str]:
        """Return the extents of a buffer in memory: those of one piece for a chunked Func."""
        p = self.pieces
        cut = p is not None and (buffer in p.kept or buffer not in self.algorithm and kernel.func in p.roots)
        return [f"min({p.size}, size_{label})" if cut and p is not None and label == p.label else f"size_{label}" for label in labels]

    def _launch(self, kernel: Kernel) -> list[str]:
        lines, depth = [f"    with torch.cuda.device_of({self.reads[0]}):"], 2
        if kernel.grid:
            lines, depth = [f"    if {self._has_programs(kernel)}:", "    " + lines[0]], 3
        pad = "    " * depth
        if kernel.name not in self.described:
            return lines + self._call(kernel, self.texts[kernel.name], pad)
        text = self.described[kernel.name]
        boxes = ", ".join(f"({self._joined(box)}, {box.sizes})" for box in text.boxes)
        rest = [
            t if t in self.algorithm.inputs else f"{t}_out"
            for t in dict.fromkeys(kernel.reads + kernel.writes)
            if t not in kernel.descriptors
        ]
        small = f" and index_type({', '.join(rest)}) == tl.int32" if rest else ""
        more = f" and {text.condition}" if text.condition else ""
        dense = "".join(f"{asked} and " for asked in text.dense)
        lines.append(f"{pad}if {dense}described({boxes}){more}{small}:")
        ways = self._waves(kernel, text, pad + "    ") if kernel.tail else self._call(kernel, text, pad + "    ")
        return lines + ways + [f"{pad}else:"] + self._call(kernel, self.texts[kernel.name], pad + "    ")

    def _joined(self, box: Box) -> str:
        """Return the tensor that a descriptor is made for."""
        found = box.buffer if box.buffer in self.algorithm.inputs else f"{box.buffer}_out"
        for joined in reversed(box.joined):
            found = f"joined_dimensions({found}, {joined.first}, {joined.last})"
        return found

    def _has_programs(self, kernel: Kernel) -> str:
        """Return whether a kernel has work, as an expression in the wrapper. What it adds to may have elements where its own result has none."""
        first = f"{kernel.writes[0]}_out"
        if kernel.writes[0] in self.written or self._only_adds(kernel) or any(w in self.accumulated for w in kernel.writes[1:]):
            return " and ".join(f"size_{g.label}" for g in kernel.grid if not g.parts)
        same = f"{first} is not {self.copied[kernel.writes[0]]}_out and " if kernel.writes[0] in self.copied else ""
        return f"{same}{first}.numel()"

    def _waves(self, kernel: Kernel, text: KernelText, pad: str) -> list[str]:
        """Return the lines that launch whole waves of blocks, then the rest in smaller blocks or with split sums."""
        blocks, parts = block_count(kernel), programs_per_block(kernel.tail[0]) if len(kernel.tail) > 1 else 0
        counted = f"{blocks}, {resident_programs(kernel)}, {kernel.writes[0]}_out"
        lines = [f"{pad}{BEFORE} = waves_before_parts({counted}, {parts})" if parts else f"{pad}{BEFORE} = whole_waves({counted})"]
        lines += self._call(kernel, text, pad) + [f"{pad}if {BEFORE} < {blocks}:"]
        for w in kernel.tail[0].workspaces:
            extents = [str(w.parts), f"{blocks} - {BEFORE}", *(str(n) if n else f"size_{x}" for x, n in zip(w.labels[1:], w.extents[1:]))]
            lines += [f"{pad}    {w.name}_shape = ({', '.join(extents)})"]
            lines += [f"{pad}    {w.name}_out = torch.empty({w.name}_shape, dtype=torch.{w.dtype}, device={self.reads[0]}.device)"]
        return lines + [line for t in kernel.tail for line in self._call(t, self.described[t.name], pad + "    ")]

    def _call(self, kernel: Kernel, text: KernelText, pad: str) -> list[str]:
        """Return one launch, filled to the width of a line."""
        args = [value for _, value in text.arguments] + [f"{name}={value}" for name, value in text.constants]
        elastic = (
            not text.warps and kernel.num_stages > 1 and any(f"{fn}(" in value for fn in ("whole", "first_tile") for _, value in text.constants) and has_matrix_product(kernel.body)
        )
        args += [f"num_warps={text.warps or kernel.num_warps}"] + ([] if elastic or text.warps else [f"num_stages={kernel.num_stages}"])
        args += (
            []
            if text.warps
            else [f"**cluster({value})" if name == "cluster" else f"**nvidia_only({name}={value})" for name, value in kernel.options]
        )
        lines = [f"{pad}launch("] if elastic else [f"{pad}{text.name}[{text.grid}]("]
        args = [text.name, text.grid, str(kernel.num_stages), *args] if elastic else args
        times = unrolled_product(kernel.body)
        args += ["**dependent"] if text.dependent and kernel is not self.kernels[0] and not _starts_after_copies(kernel) else []
        args += [f"**unrolled({times})"] if times > MOST_UNROLLED and not text.warps else []
        row = pad + "   "
        for a in args:
            if len(row) + len(a) > 118:
                lines += [row] if row.strip() else []
                row = pad + "   "
            row += f" {a},"
        return [*lines, row, f"{pad})"]


_SAID = {
    "whole": "a power of two >= ",
    "index_type": "tl.int64 if an offset passes 2**31, else tl.int32",
    "dot_precision": "'ieee' or 'tf32'",
    "language_type": "the tl dtype of ",
}


def launch_comment(program: Program, kernels: tuple[Kernel, ...], texts: dict[str, KernelText], outputs: tuple[str, ...]) -> str:
    """Return the comment that replaces the wrapper of Funcs compiled with compile_to_kernel: grid and arguments of each, in order."""
    needed = program.algorithm.needed_by(outputs)  # type: ignore[attr-defined]
    lines = []
    for k in (k for k in kernels if k.func in needed):
        text = texts[k.name]
        args = [value for _, value in text.arguments] + [f"{name}={_said(value)}" for name, value in text.constants]
        args += [f"num_warps={k.num_warps}", f"num_stages={k.num_stages}", *(f"{name}={value}" for name, value in k.options)]
        whole = f"Launch {text.name}[{text.grid}]({', '.join(args)})"
        lines += textwrap.wrap(whole, 118, initial_indent="# ", subsequent_indent="#     ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines) + "\n"


def _said(value: str) -> str:
    fn, _, rest = value.partition("(")
    return (_SAID[fn] + (rest[:-1] if fn in ("whole", "language_type") else "")) if fn in _SAID else value


def plain_labels(algorithm: Algorithm, tensor: str) -> tuple[str | None, ...]:
    """Return, for each dimension of an input, the label that indexes it; None where index arithmetic does."""
    return algorithm.plain_labels(tensor)


def _starts_after_copies(kernel: Kernel) -> bool:
    """Return whether a kernel waits for the copies of its operands to end: its programs stay on their multiprocessors, and multiply.

    Launched beside the kernels that copy, one took 1100 us on an H100, after them 939.
    """
    return kernel.persistent and has_matrix_product(kernel.body) and bool({*kernel.descriptors} & {*kernel.aligned_reads})
