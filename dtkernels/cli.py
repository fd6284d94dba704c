"""Parse and run the command line: show, compile, explain, tune, doctor. Bad input ends in one line on stderr and exit code 2."""

from __future__ import annotations

import argparse
import math
import os
import stat
import sys
import tempfile
from pathlib import Path

from . import __version__, doctor, lookup, show
from .codegen.emit.triton.grid import programs_per_block
from .codegen.ir.nest import Kernel
from .codegen.pipeline import without
from .codegen.target import TARGETS, target
from .lang.errors import DTError
from .lang.schedule import Merge
from .runtime.path_counters import interpreting

_SHOW = """Print an op or a program at one stage. algorithm: what is computed; algebra: the algorithm after each rule that
changed it; schedule: how the work is cut; nest: the loops; triton: the emitted file; ptx: machine code (amdgcn for AMD).
A .dt program has its own schedule; an op or a spec gets one for its shape and GPU."""
_COMPILE = """Write a Python file that imports torch and triton only: kernels, and a wrapper named after each compiled Func.
Ends with an error if the GPU's shared memory or registers do not suffice. Tiles of a whole extent are checked at --shape. Triton
launches the kernels of such a file; it loads 16 bytes at once only where 16 divides the length of rows."""
_EXPLAIN = """Print the schedule that an op gets at a shape on a GPU, which need not be present: the row of the schedule table with its
measured time, or why the default schedule is used; the next rows with theirs; and the launch of each kernel. DTKERNELS_TABLES names the tables.
With --backward: the forward that saves for it, then the backward; by default with respect to what the table has rows for."""
_TUNE = """Find faster schedules for this GPU and keep them in the user's folder, where calls take them before the package's. Prints each size's time
before and after, builds the kernels, and writes a file to share: rows and measurements, no code. Needs a GPU."""
_DOCTOR = """Check the installation, the schedule tables, the cache and every environment variable that is set (docs/configuration.md).
Prints one line for each: OK, or WARN and what to do. Exit status 1 if something is unusable. A missing GPU or TRITON_INTERPRET only
warns."""
_SHAPE = f"""extents: the output's labels, then the others in order of declaration. Give one number per label; labels with the same
extent share one. Default: {show.DEFAULT_EXTENT} along every label, or the spec's first shape"""
_SIZES = "the same by name, each label once: x=4096,y=8192"
_DTYPE = f"of the inputs: {', '.join(show.DTYPES)}; bf16,slopes=fp32 where an input differs. Default: bf16"
_VALUE = "a compile-time parameter (causal=true) or a scalar input; may be repeated"


class Refused(ValueError):
    """Input that the command line refuses; the message is one line."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise Refused(f"{self.prog}: {message}; see {self.prog} --help")


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns 0, 1 where ``doctor`` finds a fault, or 2 after one line on stderr for refused input."""
    try:
        args = _parser().parse_args(argv)
        status = args.run(args)
        sys.stdout.flush()
        return status or 0
    except BrokenPipeError:  # the reader closed the pipe; discard what is still buffered
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except DTError as error:
        return _refuse(str(error))
    except Refused as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"{error.filename or 'dtkernels'}: {error.strerror or error}")
    except RecursionError:
        return _refuse("dtkernels: the program is nested too deeply")
    return 0


def _refuse(message: str) -> int:
    print(" ".join(message.split()), file=sys.stderr)
    return 2


# -- commands ---------------------------------------------------------------------------------------------------------


def _compile(args: argparse.Namespace) -> None:
    if Path(args.file).suffix != ".dt":
        raise Refused(f"{args.file}: compile takes a .dt program; for an op or a spec: python -m dtkernels show {args.file}")
    output = Path(args.output) if args.output else None
    if output and output.exists() and Path(args.file).exists() and output.samefile(args.file):
        raise Refused(f"{output}: the output would replace the program")
    subject = show.Subject(show.read(args.file), args.gpu, args.sizes or args.shape, args.dtype, given=_given(args))
    source = subject.text("triton")
    subject.check(every=bool(args.sizes or args.shape))
    if output:
        write_whole(output, source)
    else:
        sys.stdout.write(source)


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` atomically: a reader sees the old file or the new one. Permissions are kept."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        if path.is_dir():
            raise Refused(f"{path}: is a folder")
        path.write_text(text, encoding="utf-8")  # a pipe or a device
        return
    mask = os.umask(0)
    os.umask(mask)
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o666 & ~mask
    if not path.parent.is_dir():
        raise Refused(f"{path.parent}: no such folder")
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:  # it would name the temporary file
        raise Refused(f"{path}: cannot be written: {error.strerror}") from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as f:
            f.write(text)
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _given(args: argparse.Namespace) -> dict[str, object]:
    """Collect parameters and scalars by name. Raises Refused for a name given twice."""
    found: dict[str, object] = {}
    for name, value in args.param:
        if name in found:
            raise Refused(f"--param: {name} is given twice: {found[name]} and {value}")
        found[name] = value
    return found


def _wanted(args: argparse.Namespace) -> tuple[str, ...] | None:
    """Return the inputs to differentiate, () for all of them; None without a gradient."""
    return tuple(filter(None, args.wrt.split(","))) if args.backward or args.wrt else None


def _show(args: argparse.Namespace) -> None:
    with without(*filter(None, args.without.split(","))):
        subject = show.Subject(show.read(args.what), args.gpu, args.sizes or args.shape, args.dtype, _given(args), _wanted(args))
        sys.stdout.write(_machine_code(subject, lambda: subject.text("ptx")) if args.stage == "ptx" else subject.text(args.stage))


def _machine_code(subject: show.Subject, make):
    """Return ``make()``; turn any error of the toolchain into one line."""
    subject.text("triton")  # errors in the program are not reported as Triton's
    if interpreting():
        raise Refused("dtkernels: machine code needs Triton's compiler: unset TRITON_INTERPRET")
    try:
        return make()
    except ImportError as error:
        raise Refused(f"dtkernels: machine code needs torch and triton: {error}") from None
    except (DTError, KeyboardInterrupt):
        raise
    except OSError as error:  # for example Triton's cache in a missing home directory
        where = f"{error.filename}: " if error.filename else ""
        raise Refused(f"dtkernels: {where}{error.strerror or error}; TRITON_CACHE_DIR and DTKERNELS_CACHE say where to write") from None
    except Exception as error:  # the exceptions of Triton's passes have no common base class
        said = str(error).strip().splitlines() or ["no message"]
        raise Refused(f"dtkernels: Triton does not compile this: {type(error).__name__}: {said[-1]}") from error


def _explain(args: argparse.Namespace) -> None:
    written, wanted = show.read(args.what), _wanted(args)
    if wanted == () and not written.scheduled:
        wanted = lookup.default_gradients(written, args.gpu, _given(args))
    subject = show.Subject(written, args.gpu, args.sizes or args.shape, args.dtype, _given(args), wanted)
    lines = _chosen(subject)
    made = {}
    if args.build:
        made = {compiled.metadata.name: compiled for _, compiled in _machine_code(subject, lambda: show.machine_code(subject))}
    for k in subject.kernels():
        lines += _launched(subject, k, made)
    print("\n".join(lines))


def _chosen(subject: show.Subject) -> list[str]:
    """Describe the chosen schedule and the reason."""
    if not subject.written.scheduled:
        table, found = lookup.decisions(subject)
        gradients = f"; gradients of {', '.join(subject.wanted)}" if subject.gradient is not None else ""
        return [f"{subject.title()}{gradients}; table {table or 'none'}", *(line for decision in found for line in str(decision).splitlines())]
    lines = [subject.title()]
    if not subject.scheduled:
        lines += [f"schedule: the default for these sizes on {subject.target.name}; tables have no rows for a .dt program"]
    elif subject.written.program.schedule.primitives:
        lines += ["schedule: the program's own"]
    else:
        lines += ["schedule: none is given; one program loops over single elements"]
    return lines + [f"  {line}" for line in str(subject.program.schedule).splitlines()]


def _launched(subject: show.Subject, k: Kernel, made: dict) -> list[str]:
    """Describe the launch and the resources of one kernel. ``made``: compiled kernels by name."""
    gpu = subject.target
    sizes = {**subject.sizes}
    for p in (p for p in subject.program.schedule.primitives if isinstance(p, Merge)):
        sizes[p.label] = math.prod(sizes[x] for x in p.parts)
    blocks = {g.label: g.parts or -(-sizes[g.label] // g.block) for g in k.grid}
    count = math.prod(blocks.values())
    cut = " x ".join(f"{n} along {label}" for label, n in blocks.items()) or "one"
    lines = [f"kernel {k.name}: reads {', '.join(k.reads)}; writes {', '.join(k.writes)}"]
    lines += [f"  {count} programs ({cut}), {count / gpu.multiprocessors:.1f} per multiprocessor ({gpu.multiprocessors})"]
    estimate = subject.resources(k)
    lines += [f"  {k.num_warps} warps of {gpu.warp_size}, num_stages {k.num_stages}; estimated {estimate.shared_bytes} bytes of shared memory"]
    lines += [f"  last wave, where that takes less time: kernel {t.name}, {programs_per_block(t)} programs of {t.num_warps} warps for each block" for t in k.tail]
    if (compiled := made.get(f"{k.name}_kernel")) is not None:
        lines += [f"  compiled: {compiled.metadata.shared} of {gpu.shared_bytes} bytes of shared memory"]
    return lines


def _doctor(args: argparse.Namespace) -> int:
    found = list(doctor.facts())
    for fact in found:
        print(fact)
    return int(any(fact.fault for fact in found))


def _tune(args: argparse.Namespace) -> int:
    from .tuning.user_table import tune_user_table

    return tune_user_table(args.minutes, args.ops, [word for word in args.more if word != "--"])


# -- arguments --------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="dtkernels", description="Inspect, compile and tune kernels. Only tune needs a GPU.")
    parser.add_argument("--version", action="version", version=f"dtkernels {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    one = commands.add_parser("show", help="print an op or a program at any stage, from its text to machine code", description=_SHOW)
    _program_arguments(one)
    one.add_argument("--stage", choices=show.STAGES, default="triton", help="default: triton")
    one.add_argument("--without", default="", metavar="PASS,...", help="leave out passes of codegen/pipeline.py, to see what they do")
    one.set_defaults(run=_show)

    one = commands.add_parser("compile", help="compile a .dt program to a Python file", description=_COMPILE)
    one.add_argument("file", metavar="FILE.dt")
    one.add_argument("-o", "--output", metavar="FILE.py", help="replaced whole or not at all; default: standard output")
    _sizes(one)
    _gpu(one)
    _param(one)
    one.set_defaults(run=_compile)

    one = commands.add_parser("explain", help="explain which schedule is used, and why", description=_EXPLAIN)
    _program_arguments(one)
    one.add_argument("--build", action="store_true", help="compile the kernels and print the shared memory they use")
    one.set_defaults(run=_explain)

    one = commands.add_parser("tune", help="find faster schedules for this GPU", description=_TUNE)
    one.add_argument("--minutes", type=_minutes, default=10.0, metavar="N", help="search time; building the kernels comes on top; default: 10")
    one.add_argument("--ops", default="all", metavar="NAME,...", help="names and spec files; default: all of the package's")
    one.add_argument("more", nargs=argparse.REMAINDER, metavar="-- OPTIONS", help="further options of tools/tune.py, behind --")
    one.set_defaults(run=_tune)

    one = commands.add_parser("doctor", help="check the installation and its settings", description=_DOCTOR)
    one.set_defaults(run=_doctor)
    return parser


def _program_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select the program."""
    parser.add_argument("what", metavar="OP_OR_FILE", help="an op, such as softmax; a .yaml spec; or a .dt program. Any other name prints the list of ops")
    _sizes(parser)
    parser.add_argument("--backward", action="store_true", help="the derived gradient instead")
    parser.add_argument("--wrt", default="", metavar="A,B", help="with respect to these inputs and scalars; default: every input (explain: those that the table has rows for)")
    _gpu(parser)
    _param(parser)


def _sizes(parser: argparse.ArgumentParser) -> None:
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--shape", type=_shape, metavar="4096x4096", help=_SHAPE)
    either.add_argument("--sizes", type=_named_sizes, metavar="x=4096,y=8192", help=_SIZES)
    parser.add_argument("--dtype", type=_dtype, default="bf16", metavar="bf16,A=fp32", help=_DTYPE)


def _gpu(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", type=_known_gpu, default="h200", metavar="NAME", help=f"{', '.join(TARGETS)}; default: h200")


def _param(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--param", type=_assignment, action="append", default=[], metavar="NAME=VALUE", help=_VALUE)


def _dtype(text: str) -> str:
    usual, *others = text.split(",")
    if usual not in show.DTYPES or not all(other.partition("=")[2] for other in others):
        raise argparse.ArgumentTypeError(f"invalid choice: {text!r} (choose from {', '.join(show.DTYPES)}; bf16,A=fp32 where an input differs)")
    return text


def _minutes(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < 1e5:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of minutes above 0")
    return found


def _known_gpu(name: str) -> str:
    try:
        return target(name).name
    except DTError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _shape(text: str) -> tuple[int, ...]:
    parts = text.replace(",", "x").split("x")
    if not all(p.isascii() and p.isdigit() and 0 < int(p[:20]) < 2**31 for p in parts):
        raise argparse.ArgumentTypeError(f"a shape is extents from 1 to 2^31 - 1 with x between them, such as 4096x4096; found {text!r}")
    return tuple(map(int, parts))


def _named_sizes(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in text.split(","):
        label, _, size = (word.strip() for word in part.partition("="))
        if not label.isidentifier() or not (size.isascii() and size.isdigit() and 0 < int(size[:20]) < 2**31):
            raise argparse.ArgumentTypeError(f"sizes are label=extent with commas between them, each from 1 to 2^31 - 1, such as x=4096,y=8192; found {part!r}")
        if label in found:
            raise argparse.ArgumentTypeError(f"the sizes name {label} twice: {found[label]} and {size}")
        found[label] = int(size)
    return found


def _assignment(text: str) -> tuple[str, object]:
    name, _, value = text.partition("=")
    if name.isidentifier() and value in ("true", "false"):
        return name, value == "true"
    for kind in (int, float):
        try:
            if name.isidentifier() and value.isascii() and math.isfinite(found := kind(value)):
                return name, found
        except (ValueError, OverflowError):
            continue
    raise argparse.ArgumentTypeError(f"a parameter is name=value with true, false or a finite number; found {text!r}")
