"""`apply_to(model, graphs=True)` with CUDA graphs: the same tokens as without, in fewer launches."""

import gc
import threading

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from dtkernels.integrations.huggingface import apply_to
from dtkernels.integrations.huggingface.generation.decode_graphs import WARM_UPS
from dtkernels.integrations.huggingface.generation.graph_patch import bucket
from torch.profiler import ProfilerActivity, profile

IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 520, "num_hidden_layers": 4, "num_attention_heads": 4, **IDS}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512}
WINDOW = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2}
MODELS = {"llama": ("Llama", "Llama", GROUPED), "qwen3": ("Qwen3", "Qwen3", GROUPED), "gemma2": ("Gemma2", "Gemma2", GROUPED | WINDOW), "gemma3": ("Gemma3", "Gemma3Text", GROUPED | WINDOW)}
NEW = 24


def model_of(name: str, dtype: torch.dtype):
    kind, config, sizes = MODELS[name]
    torch.manual_seed(0)
    with torch.device("cuda"):
        return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{config}Config")(**sizes)).to(dtype).eval()


def prompt(batch: int = 2, length: int = 50, padded: bool = False) -> dict:
    ids = torch.randint(3, 1000, (batch, length), generator=torch.Generator().manual_seed(length)).cuda()
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :20] = 0
    return {"input_ids": ids, "attention_mask": mask}


def tokens(model, given: dict, **more) -> list:
    torch.manual_seed(3)
    return model.generate(**given, **{"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, **more}).tolist()


def alike(given: dict) -> dict:
    """What makes a generation without graphs call the same kernels: in 16 bits other kernels may choose another token."""
    return {"cache_implementation": "static", "disable_compile": True, "max_cache_len": bucket(given["input_ids"].shape[1] + NEW)}


def launches(work) -> tuple[int, int]:
    """Return how many kernels and how many graphs a call launches."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    names = [event.name for event in found.events()]
    return sum("LaunchKernel" in name for name in names), sum("GraphLaunch" in name for name in names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_the_same_tokens_in_fewer_launches(name, dtype):
    """A longer prompt, padding, another batch, prompts that fill a window on the way; then undone."""
    model = model_of(name, dtype)
    sizes = [prompt(), prompt(padded=True), prompt(length=120), prompt(batch=3), prompt(length=45)]
    with_patch = apply_to(model)
    wanted = [tokens(model, given, **(alike(given) if dtype == torch.bfloat16 else {})) for given in sizes]
    before = launches(lambda: tokens(model, sizes[0]))
    with_patch.undo()
    report = apply_to(model, graphs=True)
    for given, right in zip(sizes, wanted, strict=True):
        assert tokens(model, given) == right, f"prompts of {tuple(given['input_ids'].shape)}\n{report}"
    paths = report.paths["graphs"]
    assert sum(paths.values()) == len(sizes) * (NEW - 1) and paths["own path"] == 0, str(report)
    after = launches(lambda: tokens(model, sizes[0]))
    said = f"(kernels, graphs) before {before}, after {after}; steps {dict(paths)}, then {dict(report.paths['graphs'])}\n{report}"
    assert report.paths["graphs"]["warm-up"] == paths["warm-up"], said
    assert before[1] == 0 and after[1] >= NEW - 1 and after[0] < before[0], said
    assert tokens(model, sizes[0]) == wanted[0], said
    report.undo()
    assert launches(lambda: tokens(model, sizes[0]))[1] == 0


@pytest.mark.parametrize("mode", [{"do_sample": True, "top_k": 20}, {"num_beams": 3}, {"repetition_penalty": 1.3}], ids=str)
def test_ways_to_generate(mode):
    model = model_of("llama", torch.float32)
    with_patch = apply_to(model)
    wanted = tokens(model, prompt(padded=True), **mode)
    with_patch.undo()
    report = apply_to(model, graphs=True)
    assert [tokens(model, prompt(padded=True), **mode) for _ in range(2)] == [wanted, wanted]
    assert report.paths["graphs"]["graph"] == 2 * (NEW - 1) - WARM_UPS, str(report)


def test_weights_change_in_place_and_move():
    model, other = model_of("llama", torch.float32), model_of("llama", torch.float32)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    report = apply_to(model, graphs=True)
    apply_to(other)
    tokens(model, prompt())
    model.load_state_dict(other.state_dict())
    assert tokens(model, prompt()) == tokens(other, prompt()) and report.paths["graphs"]["warm-up"] == WARM_UPS
    model.cpu().cuda()
    assert tokens(model, prompt()) == tokens(other, prompt()) and report.paths["graphs"]["warm-up"] == 2 * WARM_UPS


def test_a_cache_that_is_kept_is_not_written_to_and_memory_does_not_grow():
    model = model_of("llama", torch.float32)
    apply_to(model, graphs=True)
    kept = model.generate(**prompt(), max_new_tokens=NEW, return_dict_in_generate=True, do_sample=False)
    cache = getattr(kept, "cache", None) or kept.past_key_values
    keys = cache.layers[0].keys.clone()
    tokens(model, prompt(length=48))
    assert torch.equal(cache.layers[0].keys, keys)
    del kept, cache
    held = []
    for _ in range(4):
        tokens(model, prompt())
        gc.collect()
        held.append(torch.cuda.memory_allocated())
    assert held[-1] == held[1], held


def test_two_threads_on_streams_of_their_own():
    model = model_of("llama", torch.float32)
    with_patch = apply_to(model)
    wanted = [tokens(model, prompt(length=n)) for n in (50, 45)]
    with_patch.undo()
    report = apply_to(model, graphs=True)
    found: dict = {}

    def work(place):
        with torch.cuda.stream(torch.cuda.Stream()):
            found[place] = [model.generate(**prompt(length=(50, 45)[place]), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False).tolist() for _ in range(3)]

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(place,)) for place in (0, 1)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert found == {0: [wanted[0]] * 3, 1: [wanted[1]] * 3}, str(report)
