"""Write the study as one self-contained HTML file: first the table of calls, then the pictures. Light and dark, narrow and wide."""

from __future__ import annotations

from html import escape
from pathlib import Path

from .comparison import FAR, SAME, Comparison, comparisons, summary
from .drawing import Drawn
from .study import Kind, Study

HERE = Path(__file__).parent
NONE = "\N{EM DASH}"  #: for cells that were not measured
SIGNS = {"faster": "\N{BLACK UP-POINTING TRIANGLE}", "same": "=", "slower": "\N{BLACK DOWN-POINTING TRIANGLE}"}
HELD_OUT = "Held out: measured, but kept from the choice of schedules, to see how the choice does at sizes it was not made for."
REGRET = (
    "Regret is the time of the schedule that a call runs, divided by that of the fastest schedule measured at the same size: "
    "1.00 means that the call runs the fastest one known, 1.10 that it takes 10% longer."
)
COLUMNS = [("op", ""), ("direction", ""), ("dtype", ""), ("size", ""), ("ours, \N{MICRO SIGN}s", "number"), ("best peer, \N{MICRO SIGN}s", "number"), ("who", ""),
           ("ratio, peer / ours", "number"), ("share of limit, %", "number"), ("measured by", "")]  # fmt: skip


def page(study: Study, general: list[Drawn], of_kind: dict[int, Drawn], maps: dict[str, Drawn], command: str) -> str:
    """Return the whole page."""
    gpu = escape(str(study.by.get("gpu", "a GPU")))
    ops = list(dict.fromkeys(k.group.op for k in study.kinds))
    parts = [f"<h1>Is dtkernels faster for your shape? {gpu}</h1>", *_calls(comparisons(study), str(study.by.get('gpu', ''))), _provenance(study, command)]
    parts += ["<h2>Pictures of all schedules</h2>", _about_schedules(study), "<nav>" + "".join(f"<a href='#{op}'>{op}</a>" for op in ops) + "</nav>"]
    parts += [f"<h3>Regret</h3><p>{REGRET} {HELD_OUT}</p>", _regrets(study), *(_figure(d) for d in general)]
    for op in ops:
        caption = "Each size measured. Filled: held out of the choice. Green: regret up to 1.05; blue: up to 1.10; orange: above; grey: what a call runs was not timed."
        parts += [f"<h2 id='{op}'>{op}</h2>", _figure(maps[op], caption) if op in maps else ""]
        parts += [_kind(k, of_kind[i]) for i, k in enumerate(study.kinds) if k.group.op == op]
    head = "<meta charset='utf-8'><meta name='viewport' content='width=device-width, initial-scale=1'>"
    head += f"<title>dtkernels on {gpu}: is it faster for your shape?</title><style>\n{(HERE / 'page.css').read_text()}</style>"
    script = f"<script>\n{(HERE / 'page.js').read_text()}</script>"
    return f"<!doctype html>\n<html lang='en'><head>{head}</head><body>\n" + "\n".join(parts) + f"\n{script}\n</body></html>\n"


# -- the table of calls ------------------------------------------------------------------------------------------------


def _calls(rows: list[Comparison], gpu: str) -> list[str]:
    s = summary(rows)
    key = "".join(f" <span class='key {shade}'>{words}</span>" for shade, words in (
        ("much-faster", f"\N{BLACK UP-POINTING TRIANGLE} faster, {FAR:g} or more"), ("faster", "\N{BLACK UP-POINTING TRIANGLE} faster"), ("same", f"= same, within {SAME - 1:.0%}"),
        ("slower", "\N{BLACK DOWN-POINTING TRIANGLE} slower"), ("much-slower", f"\N{BLACK DOWN-POINTING TRIANGLE} slower, {1 / FAR:.2f} or less")))  # fmt: skip
    about = f"Each row is one call{' on one ' + escape(gpu) if gpu else ''}. The ratio is the best peer's time over ours: above 1, dtkernels is faster."
    columns = (
        "<li>size: the sizes of the call's tensors; for attention, queries x keys and the columns of a head."
        "<li>ours, and best peer: the time of one call with a cold cache. A peer is another implementation of the same op, named under who."
        "<li>share of limit: the least time that the GPU allows, over ours. The limit (roofline) is the time of a torch copy of the bytes that the call must read and "
        "write, or of its matrix products at the rate of torch's largest, whichever is longer. A very small call can take less than a copy."
        "<li>measured by: the benchmark times whole calls in turn with their peers; tuning times the kernels that a call runs."
        f"<li>{NONE}: not measured."
    )
    compared = f"{s.compared} with a measured peer: geometric mean of the ratio {s.mean:.2f}, {s.faster} faster, {s.compared - s.faster - s.slower} same, {s.slower} slower"
    counted = f"{s.rows} rows; {compared if s.compared else 'none with a measured peer'}"
    select = "<label>{0} <select name='{0}'><option value=''>all</option>{1}</select></label>"
    results = "".join(f"<option value='{v}'>{t}</option>" for v, t in (("any", "with a peer"), ("faster", "faster"), ("same", "same"), ("slower", "slower"), ("none", "no peer")))
    filters = "<label class='words'>search <input id='words' type='search' placeholder='attention backward causal 128' autocomplete='off'></label>"
    filters += "".join(select.format(n, "") for n in ("op", "direction", "dtype")) + select.format("result", results)
    head = "".join(f"<th scope='col'{f' data-type={type_}' if type_ else ''}>{name}" for name, type_ in COLUMNS)
    return [f"<p>{about}</p><p class='small'>{key}</p><details><summary>What the columns mean</summary><ul class='small'>{columns}</ul></details>",
            f"<form id='filters' hidden>{filters}<button type='button'>clear</button></form>",
            f"<p><output id='shown'>{counted}</output></p>", f"<div id='calls' role='region' aria-label='Measured calls' tabindex='0'><table><thead><tr>{head}</thead><tbody>",
            *map(_call, rows), "</tbody></table></div>"]  # fmt: skip


def _call(row: Comparison) -> str:
    """Return one row; a cell without a measurement has the class ``none``."""
    ratio = f"<td class='{row.shade}'>{SIGNS[row.verdict]} {row.ratio:.2f} {row.verdict}" if row.ratio else f"<td>{NONE}"
    measured = [_us(row.ours), _us(row.peer), escape(row.who)]
    cells = [escape(row.op), row.direction, row.dtype, escape(row.size), *measured]
    share = f"{100 * row.share:.0f}" if row.share else ""
    return "<tr>" + "".join(map(_cell, cells)) + ratio + _cell(share) + _cell(row.source)


def _cell(text: str) -> str:
    return f"<td>{text}" if text else f"<td class=none>{NONE}"


def _us(time: float | None) -> str:
    return "" if time is None else f"{time:,.0f}" if time >= 1000 else f"{time:.1f}"


# -- what was measured, and how ----------------------------------------------------------------------------------------


def _provenance(study: Study, command: str) -> str:
    by = study.by
    with_ = ", ".join(f"{k} {v}" for k, v in by.items() if k not in ("gpu", "command"))
    commands = [("schedules, by the last run of the tuner", str(by.get("command", "")))] + [("peers", str(run.get("command", ""))) for run in study.benchmarks.runs]
    lines = "".join(f"<li>{what}: <code>python {escape(text)}</code>" for what, text in commands)
    lines += f"<li>this page, from the stored measurements alone: <code>{escape(command)}</code>"
    return f"<details><summary>How this was measured: versions and commands</summary><p class='small'>{escape(with_)}.</p><ul class='small'>{lines}</ul></details>"


def _about_schedules(study: Study) -> str:
    sizes = [s for k in study.kinds for s in k.sizes]
    bar = "the best peer, where one was timed at that size, else of the best schedule" if study.benchmarks.runs else "the best schedule"
    return (
        f"<p>{sum(s.schedules for s in sizes):,} schedules at {len(sizes)} sizes of {len(study.kinds)} kinds of calls: every one that was tried, beside the best one, "
        "the peers and what a call runs. A schedule of several kernels has the time of all together where that was taken, else the sum of its kernels' times. "
        f"Competitive means within 5% of {bar}. Peers' times are of the whole call, from the benchmark.</p>"
    )


def _figure(drawn: Drawn, caption: str = "") -> str:
    return f"<figure class='{'map' if drawn.name.startswith('coverage') else 'wide'}'>{drawn.svg}<figcaption>{escape(caption or drawn.title)}</figcaption></figure>"


def _regrets(study: Study) -> str:
    rows = []
    chosen, held = study.regrets(False), study.regrets(True)
    for op in sorted(chosen | held):
        cells = []
        for found in (chosen.get(op), held.get(op)):
            cells += [f"{found.count}", f"{found.median:.3f}", f"{found.most_of:.3f}", f"{found.worst:.3f}"] if found else ["", "", "", ""]
        rows.append([op, *cells])
    head = ["regret", "sizes chosen for", "median", "95%", "worst", "sizes held out", "median", "95%", "worst"]
    return _table(head, rows)


def _kind(kind: Kind, drawn: Drawn) -> str:
    rows = []
    for s in kind.sizes:
        peer = min(s.peers.items(), key=lambda p: p[1], default=None)
        middle = float(s.times[len(s.times) // 2])
        row = [s.title() + (" (held out)" if s.work.held_out else ""), f"{s.schedules:,}", f"{s.competitive:,}"]
        row += [f"{100 * s.competitive / s.schedules:.0f}%", f"{s.best:.1f}", f"{middle:.1f}", f"{s.runs:.1f}" if s.runs else ""]
        row += [f"{s.regret:.3f}" if s.regret else "", f"{peer[0]} {peer[1]:.1f}" if peer else ""]
        row += [f"{s.bytes / s.best / 1e6:.2f}", f"{s.flops / s.best / 1e6:.0f}" if s.flops else ""]
        rows.append(row)
    us = "\N{MICRO SIGN}s"
    head = ["size", "schedules", "competitive", "share", f"best, {us}", f"median, {us}", f"a call, {us}", "regret", f"best peer, {us}", "best, TB/s", "best, TFLOP/s"]
    about = "<p class='small'>Regret: the time of what a call runs over the best. Competitive: within 5% of the best peer, or of the best schedule without one.</p>"
    return f"<h3>{escape(kind.title())}</h3>{_figure(drawn)}<details><summary>figures of each size</summary>{about}{_table(head, rows)}</details>"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["<tr>" + "".join(f"<th scope='col'>{escape(h)}" for h in head)]
    lines += ["<tr>" + "".join(f"<td>{escape(c)}" for c in row) for row in rows]
    return "<div class='wide' tabindex='0'><table>" + "\n".join(lines) + "</table></div>"
