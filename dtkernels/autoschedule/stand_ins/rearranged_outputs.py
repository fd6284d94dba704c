"""Schedule outputs that hold another Func's elements in other places as if that Func were the output.

Before: ``g[x_phase, o, x_step] = ...; f[o, x] = g[x % 2, o, x / 2];`` and ``f`` is asked for
After:  ``g`` is asked for; its schedule, then ``f.fuse_at(g, x_step); g.map(o, x_step, x_phase); f.compile();``

Before: ``f`` is no output, others read it
After:  ``g`` is asked for and scheduled alone, then the rest with ``f`` as an input; ``f.fuse_at(g, x_step); f.store();``

The kernel of ``g`` stores ``f`` alone, in the dtype of results. Blocks of different phases store neighbours: they come one after another, so that the L2
writes whole sectors to memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...algebra.rearrangement import interleavings, rearrangement
from ...lang import expr as ex
from ...lang.algorithm import Algorithm, Definition
from ...lang.schedule import Bare, FuseAt, Map, Primitive, Program, Schedule


@dataclass(frozen=True)
class RearrangedOutputs:
    """An algorithm to schedule, and the outputs that its Funcs stand for."""

    algorithm: Algorithm
    outputs: tuple[str, ...]
    stands_for: dict[str, str]  #: Func -> the output that its kernel stores instead
    phases: dict[str, tuple[str, ...]]  #: Func -> its labels that number neighbours of the output
    left_out: tuple[Definition, ...] = ()  #: of these outputs

    @staticmethod
    def of(algorithm: Algorithm, outputs: tuple[str, ...]) -> RearrangedOutputs:
        """Return ``algorithm`` without the outputs that rearrange a Func which nothing else reads."""
        readers: dict[str, set[str]] = {}
        for d in algorithm.definitions:
            for access in ex.accesses(d.expr):
                readers.setdefault(access.tensor, set()).add(d.name)
        found = {}
        for output in outputs:
            moved = rearrangement(algorithm[output], algorithm)
            if moved and moved.interleaves and moved.source not in outputs and readers[moved.source] == {output} and output not in readers:
                found[moved.source] = output
        if not found:
            return RearrangedOutputs(algorithm, outputs, {}, {})
        sources = {output: source for source, output in found.items()}
        kept = tuple(d for d in algorithm.definitions if d.name not in sources)
        phases = {source: tuple(algorithm[source].labels[pair.phase] for pair in interleavings(algorithm[o].expr)) for source, o in found.items()}  # type: ignore[arg-type]
        left_out = tuple(algorithm[output] for output in sources)
        return RearrangedOutputs(algorithm.with_definitions(kept), tuple(sources.get(o, o) for o in outputs), found, phases, left_out)

    @staticmethod
    def between(algorithm: Algorithm, outputs: tuple[str, ...]) -> tuple[RearrangedOutputs, Algorithm] | None:
        """Return what makes the first Func that rearranges another one and is no output, and the rest, which has it as an input; None if there is none, or they share a Func."""
        for d in algorithm.definitions:
            moved = rearrangement(d, algorithm)
            if not moved or not moved.interleaves or d.name in outputs or any(moved.source in {a.tensor for a in ex.accesses(u.expr)} for u in algorithm.definitions if u is not d):
                continue
            made = RearrangedOutputs.of(algorithm.limited_to((d.name,)), (d.name,))
            others = tuple(u for u in algorithm.definitions if u is not d)
            rest = replace(algorithm, inputs=(*algorithm.inputs, d.name)).with_definitions(others).limited_to(outputs)
            if made.stands_for and not {*made.algorithm.funcs} & {*rest.funcs}:
                return made, rest
        return None

    def restored(self, schedule: Schedule) -> Schedule:
        """Return the schedule of the outputs that were asked for."""
        if not self.stands_for:
            return schedule
        fused: tuple[Primitive, ...] = tuple(FuseAt(f, "fuse_at", (g, self.algorithm[g].labels[-1])) for g, f in self.stands_for.items())
        fused += tuple(p for g in self.stands_for for p in self._order(g, schedule))
        compiled = (Bare(self.stands_for[p.func], "compile") if p.name == "compile" and p.func in self.stands_for else p for p in schedule.primitives)
        return Schedule((*fused, *compiled))

    def program(self, algorithm: Algorithm, schedule: Schedule) -> Program:
        """Return the program of the outputs that were asked for; ``algorithm`` is the one to schedule, maybe with more Funcs."""
        return Program(algorithm.with_definitions((*algorithm.definitions, *self.left_out)), self.restored(schedule))

    def _order(self, func: str, schedule: Schedule) -> tuple[Primitive, ...]:
        """Return the statement that has blocks of different phases follow one another."""
        blocks = schedule.sizes(func, "block")
        last = [x for x in blocks if x in self.phases[func]]
        if not last or schedule.of(func, "map"):
            return ()
        return (Map(func, "map", (*(x for x in blocks if x not in last), *last)),)
