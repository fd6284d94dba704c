"""Sums of products that share an accumulator have the values that they have apart."""

import pytest
from oracle import check
from small_programs import random

TWO = "Func f; In A, B, C, D; Var x, y; RVar k; f[x, y] = maximum(rdot(A[x, k], B[y, k], k) + rdot(C[x, k], D[y, k], k), 0);"
THREE = "Func f; In A, B, C; Var x, y; RVar k, l; f[x, y] = rdot(A[x, k], B[y, k], k) + rdot(C[x, l], C[y, l], l) + rdot(A[x, k], A[y, k], k);"


@pytest.mark.parametrize("more", ["", "f.persistent();", "f.split(k:2);"])
@pytest.mark.parametrize("rows, columns", [(16, 32), (128, 256)])  # one loop for both, and one for each
def test_two_products_in_one_accumulator(rows, columns, more):
    tiles = f"f.block(x:{rows}, y:{columns}); f.tensorize(x:{rows}, y:{columns}, k:16); {more} f.compile();"
    check(TWO + tiles, *random((21, 45), (37, 45), (21, 45), (37, 45)))


def test_three_products_over_two_labels():
    check(THREE + "f.block(x:16, y:16); f.tensorize(x:16, y:16, k:16, l:32); f.compile();", *random((21, 45), (21, 45), (21, 70)))
