"""Define DTError, the error for bad DT text, schedules and specs, and source positions. Format errors in one line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """The position of a token: 1-based line and column in a named source."""

    line: int
    column: int
    source: str = "<string>"

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}"


DEPTH = "about 150 levels; name parts of it as Funcs, and write long sums as rsum(e, k)"  #: of an expression


class DTError(ValueError):
    """A program, schedule or spec is refused.

    The text is one line, ``file:line:column: rule: found ...; allowed: ...``. Unknown parts are omitted.
    """

    def __init__(self, rule: str, *, found: str | None = None, allowed: str | None = None, at: Position | None = None):
        self.rule, self.found, self.allowed, self.at = rule, found, allowed, at
        head = f"{at}: {rule}" if at else rule
        details = [f"found {found}"] if found else []
        details += [f"allowed: {allowed}"] if allowed else []
        super().__init__(head + (": " + "; ".join(details) if details else ""))


def message_line(error: BaseException, most: int = 200) -> str:
    """Return an error's message in one line of at most ``most`` characters."""
    return " ".join(str(error).split())[:most]


def error_line(error: BaseException, most: int = 200) -> str:
    """Return an error's kind and message in one line."""
    return f"{type(error).__name__}: {message_line(error, most)}"
