"""Run CPU workers: make seeds, propose candidates, refit the cost model, compile. One handler, so that any worker can do any of these."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from ...algebra.operand_types import rows_of
from ...autoschedule.cost.coefficients import rates_of
from ...autoschedule.cost.outline import Known
from ...autoschedule.default_schedule import default_schedule, schedules
from ...autoschedule.problem import SchedulingProblem
from ...autoschedule.stored_operands import computed_operand_slowdown
from ...codegen.analysis.resources import check_resources
from ...codegen.emit.gluon.kernel import INFIX
from ...codegen.emit.module import emit
from ...codegen.ir.nest import Store, statements
from ...codegen.target import Target
from ...lang.algorithm import Algorithm, operand_names, with_operands
from ...lang.errors import DTError
from ...lang.parser import parse_schedule
from ...lang.schedule import host
from ...runtime.build.source_cache import load_module
from ...runtime.build.specialization import narrowest
from ...runtime.build.triton_compile import compile_kernel, plain_types, record_launches, stored_kernel_of
from ...runtime.launch.wrapper_recorder import host_text
from ...runtime.select.schedule_selection import scheduled
from ...runtime.tables.kernel_store import StoredKernel, digest
from .. import deterministic_build  # noqa: F401  as tools/build.py does: what is timed is what is built
from ..records import inputs_and_reference
from ..records.problems import CallKind, TuningProblem, operator_of, time_model, variants_of
from ..search.candidates import (
    KernelCandidate,
    ScheduleCandidate,
    kernels_of,
    part_counts,
    plans_of,
    readers,
    split_by_kernel,
    with_aligned_rows,
)
from ..search.model import RatesOfKinds, Residuals, Sample, kernel_plans, predicted, refitted
from ..search.space import Surroundings, drawn, split_sums, stored_operands

WORSE = 3.0  #: ways to fuse, and random candidates, that are predicted to be this many times slower are dropped
DRAWS, MUTATIONS, GENERATIONS, ANYWHERE = 64, 48, 3, 14  #: of a proposal; steps of a draw from the whole space
LOOKED = 6  #: candidates that are lowered to see whether they fit, for each that is proposed


class Refused(Exception):
    """A candidate that cannot run; one line."""


@dataclass
class Artefact:
    """The compiled kernels of one candidate, or of a whole schedule: all that a launch needs, without Triton."""

    host: str
    kernels: tuple[str, ...]
    writes: tuple[str, ...]  #: the Funcs it writes
    entries: list[StoredKernel] = field(default_factory=list)
    codes: dict[str, bytes] = field(default_factory=dict)


@dataclass
class Seeds:
    """Where a search starts: ways to fuse with a schedule of each, and candidates with their estimates."""

    default: ScheduleCandidate
    cuts: dict[str, ScheduleCandidate] = field(default_factory=dict)  #: by what is fused
    plans: dict[KernelCandidate, float | None] = field(default_factory=dict)  #: predicted microseconds; None for one that does not fit
    earlier: list[ScheduleCandidate] = field(default_factory=list)  #: schedules of a table's rows
    illegal: list[str] = field(default_factory=list)  #: those that are not legal here


@dataclass
class Proposal:
    """Candidates to measure next, the most promising first, and the gain that the model expects of the best, as a part of the time."""

    plans: list[KernelCandidate]
    gain: float


class CpuWorker:
    """Handle tasks in a worker process."""

    def __init__(self, to: Target, compiling: bool = True):
        self.to, self.compiling = to, compiling

    def __call__(self, task: tuple) -> object:
        kind, *rest = task
        return getattr(self, kind)(*rest)

    def seeds(self, work: TuningProblem, families: bool = True, earlier: tuple[str, ...] = ()) -> Seeds:
        """Return the default schedules, those of the spec's families if asked for, and ``earlier`` ones."""
        _, variant = variants_of(work.group)
        algorithm, outputs = variant.algorithm, variant.outputs
        found: Seeds | None = None
        asked = algorithm, outputs, work.extents, work.group.itemsize, self.to
        for schedule in schedules(*asked):
            made = split_by_kernel(algorithm, outputs, str(schedule))
            costs = {p: self._cost(work, made, p.root) for p in made.plans}
            if found is None:
                first, found = made, Seeds(made)
            elif self._wasteful(work, made, costs, found):
                continue
            found.cuts.setdefault(made.fused, made)
            found.plans |= costs
        assert found is not None
        for text in family_texts(work.group) if families else ():
            self._family(work, completed(text, first, outputs), found)
        found.default = split_by_kernel(algorithm, outputs, str(default_schedule(*asked, in_order=True)))  # one of the above, whatever its estimate
        found.cuts.setdefault(found.default.fused, found.default)
        found.plans |= {p: self._cost(work, found.default, p.root) for p in found.default.plans if p not in found.plans}
        for text in earlier:
            self._earlier(work, text, found)
        return found

    def _earlier(self, work: TuningProblem, text: str, found: Seeds) -> None:
        """Add a row's schedule regardless of its estimate: it was fast at some size."""
        _, variant = variants_of(work.group)
        try:
            made = split_by_kernel(variant.algorithm, variant.outputs, text)
        except (DTError, AssertionError, KeyError):
            found.illegal.append(text)
            return
        if found.cuts.setdefault(made.fused, made).roots != made.roots:
            found.illegal.append(text)
            return
        found.earlier.append(made)

    def _family(self, work: TuningProblem, text: str, found: Seeds) -> None:
        """Add the candidates of one schedule of a family that are legal."""
        _, variant = variants_of(work.group)
        plans = plans_of(text, variant.algorithm)
        fused = next(iter(plans.values())).fused if plans else ""
        if fused not in found.cuts:
            try:
                made = split_by_kernel(variant.algorithm, variant.outputs, text)
            except DTError:
                return
            costs = {p: self._cost(work, made, p.root) for p in made.plans}
            if not {*made.roots} <= plans.keys() or None in costs.values() or self._wasteful(work, made, costs, found):
                return  # a kernel without statements, one that does not fit, or a far slower one
            found.cuts[fused] = made
        cut_there = {line.split(".")[0] for p in plans.values() for line in p.tiles.splitlines()}
        if not cut_there <= {*found.cuts[fused].roots, *(f for p in plans.values() for f in split_sums(p))}:
            return  # it schedules a kernel that is fused into another here
        for root, plan in plans.items():
            if plan not in found.plans and root in found.cuts[fused].roots:
                found.plans[plan] = self._cost(work, found.cuts[fused].with_plan(plan), root)

    def _wasteful(self, work: TuningProblem, made: ScheduleCandidate, costs: dict[KernelCandidate, float | None], first: Seeds) -> bool:
        """Return whether a way to fuse is hopeless: it stores a Func far larger than the op's inputs and outputs, or seems far slower."""
        _, variant = variants_of(work.group)
        most = max(inputs_and_reference.elements(work, n) for n in (*variant.algorithm.inputs, *variant.outputs))
        if any(inputs_and_reference.elements(work, r) > 2 * most for r in made.roots if r not in variant.outputs):
            return True
        own, best = list(costs.values()), [first.plans[p] for p in first.default.plans]
        return None not in (*own, *best) and sum(own) > WORSE * sum(best)  # type: ignore[arg-type]

    def propose(self, work: TuningProblem, whole: ScheduleCandidate, root: str, times: dict[KernelCandidate, float | None],
                seeds: Sequence[KernelCandidate], rates: RatesOfKinds | None, anew: bool, count: int) -> Proposal:  # fmt: skip
        """Return the ``count`` candidates of which the model expects most, one of them drawn at random.

        They are chosen among the rules' and families' ``seeds``, draws from the whole space, and mutations of the best, evolved for a
        few generations by predicted time (as Ansor does, Zheng et al. 2020). ``times``: of the measured ones, None where one failed.
        ``anew``: start without the best ones, for a restart.
        """
        rng = random.Random(f"{work.text()} {root} {len(times)} {anew}")
        known = {p: t for p, t in times.items() if t is not None}
        best = sorted(known, key=known.__getitem__)[:3]
        from_here = [p for p in (*(() if anew and seeds else best), *seeds)] or [p for p in whole.plans if p.root == root]
        around: dict[frozenset[str], Surroundings] = {}  #: by the operands that are stored first

        def step(plan: KernelCandidate, steps: int) -> KernelCandidate:
            if (form := stored_operands(plan)) not in around:
                around[form] = Surroundings.of(variants_of(work.group)[1].algorithm, plan, work.extents, self.to.has_tma, work.group.dtype == "fp32")
            return drawn(plan, around[form], steps, rng)

        pool = dict.fromkeys((*seeds, *(step(rng.choice(from_here), rng.randint(2, ANYWHERE)) for _ in range(DRAWS))))
        at_random = [p for p in pool if p not in times and p not in seeds]
        for _ in range(GENERATIONS):
            ranked = sorted(pool, key=lambda p: self._predicted(work, whole, p, rates))
            parents = [*([] if anew else best), *ranked[:16]]
            pool |= dict.fromkeys(step(rng.choice(parents), rng.randint(1, 3)) for _ in range(MUTATIONS))
        left = [p for p in pool if p not in times]
        residuals = Residuals(list(known), [self._predicted(work, whole, p, rates) for p in known], list(known.values()))
        gains = residuals.gains(left, [self._predicted(work, whole, p, rates) for p in left])
        order = sorted(range(len(left)), key=lambda i: -gains[i])
        found: list[tuple[float, KernelCandidate]] = []
        for i in order[: LOOKED * count]:
            if len(found) < count - 1 and self.fits(work, whole.with_plan(left[i]), root):
                found.append((float(gains[i]), left[i]))
        limit = WORSE * min((self._predicted(work, whole, p, rates) for p in (*best, *(p for _, p in found))), default=float("inf"))
        other = (p for p in at_random[: LOOKED * count] if self._predicted(work, whole, p, rates) <= limit and all(p != q for _, q in found))
        one = next((p for p in other if self.fits(work, whole.with_plan(p), root)), None)
        return Proposal([*(p for _, p in found), *([one] if one else [])], max((g for g, _ in found), default=0.0))

    def refit(self, measured: Sequence[tuple[TuningProblem, str, str, float, float]]) -> RatesOfKinds:
        """Return the rates of the cost model fitted to kernels: (problem, schedule, root, microseconds, best of its size)."""
        found = []
        for work, schedule, root, time, best in measured:
            if readers(variants_of(work.group)[1].algorithm, schedule):
                continue  # the time is of two kernels
            own = kernel_plans(schedule, root, time_model(work.group).known)
            if len(own) == 1:
                found.append(Sample(own[0], work.sizes, work.group.itemsize, time, best))
        return refitted(found, self.to)

    def _cost(self, work: TuningProblem, whole: ScheduleCandidate, root: str) -> float | None:
        """Return the predicted microseconds of one kernel; None if it does not fit."""
        plan = next(p for p in whole.plans if p.root == root)
        return self._predicted(work, whole, plan, None) if self.fits(work, whole, root) else None

    def _predicted(self, work: TuningProblem, whole: ScheduleCandidate, plan: KernelCandidate, rates: RatesOfKinds | None) -> float:
        text = with_aligned_rows(whole.with_plan(plan), work).schedule(variants_of(work.group)[1].outputs)
        return predicted_kernel(work, text, plan.root, self.to, rates or rates_of(self.to.arch))

    def fits(self, work: TuningProblem, whole: ScheduleCandidate, root: str | None) -> bool:
        """Return whether the kernel of ``root``, or every kernel of the schedule, is legal and the GPU has room for it."""
        _, variant = variants_of(work.group)
        try:
            kernels = kernels_of(variant.algorithm, variant.outputs, whole, root)
            added = {s.buffer for k in kernels for s in statements(k.body) if isinstance(s, Store) and s.onto}
            copies = {w: work.group.itemsize for k in kernels for w in k.writes if w not in variant.algorithm and w not in added}
            extents = work.extents | part_counts(variant.algorithm, variant.outputs, whole, work.extents)
            for kernel in kernels:
                check_resources(kernel, extents, copies | inputs_and_reference.itemsizes(work), self.to)
        except (DTError, AssertionError, KeyError):
            return False
        return True

    def compile(self, group: CallKind, whole: ScheduleCandidate, root: str | None, works: tuple[TuningProblem, ...]) -> Artefact:
        """Compile the kernels of ``root``, or of all of ``whole``, as calls of ``works`` launch them. Raises Refused."""
        _, variant = variants_of(group)
        outputs = variant.outputs
        kernels = kernels_of(variant.algorithm, outputs, whole, root)
        every = [one for k in kernels for one in (k, *k.tail)]
        names = tuple(f"{k.name}{form}_kernel" for k in every for form in ("", "_descriptor", INFIX))  # every kernel the wrapper may launch
        writes = tuple(dict.fromkeys(w for k in kernels for w in k.writes if w in variant.algorithm))
        if not self.compiling:
            return Artefact("", names, writes)
        source = emit(scheduled(variant.algorithm, whole.schedule(outputs)), "call", self.to)  # emitted as for a call: Gluon if that is chosen
        artefact = Artefact(host_text(source), names, writes)
        module = load_module(source, "tuned")
        for launch, build in self._builds(module, works, names):
            compiled = compile_kernel(launch.kernel, build.types, build.constants, build.multiples, launch.options, self.to)
            if compiled.metadata.shared > self.to.shared_bytes:
                raise Refused(f"{launch.kernel.__name__} takes {compiled.metadata.shared} bytes of shared memory; {self.to.name} has {self.to.shared_bytes}")
            entry = stored_kernel_of(compiled, digest(artefact.host.encode()), self.to.arch)
            artefact.entries.append(entry)
            artefact.codes[entry.code] = compiled.asm["cubin"]
        return artefact

    def _builds(self, module, works: Iterable[TuningProblem], names: tuple[str, ...]) -> Iterator[tuple]:
        """Return the most specific build of each launch of these problems, each once."""
        seen = set()
        for work in works:
            for launch in record_launches(module, "call", inputs_and_reference.meta_arguments(work)):
                if launch.kernel.__name__ not in names:
                    continue
                build = narrowest(tuple(launch.kernel.arg_names), launch.args, launch.constants, plain_types(launch))
                key = (launch.kernel.__name__, str(build), str(launch.options))
                if key not in seen:
                    seen.add(key)
                    yield launch, build


@lru_cache(maxsize=1 << 16)
def predicted_kernel(work: TuningProblem, schedule: str, root: str, to: Target, rates: RatesOfKinds) -> float:
    """Return the microseconds of the kernel of ``root`` by the cost model, with those of operands that are stored for it first.

    Where there are such operands and a kernel computes them in its loop, that takes longer than is predicted of products.
    """
    sizes, each = work.extents, work.group.itemsize
    if not computed_operands(work.group):
        return predicted(kernel_plans(schedule, root, time_model(work.group).known), sizes, each, to, rates)
    variant = variants_of(work.group)[1]
    read = readers(variant.algorithm, schedule)
    stating = stating_operands(work.group, frozenset(read))
    hosts = parse_schedule(schedule).fused()
    funcs = [root, *(f for f in stating.algorithm.funcs if host(f, hosts) == root)]
    apart = [name for name, reader in read.items() if host(reader, hosts) == root]
    time = sum(predicted(kernel_plans(schedule, f, stating.known), sizes, each, to, rates) for f in (root, *apart))
    shape = SchedulingProblem(stating.algorithm, variant.outputs, sizes, each, to)
    return time * computed_operand_slowdown(shape, tuple(f for f in dict.fromkeys(funcs) if shape.dots(f)))


class Stating(NamedTuple):
    """An algorithm with Funcs for some operands, and what the cost model knows of it."""

    algorithm: Algorithm
    known: Known


@lru_cache(maxsize=256)
def computed_operands(group: CallKind) -> tuple[str, ...]:
    """Return the names of the operands of products that are computed."""
    return tuple(name for name, e in operand_names(variants_of(group)[1].algorithm).items() if not rows_of(e))


@lru_cache(maxsize=256)
def stating_operands(group: CallKind, names: frozenset[str]) -> Stating:
    """Return the algorithm of a group with Funcs for the operands among ``names``."""
    variant = variants_of(group)[1]
    algorithm = with_operands(variant.algorithm, names)
    return Stating(algorithm, Known.of(algorithm, variant.outputs) if names else time_model(group).known)


def family_texts(group: CallKind) -> Iterator[str]:
    """Return the schedules of the spec's families for this kind of call."""
    for family in operator_of(group.op).spec.schedules:
        if family.direction == group.direction and group.dtype in family.dtypes:
            yield from family.texts()


def completed(text: str, default: ScheduleCandidate, outputs: tuple[str, ...]) -> str:
    """Complete a family's schedule from the default one. If it fuses nothing, take all fusion and the kernels that it does not
    mention; else only outputs that the family does not know, such as those saved for backward.
    """
    said = {line.split(".")[0].strip() for line in text.replace("\n", ";").split(";")}
    if ".fuse_at(" not in text:
        kept = (line for p in default.plans if p.root in said for line in p.tiles.splitlines() if ".approximate(" in line and "rdot" not in line)
        return "\n".join((default.fused, *(p.tiles for p in default.plans if p.root not in said), *kept, text))
    return "\n".join((*(line for line in default.fused.splitlines() if line.split(".")[0] in {*outputs} - said), text))


def make_cpu_worker(index: int, to: Target, compiling: bool = True) -> CpuWorker:
    """Make the handler of a worker process."""
    return CpuWorker(to, compiling)
