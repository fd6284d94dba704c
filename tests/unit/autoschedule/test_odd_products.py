"""What the default schedule makes of products whose rows start at no multiples of 16 bytes. Without torch."""

import pytest

from dtkernels.algebra.autodiff.gradient import gradient
from dtkernels.algebra.pipeline import differentiable_form, prepare_algorithm
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.autoschedule.fit_resources import first_too_large
from dtkernels.autoschedule.problem import SchedulingProblem
from dtkernels.autoschedule.rules.registry import proposals
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.target import target
from dtkernels.lang import parse
from dtkernels.lang.schedule import Program

H200 = target("h200")
TEXT = "Func f; In A, B; Var x, y; RVar k;\nf[x, y] = sigmoid(rdot(A[x, k], B[k, y], k));"


def forward(x, y, k, itemsize=2):
    algorithm = prepare_algorithm(parse(TEXT).algorithm, ("f",))
    return Program(algorithm, default_schedule(algorithm, ("f",), {"x": x, "y": y, "k": k}, itemsize, H200))


def backward(x, y, k):
    found = gradient(differentiable_form(parse(TEXT).algorithm, ("f",)), ("f",), ("A", "B"))
    outputs = tuple(found.grads.values())
    algorithm = prepare_algorithm(found.backward, outputs)
    return Program(algorithm, default_schedule(algorithm, outputs, {"x": x, "y": y, "k": k}, 2, H200))


@pytest.mark.parametrize("sizes, staged", [((4097, 4097, 4097), ("A", "B")), ((4095, 4097, 1000), ("B",)), ((4095, 4096, 1001), ("A",))])
def test_operands_without_aligned_rows_are_read_from_copies(sizes, staged):
    program = forward(*sizes)
    assert program.schedule.names("f", "stage") == staged and set(program.schedule.names("f", "descriptor")) >= {"A", "B"}
    assert [k.name for k in lower(program)] == [*(f"{t}_rows" for t in staged), "f"]


def test_what_both_products_of_a_backward_read_is_stored_once_with_aligned_rows():
    kernels = {k.name: k for k in lower(backward(4097, 4097, 4097))}
    assert list(kernels) == ["operand", "B_rows", "d_A", "A_rows", "d_B"]
    assert all(kernels[name].aligned == (name,) for name in ("operand", "A_rows", "B_rows"))
    assert "operand" in kernels["d_A"].descriptors and "operand" in kernels["d_B"].descriptors


SHIFTED = """Func s, e, d, f, g; In Q, K, O, t, u; Var b, m, l, n, k;
s[b, m, l] = where(l <= m, rdot(Q[b, m, k], K[b, l, k], k), -inf);
e[b, m, l] = exp(s[b, m, l] - where(t[b, m] > -inf, t[b, m], 0));
d[b, m, l] = e[b, m, l] * (rdot(O[b, m, n], K[b, l, n], n) + u[b, m]);
f[b, l, k] = rdot(d[b, m, l], Q[b, m, k], m);
g[b, l, n] = rdot(e[b, m, l], O[b, m, n], m);"""


@pytest.mark.parametrize("rows, width, itemsize, staged, block", [
    (4001, 128, 2, (), 128), (4096, 128, 2, (), 128), (4008, 64, 2, ("t", "u"), 64), (197, 64, 2, (), 64), (4001, 128, 4, (), 64), (600, 128, 2, (), 128), (2008, 64, 2, ("t", "u"), 64),
])  # fmt: skip
def test_numbers_that_a_long_loop_reads_are_given_aligned_rows(rows, width, itemsize, staged, block):
    """Where warps load them: the producer of specialized warps copies them by words, wherever rows begin."""
    algorithm = prepare_algorithm(parse(SHIFTED).algorithm, ("f", "g"))
    sizes = {"b": 32, "m": rows, "l": rows, "k": width, "n": width}
    program = Program(algorithm, default_schedule(algorithm, ("f", "g"), sizes, itemsize, H200))
    assert program.schedule.names("f", "stage") == staged and program.schedule.sizes("f", "block")["l"] == block
    kernels = {k.name: k for k in lower(program)}
    assert ("t_rows" in kernels) == ("u_rows" in kernels) == bool(staged)
    assert set(kernels["f"].aligned_reads) == {f"{t}_rows" for t in staged}


@pytest.mark.parametrize("sizes, columns, turns", [((1160, 2048, 4096), 160, False), ((1536, 1536, 1536), 144, False), ((3200, 832, 7040), 192, False), ((8832, 1152, 512), 128, True)])
def test_warpgroups_take_parts_that_fill_a_wave_and_turns_after_short_sums(sizes, columns, turns):
    """The fastest of some forty forms at these sizes on an H200."""
    x, y, k = sizes
    schedule = forward(x, y, k).schedule
    assert schedule.sizes("f", "block") == {"x": 128, "y": columns} and schedule.names("f", "specialize_warps") == ("k",)
    assert bool(schedule.of("f", "ping_pong")) == turns
    assert turns or 0.9 < -(-x // 128) * -(-y // columns) / 132 <= 1.0


@pytest.mark.parametrize("x, blocks, tail", [(4097, 561, True), (4225, 578, True), (4353, 595, False), (3841, 527, False)])
def test_a_last_wave_that_is_up_to_half_full_is_cut_finer(x, blocks, tail):
    program = forward(x, 4097, 4097)
    (kernel,) = (k for k in lower(program) if k.name == "f")
    assert -(-x // kernel.grid[0].block) * -(-4097 // kernel.grid[1].block) == blocks
    assert bool(kernel.tail) == tail == (0 < blocks % 132 <= 66)
    if tail:
        assert [g.block * g.inside for g in kernel.tail[0].grid] == [g.block for g in kernel.grid]
        assert kernel.tail[0].name == "f_tail" and not kernel.tail[0].persistent and kernel.tail[0].num_warps == 4


def test_the_room_that_a_tail_takes_is_checked():
    program = forward(4097, 4097, 4097)
    kernels, sizes = lower(program), {"x": 4097, "y": 4097, "k": 4097}
    assert first_too_large(kernels, sizes, dict.fromkeys(("A", "B", "A_rows", "B_rows", "f"), 2), H200) is None
    deep = str(program.schedule).replace("tail(x:64, y:128, k:128)", "tail(x:64, y:256, k:128)")
    too_large = Program(program.algorithm, parse(TEXT + deep).schedule)
    assert deep != str(program.schedule)
    assert first_too_large(lower(too_large), sizes, dict.fromkeys(("A", "B", "A_rows", "B_rows", "f"), 2), H200).name == "f"


@pytest.mark.parametrize("sizes", [(7, 3397, 9095), (14, 4585, 2231), (57, 11545, 2486)])
def test_a_thread_loads_no_more_single_elements_than_it_has_registers_for(sizes):
    """128 of them took 4 to 14 times as long as 64 on an H200: ptxas kept them on the stack."""
    for program, root in ((forward(*sizes), "f"), (backward(*sizes), "d_A")):
        if not program.schedule.names(root, "descriptor"):
            tile = program.schedule.sizes(root, "tensorize")
            assert tile["y"] * tile["k"] <= 64 * 32 * program.schedule.number(root, "num_warps"), (root, tile)


@pytest.mark.parametrize("sizes, proposed", [((57, 11545, 2486), True), ((53, 1450, 1259), False)])
def test_tiles_of_few_loads_are_proposed_beside_large_operands(sizes, proposed):
    """Of 1450 rows by 53 columns they took 42 us for 35."""
    shape = SchedulingProblem(prepare_algorithm(parse(TEXT).algorithm, ("f",)), ("f",), dict(zip("xyk", sizes)), 2, H200)
    tiles = {tuple(dict(c.tiles).values()) for c in proposals(shape, "f", ["f"])}
    assert ((64, 128, 32) in tiles) == proposed


def test_the_gradient_of_one_row_is_written_along_its_rows():
    """A row times a column: that the column lies along another label makes no transpose of it. Blocks of 16 x 32 took 55 us, of 16 x 256 26."""
    block = backward(1, 14714, 2904).schedule.sizes("d_B", "block")
    assert block["y"] >= 256 and block["y"] * block["k"] >= 2048
