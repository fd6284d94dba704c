"""Masks as numbers: they say what sdpa's matrices say, and no matrix is made of them."""

import copy
import pickle

import pytest
import torch

pytest.importorskip("transformers")

from dtkernels.integrations.huggingface import patched
from dtkernels.integrations.huggingface.attention import masks
from dtkernels.integrations.huggingface.attention.masks import OVERLAY, dtkernels_mask
from dtkernels.integrations.huggingface.attention.visible_keys import KeyMask, key_mask, visible_keys_of
from functorch.compile import make_boxed_func
from huggingface_calls import IDS, MODELS, PADDED, Attention, agrees_with_sdpa, inputs, matrices
from torch._dynamo.backends.common import aot_autograd
from transformers import masking_utils as form
from transformers.masking_utils import sdpa_mask

if not hasattr(form, "packed_sequence_mask_function"):
    pytest.skip("this version of transformers passes positions in another form", allow_module_level=True)

POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7]])
NUMBERS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [0] * 8])
START = torch.tensor([1, 0])
FLAGS = torch.ones(2, 8, dtype=torch.bool).index_put_((torch.tensor([0, 1]), torch.tensor([0, 5])), torch.tensor(False))


def packed(function):
    if hasattr(form, "packed_sequence_compatibility_function"):  # both in one, in transformers 5.23
        return form.packed_sequence_compatibility_function(function, POSITIONS, NUMBERS)
    return form.and_masks(form.remap_positions_for_packed_sequence(function, POSITIONS), form.packed_sequence_mask_function(NUMBERS))


FORMS = {
    "causal": lambda: form.causal_mask_function,
    "all": lambda: form.bidirectional_mask_function,
    "window": lambda: form.sliding_window_causal_mask_function(4),
    "window to both sides": lambda: form.sliding_window_bidirectional_mask_function(3),
    "chunks": lambda: form.chunked_causal_mask_function(3, START),
    "packed": lambda: packed(form.causal_mask_function),
    "packed window": lambda: packed(form.sliding_window_causal_mask_function(4)),
    "packed chunks": lambda: packed(form.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.long))),
    "padding of its own": lambda: form.and_masks(form.causal_mask_function, form.padding_mask_function(FLAGS)),
}
MATRICES = {
    "blocks that see each other": lambda: form.or_masks(form.causal_mask_function, form.blockwise_overlay(NUMBERS)),
    "a function of somebody": lambda: form.and_masks(form.causal_mask_function, lambda b, h, q, k: torch.where(k == 2, False, True)),
    "python that asks": lambda: lambda b, h, q, k: k <= q if not isinstance(q, int) and q.shape else None,
}
SIZES = {
    "as many keys": {"q_length": 8, "kv_length": 8},
    "a cache": {"q_length": 3, "kv_length": 8, "q_offset": 5},
    "one query": {"q_length": 1, "kv_length": 8, "q_offset": 7},
    "a sliding cache": {"q_length": 3, "kv_length": 5, "q_offset": 5, "kv_offset": 3},
    "a static cache": {"q_length": 3, "kv_length": 8, "q_offset": torch.tensor(2)},
}


@pytest.fixture(autouse=True)
def by_the_reference(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("DTKERNELS_FALLBACK", "reference")


PAIRS = [(name, sizes) for name in FORMS for sizes in SIZES if sizes == "as many keys" or not name.startswith("packed")]  # packed: without a cache


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("name", "sizes"), PAIRS)
def test_numbers_say_what_the_matrix_says(name, sizes, padded):
    given = {"batch_size": 2, "attention_mask": FLAGS if padded else None, "allow_is_causal_skip": False, **SIZES[sizes]}
    mask, right = dtkernels_mask(**given, mask_function=FORMS[name]()), sdpa_mask(**given, mask_function=FORMS[name]())
    assert type(mask) is KeyMask and mask.matrix is None and (mask.shape, mask.dtype, mask.device) == (right.shape, right.dtype, right.device)
    assert visible_keys_of(mask, *right.shape[-2:]) is not None and torch.equal(mask, right)


@pytest.mark.parametrize("name", [*FORMS, "blocks that see each other", "a function of somebody"])
def test_compiled_code_reads_the_same(name):
    forms = FORMS | MATRICES

    def made():
        mask = dtkernels_mask(batch_size=2, q_length=8, kv_length=8, mask_function=forms[name](), allow_is_causal_skip=False)
        return visible_keys_of(mask, 8, 8) is not None, torch.where(mask, 1, 0)

    torch._dynamo.reset()
    in_numbers, flags = torch.compile(made, backend="eager", fullgraph=True)()
    assert in_numbers == (name in FORMS)
    assert torch.equal(flags.bool(), sdpa_mask(batch_size=2, q_length=8, kv_length=8, mask_function=forms[name](), allow_is_causal_skip=False))


@pytest.mark.parametrize("name", MATRICES)
def test_anything_else_is_transformers_own_matrix_and_counted(name):
    given = {"batch_size": 2, "q_length": 8, "kv_length": 8, "allow_is_causal_skip": False, "mask_function": MATRICES[name]()}
    mask = dtkernels_mask(**given)
    assert type(mask) is torch.Tensor and torch.equal(mask, sdpa_mask(**given))
    module = Attention()
    agrees_with_sdpa(module, inputs(queries=8, keys=8), mask)
    assert module.record.matrices == {OVERLAY: 1}


@pytest.mark.parametrize("given", [{"use_vmap": True}, {"attention_mask": torch.ones(2, 1, 8, 8, dtype=torch.bool)}], ids=["vmap", "4-d"])
def test_what_only_a_closure_holds_is_not_guessed(given, monkeypatch):
    monkeypatch.setattr(masks, "sdpa_mask", lambda **_: torch.ones(2, 1, 8, 8, dtype=torch.bool))
    assert type(dtkernels_mask(batch_size=2, q_length=8, kv_length=8, allow_is_causal_skip=False, **given)) is torch.Tensor


def test_a_model_counts_its_matrices():
    model = MODELS["llama"]().eval()
    model.set_attn_implementation("sdpa")
    with torch.no_grad(), patched(model, ops=["attention"]) as report:
        positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]]).expand(2, -1)
        model(IDS, position_ids=positions, use_cache=False)
        model(IDS, use_cache=False, **PADDED)
        assert not report.matrices and not report.fallbacks
        model(IDS, use_cache=False, attention_mask=torch.ones(2, 1, 9, 9, dtype=torch.bool).tril())
    assert list(report.matrices.values()) == [2] and not report.fallbacks and "as a matrix: 2" in str(report)


def written(mask):
    mask[..., 2] = False
    return mask


USES = {
    "sliced": lambda m: m[:, :, 2:, :5],
    "cut to fewer keys": lambda m: m[:, :, :, :5],
    "one head": lambda m: m[:, 0],
    "copied": lambda m: m.clone(),
    "contiguous": lambda m: m.contiguous(),
    "joined": lambda m: torch.cat([m, m], -1),
    "expanded": lambda m: m.expand(-1, 4, -1, -1),
    "negated": lambda m: ~m,
    "to numbers": lambda m: torch.where(m, 0.0, -1.0),
    "cast": lambda m: m.to(torch.float32),
    "added": lambda m: 1.0 + m,
    "moved": lambda m: m.to("cpu", non_blocking=True),
    "written": written,
    "filled in place": lambda m: m.clone().masked_fill_(m, False),
    "copied deeply": copy.deepcopy,
    "stored": lambda m: pickle.loads(pickle.dumps(m)),
    "to NumPy": lambda m: torch.from_numpy(m.contiguous().numpy()),
    "vmapped": lambda m: torch.vmap(lambda x: x & True)(m.clone()),
    "unbound": lambda m: m.unbind(0)[0],
    "detached": lambda m: m.detach().requires_grad_(False),
    "printed": lambda m: torch.tensor(len(repr(m))),
}


@pytest.mark.parametrize("name", USES)
def test_code_of_a_model_may_do_with_it_what_it_likes(name):
    given = {"batch_size": 2, "q_length": 8, "kv_length": 8, "attention_mask": FLAGS, "allow_is_causal_skip": False}
    mask, right = dtkernels_mask(**given), sdpa_mask(**given).clone()
    found, expected = USES[name](mask), USES[name](right)
    assert found.shape == expected.shape and torch.equal(found, expected)
    assert torch.equal(mask, right)  # changed alike, or not at all
    reach = visible_keys_of(mask, 8, 8)
    assert (reach is None) == (name == "written")
    agrees_with_sdpa(Attention(), inputs(queries=8, keys=8), mask)


def test_it_goes_through_both_kinds_of_checkpoints():
    mask = dtkernels_mask(batch_size=2, q_length=8, kv_length=8, attention_mask=FLAGS, allow_is_causal_skip=False)
    module, seen = Attention(), []

    def layer(x, mask):
        from dtkernels.integrations.huggingface.attention.attention_function import dtkernels_attention

        seen.append(visible_keys_of(mask, 8, 8) is not None)
        return dtkernels_attention(module, x, x, x, mask)[0]

    x = inputs(queries=8, keys=8)[0].requires_grad_()
    grads = []
    for reentrant in (False, True):
        out = torch.utils.checkpoint.checkpoint(layer, x, mask, use_reentrant=reentrant)
        grads.append(torch.autograd.grad(out.sum(), x)[0] if not reentrant else (out.sum().backward(), x.grad)[1])
    torch.testing.assert_close(grads[0], grads[1])
    assert seen == [True] * 4 and mask.matrix is None


@pytest.mark.parametrize(("name", "given", "dynamic"), [("mistral", {}, True), ("opt", PADDED, False)], ids=["mistral", "opt"])
def test_no_node_of_a_compiled_training_step_is_a_matrix(name, given, dynamic):
    """One graph, forward and backward, at any length."""
    torch.manual_seed(0)
    model, found = MODELS[name]().train(), []

    def compiler(graph, _):
        found.append(matrices(graph.graph))
        return make_boxed_func(graph.forward)

    def gradients(model, times):
        model.zero_grad()
        ids = torch.cat([IDS] * times, 1)
        more = {key: torch.cat([flags] * times, 1) for key, flags in given.items()}
        logits = model(ids, use_cache=False, **more)[0]
        (logits.square() * (more["attention_mask"][..., None] if more else 1)).mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = [gradients(model, times) for times in (1, 2)]
    with patched(model, ops=["attention"]):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=aot_autograd(fw_compiler=compiler), fullgraph=True, dynamic=dynamic or None)
        compiled.zero_grad = model.zero_grad
        for times, right in zip((1, 2), expected, strict=True):
            for ours, theirs in zip(gradients(compiled, times), right, strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    assert found and not any(found)


def test_a_tensor_of_no_class_of_its_own_is_made_for_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    reach = visible_keys_of(dtkernels_mask(batch_size=2, q_length=8, kv_length=8, allow_is_causal_skip=False), 8, 8)
    with FakeTensorMode():
        mask = key_mask(reach, 2, 8, 8, "cpu")
        assert mask.shape == (2, 1, 8, 8) and mask.dim() == 4 and mask[:, :, :, :8] is mask and mask.to("cpu") is mask
        assert mask[:, :, :, :4].shape == (2, 1, 8, 4) and (~mask).dtype == torch.bool and (1.0 + mask).dtype == torch.float32
        assert torch.cat([mask, mask], -1).shape == (2, 1, 8, 16) and mask.expand(2, 4, 8, 8).shape == (2, 4, 8, 8)
