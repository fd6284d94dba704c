"""Print the mapping from the flat program id to blocks, and from extents to the number of programs."""

from __future__ import annotations

import math
from typing import Protocol

from ...ir.loops import is_single_reduction_loop
from ...ir.nest import GridLabel, GridStep, Kernel, Let, Local, Loop, Start, Tile, has_matrix_product, statements


class Names(Protocol):
    """What a kernel's printer knows by name; asking for a name makes it a parameter."""

    tiles: dict[str, str]

    def size(self, label: str) -> str: ...
    def block(self, label: str) -> str: ...
    def block_index(self, label: str) -> str: ...


def grid_size(kernel: Kernel) -> str:
    """Return the grid, as an expression in the wrapper.

    ``persistent()``: before ``(blocks,)``, after ``(min(blocks, programs(f_out, 2)),)``: no more than the GPU holds at once.
    """
    blocks = block_count(kernel)
    if kernel.last_wave:
        return f"(({blocks} - {BEFORE}) * {programs_per_block(kernel)},)"
    if not (kernel.persistent and kernel.grid):
        return f"({blocks},)"
    return f"(min({blocks}, {resident_programs(kernel)}),)"


BEFORE = "tiles_before"  #: blocks before those of the last wave, in the wrapper and in the kernels
BLOCK_OF_WAVE = "tail_block"  #: the number of a block in the last wave


def block_count(kernel: Kernel) -> str:
    """Return the number of blocks, as an expression in the wrapper; for a tail, that of the blocks it takes apart."""
    counts = [
        str(g.parts) if g.parts else f"size_{g.label}" if g.block * g.inside == 1 else f"triton.cdiv(size_{g.label}, {g.block * g.inside})"
        for g in kernel.grid
        if not (kernel.last_wave and g.parts)
    ]
    return " * ".join(counts) or "1"


def programs_per_block(kernel: Kernel) -> int:
    """Return the number of programs that compute one block of the kernel whose tail this is."""
    return math.prod(g.inside for g in kernel.grid)


def resident_programs(kernel: Kernel) -> str:
    """Return the number of programs that the GPU runs at once, as an expression in the wrapper."""
    return f"programs({kernel.writes[0]}_out, {programs_at_once(kernel)})"


def programs_at_once(kernel: Kernel) -> int:
    """Return how many programs of ``kernel`` one multiprocessor is taken to hold: by warps, of which it holds 64; half, for registers."""
    return max(1, 32 // kernel.num_warps // (4 if has_matrix_product(kernel.body) else 1))


def grid_lines(kernel: Kernel, names: Names, balanced: bool = False) -> tuple[list[str], int]:
    """Return (lines that compute the block of each label, indentation depth after them)

    With ``balanced`` persistent programs get equal shares of long and of short loops.
    """
    steps = kernel.order
    if not steps:
        return [], 1
    plain = len(steps) == 1 and steps[0].part == "all"
    growing, shrinking = _labels_of_uneven_loops(kernel)
    uneven = next((i for i, s in enumerate(steps) if s.label in growing | shrinking and s.part == "all"), None)
    balanced = balanced and kernel.persistent and not plain and uneven is not None
    pairs = balanced and uneven == len(steps) - 1
    lines = []
    counted = [s.label for i, s in enumerate(steps) if s.part != "inside" and (i or s.part == "group" or kernel.persistent)]
    counted += [s.label for s in steps if s.label in growing and s.part == "all" and not plain]
    for label in dict.fromkeys(counted):
        lines.append(f"blocks_{label} = {_count(next(g for g in kernel.grid if g.label == label), names)}")
    if kernel.persistent:
        blocks = BEFORE if kernel.tail else " * ".join(f"blocks_{label}" for label in dict.fromkeys(counted))
        if balanced:
            lines += _pairs(blocks) if pairs else _back_and_forth(blocks, steps[uneven:] if uneven else ())
        else:
            flatten = ", flatten=True" if is_single_reduction_loop(kernel) else ""
            stages = f", num_stages={kernel.block_stages}" if kernel.block_stages else ""
            lines.append(f"for tile_id in tl.range(tl.program_id(0), {blocks}, tl.num_programs(0){flatten}{stages}):")
    inner = [f"{names.block_index(steps[0].label)} = {_program(kernel)}"] if plain else [f"pid = {_program(kernel)}"]
    for i, step in enumerate(() if plain else steps):
        inner += _step(step, steps[i + 1 :], i == len(steps) - 1, names, step.label in growing, pairs)
    inner += _tail_piece(kernel, names)
    depth = 1 + kernel.persistent + balanced
    return [f"    {line}" for line in lines] + ["    " * depth + line for line in inner], depth


ROUNDS = 2  #: of blocks, from which on programs share each group by itself


def _pairs(blocks: str) -> list[str]:
    """Return the loops of a program that takes a block with a long loop and one with a short loop together."""
    return [
        f"each = 2 if {blocks} > tl.num_programs(0) else 1  # a long one and a short one",
        f"for first_id in tl.range(tl.program_id(0) * each, {blocks}, tl.num_programs(0) * each):",
        f"    for tile_id in tl.range(first_id, min(first_id + each, {blocks})):",
    ]


def _back_and_forth(blocks: str, inside: tuple[GridStep, ...]) -> list[str]:
    """Return the loops of programs that share blocks sorted by the length of their loops: one round forth, the next one back.

    Lengths 9 8 7 6 5 4, two programs: 9 6 5 and 8 7 4. ``inside``: the steps within which blocks are sorted, all if there are none.
    """
    group = " * ".join(f"GROUP_{s.label}" if s.part == "inside" else f"blocks_{s.label}" for s in inside) or blocks
    programs = "tl.num_programs(0)"

    def place(turn: str) -> str:
        return f"tl.where({turn} % 2 == 0, tl.program_id(0), {programs} - 1 - tl.program_id(0))"

    return [
        f"blocks_in_group = {group}",
        f"blocks_in_group = blocks_in_group if blocks_in_group >= {ROUNDS} * {programs} else {blocks}",
        f"for first_id in tl.range(0, {blocks}, blocks_in_group):",
        f"    blocks_left = min(blocks_in_group, {blocks} - first_id)",
        "    first_round = first_id // blocks_in_group",
        f"    last_round = first_round + blocks_left // {programs}",
        f"    last_place = {place('last_round')}",
        f"    last_round += tl.where(last_place < blocks_left % {programs}, 1, 0)",
        "    for round_id in tl.range(first_round, last_round):",
        f"        place_of_program = {place('round_id')}",
        f"        tile_id = first_id + (round_id - first_round) * {programs} + place_of_program",
    ]


def _count(label: GridLabel, names: Names) -> str:
    if label.parts:
        return str(label.parts)
    size = names.size(label.label)
    inside = f" * {label.inside}" if label.inside > 1 else ""
    return size if label.block * label.inside == 1 else f"tl.cdiv({size}, {names.block(label.label)}{inside})"


def _tail_piece(kernel: Kernel, names: Names) -> list[str]:
    """Return the lines that turn a block into the piece of it that a program of a tail computes."""
    lines, rest = [], programs_per_block(kernel)
    if kernel.last_wave and kernel.workspaces:
        lines.append(f"{BLOCK_OF_WAVE} = (tl.program_id(0) // {rest}).to(INDEX)")
    for g in (g for g in kernel.grid if g.inside > 1):
        block, rest = names.block_index(g.label), rest // g.inside
        piece = f"tl.program_id(0) // {rest} % {g.inside}" if rest > 1 else f"tl.program_id(0) % {g.inside}"
        lines.append(f"{block} = ({piece}).to(INDEX)" if g.parts else f"{block} = {block} * {g.inside} + {piece}")
    return lines


def _labels_of_uneven_loops(kernel: Kernel) -> tuple[set[str], set[str]]:
    """Return labels whose later blocks have longer loops, and those whose later blocks have shorter ones (causal masks make such).

    The former are walked from the last, so that no long one is left to the end.
    """
    inner = [s for s in statements(kernel.body) if isinstance(s, Loop) and s.reduces and not any(isinstance(x, Loop) for x in statements(s.body))]
    loops = [s for s in inner if s.begin is not None or s.end is not None]
    values = {s.name: s.value for s in statements(kernel.body) if isinstance(s, Let)}
    begins = _blocks_in([s.begin for s in loops[:1] if s.begin], values)
    ends = _blocks_in([s.end for s in loops[-1:] if s.end], values)
    return ends - begins, begins - ends


def _blocks_in(bounds: list[Tile], values: dict[str, Tile]) -> set[str]:
    """Return labels whose block a loop's bound depends on; ``values`` gives what its names stand for."""
    found = set()
    while bounds:
        for n in bounds.pop().walk():
            found |= {n.axis.label} if isinstance(n, Start) else set()
            bounds += [values[n.name]] if isinstance(n, Local) and n.name in values else []
    return found


def _program(kernel: Kernel) -> str:
    if kernel.last_wave:
        return f"({BEFORE} + tl.program_id(0) // {programs_per_block(kernel)}).to(INDEX)"
    return "tl.cast(tile_id, INDEX)" if kernel.persistent else "tl.program_id(0).to(INDEX)"


def _step(step: GridStep, rest: tuple[GridStep, ...], last: bool, names: Names, from_last: bool, pairs: bool) -> list[str]:
    counts = []
    for s in rest:
        opened = not any(r.label == s.label and r.part == "group" for r in rest)
        if s.part == "inside" and s.label == step.label:
            counts.append(f"GROUP_{s.label}")
        elif s.part == "inside" and opened:
            counts.append(f"in_group_{s.label}")
        elif s.part != "inside":
            counts.append(f"blocks_{s.label}")
    width = " * ".join(counts) if len(counts) == 1 else f"({' * '.join(counts)})"
    value = "pid" if last else f"pid // {width}"
    lines = []
    if step.part == "group":
        names.tiles[f"GROUP_{step.label}"] = str(step.size)
        lines.append(f"first_{step.label} = {value} * GROUP_{step.label}")
        lines.append(f"in_group_{step.label} = min(blocks_{step.label} - first_{step.label}, GROUP_{step.label})")
    elif step.part == "inside":
        lines.append(f"{names.block_index(step.label)} = first_{step.label} + {value}  # {step.name}")
    elif last and pairs:
        block, blocks = names.block_index(step.label), f"blocks_{step.label}"
        lines.append(f"{block} = tl.where({value} % 2 == 0, {blocks} - 1 - {value} // 2, {value} // 2)")
    elif from_last:
        lines.append(f"{names.block_index(step.label)} = blocks_{step.label} - 1 - {value}")
    else:
        lines.append(f"{names.block_index(step.label)} = {value}")
    return lines if last else [*lines, f"pid = pid % {width}"]
