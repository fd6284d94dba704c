"""Keep a Func between kernels in pieces: ``g.chunk(y:4096)``.

Before, with all of ``g`` in memory::

    g[x, y] = exp(rdot(H[x, k], W[y, k], k));
    f[x, k] = rdot(g[x, y], W[y, k], y);    d[y, k] = rdot(g[x, y], H[x, k], x);

After, with a loop of the wrapper around the kernels that write or read ``g``, over pieces of 4096 of ``y``. ``size_y`` is the length of the piece,
``size_y_first`` the number of elements before it, and inputs and results along ``y`` are views of the piece::

    f_sum[x, k] = where(len(y_first) > 0, f_sum[x, k], 0) + rdot(g[x, y], W[y, k], y);    in float32
    f[x, k] = f_sum[x, k];                                                                after the loop

Sums over ``y`` are added up over the pieces in float32, in order: results are bitwise reproducible. A label used as a value is its place in the
whole: ``y`` becomes ``y + len(y_first)``, and ``len(y)`` is ``len(y_whole)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...algebra.smart_constructors import replaced
from ...lang import expr as ex
from ...lang.algorithm import Algorithm, Definition
from ...lang.errors import DTError
from ...lang.schedule import Bare, Evict, FuseAt, Names, Pieces, Primitive, Program, Schedule, Sized, Sizes, host
from ...lang.schedule_checks import reduction_labels
from .kernel_partition import funcs_in_kernel, kernel_roots, stored_funcs
from .partial_sums import free_name

ROWS, COLUMNS = 4, 256  #: block of the kernel that converts a finished sum
KEPT_BY_RESULT = ("compile", "compile_to_kernel", "align")  #: statements on a sum that stay with its result


def chunk_funcs(program: Program) -> Program:
    """Replace the ``chunk`` statements of ``program`` by a loop over pieces (``Program.pieces``)."""
    asked = [p for p in program.schedule.primitives if isinstance(p, Sizes) and p.name == "chunk"]
    if not asked:
        return program
    first = asked[0]
    for p in asked:
        _check(program, p, first)
    rest = replace(program, schedule=Schedule(tuple(p for p in program.schedule.primitives if p not in asked)))
    return _Loop(rest, first, tuple(p.func for p in asked)).program()


def _check(program: Program, p: Sizes, first: Sizes) -> None:
    """Raise DTError where ``p`` is not on a Func between kernels, or asks for other pieces than ``first``."""
    inside = p.func in program.schedule.fused() and not program.schedule.of(p.func, "store")
    if p.func in program.outputs() or inside or p.func not in program.algorithm.needed_by(program.outputs()):
        raise DTError("chunk is for a Func between kernels", found=p.func, allowed="a Func that is not compiled, and not fused or stored", at=p.pos)
    along = [d.name for d in program.algorithm.definitions if isinstance(d.expr, ex.Scan) and d.expr.label == p.args[0].label]
    if along:
        raise DTError("a scan is not cut into pieces", found=f"chunk({p.args[0]}), along which {along[0]} runs", allowed="another label", at=p.pos)
    if p.args != first.args:
        raise DTError("a program has one loop over pieces", found=f"{first} {p}".replace(";", ",", 1).rstrip(";"), allowed="one label and size", at=p.pos)


@dataclass
class _Loop:
    """The kernels that run once for each piece, and what changes in them."""

    before: Program
    asked: Sizes
    kept: tuple[str, ...]

    def __post_init__(self) -> None:
        self.algorithm: Algorithm = self.before.algorithm
        self.label, self.size = self.asked.args[0].label, self.asked.args[0].size
        self.fused = self.before.schedule.fused()
        self.order = kernel_roots(self.before)
        self.members = {root: funcs_in_kernel(self.before, root) for root in self.order}
        self.stored = {*stored_funcs(self.before), *self.before.outputs()}
        self.roots = self._kernels()
        self.inside = set().union(*(self.members[r] for r in self.roots))
        taken = self.algorithm
        self.first, self.whole = free_name(f"{self.label}_first", taken), free_name(f"{self.label}_whole", taken)
        self.sums: dict[str, str] = {}  #: Func that is summed over pieces -> the Func that holds its sum
        self.looped: dict[str, ex.Expr] = {}  #: Func -> what the loop computes of it, for a sum that alone
        self.cut: dict[str, tuple[int, ...]] = {}  #: tensor -> its dimensions along the label

    def program(self) -> Program:
        """Return the program with the loop."""
        for a in self.before.accumulated:
            if {a.host, a.result} & set(self.roots):
                raise self._refuse(f"{a.result}, which accumulate_at adds up in memory", f"{a.result} in a kernel of its own")
        for root in self.roots:
            self._check_kernel(root)
        self.looped = {f: self._node(f) if f in self.sums else self.algorithm[f].expr for f in self.inside}
        self.cut = self._cut_dimensions()
        self._check_places()
        definitions = tuple(new for d in self.algorithm.definitions for new in self._definitions(d))
        self._check_shared()
        self._check_order()
        algorithm = self.algorithm.with_definitions(definitions)
        algorithm = replace(algorithm, rvars=(*algorithm.rvars, self.first, self.whole))
        roots = tuple(self.sums.get(r, r) for r in self.roots)
        pieces = Pieces(self.label, self.size, self.kept, roots, tuple((s, f) for f, s in self.sums.items()), self.first, self.whole, self._views())
        return replace(self.before, algorithm=algorithm, schedule=self._schedule(), pieces=pieces)

    # -- which kernels ------------------------------------------------------------------------------------------------

    def _writes(self, root: str) -> set[str]:
        return {root, *(f for f in self.stored if f in self.algorithm and host(f, self.fused) == root)}

    def _reads(self, root: str) -> set[str]:
        found = {a.tensor for m in self.members[root] for a in ex.accesses(self.algorithm[m].expr)}
        return {t for t in found if t in self.algorithm and (t not in self.fused or t in self.stored)} - self._writes(root)

    def _kernels(self) -> tuple[str, ...]:
        """Return the kernels that write or read a chunked Func, and those between two of these."""
        found = {r for r in self.order if (self._writes(r) | self._reads(r)) & set(self.kept)}
        after: set[str] = set()  # kernels that read, at some remove, what the loop makes
        made: set[str] = set()
        for r in self.order:
            if r in found or self._reads(r) & made:
                after.add(r)
                made |= self._writes(r)
        wanted = set(found)
        for r in reversed(self.order):
            if r in after and any(self._writes(r) & self._reads(user) for user in wanted):
                wanted.add(r)
        return tuple(r for r in self.order if r in wanted)

    # -- what is allowed ----------------------------------------------------------------------------------------------

    def _refuse(self, found: str, allowed: str) -> DTError:
        return DTError(f"chunk cuts {self.label} of every kernel that reads {', '.join(self.kept)}", found=found, allowed=allowed, at=self.asked.pos)

    def _check_kernel(self, root: str) -> None:
        """Check that each result of a kernel is elementwise in the label, or one sum over it."""
        for func in sorted(self.members[root]):
            own, reduced = self.label in self.algorithm[func].labels, self.label in reduction_labels(self.algorithm, func)
            written = func in self._writes(root)
            if func in self.algorithm.written:  # the place of a row in the input may be anywhere
                raise self._refuse(f"{func}, which writes {self.algorithm.written[func]}", "a kernel of its own for it, that reads no chunked Func")
            if reduced and (own or not written or not self._is_sum(func)):
                raise self._refuse(f"{str(self.algorithm[func]).rstrip(';')}, which takes all of {self.label} at once", "another label, or a sum over it")
            if written and not own and not reduced:
                raise self._refuse(f"{func}, which has no {self.label}", "another label")
            if reduced:
                self.sums[func] = func if self._sums_in_place(func) else free_name(f"{func}_sum", self.algorithm)
        if any(label == self.label or other == self.label for label, other, _ in self.before.counted):
            raise self._refuse("parts_at over the same label", "another label")

    def _check_places(self) -> None:
        """Check that every element along the label is read at the label itself, where views of the piece are read."""
        for name in sorted(self.inside):
            for a in ex.accesses(self.looped[name]):
                for dim, i in enumerate(a.index):
                    here = dim in self.cut.get(a.tensor, ())
                    if here and i != ex.Label(self.label):
                        raise self._refuse(f"{a} in {name}", f"{a.tensor} indexed by {self.label} alone there")
                    if not here and i == ex.Label(self.label) and a.tensor in self.algorithm:
                        raise self._refuse(f"{a} in {name}", "one label along that dimension")
        for name in self.sums:  # what is left of the definition is computed after the loop, when the last piece is in memory
            rest = replaced(self.algorithm[name].expr, {self.looped[name]: ex.Const(0)})
            for a in ex.accesses(rest):
                if a.tensor in self.kept:
                    raise self._refuse(f"{a} in {name}, beside the sum", f"{a.tensor} in the sum over {self.label} alone")

    def _check_shared(self) -> None:
        """Check that no kernel outside the loop computes what changes inside."""
        changed = {name for name, e in self.looped.items() if name not in self.sums and self._local(e) != e}
        for root in self.order:
            if root not in self.roots and (both := changed & self.members[root]):
                raise self._refuse(f"{min(both)}, which {root} computes as well", "a kernel of its own for it")

    def _check_order(self) -> None:
        """Check that no kernel of the loop reads a sum that the loop has not finished."""
        for root in self.roots:
            for tensor in sorted({a.tensor for m in self.members[root] for a in ex.accesses(self.looped[m])}):
                if tensor in self.sums:
                    raise self._refuse(f"{root}, which reads the sum {tensor}", "another label")

    # -- what changes -------------------------------------------------------------------------------------------------

    def _cut_dimensions(self) -> dict[str, tuple[int, ...]]:
        """Return tensor -> dimensions along the label, of inputs and Funcs that the loop reads or writes."""
        found: dict[str, set[int]] = {}
        for name in self.inside:
            own = self.algorithm[name].labels
            found.setdefault(name, set()).update(i for i, label in enumerate(own) if label == self.label)
            for a in ex.accesses(self.looped[name]):
                labels = self.algorithm[a.tensor].labels if a.tensor in self.algorithm else a.index
                along = (i for i, at in enumerate(labels) if at in (self.label, ex.Label(self.label)))
                found.setdefault(a.tensor, set()).update(along)
        return {t: tuple(sorted(dims)) for t, dims in found.items() if dims}

    def _views(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return the tensors in memory of which the kernels get the piece, with the dimensions that are cut."""
        reached = set().union(*(self._writes(r) | self._reads(r) for r in self.roots)) | set(self.algorithm.inputs)
        return tuple(sorted((t, dims) for t, dims in self.cut.items() if t in reached))

    def _node(self, func: str) -> ex.Expr:
        """Return the node of a sum that is accumulated over pieces: all of it, or the one sum in it."""
        core = self._core(func)
        return core if self._is_linear(core) else self._summed(func)[0]

    def _is_sum(self, func: str) -> bool:
        return len(self._summed(func)) == 1 or self._is_linear(self._core(func))

    def _core(self, func: str) -> ex.Expr:
        """Return the definition without the cast around it."""
        e = self.algorithm[func].expr
        return e.arg if isinstance(e, ex.Cast) else e

    def _summed(self, func: str) -> list[ex.Expr]:
        """Return the sums over the label in a definition; a maximum counts as two, so that it is refused."""
        nodes = [n for n in self.algorithm[func].expr.walk() if isinstance(n, (ex.Reduce, ex.Dot)) and self.label in n.labels]
        return [m for n in nodes for m in ([n] if isinstance(n, ex.Dot) or n.kind == "sum" else [n, n])]

    def _is_linear(self, e: ex.Expr) -> bool:
        """Return whether each addend of ``e`` has one sum over the label as a factor, so that ``e`` itself adds up over pieces."""
        match e:
            case ex.Dot() | ex.Reduce("sum"):
                return self.label in e.labels
            case ex.Binary("+" | "-", a, b):
                return self._is_linear(a) and self._is_linear(b)
            case ex.Unary("-", a):
                return self._is_linear(a)
            case ex.Binary("*", a, b):
                return self._is_linear(a) and not self._sums_in(b) or self._is_linear(b) and not self._sums_in(a)
            case ex.Binary("/", a, b):
                return self._is_linear(a) and not self._sums_in(b)
        return False

    def _sums_in(self, e: ex.Expr) -> bool:
        return any(isinstance(n, (ex.Reduce, ex.Dot)) and self.label in n.labels for n in e.walk())

    def _sums_in_place(self, func: str) -> bool:
        """Return whether a Func holds its own sum: it is stored in float32."""
        e = self.algorithm[func].expr
        single = isinstance(e, ex.Cast) and e.dtype == "fp32"
        return self._is_linear(self._core(func)) and (single or func not in self.before.outputs() and not isinstance(e, ex.Cast))

    def _definitions(self, d: Definition) -> Iterator[Definition]:
        """Yield what stands in place of a definition."""
        if d.name not in self.inside:
            yield d
            return
        local = replace(d, expr=self._local(d.expr))
        if d.name not in self.sums:
            yield local
            return
        name = self.sums[d.name]
        node = self.looped[d.name]
        so_far = ex.Access(name, tuple(map(ex.Label, d.labels)))
        started = ex.Binary(">", ex.Len(self.first), ex.Const(0))
        total = ex.Binary("+", ex.Call("where", (started, so_far, ex.Const(0))), self._local(node))
        if name == d.name:
            yield replace(d, expr=replace(d.expr, arg=total) if isinstance(d.expr, ex.Cast) else total)
            return
        yield Definition(name, d.labels, total, d.pos)
        yield replace(d, expr=d.expr.transform(lambda n: so_far if n == node else n))

    def _local(self, e: ex.Expr) -> ex.Expr:
        """Return an expression of the kernels in the loop: labels as values and lengths are those of the whole."""
        match e:
            case ex.Label(self.label):
                return ex.Binary("+", e, ex.Len(self.first))
            case ex.Len(self.label):
                return ex.Len(self.whole)
            case ex.Access(tensor, index):
                cut = self.cut.get(tensor, ())
                return replace(e, index=tuple(i if dim in cut else self._local(i) for dim, i in enumerate(index)))
        return e.rebuild(self._local)

    def _schedule(self) -> Schedule:
        """Return the schedule: statements on a sum go to the Func that holds it; its result gets a kernel of its own."""
        new = {f: s for f, s in self.sums.items() if f != s}
        said: list[Primitive] = []
        for p in self.before.schedule.primitives:
            moved = p if p.name in KEPT_BY_RESULT else replace(p, func=new.get(p.func, p.func))
            if isinstance(moved, FuseAt):
                moved = replace(moved, args=(new.get(moved.consumer, moved.consumer), moved.label))
            elif isinstance(moved, Names) and moved.name == "descriptor":
                moved = replace(moved, args=tuple(new.get(t, t) for t in moved.names))
            elif isinstance(moved, Evict):
                moved = replace(moved, args=tuple(replace(a, name=new.get(a.name, a.name)) for a in moved.policies))
            said.append(moved)
        for func, name in new.items():
            said += [Bare(name, "store")] if func in self.fused and not any(p.func == name and p.name == "store" for p in said) else []
            own = self.algorithm[func].labels
            tile = tuple(Sized(x, COLUMNS if x == own[-1] else ROWS if x in own[-2:-1] else 1) for x in own)
            said += [Sizes(func, "block", tile), Sizes(func, "tensorize", tile)] if own else []
        return Schedule((*said, *self.before.implied()))
