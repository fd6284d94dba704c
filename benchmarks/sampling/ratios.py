"""Summarize what was measured at random sizes: the fastest peer's time over ours, and regret."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

OURS, SLOW, REGRETTED = "dtkernels", 0.9, 1.1
NO_PEERS = (OURS, "bare-product")  #: what does less than the op is no peer


@dataclass(frozen=True)
class Ratios:
    """The fastest peer's time over ours at several sizes: below 1 the peer is faster."""

    count: int
    mean: float  #: geometric
    low: float  #: 5% of sizes are at or below it
    worst: float

    @classmethod
    def of(cls, ratios: Iterable[float]) -> Ratios:
        """Summarize ratios; NaN where there are none."""
        ordered = sorted(ratios)
        if not ordered:
            return cls(0, math.nan, math.nan, math.nan)
        return cls(len(ordered), math.exp(statistics.fmean(map(math.log, ordered))), ordered[math.ceil(0.05 * len(ordered)) - 1], ordered[0])

    def __str__(self) -> str:
        return f"{self.count:4} sizes  mean {self.mean:5.2f}  5% {self.low:5.2f}  worst {self.worst:5.2f}"


def fastest_peer(us: dict[str, float]) -> str | None:
    """Return the name of the fastest peer."""
    return min((who for who in us if who not in NO_PEERS), key=us.__getitem__, default=None)


def compared(found: dict) -> dict:
    """Add the fastest peer and the ratio where both were timed."""
    peer = fastest_peer(found["us"])
    return found | {"peer": peer, "ratio": found["us"][peer] / found["us"][OURS]} if peer is not None and OURS in found["us"] else found


def title(found: dict) -> str:
    """Return the words for a size."""
    return f"{found['op']} {found['direction']} {found['shape']} ({found['stratum']})"


def is_fault(found: dict) -> bool:
    """Tell whether ours was wrong or raised."""
    return "wrong" in found or "failed" in found


def line(found: dict) -> str:
    """Format a size as it is measured: ours, all others and what was left out."""
    for kind in ("wrong", "failed", "skipped"):
        if kind in found:
            return f"{title(found)}: {'FAILED ' if kind == 'failed' else 'not measured: ' if kind == 'skipped' else ''}{found[kind]}{_schedule(found)}"
    others = ", ".join(f"{who} {us:.1f}" for who, us in found["us"].items() if who != OURS)
    said = "".join(f"; {who}: {why[:120]}" for who, why in found["notes"].items())
    unchecked = "" if found["reference"] == "float64" else f"; reference: {found['reference']}"
    regret = found.get("regret", {})
    searched = f"; regret {regret['regret']:.2f}" if "regret" in regret else f"; no regret: {regret['note']}" if regret else ""
    return f"{title(found)}: ours {found['us'].get(OURS, math.nan):.1f} us; {others}; ratio {found.get('ratio', math.nan):.2f}{searched}{unchecked}{said}"


def _schedule(found: dict) -> str:
    how = found.get("how")
    return f"; {how['by']}: {how['schedule']}" if how else ""


def slow_line(found: dict) -> str:
    """Format a size where a peer is faster: times, their shares of the limit, and how ours was chosen."""
    us, peer, limit = found["us"], found["peer"], found["limit"]
    return (f"{found['ratio']:.2f} {title(found)}: ours {us[OURS]:.1f} us, {peer} {us[peer]:.1f} us; of the limit {limit / us[OURS]:.2f} and {limit / us[peer]:.2f}"
            f"{_schedule(found)}")  # fmt: skip


def report(found: list[dict]) -> str:
    """Format the summary of each op and direction, then the sizes under 0.9, what is wrong, and the peers left out."""
    cells: dict[tuple[str, str], list[dict]] = {}
    for one in found:
        cells.setdefault((one["op"], one["direction"]), []).append(one)
    lines = []
    for (op, direction), ones in cells.items():
        faults, skipped = sum(map(is_fault, ones)), sum("skipped" in one for one in ones)
        alone = sum(not is_fault(one) and "skipped" not in one and "ratio" not in one for one in ones)
        unchecked = sum(one.get("reference") == "none" for one in ones)
        rest = {"wrong or failed": faults, "not measured": skipped, "without a peer": alone, "not checked": unchecked}
        said = "".join(f"; {count} {words}" for words, count in rest.items() if count)
        lines.append(f"{op:10} {direction:9}{Ratios.of(one['ratio'] for one in ones if 'ratio' in one)}{said}")
    slow = sorted((one for one in found if one.get("ratio", 1.0) < SLOW), key=lambda one: one["ratio"])
    lines += [f"\nunder {SLOW}:", *map(slow_line, slow)] if slow else [f"\nnone under {SLOW}"]
    lines += ["\nwrong or failed:", *map(line, filter(is_fault, found))] if any(map(is_fault, found)) else []
    return "\n".join(lines)


def regret_report(found: list[dict]) -> str:
    """Format the regret of each op and direction, and the best schedule found where it is over 1.1; "" without any."""
    from dtkernels.tuning.search.portfolio import summary

    cells: dict[tuple[str, str], list[float]] = {}
    for one in found:
        if "regret" in one.get("regret", {}):
            cells.setdefault((one["op"], one["direction"]), []).append(one["regret"]["regret"])
    if not cells:
        return ""
    lines = ["dispatched / best found:", *(f"{op:10} {direction:9}{summary(regrets)}" for (op, direction), regrets in cells.items())]
    high = sorted((one for one in found if one.get("regret", {}).get("regret", 0.0) > REGRETTED), key=lambda one: -one["regret"]["regret"])
    for one in high:
        r = one["regret"]
        lines += [f"{r['regret']:.2f} {title(one)}: {r['dispatched']:.1f} us, best {r['best']:.1f} us{_schedule(one)}", f"     best found: {r['schedule']}"]
    return "\n".join(lines)
