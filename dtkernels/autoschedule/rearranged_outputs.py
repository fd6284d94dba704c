"""Schedule outputs that hold another Func's elements in other places as if that Func were the output.

Before: ``g[x_phase, o, x_step] = ...; f[o, x] = g[x % 2, o, x / 2];`` and ``f`` is asked for
After:  ``g`` is asked for; its schedule, then ``f.fuse_at(g, x_step); g.map(o, x_step, x_phase); f.compile();``

The kernel of ``g`` stores ``f`` alone, in the dtype of results. Blocks of different phases store neighbours: they come one after another, so that the L2
writes whole sectors to memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..algebra.rearrangement import interleavings, rearrangement
from ..lang import expr as ex
from ..lang.algorithm import Algorithm
from ..lang.schedule import Bare, FuseAt, Map, Primitive, Schedule


@dataclass(frozen=True)
class RearrangedOutputs:
    """An algorithm to schedule, and the outputs that its Funcs stand for."""

    algorithm: Algorithm
    outputs: tuple[str, ...]
    stands_for: dict[str, str]  #: Func -> the output that its kernel stores instead
    phases: dict[str, tuple[str, ...]]  #: Func -> its labels that number neighbours of the output

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
        return RearrangedOutputs(algorithm.with_definitions(kept), tuple(sources.get(o, o) for o in outputs), found, phases)

    def restored(self, schedule: Schedule) -> Schedule:
        """Return the schedule of the outputs that were asked for."""
        if not self.stands_for:
            return schedule
        fused: tuple[Primitive, ...] = tuple(FuseAt(f, "fuse_at", (g, self.algorithm[g].labels[-1])) for g, f in self.stands_for.items())
        fused += tuple(p for g in self.stands_for for p in self._order(g, schedule))
        compiled = (Bare(self.stands_for[p.func], "compile") if p.name == "compile" and p.func in self.stands_for else p for p in schedule.primitives)
        return Schedule((*fused, *compiled))

    def _order(self, func: str, schedule: Schedule) -> tuple[Primitive, ...]:
        """Return the statement that has blocks of different phases follow one another."""
        blocks = schedule.sizes(func, "block")
        last = [x for x in blocks if x in self.phases[func]]
        if not last or schedule.of(func, "map"):
            return ()
        return (Map(func, "map", (*(x for x in blocks if x not in last), *last)),)
