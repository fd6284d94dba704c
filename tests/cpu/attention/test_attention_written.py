# ruff: noqa: E501 (expressions read best on one line)
"""Attention with scores and masks that a user writes, forward and backward, against float64; errors; partial results merged."""

import bounds  # noqa: F401 (an access outside the tensors raises)
import pytest
import torch
from attention_forms_truth import leaves, same, truth, visible

import dtkernels
from dtkernels import ops
from dtkernels.lang.errors import DTError

B, H, G, M, L = 2, 4, 2, 21, 21
m, l = torch.arange(M)[:, None], torch.arange(L)  # noqa: E741 (labels)


def numbers(*shape, seed=5):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def whole(below, *shape):
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(6))


CAUSAL = l <= m
#: name -> (arguments of attention_spec, inputs of the call, (scores, inputs) -> (scores, seen))
WRITTEN = {
    "ALiBi": (dict(score="s + slope[h] * (l - m)", mask="l <= m", inputs="slope"), {"slope": numbers(H)}, lambda s, x: (s + x["slope"][:, None, None] * (l - m), CAUSAL)),
    "prefix": (dict(mask="l <= m or l < prefix[b]", inputs="prefix"), {"prefix": torch.tensor([5, 0])}, lambda s, x: (s, CAUSAL | (l < x["prefix"][:, None, None, None]))),
    "documents": (dict(mask="doc[b, m] == doc[b, l] and l <= m", inputs="doc"), {"doc": whole(3, B, M)}, lambda s, x: (s, CAUSAL & (x["doc"][:, None, :, None] == x["doc"][:, None, None]))),
    "window and global tokens": (dict(mask="l <= m and l > m - w or everywhere[l]", inputs=["everywhere"], scalars="w"), {"everywhere": torch.arange(L) % 7 == 0, "w": 4},
                                 lambda s, x: (s, CAUSAL & (l > m - 4) | x["everywhere"])),
    "softcap": (dict(score="cap * tanh(s / cap)", scalars=["cap"]), {"cap": 1.5}, lambda s, x: (1.5 * torch.tanh(s / 1.5), torch.ones(M, L) > 0)),
    "relative": (dict(score="s + bias[h, l - m + off]", inputs="bias", scalars="off"), {"bias": numbers(H, M + L - 1), "off": M - 1}, lambda s, x: (s + x["bias"][:, l - m + M - 1], torch.ones(M, L) > 0)),
    "blocks": (dict(mask="table[h, m / 8, l / 8]", inputs="table"), {"table": whole(2, H, 3, 3).bool()}, lambda s, x: (s, x["table"][:, m // 8, l // 8])),
    "two parts": (dict(score="s + scale * rdot(Q2[b, h, m, r], K2[b, l, r], r)", mask="l <= m", inputs="Q2 K2", sum_over="r"), {"Q2": numbers(B, H, M, 16), "K2": numbers(B, L, 16, seed=7)},
                  lambda s, x: (s + 0.25 * x["Q2"] @ x["K2"][:, None].mT, CAUSAL)),
    "a parameter": (dict(score="s * times", mask="not causal or l <= m", params={"causal": False, "times": 2}), {"causal": True}, lambda s, x: (s * 2, CAUSAL)),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_values_and_gradients(name):
    arguments, given, form = WRITTEN[name]
    function = dtkernels.attention_spec(**arguments)
    ours, exact = leaves((B, H, M, 16), (B, G, L, 16), (B, G, L, 8))
    floats = [n for n, t in given.items() if isinstance(t, torch.Tensor) and t.is_floating_point()]
    mine = {n: t.clone().requires_grad_() if n in floats else t for n, t in given.items()}
    right = {n: t.double().requires_grad_() if n in floats else t for n, t in given.items()}
    found = function(*ours, **mine)
    q, k, v = exact
    s = q @ k.repeat_interleave(H // G, 1).mT * 16**-0.5
    s, seen = form(s, right)
    s = s.masked_fill(~seen, -torch.inf)
    weights = torch.where(seen.any(-1, keepdim=True), torch.softmax(s, -1), 0.0).nan_to_num(0)
    wanted = weights @ v.repeat_interleave(H // G, 1)
    same((found,), (wanted,), [*ours, *(mine[n] for n in floats)], [*exact, *(right[n] for n in floats)], atol=1e-5)


def test_a_mask_of_ranges_bounds_the_loop():
    function = dtkernels.attention_spec(mask="lo[b, m] <= l and l < hi[b, m]", inputs="lo hi")
    text = function.operator.source((2, 4, 512, 64, 512, 64), gpu="a100")
    assert "for l_start in range(l_begin, " in text


WRONG = {
    "a name": (dict(score="s + slope[h] * l"), "score:1:5: undeclared tensor: found 'slope'"),
    "after the score": (dict(score="s + s * tilt", mask="l <= m"), "score:1:9: undeclared name: found 'tilt'"),
    "the mask": (dict(mask="l <= m and x[m]"), "mask:1:12: undeclared tensor: found 'x'"),
    "a power": (dict(score="s ** 2"), "score:1:4: syntax: found '.'; allowed: pow"),
    "an end": (dict(score="s +"), "score:1:4: syntax"),
    "two": (dict(score="s; s"), "score:1:2: one expression: found ';'"),
    "nothing": (dict(mask=" "), "mask is a DT expression"),
    "a taken name": (dict(score="s + Q[h]", inputs="Q"), "a name of attention_spec is declared once: found 'Q'"),
    "an unused name": (dict(inputs="slope"), "what is declared is used: found .*slope"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_expression_and_the_column(name):
    arguments, said = WRONG[name]
    with pytest.raises(DTError, match=said) as error:
        dtkernels.attention_spec(**arguments)
    assert "\n" not in str(error.value)


def test_a_missing_input_is_named():
    function = dtkernels.attention_spec(score="s + slope[h]", inputs="slope")
    with pytest.raises(TypeError, match="user_attention: slope is missing; allowed: a tensor"):
        function(*(torch.zeros(1, 2, 3, 8),) * 3)


# -- partial results ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 9, 21])
def test_two_halves_of_the_keys_merge_to_the_whole(cut):
    ours, exact = leaves((B, H, M, 16), (B, G, L, 16), (B, G, L, 8))
    q, k, v = ours
    halves = [ops.attention(q, k[:, :, a:b], v[:, :, a:b], causal=True, offset=-a, return_lse=True) for a, b in ((0, cut), (cut, L))]
    found = ops.merge_attention(halves[0][0], halves[0][1], halves[1][0], halves[1][1])
    same(found, truth(*exact, visible(torch.arange(M), torch.arange(L), causal=True)), ours, exact)


def test_merged_results_keep_their_dtype_and_rows_without_keys_stay_zero():
    a, none = torch.ones(3, 5, dtype=torch.float16), torch.full((3,), -torch.inf)
    result, lse = ops.merge_attention(a, torch.tensor([0.0, 200.0, -200.0]), a * 3, torch.tensor([0.0, -200.0, 200.0]))
    assert result.dtype == torch.float16 and torch.equal(result[:, 0], torch.tensor([2.0, 1.0, 3.0]).half()) and lse.dtype == torch.float32
    result, lse = ops.merge_attention(a * 0, none, a * 0, none)
    assert not result.any() and torch.equal(lse, none)


def test_shapes_that_do_not_fit_are_one_line():
    with pytest.raises(ValueError, match=r"merge_attention: a and b \(..., N\)"):
        ops.merge_attention(torch.zeros(2, 3), torch.zeros(2), torch.zeros(2, 3), torch.zeros(3))
