"""`apply_to(model, graphs=True)` with tapes in place of CUDA graphs: the same tokens, and what a graph may and may not hold."""

import copy
import gc
import inspect
import pickle
import threading

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from dtkernels.integrations.huggingface import apply_to
from dtkernels.integrations.huggingface.attention.visible_keys import KeyMask, VisibleKeys, key_mask, visible_keys_of
from dtkernels.integrations.huggingface.generation import recorders
from dtkernels.integrations.huggingface.generation.decode_graphs import MOST, WARM_UPS
from dtkernels.integrations.huggingface.generation.graph_patch import bucket
from dtkernels.integrations.huggingface.generation.static_arguments import put_together, take_apart
from graph_stand_in import TapeRecorder
from huggingface_models import GROUPED, SMALL, of, state
from transformers import DynamicCache, StaticCache

WINDOW = {**GROUPED, "sliding_window": 8}
MODELS = {
    "llama": ("Llama", GROUPED),
    "qwen3": ("Qwen3", GROUPED),
    "gemma2": ("Gemma2", {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}),
    "gemma3": ("Gemma3", {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}),
    "mistral": ("Mistral", WINDOW),
    "opt": ("OPT", {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}),
}
NEW = 12


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch):
    """A tape holds operations of torch, which an interpreted kernel is not."""
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.delenv("DTKERNELS_FALLBACK", raising=False)


@pytest.fixture
def recorder(monkeypatch):
    """Tapes for tensors on a CPU."""
    made = TapeRecorder()
    monkeypatch.setitem(recorders._RECORDERS, "cpu", made)
    return made


def model_of(name: str):
    kind, config = MODELS[name]
    if kind != "Gemma3":
        return of(kind, **config)
    torch.manual_seed(0)
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**config)).eval()


def prompt(batch: int = 2, length: int = 6, padded: bool = False) -> dict:
    ids = torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def tokens(model, given: dict, **more) -> list:
    torch.manual_seed(3)
    return model.generate(**given, **{"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, **more}).tolist()


@pytest.mark.parametrize("name, fallback", [*[(name, "own") for name in MODELS], *[(name, "reference") for name in ("gemma3", "mistral")]])
def test_the_same_tokens_by_replays(name, fallback, recorder, monkeypatch):
    """Prompts shorter than a window, as long, longer. With the op's reference masks reach attention in numbers, as they do on a GPU."""
    monkeypatch.setenv("DTKERNELS_FALLBACK", fallback)
    model = model_of(name)
    before = state(model)
    sizes = [prompt(), prompt(padded=True), prompt(length=9), prompt(batch=3, length=8)]
    wanted = [tokens(model, given) for given in sizes]
    report = apply_to(model, ops="attention", graphs=True)
    assert [tokens(model, given) for given in sizes] == wanted
    replayed = report.paths["graphs"]
    assert replayed["graph"] == recorder.replays > 0 and sum(replayed.values()) == len(sizes) * (NEW - 1)
    assert replayed["own path"] == 0 and replayed["warm-up"] == recorder.warm_ups <= 2 * WARM_UPS * len(recorder.tapes), str(report)
    assert set(report.fallbacks) <= {"no kernel runs on a CPU"}
    assert tokens(model, sizes[-1]) == wanted[-1] and recorder.warm_ups == replayed["warm-up"], "a size that is known warms up no more"
    report.undo()
    played = recorder.replays
    assert tokens(model, sizes[0]) == wanted[0] and recorder.replays == played
    assert state(model)[0] == before[0]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("mode", [{"do_sample": True, "top_k": 20}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}, {"repetition_penalty": 1.3}], ids=str)
def test_ways_to_generate(name, mode, recorder):
    model = model_of(name)
    wanted = tokens(model, prompt(padded=True), **mode)
    apply_to(model, graphs=True)
    assert [tokens(model, prompt(padded=True), **mode) for _ in range(2)] == [wanted, wanted]
    assert recorder.replays > NEW


def test_scores_hidden_states_and_the_cache_are_the_callers(recorder):
    model = model_of("llama")
    asked = {"return_dict_in_generate": True, "output_logits": True, "output_hidden_states": True, "max_new_tokens": NEW, "do_sample": False}
    wanted = model.generate(**prompt(), **asked)
    report = apply_to(model, graphs=True)
    first = model.generate(**prompt(), **asked)
    kept = first.past_key_values if hasattr(first, "past_key_values") else first.cache
    length, keys = int(kept.get_seq_length()), kept.layers[0].keys.clone()
    second = model.generate(**prompt(length=7), **asked)
    assert report.paths["graphs"]["graph"] > NEW and second.sequences.shape[1] == 7 + NEW
    assert int(kept.get_seq_length()) == length and torch.equal(kept.layers[0].keys, keys), "a cache that the caller keeps is not written to"
    for found, right in zip(first.logits, wanted.logits, strict=True):
        torch.testing.assert_close(found, right)
    for found, right in zip(first.hidden_states, wanted.hidden_states, strict=True):
        torch.testing.assert_close(found[-1], right[-1])


def test_inputs_and_memory_are_static(recorder):
    """What the tape reads is written before it is played: a later generation, with another cache, plays the same tape."""
    model = model_of("llama")
    apply_to(model, ops="attention", graphs=True)
    tokens(model, prompt())
    graphs = model.forward.args[1]
    (graph,) = graphs.graphs
    addresses = [t.data_ptr() for held in graph.memory.layers for t in held.values()], [t.data_ptr() for t in graph.inputs]
    gc.collect()
    assert graph.memory.owner() is None
    tokens(model, prompt(length=5))
    assert graphs.graphs == [graph] and len(recorder.tapes) == 1
    assert addresses == ([t.data_ptr() for held in graph.memory.layers for t in held.values()], [t.data_ptr() for t in graph.inputs])


def test_weights_may_change_in_place_and_move(recorder):
    model = model_of("llama")
    other = model_of("llama")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    report = apply_to(model, graphs=True)
    tokens(model, prompt())
    model.load_state_dict(other.state_dict())
    assert tokens(model, prompt()) == tokens(other, prompt()) and len(recorder.tapes) == 1
    model.double()
    assert tokens(model, prompt()) == tokens(other.double(), prompt()) and len(recorder.tapes) == 2
    model.model.layers[0].mlp.down_proj.weight = torch.nn.Parameter(torch.zeros_like(model.model.layers[0].mlp.down_proj.weight))
    other.model.layers[0].mlp.down_proj.weight.data.zero_()
    assert tokens(model, prompt()) == tokens(other, prompt()) and len(recorder.tapes) == 3
    handle = model.model.layers[0].register_forward_hook(lambda module, args, output: None)
    assert tokens(model, prompt()) == tokens(other, prompt()) and report.fallbacks["hooks on model.layers.0"] == NEW - 1
    handle.remove()
    played = recorder.replays
    tokens(model, prompt())
    assert recorder.replays == played + NEW - 1 - WARM_UPS


def test_the_number_of_graphs_is_bounded(recorder):
    model = model_of("llama")
    apply_to(model, graphs=True)
    for batch in range(1, MOST + 3):
        tokens(model, prompt(batch=batch))
    assert len(recorder.tapes) == MOST + 2 and len(model.forward.args[1].graphs) == MOST
    assert [bucket(n) for n in (1, 64, 65, 500, 513, 2112, 4097)] == [64, 64, 128, 512, 576, 2304, 4608]


@pytest.mark.parametrize(
    "asked, steps",
    [({"use_cache": False}, 0), ({"cache_implementation": "dynamic"}, NEW - 1), ({"past_key_values": DynamicCache}, NEW - 1), ({"prompt_lookup_num_tokens": 2}, None)],
    ids=str,
)
def test_what_the_caller_asks_for_comes_first(asked, steps, recorder):
    model = model_of("llama")
    given = prompt(batch=1)

    def now():
        return {cache_name(model) if key == "past_key_values" else key: value() if value is DynamicCache else value for key, value in asked.items()}

    wanted = tokens(model, given, **now())
    report = apply_to(model, graphs=True)
    assert tokens(model, given, **now()) == wanted and recorder.replays == 0
    assert steps is None or report.fallbacks["a cache of class DynamicCache"] + report.fallbacks["a cache with layers of class DynamicLayer"] == steps


def own_loop(model) -> list:
    """Fourteen tokens without `generate`, with a static cache."""
    cache, ids, found = StaticCache(config=model.config, max_cache_len=32), prompt()["input_ids"], []
    with torch.no_grad():
        for _ in range(14):
            ids = model(input_ids=ids, **{cache_name(model): cache}).logits[:, -1:].argmax(-1)
            found.append(ids.tolist())
    return found


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_loop_of_ones_own(name, recorder):
    """The mask is made inside the forward. Gemma 2's, whose window Python counts, differs from step to step, and no graph holds it."""
    model = model_of(name)
    wanted = own_loop(model)
    report = apply_to(model, graphs=True)
    assert own_loop(model) == wanted and own_loop(model) == wanted
    if name == "llama":
        assert recorder.replays == 26 - WARM_UPS
    else:
        assert report.paths["graphs"]["graph"] == 0 and any("from step to step" in reason for reason in report.fallbacks), report.fallbacks


@pytest.mark.parametrize("segments", [False, True])
def test_a_mask_in_numbers_is_taken_apart(segments):
    numbers = (torch.arange(6).view(2, 3), torch.arange(8).view(2, 4)) if segments else None
    mask = key_mask(VisibleKeys(3, 0, torch.ones(1), torch.ones(2, 1, 1, 4, dtype=torch.bool), numbers), 2, 3, 4, "cpu")
    held: list = []
    structure = take_apart({"mask": mask, "more": (1, None)}, None, held)
    assert len(held) == (4 if segments else 2) and hash(structure) is not None
    again = put_together(structure, [t + 0 for t in held], None)
    assert type(again["mask"]) is KeyMask and again["more"] == (1, None)
    assert torch.equal(again["mask"] & True, mask & True)


def test_contiguous_keeps_a_mask_in_numbers():
    """`generate` calls it for each kind of layers in each step."""
    mask = key_mask(VisibleKeys(3, 0, 5), 1, 1, 8, "cpu")
    again = mask.contiguous()
    reach = visible_keys_of(again, 1, 8)
    assert type(again) is torch.Tensor and (reach.left, reach.right, float(reach.offset)) == (3, 0, 5), "a matrix, with a note of what it says"
    again.masked_fill_(torch.tensor(True), False)
    assert visible_keys_of(again, 1, 8) is None and not (again & True).any()
    assert visible_keys_of(mask, 1, 8) is mask.reach and (mask & True).any(), "as sdpa's expanded matrix, it is copied"


def cache_name(model) -> str:
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


class Waiting(torch.nn.Module):
    def __init__(self, inner, kind):
        super().__init__()
        self.inner, self.kind, self.count = inner, kind, 0

    def forward(self, x):
        if self.kind == "item" and x.sum().item() > 1e9:
            return x
        if self.kind == "random":
            return self.inner(x + 0 * torch.rand_like(x))
        if self.kind == "counts":
            self.count += 1
        if self.kind == "number":
            type(self).steps = getattr(type(self), "steps", 0) + 1
            return self.inner(x * (1 + type(self).steps) / (1 + type(self).steps))
        if self.kind == "constant":
            return self.inner(x) * torch.tensor([1.0], device=x.device)
        return self.inner(x)


@pytest.mark.parametrize(
    "kind, said",
    [("item", "waits for the device"), ("random", "random numbers"), ("counts", "sets Waiting.count"), ("number", "changes from step to step"), ("constant", None)],
)
def test_what_a_graph_cannot_hold_is_said(kind, said, recorder):
    model = model_of("llama")
    model.model.layers[1].mlp = Waiting(model.model.layers[1].mlp, kind).eval()
    wanted = tokens(model, prompt())
    report = apply_to(model, ops="attention", graphs=True)
    assert tokens(model, prompt()) == wanted
    assert recorder.replays == (0 if said else NEW - 1 - WARM_UPS)
    assert said is None or [reason for reason in report.fallbacks if said in reason], report.fallbacks


def test_a_capture_that_fails_leaves_the_step_to_the_model(recorder):
    model = model_of("gemma2")
    wanted = tokens(model, prompt())
    report = apply_to(model, graphs=True)
    recorder.fails = RuntimeError("operation not permitted\nmore")
    assert tokens(model, prompt()) == wanted and not recorder.replays
    assert report.fallbacks["capture failed: RuntimeError: operation not permitted"] > 0


def test_training_gradients_and_autocast_take_the_own_path(recorder):
    model = model_of("llama")
    report = apply_to(model, graphs=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = model.generate(**prompt(), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, return_dict_in_generate=True)
    assert report.fallbacks["autocast"] == NEW - 1
    assert isinstance(getattr(found, "cache", None) or found.past_key_values, DynamicCache)  # no graph comes of it: the cache stays
    name = cache_name(model)
    cache = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        model(**prompt(), **{name: cache})
    assert model(input_ids=torch.ones(2, 1, dtype=torch.long), **{name: cache}).logits.requires_grad
    assert report.fallbacks["gradients are on"] == 1 and recorder.replays == 0


def test_global_module_hooks_see_every_step(recorder):
    model = model_of("llama")
    report, seen = apply_to(model, ops="attention", graphs=True), []
    wanted, replays = tokens(model, prompt()), recorder.replays
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(module))
    assert tokens(model, prompt()) == wanted and recorder.replays == replays
    handle.remove()
    assert seen.count(model.model.norm) == NEW and report.fallbacks["global module hooks"] == NEW - 1
    assert tokens(model, prompt()) == wanted and recorder.replays > replays


def test_without_graphs_nothing_changes():
    """On a CPU the cache stays dynamic; each step is counted."""
    model = model_of("llama")
    wanted = tokens(model, prompt())
    report = apply_to(model, graphs=True)
    assert tokens(model, prompt()) == wanted
    assert report.fallbacks["no CUDA graphs on a CPU"] == NEW - 1 and report.paths["graphs"]["graph"] == 0
    found = model.generate(**prompt(), max_new_tokens=2, return_dict_in_generate=True)
    assert isinstance(getattr(found, "cache", None) or found.past_key_values, DynamicCache)
    assert "no CUDA graphs on a CPU" in str(report)


def test_models_without_static_caches_are_skipped():
    for model in (of("T5", "ForConditionalGeneration", vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4), torch.nn.Linear(2, 2)):
        report = apply_to(model, graphs=True)
        (row,) = [row for row in report.rows if row.op == "graphs"]
        assert row.state == "skipped" and row.reason
        report.undo()


def test_copies_files_signatures_and_threads(recorder):
    model = model_of("llama")
    signature = inspect.signature(model.forward), inspect.signature(model.generate)
    wanted = [tokens(model, prompt(length=n)) for n in (4, 6)]
    report = apply_to(model, ops="attention", graphs=True)
    assert (inspect.signature(model.forward), inspect.signature(model.generate)) == signature
    assert apply_to(model, graphs=True, ops="attention").already[-1].op == "graphs"
    tokens(model, prompt())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.forward.args[2] is twin and not twin.forward.args[1].graphs
        assert tokens(twin, prompt(length=4)) == wanted[0]
    found: dict = {}

    def work(place):
        found[place] = [tokens(model, prompt(length=(4, 6)[place])) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(place,)) for place in (0, 1)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert found == {0: [wanted[0]] * 3, 1: [wanted[1]] * 3}
    report.undo()
    assert not {"forward", "generate"} & set(vars(model))


def test_a_compiled_model_is_left_to_the_compiler(recorder):
    model = model_of("llama")
    wanted = model(**prompt()).logits
    apply_to(model, ops="attention", graphs=True)
    torch.testing.assert_close(torch.compile(model, backend="eager")(**prompt()).logits, wanted)
