"""Sums over packed elements are split by the place in the pack: values in the interpreter, and what keeps its form."""

import re

import bounds  # noqa: F401 (an access outside the tensors raises)
import pytest
import torch

import dtkernels

GENERATOR = torch.Generator().manual_seed(0)
TILES = "f.block(m:16, n:32); f.tensorize(m:16, n:32, k:{tile});"


def product(body: str, tile: int, more: str = "", inputs: str = "A, W, s"):
    return dtkernels.compile(f"Func f; In {inputs}; Var m, n; RVar k; f[m, n] = rdot({body}, k);{TILES.format(tile=tile)}{more}")


def packed(codes: torch.Tensor, bits: int, dtype: torch.dtype, dim: int = -1) -> torch.Tensor:
    """Codes of a few bits, the first of each pack in its last bits."""
    count = torch.iinfo(dtype).bits // bits
    whole = codes.long().movedim(dim, -1).unflatten(-1, (-1, count))
    value = (whole << (bits * torch.arange(count))).sum(-1)
    least = torch.iinfo(dtype).min
    return ((value - least) % 2 ** torch.iinfo(dtype).bits + least).to(dtype).movedim(-1, dim).contiguous()


def close(got: torch.Tensor, want: torch.Tensor, terms: int) -> None:
    """Operands are rounded to fp16: 2 ** -11 each, as often as there are terms at most."""
    torch.testing.assert_close(got.double(), want, rtol=2**-10, atol=2**-10 * want.abs().max().item() + terms * 2**-14)


@pytest.mark.parametrize("k", [64, 90, 256])
@pytest.mark.parametrize("bits, dtype, tile", [(4, torch.uint8, 32), (4, torch.int8, 64), (2, torch.uint8, 64), (4, torch.int32, 128), (4, torch.int32, 64)])
def test_codes_along_the_sum(bits, dtype, tile, k):
    """The last of these keeps its form: 8 elements of each code are too few for the matrix units."""
    count, most = torch.iinfo(dtype).bits // bits, 2**bits - 1
    codes = torch.randint(0, most + 1, (40, -(-k // count) * count), generator=GENERATOR)
    a, s = torch.randn(20, k, generator=GENERATOR).half(), (torch.rand(40, 4, generator=GENERATOR) / 8).half()
    run = product(f"A[m, k], (((W[n, k // {count}] >> ({bits} * (k % {count}))) & {most}) - {most // 2}) * s[n, k / 64]", tile)
    want = a.double() @ ((codes[:, :k] - most // 2) * s.double().repeat_interleave(64, 1)[:, :k]).T
    close(run(a, packed(codes, bits, dtype), s), want, k)
    split = "every_second" in run.source
    assert split == (tile // count >= 16)
    assert not split or f"bits_of(tl.trans(W), 0, {most}, {most // 2}, PAIRS, A.dtype)" in run.source


@pytest.mark.parametrize("more", ["", "f.split(k:3);", "f.split(k:2); f.persistent();", "f.stages(k:3);"])
def test_codes_packed_in_rows_and_split_sums(more):
    codes = torch.randint(0, 16, (192, 40), generator=GENERATOR)
    a, s = torch.randn(20, 192, generator=GENERATOR).half(), (torch.rand(40, generator=GENERATOR) / 8).half()
    run = product("A[m, k], (((W[k // 2, n] >> (4 * (k % 2))) & 15) - 8) * s[n]", 32, more)
    close(run(a, packed(codes, 4, torch.uint8, 0), s), a.double() @ ((codes - 8) * s.double()), 192)
    assert "every_second" in run.source


def test_what_is_masked_by_the_first_operand_alone():
    """Codes without an offset are 0 outside: the loop is not cut at whole steps, and groups have masks of their own."""
    codes = torch.randint(0, 16, (40, 90), generator=GENERATOR)
    a = torch.randn(20, 90, generator=GENERATOR).half()
    run = product("A[m, k], (W[n, k // 2] >> (4 * (k % 2))) & 15", 32, inputs="A, W")
    close(run(a, packed(codes, 4, torch.uint8)), a.double() @ codes.double().T, 90)
    assert "every_second" in run.source


def test_weights_on_the_left_and_a_scale_of_each_column():
    codes = torch.randint(0, 16, (20, 128), generator=GENERATOR)
    b, s = torch.randn(128, 40, generator=GENERATOR).half(), (torch.rand(128, generator=GENERATOR) / 8).half()
    run = product("(((W[m, k // 2] >> (4 * (k % 2))) & 15) - 8) * s[k], B[k, n]", 32, inputs="W, B, s")
    close(run(packed(codes, 4, torch.uint8), b, s), ((codes - 8) * s.double()) @ b.double(), 128)
    assert "every_second(s" in run.source


def test_the_place_of_a_code_counts_where_it_stands_alone():
    """``k`` itself is 2 * group + place."""
    codes = torch.randint(0, 16, (40, 64), generator=GENERATOR)
    a = torch.randn(20, 64, generator=GENERATOR).half()
    run = product("A[m, k], where(k < 33, cast(((W[n, k // 2] >> (4 * (k % 2))) & 15), fp32), 0.5)", 32, inputs="A, W")
    want = torch.where(torch.arange(64) < 33, codes.double(), 0.5)
    close(run(a, packed(codes, 4, torch.uint8)), a.double() @ want.T, 64)


def test_scales_of_groups_are_loaded_once_a_step():
    a, s = torch.randn(20, 300, generator=GENERATOR).half(), torch.rand(40, 3, generator=GENERATOR).half()
    w = torch.randint(-127, 128, (40, 300), generator=GENERATOR).to(torch.int8)
    run = product("A[m, k], W[n, k] * s[n, k / 128]", 64)
    close(run(a, w, s), a.double() @ (w.double() * s.double().repeat_interleave(128, 1)[:, :300]).T, 300)
    assert re.search(r"k_start // 128\)? \* s_stride", run.source) or "(k_start // 128)" in run.source
    assert "k // 128" not in product("A[m, k], W[n, k] * s[n, k / 128]", 64).source.split("def f(")[0].replace("k_start // 128", "")
    kept = product("A[m, k], W[n, k] * s[n, k / 96]", 64)  # a step may have two
    assert "k // 96" in kept.source


@pytest.mark.parametrize("zero", ["z[n, k / 64]", "(((z[n / 2, k / 64] >> (4 * (n % 2))) & 15) + 1)"], ids=["plain", "packed"])
def test_zero_points_of_groups(zero):
    codes, zeros = torch.randint(0, 16, (40, 192), generator=GENERATOR), torch.randint(1, 16, (40, 3), generator=GENERATOR)
    a, s = torch.randn(20, 192, generator=GENERATOR).half(), (torch.rand(40, 3, generator=GENERATOR) / 8).half()
    run = product(f"A[m, k], ((((W[n, k // 2] >> (4 * (k % 2))) & 15) - {zero}) * s[n, k / 64])", 64, inputs="A, W, s, z")
    z = packed(zeros - 1, 4, torch.uint8, 0) if "&" in zero else zeros.to(torch.uint8)
    want = a.double() @ ((codes - zeros.repeat_interleave(64, 1)) * s.double().repeat_interleave(64, 1)).T
    close(run(a, packed(codes, 4, torch.uint8), s, z), want, 192)
    assert "f_acc_step" in run.source and "every_second" in run.source


@pytest.mark.parametrize("rows, apart", [(16, True), (32, False)])
def test_a_factor_of_a_step_multiplies_its_sums_where_these_are_fewer(rows, apart):
    """Of 16 rows and 32 columns a step of 64 has 512 sums and 2048 codes; of 32 rows 1024 sums for 32 terms."""
    a, s = torch.randn(20, 300, generator=GENERATOR).half(), torch.rand(40, 5, generator=GENERATOR).half()
    w = torch.randint(-128, 128, (40, 300), generator=GENERATOR).to(torch.int8)
    run = dtkernels.compile(f"Func f; In A, W, s; Var m, n; RVar k; f[m, n] = rdot(A[m, k], W[n, k] * s[n, k / 64], k); f.block(m:{rows}, n:32); f.tensorize(m:{rows}, n:32, k:{64 if apart else 32});")
    want = a.double() @ (w.double() * s.double().repeat_interleave(64, 1)[:, :300]).T
    close(run(a, w, s), want, 300)
    assert ("f_acc_step" in run.source) == apart


def test_factors_that_differ_stay_in_their_products():
    a, s, t = (torch.randn(*shape, generator=GENERATOR).half() for shape in ((20, 128), (40, 2), (40, 2)))
    w = torch.randint(0, 16, (40, 128), generator=GENERATOR)
    text = "rdot(A[m, k], ((W[n, k // 2] >> (4 * (k % 2))) & 15) * where(k % 2 == 0, s[n, k / 64], t[n, k / 64]), k)"
    run = dtkernels.compile(f"Func f; In A, W, s, t; Var m, n; RVar k; f[m, n] = {text};{TILES.format(tile=64)}")
    factor = torch.where(torch.arange(128) % 2 == 0, s.double().repeat_interleave(64, 1), t.double().repeat_interleave(64, 1))
    close(run(a, packed(w, 4, torch.uint8), s, t), a.double() @ (w * factor).T, 128)


@pytest.mark.parametrize("n, k", [(40, 192), (37, 90)])
@pytest.mark.parametrize("bits, dtype", [(4, torch.int32), (2, torch.uint8)], ids=str)
def test_codes_along_the_columns_are_loaded_once_and_repeated(bits, dtype, n, k):
    count, most = torch.iinfo(dtype).bits // bits, 2**bits - 1
    codes = torch.randint(0, most + 1, (k, -(-n // count) * count), generator=GENERATOR)
    a, s = torch.randn(20, k, generator=GENERATOR).half(), (torch.rand(n, generator=GENERATOR) / 8).half()
    run = product(f"A[m, k], (((W[k, n / {count}] >> ({bits} * (n % {count}))) & {most}) - 1) * s[n]", 32)
    close(run(a, packed(codes, bits, dtype), s), a.double() @ ((codes[:, :n] - 1) * s.double()), k)
    assert f"[TILE_k, {32 // count}, {count}]" in run.source and f"(n // {count})" not in run.source


@pytest.mark.parametrize("k", [208, 90])
@pytest.mark.parametrize("tile", [64, 128])
def test_scales_of_groups_shorter_than_a_step(tile, k):
    codes, s = torch.randint(0, 16, (40, 208), generator=GENERATOR)[:, :k], torch.rand(40, -(-k // 16), generator=GENERATOR).half()
    a = torch.randn(20, k, generator=GENERATOR).half()
    run = product("A[m, k], (((W[n, k // 2] >> (4 * (k % 2))) & 15) - 8) * s[n, k / 16]", tile)
    want = a.double() @ ((codes - 8) * s.double().repeat_interleave(16, 1)[:, :k]).T
    close(run(a, packed(codes, 4, torch.uint8), s), want, k)
    assert "every_second" in run.source and f"[BLOCK_n, {tile // 16}, 8]" in run.source
    eight = product("A[m, k], W[n, k] * s[n, k / 16]", tile)
    w = torch.randint(-128, 128, (40, k), generator=GENERATOR).to(torch.int8)
    close(eight(a, w, s), a.double() @ (w.double() * s.double().repeat_interleave(16, 1)[:, :k]).T, k)
    assert f"[BLOCK_n, {tile // 16}, 16]" in eight.source


def test_codes_without_an_offset_past_the_end_of_a_sum():
    """The last pack holds codes past the end, which the other operand alone must not meet."""
    codes = torch.randint(1, 16, (40, 96), generator=GENERATOR)
    a = torch.rand(20, 90, generator=GENERATOR).half()
    run = product("exp(A[m, k]), (W[n, k // 8] >> (4 * (k % 8))) & 15", 32, inputs="A, W")
    close(run(a, packed(codes, 4, torch.int32)), a.double().exp() @ codes[:, :90].double().T, 90)


@pytest.mark.parametrize("tile", [1, 2, 4, 8])
def test_an_index_that_a_step_shares_picks_one_element_for_all_of_it(tile):
    torch.manual_seed(0)
    A, B, S, T = torch.randn(7, 5), torch.randn(12), torch.randint(0, 6, (3,)), torch.randint(0, 7, (6,))
    text = "Func f; In A, B, S, T; Var x; RVar y; Extent y = B[0]; f[x] = rsum(A[T[S[y / 4]], x] * B[y], y); f.block(x:4);"
    got = dtkernels.compile(f"{text} f.tensorize(x:4, y:{tile});")(A=A, B=B, S=S, T=T)
    expected = (A.double()[T[S[torch.arange(12) // 4]]] * B.double()[:, None]).sum(0)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
