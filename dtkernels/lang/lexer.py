"""Text to tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from .errors import DTError, Position

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\f]+|\#[^\n]*)
      | (?P<newline>\n)
      | (?P<number>(\d+\.\d*|\.\d+|\d+)([eE][+-]?\d+)?)
      | (?P<name>[A-Za-z_]\w*)
      | (?P<symbol><=|>=|==|!=|[-+*/%<>=()\[\],;:.])""",
    re.VERBOSE | re.ASCII,
)


@dataclass(frozen=True)
class Token:
    kind: str  # number, name, symbol or end
    text: str
    pos: Position


def tokens(text: str, source: str) -> Iterator[Token]:
    """Every token of ``text``, then one of kind ``end``."""
    line, start, at = 1, 0, 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        pos = Position(line, at - start + 1, source)
        if match is None:
            raise DTError(
                "no DT token starts here",
                found=repr(text[at]),
                allowed="names, numbers and + - * / % < <= > >= == != = ( ) [ ] , ; : . #",
                at=pos,
            )
        at = match.end()
        if match.lastgroup == "newline":
            line, start = line + 1, at
        elif match.lastgroup != "space":
            yield Token(match.lastgroup or "", match.group(), pos)
    yield Token("end", "end of text", Position(line, at - start + 1, source))
