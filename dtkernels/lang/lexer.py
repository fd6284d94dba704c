"""Split DT text into tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .errors import DTError, Position
from .hints import symbol_hint

Places = Callable[[int], tuple[int, int]]  #: offset in a text -> 1-based line and column in the enclosing file

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\f]+|\#[^\n]*)
      | (?P<newline>\n)
      | (?P<number>(\d+\.\d*|\.\d+|\d+)([eE][+-]?\d+)?)
      | (?P<name>[A-Za-z_]\w*)
      | (?P<symbol><=|>=|==|!=|<<|>>|//|&(?!&)|\|(?!\|)|[-+*/%<>=()\[\],;:.^~])""",
    re.VERBOSE | re.ASCII,
)


@dataclass(frozen=True)
class Token:
    kind: str  # number, name, symbol or end
    text: str
    pos: Position


def tokens(text: str, source: str, places: Places | None = None) -> Iterator[Token]:
    """Yield every token of ``text``, then one of kind ``end``. ``places`` maps offsets to positions in the enclosing file."""
    line, start, at = 1, 0, 0

    def position() -> Position:
        return Position(*(places(at) if places else (line, at - start + 1)), source)

    while at < len(text):
        match, pos = _TOKEN.match(text, at), position()
        if match is None:
            allowed = symbol_hint(text[at : at + 2]) or "names, numbers and + - * / // % & | ^ ~ << >> < <= > >= == != = ( ) [ ] , ; : . #"
            raise DTError("no DT token starts here", found=repr(text[at]), allowed=allowed, at=pos)
        at = match.end()
        if match.lastgroup == "newline":
            line, start = line + 1, at
        elif match.lastgroup != "space":
            yield Token(match.lastgroup or "", match.group(), pos)
    yield Token("end", "end of text", position())
