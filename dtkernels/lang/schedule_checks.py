"""Check a schedule against its algorithm, independently of the GPU."""

from __future__ import annotations

from . import expr as ex
from .algorithm import Algorithm
from .errors import DTError
from .schedule import APPROXIMATIONS, EVICTION_POLICIES, PRIMITIVES, SHARES, Grouped, Named, Primitive, Schedule, Share, Sized, host

MOST_ELEMENTS = 2**20  #: per tensor, in Triton
MOST_UNROLLED = 64  #: unroll factor; compilers take minutes for larger unrolled dots
_OF_KERNELS = ("block", "map", "num_warps", "num_stages", "persistent", "maxnreg", "cluster", "tail")
_LOOP_PRIMITIVES = ("tensorize", "stages", "unroll", "specialize_warps", "reorder", "specialize", "split", "tail")


def check_schedule(schedule: Schedule, algorithm: Algorithm) -> None:
    """Raise DTError for the first statement that does not fit the algorithm."""
    for p in schedule.primitives:
        if p.func not in algorithm:
            raise DTError("a schedule is on a Func of the program", found=repr(p.func), allowed=", ".join(algorithm.funcs), at=p.pos)
        _check_form(p)
        _check_names(p, algorithm, schedule)
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
        if p.name == "map":
            blocks = schedule.sizes(p.func, "block")
            inner = {a.inner for a in p.args if isinstance(a, Grouped)}
            for label in (a.label if isinstance(a, Grouped) else a for a in p.args):
                if label not in blocks and label not in inner:
                    raise DTError("map walks the blocks of labels", found=f"{label}, which is not cut into blocks",
                                  allowed=", ".join(blocks) or f"{p.func}.block({label}:...)", at=p.pos)  # fmt: skip


def _forms(p: Primitive) -> tuple[type, ...]:
    return {
        "label:size*": (Sized,), "label or label:inner/size*": (str, Grouped), "func, label": (str,), "number": (int,),
        "tensor*": (str,), "function or function:part/whole*": (str, Share), "label": (str,), "label*": (str,), "tensor:policy*": (Named,), "": (),
    }[PRIMITIVES[p.name]]  # fmt: skip


def _check_form(p: Primitive) -> None:
    form = PRIMITIVES[p.name]
    counts = {"": (0, 0), "number": (1, 1), "label": (1, 1), "func, label": (2, 2)}.get(form, (1, 99))
    if not counts[0] <= len(p.args) <= counts[1] or not all(isinstance(a, _forms(p)) for a in p.args):
        raise DTError(
            f"arguments of {p.name}",
            found=f"({', '.join(map(str, p.args))})",
            allowed=f"({form.rstrip('*')}{', ...' if form.endswith('*') else ''})",
            at=p.pos,
        )
    for a in p.args:
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
        if p.name in ("tensorize", "tail") and size & (size - 1):
            raise DTError(
                "a tile is a power of two",
                found=str(a),
                allowed=f"{a.label}:{1 << (size.bit_length() - 1)} or {a.label}:{1 << size.bit_length()}",
                at=p.pos,
            )
        if p.name == "approximate" and str(a) not in (allowed := (*APPROXIMATIONS, *(f"exp:{part}/{whole}" for part, whole in SHARES))):
            raise DTError("a function to approximate", found=str(a), allowed=", ".join(allowed), at=p.pos)
        if p.name == "evict" and a.choice not in EVICTION_POLICIES:
            raise DTError("an eviction policy", found=str(a), allowed=", ".join(EVICTION_POLICIES), at=p.pos)
    if p.name == "num_warps" and (p.args[0] & (p.args[0] - 1) or p.args[0] > 32):
        raise DTError("a number of warps", found=str(p.args[0]), allowed="1, 2, 4, 8, 16 or 32", at=p.pos)
    if p.name == "maxnreg" and not 24 <= p.args[0] <= 255:
        raise DTError("a number of registers", found=str(p.args[0]), allowed="24 to 255, which a thread can have", at=p.pos)
    if p.name == "cluster" and (p.args[0] & (p.args[0] - 1) or p.args[0] > 16):
        raise DTError("a number of blocks in a cluster", found=str(p.args[0]), allowed="1, 2, 4, 8 or 16", at=p.pos)


def reduction_labels(algorithm: Algorithm, func: str) -> tuple[str, ...]:
    """Return the labels reduced in the definition of ``func`` itself, in source order."""
    found = [label for n in algorithm[func].expr.walk() if isinstance(n, (ex.Reduce, ex.Dot)) for label in n.labels]
    return tuple(dict.fromkeys(found))


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
    found = [label for m in members for label in (*algorithm[m].labels, *reduction_labels(algorithm, m))]
    return tuple(dict.fromkeys(found))


def _check_names(p: Primitive, algorithm: Algorithm, schedule: Schedule) -> None:
    own = algorithm[p.func].labels
    within = labels_in_kernel(p.func, algorithm, schedule)
    inner = tuple(a.inner for a in p.args if isinstance(a, Grouped))
    allowed = {"block": own, "map": own + inner, **dict.fromkeys(_LOOP_PRIMITIVES, within)}
    for a in p.args:
        label = a.label if isinstance(a, (Sized, Grouped)) else a
        if p.name in allowed and label not in allowed[p.name]:
            raise DTError(f"{p.name} names a label of {p.func}", found=repr(label), allowed=", ".join(allowed[p.name]) or "none", at=p.pos)
        tensor = a.name if isinstance(a, Named) else a
        if p.name in ("descriptor", "evict", "stage") and tensor not in algorithm.inputs + algorithm.funcs:
            raise DTError(f"{p.name} names a tensor", found=repr(tensor), allowed=", ".join(algorithm.inputs + algorithm.funcs), at=p.pos)
    if p.name == "parts_at":
        if p.args[0] not in algorithm:
            raise DTError("parts_at names a Func", found=repr(p.args[0]), allowed=", ".join(algorithm.funcs), at=p.pos)
        if p.args[1] not in algorithm[p.args[0]].labels:
            raise DTError(f"parts_at names a label of {p.args[0]}", found=repr(p.args[1]), allowed=", ".join(algorithm[p.args[0]].labels), at=p.pos)
    if p.name == "map":
        _check_map(p, [a.label if isinstance(a, Grouped) else a for a in p.args], inner, own)


def _check_map(p: Primitive, labels: list[str], inner: tuple[str, ...], own: tuple[str, ...]) -> None:
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
        group = next(i for i, a in enumerate(p.args) if isinstance(a, Grouped) and a.inner == name)
        if labels.index(name) < group:
            raise DTError(
                "map walks the inside of a group after the group",
                found=f"{name!r} before {p.args[group]}",
                allowed=f"{p.args[group]}, ..., {name}",
                at=p.pos,
            )


def _check_fusion(schedule: Schedule, algorithm: Algorithm) -> None:
    fused = schedule.fused()
    for p in schedule.primitives:
        if p.name != "fuse_at":
            continue
        consumer, label = p.args
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
        whole = p.name in ("map", "reorder", "fuse_at") or PRIMITIVES[p.name] == "number"
        parts = {"": ", ".join(map(str, p.args))} if whole else {}
        if p.name == "reorder" and len(set(p.args)) < len(p.args):
            raise DTError("reorder names a label once", found=str(p).rstrip(";"), at=p.pos)
        for a in () if whole else p.args:
            thing = getattr(a, "label", None) or getattr(a, "name", a)
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
