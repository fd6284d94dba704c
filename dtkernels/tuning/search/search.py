"""Search every kernel at every size in rounds, keeping compilers and GPUs busy: propose, measure, refit the cost model, propose again.

A round at a cell measures what is good nearby, and of all that is proposed what the model expects most of. Where it expects no gain
above the noise, it starts anew without the best ones; where it expects none then either, the cell is done. All cells advance
together, so that the search may end at any time.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from ...autoschedule.cost.coefficients import RatesOfKinds
from ..records.journal import Journal, Time
from ..records.problems import CallKind, TuningProblem
from ..workers.compile_worker import Artefact, Proposal, Seeds
from ..workers.worker_pool import FORGOTTEN, Finished, WorkerPool
from .candidates import KernelCandidate, ScheduleCandidate, with_aligned_rows
from .search_state import Cell, SearchState
from .warm_start import WarmStart

SEED_LIMIT, COMPILE_LIMIT, MEASURE_LIMIT = 120.0, 60.0, 30.0  #: seconds for one task
FIRST, ROUND, SUGGESTED = 4, 4, 3  #: candidates of the first round, of a later round, from elsewhere
GAIN = 0.01  #: the noise of a time; a smaller gain is none
QUIET = 6  #: proposals without a gain that end a cell, restarts after the first; 2 missed a planted optimum in 4 of 10 searches, 4 missed one
HOPELESS = 8  #: rounds without any time that end a cell
REFIT, FITTED = 1.5, 12  #: growth of the measurements until the rates are fitted again; candidates of a cell that a fit takes


@dataclass(frozen=True)
class Job:
    """A candidate to measure at a problem; a whole schedule if ``root`` is None."""

    work: TuningProblem
    cut: ScheduleCandidate
    root: str | None

    @cached_property
    def key(self) -> tuple:
        """Return the key of its compiled kernels."""
        return (self.work.group, self.cut.text() if self.root is None else self.plan.text())

    @cached_property
    def plan(self) -> KernelCandidate:
        return next(p for p in self.cut.plans if p.root == self.root)


class ScheduleSearch:
    """Run the search; owns both worker pools meanwhile."""

    def __init__(self, knowledge: SearchState, journal: Journal, cpus: WorkerPool, gpus: WorkerPool, limits: dict[str, float] | None = None, earlier: WarmStart | None = None):
        self.known, self.journal, self.cpus, self.gpus = knowledge, journal, cpus, gpus
        self.earlier = earlier or WarmStart(None, [])
        self.limits = {"measure": MEASURE_LIMIT, "compile": COMPILE_LIMIT, **(limits or {})}
        self.order = itertools.count()
        self.to_think: list[tuple] = []  #: heaps of (priority, number, task)
        self.to_compile: list[tuple] = []
        self.ready: dict[TuningProblem, list[tuple]] = {}
        self.artefacts: dict[tuple, Artefact] = {}
        self.jobs_of: dict[tuple, list[tuple[tuple, Job]]] = {}  #: jobs that wait for an artefact
        self.sent: dict[tuple[int, int], set] = {}  #: (GPU worker, its life) -> keys of the artefacts it has
        self.at: dict[int, TuningProblem] = {}  #: the last problem of each GPU worker
        self.measured = self.failed = 0
        self.thinking = False  #: whether results lead to further proposals
        self.seeding: dict[CallKind, int] = {}  #: problems of a group whose schedules are not known yet
        self.rebuilt: set[tuple] = set()  #: (key, problem) compiled for that problem alone
        self.rates: RatesOfKinds | None = None  #: of the cost model, fitted to what was measured
        self.rounds: int | None = None  #: proposals after which a kernel is done, whatever is expected
        self.fit_at = 16.0  #: measurements from which on they are fitted again

    # -- the loop ---------------------------------------------------------------------------------------------------

    def explore(self, until: Callable[[], bool], now: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Search until ``until()`` or until nothing is left; seeding always finishes unless ``now()``. Yields now and then."""
        for i, work in enumerate(self.known.works):
            self.seeding[work.group] = self.seeding.get(work.group, 0) + 1
            follows = self.known.follows(work.group)
            self._think((-1 + 2 * follows, i), ("seeds", work, not follows and not until(), self.earlier.schedules(work)))
        yield from self._run(lambda: now() or until() and not self.unseeded(), begun=until)

    def unseeded(self) -> int:
        """Return problems whose schedules are not known yet; without them measurements cannot be evaluated."""
        return sum(self.seeding.values())

    def fill(self, until: Callable[[], bool]) -> Iterator[None]:
        """Measure the best candidate of every problem at the problems near it."""
        for (work, fused, root), cell in list(self.known.cells.items()):
            for other in self.known.near(work)[: 0 if self.known.follows(work.group) else 4]:
                there = self.known.cells.get((other, fused, root))
                if there is not None and not self.known.lagging(there):
                    self._request(there, cell.best(), (1,))
            if not self.known.lagging(cell):
                self._request(cell, self.known.suggestions(cell, SUGGESTED), (0,))
        yield from self._run(until, think=False)

    def _run(self, until: Callable[[], bool], think: bool = True, begun: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Run until ``until()``; once ``begun()``, finish what is being generated but measure nothing more."""
        self.thinking = think
        while not until():
            self._feed(measuring=not begun())
            if not self.cpus.busy() and not self.gpus.busy():
                break
            for done in self.gpus.poll(0.0 if self.cpus.busy() else 0.5):
                self._timed(done)
            for done in self.cpus.poll(0.005 if self.gpus.busy() else 0.2):
                self._computed(done)
            yield
        self._stop()

    def _stop(self) -> None:
        """Drop what has not started; wait for running tasks."""
        self.to_think.clear()
        self.to_compile.clear()
        self.ready.clear()
        self.jobs_of.clear()
        for cell in self.known.cells.values():
            cell.waiting.clear()
            cell.proposing = False
        self.thinking = False
        end = time.monotonic() + self.limits["measure"]
        while self.gpus.busy() and time.monotonic() < end:
            for done in self.gpus.poll(0.2):
                self._timed(done)

    # -- work for idle workers ----------------------------------------------------------------------------------------

    def _feed(self, measuring: bool = True) -> None:
        for worker in self.cpus.idle():
            backlog = sum(map(len, self.ready.values()))
            heaps = [h for h in (self.to_think, self.to_compile) if h and (h is self.to_think or backlog < 2000 and measuring)]
            if not heaps:
                break
            heap = min(heaps, key=lambda h: h[0][0][0])  # a round at a time; generating candidates comes before compiling them
            priority, _, task = heapq.heappop(heap)
            if heap is self.to_think:
                self.cpus.send(worker, task, task if task[0] == "seeds" else task[:-1], SEED_LIMIT)
            else:
                job, _ = task  # for its own sizes; waiting jobs that this build does not fit compile again
                self.cpus.send(worker, ("compile", *task), ("compile", job.work.group, job.cut, job.root, (job.work,)), self.limits["compile"])
        for worker in self.gpus.idle() if measuring else ():
            if (found := self._next(worker)) is None:
                break
            self._measure(worker, found)

    def _next(self, worker: int) -> Job | None:
        """Return the most urgent measurement; among equals, one whose tensors the worker has."""
        seeding = {g for g, count in self.seeding.items() if count}
        tops = [(heap[0][:2], w) for w, heap in self.ready.items() if not seeding or w.group not in seeding]  # hundreds, at each measurement
        if not tops:
            return None
        first, work = min(tops)
        here = self.at.get(worker)
        if here in self.ready and here.group not in seeding and self.ready[here][0][0][0] <= first[0][0]:
            work = here
        self.at[worker] = work
        job = heapq.heappop(self.ready[work])[2]
        if not self.ready[work]:
            del self.ready[work]
        return job

    def _measure(self, worker: int, job: Job) -> None:
        cell = self._cell(job)
        sent = self.sent.setdefault((worker, self.gpus.lives[worker]), set())
        artefact = None if job.key in sent else self.artefacts[job.key]
        sent.add(job.key)
        message = ("measure", job.work, self.known.funcs(job.work.group), job.key, artefact, cell.fastest() if cell else float("inf"), (job.cut, job.root))
        self.gpus.send(worker, job, message, self.limits["measure"])

    def _cell(self, job: Job) -> Cell | None:
        return self.known.cells.get((job.work, job.cut.fused, job.root)) if job.root else None

    # -- results ------------------------------------------------------------------------------------------------------

    def _computed(self, done: Finished) -> None:
        kind, *rest = done.task
        if done.untried:
            heap, task = (self.to_compile, tuple(rest)) if kind == "compile" else (self.to_think, done.task)
            heapq.heappush(heap, ((0,), next(self.order), task))
        elif kind == "seeds":
            self.seeding[rest[0].group] -= 1
            if done.failure:
                self.failed += 1
                print(f"tune: {rest[0].title()}: no schedules: {done.failure}")
            else:
                self._seeded(rest[0], done.result)
        elif kind == "propose":
            if done.failure:
                print(f"tune: {rest[0].title()}: no proposal: {done.failure}")
            self._proposed(rest[-1], done.result or Proposal([], 0.0))
        elif kind == "refit":
            self.rates = done.result or self.rates
        else:
            job, awaited = rest
            waiting = self.jobs_of.pop(awaited, [])
            if done.failure:
                for priority, other in waiting:
                    if other.work != job.work and done.failure.startswith("Refused"):
                        self._compile(priority, other)  # a whole extent may fit here
                    else:
                        self._record(other, Time(failure=done.failure))
                return
            self._add(job.key, done.result)
            for priority, other in waiting:
                heapq.heappush(self.ready.setdefault(other.work, []), (priority, next(self.order), other))

    def _add(self, key: tuple, new: Artefact) -> None:
        """Keep an artefact, together with builds for other problems."""
        old = self.artefacts.get(key)
        if old is not None:
            names = {e.name for e in new.entries}
            new.entries += [e for e in old.entries if e.name not in names]
            new.codes |= old.codes
        self.artefacts[key] = new
        for sent in self.sent.values():
            sent.discard(key)

    def _timed(self, done: Finished) -> None:
        job: Job = done.task
        if done.lost:
            self.at.pop(done.worker, None)
        if done.untried or FORGOTTEN in done.failure:
            for sent in self.sent.values():
                sent.discard(job.key)
            heapq.heappush(self.ready.setdefault(job.work, []), ((0,), next(self.order), job))
            return
        if done.failure and "no build of" in done.failure:
            again = (job.key, job.work)  # a call of these sizes would not run a build for another problem
            if again not in self.rebuilt:
                self.rebuilt.add(again)
                self._compile((0,), job, again)
                return
        self._record(job, Time(failure=done.failure) if done.failure else done.result, done.where)

    def _record(self, job: Job, found: Time, where: str = "") -> None:
        self.measured += 1
        self.failed += bool(found.failure)
        self.journal.put(job.work.text(), job.plan.text() if job.root else job.cut.text(), found, where)
        cell = self._cell(job)
        if cell is not None:
            cell.waiting.discard(job.plan)
            cell.times[job.plan] = found
            if not cell.waiting and self.thinking:
                self._advance(cell)
        if self.thinking and self.measured >= self.fit_at:
            self.fit_at = REFIT * self.measured
            self._think((-1,), ("refit", self._fastest(), None))

    def _fastest(self) -> list[tuple[TuningProblem, str, str, float, float]]:
        """Return the fastest candidates of every cell, for a fit of the rates."""
        found = []
        for c in self.known.cells.values():
            cut, best = self.known.cuts[c.work.group][c.fused], c.fastest()
            for plan in c.best(FITTED):
                found.append((c.work, with_aligned_rows(cut.with_plan(plan), c.work).schedule(self.known.outputs(c.work.group)), c.root, c.times[plan].score, best))
        return found

    # -- what to try ----------------------------------------------------------------------------------------------------

    def _seeded(self, work: TuningProblem, seeds: Seeds) -> None:
        """Request the default schedule's candidates and those of earlier rows first, then the families' best estimates."""
        self.earlier.illegal.update(seeds.illegal)
        for cell in self.known.seeded(work, seeds):
            starts = [*([seeds.cuts[cell.fused]] if cell.fused in seeds.cuts else []), *(c for c in (seeds.default, *seeds.earlier) if c.fused == cell.fused)]
            first = list(dict.fromkeys(p for c in starts for p in c.plans if p.root == cell.root))
            ranked = {p: c for p, c in seeds.plans.items() if (p.fused, p.root) == (cell.fused, cell.root) and c is not None and p not in first}
            rest = sorted(ranked, key=ranked.__getitem__)
            count = 0 if self.known.follows(work.group) else FIRST if not cell.times else ROUND
            level = 1 if self.known.follows(work.group) else 0
            self._request(cell, first, (level,))
            self._request(cell, rest[:count], (level + 0.5,))  # a short budget serves every size first
            cell.seeds = [*first, *rest]
            if not cell.waiting:
                self._advance(cell)

    def _request(self, cell: Cell, plans: list[KernelCandidate], priority: tuple) -> None:
        for plan in plans:
            if plan in cell.times or plan in cell.waiting:
                continue
            cell.waiting.add(plan)
            whole = self.known.cuts[cell.work.group][cell.fused].with_plan(plan)
            job = Job(cell.work, with_aligned_rows(whole, cell.work), cell.root)
            if job.key in self.artefacts:
                heapq.heappush(self.ready.setdefault(job.work, []), (priority, next(self.order), job))
            else:
                self._compile(priority, job)

    def _compile(self, priority: tuple, job: Job, awaited: tuple = ()) -> None:
        """Compile once for all jobs that wait for a candidate, or for those that wait for ``awaited``."""
        waiting = self.jobs_of.setdefault(awaited or job.key, [])
        waiting.append((priority, job))
        if len(waiting) == 1:
            heapq.heappush(self.to_compile, (priority, next(self.order), (job, awaited or job.key)))

    def _think(self, priority: tuple, task: tuple) -> None:
        heapq.heappush(self.to_think, (priority, next(self.order), task))

    def _advance(self, cell: Cell) -> None:
        """Start the next round of a cell without running tasks."""
        if cell.over or cell.proposing or self.known.follows(cell.work.group):
            return
        cell.level += 1
        self._request(cell, self.known.suggestions(cell, SUGGESTED), (cell.level,))
        if cell.level > 1 and self.known.lagging(cell) or cell.level > HOPELESS and cell.fastest() == float("inf"):
            cell.over = not cell.waiting
            return
        cell.proposing = True
        times = {p: None if t.failure else t.score for p, t in cell.times.items()}
        tried = {*times, *cell.waiting}
        seeds = [p for p in cell.seeds if p not in tried] or cell.seeds[:1]
        cut = self.known.cuts[cell.work.group][cell.fused]
        share = len(self.cpus.members) // max(1, sum(not c.over for c in self.known.cells.values()))  # where cells are few, none of the compilers idles
        self._think((cell.level,), ("propose", cell.work, cut, cell.root, times, seeds, self.rates, cell.quiet > 0, max(ROUND, share), cell))

    def _proposed(self, cell: Cell, found: Proposal) -> None:
        """Measure a proposal, unless the model expects nothing of it and of the restarts before it."""
        cell.proposing = False
        cell.quiet = cell.quiet + 1 if cell.expects(found.gain) < GAIN else 0
        if self.rounds is not None and cell.level > self.rounds:
            cell.quiet = QUIET
        if cell.quiet < QUIET:
            self._request(cell, found.plans, (cell.level,))
        if not cell.waiting:
            cell.over = cell.quiet >= QUIET or not found.plans
            self._advance(cell)

    def reason(self) -> str:
        """Say in one line why the search ended."""
        cells = [c for c in self.known.cells.values() if not self.known.follows(c.work.group) and not (c.level > 1 and self.known.lagging(c))]
        open_ = [c for c in cells if not c.over]
        if not open_ and not self.unseeded():
            return f"the model expects no gain above {GAIN:.0%} at any size"
        hopes = sorted(min(c.gain, 1.0) for c in open_) or [1.0]
        return f"the time is up: of {len(cells)} kernels at their sizes, {len(open_)} are not done; the model still expects up to {hopes[-1]:.0%} of one, {hopes[len(hopes) // 2]:.0%} of half of them"
