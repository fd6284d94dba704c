"""A schedule for any algorithm and size, by formula: fuse what can be fused, tile by what the loops do.

The formula is where tuning starts and what runs where nothing was tuned. It looks at the form of the algorithm only.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..lang import expr as ex
from ..lang.algorithm import Algorithm
from ..lang.errors import DTError
from ..lang.schedule import Grouped, Primitive, Program, Schedule, Sized
from ..lang.schedule_checks import reduction_labels
from .fit import fitted
from .lower import lower
from .target import Target

ROW_LIMIT = 65536  #: longest row held in registers, in elements
WHOLE_SIDE = 256  #: widest output side of a chained product held in one tile
WHOLE_CHAIN = 128  #: widest intermediate of a chained product held in one tile


def formula(algorithm: Algorithm, outputs: tuple[str, ...], sizes: dict[str, int], itemsize: int, target: Target) -> Schedule:
    """A legal schedule for a prepared algorithm whose labels have ``sizes`` and whose inputs take ``itemsize`` bytes an element.

    Where the estimate (resources.py) says that the GPU has no room for it, tiles are narrowed until it has.
    """
    f = _Formula(algorithm, outputs, sizes, itemsize, target)
    for fused in f.placements():
        schedule = Schedule((*fused, *(p for root in f.roots(fused) for p in f.tiles(root, fused)), *(Primitive(o, "compile") for o in outputs)))
        try:
            lower(Program(algorithm, schedule))
        except DTError:
            continue
        return fitted(Program(algorithm, schedule), sizes, itemsize, target).schedule
    raise AssertionError("unfused Funcs can always be lowered")


@dataclass
class _Formula:
    algorithm: Algorithm
    outputs: tuple[str, ...]
    sizes: dict[str, int]
    itemsize: int
    target: Target

    # -- fusion -----------------------------------------------------------------------------------------------------

    def placements(self):
        """Ways to fuse, best first: chains of reductions in one pass, in several, not at all."""
        yield self._fused(streaming=True)
        yield self._fused(streaming=False)
        yield ()

    def roots(self, fused: tuple[Primitive, ...]) -> tuple[str, ...]:
        return tuple(f for f in self.algorithm.needed_by(self.outputs) if f not in {p.func for p in fused})

    def _fused(self, streaming: bool) -> tuple[Primitive, ...]:
        joined = self._joined_outputs()
        hosts: dict[str, set[str]] = {o: {joined.get(o, (o, ""))[0]} for o in self.outputs}
        found = [Primitive(o, "fuse_at", place) for o, place in joined.items()]
        for d in reversed(self.algorithm.definitions):
            if d.name in self.outputs:
                continue
            users = [u.name for u in self.algorithm.definitions if any(a.tensor == d.name for a in ex.accesses(u.expr))]
            roots = set().union(*(hosts.get(u, {u}) for u in users))
            first = next(f for f in self.algorithm.needed_by(self.outputs) if f in roots)
            place = self._place(d.name, first, streaming) if len(roots) == 1 or self._recomputed(d.name) else None
            hosts[d.name] = roots if place else {d.name}
            if place:
                found.append(Primitive(d.name, "fuse_at", place))
        return tuple(reversed(found))

    def _joined_outputs(self) -> dict[str, tuple[str, str]]:
        """Outputs computed in the kernel of another: those that share its reduction, and those of which it computes all parts."""
        found: dict[str, tuple[str, str]] = {}
        for i, o in enumerate(self.outputs):
            for p in self.outputs[:i]:
                if p not in found and o not in found and (label := self._joins(o, p)):
                    found[o] = (p, label)
        return found

    def _joins(self, output: str, root: str) -> str | None:
        own, outer = self.algorithm[output].labels, self.algorithm[root].labels
        reduced, inner = reduction_labels(self.algorithm, output), reduction_labels(self.algorithm, root)
        extra = [label for label in own if label not in outer]
        if reduced:
            narrow = all(self.sizes[label] <= WHOLE_SIDE for label in extra)
            return reduced[-1] if reduced == inner and narrow and set(own) & set(outer) else None
        parts = {f for f in self.algorithm.needed_by((output,)) if f != output}
        return own[-1] if own and not extra and parts and parts <= set(self.algorithm.needed_by((root,))) else None

    def _recomputed(self, func: str) -> bool:
        """Whether several kernels compute ``func`` each for itself: it is cheap, or larger than what it is made from."""
        if not reduction_labels(self.algorithm, func):
            return True
        return self._elements(self.algorithm[func].labels) > 2 * max(self._elements(self.algorithm.plain_labels(t)) for t in self.algorithm.inputs)

    def _elements(self, labels: tuple[str | None, ...]) -> int:
        count = 1
        for label in labels:
            count *= self.sizes.get(label, 1) if label else 1
        return count

    def _place(self, func: str, root: str, streaming: bool) -> tuple[str, str] | None:
        own, reduced = self.algorithm[func].labels, reduction_labels(self.algorithm, func)
        outer, inner = self.algorithm[root].labels, reduction_labels(self.algorithm, root)
        shared = [label for label in outer if label in own]
        if self._costs_again(func, root) or not outer:  # a root without labels is one program: rows of it want many
            return None
        if streaming and reduced and set(reduced) == set(inner) and set(own) <= set(outer):
            return (root, inner[-1])
        carried = [label for label in inner if label in own]
        if carried and not self._holds_chain(func, root):
            return (root, carried[-1])
        return (root, shared[-1]) if shared else None

    def _costs_again(self, func: str, root: str) -> bool:
        """Whether a matrix product would be done again for every block of a label it does not have."""
        if not self._dots(func):
            return False
        missing = [label for label in self.algorithm[root].labels if label not in self.algorithm[func].labels]
        return any(self.sizes[label] > WHOLE_SIDE for label in missing) and not self._holds_chain(func, root)

    def _holds_chain(self, func: str, root: str) -> bool:
        """Whether a product feeds another through an intermediate narrow enough to hold whole."""
        carried = [label for label in reduction_labels(self.algorithm, root) if label in self.algorithm[func].labels]
        missing = [label for label in self.algorithm[root].labels if label not in self.algorithm[func].labels]
        return bool(self._dots(func) and carried and any(self.sizes[n] > WHOLE_SIDE for n in missing)) and all(self.sizes[c] <= WHOLE_CHAIN for c in carried)

    def _dots(self, func: str) -> list[ex.Dot]:
        return [n for n in self.algorithm[func].expr.walk() if isinstance(n, ex.Dot)]

    # -- tiles ------------------------------------------------------------------------------------------------------

    def tiles(self, root: str, fused: tuple[Primitive, ...]) -> tuple[Primitive, ...]:
        """block, tensorize, map, num_warps and num_stages of one kernel."""
        members = [root]
        for m in members:
            members += [p.func for p in fused if p.args[0] == m and p.func not in members]
        if any(self._dots(m) for m in members):
            return self._matrix_tiles(root, members)
        return self._vector_tiles(root, members)

    def _vector_tiles(self, root: str, members: list[str]) -> tuple[Primitive, ...]:
        labels = self.algorithm[root].labels
        reduced = list(dict.fromkeys(r for m in members for r in reduction_labels(self.algorithm, m)))
        tile: dict[str, int] = {}
        width = 1
        last = self._last_labels(members)
        for r in reduced:
            if r not in last and labels:  # down columns: the width goes to the label that lies contiguous
                tile[r] = min(pow2(self.sizes[r]), 32)
                width *= tile[r]
                continue
            whole = pow2(self.sizes[r]) * width <= ROW_LIMIT
            tile[r] = 0 if whole else max(1, min(pow2(self.sizes[r]), 4096 // min(width, 4096)))
            width *= pow2(self.sizes[r]) if whole else tile[r]
        block: dict[str, int] = {}
        # measured on an H200: 1024 elements a program keep pointwise kernels nearest to a copy; rows want 4096
        room = max(1, (4096 if reduced else 2048 // self.itemsize * self.target.warp_size // 32) // width)
        for label in self._contiguous_first(labels, members):
            if label in tile:
                continue
            block[label] = min(pow2(self.sizes[label]), room)
            room //= block[label]
            width *= block[label]
        tile |= {label: block[label] for label in labels if label in block}
        block |= self._rows_again(block, members)
        block = {label: block[label] for label in labels if label in block}
        warps = 4 if not reduced or width < 8192 else 32 if width > 32768 else 16
        return self._statements(root, block, tile, warps, 3)

    def _rows_again(self, block: dict[str, int], members: list[str]) -> dict[str, int]:
        """Rows that one program walks, so that what does not depend on the row is loaded once, if there are plenty of rows."""
        programs = 1
        for label, size in block.items():
            programs *= -(-self.sizes[label] // size)
        tensors = [ex.free_labels(a) for m in members for a in ex.accesses(self.algorithm[m].expr)]
        for label, size in block.items():
            repeats = any(t and label not in t for t in tensors) and any(label in t for t in tensors)
            if size == 1 and repeats and self.sizes[label] >= 8 and programs >= 64 * self.target.multiprocessors:
                return {label: 8}
        return {}

    def _contiguous_first(self, labels: tuple[str, ...], members: list[str]) -> list[str]:
        """Labels by how much they need a wide tile: the last index of each tensor first."""
        last = self._last_labels(members)
        ordered = list(dict.fromkeys([*labels[-1:], *(label for label in last if label in labels), *reversed(labels)]))
        return ordered

    def _last_labels(self, members: list[str]) -> list[str]:
        """Labels along which the tensors that these Funcs read lie contiguous, if they are laid out row by row."""
        return [a.index[-1].name for m in members for a in ex.accesses(self.algorithm[m].expr) if a.index and isinstance(a.index[-1], ex.Label)]

    def _matrix_tiles(self, root: str, members: list[str]) -> tuple[Primitive, ...]:
        labels = self.algorithm[root].labels
        main = next(m for m in members if self._dots(m))
        dot = self._dots(main)[-1]
        rows = [label for label in labels if label in ex.free_labels(dot.left) and label not in ex.free_labels(dot.right)]
        columns = [label for label in labels if label in ex.free_labels(dot.right) and label not in ex.free_labels(dot.left)]
        chained = any(self._dots(m) for m in members if m != main)
        if chained:
            return self._chain_tiles(root, members, rows, columns)
        tile: dict[str, int] = {}
        m, n = (max([self.sizes[x] for x in side], default=1) for side in (rows, columns))
        batch = 1
        for label in labels:
            batch *= 1 if label in rows[-1:] + columns[-1:] else self.sizes[label]
        bm, bn, warps = self._product_tile(m, n, batch)
        for label in labels:
            tile[label] = bm if label in rows[-1:] else bn if label in columns[-1:] else 1
        depth, stages = self._depth(bm * self._tiles_read(dot.left, members), bn * self._tiles_read(dot.right, members))
        block = dict(tile)
        for k in reduction_labels(self.algorithm, main):
            longest = max(dot.labels, key=lambda label: self.sizes[label])
            tile[k] = max(16, min(pow2(self.sizes[k]), depth)) if k == longest else 1
        grouped = (rows[-1], columns[-1]) if rows and columns else None
        return self._statements(root, block, tile, warps, stages, grouped)

    def _tiles_read(self, side: ex.Expr, members: list[str]) -> int:
        """Tiles that shared memory holds for one side of a product: what it loads, and the side itself where it is computed."""
        if isinstance(side, ex.Access) and side.tensor in self.algorithm and side.tensor in members:
            side = self.algorithm[side.tensor].expr
        return 1 if isinstance(side, ex.Access) else 1 + sum(1 for _ in ex.accesses(side))

    def _depth(self, rows: int, columns: int) -> tuple[int, int]:
        """(elements, stages) of the reduced label: 128 bytes deep and up to 4 stages, as far as shared memory holds them."""
        depth = 128 // self.itemsize
        while depth > 16 and 2 * (rows + columns) * depth * self.itemsize > self.target.shared_bytes:
            depth //= 2
        return depth, max(2, min(4, self.target.shared_bytes // ((rows + columns) * depth * self.itemsize)))

    def _product_tile(self, m: int, n: int, batch: int) -> tuple[int, int, int]:
        """(rows, columns, warps) of a matrix tile: large, halved while it leaves multiprocessors without work."""
        widest = 256 if self.itemsize == 2 else 128
        bm, bn = min(128, max(16, pow2(m))), min(widest, max(16, pow2(n)))
        while bm * bn > 64 * 64 and batch * -(-m // bm) * -(-n // bn) < self.target.multiprocessors:
            if bn >= bm:
                bn //= 2
            else:
                bm //= 2
        return bm, bn, 8 if bm * bn >= 128 * 128 else 4

    def _chain_tiles(self, root: str, members: list[str], rows: list[str], columns: list[str]) -> tuple[Primitive, ...]:
        """A product of a product: rows in blocks, the intermediate in tiles or whole, everything else whole if it is narrow."""
        labels = self.algorithm[root].labels
        wide = max((pow2(self.sizes[c]) for c in columns), default=1)
        tile: dict[str, int] = {}
        block: dict[str, int] = {}
        sums = 1 + sum(1 for m in members[1:] if m in self.outputs and self._dots(m))  # accumulators that a program holds at once
        bm = 64 if self.itemsize == 4 or wide * sums > 128 else 128
        for label in labels:
            if label in rows[-1:]:
                block[label] = tile[label] = min(bm, max(16, pow2(self.sizes[label])))
            elif label in columns and self.sizes[label] <= WHOLE_SIDE:
                tile[label] = 0
            elif label in columns[-1:]:
                tile[label] = 256 // self.itemsize
            else:
                block[label] = tile[label] = 1
        heavy = self.itemsize == 4 and wide >= 128  # float32 operands fill the registers
        narrow_chain = any(self._holds_chain(m, root) for m in members[1:])
        held = {label for m in members[1:] if self._dots(m) and self._holds_chain(m, root) for label in self.algorithm[m].labels}
        tile |= {label: 0 for m in members for label in self.algorithm[m].labels if label not in labels and m in self.outputs}
        for m in members:
            own = reduction_labels(self.algorithm, m)
            for k in own:
                if len(own) > 1 and k != max(own, key=lambda label: self.sizes[label]):
                    tile[k] = 1
                elif k in held:
                    tile[k] = 0
                elif k not in tile:
                    narrow = self.sizes[k] <= WHOLE_SIDE and m != root and k not in reduction_labels(self.algorithm, root)
                    deepest = 256 // self.itemsize if narrow_chain else 16 if heavy else 32 if self.itemsize == 4 or wide > 128 else 64
                    tile[k] = 0 if narrow else min(max(16, pow2(self.sizes[k])), deepest)
        stages = 4 if narrow_chain else 2 if self.itemsize == 4 else 3
        step = max((tile[k] for k in reduction_labels(self.algorithm, root) if k in tile), default=64) or WHOLE_CHAIN
        while stages > 1 and not narrow_chain and (bm + 2 * stages * step) * wide * self.itemsize > self.target.shared_bytes:
            stages -= 1
        held = max((block.get(label, 1) for label in rows[-1:]), default=1)
        return self._statements(root, block, tile, 4 if held <= 64 and not heavy else 8, stages)

    def _statements(self, root: str, block: dict[str, int], tile: dict[str, int], warps: int, stages: int, grouped: tuple[str, str] | None = None) -> tuple[Primitive, ...]:
        found = []
        if block:
            found.append(Primitive(root, "block", tuple(Sized(k, v) for k, v in block.items())))
        if tile:
            found.append(Primitive(root, "tensorize", tuple(Sized(k, v) for k, v in tile.items())))
        if grouped and -(-self.sizes[grouped[0]] // block[grouped[0]]) > 8:
            row, column = grouped
            rest = tuple(label for label in block if label not in grouped)
            inner = next(name for i in range(1, 99) if (name := f"{row}{i}") not in self.algorithm.labels)
            found.append(Primitive(root, "map", (*rest, Grouped(row, inner, 8), column, inner)))
        parts = self._parts(root, block, tile)
        if parts:
            found.append(Primitive(root, "split", parts))
        return (*found, Primitive(root, "num_warps", (warps,)), Primitive(root, "num_stages", (stages,)))

    def _parts(self, root: str, block: dict[str, int], tile: dict[str, int]) -> tuple[Sized, ...]:
        """A long reduction cut over programs where the blocks alone would leave multiprocessors without work."""
        programs = 1
        for label, size in block.items():
            programs *= -(-self.sizes[label] // size)
        looped = [k for k in reduction_labels(self.algorithm, root) if tile.get(k, 0) > 0]
        wanted = self.target.multiprocessors * (2 if self._dots(root) else 8)  # what moves memory alone wants more in flight
        if not looped or 4 * programs > wanted:
            return ()
        longest = max(looped, key=lambda k: self.sizes[k] // tile[k])
        parts = min(wanted // max(programs, 1), self.sizes[longest] // tile[longest] // 4)
        return (Sized(longest, 1 << (parts.bit_length() - 1)),) if parts >= 2 else ()


def pow2(n: int) -> int:
    """The smallest power of two that is at least n, 1 for 0."""
    return 1 << max(0, n - 1).bit_length()
