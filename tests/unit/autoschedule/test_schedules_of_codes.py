"""Default schedules of products with weights of few bits: a call's dtypes are known to them, and tiles suit where codes lie."""

import pytest
import torch

from dtkernels import explain
from dtkernels.lang import parse
from dtkernels.lang.spec import Spec
from dtkernels.runtime.bind.operator import Operator

N, K = 14336, 4096
ALONG_SUM = "(((W[n, k // {c}] >> (4 * (k % {c}))) & 15) - 8)"
ALONG_COLUMNS = "(((W[k // {c}, n] >> (4 * (k % {c}))) & 15) - 8)"


def schedule(value: str, weights: torch.Tensor, rows: int, groups: int = 0):
    scale = f"{value} * s[n, k / {groups}]" if groups else value
    op = Operator(Spec("few", "A product.", parse(f"Func f; In A, W{', s' if groups else ''}; Var m, n; RVar k; f[m, n] = rdot(A[m, k], {scale}, k);")))
    given = [torch.empty(rows, K, dtype=torch.bfloat16, device="meta"), weights]
    given += [torch.empty(N, K // groups, dtype=torch.bfloat16, device="meta")] if groups else []
    text = str(explain(op, *given, gpu="h100"))
    return {name: text.split(f"f.{name}(")[1].split(")")[0] if f"f.{name}(" in text else "" for name in ("block", "tensorize", "split", "num_warps")}


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("value, weights, depth", [
    ("cast(W[n, k], bf16)", empty(N, K, dtype=torch.int8), 128),
    (ALONG_SUM.format(c=2), empty(N, K // 2, dtype=torch.uint8), 256),
    (ALONG_SUM.format(c=8), empty(N, K // 8, dtype=torch.int32), 256),
])  # fmt: skip
def test_calls_with_integers_that_are_cast_or_unpacked_take_tiles_for_codes(value, weights, depth, rows):
    assert schedule(value, weights, rows)["tensorize"] == f"m:16, n:64, k:{depth}"


@pytest.mark.parametrize("groups, depth", [(128, 128), (64, 128), (32, 128)])
def test_a_step_has_enough_codes_of_each_place_for_the_matrix_units(groups, depth):
    assert schedule(ALONG_SUM.format(c=8), empty(N, K // 8, dtype=torch.int32), 16, groups)["tensorize"] == f"m:16, n:64, k:{depth}"


def test_tiles_have_whole_lines_where_codes_lie_along_the_columns():
    found = schedule(ALONG_COLUMNS.format(c=2), empty(K // 2, N, dtype=torch.uint8), 16)
    assert (found["block"], found["split"], found["num_warps"]) == ("m:16, n:128", "k:2", "8")
    assert schedule(ALONG_COLUMNS.format(c=8), empty(K // 8, N, dtype=torch.int32), 16)["block"] == "m:16, n:64"  # 256 bytes


@pytest.mark.parametrize("rows, block", [(200, "m:256, n:128"), (300, "m:128, n:128")])
def test_packed_codes_are_unpacked_once_for_up_to_256_rows(rows, block):
    assert schedule(ALONG_SUM.format(c=2), empty(N, K // 2, dtype=torch.uint8), rows, 128)["block"] == block
