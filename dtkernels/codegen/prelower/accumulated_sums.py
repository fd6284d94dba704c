"""Add a sum up in memory, from the programs of another Func's kernel: ``f.accumulate_at(g, m)``.

Before, each kernel computes ``s`` for itself::

    g[l, d] = rdot(s[m, l], Q[m, d], m);
    f[m, d] = rdot(s[m, l], K[l, d], l) * scale;

After, with blocks of ``l`` in the kernel of ``g`` and its loop over ``m``::

    f_sum[m, d] = 0;                                      a kernel
    f_sum[m, d] += rdot(s[m, l], K[l, d], l in block);    in the kernel of g, in each step of its loop over m
    f[m, d] = f_sum[m, d] * scale;                        a kernel, left out where it would only copy float32

``f_sum`` is float32. Programs add to it by atomic additions, in whatever order they run. With ``f.accumulate_at(g, m, ordered)`` the programs of
each block of ``l`` have a part of their own, to which one program adds after another, and the kernel of ``f`` adds up the parts in order::

    f_parts[l_part, m, d] += rdot(s[m, l], K[l, d], l in block l_part);
    f[m, d] = rsum(f_parts[l_part, m, d], l_part) * scale;

Where the kernel of ``g`` has all of ``l`` at once, by ``g.tensorize(l:0)``, the terms at the place are the whole sum: ``f`` is stored there, and
needs neither a buffer nor a kernel.

No program waits for another, so that no order of programs can block. Memory holds one part for each block: a block of several tiles,
``g.block(l:1024); g.tensorize(l:64)``, makes few parts of many steps.

An element may be named by data: ``f[v, d] = rsum(where(t[b] == v, g[b, d], 0), b)`` adds each ``g[b, d]`` to ``f_sum[t[b], d]``, where that is inside.

Where data names few of many elements, ``f.accumulate_at(g, d, named)`` leaves out the others: a kernel that goes through the terms clears the
elements that they are added to, and the kernel of ``f`` reads those alone, of which a count tells it::

    f_named[v] = rsum(where(t[b] == v, 1, 0), b);         added up in the same way, a number for each row
    f_sum[t[b], d] = 0;
    f_sum[t[b], d] += g[b, d];
    f[v, d] = where(f_named[v] > 0, f_sum[v, d], 0);

Legal is any sum that the loops of ``g`` around the place go through exactly once. A loop that the sum and its terms lack would add them
again. A label of the sum may be made of two loops, as ``h`` of ``4 * i + j`` in the gradients of grouped heads; see ``_place_of_pairs``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ...lang import expr as ex
from ...lang.algorithm import Algorithm, Definition
from ...lang.errors import DTError
from ...lang.schedule import AccumulateAt, Accumulation, Bare, FuseAt, Names, Primitive, Program, Schedule, Sized, Sizes, host
from ...lang.schedule_checks import reduction_labels
from .kernel_partition import funcs_in_kernel
from .partial_sums import AT_ONCE, free_name

COUNTED = 128  #: terms of a program that counts
ROWS, COLUMNS = 4, 256  #: block of the kernels that clear and convert, where the schedule states none
_CUT = ("block", "tensorize", "num_warps", "num_stages")
_OF_PLAIN_SUMS = (*_CUT, "accumulate_at", "compile", "compile_to_kernel")  #: statements that a Func without a kernel of its own may have


def accumulate_sums(program: Program) -> Program:
    """Replace each ``accumulate_at`` in ``program`` by a Func that the other kernel adds to. Raises DTError where the sum does not fit."""
    while asked := [p for p in program.schedule.primitives if isinstance(p, AccumulateAt)]:
        program = _Accumulated(program, asked[0]).program_after()
    return program


def zeroing_program(program: Program, accumulation: Accumulation) -> Program:
    """Return a program of one Func, which is 0: that of the sum."""
    name = accumulation.func
    alone = program.algorithm.with_definitions((Definition(name, program.algorithm[name].labels, ex.Const(0.0)),))
    one = tuple((x, 1) for x in accumulation.parts)
    cut = _cut_by(name, (*one, *accumulation.blocks), (*one, *accumulation.tiles))
    return Program(alone, Schedule((*cut, Bare(name, "compile"))), program.counted)


def _cut_by(func: str, blocks: tuple[tuple[str, int], ...], tiles: tuple[tuple[str, int], ...]) -> list[Primitive]:
    """Return the statements that cut a kernel into these blocks and tiles."""
    block, tile = (tuple(Sized(*s) for s in sizes) for sizes in (blocks, tiles))
    return [*([Sizes(func, "block", block)] if block else []), *([Sizes(func, "tensorize", tile)] if tile else [])]


@dataclass
class _Accumulated:
    """One sum that is accumulated in another kernel."""

    program: Program
    asked: AccumulateAt

    def __post_init__(self) -> None:
        self.algorithm: Algorithm = self.program.algorithm
        self.schedule = self.program.schedule
        self.host, self.label = self.asked.consumer, self.asked.label
        self.made: Definition = self.algorithm[self.asked.func]
        self.blocks = self.schedule.sizes(self.host, "block")
        self.tiles = self.schedule.sizes(self.host, "tensorize")

    def program_after(self) -> Program:
        """Return the program with the Func that is added to."""
        node = self._sum()
        self._check_host(node)
        bound = self._bound(node)
        places = self._places(node, bound)
        self._check_once(places, bound)
        self._check_whole(node, places)
        if self._has_all_terms(node, places):
            return self._computed_there(node, tuple(places.items()))
        if self.asked.ordered:
            self._check_without("split")
        if self.asked.named:
            return self._of_named_elements(node, places)
        parts = self._parts(node, places) if self.asked.ordered else ()
        return self._rewritten(node, tuple(places.items()), parts)

    def _of_named_elements(self, node: ex.Reduce | ex.Dot, places: dict[str, ex.Expr]) -> Program:
        """Return the program in which a count says which elements data names."""
        picked = {label: place for label, place in places.items() if any(ex.accesses(place))}
        if not picked or self._needed(node) and self.host not in self._needed(node):
            raise self._refuse("named elements are those that data names", str(self.made).rstrip(";"), f"{self.made.name}.accumulate_at({self.host}, {self.label})")
        used = {x for place in picked.values() for x in ex.free_labels(place)}
        own, over = (tuple(x for x in labels if x in used) for labels in (self.algorithm[self.host].labels, node.labels))
        of_count = tuple(x for x in self.made.labels if x in picked or x in used)
        count, terms = (free_name(f"{self.made.name}_named{part}", self.algorithm) for part in ("", "_terms"))
        tests = ex.joined("and", (ex.Binary("==", place, ex.Label(label)) for label, place in picked.items()))
        counted = ex.Reduce("sum", ex.Call("where", (tests, ex.Access(terms, tuple(map(ex.Label, own))), ex.Const(0))), over)
        read = ex.Binary(">", ex.Access(count, tuple(map(ex.Label, of_count))), ex.Const(0))
        made = replace(self.made, expr=self.made.expr.transform(lambda n: ex.Call("where", (read, n, ex.Const(0))) if n == node else n))
        definitions: list[Definition] = []
        for d in self.algorithm.definitions:
            definitions += [Definition(terms, own, ex.Const(1.0)), Definition(count, of_count, counted), made] if d is self.made else [d]
        blocks = tuple((x, COUNTED if x == own[-1] else 1) for x in own)
        said = [*_cut_by(terms, blocks, blocks), AccumulateAt(count, "accumulate_at", (terms, own[-1]))]
        asked = replace(self.asked, args=self.asked.args[:2])
        kept = (p for p in self.schedule.primitives if p is not self.asked)
        schedule = Schedule((*kept, *said, asked))
        algorithm = self.algorithm.with_definitions(tuple(definitions))
        algorithm = replace(algorithm, vars=(*algorithm.vars, *(x for x in over if x not in algorithm.vars)), rvars=tuple(x for x in algorithm.rvars if x not in over))
        program = _Accumulated(replace(self.program, algorithm=algorithm, schedule=schedule), asked).program_after()
        *others, record = program.accumulated
        return replace(program, accumulated=(*others, replace(record, named=True)))

    # -- what is allowed ----------------------------------------------------------------------------------------------

    def _refuse(self, rule: str, found: str, allowed: str = "") -> DTError:
        return DTError(f"accumulate_at: {rule}", found=found, allowed=allowed, at=self.asked.pos)

    def _sum(self) -> ex.Reduce | ex.Dot:
        """Return the one sum in the definition."""
        found = [n for n in self.made.expr.walk() if isinstance(n, (ex.Reduce, ex.Dot))]
        if len(found) != 1 or isinstance(found[0], ex.Reduce) and found[0].kind != "sum":
            said = str(self.made).rstrip(";")
            raise self._refuse(f"{self.made.name} has one sum, and no other reduction", said, f"{self.made.name}[...] = rsum(...)")
        return found[0]

    def _check_host(self, node: ex.Expr) -> None:
        algorithm, fused, name = self.algorithm, self.schedule.fused(), self.made.name
        if self.host not in algorithm.needed_by(self.program.outputs()) or self.host in fused:
            raise self._refuse(f"{self.host} has a kernel of its own", f"{self.host}, fused or not needed", "one that is compiled or needed")
        if name in fused or self.schedule.of(name, "parts_at") or self.schedule.of(name, "store"):
            raise self._refuse(f"{name} is computed there alone", f"another statement places {name}", "accumulate_at alone")
        if name in algorithm.needed_by((self.host,)):
            raise self._refuse(f"{self.host} does not need {name}, which is finished after it", f"{self.host}, which is made of {name}", "another Func")
        others = {q.func for q in self.schedule.primitives if isinstance(q, AccumulateAt)} | {a.result for a in self.program.accumulated}
        if self.host in others or self.label not in (*algorithm[self.host].labels, *reduction_labels(algorithm, self.host)):
            raise self._refuse(f"{self.host} is computed in its own kernel", f"{self.host}, which is added up elsewhere", "another Func")
        members = sorted(funcs_in_kernel(self.program, self.host))
        if along := [m for m in members if isinstance(algorithm[m].expr, ex.Scan)]:
            raise self._refuse("no scan runs in the same kernel", along[0], f"{name} in a kernel of its own")
        self._check_without("tail", "stream", "cluster")
        if parted := [a for p in self.schedule.of(self.host, "block", Sizes) for a in p.sizes if a.label not in algorithm[self.host].labels]:
            raise self._refuse("a sum in blocks is of a kernel that adds to no other sum", f"{self.host}.block({parted[0]})", f"{self.host} without it")
        if self.host in self._needed(node) and self.label not in algorithm[self.host].labels:
            raise self._refuse(f"the terms are known in the loop over {self.label}", f"{name}, made of the finished {self.host}", "a label of its result")

    def _check_without(self, *words: str) -> None:
        fused = self.schedule.fused()
        for word in words:
            if said := [q for q in self.schedule.primitives if q.name == word and host(q.func, fused) == self.host]:
                raise self._refuse(f"{word} is of a kernel that adds to no other sum", str(said[0]).rstrip(";"), f"{self.host} without {word}")

    def _needed(self, node: ex.Expr) -> tuple[str, ...]:
        """Return the Funcs that the terms are made from."""
        return self.algorithm.needed_by(tuple(a.tensor for a in ex.accesses(node) if a.tensor in self.algorithm))

    # -- the loops around the place -----------------------------------------------------------------------------------

    def _bound(self, node: ex.Expr) -> tuple[str, ...]:
        """Return the labels of the host that have a value at the place."""
        labels = self.algorithm[self.host].labels
        asked = self.schedule.names(self.host, "reorder")
        order = (*(a for a in asked if a in labels), *(x for x in labels if x not in asked))
        if self.label not in labels:
            sums = [n for n in self.algorithm[self.host].expr.walk() if isinstance(n, (ex.Reduce, ex.Dot))]
            return (*order, *next(n.labels for n in sums if self.label in n.labels))
        bound = order[: order.index(self.label) + 1]
        after = [x for x in order if x not in bound]
        late = after if self.host in self._needed(node) else [x for x in after if x in self.blocks]
        if late:
            why = f"{self.host} is known" if self.host in self._needed(node) else f"all blocks of {self.host} are known"
            raise self._refuse(f"the loop is one inside which {why}", f"{self.label}, outside that over {late[-1]}", f"the loop over {order[-1]}")
        return bound

    def _at_once(self, label: str) -> bool:
        return self.tiles.get(label) == 0 and label not in self.blocks

    def _places(self, node: ex.Reduce | ex.Dot, bound: tuple[str, ...]) -> dict[str, ex.Expr]:
        """Return what labels of the sum and of its terms are at the place, for those that have a value there."""
        found: dict[str, ex.Expr] = {}
        for label in (*self.made.labels, *node.labels):
            if label in bound:
                found[label] = ex.Label(label)
            elif (data := self._picking(node, label, bound)) is not None:
                found[label] = data
            elif (place := self._place_of_pairs(node, label, bound)) is not None:
                found[label] = place
        return found

    def _picking(self, node: ex.Expr, label: str, bound: tuple[str, ...]) -> ex.Expr | None:
        """Return the data that terms of the sum have to equal ``label``: ``t[b]`` of ``where(t[b] == v, s[b, k], 0)``."""
        match node:
            case ex.Reduce("sum", ex.Call("where", (condition, _, ex.Const(0)))):
                for test in ex.operands_of(condition, "and"):
                    match test:
                        case ex.Binary("==", data, ex.Label(name)) if name == label and any(ex.accesses(data)) and ex.free_labels(data) <= {*bound}:
                            if self.asked.ordered:
                                raise self._refuse("elements that data names are added to in any order", f"{label}, which {data} names", "accumulate_at without ordered")
                            return data
        return None

    def _place_of_pairs(self, node: ex.Expr, label: str, bound: tuple[str, ...]) -> ex.Expr | None:
        """Return ``4 * i + j`` for a label ``h`` where the host reads ``t[4 * i + j]``, the terms ``t[h]`` and, as a factor, ``K[h / 4]``.

        ``j`` has the extent 4 and ``i`` is the whole dimension of ``K``, past which the terms are 0: each ``h`` with other terms is one pair.
        """
        kernel = [a for m in funcs_in_kernel(self.program, self.host) for a in ex.accesses(self.algorithm[m].expr)]
        for mine in ex.accesses(node):
            for theirs in (a for a in kernel if a.tensor == mine.tensor and len(a.index) == len(mine.index)):
                for here, there in zip(mine.index, theirs.index):
                    match there:
                        case ex.Binary("+", ex.Binary("*", ex.Const(size), ex.Label(outer)), ex.Label(inner)) if (
                            here == ex.Label(label) and {outer, inner} <= {*bound} and self.algorithm.constant_extent(inner) == size
                        ):
                            if self._vanishes_past(node, label, size, outer):
                                return there
        return None

    def _vanishes_past(self, node: ex.Expr, label: str, size: object, outer: str) -> bool:
        """Return whether the terms have a factor ``K[label / size]`` whose dimension ``outer`` goes through: outside it reads 0."""
        group, quotient = self.algorithm.tied_labels(outer), ex.Binary("/", ex.Label(label), ex.Const(size))  # type: ignore[arg-type]
        for factor in _factors(node):
            if isinstance(factor, ex.Access) and factor.tensor in self.algorithm.inputs:
                own = self.algorithm.plain_labels(factor.tensor)
                if any(i == quotient and x is not None and x in group for i, x in zip(factor.index, own)):
                    return True
        return False

    def _check_once(self, places: dict[str, ex.Expr], bound: tuple[str, ...]) -> None:
        """Check that each loop around the place is one label of the sum or its terms, or one of a pair, and of one label only."""
        used = [x for place in places.values() if not any(ex.accesses(place)) for x in ex.free_labels(place)]
        for label in bound:
            if used.count(label) > 1:
                raise self._refuse(f"a loop of {self.host} is one label of {self.made.name}", f"{label}, which is two", "distinct labels")
            if label not in used and not self._at_once(label):
                raise self._refuse(
                    f"the loops of {self.host} around the place go through the terms once",
                    f"{label}, which {self.made.name} and its terms lack: they would be added for each {label}",
                    f"{self.host}.tensorize({label}:0) without blocks of {label}, or a place outside its loop",
                )

    def _check_whole(self, node: ex.Reduce | ex.Dot, places: dict[str, ex.Expr]) -> None:
        """Check that labels without a value at the place are taken at once there."""
        own = self.schedule.sizes(self.made.name, "tensorize")
        for label in (*self.made.labels, *node.labels):
            if label not in places and own.get(label, self.tiles.get(label)) != 0:
                raise self._refuse(
                    f"what {self.host} has no loop over is taken at once", f"{label}, in no loop of {self.host}", f"{self.made.name}.tensorize({label}:0)"
                )

    def _parts(self, node: ex.Reduce | ex.Dot, places: dict[str, ex.Expr]) -> tuple[tuple[str, str, int], ...]:
        """Return (name, label, size) of the blocks of the host that add to the same elements."""
        found: list[tuple[str, str, int]] = []
        for x in node.labels:
            for label in ex.free_labels(places[x]) if x in places else ():
                if label in self.blocks:
                    found.append((free_name(f"{label}_part", self.algorithm), label, self.blocks[label]))
        return tuple(found)

    def _has_all_terms(self, node: ex.Reduce | ex.Dot, places: dict[str, ex.Expr]) -> bool:
        """Return whether the place has all terms of an element at once."""
        return not any(any(ex.accesses(place)) for place in places.values()) and all(
            x not in places or isinstance(at := places[x], ex.Label) and self._at_once(at.name) for x in node.labels
        )

    # -- the program --------------------------------------------------------------------------------------------------

    def _computed_there(self, node: ex.Reduce | ex.Dot, places: tuple[tuple[str, ex.Expr], ...]) -> Program:
        """Return the program in which the kernel of the host computes the whole Func."""
        name = self.made.name
        kept = [q for q in self.schedule.primitives if q is not self.asked and not (q.func == name and q.name in _CUT)]
        whole = tuple(Sized(x, 0) for x in dict.fromkeys((*self.made.labels, *node.labels)) if x not in dict(places))
        said: list[Primitive] = [FuseAt(name, "fuse_at", (self.host, self.label), self.asked.pos)]
        said += [Sizes(name, "tensorize", whole)] if whole else []
        schedule = Schedule((*kept, *said, *self.program.implied()))
        record = Accumulation(name, name, self.host, places, complete=True)
        return replace(self.program, schedule=schedule, accumulated=(*self.program.accumulated, record))

    def _rewritten(self, node: ex.Reduce | ex.Dot, places: tuple[tuple[str, ex.Expr], ...], parts: tuple[tuple[str, str, int], ...]) -> Program:
        made, algorithm = self.made, self.algorithm
        plain = made.expr in (node, ex.Cast(node, "fp32")) and not parts
        in_place = not parts and self._holds_its_sum(node)
        numbers = tuple(name for name, _, _ in parts)
        name = made.name if in_place else free_name(f"{made.name}_{'parts' if parts else 'sum'}", algorithm)
        read: ex.Expr = ex.Access(name, tuple(map(ex.Label, (*numbers, *made.labels))))
        read = ex.Reduce("sum", read, numbers) if parts else read
        added = made if in_place else Definition(name, (*numbers, *made.labels), node)
        rest = [d for d in algorithm.definitions if d is not made]
        rest += [] if in_place else [replace(made, expr=made.expr.transform(lambda n: read if n == node else n))]
        order = [d.name for d in algorithm.definitions]
        rest.sort(key=lambda d: order.index(d.name))
        first = algorithm.needed_by((self.host, *self._needed(node)))
        before, after = ([d for d in rest if (d.name in first) == early] for early in (True, False))
        algorithm = algorithm.with_definitions((*before, added, *after))
        data = [place for _, place in places if any(ex.accesses(place))]
        named = {n.tensor if isinstance(n, ex.Access) else n.name for place in data for n in _of_integers(place)}
        algorithm = replace(algorithm, rvars=(*algorithm.rvars, *numbers), whole_inputs=algorithm.whole_inputs | named)
        record = Accumulation(name, made.name, self.host, places, numbers, self.asked.ordered, plain and not in_place, *self._cut())
        schedule = self._schedule(name, in_place, numbers, dict(places))
        return replace(
            self.program,
            algorithm=algorithm,
            schedule=schedule,
            counted=(*self.program.counted, *parts),
            accumulated=(*self.program.accumulated, record),
        )

    def _holds_its_sum(self, node: ex.Expr) -> bool:
        """Return whether the Func itself is float32 and nothing but the sum."""
        expr = self.made.expr
        if any(q.func == self.made.name and q.name not in _OF_PLAIN_SUMS for q in self.schedule.primitives):
            return False
        if isinstance(expr, ex.Cast) or self.made.name in self.program.outputs():
            return False  # an output has a wrapper of its own
        operands = {id(s) for d in self.algorithm.definitions for n in d.expr.walk() if isinstance(n, ex.Dot) for s in (n.left, n.right)}
        taken = any(id(a) in operands and a.tensor == self.made.name for d in self.algorithm.definitions for a in ex.accesses(d.expr))
        return expr == node and not taken

    def _cut(self) -> tuple[tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]]:
        """Return the blocks and tiles of the kernels that clear the sum and convert it."""
        own, name = self.made.labels, self.made.name
        blocks, tiles = ({x: n for x, n in self.schedule.sizes(name, word).items() if x in own} for word in ("block", "tensorize"))
        if not blocks and not any(tiles.values()):
            blocks = {x: COLUMNS if x == own[-1] else ROWS if x in own[-2:-1] else 1 for x in own}
            tiles = dict(blocks)
        return tuple(blocks.items()), tuple(tiles.items())

    def _schedule(self, name: str, in_place: bool, numbers: tuple[str, ...], places: dict[str, ex.Expr]) -> Schedule:
        read = self.made.expr.transform(lambda n: ex.Const(0) if n == self._sum() else n)
        made, fused = self.made.name, self.schedule.fused()
        epilogue = [a.tensor for a in ex.accesses(read) if a.tensor in self.algorithm]
        terms = {*self._needed(self._sum())} - {*self.algorithm.needed_by(tuple(epilogue))}
        members = {self.host, *(f for f in fused if host(f, fused) == self.host)}
        kept: list[Primitive] = []
        for q in self.schedule.primitives:
            if q is self.asked or in_place and q.func == made and q.name in _CUT:
                continue
            if isinstance(q, FuseAt) and q.consumer == made and q.func in terms:
                q = replace(q, args=(name, *q.args[1:]))
            if isinstance(q, Names) and q.name == "descriptor" and q.func in members:
                q = replace(q, args=tuple(name if t == made else t for t in q.names))
            kept.append(q)
        whole = tuple(Sized(x, 0) for x in dict.fromkeys((*self.made.labels, *self._sum().labels)) if x not in places)
        said: list[Primitive] = [FuseAt(name, "fuse_at", (self.host, self.label), self.asked.pos), Bare(name, "store", pos=self.asked.pos)]
        said += [Sizes(name, "tensorize", whole)] if whole else []
        said += [Sizes(made, "unroll", (Sized(numbers[-1], AT_ONCE),))] if numbers else []
        if not in_place and not self.schedule.sizes(made, "block"):
            said += _cut_by(made, *self._cut())
        return Schedule((*_distinct(kept, said), *said, *self.program.implied()))


def _distinct(kept: Iterable[Primitive], said: Iterable[Primitive]) -> list[Primitive]:
    """Return the statements of ``kept`` that none of ``said`` repeats."""
    new = {str(q) for q in said}
    return [q for q in kept if str(q) not in new]


def _of_integers(place: ex.Expr) -> Iterable[ex.Access | ex.Scalar]:
    """Yield the elements and scalars that must be integers for a place to be one."""
    if isinstance(place, (ex.Access, ex.Scalar)):
        yield place
    elif not isinstance(place, ex.Cast):
        for child in place.children():
            yield from _of_integers(child)


def _factors(node: ex.Expr) -> Iterable[ex.Expr]:
    """Yield the factors of the terms of a sum."""
    match node:
        case ex.Dot():
            yield from _factors(node.left)
            yield from _factors(node.right)
        case ex.Reduce():
            yield from _factors(node.arg)
        case ex.Binary("*", a, b):
            yield from _factors(a)
            yield from _factors(b)
        case ex.Unary("-", a):
            yield from _factors(a)
        case _:
            yield node


__all__ = ["accumulate_sums", "zeroing_program"]
