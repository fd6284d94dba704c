"""YAML as people write it, into plain lists and mappings; what is wrong with it is one line that says where."""

from __future__ import annotations

from pathlib import Path

import yaml

from .errors import DTError


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # the same, several times faster with libyaml
    """Refuses a key that is given twice."""

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value]
        again = next((key for i, (key, _) in enumerate(node.value) if key.value in keys[:i]), None)
        if again is not None:
            raise yaml.constructor.ConstructorError(None, None, f"the key {again.value!r} again", again.start_mark)
        return super().construct_mapping(node, deep)


def read_text(path: str | Path, what: str) -> str:
    """The text of a file that is ``what``. Raises DTError where it is no UTF-8, and OSError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DTError(f"{path}: {what} is UTF-8 text", found=f"byte {error.object[error.start]:#x} at offset {error.start}") from None


def read_yaml(text: str, source: str) -> object:
    """The data written in ``text``. Raises DTError."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        raise DTError(f"{where}: not YAML", found=" ".join(str(getattr(error, "problem", None) or error).split())) from None
    except RecursionError:
        raise DTError(f"{source}: not YAML that is read here", found="lists in lists without end") from None
    except (ValueError, TypeError) as error:  # a date that there is not, say
        raise DTError(f"{source}: not YAML", found=" ".join(str(error).split())[:200]) from None
