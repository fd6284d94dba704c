# ruff: noqa: E501 (programs read best on one line)
"""Products of which there is one for each place of the last dimension, stored one after another beside copies of their operands."""

import pytest
import torch

import dtkernels
from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.target import target
from dtkernels.lang import parse

TEXTS = {
    "gated": ("Func f; In A, B, G; Var i, j, c; RVar k; f[i, j, c] = G[i, j, c] * rdot(A[i, k, c], B[j, k, c], k);", "ikc,jkc,ijc->ijc"),
    "incoming": ("Func f; In A, B, G; Var i, j, c; RVar k; f[i, j, c] = G[i, j, c] * rdot(A[k, i, c], B[k, j, c], k);", "kic,kjc,ijc->ijc"),
    "of a batch": ("Func f; In A, B, G; Var n, i, j, c; RVar k; f[n, i, j, c] = rdot(A[n, i, k, c], B[n, j, k, c], k) + 0 * G[n, i];", "nikc,njkc,ni->nijc"),
    "of computed operands": ("Func f; In A, B, G; Var i, j, c; RVar k; f[i, j, c] = rdot(A[i, k, c] * G[i, c], B[j, k, c], k);", "ikc,jkc,ic->ijc"),
}  # fmt: skip
LARGE, SMALL = dict(n=2, i=512, j=512, k=512, c=128), dict(n=2, i=17, j=19, k=21, c=5)
STORED = ("f_left", "f_right", "f_product")


def prepared(name: str):
    return prepare_algorithm(parse(TEXTS[name][0]).algorithm, ("f",))


@pytest.mark.parametrize("name", TEXTS)
def test_such_products_are_stored_by_default(name):
    found = default_schedule(prepared(name), ("f",), LARGE, 2, target("h200"))
    product = found.sizes("f_product", "tensorize")
    assert found.subjects() >= {*STORED} and product["c"] == 1 and min(product["i"], product["j"]) >= 64


@pytest.mark.parametrize("name", TEXTS)
def test_values_are_right(name):
    text, product = TEXTS[name]
    schedule = default_schedule(prepared(name), ("f",), LARGE, 2, target("h200"))
    f = dtkernels.compile(f"{text}\n{schedule}")
    made = [torch.randn([SMALL[x] for x in labels], generator=torch.Generator().manual_seed(7)).bfloat16() for labels in product.split("->")[0].split(",")]
    wanted = torch.einsum(product, *map(torch.Tensor.double, made))
    wanted = torch.einsum("nikc,njkc->nijc", made[0].double(), made[1].double()) if "0 * G" in text else wanted
    torch.testing.assert_close(f(*made).double(), wanted, rtol=0.02, atol=0.1)


def test_operands_that_lie_along_their_sum_stay_as_they_are():
    text = "Func f; In A, B; Var i, j, c; RVar k; f[i, j, c] = rdot(A[i, c, k], B[j, c, k], k);"
    found = default_schedule(prepare_algorithm(parse(text).algorithm, ("f",)), ("f",), LARGE, 2, target("h200"))
    assert not found.subjects() & {*STORED}
