"""The study as one HTML file: nothing is loaded from elsewhere, light and dark, narrow and wide."""

from __future__ import annotations

from html import escape

from .drawing import Drawn
from .study import Kind, Study

STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --text: #1f2428; --faint: #6a737d; --line: #d8dde3; --one: #3465a4; --two: #c4460a; --three: #2e8540; --four: #8a5fbf; }
@media (prefers-color-scheme: dark) {
  :root { --back: #14181d; --text: #e6eaef; --faint: #97a1ad; --line: #333b45; --one: #7aa7e9; --two: #ff9257; --three: #6fcf7f; --four: #c3a2f2; } }
body { background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 62rem; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid var(--line); } h3 { font-size: 1rem; margin: 1.4rem 0 .3rem; }
code { overflow-wrap: anywhere; } p.small, td, th { font-size: .85rem; } p.small { color: var(--faint); }
.wide { overflow-x: auto; } table { border-collapse: collapse; min-width: 100%; } td, th { padding: .15rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
td:first-child, th:first-child { text-align: left; } svg { width: 100%; height: auto; max-width: 50rem; display: block; }
figure { margin: .4rem 0; min-width: 0; overflow-x: auto; }
@media (max-width: 40rem) { svg { width: 40rem; max-width: none; } .map svg { width: 100%; } } .map svg { max-width: 26rem; }
 figcaption { font-size: .8rem; color: var(--faint); } a { color: var(--one); } nav a { margin-right: .8rem; display: inline-block; }
details summary { cursor: pointer; font-size: .85rem; color: var(--faint); }
"""


def page(study: Study, general: list[Drawn], of_kind: dict[int, Drawn], maps: dict[str, Drawn], command: str) -> str:
    """The whole page."""
    by = study.by
    ops = list(dict.fromkeys(k.group.op for k in study.kinds))
    sizes = [s for k in study.kinds for s in k.sizes]
    parts = [f"<h1>Schedules on one {escape(str(by.get('gpu', 'GPU')))}</h1>"]
    parts += [f"<p>{sum(s.schedules for s in sizes):,} schedules at {len(sizes)} sizes of {len(study.kinds)} kinds of calls: every one that was tried, how it compares with the best and with "
              "other implementations, and what a call runs. A schedule of several kernels is the sum of its kernels' times.</p>"]  # fmt: skip
    parts += [f"<p class='small'>{escape(', '.join(f'{k} {v}' for k, v in by.items() if k not in ('gpu', 'command')))}. Measured by <code>python {escape(str(by.get('command', '')))}</code>; "
              f"this page by <code>{escape(command)}</code>, from the stored measurements alone. {_peers_of(study)}</p>"]  # fmt: skip
    parts += ["<nav>" + "".join(f"<a href='#{op}'>{op}</a>" for op in ops) + "</nav>"]
    parts += ["<h2>All ops</h2>", _regrets(study), *(_figure(d) for d in general)]
    for op in ops:
        parts += [
            f"<h2 id='{op}'>{op}</h2>",
            _figure(
                maps[op],
                "filled: held out of the choice; green: regret up to 1.05, blue: 1.1, orange: above; grey: the formula, or not measured",
            )
            if op in maps
            else "",
        ]
        parts += [_kind(k, of_kind[i]) for i, k in enumerate(study.kinds) if k.group.op == op]
    gpu = escape(str(by.get("gpu", "a GPU")))
    head = f"<meta charset='utf-8'><meta name='viewport' content='width=device-width, initial-scale=1'><title>dtkernels: schedules on {gpu}</title><style>{STYLE}</style>"
    return f"<!doctype html>\n<html lang='en'><head>{head}</head><body>\n" + "\n".join(parts) + "\n</body></html>\n"


def _peers_of(study: Study) -> str:
    if not study.benches:
        return "No peers were given; competitive means within 5% of the best schedule."
    commands = ", ".join(f"<code>python {escape(b['command'])}</code>" for b in study.benches)
    return f"Peers: {commands}. Competitive means within 5% of the best peer, where one was timed at that size, else of the best schedule."


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
    head = ["regret of what a call runs", "chosen for", "median", "95%", "worst", "held out", "median", "95%", "worst"]
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
    head = ["size", "schedules", "competitive", "share", "best us", "median us", "a call us", "regret", "best peer us", "TB/s", "TFLOP/s"]
    return f"<h3>{escape(kind.title())}</h3>{_figure(drawn)}<details><summary>figures</summary>{_table(head, rows)}</details>"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["<tr>" + "".join(f"<th>{escape(h)}</th>" for h in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows]
    return f"<div class='wide'><table>{''.join(lines)}</table></div>"
