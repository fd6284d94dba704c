"""The rules that hold the package together, checked on the syntax trees of its files.

Each rule is a function from one file to what it breaks. The samples below each rule show that it can fail.
"""

import ast
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ["lang", "algebra", "codegen", "autoschedule", "runtime", "frontend", "ops", "nn", "integrations", "tuning", "front", "tools"]  # front: dtkernels/*.py
DATA = ["specs", "schedule_tables"]
#: folders and modules inside a room, each importing only from itself and those before it
SUBROOMS = {
    "dtkernels.algebra": ["smart_constructors", "index_inversion", "operand_types", "rearrangement", "quotients", "joined_slices", "rules", "top_k", "autodiff", "batch", "pipeline"],
    "dtkernels.codegen": ["powers_of_two", "held_terms", "ir", "target", "prelower", "lower", "transforms", "analysis", "pipeline", "pipeline_text", "emit"],
    "dtkernels.autoschedule": [
        "cost", "problem", "rules", "recomputation", "output_fusion", "summed_products",
        "memory_limit", "stored_operands", "accumulated_outputs", "added_terms", "fit_resources", "stored_elements", "kept_sums", "stand_ins", "fusion",
        "default_schedule",
    ],
    "dtkernels.runtime": [
        "bounded_cache", "folders", "log", "path_counters", "torch_support", "signature", "reference", "tables", "select", "launch", "build", "dispatch", "bind",
        "aot_build", "decision", "explain",
    ],
    "dtkernels.frontend": [
        "unsupported", "values", "sizes", "builder", "aten", "tracing", "source_names", "interpret", "writer", "captures", "fused_function",
    ],
    "dtkernels.integrations.torch_compile": ["canonical", "linear_index", "matcher", "builder", "mask_numbers", "attention", "layers", "report", "safety", "table", "replace", "backend"],
    "dtkernels.integrations.huggingface": ["patching", "attention", "layers", "residuals", "generation", "apply"],
}  # fmt: skip
MOST_MODULES = 14  #: of one folder; ops has a file for each op
WITHOUT = {"lang": {"torch", "triton"}, "algebra": {"torch", "triton"}, "codegen": {"torch"}, "autoschedule": {"torch", "triton"}}
NO_OP_NAMES_IN = ["lang", "algebra", "codegen", "autoschedule", "runtime"]
OP_NAMES = {spec.stem for spec in (ROOT / "dtkernels" / "specs").glob("*.yaml")}
LONGEST_FILE, LONGEST_FUNCTION = 600, 60
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class File:
    """One source file: `path` from the repository's root, and its text."""

    path: str
    text: str

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.text, self.path)))

    @property
    def module(self) -> str:
        """The dotted name it is installed under: integrations/peft/lora.py is dtkernels.integrations.peft.lora."""
        parts = Path(self.path).with_suffix("").parts
        if parts[0] in ("integrations", "schedule_tables"):
            parts = ("dtkernels", *parts)
        return ".".join(parts)

    @property
    def room(self) -> str:
        return room_of(self.module.removesuffix(".__init__"))


def room_of(module: str) -> str | None:
    """The room a module lies in; None if it is not ours."""
    top, *rest = module.split(".")
    if top == "tools":
        return "tools"
    if top != "dtkernels":
        return None
    return rest[0] if rest and rest[0] in ROOMS + DATA else "front"


def imported_by(file: File) -> list[tuple[int, str]]:
    """Line and dotted name of everything it imports, relative imports and `import_module("name")` included."""
    found = []
    for node in file.nodes:
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(filter(None, [*file.module.split(".")[: -node.level], base]))
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and name_of(node.func).split(".")[-1] in ("import_module", "__import__"):
            found += [(node.lineno, arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant)]
    return found


def name_of(node: ast.AST) -> str:
    """`a.b.c` of a name, an attribute or a call of one; "" for anything else."""
    if isinstance(node, ast.Call):
        return name_of(node.func)
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imports_downward(file: File) -> list[str]:
    """A room imports only from itself and the rooms above it. Specs and tables are data: they import nothing of ours."""
    reach = ROOMS[: ROOMS.index(file.room) + 1] + DATA if file.room in ROOMS else []
    return [said(file, line, name) for line, name in imported_by(file) if room_of(name) not in (None, *reach)]


def subroom_of(module: str) -> tuple[str, str] | None:
    """(room, folder or module inside it) of a module in a room that SUBROOMS orders; None for others."""
    for room in SUBROOMS:
        if module.startswith(f"{room}."):
            return room, module.removeprefix(f"{room}.").split(".")[0]
    return None


def imports_downward_inside(file: File) -> list[str]:
    """A folder of a room imports only from itself and the folders before it, but for the names of types."""
    own = subroom_of(file.module.removesuffix(".__init__"))
    if own is None:
        return []
    room, here = own
    order = SUBROOMS[room]
    if here not in order:
        return [f"{file.path}: {here} has no place in SUBROOMS[{room!r}]"]
    typed = {line for node in file.nodes if isinstance(node, ast.If) and name_of(node.test) == "TYPE_CHECKING" for line in range(node.lineno, node.end_lineno + 1)}
    found = [(line, name, subroom_of(name)) for line, name in imported_by(file) if line not in typed]
    return [said(file, line, name) for line, name, to in found if to and to[0] == room and to[1] in order[order.index(here) + 1 :]]


def imports_withheld(file: File) -> list[str]:
    """lang and algebra know neither torch nor Triton; codegen does not know torch."""
    withheld = WITHOUT.get(file.room, set())
    return [said(file, line, name) for line, name in imported_by(file) if name.split(".")[0] in withheld]


def said(file: File, line: int, name: str) -> str:
    return f"{file.path}:{line} {file.room} imports {name}"


def kernels_by_hand(file: File) -> list[str]:
    """No function is a Triton kernel: `@triton.jit` stands in emitted text only."""
    functions = [node for node in file.nodes if isinstance(node, FUNCTION)]
    decorators = [(node, name_of(decorator).split(".")) for node in functions for decorator in node.decorator_list]
    kernels = [node for node, name in decorators if name[-1] == "jit" or name[0] in ("triton", "gluon")]
    return [f"{file.path}:{node.lineno} {node.name} is a kernel written by hand" for node in kernels]


def names_of_ops(file: File, ops: set[str] = OP_NAMES) -> list[str]:
    """No identifier and no string constant of the compiler and the runtime is an op's name."""
    if file.room not in NO_OP_NAMES_IN:
        return []
    fields = ("id", "attr", "arg", "name", "asname", "value")
    words = ((node, getattr(node, field, None)) for node in file.nodes for field in fields)
    return [f"{file.path}:{node.lineno} names the op {word}" for node, word in words if isinstance(word, str) and word in ops]


def too_long(file: File) -> list[str]:
    """Files have at most 600 lines, functions at most 60."""
    lines = file.text.count("\n")
    broken = [f"{file.path} has {lines} lines"] if lines > LONGEST_FILE else []
    for node in file.nodes:
        if isinstance(node, FUNCTION) and (length := node.end_lineno - node.lineno + 1) > LONGEST_FUNCTION:
            broken.append(f"{file.path}:{node.lineno} {node.name} has {length} lines")
    return broken


RULES = [imports_downward, imports_downward_inside, imports_withheld, kernels_by_hand, names_of_ops, too_long]


@cache
def our_files() -> list[File]:
    folders = ("dtkernels", "integrations", "schedule_tables", "tools")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return [File(path.relative_to(ROOT).as_posix(), path.read_text()) for path in sorted(paths)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_file_keeps_the_rule(rule):
    broken = [line for file in our_files() for line in rule(file)]
    assert not broken, f"{rule.__doc__}\n" + "\n".join(broken)


def test_the_rules_see_every_room():
    """Had a folder moved, the rules above would pass on nothing."""
    assert {file.room for file in our_files()} >= set(ROOMS)
    assert OP_NAMES


def circles(files: list[File]) -> list[str]:
    """Modules that import one another when they are loaded."""
    modules = {file.module.removesuffix(".__init__"): file for file in files}
    graph = {}
    for name, file in modules.items():
        inside = {n for node in file.nodes if isinstance(node, (*FUNCTION, ast.If)) for n in range(node.lineno, node.end_lineno + 1)}
        wanted = [target for line, target in imported_by(file) if line not in inside]
        graph[name] = {t if t in modules else t.rpartition(".")[0] for t in wanted} & (set(modules) - {name})
    found: list[str] = []
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            found.append(" -> ".join((*path[path.index(name) :], name)))
        elif name not in done:
            for other in sorted(graph[name]):
                visit(other, (*path, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())
    return found


def test_no_modules_import_one_another():
    assert circles(our_files()) == []


def test_a_circle_is_seen():
    files = [File("dtkernels/lang/a.py", "from . import b"), File("dtkernels/lang/b.py", "from .a import x"), File("dtkernels/lang/c.py", "def f(): from . import a")]
    assert circles(files) == ["dtkernels.lang.a -> dtkernels.lang.b -> dtkernels.lang.a"]


def test_no_folder_is_crowded():
    counted = Counter(Path(file.path).parent.as_posix() for file in our_files() if not file.path.endswith("__init__.py"))
    crowded = {folder: count for folder, count in counted.items() if count > MOST_MODULES and folder not in ("dtkernels/ops", "tools")}  # one for each op, one for each command
    assert not crowded, f"at most {MOST_MODULES} modules in a folder"


SAMPLES = [
    (imports_downward_inside, "dtkernels/codegen/ir/a.py", "from ..transforms import b", "from . import b"),
    (imports_downward_inside, "dtkernels/codegen/lower/a.py", "def f():\n    from ..pipeline import lower", "from ..ir import nest"),
    (imports_downward_inside, "dtkernels/runtime/tables/a.py", "from ..bind.operator import x", "if TYPE_CHECKING:\n    from ..bind.operator import x"),
    (imports_downward, "dtkernels/lang/a.py", "from dtkernels.codegen import nest", "from dtkernels.lang import b"),
    (imports_downward, "dtkernels/lang/a.py", "from dtkernels import algebra", "import math"),
    (imports_downward, "dtkernels/algebra/a.py", "from ..runtime import table", "from ..lang import b"),
    (imports_downward, "dtkernels/algebra/__init__.py", "from ..ops import b", "from . import b"),
    (imports_downward, "dtkernels/runtime/a.py", "import_module('dtkernels.ops')", "import_module('dtkernels.lang')"),
    (imports_downward, "dtkernels/runtime/a.py", "def f():\n    import dtkernels", "from dtkernels.schedule_tables import b"),
    (imports_downward, "integrations/peft/a.py", "import tools.tune", "from ...ops import b"),
    (imports_downward, "schedule_tables/__init__.py", "import dtkernels.lang", "import yaml"),
    (imports_withheld, "dtkernels/lang/a.py", "import torch", "import torchless"),
    (imports_withheld, "dtkernels/algebra/a.py", "import triton.language as tl", "import math"),
    (imports_withheld, "dtkernels/codegen/a.py", "from torch import Tensor", "import triton"),
    (kernels_by_hand, "dtkernels/ops/a.py", "@triton.jit\ndef f(): pass", "@cache\ndef f(): pass"),
    (kernels_by_hand, "tools/a.py", "@triton.autotune(configs=[])\ndef f(): pass", "text = '@triton.jit'"),
    (kernels_by_hand, "integrations/a.py", "@jit\ndef f(): pass", "def jit(): pass"),
    (too_long, "dtkernels/lang/a.py", "x = 1\n" * 601, "x = 1\n" * 600),
    (too_long, "dtkernels/lang/a.py", "def f():\n" + "    x = 1\n" * 60, "def f():\n" + "    x = 1\n" * 59),
]


@pytest.mark.parametrize("rule, path, wrong, right", SAMPLES, ids=lambda value: value.__name__ if callable(value) else "")
def test_a_rule_tells_wrong_from_right(rule, path, wrong, right):
    assert rule(File(path, wrong))
    assert not rule(File(path, right))


NAMING = ["softmax = 1", "f.softmax", "f(softmax=1)", "x = 'softmax'", "def softmax(): pass", "import a as softmax"]


@pytest.mark.parametrize("wrong", NAMING)
def test_an_op_named_in_the_compiler_is_seen(wrong):
    assert names_of_ops(File("dtkernels/codegen/a.py", wrong), {"softmax"})
    assert not names_of_ops(File("dtkernels/ops/a.py", wrong), {"softmax"})
    assert not names_of_ops(File("dtkernels/codegen/a.py", "'''softmax, say'''"), {"softmax"})


def python(code: str, cwd: Path) -> str:
    """What fresh Python prints for the code, started where the package is found only if it is installed."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "TRITON_INTERPRET")}
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_dtkernels_imports_nothing_optional(tmp_path):
    """Neither Triton nor any extra; what torch itself imports does not count."""
    optional = {"triton", "transformers", "peft", "ray", "matplotlib", "rich"}
    code = f"import sys, torch; had = set(sys.modules); import dtkernels; print(sorted({optional} & (set(sys.modules) - had)))"
    assert python(code, tmp_path) == "[]"
