"""Compare the best time of each size with the roofline and with peers, to show where good candidates are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from ...codegen.target import Target
from ..search.search_state import SearchState
from ..workers.worker_pool import WorkerPool
from .journal import Time
from .problems import TuningProblem
from .roofline import roofline

PEERS = ("eager", "compile")  #: the op's reference in eager torch, and under torch.compile
LIMIT = 180.0  #: seconds for one peer at one size; torch.compile takes most of them


def timed_against(gpus: WorkerPool, works: list[TuningProblem], peers: tuple[str, ...], until: Callable[[], bool]) -> dict[TuningProblem, dict[str, Time]]:
    """Time the peers at every size in the workers that timed the schedules; what ``until()`` leaves no time for is left out."""
    left, found = [(w, p) for w in works for p in peers], dict[TuningProblem, dict[str, Time]]()
    while (left and not until()) or gpus.busy():
        for worker in gpus.idle() if left and not until() else ():
            if left:
                task = left.pop(0)
                gpus.send(worker, ("peer", *task), ("peer", *task), LIMIT)
        for done in gpus.poll(0.2):
            if isinstance(done.task, tuple) and done.task[0] == "peer":
                found.setdefault(done.task[1], {})[done.task[2]] = Time(failure=done.failure) if done.failure else done.result
    return found


def against_roofline(known: SearchState, to: Target, peers: Mapping[TuningProblem, Mapping[str, Time]]) -> Iterator[str]:
    """Yield a line for each size: the best time that was measured and its part of the roofline; over it, the time of the schedule that
    a call took before, and those of the peers.
    """
    for work in known.works:
        best = known.composed(work)
        times = [t for plan in (best.plans if best else ()) if (t := known.cells[work, plan.fused, plan.root].times.get(plan))]
        if best is None or not times:
            continue
        cold = sum(t.cold for t in times)
        raced = (known.journal.times.get((work.text(), c.text())) for c in (best, *known.raced.get(work, ())))
        cold = min((t.cold for t in raced if t is not None and not t.failure), default=cold)  # whole schedules, where some were timed
        before = known.journal.times.get((work.text(), (known.earlier.get(work) or [known.default[work]])[0].text()))
        others = [f"before {before.cold:.4g} us ({before.cold / cold:.2f})"] if before is not None and not before.failure else []
        others += [f"{name} {t.cold:.4g} us ({t.cold / cold:.2f})" if not t.failure else f"{name}: {t.failure}" for name, t in peers.get(work, {}).items()]
        yield f"{work.title()}: {cold:.4g} us, {roofline(work, to) / cold:.0%} of the roofline" + "".join(f"; {o}" for o in others)
