"""The attention function that transformers calls: it computes what sdpa computes, and knows what it cannot."""

import pytest
import torch

pytest.importorskip("transformers")

from dtkernels.integrations import huggingface
from dtkernels.integrations.huggingface.attention import attention_function
from dtkernels.integrations.huggingface.attention.attention_function import dtkernels_attention
from dtkernels.integrations.huggingface.attention.masks import dtkernels_mask
from dtkernels.integrations.huggingface.attention.visible_keys import visible_keys_of
from dtkernels.integrations.huggingface.patching.call_stats import ATTRIBUTE, CallRecord
from huggingface_calls import Attention, agrees_with_sdpa, inline_access, inputs
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sliding_window_causal_mask_function

from dtkernels import ops


def test_the_name_is_registered_with_attention_and_masks():
    assert AttentionInterface()["dtkernels"] is dtkernels_attention
    assert AttentionMaskInterface()["dtkernels"] is dtkernels_mask


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("queries, keys", [(5, 5), (5, 9), (1, 7), (1, 1), (9, 5)])
def test_no_mask_means_upper_left_causal_except_for_one_query(queries, keys, is_causal):
    agrees_with_sdpa(Attention(is_causal=is_causal), inputs(queries=queries, keys=keys))


@pytest.mark.parametrize("asked", [True, False])
def test_is_causal_as_an_argument_beats_the_module(asked):
    agrees_with_sdpa(Attention(is_causal=not asked), inputs(), is_causal=asked)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_key_and_value_heads_may_be_shared_by_query_heads(kv_heads):
    agrees_with_sdpa(Attention(groups=4 // kv_heads), inputs(kv_heads=kv_heads))


def test_value_width_may_differ_and_scaling_is_used():
    agrees_with_sdpa(Attention(), inputs(width=24, value_width=40), scaling=0.3)


def padding(keys=5):
    """True = attend: the first sequence is padded left, the second right with a hole; an expanded view."""
    rows = torch.ones(2, keys, dtype=torch.bool)
    rows[0, :2] = False
    rows[1, 1], rows[1, -1] = False, False
    return rows[:, None, None, :].expand(2, 1, 5, keys)


def test_boolean_masks_are_expanded_views():
    agrees_with_sdpa(Attention(), inputs(), padding())
    agrees_with_sdpa(Attention(groups=2), inputs(kv_heads=2), padding())


def test_rows_that_attend_to_nothing_are_zero():
    mask = padding() & torch.ones(5, 5, dtype=torch.bool).tril()
    assert not mask[0, 0, 0].any()
    module = Attention()
    agrees_with_sdpa(module, inputs(), mask)
    assert (dtkernels_attention(module, *inputs(), mask)[0][0, 0] == 0).all()


@pytest.mark.parametrize("shape", [(2, 4, 5, 5), (2, 1, 5, 5), (1, 4, 1, 5), (5, 5)])
def test_float_masks_are_added_and_broadcast(shape):
    mask = torch.randn(shape)
    mask[..., 0] = torch.finfo(torch.float32).min
    agrees_with_sdpa(Attention(), inputs(), mask)


def test_gradients_agree_with_sdpa():
    grads = []
    for function in (dtkernels_attention, sdpa_attention_forward):
        qkv = [x.requires_grad_() for x in inputs(kv_heads=2)]
        function(Attention(groups=2), *qkv, padding())[0].square().sum().backward()
        grads.append([x.grad for x in qkv])
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_autocast_casts_as_torch_attention_does(monkeypatch):
    seen = []
    attention_function = ops.attention
    monkeypatch.setattr(ops, "attention", lambda q, *rest, **kw: seen.append(q.dtype) or attention_function(q, *rest, **kw))
    with torch.autocast("cpu", dtype=torch.float16):
        output = dtkernels_attention(Attention(), *inputs(), None)[0]
    assert seen == [torch.float16] and output.dtype == torch.float16


def test_tensors_without_data_pass_through(monkeypatch):
    monkeypatch.setattr(ops, "attention", lambda q, k, v, *rest, **kw: q.new_empty(*q.shape[:3], v.shape[3]))
    output = dtkernels_attention(Attention(), *(x.to("meta") for x in inputs()), None)[0]
    assert output.device.type == "meta" and output.shape == (2, 5, 4, 16)


def test_harmless_arguments_do_not_matter():
    agrees_with_sdpa(Attention(), inputs(), position_ids=torch.arange(5)[None], use_cache=True, output_attentions=False, softcap=None)


@pytest.mark.parametrize(
    "kwargs, reason",
    [
        ({"sliding_window": 3}, "sliding_window without a mask"),
        ({"something_new": 1}, "something_new"),
    ],
)
def test_what_the_op_lacks_goes_to_sdpa_and_is_counted(kwargs, reason):
    agrees_with_sdpa(Attention(), inputs(), fallbacks=[reason], **kwargs)


def test_a_sliding_window_in_the_mask_is_no_fallback():
    window = torch.ones(5, 5, dtype=torch.bool).tril().triu(-2)[None, None]
    agrees_with_sdpa(Attention(), inputs(), window, sliding_window=3)


def test_odd_tensors_go_to_sdpa():
    agrees_with_sdpa(Attention(), inputs(dtype=torch.float64), fallbacks=["dtypes float64, float64, float64"])
    learned = [inputs()[0][:1], *inputs()[1:]]  # one set of queries for the whole batch
    agrees_with_sdpa(Attention(is_causal=False), learned, fallbacks=["batch, head or width sizes of q, k and v that do not match"])


def test_dropout_draws_the_same_numbers_as_before_the_patch():
    module = Attention()
    torch.manual_seed(1)
    ours, _ = dtkernels_attention(module, *inputs(), None, dropout=0.5)
    torch.manual_seed(1)
    inputs()  # seeds again
    theirs, _ = sdpa_attention_forward(module, *inputs(), None, dropout=0.5)
    assert torch.equal(ours, theirs) and module.record.fallbacks == {"dropout": 1}


def test_an_op_that_has_no_kernel_falls_back(monkeypatch):
    def refuse(*args, **kwargs):
        raise NotImplementedError("no kernel for D = 16")

    monkeypatch.setattr(ops, "attention", refuse)
    agrees_with_sdpa(Attention(), inputs(), fallbacks=["no kernel for D = 16"])


def test_masks_of_another_dtype_do_not_change_that_of_the_result():
    query, key, value = inputs(dtype=torch.float16)
    mask = torch.zeros(5, 5).masked_fill(padding()[:, :1] == 0, torch.finfo(torch.float32).min)
    output, _ = dtkernels_attention(Attention(), query, key, value, mask)
    wanted, _ = sdpa_attention_forward(Attention(), query, key, value, padding())
    assert output.dtype == torch.float16
    torch.testing.assert_close(output, wanted, atol=2e-3, rtol=2e-3)
    mask[:, :, 3] = torch.finfo(torch.float32).min  # nothing is seen
    assert dtkernels_attention(Attention(), query, key, value, mask)[0].isfinite().all()


@pytest.mark.parametrize("mask", [None, padding(), torch.randn(2, 1, 5, 5)], ids=["none", "boolean", "float"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_a_position_bias_is_added_beside_the_mask(mask, is_causal):
    bias = torch.randn(1, 4, 5, 5)
    agrees_with_sdpa(Attention(is_causal=is_causal), inputs(), mask, position_bias=bias)


def test_a_position_bias_and_a_mask_are_trained_as_by_sdpa():
    grads = []
    for function in (dtkernels_attention, sdpa_attention_forward):
        torch.manual_seed(3)
        bias, mask = torch.randn(1, 4, 5, 5, requires_grad=True), torch.randn(4, 5, 5, requires_grad=True)
        (function(Attention(), *inputs(), None, position_bias=bias)[0] * 2).sum().backward()
        function(Attention(), *inputs(), mask)[0].square().sum().backward()
        grads.append((bias.grad, mask.grad))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("given", [{"softcap": 1.5}, {"s_aux": torch.tensor([0.0, 1.0, -2.0, 5.0])}], ids=["softcap", "s_aux"])
@pytest.mark.parametrize("padded", [True, False])
def test_softcap_and_sinks_run_on_the_op(given, padded):
    module, qkv = Attention(), inputs()
    mask = torch.ones(5, 5, dtype=torch.bool).tril()[None, None].expand(2, 1, 5, 5)
    mask = mask & padding() | torch.eye(5, dtype=torch.bool) if padded else mask
    ours, weights = dtkernels_attention(module, *qkv, mask if padded else None, **given)
    torch.testing.assert_close(ours, inline_access(*qkv, mask, given.get("softcap"), given.get("s_aux")), atol=2e-6, rtol=1e-5)
    assert weights is None and module.record.calls == 1 and not module.record.fallbacks


# -- masks with a note of what they say -----------------------------------------------------------------------------------


def window(size):
    return sliding_window_causal_mask_function(size)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        {"q_length": 5, "kv_length": 9, "q_offset": 4, "mask_function": window(3)},
        {"q_length": 5, "kv_length": 5, "mask_function": window(3)},
        {"q_length": 5, "kv_length": 9, "q_offset": 4},
        {"q_length": 1, "kv_length": 9, "q_offset": 8, "mask_function": window(4)},
        {"q_length": 3, "kv_length": 6, "q_offset": 9, "kv_offset": 6, "mask_function": window(4)},
        {"q_length": 3, "kv_length": 12, "q_offset": torch.tensor([4])},
    ],
)
def test_windows_offsets_and_padding_reach_the_kernel_as_such(sizes, padded, monkeypatch):
    flags = torch.ones(2, 9, dtype=torch.bool)
    flags[0, :3], flags[1, 5] = False, False
    mask = dtkernels_mask(batch_size=2, attention_mask=flags if padded else None, allow_is_causal_skip=False, **sizes)
    queries, keys = sizes["q_length"], sizes["kv_length"]
    assert visible_keys_of(mask, queries, keys) is not None
    seen = []
    attention_function = ops.attention
    monkeypatch.setattr(ops, "attention", lambda q, k, v, m=None, **kw: seen.append(m) or attention_function(q, k, v, m, **kw))
    agrees_with_sdpa(Attention(), inputs(queries=queries, keys=keys), mask)
    assert seen[0] is None if not padded else seen[0].shape == (2, 1, 1, keys)


def test_a_mask_that_was_cut_or_made_otherwise_is_read_as_it_is():
    mask = dtkernels_mask(batch_size=2, q_length=5, kv_length=5, mask_function=window(3), allow_is_causal_skip=False)
    assert visible_keys_of(mask[:, :, :, :4], 5, 4) is None and visible_keys_of(mask.clone(), 5, 5) is None
    assert all(visible_keys_of(whole, 5, 5).window == (2, 0) for whole in (mask[:, :, :, :5], mask[..., :7], mask[:, :], mask.to("cpu"), mask.detach()))
    agrees_with_sdpa(Attention(), inputs(keys=4), mask[:, :, :, :4])
    sizes = {"batch_size": 2, "q_length": 5, "kv_length": 5, "allow_is_causal_skip": False}
    custom = dtkernels_mask(mask_function=lambda b, h, q, k: (k <= q) & (k != 2), **sizes)
    assert visible_keys_of(custom, 5, 5) is None
    agrees_with_sdpa(Attention(), inputs(), custom)


# -- fallbacks --------------------------------------------------------------------------------------------------------------


def eager_with_weights(module, query, key, value, attention_mask, scaling=None, dropout=0.0, softcap=None, **kwargs):
    """Stands for a modeling file's function: `seen` keeps the mask it was given."""
    eager_with_weights.seen = attention_mask
    weights = torch.zeros(*query.shape[:3], key.shape[2])
    return query.transpose(1, 2), weights


@pytest.mark.parametrize("given", [{"softcap": 30.0, "dropout": 0.1}, {"s_aux": torch.zeros(3)}, {"output_attentions": True}], ids=str)
def test_what_only_eager_computes_goes_there_with_a_float_mask(given):
    module = Attention(eager=eager_with_weights)
    _, weights = dtkernels_attention(module, *inputs(), padding(), **given)
    assert weights is not None and module.record.fallbacks.total() == 1
    lowest = torch.finfo(torch.float32).min
    assert torch.equal(eager_with_weights.seen, torch.where(padding(), 0.0, lowest))


def test_what_neither_path_reads_is_no_fallback():
    """Labels, token types and whatever else a model is called with come along; what sdpa or the eager function reads is another matter."""
    agrees_with_sdpa(Attention(eager=eager_with_weights), inputs(), labels=torch.zeros(2, 5), token_type_ids=torch.zeros(2, 5))
    for eager in (lambda *args, labels=None, **kwargs: (0, 0), lambda *args, **kwargs: (kwargs.get("labels"), 0)):
        module = Attention(eager=eager)
        dtkernels_attention(module, *inputs(), None, labels=torch.zeros(2, 5))
        assert module.record.fallbacks == {"labels": 1}


def test_eager_gets_the_causal_mask_that_sdpa_leaves_out():
    module = Attention(eager=eager_with_weights)
    dtkernels_attention(module, *inputs(keys=7), None, output_attentions=True)
    allowed = torch.ones(5, 7, dtype=torch.bool).tril()
    assert torch.equal(eager_with_weights.seen[0, 0] == 0, allowed)
    dtkernels_attention(module, *inputs(queries=1, keys=7), None, output_attentions=True)
    assert torch.equal(eager_with_weights.seen, torch.zeros(1, 1, 1, 7))
    dtkernels_attention(Attention(is_causal=False, eager=eager_with_weights), *inputs(queries=1, keys=7), None, output_attentions=True)
    assert eager_with_weights.seen is None


@pytest.mark.parametrize("original", ["sdpa", None])
def test_a_window_that_the_mask_holds_does_not_send_a_call_from_sdpa_to_eager(original):
    def eager(*args, sliding_window=None, **kwargs):
        raise AssertionError

    window = torch.ones(5, 5, dtype=torch.bool).tril().triu(-2)[None, None]
    agrees_with_sdpa(Attention(original=original, eager=eager), inputs(dtype=torch.float64), window, ["dtypes float64, float64, float64"], sliding_window=3)


def test_what_was_eager_before_falls_back_to_eager():
    module = Attention(original="eager", eager=eager_with_weights)
    assert dtkernels_attention(module, *inputs(), None, dropout=0.5)[1] is not None


@pytest.mark.parametrize("name", ["softcap", "s_aux", "indices", "block_indices"])
def test_what_nobody_computes_is_one_clear_error_and_never_dropped(name):
    with pytest.raises(NotImplementedError, match=f"^Attention passes {name}"):
        dtkernels_attention(Attention(), *inputs(), None, **{name: torch.ones(3)})


def test_modules_that_apply_to_never_saw_share_one_record():
    module = Attention()
    delattr(module, ATTRIBUTE)
    before = huggingface.unpatched_calls.calls
    dtkernels_attention(module, *inputs(), None)
    assert huggingface.unpatched_calls.calls == before + 1


def test_ever_new_reasons_are_lumped_together():
    record = CallRecord()
    for size in range(100):
        record.count(f"no kernel for D = {size}")
    assert len(record.fallbacks) < 25 and record.fallbacks.total() == record.calls == 100


def test_calls_go_to_sdpa_where_that_was_measured_to_be_faster(monkeypatch):
    reason, mask = "gradients without a mask: sdpa is faster", torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    matrix, causal = "a mask that is a matrix: sdpa is faster", dtkernels_mask(batch_size=2, q_length=5, kv_length=5, allow_is_causal_skip=False)
    padded = dtkernels_mask(batch_size=2, q_length=5, kv_length=5, attention_mask=torch.tensor([[True] * 5, [True] * 4 + [False]]))
    monkeypatch.setattr(attention_function, "_on_gpu", lambda tensor: True)
    cases = [
        ("sdpa", True, True, None, {}, [reason]),
        ("sdpa", True, False, None, {}, []),  # no gradients
        ("sdpa", False, True, None, {}, []),  # attention was asked for by name
        ("eager", True, True, None, {}, []),
        ("sdpa", True, True, mask, {}, [matrix]),
        ("sdpa", True, False, mask, {}, [matrix]),
        ("sdpa", False, True, mask, {}, []),
        ("sdpa", True, True, causal, {}, [reason]),  # sdpa needs no mask for it either
        ("sdpa", True, False, causal, {}, []),
        ("sdpa", True, False, padded, {}, []),
        ("sdpa", True, True, None, {"softcap": 20.0}, []),
    ]
    for original, auto, learning, given, kwargs, counted in cases:
        module = Attention(original=original)
        module.record.as_measured = auto
        qkv = [x.requires_grad_(learning) for x in inputs()]
        result, _ = dtkernels_attention(module, *qkv, given, **kwargs)
        assert list(module.record.fallbacks) == counted and module.record.calls == 1
        if learning:
            truth = [x.detach().double().requires_grad_() for x in qkv]
            scores = truth[0] @ truth[1].mT / 4
            scores = 20 * (scores / 20).tanh() if kwargs else scores
            wanted = (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ truth[2]).transpose(1, 2)
            for got, right in zip(torch.autograd.grad(result.sum(), qkv), torch.autograd.grad(wanted.sum(), truth)):
                torch.testing.assert_close(got.double(), right, atol=1e-5, rtol=1e-5)
    numbers = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]])
    function = masking_utils.and_masks(masking_utils.causal_mask_function, masking_utils.packed_sequence_mask_function(numbers))
    packed = dtkernels_mask(batch_size=2, q_length=5, kv_length=5, mask_function=function, allow_is_causal_skip=False)
    for auto in (True, False):
        module = Attention(original="sdpa")
        module.record.as_measured = auto
        agrees_with_sdpa(module, inputs(), packed, fallbacks=[])
    monkeypatch.undo()
    module = Attention()
    module.record.as_measured = True
    dtkernels_attention(module, *[x.requires_grad_() for x in inputs()], None)
    assert not module.record.fallbacks  # what was measured is a GPU


def test_only_what_auto_chose_goes_by_what_was_measured():
    from transformers import LlamaConfig, LlamaForCausalLM

    cases = [("auto", True), (["auto", "relu"], True), (iter(["relu", "auto"]), True), ("attention", False), ("all", False)]
    cases += [(["auto", "attention"], False), (["attention", "auto"], False), (["all", "auto"], False)]
    for asked, expected in cases:
        config = LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
        report = huggingface.apply_to(LlamaForCausalLM(config), asked)
        assert {row.record.as_measured for row in report.patched if row.op == "attention"} == {expected}
