"""Windows, offsets, softcap and sinks of attention: results and gradients, by kernels and by the reference."""

import pytest
import torch
from attention_cases import FLAGS, OPTIONS, SINKS, inputs, truth

import dtkernels

SHAPE = (2, 4, 2, 37, 53, 24, 40)


def agree(given: dict, atol: float = 4e-6) -> None:
    """The result and every gradient against float64; sums over a few dozen keys in float32."""
    ours, exact = dict(given), {n: t.detach().double() if is_float(t) else t for n, t in given.items()}
    leaves = [n for n, t in given.items() if is_float(t)]
    for kind in (ours, exact):
        for name in leaves:
            kind[name] = kind[name].detach().requires_grad_()
    result, wanted = dtkernels.ops.attention(**ours), truth(**exact)
    torch.testing.assert_close(result.double(), wanted, atol=atol, rtol=1e-5)
    adjoint = torch.randn(result.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(result, [ours[n] for n in leaves], adjoint)
    expected = torch.autograd.grad(wanted, [exact[n] for n in leaves], adjoint.double())
    for name, a, b in zip(leaves, found, expected):
        assert a.shape == b.shape
        torch.testing.assert_close(a.double(), b, atol=atol, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


@pytest.mark.parametrize("name", OPTIONS)
def test_kernels_agree_with_float64(name):
    op = "attention_flags" if OPTIONS[name].get("mask") is FLAGS else "attention"
    before = dtkernels.paths().get(op, {"interpreter": 0})["interpreter"]
    agree(inputs(SHAPE, OPTIONS[name]))
    assert dtkernels.paths()[op]["interpreter"] == before + 1


@pytest.mark.parametrize("name", OPTIONS)
def test_the_reference_agrees_with_float64(name, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    agree(inputs(SHAPE, OPTIONS[name]))


@pytest.mark.parametrize("depth, values", [(8, 8), (80, 96), (96, 72), (256, 256), (24, 200)])
def test_widths_need_not_be_powers_of_two_nor_equal(depth, values):
    agree(inputs((1, 2, 1, 19, 21, depth, values), {"causal": True, "window": (7, 0)}), atol=1e-5)


@pytest.mark.parametrize("name", ["sinks", "chunk of a prefill", "offset on the device"])
def test_one_query_over_many_keys(name):
    agree(inputs((1, 4, 2, 1, 500, 16, 16), OPTIONS[name]))


@pytest.mark.parametrize("score", [-200.0, 200.0])
def test_a_sink_far_from_the_scores_is_exact(score):
    """200 above: everything goes to the sink, and nothing overflows; 200 below: as if there were none."""
    given = inputs((1, 2, 2, 5, 19, 16, 16), {"sinks": SINKS})
    given["sinks"] = torch.full((2,), score)
    agree(given)


@pytest.mark.parametrize("kernels", [True, False])
def test_rows_that_a_lowest_number_hides_give_zeros_and_no_nan(kernels, monkeypatch):
    if not kernels:
        monkeypatch.delenv("TRITON_INTERPRET")
    given = inputs((2, 2, 1, 7, 21, 8, 8), {})
    mask = torch.randn(2, 1, 7, 21, generator=torch.Generator().manual_seed(2))
    mask[0, :, :2], mask[1, :, :, 20] = torch.finfo(torch.float32).min, torch.finfo(torch.float32).min
    seen = torch.where(mask < -1e38, -torch.inf, mask)
    results = []
    for added in (mask.expand(2, 2, 7, 21), seen.expand(2, 2, 7, 21)):
        leaves = [given[name].clone().requires_grad_() for name in ("q", "k", "v")]
        result = dtkernels.ops.attention(*leaves, added)
        results.append((result, *torch.autograd.grad(result.square().sum(), leaves)))
    assert not results[0][0][0, :, :2].any() and all(x.isfinite().all() for x in results[0])
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_element_of_an_expanded_mask_has_a_gradient_of_its_own(dtype, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    q, k, v = torch.randn(3, 2, 4, 5, 8, generator=torch.Generator().manual_seed(0)).to(dtype).unbind()
    for mask in (torch.zeros(2, 1, 5, 5, dtype=dtype).expand(2, 4, 5, 5), torch.zeros(5, 5, dtype=dtype).expand(2, 4, 5, 5)):
        (own, whole), found = (mask.detach(), mask.detach().clone()), []
        for given in (own.requires_grad_(), whole.requires_grad_()):
            result = dtkernels.ops.attention(q, k, v, mask=given)
            found.append(torch.autograd.grad(result.float().square().sum(), given)[0])
        torch.testing.assert_close(*found, rtol=0, atol=0)
        assert found[0][:, 1:].any()


def test_limits_that_no_query_reaches_cost_nothing():
    """They leave the variant without any limit, so that no kernel is made for them."""
    from dtkernels.ops.attention_arguments import _reach

    assert _reach(1, 64, True, None, 63) == {}
    assert _reach(8, 64, False, (71, None), 64) == {}
    assert _reach(8, 8, True, (None, 3), 0) == {"causal": True}
    assert _reach(1, 64, True, (15, 0), 63) == {"starts": True, "first": 48.0}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"window": (-1, 0)}, "a window reaches 0 or more keys to either side, None for no limit; got (-1, 0)"),
        ({"softcap": 0.0}, "softcap is 0.0; allowed: above 0"),
        ({"sinks": torch.zeros(3)}, "sinks has one number a head, shape (4,); got shape (3,)"),
    ],
)
def test_bad_options_are_one_clear_line(options, message):
    with pytest.raises(ValueError) as error:
        dtkernels.ops.attention(**inputs(SHAPE, options))
    assert str(error.value) == f"attention: {message}"


def test_softmax_that_may_say_none_of_these_is_stable(tmp_path):
    """The same rule for another spec: a constant beside the sum of exponentials."""
    spec = tmp_path / "softmax_one.yaml"
    spec.write_text(
        "op: softmax_one\ndoc: softmax with one class more, of score 0\nalgorithm: |\n"
        "  Func total, softmax_one; In A; Var x; RVar y;\n"
        "  total[x] = 1 + rsum(exp(A[x, y]), y);\n  softmax_one[x, y] = exp(A[x, y]) / total[x];\n"
    )
    op = dtkernels.register(spec)
    x = (50 * torch.randn(5, 33, generator=torch.Generator().manual_seed(0)) + 60).requires_grad_()
    exact = x.detach().double().requires_grad_()
    wanted = torch.cat([exact, torch.zeros(5, 1)], 1).softmax(1)[:, :33]
    adjoint = torch.randn(5, 33)
    torch.testing.assert_close(op(x).double(), wanted, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(torch.autograd.grad(op(x), x, adjoint)[0].double(), torch.autograd.grad(wanted, exact, adjoint.double())[0], atol=1e-5, rtol=1e-5)
