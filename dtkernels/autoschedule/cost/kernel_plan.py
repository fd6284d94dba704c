"""Plan the work of one kernel as far as it does not depend on sizes: its loops, reads, products and writes. ``kernel_work.py`` counts it at sizes."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import replace
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from .kernel_config import KernelConfig, read_schedule
from .kernel_work import KernelCount
from .outline import WINDOW, FuncOutline, Index, Known, Product, Read, paired_terms
from .window_work import windows_of
from .work import Work

if TYPE_CHECKING:
    from ...codegen.target import Target


class Access(NamedTuple):
    """A read of a kernel: how often it is repeated, and whether the kernel reads the same before."""

    read: Read
    around: tuple[str, ...]  #: loops that repeat it
    whole: tuple[str, ...]  #: blocked labels that it runs over whole
    looped: bool  #: whether a loop advances it
    again: bool
    sweeps: int  #: loops, one after another, that each make the product it is an operand of


class KernelPlan:
    """The parts of a kernel's work that do not depend on sizes."""

    def __init__(self, config: KernelConfig, known: Known, aligned: frozenset[str], fused: frozenset[str] = frozenset()):
        self.runs: dict[str, tuple[str, ...]] = {}  #: labels that count runs of others, in this plan as if no others were there
        if config.merged:
            config, known, self.runs = _along_runs(config, known)
        self.config, self.known, self.aligned = config, known, aligned | frozenset(config.copies)
        own = known.funcs.get(config.func) or known.outline.funcs[-1]
        self.blocks, self.tiles = dict(config.blocks), config.all_of("tiles")
        self.members: list[tuple[FuncOutline, str]] = [(own, "")]
        self.members += [(_in_places_of(known.funcs[f], own), loop) for f, loop in config.members if f in known.funcs]
        self.root = own
        self.split = self._split_labels(config)
        for func, _ in self.members:  # what is fused elsewhere and not written is computed here once more
            again = [r.tensor for r in func.reads if r.tensor in fused and all(r.tensor != m.name for m, _ in self.members)]
            self.members += [(known.funcs[name], own.reduced[-1] if own.reduced else "") for name in dict.fromkeys(again)]
        self.merged = config.merges
        domain = dict.fromkeys((*own.labels, *own.reduced, *(r for f, _ in self.members for r in f.reduced), *self.blocks))
        domain |= dict.fromkeys(x for f, _ in self.members for x in f.labels if x not in known.aliases)
        self.domain = tuple(domain)
        self.order = self._order()
        self.products = [(p, self._recompute_loops(f, loop), self._whole(f), self._sweeps(f)) for f, loop in self.members for p in f.products]
        elementwise = {f.name for f, _ in self.members if not f.products and not f.reduced}
        self.computes_operands = any(r.tensor in elementwise for f, _ in self.members if f.products for r in f.reads)
        loaded = {r.tensor for f, _ in self.members if f.products for r in f.reads} - {f.name for f, _ in self.members}
        self.sums_operands = any(f.reduced and not f.products and r.tensor in loaded for f, _ in self.members for r in f.reads)
        self.paired = len(self.products) > 1 and len({p.reduced for p, *_ in self.products}) == 1
        self.chained = len(self.products) > 1 and not self.paired
        self.passes = self._passes()
        self.rescaled = self._rescaled()
        self.arithmetic = [(*a, len(self.passes[f.name]), paired_terms(f), f) for f, loop in self.members if (a := self._arithmetic(f, loop))[1] or a[2]]
        self.pairs = any(paired_terms(f) for f, _ in self.members)
        self.accesses = self._accesses()
        instead = {f.name for f, _ in self.members if known.funcs.get(f.name, f) is not f}
        unread = instead and own.name not in known.outputs and all(f.name in instead for f in known.funcs.values() if any(r.tensor == own.name for r in f.reads))
        self.writes = [f for f, _ in self.members if f is own and not unread or f.name in config.written or f.name in known.outputs]
        self.scattered = self._scattered(self.blocks)
        self.apart = self._split_apart()
        compared = frozenset(x for f, _ in self.members for x in f.bounded)
        self.bounded = frozenset(x for x in compared if "<=" not in x and WINDOW not in x)
        self.ordered = [tuple(x.split("<=")) for x in sorted(compared) if "<=" in x]  #: pairs of labels of which only those terms count whose first is not above the second
        self.windows = windows_of(f for f, _ in self.members)
        self.loops = list(dict.fromkeys([((*f.labels, *nest), self._whole(f)) for f, _ in self.members for nest in _nests(f)]))
        self.results = list(dict.fromkeys([f.labels if f.products else (*f.labels, *f.reduced) for f, _ in self.members if f.products or not self.products]))

    @staticmethod
    def form(config: KernelConfig) -> tuple:
        """Return all of a kernel's choices that its plan depends on, but for sizes."""
        blocks, tiles, parts = (tuple([(x, bool(n)) for x, n in sizes]) for sizes in (config.blocks, config.tiles, config.split))
        return blocks, tiles, parts, config.order, config.staged, config.aligns, config.unrolled, config.merged

    def resized(self, config: KernelConfig) -> KernelPlan:
        """Return the plan of a kernel of the same form and of other sizes."""
        config = replace(config, merged=(), fused=self.config.fused) if self.runs else config
        plan = copy(self)
        vars(plan).pop("_elementwise", None)
        plan.config, plan.blocks, plan.tiles, plan.split = config, dict(config.blocks), config.all_of("tiles"), self._split_labels(config)
        plan.scattered = self._scattered(plan.blocks)
        return plan

    @property
    def added(self) -> dict[str, str]:
        """Return the Funcs to whose sums the programs add in memory, and in which order: not those of which a program has all terms at once."""
        whole = {x for x, size in self.tiles.items() if not size and x not in self.blocks}
        return {f.name: order for f, _ in self.members if (order := self.config.added.get(f.name)) and (f.picked_labels() or not {*f.reduced} <= whole)}

    def _split_labels(self, config: KernelConfig) -> dict[str, int]:
        """Return the labels of sums that several programs share, and in how many parts; 0 for one part a block."""
        return config.all_of("split") | {x: 0 for x, _ in config.blocks if x not in self.root.labels and x not in config.merges}

    def _scattered(self, blocks: dict[str, int]) -> frozenset[str]:
        """Return the labels whose blocks reach over groups."""
        apart = ((x, by) for f, _ in self.members for r in f.reads for x, by in r.labels if by > 1 and x in blocks and any((x, 1) in o.labels for o in f.reads))
        return frozenset([x for x, by in apart if by % blocks[x]])

    def _split_apart(self) -> int:
        """Return the loops of split sums beside which the kernel's own Func is no sum: the last merge goes on to write along the split label."""
        labels = {*self.split} - {*self.root.reduced}
        return len({at for f, _ in self.members if labels & {*f.reduced} for at in self.passes[f.name]})

    def _order(self) -> tuple[tuple[str, int, bool], ...]:
        """Return the steps of the grid, slowest first: (label, group, whether it counts groups)."""
        groups = {inner: (label, g) for label, inner, g in self.config.order if g}
        found = []
        for label, _, group in self.config.order:
            if group:
                found.append((label, group, True))
            elif label in self.blocks:
                found.append((label, 0, False))
            elif label in groups:
                found.append((*groups[label], False))
        return tuple([*((x, 0, False) for x in self.blocks if all(x != f[0] for f in found)), *found])

    def _recompute_loops(self, func: FuncOutline, loop: str) -> tuple[str, ...]:
        """Return labels whose loops run around a fused Func that lacks them: it is computed again in each iteration. They are the root's, and those of products made of it."""
        loop = loop.rpartition(".")[2]
        if not loop:
            return ()
        labels = self.root.labels
        upto = labels.index(loop) + 1 if loop in labels else len(labels)
        around = (*labels[:upto], *(self._labels_of_readers(func) if func.products else ()))
        return tuple(dict.fromkeys([x for x in around if x not in func.labels and x not in func.reduced]))

    def _labels_of_readers(self, func: FuncOutline) -> tuple[str, ...]:
        """Return the labels of the kernel's inner products that a loop adds up tile by tile of ``func``: each of their own tiles makes all of these again."""
        if all(x in self.blocks or not self.tiles.get(x, 1) for x in func.labels):
            return ()
        made, before = {func.name}, 0
        while len(made) > before:
            before = len(made)
            made |= {f.name for f, _ in self.members if any(r.tensor in made for r in f.reads)}
        inner = [f for f, _ in self.members if f.products and f.name in made and f not in (func, self.root)]
        return tuple([x for f in inner for x in f.labels if x not in self.root.labels and x not in self.blocks])

    def _whole(self, func: FuncOutline) -> tuple[str, ...]:
        """Return the labels that a fused Func adds over and the grid cuts: each program runs over all of them."""
        apart = func is self.root or func.name in self.config.parted or func.name in self.config.added
        return () if apart else tuple([x for x in func.reduced if x in self.blocks and x not in self.split])

    def _sweeps(self, func: FuncOutline) -> int:
        """Return how many loops, one after another, make the product ``func``: each sum or maximum along it, unless it shares the loop of another."""
        along = {*func.labels} - {*self.root.labels}
        over = [(f, loop) for f, loop in self.members if f is not func and along & {*f.reduced}]
        return max(1, sum(loop.rpartition(".")[2] not in f.reduced for f, loop in over)) if func.products else 1

    def _arithmetic(self, func: FuncOutline, loop: str) -> tuple[tuple[str, ...], int, int, tuple[str, ...], tuple[str, ...]]:
        """Return (labels, special functions, other arithmetic, loops around, labels run over whole). Products add up by themselves."""
        labels = func.labels if func.products else tuple(dict.fromkeys((*func.labels, *func.reduced)))
        light = func.light + (0 if func.products else len(func.reduced))
        if self.config.single and func.reduced:  # one addition for a term, and places are numbers
            light = max(1, light - len(func.reduced) + 1 - 2 * sum(WINDOW in x for x in func.bounded))
        return labels, func.heavy, light, self._recompute_loops(func, loop), self._whole(func)

    def _accesses(self) -> tuple[Access, ...]:
        inside, seen, found = {f.name for f, _ in self.members}, set(), []
        tensors = set()
        for func, loop in self.members:
            for read, at in ((self._copied(r), at) for r in func.reads for at in self.passes[func.name]):
                own = self._in_domain(read)
                looped = any(x not in self.blocks and self.tiles.get(x, 1) for x, _ in own) or bool(self._whole(func))
                place = (read.tensor, own, "" if not looped else at)
                if read.tensor in inside or place in seen:
                    continue
                seen.add(place)
                around = tuple(dict.fromkeys((*self._recompute_loops(func, loop), *self._enclosing(func, read))))
                found.append(Access(read, around, self._whole(func), looped, read.tensor in tensors, self._sweeps(func)))
                tensors.add(read.tensor)
        return tuple(found)

    def _in_domain(self, read: Read) -> Index:
        """Return the labels of a read, with the kernel's own in place of those that a Func has by itself: of ``h = 4 * K_1 + h_in``, divided by 4, the first."""
        found: dict[str, int] = {}
        for label, by in read.labels:
            parts = () if label in self.domain else self.known.aliases.get(label, ())
            found |= {label: by} if not parts else dict.fromkeys(parts[:1] if by > 1 else parts, 1)
        return tuple(found.items())

    def _copied(self, read: Read) -> Read:
        """Return a read of a copy, whose rows may lie along another label, or of dimensions that a merged label goes along as one."""
        if along := self.config.copies.get(read.tensor):
            return read._replace(last=(along,))
        labels = tuple([x for x, by in read.labels if by == 1])
        dense = next((parts for parts in self.merged.values() if labels[-len(parts) :] == parts and read.last == parts[-1:]), None)
        return read._replace(last=dense) if dense else read

    def _passes(self) -> dict[str, tuple[str, ...]]:
        """Return the loops in which each Func is computed, by the Func whose loop it is.

        What is added up where another one is shares its loop. What others are made from element by element is computed where those are.
        """
        apart = {f.name: loop.partition(".") for f, loop in self.members if f.reduced and f is not self.root}
        found: dict[str, tuple[str, ...]] = {f.name: (loop if loop in self.root.reduced or loop in f.reduced else f.name,) for f, loop in self.members}
        if self.products:  # the root's own loops are those that others are fused into
            return {name: tuple([self.root.name if at in self.root.reduced else at for at in places]) for name, places in found.items()}

        def own(name: str) -> str:
            if name not in apart:
                return self.root.name
            consumer, dot, label = apart[name]
            return own(consumer) if dot and label in self.known.funcs[name].reduced else self.root.name if consumer in self.root.reduced else name

        @cache  # in a chain of Funcs that each read the one before twice, the ways to the first are 2^n
        def places(name: str) -> dict[str, None]:
            if name in apart or name == self.root.name:
                return {own(name): None}
            kept, rank = name in self.config.written or name in self.known.outputs, len(self.known.funcs[name].labels)
            reads = [(f.name, len(r.labels)) for f, _ in self.members for r in f.reads if r.tensor == name and f.name != name]
            whole = dict.fromkeys([reader for reader, labels in reads if labels >= rank])  # others read the elements that data picks
            return ({own(name): None} if kept or not reads else {}) | {at: None for reader in whole for at in places(reader)}

        return {f.name: tuple(places(f.name)) for f, _ in self.members}

    def _rescaled(self) -> frozenset[str]:
        """Return the reductions that share a loop with one that is made from them: each step then adds up its terms, since all before it are rescaled."""
        found = set()
        for func, loop in self.members:
            consumer, dot, label = loop.partition(".")
            if dot and label in func.reduced and any(r.tensor == func.name for r in self.known.funcs[consumer].reads):
                found |= {func.name, consumer}
        return frozenset(found)

    def _enclosing(self, func: FuncOutline, read: Read) -> tuple[str, ...]:
        """Return the loops around a read that do not advance it, outside of one that does."""
        own = {x for x, _ in read.labels}
        nest = next((nest for nest in _nests(func) if own & {*func.reduced} <= {*nest}), func.reduced)
        loops = [*func.labels, *nest]
        last = max((i for i, x in enumerate(loops) if x in own and self.tiles.get(x, 1) and x not in self.blocks), default=-1)
        return tuple([x for x in loops[: last + 1] if x not in own])

    def crossed(self, product: Product) -> tuple[list[str], list[str]]:
        """Return the labels of a product's rows, and of its columns, along which an operand lies contiguous."""
        labels, rows, columns = self.root.labels, product.rows, product.columns
        if rows and columns and rows[-1] in labels and columns[-1] in labels and labels.index(rows[-1]) > labels.index(columns[-1]):
            rows, columns = columns, rows  # the product comes out transposed
        last = [x for a in self.accesses if {x for x, _ in a.read.labels} & {*product.reduced} for x in a.read.last]
        return [x for x in last if x in rows], [x for x in last if x in columns]

    def at(self, sizes: dict[str, int], itemsize: int, target: Target, live: float) -> Work:
        """Return the work at ``sizes``, for inputs and products of ``itemsize`` bytes an element. ``live``: registers of an element of a tile of rows."""
        if self.runs:
            sizes = sizes | {name: math.prod(sizes.get(x, 1) for x in run) for name, run in self.runs.items()}
        single = self.products and all(sizes.get(x, 1) == 1 and self.tiles.get(x, 1) == 1 for p, *_ in self.products for x in p.reduced)
        return KernelCount(self._elementwise if single else self, sizes, itemsize, target).work(live)

    @cached_property
    def _elementwise(self) -> KernelPlan:
        """The plan of a kernel whose products have one term each: they are elementwise products."""
        funcs = tuple([f._replace(reduced=(), products=(), light=f.light + len(f.products)) if f.products else f for f in self.known.outline.funcs])
        known = Known(self.known.outline._replace(funcs=funcs), tuple(self.known.outputs))
        return KernelPlan(self.config, known, self.aligned)


def _along_runs(config: KernelConfig, known: Known) -> tuple[KernelConfig, Known, dict[str, tuple[str, ...]]]:
    """Return a kernel whose merged labels are labels of its Funcs, where these lie beside each other in all that it moves; else as it was, without runs."""
    runs = config.merges
    inside = [known.funcs[f] for f in (config.func, *(f for f, _ in config.members)) if f in known.funcs]
    name_of = {x: name for name, run in runs.items() for x in run}
    renamed = {x for own, labels in known.aliases.items() for x in (own, *labels)}
    if not inside or renamed & name_of.keys() or any(f.merged(runs) is None for f in inside):
        return config, known, {}
    fused = tuple([replace(f, loop=name_of.get(f.loop, f.loop)) for f in config.fused])
    return replace(config, merged=(), fused=fused), known.merged(tuple(runs.items())), runs


def _nests(func: FuncOutline) -> tuple[tuple[str, ...], ...]:
    """Return the labels that each nest of loops of a Func adds over: products of different sums run one after another."""
    found = tuple(dict.fromkeys(p.reduced for p in func.products))
    apart = len(found) > 1 and {x for nest in found for x in nest} == {*func.reduced} and sum(map(len, found)) == len(func.reduced)
    return found if apart else (func.reduced,)


def _in_places_of(func: FuncOutline, root: FuncOutline) -> FuncOutline:
    """Return an output that holds the elements of the kernel's own Func in other places as what goes along with that Func: it reads nothing more."""
    moved = [r.tensor for r in func.reads] == [root.name] and not func.reduced and not {*func.labels} <= {*root.labels}
    return func._replace(labels=root.labels, reads=()) if moved else func


@lru_cache(maxsize=4096)
def plans(schedule: str, known: Known) -> tuple[KernelPlan, ...]:
    """Return the plan of each kernel of a schedule."""
    read = read_schedule(schedule)
    written = {f for k in read.kernels for f in k.written} | read.outputs
    sums = {f for k in read.kernels for f in (*k.parted, *k.added)}
    aligned = frozenset([c.func for k in read.kernels for c in k.choices() if c.aligned] + [t for k in read.kernels for t in k.aligns])
    kernels = [k for k in read.kernels if "" in known.funcs or (k.func in known.funcs and k.func not in sums)]
    fused = frozenset([f for k in read.kernels for f, _ in k.members if f in known.funcs and f not in written and f not in known.outputs])
    return tuple([_plan(k, known, aligned, fused) for k in kernels])


_plan = lru_cache(maxsize=4096)(KernelPlan)  # schedules share kernels
