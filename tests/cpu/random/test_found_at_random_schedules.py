# ruff: noqa: E501 (programs read best on one line)
"""What tests/fuzz.py found of schedules, shortened: programs that were wrong or ended in an error."""

import bounds  # noqa: F401 (an access outside the tensors raises)
import pytest
import torch
from oracle import check

import dtkernels
from dtkernels.lang.errors import DTError


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) - 0.5


@pytest.mark.parametrize("g, left, rest", [("A[x, k] * N[k, x]", "g[x, k]", "g.block(x:4, k:2);"), ("cast(A[x, k], bf16)", "N[k, x]", "f.stage(N); f.block(x:8); f.tensorize(k:4);")])
def test_a_buffer_has_the_type_of_products_that_are_too_small_for_the_matrix_units(g, left, rest):
    """The wrapper named the type only where a kernel has the instruction."""
    right = "cast(B[k, y], bf16)" if left == "g[x, k]" else "g[y, k]"
    a, b, n, c = rand(8, 4), rand(4, 8, seed=1).half(), torch.arange(32).reshape(4, 8), rand(8, 8, seed=2)
    check(f"""Func g, f; In A, B, N, C; Var x, y; RVar k; g[x, k] = {g}; f[x, y] = rdot({left}, {right}, k) + C[x, y] + B[y / 2, x];
    {rest}""", a, b, n, c, dtype="float32", operands="bfloat16")  # fmt: skip


def test_an_inner_loop_overwrites_no_value_that_is_read_after_it():
    """``A[k]`` is read once for the block, and the loop over ``y`` reads ``A`` at other places."""
    check("""Func g, f; In A, B, C; Var k; RVar x, y, l;
    g[k] = A[k] + rsum(exp(A[y / 2] + B[y]) * 2, y) / rsum(exp(A[y / 2] + B[y]), y); f[k] = g[k] + rsum(2 + C[x, l], x, l) + A[k];
    g.fuse_at(f, x); f.tensorize(k:16); f.block(k:16); f.compile(); g.compile();""", rand(6), rand(3, seed=1), rand(3, 3, seed=2))  # fmt: skip


@pytest.mark.parametrize("parts", [1, 2])
def test_parts_of_a_sum_carry_the_labels_of_a_sum_inside_it(parts):
    check(f"""Func g, f; In A, B, C, D; Var k; RVar x, l; g[k] = rsum(rsum(A[k] + B[l], l) + C[x], x); f[k] = g[k] + D[k];
    g.block(k:1); g.split(x:{parts}); f.block(k:1);""", rand(4), rand(3, seed=1), rand(4, seed=2), rand(4, seed=3))  # fmt: skip


@pytest.mark.parametrize("rows", [24, 40, 33])
def test_pieces_of_a_tail_past_the_extent_store_nothing(rows):
    """24 rows are three whole pieces of 8, but not two whole blocks of 16. Stores by pointers: the rows of f are not aligned."""
    check("""Func f; In A, B; Var x, y; RVar k; f[x, y] = rdot(A[x, k], B[y, k], k);
    f.block(x:16, y:16); f.tensorize(x:16, y:16, k:16); f.descriptor(A, B); f.persistent(); f.tail(x:8);""", rand(rows, 16), rand(21, 16, seed=1))  # fmt: skip


def test_an_index_from_the_end_of_another_label_reads_0_outside_the_extent():
    """``len(x) - 1 - x`` runs to 7; the first label of ``g`` to 2."""
    check("""Func g, f; In A, B, C; Var x; RVar y, z; g[y, x] = rsum(A[x, y] + B[z], z); f[x] = rsum(g[y, x] * C[y], y) + g[len(x) - 1 - x, x];
    g.fuse_at(f, x); f.block(x:16); f.tensorize(x:16);""", rand(8, 3), rand(3, seed=1), rand(3, seed=2))  # fmt: skip


def test_a_loop_inside_rows_one_by_one_ends_by_the_first_of_them():
    """Three rows without matrix units are parts of one row each; the bound of ``k`` named the first index of a tile."""
    check("""Func f; In A, B, C; Var y, z; RVar x, k; f[y, z] = rdot(A[y, x], B[z, x], x) * rsum(where(k <= y + 4, C[k], 0), k);
    f.block(y:2); f.tensorize(y:2, z:4, x:4, k:4);""", rand(4, 3), rand(4, 3, seed=1), rand(9, seed=2))  # fmt: skip


@pytest.mark.parametrize("ordered", ["", ", ordered"])
def test_single_elements_past_the_end_of_a_block_add_nothing(ordered):
    """The second block of two ``y`` has one inside; the exponential of nothing is 1."""
    check(f"""Func g, f; In A, B; Var x; RVar y, z; g[x, y, z] = -A[x, y, z]; f[x] = rsum(exp(g[x, y, z]) + B[y, z], y, z);
    g.block(x:16, y:2, z:1); g.tensorize(x:16); f.block(x:16); f.tensorize(x:16); f.accumulate_at(g, z{ordered}); g.compile(); f.compile();""", rand(17, 3, 3), rand(3, 3, seed=1))  # fmt: skip


def test_a_loop_over_labels_of_a_sum_and_of_its_place_is_refused():
    with pytest.raises(DTError, match="accumulate_at: a merged loop goes over labels of f"):
        dtkernels.compile("""Func g, f; In A; Var x; RVar y, z; g[x, y, z] = exp(A[x, y, z]); f[x] = rsum(g[x, y, z], y, z);
        g.merge(p, x, y); g.block(z:1); g.tensorize(p:0); f.accumulate_at(g, z); g.compile(); f.compile();""")


@pytest.mark.parametrize("tile", [0, 4])
def test_merged_labels_of_a_sum_are_taken_at_once(tile):
    check(f"Func f; In A, B; Var x; RVar y, z; f[x] = rsum(A[x, y, z] * B[z], y, z); f.merge(p, z, y); f.tensorize(p:{tile}); f.block(x:1);", rand(5, 3, 4), rand(4, seed=1))


def test_tiles_in_parts_add_up_across_the_loops_of_a_mask():
    """Between the masked loops is one that passes no extent, whose axis is another one of the same label."""
    check("""Func g, f; In A, B; Var x; RVar y; g[x] = rsum(where(y <= x and x - y < 32, exp(A[x, y]), 0), y); f[x, y] = g[x] + B[x, y];
    g.fuse_at(f, x); f.block(x:4, y:12); f.tensorize(x:4, y:12);""", rand(40, 40), rand(40, 40, seed=1))  # fmt: skip


def test_terms_that_are_one_for_all_of_a_tile_count_as_many_as_are_inside():
    """Ten ``y`` in tiles of 4, of which each has one ``y / 4``: the last tile has two."""
    check("""Func f; In A, B; Var x; RVar y; Extent y = 10; f[x] = A[x] * rsum(where(B[y / 4] < A[x], B[y / 4], 0.5), y);
    f.block(x:1); f.tensorize(y:4);""", rand(3), rand(3, seed=1))  # fmt: skip


def test_a_loop_whose_terms_have_no_index_of_their_own():
    """The last, partial tile of ``x`` is masked by what is inside, though no load names it."""
    check("""Func g, f; In A, B; Var y; RVar x; g[y] = tanh(rmean(where(x >= y, A[x, y, x], 0), x)); f[x, y] = g[y] * B[y, x];
    g.fuse_at(f, x); f.block(x:48, y:16); f.tensorize(x:48, y:8); f.split(x:2);""", rand(7, 13, 7), rand(13, 7, seed=1))  # fmt: skip
