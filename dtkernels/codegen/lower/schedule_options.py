"""Read from a schedule the options of a kernel and of its loops, apart from tiling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from ...lang.algorithm import Algorithm
from ...lang.errors import DTError, Position
from ...lang.schedule import Approximate, Evict, Primitive, Program, Share, Sizes, host, subject
from ..ir.nest import WHOLE, Index, Let, Load, Loop, Op, Statement, TileDot, TileScan, axes_of, statements, values

#: primitive on a loop -> Triton's name for it
LOOP_OPTIONS = {"stages": "num_stages", "unroll": "loop_unroll_factor"}


@dataclass(frozen=True)
class Split:
    """A split of the reduction over ``label`` into ``parts`` programs, or into one for each ``block`` of it."""

    label: str
    parts: int = 0
    at: Position | None = None
    block: int = 0

    def refuse(self, found: str, allowed: str) -> DTError:
        """Return the error for a split that is not possible."""
        return DTError(str(self), found=found, allowed=allowed, at=self.at)

    def __str__(self) -> str:
        return f"block({self.label}:{self.block})" if self.block else f"split({self.label}:{self.parts})"


class LaunchFields(TypedDict):
    """The fields of Kernel that come from the schedule alone."""

    num_warps: int
    num_stages: int
    persistent: bool
    ping_pong: bool
    options: tuple[tuple[str, int], ...]
    block_stages: int
    approximate: tuple[str, ...]
    constants: tuple[str, ...]


class BufferFields(TypedDict):
    """The fields of Kernel that say how it accesses its buffers."""

    evict: tuple[tuple[str, str], ...]
    descriptors: tuple[str, ...]
    aligned: tuple[str, ...]
    aligned_reads: tuple[str, ...]


class KernelOptions:
    """Options that a schedule sets on the kernel of ``root``.

    ===============================  ==========================================  ====================================================
    primitive                        before                                      after
    ===============================  ==========================================  ====================================================
    ``f.stages(k:3)``                ``for k_start in range(0, size_k, T):``     ``for k_start in tl.range(0, size_k, T, num_stages=3):``
    ``f.stages(x:3)``, ``x`` blocks  ``for tile_id in tl.range(...):``           ``for tile_id in tl.range(..., num_stages=3):``, if persistent
    ``f.stage(A)``                   reads ``A`` as the caller laid it out       reads a copy with aligned rows, made by a kernel: stage_aligned_copies.py
    ``f.stage(g)``, ``g`` a Func     rows of a buffer between kernels lie close  its rows start at multiples of 64, as by ``g.align()``
    ``f.approximate(tanh)``          ``tanh(x)``, exact to float32               the GPU's instruction, exact to 11 bits: for 16-bit results
    ``f.approximate(rdot)``          float32 products in float32                 as three products in TF32 each, where torch's setting is float32
    the same, of float8 products     added to float32 every 128 terms            added up in the matrix units: about 14 bits on compute capability 9.0
    ``f.approximate(exp:1/4)``       ``exp2(x)``                                 the same, of every 4 one by multiply-adds: exp2_emulation.py
    ``f.unroll(k:2)``                ``for k_start in range(0, size_k, T):``     ``for k_start in tl.range(0, size_k, T, loop_unroll_factor=2):``
    ``f.unroll(x:4, k:8)``,          four elements of a block in one tile,       each by itself, and a loop that loads what the windows of all
    ``x`` in blocks of 4             and all of ``A[x + k]`` for each            share once: held_windows.py
    ``f.evict(A:first)``             ``tl.load(A_ptr + ...)``                    ``tl.load(A_ptr + ..., eviction_policy="evict_first")``
    ``f.evict(A:reread)``            ``tl.load(A_ptr + ...)`` in several loops   ``..., eviction_policy="evict_last")``, in the last one "evict_first"
    ``f.specialize(y)``              ``size_y``, passed at run time              ``size_y: tl.constexpr``, a kernel for each value
    ``f.two_tiles(d)``, ``d`` whole  one tile, 128 for 96 elements               64 and 32: tile_parts.py
    ``f.maxnreg(168)``               ``f_kernel[grid](...)``                     ``f_kernel[grid](..., maxnreg=168)``, on NVIDIA GPUs
    ``f.specialize_warps(k)``        ``tl.range(0, size_k, T)``                  ``tl.range(..., warp_specialize=True)``, in the form with descriptors
    ``f.cluster(2)``                 ``f_kernel[grid](...)``                     ``f_kernel[grid](..., num_ctas=2)``, refused at run time before Triton 3.8
    ``f.descriptor(A, f)``           loads and stores by pointers                through descriptors where they can: tensor_descriptors.py
    ``f.split(k:4)``                 one program a block                         four, and a kernel that merges: split_k.py
    ``f.block(y:256)``, summed y     the same                                    one for each block of ``y``, and a kernel that merges: split_k_blocks.py
    ``g.store()``                    a Func ``g`` fused into one kernel and      the kernel it is fused into writes ``g``, others read it
                                     read by another is computed in both
    ``g.parts_at(f, n)``             a kernel for ``g`` and one for ``f`` read   that of ``f`` makes parts of ``g`` too, that of ``g`` adds them up: partial_sums.py
                                     the same
    ``f.accumulate_at(g, m)``        a kernel for ``f`` and one for ``g`` make    that of ``g`` adds to the sum of ``f`` in memory: accumulated_sums.py
                                     the same terms
    ``f.tail(x:64, y:128)``          the last wave of blocks like the others     its blocks cut finer, by a kernel of its own: tail_wave.py
    ``f.stream(k:4)``                the last wave adds up whole sums            four programs a block, and a kernel that merges: tail_wave.py
    ``f.persistent()``               one program a block                         ``for tile_id in tl.range(program, blocks, programs):``
    ``f.ping_pong()``                consumers share the rows of a block         each of two consumers has blocks of its own: while one stores, the
                                                                                 other multiplies; in the Gluon backend
    ===============================  ==========================================  ====================================================

    ``specialize_warps`` takes 4 warps in Triton's text, and does nothing there in a loop that a mask cuts into several
    (loop_partition.py), on which Triton fails; the Gluon backend, where it takes the nest (backend_select.py), makes a consumer of every 4.
    """  # noqa: E501 (a table)

    def __init__(self, program: Program, root: str):
        self.algorithm: Algorithm = program.algorithm  # type: ignore[assignment]
        self.schedule = program.schedule
        self.fused = self.schedule.fused()
        self.root = root
        self.members = (root, *(f for f in self.fused if f in self.algorithm and host(f, self.fused) == root))

    def loop_options(self, func: str, label: str) -> tuple[tuple[str, int | bool], ...]:
        """Return the options of the loop over ``label`` of ``func``: set on it, on its consumers, or on a Func fused there."""
        asked = [func]
        while asked[-1] != self.root and asked[-1] in self.fused:
            asked.append(self.fused[asked[-1]][0])
        asked += [g for g, place in self.fused.items() if place == (func, label)]
        found: dict[str, int | bool] = {}
        for primitive, option in LOOP_OPTIONS.items():
            sizes = [s[label] for f in asked if label in (s := self.schedule.sizes(f, primitive))]
            found |= {option: sizes[0]} if sizes else {}
        if any(label in self.schedule.names(f, "specialize_warps") for f in asked):
            found["warp_specialize"] = True
        return tuple(found.items())

    @property
    def warps(self) -> int:
        """Return the warps of a program."""
        return self.schedule.number(self.root, "num_warps") or 4

    def launch_fields(self) -> LaunchFields:
        """Return the fields of Kernel that come from the schedule alone."""
        number = self.schedule.number
        return {
            "num_warps": self.warps,
            "num_stages": number(self.root, "num_stages") or 3,
            "persistent": bool(self.schedule.of(self.root, "persistent")),
            "ping_pong": bool(self.schedule.of(self.root, "ping_pong")),
            "options": tuple(
                (name, value)
                for name, value in (("maxnreg", number(self.root, "maxnreg")), ("cluster", number(self.root, "cluster")))
                if value and (name, value) != ("cluster", 1)
            ),
            "block_stages": max(self._block_stages(), default=0),
            "approximate": tuple(dict.fromkeys(f for m in self.members for f in self.schedule.names(m, "approximate"))),
            "constants": tuple(dict.fromkeys(label for m in self.members for label in self.schedule.names(m, "specialize"))),
        }

    def buffer_fields(self, reads: tuple[str, ...], writes: tuple[str, ...]) -> BufferFields:
        """Return the fields of Kernel that say how it accesses its buffers."""
        evict = self.evict()
        return {
            "evict": tuple((t, evict[t]) for t in reads if t in evict),
            "descriptors": tuple(t for t in self.descriptors() if t in reads + writes),
            "aligned": tuple(w for w in writes if w in self.algorithm and self.schedule.of(w, "align")),
            "aligned_reads": tuple(t for t in reads if t in self.algorithm and self.schedule.of(t, "align")),
        }

    def evict(self) -> dict[str, str]:
        """Return the eviction policy that the schedule sets for each tensor."""
        return {a.name: a.choice for m in self.members for p in self.schedule.of(m, "evict", Evict) for a in p.policies}

    def _block_stages(self) -> list[int]:
        """Return the stages of the loop over blocks in a persistent kernel: those set on labels with blocks."""
        blocked = self.schedule.sizes(self.root, "block")
        stages = self.schedule.sizes(self.root, "stages") if self.schedule.of(self.root, "persistent") else {}
        return [
            size
            for label, size in stages.items()
            if label in blocked and self.schedule.sizes(self.root, "tensorize").get(label, 1) == blocked[label]
        ]

    def where(self, primitive: str) -> Position | None:
        """Return the position in the schedule where ``primitive`` is applied to this kernel."""
        return next((p.pos for m in self.members for p in self.schedule.of(m, primitive)), None)

    def descriptors(self) -> tuple[str, ...]:
        """Return the tensors that the schedule accesses through descriptors."""
        return tuple(dict.fromkeys(t for m in self.members for t in self.schedule.names(m, "descriptor")))

    def two_tiles(self) -> tuple[str, ...]:
        """Return the labels of which two tiles hold the whole extent."""
        return tuple(dict.fromkeys(label for m in self.members for label in self.schedule.names(m, "two_tiles")))

    def unrolled_elements(self) -> dict[str, int]:
        """Return the labels of the result whose blocks are unrolled, element by element, with the sizes of these blocks."""
        blocks, tiles, asked = (self.schedule.sizes(self.root, name) for name in ("block", "tensorize", "unroll"))
        return {label: size for label, size in asked.items() if size == blocks.get(label) == tiles.get(label)}

    def exponentials(self) -> tuple[int, int] | None:
        """Return the share of this kernel's exponentials that polynomials emulate, as (part, whole)."""
        return next((share for m in self.members if (share := self.schedule.share(m))), None)

    def split(self) -> Split | None:
        """Return the reduction of this kernel that is split over programs, if any."""
        splits = [p for p in self.schedule.primitives if isinstance(p, Sizes) and p.name == "split"]
        asked = [(a, p) for p in splits if host(p.func, self.fused) == self.root for a in p.sizes]
        if len({a.label for a, _ in asked}) > 1:
            found = " and ".join(dict.fromkeys(a.label for a, _ in asked))
            raise DTError("one label of a kernel is split", found=found, allowed=asked[0][0].label, at=asked[-1][1].pos)
        blocks = self._split_into_blocks()
        if blocks and asked:
            raise blocks.refuse(f"{blocks} and {asked[-1][1]}".rstrip(";"), "one of them")
        return Split(asked[-1][0].label, asked[-1][0].size, asked[-1][1].pos) if asked else blocks

    def _split_into_blocks(self) -> Split | None:
        """Return the reduction whose label ``block`` cuts, if any: each block makes a part of its sums."""
        own = {*self.algorithm[self.root].labels, *(name for name, parts in self.schedule.merged(self.root).items() if parts[0] in self.algorithm[self.root].labels)}
        asked = [(a, p) for p in self.schedule.of(self.root, "block", Sizes) for a in p.sizes if a.label not in own]
        if len({a.label for a, _ in asked}) > 1:
            raise DTError("one label of a kernel's sums is cut into blocks", found=", ".join(str(a) for a, _ in asked), allowed=str(asked[0][0]), at=asked[-1][1].pos)
        return Split(asked[-1][0].label, at=asked[-1][1].pos, block=asked[-1][0].size) if asked else None

    def check(self, body: tuple[Statement, ...], touched: frozenset[str]) -> None:
        """Raise DTError for an option on a loop or a tensor that this kernel does not have."""
        loads = frozenset(s.value.buffer for s in statements(body) if isinstance(s, Let) and isinstance(s.value, Load))
        for p in (p for m in self.members for name in ("descriptor", "evict") for p in self.schedule.of(m, name)):
            there, what = (loads, "that the kernel reads") if p.name == "evict" else (touched, "of the kernel")
            for tensor in map(subject, p.args):
                if tensor not in there:
                    raise DTError(f"{p.name} names a tensor {what}", found=tensor, allowed=", ".join(sorted(there)), at=p.pos)
        self._check_two_tiles(body)
        self._check_warps()
        looped = {s.axis.label for s in statements(body) if isinstance(s, Loop)}
        split = self.split()
        if split and not any(isinstance(s, Loop) and s.reduces and s.axis.label == split.label for s in statements(body)):
            raise split.refuse("no loop that reduces over it", f"a reduction over {split.label} in tiles: tensorize({split.label}:...)")
        if self._block_stages():
            looped |= set(self.schedule.sizes(self.root, "block"))
        looped |= self.unrolled_elements().keys()
        for p in self._of_loops():
            for label in map(subject, p.args):
                if label not in looped:
                    raise DTError(
                        f"{p.name} names a loop",
                        found=f"{label}, which is done at once",
                        allowed=", ".join(sorted(looped)) or "none: nothing loops",
                        at=p.pos,
                    )

    def _check_two_tiles(self, body: tuple[Statement, ...]) -> None:
        """Raise DTError for two tiles of a label that no tile holds whole, or that is scanned."""
        scanned = {n.axis for v in values(body) for n in v.walk() if isinstance(n, TileScan)}
        held = dict.fromkeys(s.axis.label for s in statements(body) if isinstance(s, Index) and s.axis.tile == WHOLE and s.axis not in scanned)
        for label in self.two_tiles():
            if label not in held:
                raise DTError("two_tiles names a label whose whole extent is one tile", found=label, allowed=", ".join(held) or "none here", at=self.where("two_tiles"))

    def check_approximate(self, body: tuple[Statement, ...]) -> None:
        """Raise DTError for an approximation of a function that the kernel does not compute on tiles, since it would have no effect."""
        nodes = [n for v in values(body) for n in v.walk()]
        there = {n.fn for n in nodes if isinstance(n, Op) and axes_of(n)} | {"rdot" for n in nodes if isinstance(n, TileDot)}
        for p in (p for m in self.members for p in self.schedule.of(m, "approximate", Approximate)):
            for a in p.functions:
                of = ("exp", "exp2") if isinstance(a, Share) else (a,)
                if not there.intersection(of):
                    found = f"no {of[0]} of a tile in the kernel of {self.root}"
                    raise DTError(f"approximate({a}) is of what the kernel computes, after the algebra", found=found, allowed="a kernel with one", at=p.pos)

    def _check_warps(self) -> None:
        """Raise DTError unless the kernel has the 4 warps and descriptor loads that Triton's warp specialization needs; it would silently do nothing."""
        at = self.where("specialize_warps")
        if (pos := self.where("ping_pong")) is not None and (at is None or self.warps != 8 or not self.schedule.of(self.root, "persistent")):
            allowed = f"{self.root}.specialize_warps(...), {self.root}.persistent(), {self.root}.num_warps(8) beside it"
            raise DTError("ping_pong needs two warpgroups that stay for several blocks", found=f"{self.root} without them", allowed=allowed, at=pos)
        if at is None:
            return
        if (warps := self.warps) not in (4, 8, 16):
            raise DTError(
                "specialize_warps needs whole warpgroups", found=f"num_warps({warps})", allowed=f"{self.root}.num_warps(4), 8 or 16", at=at
            )
        if not set(self.descriptors()) - {self.root}:
            raise DTError("specialize_warps needs loads through descriptors", found="none", allowed=f"{self.root}.descriptor(...)", at=at)
        if self.schedule.of(self.root, "cluster"):
            raise DTError("a kernel has clusters or specialized warps", found="both", allowed="one of them", at=at)
        labels = {label for m in self.members for label in self.schedule.names(m, "specialize_warps")}
        if unrolled := labels & {label for m in self.members for label in self.schedule.sizes(m, "unroll")}:
            raise DTError(
                "a loop is unrolled or has specialized warps", found=f"both for {sorted(unrolled)[0]}", allowed="one of them", at=at
            )

    def _of_loops(self) -> list[Primitive]:
        return [p for p in self.schedule.primitives if p.name in (*LOOP_OPTIONS, "specialize_warps") and host(p.func, self.fused) == self.root]
