"""What `apply_to` patches in model types of transformers, by tools/coverage.py: patched/found of each part."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

import coverage  # noqa: E402

# attention, norms, gated MLP, squared ReLU, rope, loss, experts
EXPECTED = {
    "llama": "2/2 5/5 2/2 0/0 2/2 1/1 0/0",
    "mistral": "2/2 5/5 2/2 0/0 2/2 1/1 0/0",
    "qwen2": "2/2 5/5 2/2 0/0 2/2 1/1 0/0",
    "qwen3": "2/2 9/9 2/2 0/0 2/2 1/1 0/0",
    "gemma2": "2/2 9/9 2/2 0/0 2/2 1/1 0/0",
    "gemma3_text": "2/2 13/13 2/2 0/0 2/2 1/1 0/0",
    "phi3": "2/2 5/5 2/2 0/0 2/2 1/1 0/0",
    "gpt2": "2/2 5/5 0/0 0/0 0/0 1/1 0/0",
    "gptj": "0/1 3/3 0/0 0/0 0/0 1/1 0/0",
    "gpt_neox": "2/2 5/5 0/0 0/0 2/2 1/1 0/0",
    "opt": "2/2 5/5 0/0 0/0 0/0 1/1 0/0",
    "bert": "2/2 6/6 0/0 0/0 0/0 1/1 0/0",
    "roberta": "2/2 6/6 0/0 0/0 0/0 1/1 0/0",
    "modernbert": "2/2 6/6 2/2 0/0 2/2 0/0 0/0",
    "t5": "6/6 12/12 0/0 0/0 0/0 0/0 0/0",
    "bart": "4/4 7/7 0/0 0/0 0/0 0/0 0/0",
    "mixtral": "2/2 5/5 0/0 0/0 2/2 1/1 2/2",
    "gpt_oss": "2/2 5/5 0/0 0/0 2/2 1/1 2/2",
    "qwen2_moe": "2/2 5/5 2/2 0/0 2/2 1/1 2/2",
    "qwen3_moe": "2/2 9/9 0/0 0/0 2/2 1/1 2/2",
    "olmoe": "2/2 9/9 0/0 0/0 2/2 1/1 2/2",
    "deepseek_v2": "2/2 9/9 2/2 0/0 2/2 1/1 1/1",
    "deepseek_v3": "2/2 9/9 2/2 0/0 2/2 1/1 1/1",
    "glm4_moe": "2/2 5/5 2/2 0/0 2/2 1/1 1/1",
    "llama4_text": "2/2 6/6 2/2 0/0 2/2 1/1 1/1",
    "olmo2": "2/2 9/9 2/2 0/0 2/2 1/1 0/0",
    "cohere": "2/2 3/3 2/2 0/0 2/2 1/1 0/0",
    "nemotron": "2/2 5/5 0/0 2/2 2/2 1/1 0/0",
    "qwen3_next": "1/1 8/8 2/2 0/0 1/1 1/1 2/2",
    "glm4": "2/2 9/9 2/2 0/0 2/2 1/1 0/0",
    "olmo": "2/2 5/5 2/2 0/0 2/2 1/1 0/0",
    "nanochat": "2/2 9/9 0/0 2/2 2/2 1/1 0/0",
    "mamba2": "0/0 5/5 0/0 0/0 0/0 1/1 0/0",
}


@pytest.fixture(autouse=True)
def no_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.parametrize("kind", EXPECTED)
def test_no_part_is_lost(kind):
    """More may be patched than here, not less."""
    name = coverage.types().get(kind)
    if name is None:
        pytest.skip("this version of transformers has no such type")
    found = coverage.cover(kind, name)
    for part, expected in zip(coverage.PARTS, EXPECTED[kind].split(), strict=True):
        patched, of = map(int, expected.split("/"))
        now = found[part]
        assert now["patched"] >= patched and now["patched"] * of >= patched * now["of"], part
        assert now["patched"] == now["of"] or now["why"]


def test_a_type_that_cannot_be_made_is_said_in_the_table(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(coverage, "types", lambda: {"gpt2": "GPT2LMHeadModel", "absent": "NoSuchModel"})
    coverage.main(["--json", str(tmp_path / "found.json")])
    said, held = capsys.readouterr().out, json.loads((tmp_path / "found.json").read_text())
    assert "cannot be made: AttributeError" in said and "1 of 2 types made" in said
    assert held["gpt2"]["attention"] == {"patched": 2, "of": 2, "why": {}} and "error" in held["absent"]
    with pytest.raises(SystemExit):
        coverage.main(["--types", "nothing"])
    assert "no language model of type nothing" in capsys.readouterr().err
