"""Products that are divided by their norm are stored in the dtype of the results; those whose rounding would show are stored in float32."""

import pytest

from dtkernels.algebra.pipeline import prepare_algorithm
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.autoschedule.fit_resources import element_bytes
from dtkernels.codegen.analysis.normalized_products import normalized_products
from dtkernels.codegen.analysis.product_types import InputTypes
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.target import target
from dtkernels.lang import parse
from dtkernels.lang.schedule import Program

LAYER = "Func y, {funcs}; In X, W, g{inputs}; Var b, o; RVar k{labels}; y[b, o] = rdot(X[b, k], W[o, k], k) + g[o]; "
MOMENTS = "mean[o] = rmean(y[b, o], b); var[o] = rmean((y[b, o] - mean[o]) * (y[b, o] - mean[o]), b); "
BATCH_NORM = LAYER.format(funcs="mean, var, f", inputs="", labels="") + MOMENTS + "f[b, o] = {function}((y[b, o] - mean[o]) * rsqrt(var[o] + 0.00001));"
RMS_NORM = LAYER.format(funcs="f", inputs="", labels=", j") + "f[b, o] = {function}(y[b, o] * rsqrt(rmean(y[b, j] * y[b, j], j) + 0.00001)); Extent j = W[0];"
NARROW = {
    "RMS norm along rows": RMS_NORM.format(function=""),
    "RMS norm, then an exponential": RMS_NORM.format(function="exp"),
    "division by a norm": LAYER.format(funcs="n, f", inputs="", labels="") + "n[o] = sqrt(rsum(y[b, o] * y[b, o], b)); f[b, o] = tanh(y[b, o] / n[o]);",
}  # fmt: skip
WIDE = {
    "batch norm": BATCH_NORM.format(function=""),
    "a mean taken away": LAYER.format(funcs="m, z, f", inputs="", labels="") + "z[b, o] = maximum(y[b, o], 0) * g[o]; m[b] = rmean(z[b, o], o); f[b, o] = z[b, o] - m[b];",
    "a residual beside a layer": LAYER.format(funcs="z, f", inputs=", V", labels="") + "z[b, o] = y[b, o] * 2; f[b, o] = y[b, o] + rdot(z[b, k], V[o, k], k);",
    "softmax": LAYER.format(funcs="m, e, s, f", inputs="", labels="") + "m[b] = rmax(y[b, o], o); e[b, o] = exp(y[b, o] - m[b]); s[b] = rsum(e[b, o], o); f[b, o] = e[b, o] / s[b];",
    "a function beside a sum": LAYER.format(funcs="m, f", inputs="", labels="") + "m[o] = rmean(y[b, o], b); f[b, o] = sigmoid(y[b, o]) * m[o];",
    "a power": LAYER.format(funcs="m, f", inputs="", labels="") + "m[o] = rmean(y[b, o], b); f[b, o] = y[b, o] * y[b, o] - m[o];",
    "a comparison with the mean": LAYER.format(funcs="m, f", inputs="", labels="") + "m[o] = rmean(y[b, o], b); f[b, o] = where(y[b, o] > m[o], 1, 0) * g[o];",
    "a result in float32": RMS_NORM.format(function="cast").replace("0.00001))", "0.00001), fp32)"),
    "a product read by element alone": LAYER.format(funcs="f", inputs="", labels="") + "f[b, o] = y[b, o] * 2;",
    "parts of a sum": "Func y, f; In X, W; Var b, o; RVar k, p; y[p, b, o] = rdot(X[p, b, k], W[p, k, o], k); f[b, o] = rsum(y[p, b, o], p);",
    "statistics by products": "Func m, f; In X; Var b, o; RVar k; m[b] = rdot(X[b, k], X[b, k], k); f[b, o] = X[b, o] * rsqrt(m[b] + 1) - rsum(m[k], k);",
}  # fmt: skip


@pytest.mark.parametrize("name", NARROW)
def test_products_of_normalizations(name):
    assert normalized_products(parse(NARROW[name]).algorithm) == {"y"}


@pytest.mark.parametrize("name", WIDE)
def test_products_whose_rounding_would_show(name):
    assert normalized_products(parse(WIDE[name]).algorithm) == frozenset()


def test_the_buffer_has_the_dtype_of_the_results():
    algorithm = prepare_algorithm(parse(NARROW["division by a norm"]).algorithm, ("f",))
    sizes = dict.fromkeys(algorithm.labels, 4096)
    schedule = default_schedule(algorithm, ("f",), sizes, 2, target("h100"))
    source = emit(Program(algorithm, schedule), "f", target("h100"))
    assert "y_out = torch.empty((size_b, size_o), dtype=dtype" in source and "n_out = torch.empty((size_o,), dtype=torch.float32" in source
    assert element_bytes(algorithm, ("f",), 2)["y"] == 2 and "n" not in element_bytes(algorithm, ("f",), 2)
    mixed = InputTypes((("X", "bf16"), ("W", "bf16"), ("g", "fp32")))
    assert element_bytes(algorithm, ("f",), mixed)["y"] == 4
