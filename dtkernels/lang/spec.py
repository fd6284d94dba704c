"""Load specs: one op as YAML.

Required keys: op, doc, algorithm. Optional: parameters, dtypes, schedules, shapes, compiled, autocast.

compiled: how torch.compile treats a call. ``kernel`` (the default) keeps it opaque; ``fuse`` decomposes it into plain operations, which
the compiler fuses with their surroundings. autocast: ``fp32`` or ``keep``. By default, ops with matrix products take the lower dtype and
others keep theirs.
"""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from .algorithm import Algorithm
from .checks import check_given
from .errors import DTError
from .parser import parse
from .schedule import Program
from .tuning_space import DTYPES, Family, Shapes, check_shapes, read_families, read_shapes, read_words
from .yaml_text import read_located, read_text

REQUIRED = ("op", "doc", "algorithm")
OPTIONAL = ("parameters", "dtypes", "schedules", "shapes", "compiled", "autocast")
CHOICES = {"compiled": ("kernel", "fuse"), "autocast": ("fp32", "keep")}


@dataclass(frozen=True)
class Spec:
    """The content of a spec file. ``parameters`` documents each compile-time parameter of the algorithm."""

    op: str
    doc: str
    program: Program
    parameters: dict[str, str] = field(default_factory=dict)
    dtypes: tuple[str, ...] = DTYPES
    schedules: tuple[Family, ...] = ()
    shapes: tuple[Shapes, ...] = ()
    source: str = "<spec>"
    compiled: str = "kernel"
    autocast: str | None = None

    @property
    def algorithm(self) -> Algorithm:
        return self.program.algorithm

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.program.outputs()


def load_spec(path: str | Path) -> Spec:
    """Load the spec in the YAML file ``path``. Raises DTError naming the file, and FileNotFoundError."""
    return parse_spec(read_text(path, "a spec"), str(path))


def parse_spec(text: str, source: str = "<spec>") -> Spec:
    """Parse the spec in ``text``. Raises DTError."""
    data, located = read_located(text, source)
    if not isinstance(data, dict):
        raise DTError(f"{source}: a spec is a mapping", found=type(data).__name__, allowed=", ".join(REQUIRED + OPTIONAL))
    _check_keys(data, source)
    program = parse(data["algorithm"], source, located.places("algorithm"))
    _check_program(program, data["op"])
    if not program.algorithm.inputs:
        raise DTError(f"{source}: an op reads a tensor", found="no In in its algorithm")
    parameters = data.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise DTError(f"{source}: parameters is a mapping of names to texts", found=type(parameters).__name__)
    declared = [name for name, _ in program.algorithm.params]
    for name in parameters:
        if name not in declared:
            raise DTError(
                f"{source}: parameters documents a Param of the algorithm", found=repr(name), allowed=", ".join(declared) or "none"
            )
    dtypes = read_words(data["dtypes"], DTYPES, f"{source}: dtypes") if data.get("dtypes") else DTYPES
    families, shapes = read_families(data.get("schedules"), source, dtypes, located.places), read_shapes(data.get("shapes"), source, dtypes)
    check_shapes(shapes, program.algorithm, source)
    named = {w for f in families for w in re.findall(r"\w+", f.schedule)} | {label for s in shapes for label in s.sizes}
    algorithm = replace(program.algorithm, named=frozenset(program.algorithm.labels) & named)
    program = Program(algorithm, program.schedule)
    return Spec(data["op"], data["doc"].strip(), program, dict(parameters), dtypes, families, shapes, source,
                data.get("compiled", "kernel"), data.get("autocast"))  # fmt: skip


def _check_program(program: Program, op: str) -> None:
    """Check that a spec's program names its results and has no other schedule statements."""
    for p in program.schedule.primitives:
        if p.name != "compile":
            raise DTError("an op gets a schedule for each call, from a table or by default", found=str(p).rstrip(";"),
                          allowed="compile() here; families for the tuner under schedules:; one fixed schedule in a program for dtkernels.compile", at=p.pos)  # fmt: skip
    if op not in program.algorithm:
        return check_given(program)
    if program.schedule.primitives and op not in program.outputs():
        raise DTError("op names a result", found=f"{op!r}, a Func that is not compiled", allowed=f"{op}.compile();", at=program.algorithm[op].pos)
    check_given(program, () if program.schedule.primitives else (op,))


def _check_keys(data: dict, source: str) -> None:
    for key in REQUIRED:
        if not isinstance(data.get(key), str) or not data[key].strip():
            raise DTError(
                f"{source}: a spec has {', '.join(REQUIRED)}, each a text",
                found=f"no {key}" if key not in data else f"{key}: {data[key]!r}",
            )
    for key in data:
        if key not in REQUIRED + OPTIONAL:
            raise DTError(f"{source}: unknown key", found=repr(key), allowed=", ".join(REQUIRED + OPTIONAL))
    for key, allowed in CHOICES.items():
        if key in data and data[key] not in allowed:
            raise DTError(f"{source}: {key} is one of a few words", found=repr(data[key]), allowed=", ".join(allowed))
    if not data["op"].isascii() or not data["op"].isidentifier() or keyword.iskeyword(data["op"]):
        raise DTError(f"{source}: op is a Python name of ASCII letters, digits and _", found=repr(data["op"]))
