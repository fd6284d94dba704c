"""Read the tuning section of a spec: schedule families with their search spaces, and the shapes to tune on.

    schedules:
    - schedule: |                                   DT text; {name} takes each value of the space
        softmax.block(x:{rows}); softmax.tensorize(x:{rows}, y:0); softmax.num_warps({warps});
      space: {rows: [1, 4], warps: [4, 8]}
      direction: forward                            or backward; default: forward
      dtypes: [fp16, bf16]                          default: all of the spec's
    shapes:
    - sizes: {x: [1024, 16384], y: 8192}            every combination of the values
      params: {causal: true}                        compile-time parameters other than the defaults
      dtypes: [bf16]
      directions: [forward]                         default: both
      wanted: [A]                                   inputs to differentiate; default: all differentiable ones
      held_out: true                                measured to judge the choice of schedules; no schedule is chosen for it
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .algorithm import Algorithm
from .errors import DTError
from .expr import DTYPES as TORCH_NAMES
from .lexer import Places
from .parser import parse_schedule

DIRECTIONS = ("forward", "backward")
DTYPES = tuple(TORCH_NAMES)
LARGEST = 2**40  #: largest extent of a label: more bytes than any GPU has
_HOLE = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Family:
    """Schedules of one form: a template and its search space."""

    schedule: str
    space: dict[str, tuple[int | str, ...]] = field(default_factory=dict)
    direction: str = "forward"
    dtypes: tuple[str, ...] = DTYPES

    def texts(self) -> Iterator[str]:
        """Yield the DT text of every schedule of the family."""
        for values in itertools.product(*self.space.values()):
            given = dict(zip(self.space, values))
            yield _HOLE.sub(lambda m: str(given[m.group(1)]), self.schedule)  # noqa: B023


@dataclass(frozen=True)
class Shapes:
    """Sizes of the algorithm's labels, and the kinds of calls to tune."""

    sizes: dict[str, tuple[int, ...]]
    params: dict[str, int | bool] = field(default_factory=dict)
    dtypes: tuple[str, ...] = DTYPES
    directions: tuple[str, ...] = DIRECTIONS
    wanted: tuple[str, ...] = ()
    held_out: bool = False

    def each(self) -> Iterator[dict[str, int]]:
        """Yield every combination of sizes."""
        for values in itertools.product(*self.sizes.values()):
            yield dict(zip(self.sizes, values))


def read_families(
    data: object, source: str, dtypes: tuple[str, ...] = DTYPES, places: Callable[..., Places] | None = None
) -> tuple[Family, ...]:
    """Read families from the plain data under ``schedules``. ``places``: see ``Located``. Raises DTError, one line."""
    found: list[Family] = []
    for where, item in _read_entries(data, f"{source}: schedules", ("schedule", "space", "direction", "dtypes")):
        text, space = item.get("schedule"), item.get("space") or {}
        if not isinstance(text, str) or not text.strip():
            raise DTError(f"{where}: schedule is DT text", found=repr(text))
        if not isinstance(space, dict):
            raise DTError(f"{where}: space maps names to lists of values", found=type(space).__name__)
        holes = set(_HOLE.findall(text))
        for name in {*holes} ^ {*space}:
            allowed = ", ".join(sorted(holes & {*space})) or "none"
            raise DTError(f"{where}: the names in the text are those of the space", found=repr(name), allowed=allowed)
        values = {name: _read_values(v, (int, str), f"{where}: space of {name}") for name, v in space.items()}
        direction = item.get("direction", "forward")
        if direction not in DIRECTIONS:
            raise DTError(f"{where}: direction", found=repr(direction), allowed=", ".join(DIRECTIONS))
        found.append(Family(text.strip(), values, direction, read_words(item.get("dtypes", dtypes), DTYPES, f"{where}: dtypes")))
        first, offsets = _first(found[-1], len(text) - len(text.lstrip()))
        at = places("schedules", len(found) - 1, "schedule") if places else None
        # syntax only; the rest depends on the kind of call
        parse_schedule(first, *((source, lambda o: at(offsets[o])) if at else (where,)))  # noqa: B023
    return tuple(found)


def _first(family: Family, skipped: int) -> tuple[str, list[int]]:
    """Return the first text of a family, and for each offset in it the offset in the template, after ``skipped`` characters."""
    values = {name: str(several[0]) for name, several in family.space.items() if several}
    text, last = "", 0
    offsets: list[int] = []
    for hole in (*_HOLE.finditer(family.schedule), None):
        end = hole.start() if hole else len(family.schedule)
        text += family.schedule[last:end]
        offsets += range(skipped + last, skipped + end)
        if hole:
            value, last = values.get(hole.group(1), ""), hole.end()
            text += value
            offsets += [skipped + end] * len(value)
    return text, [*offsets, skipped + len(family.schedule)]


def check_shapes(shapes: tuple[Shapes, ...], algorithm: Algorithm, source: str) -> None:
    """Raise DTError, one line, where shapes do not give each label one size, or name things that the algorithm lacks."""
    wanted = algorithm.inputs + algorithm.scalars
    params = dict(algorithm.params)
    for i, entry in enumerate(shapes):
        where = f"{source}: shapes: entry {i + 1}"
        for word, names, allowed in (("a label", entry.sizes, algorithm.labels), ("a Param", entry.params, tuple(params)), ("an input", entry.wanted, wanted)):
            for name in names:
                if name not in allowed:
                    raise DTError(f"{where}: {word} of the algorithm", found=repr(name), allowed=", ".join(allowed) or "none")
        for name, value in entry.params.items():
            if isinstance(value, bool) != isinstance(params[name], bool):
                raise DTError(f"{where}: params: {name}", found=repr(value), allowed="true or false" if isinstance(params[name], bool) else "an integer")
        for label, values in entry.sizes.items():
            if again := [n for n in values if values.count(n) > 1]:
                raise DTError(f"{where}: size of {label}", found=f"{again[0]} twice", allowed="each size once")
        _check_extents(entry, algorithm, where)


def _check_extents(entry: Shapes, algorithm: Algorithm, where: str) -> None:
    for label in algorithm.labels:
        group, constant = algorithm.tied_labels(label), algorithm.constant_extent(label)
        given = [name for name in algorithm.labels if name in group and name in entry.sizes]
        if not given and constant is None:
            raise DTError(f"{where}: sizes has each label of the algorithm", found=f"no {label}", allowed=f"{', '.join(entry.sizes)}, {label}")
        for name in given:
            other = (constant,) if constant is not None else entry.sizes[given[0]]
            if entry.sizes[name] != other or len(other) > 1 and name != given[0]:
                found = f"{name} {', '.join(map(str, entry.sizes[name]))} and {given[0] if constant is None else 'Extent'} {', '.join(map(str, other))}"
                raise DTError(f"{where}: labels of one extent have one size", found=found)


def read_shapes(data: object, source: str, dtypes: tuple[str, ...] = DTYPES) -> tuple[Shapes, ...]:
    """Read shapes from the plain data under ``shapes``. Raises DTError, one line."""
    found = []
    for where, item in _read_entries(data, f"{source}: shapes", ("sizes", "params", "dtypes", "directions", "wanted", "held_out")):
        sizes, params, held_out = item.get("sizes"), item.get("params") or {}, item.get("held_out", False)
        if not isinstance(sizes, dict) or not sizes:
            raise DTError(f"{where}: sizes maps labels to extents", found=repr(sizes))
        if not isinstance(params, dict) or not all(isinstance(v, (int, bool)) for v in params.values()):
            raise DTError(f"{where}: params maps names to numbers or truth values", found=repr(params))
        if not isinstance(held_out, bool):
            raise DTError(f"{where}: held_out is true or false", found=repr(held_out))
        for name in (*sizes, *params):
            if not isinstance(name, str):
                raise DTError(f"{where}: sizes and params have names", found=repr(name))
        extents = {label: _read_values(v, (int,), f"{where}: size of {label}") for label, v in sizes.items()}
        for label, values in extents.items():
            if not values or not all(1 <= n <= LARGEST for n in values):
                wrong = next((n for n in values if not 1 <= n <= LARGEST), "none")
                raise DTError(f"{where}: size of {label}", found=str(wrong)[:40], allowed="1 to 2^40, one or several")
        found.append(
            Shapes(
                extents,
                params,
                read_words(item.get("dtypes", dtypes), DTYPES, f"{where}: dtypes"),
                read_words(item.get("directions", DIRECTIONS), DIRECTIONS, f"{where}: directions"),
                _read_values(item.get("wanted", ()), (str,), f"{where}: wanted"),
                held_out,
            )
        )
    return tuple(found)


def _read_entries(data: object, where: str, keys: tuple[str, ...]) -> Iterator[tuple[str, dict]]:
    if data is None:
        return
    if not isinstance(data, list):
        raise DTError(f"{where} is a list", found=type(data).__name__)
    for i, item in enumerate(data):
        if not isinstance(item, dict):
            raise DTError(f"{where}: entry {i + 1} is a mapping", found=type(item).__name__, allowed=", ".join(keys))
        for key in item:
            if key not in keys:
                raise DTError(f"{where}: entry {i + 1}: unknown key", found=repr(key), allowed=", ".join(keys))
        yield f"{where}: entry {i + 1}", item


def _read_values(value: object, kinds: tuple[type, ...], where: str) -> tuple:
    values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for v in values:
        if not isinstance(v, kinds) or isinstance(v, bool):
            raise DTError(where, found=repr(v), allowed=" or ".join({int: "an integer", str: "a text"}[k] for k in kinds))
    return values


def read_words(value: object, allowed: tuple[str, ...], where: str) -> tuple[str, ...]:
    """Read a word or a list of words and check that each is in ``allowed``."""
    values = _read_values(value, (str,), where)
    for v in values:
        if v not in allowed:
            raise DTError(where, found=repr(v), allowed=", ".join(allowed))
    return values
