"""List every environment variable that dtkernels reads: name, values, default, meaning, and a check of its value.

``doctor`` reports those that are set; ``docs/configuration.md`` lists them all. Needs no installed package.
"""

from __future__ import annotations

import difflib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import util
from pathlib import Path

TRUE, FALSE = ("1", "true", "yes", "on", "y"), ("0", "false", "no", "off", "n")  #: what Triton accepts as truth values


class Unusable(ValueError):
    """The value of a variable is unusable. The message is one line: the reason, and what happens instead."""


@dataclass(frozen=True)
class Variable:
    """One variable. ``check`` describes a value in a few words, or raises Unusable."""

    name: str
    values: str
    default: str
    meaning: str
    check: Callable[[str], str]
    group: str = "dtkernels"  #: dtkernels, Triton and the system, or the tests


# -- checks: each takes a nonempty value and returns a few words -----------------------------------------------------------


def _tables(value: str) -> str:
    from .runtime.select.table_loader import tables_folders

    return tables_in(tables_folders()[0])


def _user(value: str) -> str:
    from .runtime.folders import folder_named

    return writable(folder_named(value), "python -m dtkernels tune writes nothing")


def tables_in(folder: Path) -> str:
    """Describe the tables in a folder. Raises Unusable where there is none, or a file of one cannot be read."""
    instead = "; every op takes the default schedule"
    if not folder.is_dir():
        raise Unusable(f"{folder}: {'a file; name a folder of tables' if folder.exists() else 'no such folder'}{instead}")
    try:
        tables = sorted(p.parent for p in folder.glob("*/gpu.yaml"))
    except OSError as error:
        raise Unusable(f"{folder}: {error.strerror}{instead}") from None
    if not tables:
        alone = "it is one table; name the folder that it lies in" if (folder / "gpu.yaml").exists() else "no folder in it has a gpu.yaml"
        raise Unusable(f"{folder}: {alone}{instead}")
    if lacking := [name for name in ("yaml", "safetensors") if util.find_spec(name) is None]:
        raise Unusable(f"{folder}: cannot be read without {' and '.join(lacking)}")
    shared = sorted({p.parent for p in folder.glob("*/*.safetensors")} - {*tables})  # kernels by architecture
    wrong = [line for table in (*tables, *shared) for line in faults_in(table)]
    if wrong:
        raise Unusable(wrong[0] + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""))
    return f"tables of {', '.join(table.name for table in tables)}"


def faults_in(table: Path) -> Iterator[str]:
    """Yield one line per faulty file of a table."""
    from .runtime.select.table_loader import usable
    from .runtime.tables.kernel_store import KernelStore, StoreError
    from .runtime.tables.table import TableError, read_gpu, read_rows

    try:
        paths = sorted(table.iterdir())
    except OSError as error:
        yield f"{table}: {error.strerror}"
        return
    for path in paths:
        try:
            if path.name == "gpu.yaml":
                read_gpu(table)
            elif path.suffix == ".yaml":
                read_rows(path.read_bytes().decode(), str(path))
            elif path.suffix == ".safetensors" and path.name != "measurements.safetensors" and not usable(KernelStore(path)):
                yield f"{path}: neither the package nor this user built it; DTKERNELS_TRUST_TABLES=1 trusts it"
        except (OSError, UnicodeDecodeError, TableError, StoreError) as error:
            text = " ".join(str(error).split())
            yield text if str(path) in text else f"{path}: {text}"


def _cache(value: str) -> str:
    from .runtime.folders import folder_named

    return writable(folder_named(value), "another folder is used, see the line on the cache folder")


def _home(value: str) -> str:
    if os.environ.get("DTKERNELS_CACHE"):
        return "not looked at: DTKERNELS_CACHE is set"
    return writable(Path(value) / "dtkernels", "another folder is used, see the line on the cache folder")


def writable(folder: Path, instead: str) -> str:
    """Describe a folder that is or can be made writable. Raises Unusable."""
    there = next(p for p in (folder, *folder.parents) if p.exists() or p == p.parent)
    if not there.is_dir():
        raise Unusable(f"{there}: a file, where a folder is needed; {instead}")
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise Unusable(f"{there}: cannot be written ({error.strerror}); {instead}") from None
    return "can be written" if there == folder else "will be made"


def _triton_folder(value: str) -> str:
    return writable(Path(value).absolute(), "Triton can compile nothing")


def folder(value: str) -> str:
    """Describe an existing folder. Raises Unusable."""
    if not Path(value).is_dir():
        raise Unusable(f"{value}: {'a file' if Path(value).exists() else 'no such folder'}")
    return "a folder"


def program(value: str) -> str:
    """Describe an executable program. Raises Unusable."""
    if shutil.which(value) is None:
        raise Unusable(f"{value}: {'is no program that can be run' if Path(value).exists() else 'no such program'}")
    return "a program"


def compiler(value: str) -> str:
    """Describe a compiler, which may be followed by options. Raises Unusable."""
    return program(value if Path(value).exists() else value.split()[0])


def file(value: str) -> str:
    """Describe an existing file. Raises Unusable."""
    if not Path(value).is_file():
        raise Unusable(f"{value}: {'a folder' if Path(value).exists() else 'no such file'}")
    return "a file"


def one_of(*allowed: str, default: str) -> Callable[[str], str]:
    """Return a check that a value is one of some words, in either case."""

    def check(value: str) -> str:
        if value.lower() not in allowed:
            raise Unusable(f"{value!r} is none of {', '.join(allowed)}; {default}")
        return "as asked"

    return check


def boolean_value(value: str) -> str:
    """Return "on" or "off" as Triton reads the value. Raises Unusable where Triton knows neither."""
    if value.lower() not in TRUE + FALSE:
        raise Unusable(f"{value!r} is taken for false; allowed: 1 or 0")
    return "on" if value.lower() in TRUE else "off"


def number(value: str) -> str:
    """Describe a nonnegative integer. Raises Unusable."""
    if not (value.isascii() and value.isdigit()):
        raise Unusable(f"{value!r} is no whole number; calls that ask for it raise ValueError")
    return "a number"


def any_value(value: str) -> str:
    """Accept any value."""
    return "not looked at"


_SYSTEM, _TESTS = "Triton and the system", "the tests"
_FOLDER, _SWITCH, _CACHE_HOME = "a folder", "1, true, yes, on or y; 0", "`~/.cache/dtkernels`"
VARIABLES = (
    Variable("DTKERNELS_TABLES", "a folder of tables", "the user's tables, then the package's", "The only folder for schedules and prebuilt kernels. See [tables](tables.md).", _tables),
    Variable("DTKERNELS_CACHE", _FOLDER, f"`$XDG_CACHE_HOME/dtkernels`, else {_CACHE_HOME}", "Where emitted source is written; if that fails, in a temporary folder.", _cache),
    Variable("DTKERNELS_LOG", "debug, info, warning, error", "none",
             "Print the messages of the logger `dtkernels` to stderr. `info` has one line for each kernel that is compiled.",
             one_of("debug", "info", "warning", "error", default="nothing is printed")),
    Variable("DTKERNELS_FALLBACK", "own, reference", "own", "What a patched module runs where no kernel can: its own code, or the torch reference of the ops.",
             one_of("own", "reference", default="a call raises")),
    Variable("DTKERNELS_CHECK", "1, 0", "0", "Check every index that comes from a tensor, and raise IndexError where one is out of range.",
             one_of("0", "1", default="a call may raise")),
    Variable("DTKERNELS_MEMORY_LIMIT", "MiB; 0 for none", "256",
             "Memory for intermediates between kernels of a default schedule (larger ones are computed in pieces), and for products saved for backward. Set it before Python starts.", number),
    Variable("DTKERNELS_FP32_PRODUCTS", "ieee, any", "any",
             "`ieee`: float32 products are computed in float32, never as three products in TF32. See [schedules](schedules.md#approximate). Set it before Python starts.",
             one_of("ieee", "any", default="default schedules choose")),
    Variable("DTKERNELS_USER", _FOLDER, "`$XDG_DATA_HOME/dtkernels`, else `~/.local/share/dtkernels`",
             "Where `python -m dtkernels tune` keeps this user's tables, and the key that signs their kernels.", _user),
    Variable("DTKERNELS_TRUST_TABLES", "1, 0", "0", "Run kernels from stores that neither the package nor this user built. See [limits](limits.md#trust).",
             one_of("0", "1", default="such stores are refused")),
    Variable("TRITON_INTERPRET", _SWITCH, "0", "Run kernels in Triton's interpreter, on a CPU and slowly. Set it before Python starts.", boolean_value, _SYSTEM),
    Variable("TRITON_CACHE_DIR", _FOLDER, "`$TRITON_HOME/.triton/cache`", "Where Triton keeps what it compiled.", _triton_folder, _SYSTEM),
    Variable("TRITON_HOME", _FOLDER, "the home folder", "The folder that holds `.triton`.", _triton_folder, _SYSTEM),
    Variable("TRITON_PTXAS_PATH", "a program", "the ptxas that comes with Triton", "The assembler for NVIDIA GPUs.", program, _SYSTEM),
    Variable("TRITON_PTXAS_BLACKWELL_PATH", "a program", "the ptxas that comes with Triton", "The assembler for NVIDIA GPUs from compute capability 10.0 on.", program, _SYSTEM),
    Variable("TRITON_LIBDEVICE_PATH", "a file", "the one that comes with Triton", "NVIDIA's library of mathematical functions.", file, _SYSTEM),
    Variable("TRITON_ALWAYS_COMPILE", _SWITCH, "0", "Compile again what is in Triton's cache.", boolean_value, _SYSTEM),
    Variable("TRITON_KERNEL_DUMP", _SWITCH, "0", "Write every stage of a compilation to `TRITON_DUMP_DIR`.", boolean_value, _SYSTEM),
    Variable("TRITON_DUMP_DIR", _FOLDER, "`$TRITON_HOME/.triton/dump`", "Where `TRITON_KERNEL_DUMP` writes.", _triton_folder, _SYSTEM),
    Variable("TRITON_KERNEL_OVERRIDE", _SWITCH, "0", "Use kernels from `TRITON_OVERRIDE_DIR` instead of compiled ones.", boolean_value, _SYSTEM),
    Variable("TRITON_OVERRIDE_DIR", _FOLDER, "`$TRITON_HOME/.triton/override`", "Where `TRITON_KERNEL_OVERRIDE` reads.", folder, _SYSTEM),
    Variable("TRITON_DEBUG", _SWITCH, "0", "Compile with Triton's assertions.", boolean_value, _SYSTEM),
    Variable("TRITON_DISABLE_LINE_INFO", _SWITCH, "0", "Leave line numbers out of machine code; `tools/build.py` and `tools/check_tables.py` set it.", boolean_value, _SYSTEM),
    Variable("CC", "a program, and its options", "`cc`, `gcc` or `clang`", "The C compiler that Triton compiles its launchers with.", compiler, _SYSTEM),
    Variable("XDG_CACHE_HOME", _FOLDER, "`~/.cache`", "The folder of the cache, if `DTKERNELS_CACHE` is not set.", _home, _SYSTEM),
    Variable("XDG_DATA_HOME", _FOLDER, "`~/.local/share`", "The folder of the user's tables, if `DTKERNELS_USER` is not set.", any_value, _SYSTEM),
    Variable("RAY_USAGE_STATS_ENABLED", "1, 0", "0", "Whether Ray, started by the tuner, reports its use.", any_value, _SYSTEM),
    Variable("CUDA_VISIBLE_DEVICES", "numbers or names of GPUs", "all", "The GPUs that a process sees.", any_value, _SYSTEM),
    Variable("DTKERNELS_CASES", "a number", "the number of every run", "How many random programs the property test draws.", number, _TESTS),
    Variable("DTKERNELS_SEED", "a number", "the cases of every run", "Draw other random programs.", any_value, _TESTS),
    Variable("DTKERNELS_TEST_TABLES", _FOLDER, "a table that the tests build", "A folder that `tests/small_tables.py` wrote, for the tests on a GPU.", folder, _TESTS),
)  # fmt: skip
BY_NAME = {v.name: v for v in VARIABLES}
OWN, TRITON = "DTKERNEL", "TRITON_"  #: prefixes of names, in either case


def variable_reports(environment: Mapping[str, str] | None = None) -> Iterator[tuple[bool, str]]:
    """Yield (whether it is usable, one line) for each set variable that is in VARIABLES or is named DTKERNELS_* or TRITON_*."""
    environment = os.environ if environment is None else environment
    for name in sorted(n for n in environment if n in BY_NAME or n.upper().startswith((OWN, TRITON))):
        value = environment[name]
        shown = f"{name}={' '.join(value.split())[:200]}"
        if name not in BY_NAME:
            yield (False, f"{shown}: {_unknown(name)}") if name.upper().startswith(OWN) else (True, f"{shown}: one of Triton's own, not looked at")
        elif not value:
            yield True, f"{shown}: empty, which is as if it were not set"
        else:
            try:
                yield True, f"{shown}: {BY_NAME[name].check(value)}"
            except Unusable as problem:
                yield False, f"{shown}: {problem}"


def _unknown(name: str) -> str:
    """Return the report on a variable that nothing reads."""
    allowed = [v.name for v in VARIABLES if v.name.startswith(OWN) and v.group != _TESTS]
    near = difflib.get_close_matches(name.upper().removeprefix(OWN).lstrip("S_"), [n.removeprefix("DTKERNELS_") for n in allowed], 1)
    return "nothing reads it" + (f"; did you mean DTKERNELS_{near[0]}?" if near else f"; allowed: {', '.join(allowed)}")


def table(group: str) -> str:
    """Format the variables of a group as a Markdown table, for ``docs/configuration.md``."""
    rows = [f"| `{v.name}` | {v.values} | {v.default} | {v.meaning} |" for v in VARIABLES if v.group == group]
    return "\n".join(["| variable | values | default | meaning |", "|---|---|---|---|", *rows]) + "\n"


def page(text: str) -> str:
    """Regenerate the tables in ``docs/configuration.md``, each between ``<!-- variables: GROUP -->`` and ``<!-- /variables -->``."""
    import re

    return re.sub(r"(<!-- variables: ([^>]+?) -->\n).*?(<!-- /variables -->)", lambda m: m[1] + table(m[2]) + m[3], text, flags=re.DOTALL)


if __name__ == "__main__":
    import sys

    for name in sys.argv[1:]:
        Path(name).write_text(page(Path(name).read_text()))
