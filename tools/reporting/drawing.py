"""Figures, by matplotlib: one drawing gives the page's SVG, whose colours follow the page, and the PNG."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

from .study import Kind, Study  # noqa: E402

#: colours in the drawing -> the page's variables; in a PNG they are what they are
COLOURS = {
    "#1f2428": "var(--text)",
    "#6a737d": "var(--faint)",
    "#3465a4": "var(--one)",
    "#c4460a": "var(--two)",
    "#2e8540": "var(--three)",
    "#8a5fbf": "var(--four)",
}
TEXT, FAINT, ONE, TWO, THREE, FOUR = COLOURS
#: peer -> colour, line
WHOS = {"eager": (FAINT, "-"), "compile": (FOUR, "-"), "compile-max": (FOUR, ":"), "liger": (THREE, "-"), "cudnn": (TWO, "-"), "sdpa": (FAINT, "-"),
        "flex": (FOUR, "-"), "fa2": (THREE, "-")}  # fmt: skip
OTHER = (FOUR, "--")
plt.rcParams.update({
    "svg.fonttype": "none", "svg.hashsalt": "dtkernels", "font.family": "sans-serif", "font.size": 9, "text.color": TEXT, "axes.labelcolor": TEXT, "axes.edgecolor": FAINT,
    "xtick.color": TEXT, "ytick.color": TEXT, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10, "axes.titlelocation": "left",
})  # fmt: skip


class Drawn:
    """A figure as SVG text for a page with a theme, and as a PNG."""

    def __init__(self, name: str, title: str, figure):
        self.name, self.title = name, title
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
        self._png = io.BytesIO()
        figure.savefig(self._png, format="png", dpi=110, bbox_inches="tight", facecolor="white")
        plt.close(figure)
        self.svg = self._themed(out.getvalue())

    def _themed(self, text: str) -> str:
        text = text[text.index("<svg") :]
        for colour, variable in COLOURS.items():
            text = text.replace(colour, variable)
        text = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', rf'\1 role="img" aria-label="{self.title}"', text, count=1)
        text = re.sub(r'height="[\d.]+pt" ', "", re.sub(r' width="[\d.]+pt"', "", text, count=1), count=1)
        text = re.sub(r"font: ([\d.]+)px 'sans-serif'([^\"]*)\"", r'font: \1px system-ui, sans-serif\2"', text)
        names = set(re.findall(r'id="([^"]+)"', text))
        return re.sub(r'(id="|href="#|url\(#)([^")]+)', lambda m: f"{m[1]}{self.name}-{m[2]}" if m[2] in names else m[0], text)

    def write(self, folder: Path) -> None:
        (folder / f"{self.name}.png").write_bytes(self._png.getvalue())


def distribution(kind: Kind, name: str) -> Drawn:
    """Each size a row: all schedules' times over the best, those of peers and of what a call runs."""
    sizes = kind.sizes
    figure, axes = plt.subplots(figsize=(7.2, 0.55 + 0.34 * len(sizes)))
    for i, s in enumerate(sizes):
        y = len(sizes) - 1 - i
        ratios = s.times / s.best
        counts, edges = np.histogram(np.log2(np.clip(ratios, 1, 64)), bins=48, range=(0, 6))
        full = counts > 0
        height = 0.1 + 0.68 * counts[full] / max(counts.max(), 1)  # a single schedule is seen too
        axes.bar(
            2 ** edges[:-1][full], height, width=np.diff(2**edges)[full], bottom=y - 0.4, align="edge", color=ONE, alpha=0.75, linewidth=0
        )
        for who, time in s.peers.items():
            colour, line = WHOS.get(who, OTHER)
            axes.plot([min(max(time / s.best, 0.4), 64)] * 2, [y - 0.42, y + 0.42], color=colour, linestyle=line, linewidth=1.4)
        if s.runs:
            axes.plot(s.runs / s.best, y - 0.4, marker="^", markersize=5, color=TWO, clip_on=False)
    for who in dict.fromkeys(w for s in sizes for w in s.peers):
        colour, line = WHOS.get(who, OTHER)
        axes.plot([], [], color=colour, linestyle=line, label=who)
    axes.plot([], [], marker="^", linestyle="", color=TWO, label="what a call runs")
    axes.set_xscale("log", base=2)
    right = max(4.0, min(64.0, max(float(s.times[-1] / s.best) for s in sizes)))
    left = min([1.0, *(t / s.best for s in sizes for t in (*s.peers.values(), s.runs or s.best))])
    axes.set_xlim(max(0.4, 0.93 * left), right * 1.05)
    ticks = [t for t in (0.5, 1, 1.05, 1.5, 2, 4, 8, 16, 32, 64) if 0.93 * left <= t <= right * 1.05 and t != 1.05]
    axes.set_xticks(ticks, [f"{t:g}x" for t in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(sizes)), [f"{s.title()}{' (held out)' if s.work.held_out else ''}" for s in reversed(sizes)])
    axes.set_xlabel("time over that of the best schedule")
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, 1 + 0.28 / (0.3 + 0.34 * len(sizes))), ncols=6, frameon=False, fontsize=8, handlelength=1.2
    )
    return Drawn(name, f"distribution of schedule times, {kind.title()}", figure)


def roofline(study: Study) -> Drawn:
    """Best schedules of every size: bytes a second against operations a byte."""
    figure, axes = plt.subplots(figsize=(7.2, 3.6))
    ops = list(dict.fromkeys(k.group.op for k in study.kinds))
    for i, op in enumerate(ops):
        points = [
            (max(s.flops / s.bytes, 0.25), s.bytes / s.best / 1e6)
            for k in study.kinds
            if k.group.op == op and k.group.direction == "forward"
            for s in k.sizes
            if s.bytes
        ]
        if points:
            across, up = zip(*points)
            axes.scatter(
                across,
                up,
                s=12,
                color=[ONE, TWO, THREE, FOUR, TEXT, FAINT][i % 6],
                marker="os^vDP"[i // 6 % 6 if len(ops) > 6 else 0],
                label=op,
                alpha=0.8,
                linewidths=0,
            )
    if study.bandwidth:
        axes.axhline(study.bandwidth / 1e12, color=FAINT, linewidth=1, linestyle="--")
        axes.annotate(f"memory, {study.bandwidth / 1e12:.2f} TB/s", (0.26, study.bandwidth / 1e12), fontsize=8, va="bottom", color=FAINT)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("operations of matrix products a byte that must move (0.25: none)"), axes.set_ylabel("TB/s of what must move")
    axes.legend(frameon=False, fontsize=8, ncols=3)
    return Drawn("roofline", "roofline: bandwidth reached by the best schedule of each size", figure)


def regret(study: Study) -> Drawn:
    """Share of sizes below a regret, held out and not."""
    figure, axes = plt.subplots(figsize=(7.2, 2.8))
    for held_out, colour in ((True, TWO), (False, ONE)):
        found = sorted(s.regret for k in study.kinds for s in k.sizes if s.regret and s.work.held_out == held_out)
        if found:
            axes.step(
                found,
                np.arange(1, len(found) + 1) / len(found) * 100,
                where="post",
                color=colour,
                label=f"{'held out' if held_out else 'chosen for'}: {len(found)} sizes",
            )
    axes.set_xlim(0.995, 1.3)
    axes.axvline(1.1, color=FAINT, linewidth=0.8, linestyle="--")
    axes.set_xlabel("regret: time of what a call runs over that of the best schedule found"), axes.set_ylabel("% of sizes below")
    axes.legend(frameon=False, fontsize=8)
    return Drawn("regret", "regret of the dispatched schedules", figure)


def coverage(kinds: list[Kind], op: str) -> Drawn | None:
    """Sizes in the plane of the two labels that vary most, coloured by regret; those that were chosen for as rings."""
    spots = [s for k in kinds for s in k.sizes]
    values: dict[str, set[int]] = {}
    for s in spots:
        for label, n in s.work.sizes:
            values.setdefault(label, set()).add(n)
    labels = sorted((label for label in values if len(values[label]) > 1), key=lambda label: -len(values[label]))[:2]
    if not labels:
        return None
    figure, axes = plt.subplots(figsize=(4.2, 3.0))
    for s in spots:
        e = s.work.extents
        x, y = math.log2(e[labels[0]]), math.log2(e[labels[1]]) if len(labels) > 1 else 0
        colour = FAINT if s.regret is None else THREE if s.regret <= 1.05 else ONE if s.regret <= 1.1 else TWO
        axes.plot(
            x,
            y,
            marker="o",
            markersize=7,
            markerfacecolor=colour if s.work.held_out else "none",
            markeredgecolor=colour,
            markeredgewidth=1.4,
            linestyle="",
        )
    axes.set_xlabel(f"log2 of {labels[0]}")
    axes.set_ylabel(f"log2 of {labels[1]}" if len(labels) > 1 else "")
    if len(labels) == 1:
        axes.set_yticks([])
    return Drawn(f"coverage-{op}", f"sizes of {op} that were measured", figure)
