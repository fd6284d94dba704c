"""Check a schedule against its algorithm, independently of the GPU."""

from __future__ import annotations

from . import expr as ex
from .algorithm import Algorithm, operand_names, with_operands
from .errors import DTError
from .parts.apart_products import apart_product_names
from .parts.batched_products import batched_product_names
from .parts.joined_terms import joined_term_names
from .parts.picked_terms import picked_term_names
from .parts.rounded_copies import rounded_copy_names
from .parts.shared_sums import shared_sum_names
from .schedule import (
    APPROXIMATIONS,
    EVICTION_POLICIES,
    PRIMITIVES,
    SHARES,
    Approximate,
    Argument,
    Evict,
    FuseAt,
    Grouped,
    Map,
    Named,
    Number,
    Primitive,
    Schedule,
    Sized,
    Sizes,
    Stage,
    host,
    subject,
)

MOST_ELEMENTS = 2**20  #: per tensor, in Triton
MOST_PARTS = 3  #: powers of two that add up to a tile
MOST_UNROLLED = 64  #: unroll factor; compilers take minutes for larger unrolled dots
_OF_KERNELS = ("block", "map", "num_warps", "num_stages", "persistent", "ping_pong", "maxnreg", "cluster", "tail", "stream")
_LOOP_PRIMITIVES = ("merge", "tensorize", "stages", "unroll", "specialize_warps", "reorder", "specialize", "two_tiles", "split", "tail", "stream")


def check_schedule(schedule: Schedule, algorithm: Algorithm) -> None:
    """Raise DTError for the first statement that does not fit the algorithm."""
    own, algorithm = algorithm, with_operands(algorithm, schedule.subjects())
    for p in schedule.primitives:
        if p.func not in algorithm:
            named = (operand_names, rounded_copy_names, apart_product_names, shared_sum_names, picked_term_names, joined_term_names, batched_product_names)
            allowed = ", ".join((*own.funcs, *(name for names in named for name in names(own))))  # type: ignore[operator]
            raise DTError("a schedule is on a Func of the program", found=repr(p.func), allowed=allowed, at=p.pos)
        if p.name.startswith("compile") and p.func not in own:
            raise DTError(f"{p.name} is of a Func of the program", found=f"{p.func}, an operand or a sum that only has a name", allowed=", ".join(own.funcs), at=p.pos)
        _check_form(p)
        _check_names(p, algorithm, schedule)
    _check_tiles(schedule)
    _check_fusion(schedule, algorithm)
    _check_agreement(schedule)
    _check_kernels(schedule)


def check_effects(schedule: Schedule) -> None:
    """Raise DTError for the first statement without effect.

    For schedules that users write. Tuners and tables vary statements one by one, and may leave some without effect.
    """
    fused = schedule.fused()
    for p in schedule.primitives:
        if p.name == "store" and p.func not in fused:
            raise DTError("store is of a Func that is fused into another kernel", found=f"{p.func}, which has a kernel of its own",
                          allowed=f"{p.func}.fuse_at(...), or no store: its own kernel writes it", at=p.pos)  # fmt: skip
        if isinstance(p, Map):
            blocks = schedule.sizes(p.func, "block")
            inner = {a.inner for a in p.groups}
            for label in map(subject, p.order):
                if label not in blocks and label not in inner:
                    raise DTError("map walks the blocks of labels", found=f"{label}, which is not cut into blocks",
                                  allowed=", ".join(blocks) or f"{p.func}.block({label}:...)", at=p.pos)  # fmt: skip


def check_merged(schedule: Schedule, algorithm: Algorithm) -> None:
    """Raise DTError for a tile or block along a label that ``merge`` made a part of another, and that no other sum goes along. For schedules that users write."""
    for p in (p for p in schedule.primitives if p.name in ("block", "tensorize")):
        runs = schedule.merged(p.func)
        merged = {x: label for label, parts in runs.items() for x in parts}
        named = [a.label for a in p.args if isinstance(a, Sized) and a.label in merged]
        sums = [n.labels for f in (p.func, *schedule.fused()) if named and f in algorithm for n in ex.reductions(algorithm[f].expr)]
        alone = {x for over in sums for x in over if x in merged and not {*runs[merged[x]]} <= {*over}} if p.name == "tensorize" else set()
        if part := next((x for x in named if x not in alone), None):
            raise DTError(f"{p.name} names a label that {p.func} has a loop or blocks along", found=f"{part}, which is a part of {merged[part]}",
                          allowed=merged[part], at=p.pos)  # fmt: skip


def _check_form(p: Primitive) -> None:
    form = PRIMITIVES[p.name]
    if not p.fits(p.args):
        raise DTError(
            f"arguments of {p.name}",
            found=f"({', '.join(map(str, p.args))})",
            allowed=" or ".join(f"({one.rstrip('*')}{', ...' if one.endswith('*') else ''})" for one in _forms(p.name, form)),
            at=p.pos,
        )
    for a in p.args:
        _check_size(p, a)
        if isinstance(p, Approximate) and str(a) not in (allowed := (*APPROXIMATIONS, *(f"exp:{part}/{whole}" for part, whole in SHARES))):
            raise DTError("a function to approximate", found=str(a), allowed=", ".join(allowed), at=p.pos)
        if isinstance(p, Evict) and isinstance(a, Named) and a.choice not in EVICTION_POLICIES:
            raise DTError("an eviction policy", found=str(a), allowed=", ".join(EVICTION_POLICIES), at=p.pos)
    if isinstance(p, Number):
        _check_number(p)


def _forms(name: str, form: str) -> list[str]:
    """Return the forms that the arguments of a primitive may have as a whole."""
    return form.split(" or ") if name == "accumulate_at" else [form]


def _check_size(p: Primitive, a: Argument) -> None:
    size = a.size if isinstance(a, (Sized, Grouped)) else a if isinstance(a, int) else 1
    if size < (0 if p.name == "tensorize" else 1):
        raise DTError(
            f"a size in {p.name}",
            found=str(a),
            allowed="1 or more" + (", or 0 for the whole extent" if p.name == "tensorize" else ""),
            at=p.pos,
        )
    most = {"tensorize": MOST_ELEMENTS, "tail": MOST_ELEMENTS, "unroll": MOST_UNROLLED}.get(p.name, 2**31 - 1)
    if size > most:
        raise DTError(f"a size in {p.name}", found=str(a), allowed=f"at most {most}", at=p.pos)
    if p.name == "tail" and size & (size - 1):
        raise _no_power_of_two(p, a, size)


def _no_power_of_two(p: Primitive, a: Argument, size: int) -> DTError:
    label = subject(a)
    allowed = f"{label}:{1 << (size.bit_length() - 1)} or {label}:{1 << size.bit_length()}"
    return DTError("a tile is a power of two", found=str(a), allowed=allowed, at=p.pos)


def _check_tiles(schedule: Schedule) -> None:
    """Check that a tile that is no power of two is all of a block, in few parts that are."""
    for p in (p for p in schedule.primitives if p.name == "tensorize" and isinstance(p, Sizes)):
        blocks = schedule.sizes(p.func, "block")
        for a in p.sizes:
            if a.size & (a.size - 1) and blocks.get(a.label) != a.size:
                raise _no_power_of_two(p, a, a.size)
            if a.size.bit_count() > MOST_PARTS:
                raise DTError(f"a tile is a sum of at most {MOST_PARTS} powers of two", found=str(a),
                              allowed=f"{a.label}:{1 << (a.size.bit_length() - 1)} or {a.label}:{1 << a.size.bit_length()}", at=p.pos)  # fmt: skip


def _check_number(p: Number) -> None:
    n = p.number
    if p.name == "num_warps" and (n & (n - 1) or n > 32):
        raise DTError("a number of warps", found=str(n), allowed="1, 2, 4, 8, 16 or 32", at=p.pos)
    if p.name == "maxnreg" and not 24 <= n <= 255:
        raise DTError("a number of registers", found=str(n), allowed="24 to 255, which a thread can have", at=p.pos)
    if p.name == "cluster" and (n & (n - 1) or n > 16):
        raise DTError("a number of blocks in a cluster", found=str(n), allowed="1, 2, 4, 8 or 16", at=p.pos)


def reduction_labels(algorithm: Algorithm, func: str) -> tuple[str, ...]:
    """Return the labels reduced in the definition of ``func`` itself, in source order."""
    return tuple(dict.fromkeys([label for n in ex.reductions(algorithm[func].expr) for label in n.labels]))


def labels_in_kernel(func: str, algorithm: Algorithm, schedule: Schedule) -> tuple[str, ...]:
    """Return the labels that loops may run over in the kernel of ``func``.

    These are its own labels and those of Funcs fused into it. Funcs that are fused elsewhere and not stored are recomputed here, so that
    their labels count too.
    """
    fused, members = schedule.fused(), [func]
    kept = schedule.written()
    again = {f for f in fused if f in algorithm and f not in kept}
    for member in members:
        members += [g for g, (consumer, _) in fused.items() if consumer == member and g in algorithm and g not in members]
        members += [g for g in dict.fromkeys(a.tensor for a in ex.accesses(algorithm[member].expr)) if g in again and g not in members]
    found = [label for m in members for label in (*algorithm[m].labels, *reduction_labels(algorithm, m), *schedule.merged(m))]
    return tuple(dict.fromkeys(found))


def _check_names(p: Primitive, algorithm: Algorithm, schedule: Schedule) -> None:
    own, merged = algorithm[p.func].labels, schedule.merged(p.func)
    within = labels_in_kernel(p.func, algorithm, schedule)
    inner = tuple(a.inner for a in p.groups) if isinstance(p, Map) else ()
    own += tuple(name for name, parts in merged.items() if set(parts) <= set(own))
    parted = tuple(label for label in within if label not in own)  # a block of a sum makes a part of it
    cut = own + tuple(label for label in parted if label in schedule.sizes(p.func, "block"))
    allowed = {"block": own + parted, "chunk": own, "map": cut + inner, **dict.fromkeys(_LOOP_PRIMITIVES, within)}
    for named in map(subject, p.args[1:] if p.name == "merge" else p.args):
        if p.name in allowed and named not in allowed[p.name]:
            raise DTError(f"{p.name} names a label of {p.func}", found=repr(named), allowed=", ".join(allowed[p.name]) or "none", at=p.pos)
        if p.name in ("descriptor", "evict", "stage") and named not in algorithm.inputs + algorithm.funcs:
            raise DTError(f"{p.name} names a tensor", found=repr(named), allowed=", ".join(algorithm.inputs + algorithm.funcs), at=p.pos)
    if isinstance(p, Stage):
        for _, label in p.copies:
            if label and label not in within:
                raise DTError(f"stage names a label of {p.func}", found=repr(label), allowed=", ".join(within), at=p.pos)
    if isinstance(p, FuseAt) and p.name != "fuse_at":
        if p.consumer not in algorithm:
            raise DTError(f"{p.name} names a Func", found=repr(p.consumer), allowed=", ".join(algorithm.funcs), at=p.pos)
        loops = algorithm[p.consumer].labels + (reduction_labels(algorithm, p.consumer) if p.name == "accumulate_at" else ())
        if p.label not in loops:
            what = "loop" if p.name == "accumulate_at" else "label"
            raise DTError(f"{p.name} names a {what} of {p.consumer}", found=repr(p.label), allowed=", ".join(loops) or "none", at=p.pos)
    if isinstance(p, Map):
        _check_map(p, inner, own)


def _check_map(p: Map, inner: tuple[str, ...], own: tuple[str, ...]) -> None:
    labels = [subject(a) for a in p.order]
    for name in inner:
        if name in own or inner.count(name) > 1:
            found = f"{name!r}, {'a label' if name in own else 'twice'}"
            raise DTError("map names the inside of each group anew", found=found, allowed="a name of its own", at=p.pos)
    for name in labels:
        if labels.count(name) > 1:
            raise DTError("map names a label once", found=f"{name!r} twice", at=p.pos)
    for name in inner:
        if name not in labels:
            raise DTError("map places the inside of each group", found=f"{name!r} has no place", allowed=f"map(..., {name})", at=p.pos)
        group = next(i for i, a in enumerate(p.order) if isinstance(a, Grouped) and a.inner == name)
        if labels.index(name) < group:
            raise DTError(
                "map walks the inside of a group after the group",
                found=f"{name!r} before {p.order[group]}",
                allowed=f"{p.order[group]}, ..., {name}",
                at=p.pos,
            )


def _check_fusion(schedule: Schedule, algorithm: Algorithm) -> None:
    fused = schedule.fused()
    for p in schedule.primitives:
        if not isinstance(p, FuseAt) or p.name != "fuse_at":
            continue
        consumer, label = p.consumer, p.label
        if consumer not in algorithm:
            raise DTError("fuse_at names a Func", found=repr(consumer), allowed=", ".join(algorithm.funcs), at=p.pos)
        loops = (*algorithm[consumer].labels, *reduction_labels(algorithm, consumer))
        if label not in loops:
            raise DTError(f"fuse_at names a loop of {consumer}", found=repr(label), allowed=", ".join(loops), at=p.pos)
        chain, at = [p.func], consumer
        while at in fused and at not in chain:
            chain.append(at)
            at = fused[at][0]
        if at in chain:
            raise DTError("fuse_at does not go round in a circle", found=" -> ".join([*chain, at]), at=p.pos)


def _check_agreement(schedule: Schedule) -> None:
    """Check that statements agree: one setting per label, tensor or function, or per Func for a primitive with one argument or an order."""
    said: dict[tuple[str, str, str], tuple[str, Primitive]] = {}
    for p in schedule.primitives:
        whole = p.name in ("map", "reorder", "fuse_at", "accumulate_at") or isinstance(p, Number)
        parts = {"": ", ".join(map(str, p.args))} if whole else {}
        if p.name == "reorder" and len(set(p.args)) < len(p.args):
            raise DTError("reorder names a label once", found=str(p).rstrip(";"), at=p.pos)
        for a in () if whole else p.args:
            thing = subject(a)
            if parts.setdefault(thing, str(a)) != str(a):
                raise DTError(f"{p.name} says one thing of {thing}", found=f"{parts[thing]} and {a}", allowed="one of them", at=p.pos)
        for thing, value in parts.items():
            before, first = said.setdefault((p.func, p.name, thing), (value, p))
            if before != value:
                found = f"{first} {p}".replace(";", ",", 1).rstrip(";")
                raise DTError(f"a schedule says {p.name} of {thing or p.func} once", found=found, allowed="one of them", at=p.pos)


def _check_kernels(schedule: Schedule) -> None:
    """Check that primitives of a kernel name the Func that has the kernel, not a Func fused into it."""
    fused = schedule.fused()
    for p in schedule.primitives:
        if p.name in _OF_KERNELS and p.func in fused:
            where = host(p.func, fused)
            raise DTError(f"{p.name} is of a Func with a kernel of its own", found=f"{p.func}, which is computed in that of {where}",
                          allowed=f"{where}.{p.name}(...)", at=p.pos)  # fmt: skip
