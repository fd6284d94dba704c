"""Read what a schedule chooses for each kernel from its text, without parsing it as a program."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

_STATEMENT = re.compile(r"(\w+)\.(\w+)\(([^)]*)\)")
_SIZED = re.compile(r"(\w+'*)\s*:\s*(\d+)")
Sizes = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class KernelConfig:
    """What a schedule chooses for the kernel of ``func``. A tile of 0 holds a label whole."""

    func: str
    blocks: Sizes = ()
    tiles: Sizes = ()
    split: Sizes = ()
    stages_of: Sizes = ()  #: pipeline depth of single loops
    order: tuple[tuple[str, int], ...] = ()  #: the labels of ``map``, each with the blocks of a group, 0 where it is not grouped
    persistent: bool = False
    descriptors: tuple[str, ...] = ()
    staged: tuple[str, ...] = ()  #: tensors that are copied to aligned rows first
    aligned: bool = False  #: its rows are written aligned
    specialized: str = ""  #: the label whose loop runs by specialised warps
    tail: bool = False  #: the last wave runs in smaller blocks
    approximate: bool = False
    warps: int = 4
    stages: int = 3
    fused: tuple[tuple[str, str], ...] = ()  #: Funcs computed in this kernel, each with the label of its loop
    stored: tuple[str, ...] = ()  #: Funcs that are written
    parted: tuple[str, ...] = ()  #: Funcs of which each program writes a part of a sum


_NUMBERS = {"num_warps": "warps", "num_stages": "stages"}
_NAMES = {"descriptor": "descriptors", "stage": "staged"}
_SIZES = {"block": "blocks", "tensorize": "tiles", "split": "split", "stages": "stages_of"}


@lru_cache(maxsize=4096)
def read_kernels(schedule: str) -> tuple[KernelConfig, ...]:
    """Return the kernels that a schedule has statements on, in their order in the text."""
    said: dict[str, dict] = {}
    hosts: dict[str, tuple[str, str]] = {}
    stored, parted = [], []
    for func, name, inside in _STATEMENT.findall(schedule):
        if name in ("fuse_at", "parts_at"):
            host, _, loop = inside.partition(",")
            hosts[func] = host.strip(), loop.strip()
            if name == "parts_at":
                parted.append(func)
            continue
        if name in ("store", "compile", "compile_to_kernel"):
            stored.append(func)
        own = said.setdefault(func, {})
        if name in _SIZES:
            own[_SIZES[name]] = (*own.get(_SIZES[name], ()), *[(label, int(size)) for label, size in _SIZED.findall(inside)])
        elif name in _NUMBERS:
            own[_NUMBERS[name]] = int(inside)
        elif name == "map":
            own["order"] = tuple([_placed(part) for part in inside.split(",")])
        elif name in ("descriptor", "stage"):
            own[_NAMES[name]] = (*own.get(_NAMES[name], ()), *[part.strip() for part in inside.split(",")])
        elif name == "align":
            own["aligned"] = True
        elif name == "specialize_warps":
            own["specialized"] = inside.strip()
        elif name in ("persistent", "tail", "approximate"):
            own[name] = True
    inner: dict[str, list[tuple[str, str]]] = {}
    for func, (host, loop) in hosts.items():
        root = host
        for _ in hosts:
            root = hosts[root][0] if root in hosts else root
        inner.setdefault(root, []).append((func, loop if host == root else f"{host}.{loop}"))
        for name, sizes in said.pop(func, {}).items():  # a loop's tile may be said of a fused Func
            if name in ("tiles", "stages_of", "split"):
                own = said.setdefault(root, {})
                own[name] = (*own.get(name, ()), *sizes)
    for root in inner:
        said.setdefault(root, {})
    kept, parts = (*stored, *parted), tuple(parted)
    return tuple([KernelConfig(func, fused=tuple(inner.get(func, ())), stored=kept, parted=parts, **own) for func, own in said.items()])


def _placed(part: str) -> tuple[str, int]:
    label, _, group = part.strip().partition(":")
    inner, _, size = group.partition("/")
    return label, int(size) if size else 0


@lru_cache(maxsize=4096)
def tiled_labels(schedule: str) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return (labels with tiles of more than one element or held whole, labels held whole)."""
    sized = [found for k in read_kernels(schedule) for found in (*k.blocks, *k.tiles)]
    return frozenset(label for label, size in sized if size != 1), tuple(dict.fromkeys(label for label, size in sized if size == 0))
