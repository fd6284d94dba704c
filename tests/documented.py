"""The code blocks of README and docs, run. What stands in a block's info string says what is done with it:

dt [FILE]     parsed and emitted; a block `nest`, `triton`, `algebra` or `error` after it is what comes out
python        run, in one namespace for each page; a block `text` after it is what it prints
yaml FILE     written to FILE for the blocks after it
console       `$ command` lines and what they print; `...` stands for any lines
sh            commands to type: make targets, tools with their options, pip install; looked at, not run

python tests/documented.py --update      writes nest, triton, algebra, error, text and console blocks anew
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RESULTS = ("nest", "triton", "algebra", "error", "text")
KINDS = ("dt", "python", "yaml", "console", "sh", *RESULTS)
_FENCE = re.compile(r"^```(\w*)([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass
class Block:
    """One fenced block: ``start`` and ``end`` are where its content lies in the page."""

    page: Path
    line: int
    kind: str
    rest: str
    text: str
    start: int
    end: int

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text()
    found = []
    for m in _FENCE.finditer(text):
        found.append(Block(page, text.count("\n", 0, m.start()) + 1, m[1], m[2].strip(), m[3], m.start(3), m.end(3)))
    return found


def anchors(page: Path) -> set[str]:
    """The names by which links reach the headings of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


class Mismatch(AssertionError):
    """A block that does not say what is."""


class Reader:
    """Runs the blocks of one page in ``folder``; with ``update`` notes new contents in place of comparing."""

    def __init__(self, folder: Path, update: bool = False):
        self.folder, self.update = folder, update
        self.names: dict[str, object] = {"__name__": "documented"}
        self.changes: list[tuple[Block, str]] = []

    def read(self, page: Path) -> int:
        """Run every block of ``page``; how many. Variables of the environment that the page sets end with it."""
        todo, at, before = blocks(page), 0, dict(os.environ)
        try:
            while at < len(todo):
                block = todo[at]
                following = todo[at + 1] if at + 1 < len(todo) and todo[at + 1].kind in RESULTS else None
                at += 1 + (following is not None)
                with _within(self.folder):
                    self._one(block, following)
        finally:
            os.environ.clear()
            os.environ.update(before)
        return len(todo)

    def _one(self, block: Block, following: Block | None) -> None:
        if block.kind not in KINDS or block.kind in RESULTS:
            raise Mismatch(f"{block}: a block is one of {', '.join(KINDS)}, results after what makes them; found {block.kind!r}")
        if block.rest and block.kind in ("dt", "yaml"):
            Path(block.rest).write_text(block.text)
        if block.kind == "console":
            return self._compare(block, _console(block))
        if block.kind == "sh":
            return _look_at(block)
        if block.kind == "yaml":
            return _check_yaml(block)
        made = _python(block, self.names) if block.kind == "python" else _dt(block, following)
        if following is not None:
            return self._compare(following, made)
        if made.strip() and block.kind == "python":
            raise Mismatch(f"{block}: prints what no text block shows: {made[:200]!r}")

    def _compare(self, block: Block, made: str) -> None:
        made = made.rstrip("\n") + "\n"
        if self.update:
            if not _agrees(block.text, made):
                self.changes.append((block, _renewed(block.text, made)))
        elif not _agrees(block.text, made):
            raise Mismatch(
                f"{block}: what is shown is not what comes out; python tests/documented.py --update writes it anew\n--- shown\n{block.text}\n--- now\n{made}"
            )


@contextlib.contextmanager
def _within(folder: Path):
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _agrees(shown: str, made: str) -> bool:
    """Whether ``made`` is what is shown; a line `...` stands for any lines."""
    pattern = "".join(r"(?:.*\n)*?" if line.strip() == "..." else re.escape(line.rstrip()) + r"[ ]*\n" for line in shown.splitlines())
    return re.fullmatch(pattern, made) is not None


def _renewed(shown: str, made: str) -> str:
    """``made``, shortened by `...` where ``shown`` is, if the lines between which it is shortened are still there."""
    new, found, lines = made.splitlines(), [], shown.splitlines()
    if "..." not in lines:
        return made
    for part in [p.strip("\n").splitlines() for p in re.split(r"^\.\.\.$", "\n".join(lines), flags=re.MULTILINE)]:
        found += ["..."] if found or lines[0] == "..." else []
        if part:
            if part[0] not in new or part[-1] not in new[new.index(part[0]) :]:
                return made
            start = new.index(part[0])
            end = new.index(part[-1], start) + 1
            found, new = found + new[start:end], new[end:]
    return "\n".join(found) + "\n"


def _python(block: Block, names: dict[str, object]) -> str:
    out = io.StringIO()
    source = "\n" * block.line + block.text  # so that a traceback names the page's line
    with contextlib.redirect_stdout(out):
        exec(compile(source, str(block.page), "exec"), names)  # noqa: S102 (our own pages)
    return out.getvalue()


def _dt(block: Block, following: Block | None) -> str:
    from dtkernels.algebra.pipeline import prepare
    from dtkernels.codegen.emit.module import emit
    from dtkernels.codegen.ir.nest import nest_text
    from dtkernels.codegen.pipeline import check_unused_statements, lower
    from dtkernels.lang import DTError, parse
    from dtkernels.lang.checks import check_given

    wanted = following.kind if following is not None else ""
    try:
        given = parse(block.text, block.rest or "program.dt")
        check_given(given)
        program = prepare(given)
        check_unused_statements(program)
        source = emit(program)
    except DTError as error:
        if wanted == "error":
            return str(error)
        raise Mismatch(f"{block}: {error}") from None
    if wanted == "error":
        raise Mismatch(f"{block}: is not refused")
    if wanted == "nest":
        return "\n".join(nest_text(k) for k in lower(program))
    if wanted == "algebra":
        return "\n".join(map(str, program.algorithm.definitions))
    parts = ("@triton.jit" + part.split("\n\n\n")[0].rstrip() + "\n" for part in source.split("@triton.jit")[1:])
    return "\n".join(part for part in parts if re.match(r"@triton\.jit\ndef \w+_kernel\(", part))


def _console(block: Block) -> str:
    """The block with what its commands print now."""
    lines = []
    for line in block.text.splitlines():
        if not line.startswith("$ "):
            continue
        command = shlex.split(line[2:])
        if command[:3] != ["python", "-m", "dtkernels"]:
            raise Mismatch(f"{block}: a console block runs python -m dtkernels; found {line!r}")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"}
        environment.pop("TRITON_INTERPRET", None)
        done = subprocess.run([sys.executable, *command[1:]], capture_output=True, text=True, env=environment, timeout=120)
        lines += [line, *(done.stdout + done.stderr).rstrip("\n").splitlines()]
    return "\n".join(lines)


def _look_at(block: Block) -> None:
    """That what a person is told to type is there."""
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for line in filter(None, (raw.split("#")[0].strip() for raw in block.text.splitlines())):
        words = shlex.split(line)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if words[0] == "make" and not set(w for w in words[1:] if "=" not in w) <= set(targets):
            raise Mismatch(f"{block}: no such make target: {line}")
        if words[0] == "python" and words[1].endswith(".py"):
            _check_options(block, words[1], words[2:])
        elif words[0] not in ("make", "pip", "git", "cd", "python", "python3", "pytest") and words != [".", ".venv/bin/activate"]:
            raise Mismatch(f"{block}: a command that nothing looks at: {line}")


def _check_options(block: Block, script: str, words: list[str]) -> None:
    path = ROOT / script
    if not path.is_file():
        raise Mismatch(f"{block}: no such file: {script}")
    inside = ROOT / "dtkernels" / "tuning" / path.name  # what a tool's file only starts
    source = path.read_text() + (inside.read_text() if inside.is_file() else "")
    for option in (w for w in words if w.startswith("--")):
        if f'"{option}"' not in source:
            raise Mismatch(f"{block}: {script} has no option {option}")


def _check_yaml(block: Block) -> None:
    import yaml

    if isinstance(data := yaml.safe_load(block.text), dict) and "algorithm" in data:
        from dtkernels.lang.spec import parse_spec

        parse_spec(block.text, block.rest or str(block))


def update(page: Path, folder: Path) -> int:
    """Write the results of a page anew; how many changed."""
    reader = Reader(folder, update=True)
    reader.read(page)
    text = page.read_text()
    for block, made in sorted(reader.changes, key=lambda c: -c[0].start):
        text = text[: block.start] + made + text[block.end :]
    page.write_text(text)
    return len(reader.changes)


if __name__ == "__main__":
    import tempfile

    sys.path.insert(0, str(ROOT))
    if sys.argv[1:2] != ["--update"]:
        sys.exit(__doc__)
    for changed in [Path(p).resolve() for p in sys.argv[2:]] or PAGES:
        os.environ["TRITON_INTERPRET"] = "1"
        with tempfile.TemporaryDirectory() as name:
            print(f"{changed.relative_to(ROOT)}: {update(changed, Path(name))} blocks written")
