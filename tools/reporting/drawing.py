"""Draw pictures with matplotlib: an SVG whose colours follow the page's theme, and a PNG of the same drawing."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from matplotlib.patches import PathPatch  # noqa: E402
from matplotlib.path import Path as Outline  # noqa: E402
from PIL import Image  # noqa: E402

from .study import Kind, Size, Study  # noqa: E402

#: colours in the drawing -> the page's variables; a PNG keeps them as they are
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
    """A picture as SVG text for a page with a theme, and as a PNG."""

    def __init__(self, name: str, title: str, figure):
        self.name, self.title = name, title
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=110, bbox_inches="tight", facecolor="white")
        plt.close(figure)
        self._png = Image.open(png).convert("RGB").quantize(64)  # a third of the bytes, visually the same
        self.svg = self._themed(_compact(out.getvalue()))

    def _themed(self, text: str) -> str:
        for colour, variable in COLOURS.items():
            text = text.replace(colour, variable)
        text = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', rf'\1 role="img" aria-label="{self.title}"', text, count=1)
        names = set(re.findall(r'id="([^"]+)"', text))
        return re.sub(r'(id="|href="#|url\(#)([^")]+)', lambda m: f"{m[1]}{self.name}-{m[2]}" if m[2] in names else m[0], text)

    def write(self, folder: Path) -> None:
        self._png.save(folder / f"{self.name}.png", optimize=True)


def _compact(text: str) -> str:
    """Strip invisible parts of matplotlib's SVG: comments, metadata, unused names, digits below a tenth of a point."""
    text = text[text.index("<svg") :].replace("xlink:href", "href").replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "")
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
    text = re.sub(r' id="([^"]+)"', lambda m: m[0] if m[1] in used else "", text)
    text = re.sub(r"-?\d+\.\d{2,}", lambda m: f"{float(m[0]):.1f}".removesuffix(".0"), text)
    text = re.sub(r"(?<= d=\")[^\"]+", _short_path, text)
    text = re.sub(r"; (stroke-(?:linejoin|linecap|miterlimit): \w+|fill-opacity: 1)(?=[;\"])", "", text)
    text = re.sub(r"font-family: [^;\"]+; |font-family: [^;\"]+| transform=\"rotate\(-0[^\"]*\"|<style.*?</style>", "", text, flags=re.DOTALL)  # the page's style defines the fonts
    text = re.sub(r"(font: [\d.]+px) [^;\"]+", r"\1 system-ui, sans-serif", text)
    return re.sub(r"\s*\n\s*", "\n", re.sub(r"<defs>\s*</defs>", "", _without_bare_groups(text)))


def _without_bare_groups(text: str) -> str:
    """Drop ``<g>`` and its ``</g>`` if it has no attributes."""
    kept: list[bool] = []

    def tag(found: re.Match) -> str:
        if found[0] != "</g>":
            kept.append(found[0] != "<g>")
            return found[0] if kept[-1] else ""
        return found[0] if kept.pop() else ""

    return re.sub(r"</?g\b[^>]*>", tag, text)


def _short_path(path: re.Match) -> str:
    """Write axis-parallel lines as ``H`` and ``V``."""
    found: list[str] = []
    start = here = ("", "")
    for command, arguments in re.findall(r"([A-Za-z])([^A-Za-z]*)", path[0]):
        points = arguments.split()
        if command == "L" and len(points) == 2:
            x, y = points
            found.append(f"V{y}" if x == here[0] else f"H{x}" if y == here[1] else f"L{x} {y}")
        else:
            found.append(command + " ".join(points))
        here = (points[-2], points[-1]) if len(points) > 1 else start
        start = here if command == "M" else start
    return "".join(found)


def _bars(size: Size, y: float) -> Outline:
    """Draw a histogram of the schedules' times over the best, on the line ``y``: one outline for all bars."""
    counts, edges = np.histogram(np.log2(np.clip(size.times / size.best, 1, 64)), bins=48, range=(0, 6))
    bottom, corners = y - 0.4, []
    for count, left, right in zip(counts, 2 ** edges[:-1], 2 ** edges[1:]):
        if count:
            top = bottom + 0.1 + 0.68 * count / counts.max()  # makes a single schedule visible too
            corners += [(left, bottom), (left, top), (right, top), (right, bottom), (left, bottom)]  # the last is not drawn
    codes = [Outline.MOVETO, *[Outline.LINETO] * 3, Outline.CLOSEPOLY] * (len(corners) // 5)
    return Outline(corners, codes)


def distribution(kind: Kind, name: str) -> Drawn:
    """Draw a row for each size: all schedules' times over the best, those of peers, and that of the dispatched schedule."""
    sizes = kind.sizes
    figure, axes = plt.subplots(figsize=(7.2, 0.55 + 0.34 * len(sizes)))
    tops = np.arange(len(sizes))[::-1]
    axes.add_patch(PathPatch(Outline.make_compound_path(*(_bars(s, y) for s, y in zip(sizes, tops))), color=ONE, alpha=0.75, linewidth=0))
    for who in dict.fromkeys(w for s in sizes for w in s.peers):
        colour, line = WHOS.get(who, OTHER)
        marks = [(min(max(s.peers[who] / s.best, 0.4), 64), y) for s, y in zip(sizes, tops) if who in s.peers]
        across, up = np.array([((x, y - 0.42), (x, y + 0.42), (np.nan, np.nan)) for x, y in marks]).reshape(-1, 2).T
        axes.plot(across, up, color=colour, linestyle=line, linewidth=1.4, label=who)
    calls = [(s.runs / s.best, y - 0.4) for s, y in zip(sizes, tops) if s.runs]
    axes.plot(*(zip(*calls) if calls else ([], [])), marker="^", markersize=5, linestyle="", color=TWO, clip_on=False, label="what a call runs")
    axes.set_ylim(-0.7, len(sizes) - 0.3)
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
    """Draw the best schedules of every size: bytes per second against operations per byte."""
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
                clip_on=False,
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
    """Draw the share of sizes below a regret, held out and not."""
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
    axes.set_xlabel("regret: time of what a call runs over that of the best schedule measured"), axes.set_ylabel("% of sizes below")
    axes.legend(frameon=False, fontsize=8)
    return Drawn("regret", "regret of the dispatched schedules", figure)


def coverage(kinds: list[Kind], op: str) -> Drawn | None:
    """Draw sizes in the plane of the two labels that vary most, coloured by regret; sizes used for the choice are rings."""
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
            clip_on=False,
        )
    axes.set_xlabel(f"log2 of {labels[0]}")
    axes.set_ylabel(f"log2 of {labels[1]}" if len(labels) > 1 else "")
    if len(labels) == 1:
        axes.set_yticks([])
    return Drawn(f"coverage-{op}", f"sizes of {op} that were measured", figure)
