# ruff: noqa: E501 (lists of choices read best on one line)
"""Random schedules of random programs: every primitive, mostly where it may stand."""

from __future__ import annotations

import math

from random_programs import ELEMENTS, Builder

from dtkernels.codegen.lower.merged_labels import grouped
from dtkernels.lang import Algorithm, Primitive, Schedule
from dtkernels.lang import expr as ex
from dtkernels.lang.schedule import APPROXIMATIONS, Grouped, Named, Share, Sized, host

STEPS = 60  #: at most so many innermost steps a kernel, times its Funcs; the interpreter takes about a millisecond for each


class Scheduler:
    """A random schedule of one algorithm."""

    def __init__(self, builder: Builder, algorithm: Algorithm):
        self.b, self.algorithm, self.pick, self.chance = builder, algorithm, builder.pick, builder.chance
        self.several, self.permuted = builder.several, builder.permuted
        self.merges: dict[str, dict[str, tuple[str, ...]]] = {}  #: of each kernel, what is drawn for ``merge``

    def schedule(self) -> Schedule:
        match self.b.form:
            case "product":
                return self.of_product()
            case "parts":
                return self.of_parts()
            case "moments":
                return self.of_moments()
        algorithm, output = self.algorithm, self.algorithm.definitions[-1].name
        needed = algorithm.needed_by((output,))
        statements: list[Primitive] = []
        fused: dict[str, tuple[str, str]] = {}
        for func in needed[:-1]:
            users = [u for u in needed if any(a.tensor == func for a in ex.accesses(algorithm[u].expr))]
            loops = {u: (*algorithm[u].labels, *reduced(algorithm, u)) for u in users}
            users = [u for u in users if loops[u]]
            if users and not self.chance(4):
                user = self.pick(users)
                fused[func] = (user, self.pick(loops[user]))
                statements.append(Primitive(func, "fuse_at", fused[func]))
        for root in (f for f in needed if f not in fused):
            statements += self.kernel(root, [f for f in needed if host(f, fused) == root])
            statements += self.between_kernels(root, needed, fused)
        reading = [f for f in needed[:-1] if any(a.tensor in algorithm.inputs for g in algorithm.needed_by((f,)) for a in ex.accesses(algorithm[g].expr))]
        if reading and self.chance(4):  # several results
            more = self.several(reading, 1, 2)
            statements += [Primitive(f, "compile") for f in self.permuted([output, *more])]
        elif self.chance(16):  # the kernel alone is no call; with both there is a wrapper
            statements += [Primitive(output, "compile"), Primitive(output, "compile_to_kernel")]
        results = [output, *(p.func for p in statements if p.name == "compile")]
        added = self.accumulated([f for f in dict.fromkeys(results) if f not in fused], [f for f in needed if f not in fused])
        if added and not self.chance(10):  # which such a kernel cannot have
            statements = [p for p in statements if p.name not in ("split", "cluster", "specialize_warps")]
        statements += added
        statements += [Primitive(f, "store") for f in fused if self.chance(8)]
        return Schedule(tuple(self.permuted(statements)))

    def accumulated(self, results: list[str], roots: list[str]) -> list[Primitive]:
        """Now and then a result that is a sum is added up in another kernel, at any of its loops."""
        sums = [f for f in results if is_sum(self.algorithm, f)]
        if not sums or not self.chance(2):
            return []
        func = self.pick(sums)
        hosts = [f for f in roots if f != func and func not in self.algorithm.needed_by((f,)) and (*self.algorithm[f].labels, *reduced(self.algorithm, f))]
        if not hosts:
            return []
        where = self.pick(hosts)
        loop = self.pick((*self.algorithm[where].labels, *reduced(self.algorithm, where)))
        return [Primitive(func, "accumulate_at", (where, loop, *["ordered"] * self.chance(2)))]

    def between_kernels(self, root: str, needed: tuple[str, ...], fused: dict[str, tuple[str, str]]) -> list[Primitive]:
        """Copies of inputs with aligned rows, and results of other kernels with aligned rows."""
        members = [f for f in needed if host(f, fused) == root]
        read = dict.fromkeys(a.tensor for m in members for a in ex.accesses(self.algorithm[m].expr))
        plain = [t for t in read if t in self.algorithm.inputs and self.by_itself(t)]
        others = [t for t in read if t in self.algorithm and t not in members and t not in fused]
        found = []
        if plain and self.chance(8):
            found.append(Primitive(root, "stage", tuple(self.several(plain, 1, 2))))
        if others and self.chance(8):
            found.append(Primitive(root, "stage", (self.pick(others),)))
        if root != needed[-1] and self.chance(6):
            found.append(Primitive(root, "align"))
        calls = {n.fn for m in members for n in self.algorithm[m].expr.walk() if isinstance(n, ex.Call)}
        if (few := sorted(calls & {*APPROXIMATIONS})) and self.chance(2):
            found.append(Primitive(root, "approximate", tuple(few)))
        if any(isinstance(n, ex.Dot) for m in members for n in self.algorithm[m].expr.walk()) and self.chance(8):
            found.append(Primitive(root, "approximate", ("rdot",)))
        if calls & {"exp", "exp2", "sigmoid"} and self.chance(4):
            found.append(Primitive(root, "approximate", (Share("exp", *self.pick([(1, 8), (1, 4), (3, 8), (1, 2)])),)))
        return found

    def by_itself(self, tensor: str) -> bool:
        """Whether ``stage`` may name an input: each dimension has one label that indexes it by itself."""
        if tensor in self.algorithm.integer_inputs():
            return False
        indices = {a.index for d in self.algorithm.definitions for a in ex.accesses(d.expr) if a.tensor == tensor}
        index = next(iter(indices))
        return len(indices) == 1 and all(isinstance(i, ex.Label) for i in index) and len(set(index)) == len(index)

    def of_product(self) -> Schedule:
        """A product read through descriptors, by programs that stay, with warps for loads, or a last wave in smaller blocks."""
        algorithm, f = self.algorithm, self.algorithm["f"]
        tiles = {label: self.pick([16, 32]) for label in ("x", "y", "k")}
        blocks = {"x": tiles["x"], "y": tiles["y"] * self.pick([1, 1, 2])} | {label: 1 for label in f.labels if label == "z"}
        if self.chance(6):  # tiles in two parts
            label = self.pick(["x", "y"])
            tiles[label] = blocks[label] = 48
        statements = [Primitive("f", "block", tuple(Sized(*b) for b in blocks.items())), Primitive("f", "tensorize", tuple(Sized(*t) for t in tiles.items()))]
        dot = next(n for n in f.expr.walk() if isinstance(n, ex.Dot))
        operands = [a.tensor for a in (dot.left, dot.right) if isinstance(a, ex.Access)]
        if "a" in algorithm:
            if self.chance(3):
                statements.append(Primitive("a", "fuse_at", ("f", "k")))
            else:
                own = algorithm["a"].labels[-2:]
                sizes = tuple(Sized(label, self.pick([4, 16])) for label in own)
                statements += [Primitive("a", "block", sizes), Primitive("a", "tensorize", sizes)] + [Primitive("a", "align")] * self.chance(2)
        inputs = [t for t in operands if t in algorithm.inputs]
        if not self.chance(4):
            statements.append(Primitive("f", "descriptor", tuple(self.several([*operands, "f"], 1, 3)) if self.chance(3) else tuple(operands)))
        if inputs and self.chance(3):
            statements.append(Primitive("f", "stage", tuple(self.several(inputs, 1, 2))))
        if self.chance(2):
            statements.append(Primitive("f", "persistent"))
            if self.chance(2):
                label = self.pick(["x", "y"])
                statements += [Primitive("f", "stream", (Sized("k", self.pick([2, 3])),))] * self.chance(2)
                statements.append(Primitive("f", "tail", (Sized(label, min(blocks[label] // 2, blocks[label] & -blocks[label])), *[Sized("k", 32)] * self.chance(3))))
        if self.chance(3):
            in_turn = self.chance(2)
            statements += [Primitive("f", "specialize_warps", ("k",)), Primitive("f", "num_warps", (8 if in_turn else 4,))]
            statements += [Primitive("f", "ping_pong")] * in_turn + [Primitive("f", "persistent")] * (in_turn and all(p.name != "persistent" for p in statements))
        elif self.chance(3):
            statements.append(Primitive("f", *self.pick([("split", (Sized("k", self.pick([2, 3])),)), ("block", (Sized("k", 32),))])))
        if self.chance(3):
            statements.append(Primitive("f", "map", self.walk(tuple(blocks))))
        return Schedule(tuple(self.permuted(statements)))

    def of_parts(self) -> Schedule:
        """One sum made in the blocks of the other's kernel."""
        algorithm = self.algorithm
        block = self.pick([16, 32])
        own = [Sized("y", block)] + ([Sized("l", 0)] if "l" in algorithm["f"].labels else [])
        statements = [Primitive("f", "block", (Sized("y", block),)), Primitive("f", "tensorize", (*own, Sized("x", self.pick([8, 16]))))]
        for func in ("g", "h"):
            if func in algorithm:
                wide = tuple(Sized(label, 0) for label in algorithm[func].labels if label != "x")
                statements += [Primitive(func, "block", (Sized("x", 16),)), Primitive(func, "tensorize", (Sized("x", 16), *wide))]
        if not self.chance(5):
            places = [("parts_at", ("f", "y")), ("accumulate_at", ("f", "x")), ("accumulate_at", ("f", "x", "ordered"))]
            places = places if is_sum(algorithm, "g") else places[:1]
            statements.append(Primitive("g", *self.pick(places)))
        if self.chance(4):
            statements.append(Primitive("f", "split", (Sized("x", self.pick([2, 3])),)))
        if self.chance(4):
            statements.append(Primitive("f", "persistent"))
        outputs = ["f", "h" if "h" in algorithm else "g"]
        return Schedule(tuple(self.permuted([*statements, *(Primitive(o, "compile") for o in outputs)])))

    def of_moments(self) -> Schedule:
        """A variance mostly in the loop that adds up its means."""
        over, own, members = reduced(self.algorithm, "v"), self.algorithm["v"].labels, list(self.algorithm.needed_by(("f",)))
        placed = {m: ("v", self.pick(over) if not self.chance(6) else own[-1]) for m in members if m in ("m", "n")} | {"v": ("f", own[-1])}
        statements = [Primitive(func, "fuse_at", place) for func, place in placed.items()]
        if self.chance(4):
            statements += [Primitive(o, "compile") for o in self.permuted(["f", self.pick(["m", "v"])])]
        return Schedule(tuple(self.permuted([*statements, *self.kernel("f", members)])))

    def kernel(self, root: str, members: list[str]) -> list[Primitive]:
        algorithm, own = self.algorithm, self.algorithm[root].labels
        labels = tuple(dict.fromkeys(label for m in [root, *members] for label in (*algorithm[m].labels, *reduced(algorithm, m))))
        merged = self.merges[root] = self.merged(root, members)
        labels, own = grouped(labels, merged), grouped(own, merged)
        tiles = {label: self.pick([1, 2, 4, 8, 16, 0]) for label in labels}
        while math.prod(self.width(label, tile) for label, tile in tiles.items()) > ELEMENTS:
            label = max(labels, key=lambda label: self.width(label, tiles[label]))
            tiles[label] = self.width(label, tiles[label]) // 2
        blocks = {label: tiles[label] * self.pick([1, 1, 2, 3]) or 16 for label in own if not self.chance(3)}
        while tiles and len(members) * math.prod(self.trips(label, tiles[label], blocks.get(label)) for label in labels) > STEPS:
            label = max(labels, key=lambda label: self.trips(label, tiles[label], blocks.get(label)))
            tiles[label] = 16 if tiles[label] < 16 else 2 * tiles[label]
            blocks |= {label: tiles[label]} if label in blocks else {}
        tiles |= {label: block for label, block in blocks.items() if block & (block - 1) and self.chance(4)}  # in parts
        statements = [Primitive(root, "tensorize", (Sized(label, tile),)) for label, tile in tiles.items() if tile != 1]
        statements += [Primitive(root, "block", (Sized(label, block),)) for label, block in blocks.items()]
        if blocks and self.chance(2):
            statements.append(Primitive(root, "map", self.walk(tuple(blocks))))
        if own and self.chance(3):
            inner = tuple(label for label in labels if label not in own)
            named = self.b.some(inner, 0, 1) if inner and self.chance(3) else ()
            statements.append(Primitive(root, "reorder", tuple(self.permuted(own + named))))
        loops = self.loops(root, members, labels, tiles)
        launch = [p for p in self.launch(root) if all(p.name != q.name for q in loops)]  # a thing is said once
        statements += [Primitive(root, "merge", (name, *parts)) for name, parts in merged.items()]
        return statements + launch + loops + self.memory(root, members)

    def merged(self, root: str, members: list[str]) -> dict[str, tuple[str, ...]]:
        """Labels of a result, or of its only sum, that one loop goes over; of kernels without fused Funcs, whose loops they are too."""
        sums = [n for n in self.algorithm[root].expr.walk() if isinstance(n, (ex.Reduce, ex.Dot))]
        own, over = self.algorithm[root].labels, reduced(self.algorithm, root)
        groups = [tuple(x for x in own if x not in over), tuple(x for x in over if x not in own and len(sums) == 1)]
        groups = [labels for labels in groups if len(labels) > 1]
        if not groups or set(members) - {root} or not self.chance(3):
            return {}
        parts = tuple(self.permuted(self.several(self.pick(groups), 2, 3)))
        name = f"{root}_p"
        self.b.sizes[name] = math.prod(self.b.sizes[label] for label in parts)
        return {name: parts}

    def launch(self, root: str) -> list[Primitive]:
        numbers = {"num_warps": [1, 2, 4, 8], "num_stages": [1, 2, 4], "maxnreg": [64, 168], "cluster": [1, 2, 4]}
        found = [Primitive(root, name, (self.pick(values),)) for name, values in numbers.items() if self.chance(4)]
        return found + [Primitive(root, "persistent")] * self.chance(4)

    def loops(self, root: str, members: list[str], labels: tuple[str, ...], tiles: dict[str, int]) -> list[Primitive]:
        """Words on single loops: mostly on loops that are there, now and then on any label."""
        looped = [label for label in labels if tiles[label] != 0]
        summed = [label for m in members for label in grouped(reduced(self.algorithm, m), self.merges[root]) if tiles[label] != 0]
        where = labels if self.chance(10) else looped
        found = [Primitive(root, name, (Sized(self.pick(where), self.pick([1, 2, 3])),)) for name in ("stages", "unroll") if where and self.chance(6)]
        if labels and self.chance(6):
            found.append(Primitive(root, "specialize", (self.pick(labels),)))
        held = [label for label in labels if tiles[label] == 0]
        if held and self.chance(3):
            found.append(Primitive(root, "two_tiles", tuple(self.several(held, 1, 2))))
        if (summed or labels and self.chance(10)) and self.chance(3):
            label = self.pick(summed or labels)
            if label in summed and label not in self.algorithm[root].labels and self.chance(3):
                found.append(Primitive(root, "block", (Sized(label, tiles[label]),)))
            else:
                found.append(Primitive(self.pick([root, *members]), "split", (Sized(label, self.pick([1, 2, 3, 5])),)))
        if summed and self.chance(12):
            found += [Primitive(root, "specialize_warps", (self.pick(summed),)), Primitive(root, "num_warps", (4,))]
        return [p for p in found if all(getattr(a, "label", a) in self.within(p.func, members) for a in p.args) or p.name == "num_warps"]

    def within(self, func: str, members: list[str]) -> set[str]:
        """Labels that a word on ``func`` may name."""
        merged = self.merges[members[-1]]
        return {x for m in (members if func == members[-1] else [func]) for x in (*grouped(self.algorithm[m].labels, merged), *grouped(reduced(self.algorithm, m), merged))}

    def memory(self, root: str, members: list[str]) -> list[Primitive]:
        read = dict.fromkeys(a.tensor for m in members for a in ex.accesses(self.algorithm[m].expr) if a.tensor in self.algorithm.inputs)
        tensors, found = [*read, root], []
        if self.chance(4):
            chosen = self.several(tensors, 1, 3)
            found.append(Primitive(root, "descriptor", tuple(chosen)))
        if read and self.chance(6):
            found.append(Primitive(root, "evict", (Named(self.pick(read), self.pick(["first", "last", "reread"])),)))
        return found

    def width(self, label: str, tile: int) -> int:
        """How many elements along ``label`` are done at once."""
        return tile or 1 << max(0, self.b.sizes[label] - 1).bit_length()

    def trips(self, label: str, tile: int, block: int | None) -> int:
        """How often the loops over ``label``, its blocks included, go round."""
        size = self.b.sizes[label]
        if block is None:
            return math.ceil(size / tile) if tile else 1
        return math.ceil(size / block) * (block // (tile or block))

    def walk(self, labels: tuple[str, ...]) -> tuple:
        split = {label: f"{label}_in" for label in self.b.some(labels, 0, 3)}
        order = self.permuted(labels)
        for label, inner in split.items():
            order.insert(self.b.between(order.index(label) + 1, len(order)), inner)
        return tuple(Grouped(name, split[name], self.pick([1, 2, 3, 4])) if name in split else name for name in order)


def is_sum(algorithm: Algorithm, func: str) -> bool:
    """Whether there is one sum in the definition of ``func``, and no other reduction."""
    found = [n for n in algorithm[func].expr.walk() if isinstance(n, (ex.Reduce, ex.Dot))]
    return len(found) == 1 and (isinstance(found[0], ex.Dot) or found[0].kind == "sum")


def reduced(algorithm: Algorithm, func: str) -> tuple[str, ...]:
    """Labels that reductions in the definition of ``func`` run over."""
    return tuple(dict.fromkeys(label for n in algorithm[func].expr.walk() if isinstance(n, (ex.Reduce, ex.Dot)) for label in n.labels))
