"""Calls of the attention function like those that its checks let through before: quick, and whatever differs is noticed."""

import weakref

import pytest
import stand_in_gpu
import torch

pytest.importorskip("transformers")

from dtkernels.integrations.huggingface.attention import attention_call_cache, attention_function, visible_keys
from dtkernels.integrations.huggingface.attention.attention_function import dtkernels_attention
from dtkernels.integrations.huggingface.attention.masks import dtkernels_mask
from huggingface_calls import Attention, agrees_with_sdpa, inline_access, inputs
from transformers.masking_utils import sliding_window_causal_mask_function

from dtkernels import ops


@pytest.fixture
def gpu(monkeypatch):
    stand_in_gpu.use(monkeypatch)
    stand_in_gpu.fresh_ops(monkeypatch)


def decoding(padded=True, **sizes):
    """A mask for one query, as transformers has it made."""
    flags = torch.ones(2, 9, dtype=torch.bool)
    flags[0, :3] = not padded
    sizes = {"batch_size": 2, "q_length": 1, "kv_length": 9, "q_offset": 8, **sizes}
    return dtkernels_mask(attention_mask=flags, allow_is_causal_skip=False, **sizes)


SINKS, BIAS = torch.tensor([0.0, 1.0, -2.0, 3.0]), torch.linspace(-1, 1, 36).view(1, 4, 1, 9)
KNOWN_AGAIN = {
    "nothing": (None, {}),
    "padding": (decoding(), {}),
    "window": (decoding(mask_function=sliding_window_causal_mask_function(4)), {"sliding_window": 4}),
    "matrix": (decoding().clone(), {}),
    "bias": (None, {"position_bias": BIAS}),
    "harmless": (None, {"position_ids": torch.arange(2), "use_cache": True, "dropout": 0.0, "scaling": 0.4}),
}


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("name", KNOWN_AGAIN)
def test_one_query_is_not_looked_at_again_in_the_next_layer(gpu, name, kv_heads, monkeypatch):
    mask, given = KNOWN_AGAIN[name]
    dtkernels_attention(Attention(groups=4 // kv_heads), *inputs(queries=1, keys=9, kv_heads=kv_heads), mask, **given)
    monkeypatch.setattr(attention_function, "_unsupported", lambda *args: 1 / 0)
    monkeypatch.setattr(ops, "attention", lambda *args, **kwargs: 1 / 0)
    for layer in range(3):
        qkv = [x + layer for x in inputs(queries=1, keys=9, kv_heads=kv_heads)]
        changed = {n: v + layer if n == "position_bias" else v for n, v in given.items()}
        agrees_with_sdpa(Attention(groups=4 // kv_heads), qkv, mask, **changed)


def test_sinks_are_those_of_each_layer(gpu, monkeypatch):
    qkv, attention_call_cache = inputs(queries=1, keys=9), torch.ones(2, 1, 1, 9, dtype=torch.bool)
    for layer in range(3):
        ours, _ = dtkernels_attention(Attention(), *qkv, None, s_aux=SINKS + layer)
        torch.testing.assert_close(ours, inline_access(*qkv, attention_call_cache, sinks=SINKS + layer), atol=2e-6, rtol=1e-5)
        monkeypatch.setattr(attention_function, "_unsupported", lambda *args: 1 / 0)


def test_another_step_or_another_mask_is_looked_at(gpu):
    masks = [None, decoding(), decoding(False), decoding(mask_function=sliding_window_causal_mask_function(3)), torch.randn(2, 1, 1, 9), decoding().float().log()]
    for _ in range(2):
        for keys in (9, 7, 1):
            agrees_with_sdpa(Attention(), inputs(queries=1, keys=keys), None)
        for mask in masks:
            for scaling in (None, 0.5, 1, 1.0):
                agrees_with_sdpa(Attention(), inputs(queries=1, keys=9), mask, scaling=scaling)
        agrees_with_sdpa(Attention(), inputs(queries=9, keys=9), None)
        agrees_with_sdpa(Attention(groups=2), inputs(queries=1, keys=9, kv_heads=2), None)
    assert not decoding(False).equal(decoding())


class Marked(torch.Tensor):
    """Nobody's class."""


@pytest.mark.parametrize(
    "change, counted",
    [
        (lambda qkv: {"something_new": 1}, "something_new"),
        (lambda qkv: {"something_new": torch.ones(1)}, "something_new"),
        (lambda qkv: {"sliding_window": 3}, "sliding_window without a mask"),
        (lambda qkv: qkv.__setitem__(slice(None), [x.double() for x in qkv]), "dtypes float64, float64, float64"),
        (lambda qkv: qkv.__setitem__(0, qkv[0].as_subclass(Marked)), "tensor types Marked, Tensor, Tensor"),
        (lambda qkv: qkv.__setitem__(0, qkv[0][:1]), "batch, head or width sizes of q, k and v that do not match"),
    ],
)
def test_what_the_op_lacks_is_counted_however_often_the_rest_was_let_through(gpu, change, counted):
    for _ in range(3):
        agrees_with_sdpa(Attention(), inputs(queries=1, keys=9), None)
        module, qkv = Attention(), inputs(queries=1, keys=9)
        given = change(qkv) or {}
        dtkernels_attention(module, *qkv, None, **given)
        assert module.record.fallbacks == {counted: 1} and module.record.calls == 1


def test_an_argument_that_one_module_ignores_may_be_read_by_another(gpu):
    ignoring, reading = (Attention(eager=eager) for eager in (lambda *args, **kwargs: 0, lambda *args, labels=None, **kwargs: (0, 0)))
    for module in (ignoring, reading):
        for _ in range(2):
            dtkernels_attention(module, *inputs(queries=1, keys=9), None, labels=1)
    assert not ignoring.record.fallbacks and reading.record.fallbacks == {"labels": 2}


def test_what_torch_does_with_every_call_is_noticed_after_calls_that_were_let_through(gpu):
    def call(module, qkv):
        return dtkernels_attention(module, *qkv, None)[0]

    def tangents(module):
        with torch.autograd.forward_ad.dual_level():
            call(module, inputs(queries=1, keys=9))

    ways = {
        "torch.jit.trace": lambda module: torch.jit.trace(lambda *qkv: call(module, qkv), inputs(queries=1, keys=9), check_trace=False),
        "a transform of torch.func, such as vmap": lambda module: torch.vmap(lambda *qkv: call(module, qkv))(*[x[None] for x in inputs(queries=1, keys=9)]),
        "forward-mode differentiation": tangents,
        "dropout": lambda module: dtkernels_attention(module, *inputs(queries=1, keys=9), None, dropout=0.5),
    }
    for _ in range(2):
        for reason, way in ways.items():
            agrees_with_sdpa(Attention(), inputs(queries=1, keys=9), None)
            module = Attention()
            way(module)
            assert module.record.fallbacks == {reason: 1}


def test_autocast_and_gradients_are_noticed_after_calls_that_were_let_through(gpu):
    qkv = [x.requires_grad_() for x in inputs(queries=1, keys=9)]
    for _ in range(3):
        with torch.no_grad():
            assert not dtkernels_attention(Attention(), *qkv, None)[0].requires_grad
            with torch.autocast("cpu", dtype=torch.float16):
                assert dtkernels_attention(Attention(), *qkv, None)[0].dtype == torch.float16
        module = Attention()
        module.record.as_measured = True
        assert dtkernels_attention(module, *qkv, None)[0].requires_grad
        assert module.record.fallbacks == {"gradients without a mask: sdpa is faster": 1}


def test_attention_calls_of_a_stand_in_end_with_it(monkeypatch):
    """They had been found by later files of the same process, and the calls of earlier files by the stand-in."""
    given, launched = inputs(queries=1, keys=9), []
    before = attention_call_cache._seen, dict(attention_call_cache._named)
    with monkeypatch.context() as stand_in:
        stand_in_gpu.use(stand_in)
        for _ in range(2):
            agrees_with_sdpa(Attention(), given, None)
        (seen,) = attention_call_cache._seen
        launched.append(seen)
    assert (attention_call_cache._seen, dict(attention_call_cache._named)) == before and launched[0] not in before[0]


def test_masks_of_steps_that_are_over_are_not_kept_alive(gpu):
    mask = decoding()
    for _ in range(2):
        agrees_with_sdpa(Attention(), inputs(queries=1, keys=9), mask)
    gone = weakref.ref(mask)
    del mask
    assert gone() is None


def test_a_length_of_a_generation_before_is_known_in_the_next_one_with_its_new_masks(gpu, monkeypatch):
    def generation(expected: str) -> None:
        for keys in range(9, 19):
            flags = torch.arange(keys).ge(torch.tensor([[3], [0]]))
            mask = dtkernels_mask(batch_size=2, q_length=1, kv_length=keys, q_offset=keys - 1, attention_mask=flags, allow_is_causal_skip=False)
            for given in (None, mask):
                agrees_with_sdpa(Attention(), inputs(queries=1, keys=keys), given, scaling=0.3)
        assert len(attention_call_cache._named) == 20 and len(attention_call_cache._seen) == attention_call_cache.KEPT, expected

    generation("learned")
    with monkeypatch.context() as patch:
        patch.setattr(attention_function, "_unsupported", lambda *args: 1 / 0)
        generation("known")
        with pytest.raises(ZeroDivisionError):  # an offset of its own
            agrees_with_sdpa(Attention(), inputs(queries=1, keys=9), decoding(q_offset=4))
        with pytest.raises(ZeroDivisionError):
            agrees_with_sdpa(Attention(), inputs(queries=1, keys=9), None, scaling=torch.tensor(0.3))
    monkeypatch.setattr(attention_call_cache._named, "limit", 20)
    agrees_with_sdpa(Attention(), inputs(queries=1, keys=5), None)
    assert len(attention_call_cache._named) == 20


@pytest.mark.parametrize("queries", [1, 9])
def test_a_mask_that_was_written_to_says_what_it_says_now(gpu, queries):
    flags = torch.ones(1, 9, dtype=torch.bool)
    mask = dtkernels_mask(batch_size=1, q_length=queries, kv_length=9, q_offset=9 - queries, attention_mask=flags, allow_is_causal_skip=False)
    qkv = [x[:1] for x in inputs(queries=queries, keys=9)]
    for step in range(4):
        for _ in range(2):  # known the second time
            agrees_with_sdpa(Attention(), qkv, mask)
        mask[..., step] = step % 2 == 1
    assert not hasattr(mask.clone(), visible_keys.NOTE) and visible_keys.noted_keys(mask) is None


def test_a_mask_made_where_torch_counts_no_writes_keeps_its_note(gpu):
    with torch.inference_mode():
        mask = decoding()
        for _ in range(3):
            agrees_with_sdpa(Attention(), inputs(queries=1, keys=9), mask)
        assert visible_keys.visible_keys_of(mask, 1, 9) is not None
