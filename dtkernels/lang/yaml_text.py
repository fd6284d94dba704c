"""Read YAML into plain lists and mappings; report faults in one line with their position."""

from __future__ import annotations

import bisect
import re
from pathlib import Path

import yaml

from .errors import DTError, message_line
from .lexer import Places


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # libyaml's loader where present: the same, several times faster
    """Refuse duplicate keys."""

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value]
        again = next((key for i, (key, _) in enumerate(node.value) if key.value in keys[:i]), None)
        if again is not None:
            raise yaml.constructor.ConstructorError(None, None, f"the key {again.value!r} again", again.start_mark)
        return super().construct_mapping(node, deep)


def read_text(path: str | Path, what: str) -> str:
    """Read a text file; ``what`` describes it in errors. Raises DTError where it is not UTF-8, and OSError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DTError(f"{path}: {what} is UTF-8 text", found=f"byte {error.object[error.start]:#x} at offset {error.start}") from None


class Located:
    """Map texts inside a YAML file to their positions in the file."""

    def __init__(self, text: str, root: yaml.Node | None):
        self.text, self.root = text, root
        self.starts = [0, *(m.end() for m in re.finditer("\r\n|[\n\r\x85\u2028\u2029]", text))]

    def places(self, *path: str | int) -> Places:
        """Map offsets in the text at ``path`` to lines and columns of the file.

        Characters of the text are located in the file one by one, whatever the style of the scalar. Text written with escapes is placed at the
        start of its scalar.
        """
        node = self.root
        for key in path:
            node = node.value[key] if isinstance(key, int) else next(value for name, value in node.value if name.value == key)  # type: ignore[union-attr]
        first = at = self.starts[node.start_mark.line] + node.start_mark.column  # type: ignore[union-attr]
        if node.style in ("|", ">"):  # type: ignore[union-attr]
            at = self.starts[bisect.bisect_right(self.starts, at)]  # the header may hold a comment
        elif node.style:  # type: ignore[union-attr]
            at += 1
        offsets = []
        for character in node.value:  # type: ignore[union-attr]
            while not character.isspace() and at < len(self.text) and self.text[at].isspace():
                at += 1
            offsets.append(at)
            if not character.isspace():
                if self.text[at : at + 1] != character:
                    return lambda offset: self._place(first)
                at += 1
        offsets.append(at)
        return lambda offset: self._place(offsets[min(offset, len(offsets) - 1)])

    def _place(self, at: int) -> tuple[int, int]:
        line = bisect.bisect_right(self.starts, at)
        return line, at - self.starts[line - 1] + 1


def read_yaml(text: str, source: str) -> object:
    """Read the data in ``text``. Raises DTError."""
    return read_located(text, source)[0]


def read_located(text: str, source: str) -> tuple[object, Located]:
    """Read the data in ``text``, with the positions of its texts. Raises DTError."""
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            return (None if root is None else loader.construct_document(root)), Located(text, root)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        raise DTError(f"{where}: not YAML", found=" ".join(str(getattr(error, "problem", None) or error).split())) from None
    except RecursionError:
        raise DTError(f"{source}: not YAML that is read here", found="lists in lists without end") from None
    except (ValueError, TypeError) as error:  # for example an impossible date
        raise DTError(f"{source}: not YAML", found=message_line(error)) from None
