"""What a spec says of tuning: families of schedules with their spaces, and the shapes to tune on.

    schedules:
    - schedule: |                                   DT text; {name} takes each value of the space
        softmax.block(x:{rows}); softmax.tensorize(x:{rows}, y:0); softmax.num_warps({warps});
      space: {rows: [1, 4], warps: [4, 8]}
      direction: forward                            or backward; forward if not said
      dtypes: [fp16, bf16]                          all of the spec's if not said
    shapes:
    - sizes: {x: [1024, 16384], y: 8192}            every combination of the values
      params: {causal: true}                        compile-time parameters other than the defaults
      dtypes: [bf16]
      directions: [forward]                         both if not said
      wanted: [A]                                   inputs to differentiate; all that can be if not said
      held_out: true                                tuned to judge the choice of schedules, and not chosen for
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from .errors import DTError
from .parser import parse_schedule

DIRECTIONS = ("forward", "backward")
DTYPES = ("fp32", "fp16", "bf16")
LARGEST = 2**40  #: extent of a label: more bytes than any GPU has
_HOLE = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Family:
    """Schedules of one form."""

    schedule: str
    space: dict[str, tuple[int | str, ...]] = field(default_factory=dict)
    direction: str = "forward"
    dtypes: tuple[str, ...] = DTYPES

    def texts(self) -> Iterator[str]:
        """The DT text of every schedule of the family."""
        for values in itertools.product(*self.space.values()):
            given = dict(zip(self.space, values))
            yield _HOLE.sub(lambda m: str(given[m.group(1)]), self.schedule)  # noqa: B023


@dataclass(frozen=True)
class Shapes:
    """Sizes of the labels of the algorithm, and the kind of call."""

    sizes: dict[str, tuple[int, ...]]
    params: dict[str, int | bool] = field(default_factory=dict)
    dtypes: tuple[str, ...] = DTYPES
    directions: tuple[str, ...] = DIRECTIONS
    wanted: tuple[str, ...] = ()
    held_out: bool = False

    def each(self) -> Iterator[dict[str, int]]:
        """Every combination of sizes."""
        for values in itertools.product(*self.sizes.values()):
            yield dict(zip(self.sizes, values))


def read_families(data: object, source: str, dtypes: tuple[str, ...] = DTYPES) -> tuple[Family, ...]:
    """Families from the plain data under ``schedules``. Raises DTError, one line."""
    found = []
    for where, item in _items(data, f"{source}: schedules", ("schedule", "space", "direction", "dtypes")):
        text, space = item.get("schedule"), item.get("space") or {}
        if not isinstance(text, str) or not text.strip():
            raise DTError(f"{where}: schedule is DT text", found=repr(text))
        if not isinstance(space, dict):
            raise DTError(f"{where}: space maps names to lists of values", found=type(space).__name__)
        holes = set(_HOLE.findall(text))
        for name in {*holes} ^ {*space}:
            allowed = ", ".join(sorted(holes & {*space})) or "none"
            raise DTError(f"{where}: the names in the text are those of the space", found=repr(name), allowed=allowed)
        values = {name: _several(v, (int, str), f"{where}: space of {name}") for name, v in space.items()}
        direction = item.get("direction", "forward")
        if direction not in DIRECTIONS:
            raise DTError(f"{where}: direction", found=repr(direction), allowed=", ".join(DIRECTIONS))
        found.append(Family(text.strip(), values, direction, among(item.get("dtypes", dtypes), DTYPES, f"{where}: dtypes")))
        parse_schedule(next(found[-1].texts(), ""), where)  # its words; what it must satisfy depends on the kind of call
    return tuple(found)


def read_shapes(data: object, source: str, dtypes: tuple[str, ...] = DTYPES) -> tuple[Shapes, ...]:
    """Shapes from the plain data under ``shapes``. Raises DTError, one line."""
    found = []
    for where, item in _items(data, f"{source}: shapes", ("sizes", "params", "dtypes", "directions", "wanted", "held_out")):
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
        extents = {label: _several(v, (int,), f"{where}: size of {label}") for label, v in sizes.items()}
        for label, values in extents.items():
            if not values or not all(1 <= n <= LARGEST for n in values):
                wrong = next((n for n in values if not 1 <= n <= LARGEST), "none")
                raise DTError(f"{where}: size of {label}", found=str(wrong)[:40], allowed="1 to 2^40, one or several")
        found.append(
            Shapes(
                extents,
                params,
                among(item.get("dtypes", dtypes), DTYPES, f"{where}: dtypes"),
                among(item.get("directions", DIRECTIONS), DIRECTIONS, f"{where}: directions"),
                _several(item.get("wanted", ()), (str,), f"{where}: wanted"),
                held_out,
            )
        )
    return tuple(found)


def _items(data: object, where: str, keys: tuple[str, ...]) -> Iterator[tuple[str, dict]]:
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


def _several(value: object, kinds: tuple[type, ...], where: str) -> tuple:
    values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for v in values:
        if not isinstance(v, kinds) or isinstance(v, bool):
            raise DTError(where, found=repr(v), allowed=" or ".join({int: "a whole number", str: "a text"}[k] for k in kinds))
    return values


def among(value: object, allowed: tuple[str, ...], where: str) -> tuple[str, ...]:
    """A word or a list of words, each one of ``allowed``."""
    values = _several(value, (str,), where)
    for v in values:
        if v not in allowed:
            raise DTError(where, found=repr(v), allowed=", ".join(allowed))
    return values
