"""Race whole schedules in turn at every problem: the current row's, the best one found, and the default schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..records.journal import Journal, Time
from ..records.problems import TuningProblem
from ..workers.compile_worker import Artefact
from ..workers.worker_pool import FORGOTTEN, Finished, WorkerPool
from .candidates import ScheduleCandidate
from .search import Job
from .search_state import SearchState

ROUNDS = 3


class Playoffs:
    """Races of whole schedules; results go into the journal."""

    def __init__(self, knowledge: SearchState, journal: Journal, cpus: WorkerPool, gpus: WorkerPool, artefacts: dict[tuple, Artefact], limits: dict[str, float]):
        self.known, self.journal, self.cpus, self.gpus = knowledge, journal, cpus, gpus
        self.artefacts, self.limits = artefacts, limits
        self.sent: dict[tuple[int, int], set] = {}
        self.failed: dict[tuple[tuple, TuningProblem], str] = {}  #: tiles of whole extents may fit at some sizes only
        self.raced = 0
        self.wanted: list[Job] = []
        self.waiting: dict[TuningProblem, list[Job]] = {}
        self.making: set[tuple] = set()
        self.again: set[TuningProblem] = set()
        self.look: dict[TuningProblem, None] = {}  #: problems whose entrants may all be ready now
        self.users: dict[tuple, list[TuningProblem]] = {}  #: what a problem waits for -> those problems

    def run(self, entrants: dict[TuningProblem, list[ScheduleCandidate]], until: Callable[[], bool]) -> Iterator[None]:
        """Race the entrants of each problem, compiling ahead; yields now and then."""
        races = {w: [self._job(w, c) for c in dict.fromkeys(cuts)] for w, cuts in entrants.items()}
        races = {w: jobs for w, jobs in races.items() if any((w.text(), j.cut.text()) not in self.journal.times for j in jobs)}
        self.wanted = list({job.key: job for jobs in races.values() for job in jobs if job.key not in self.artefacts}.values())[::-1]
        ready: list[tuple[TuningProblem, list]] = []
        self.waiting, self.look = dict(races), dict.fromkeys(races)
        self.users = {}
        for w, jobs in races.items():
            for job in jobs:
                self.users.setdefault(job.key, []).append(w)
        while (ready or self.waiting or self.gpus.busy()) and not until():
            for worker in self.cpus.idle():
                if not self.wanted:
                    break
                job = self.wanted.pop()
                self.making.add((job.key, job.work))
                self.cpus.send(worker, ("compile", job), ("compile", job.work.group, job.cut, job.root, (job.work,)), self.limits["compile"])
            looked, self.look = self.look, {}
            for work in looked:
                if work in self.waiting and all(self._made(j) for j in self.waiting[work]):
                    ready.append((work, self.waiting.pop(work)))
            for worker in self.gpus.idle():
                if ready:
                    self._race(worker, *ready.pop(0))
            for done in self.gpus.poll(0.05):
                self._timed(done)
            for done in self.cpus.poll(0.01):
                if done.task[0] == "compile" and isinstance(done.task[1], Job):
                    self._compiled(done.task[1], done)
            yield
        while self.gpus.busy():
            for done in self.gpus.poll(0.2):
                self._timed(done)

    def _made(self, job: Job) -> bool:
        return (job.key in self.artefacts or (job.key, job.work) in self.failed) and (job.key, job.work) not in self.making

    def _job(self, work: TuningProblem, cut: ScheduleCandidate) -> Job:
        one = Job(work, cut, cut.roots[0])
        return one if len(cut.roots) == 1 else Job(work, cut, None)

    def _compiled(self, job: Job, done: Finished) -> None:
        if done.untried:
            self.wanted.append(job)
            return
        self.making.discard((job.key, job.work))
        self.look |= dict.fromkeys(self.users.get(job.key, ()))
        if done.failure:
            if job.key not in self.artefacts:
                self.failed[job.key, job.work] = done.failure
                others = (j for jobs in self.waiting.values() for j in jobs if j.key == job.key and (j.key, j.work) not in self.failed)
                self.wanted += list(others)[:1]
            return
        new: Artefact = done.result
        if (old := self.artefacts.get(job.key)) is not None:
            new.entries += [e for e in old.entries if e.name not in {n.name for n in new.entries}]
            new.codes |= old.codes
        self.artefacts[job.key] = new
        for sent in self.sent.values():
            sent.discard(job.key)

    def _race(self, worker: int, work: TuningProblem, jobs: list[Job]) -> None:
        for job in jobs:
            if (why := self.failed.get((job.key, work))) is not None and job.key not in self.artefacts:
                self.journal.put(work.text(), job.cut.text(), Time(failure=why))
        jobs = [j for j in jobs if j.key in self.artefacts]
        if not jobs:
            return
        sent = self.sent.setdefault((worker, self.gpus.lives[worker]), set())
        entrants = tuple((("final", *j.key), None if j.key in sent else self.artefacts[j.key], (j.cut, j.root)) for j in jobs)
        sent.update(j.key for j in jobs)
        self.gpus.send(worker, (work, jobs), ("race", work, self.known.funcs(work.group), entrants, ROUNDS), self.limits["measure"] * 2)

    def _timed(self, done: Finished) -> None:
        if not isinstance(done.task, tuple):
            return  # a late measurement from the search
        work, jobs = done.task
        results = done.result or [Time(failure=done.failure)] * len(jobs)
        if done.untried or any(FORGOTTEN in found.failure for found in results):
            for sent in self.sent.values():
                sent.difference_update(j.key for j in jobs)
            self.waiting[work] = jobs
            self.look[work] = None
            return
        self.raced += 1
        unfit = [j for j, found in zip(jobs, results) if "no build of" in found.failure]
        if unfit and work not in self.again:  # compiled for other sizes: compile again, for this one too
            self.again.add(work)
            self.making.update((j.key, work) for j in unfit)
            self.wanted += unfit
            self.waiting[work] = jobs
            return
        for job, found in zip(jobs, results):
            self.journal.put(work.text(), job.cut.text(), found, done.where)
