"""Measured figures in a page come from their files, and those of docs/benchmarks.md are what theirs say."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tools"))

import embed_benchmark_tables  # noqa: E402


def figure(op: str, who: str, time: float) -> dict:
    return {"op": op, "shape": "4x4", "dtype": "bfloat16", "who": who, "microseconds": time}


def test_the_page_says_what_its_files_say(capsys):
    page = ROOT / "docs" / "benchmarks.md"
    assert "<!-- figures: extremes " in page.read_text()
    assert embed_benchmark_tables.main([str(page), "--check"]) == 0, capsys.readouterr().err


def test_a_line_names_the_best_peer_and_all_others(tmp_path):
    path = tmp_path / "raw.json"
    data = {"gpu": "GPU X", "torch": "2.1", "command": "tools/bench.py --json /elsewhere/raw.json"}
    found = [
        figure("relu", "dtkernels", 10.0),
        figure("relu", "eager", 15.0),
        figure("relu", "compile", 12.5),
        figure("relu", "broken", float("nan")),
        figure("dyt", "eager", 1.0),
    ]
    path.write_text(json.dumps({**data, "figures": found}))
    text = embed_benchmark_tables.table([path])
    assert "| relu | 4x4 bf16 | 10.0 | compile 12.5 | 1.25 | eager 15.0 |" in text
    assert "dyt" not in text and "One GPU X, torch 2.1: `python tools/bench.py --json raw.json`" in text


def test_a_later_file_replaces_what_it_times_and_adds_peers(tmp_path):
    paths = [tmp_path / "first.json", tmp_path / "later.json"]
    data = {"gpu": "GPU X", "torch": "2.1", "command": "tools/bench.py"}
    paths[0].write_text(json.dumps({**data, "figures": [figure("relu", "dtkernels", 10.0), figure("relu", "eager", 15.0)]}))
    paths[1].write_text(json.dumps({**data, "figures": [figure("relu", "dtkernels", 8.0), figure("relu", "compile-max", 12.0)]}))
    text = embed_benchmark_tables.table(paths)
    assert text.count("| relu |") == 1 and "| relu | 4x4 bf16 | 8.0 | compile-max 12.0 | 1.50 | eager 15.0 |" in text


def test_a_table_that_is_behind_is_told_and_written(tmp_path, capsys):
    page = tmp_path / "page.md"
    name = next((ROOT / "benchmarks").glob("h200_first*.json")).relative_to(ROOT)
    page.write_text(f"# Page\n\n<!-- figures: {name} -->\n| old |\n<!-- /figures -->\nend\n")
    assert embed_benchmark_tables.main([str(page), "--check"]) == 1
    assert "is not what its files say" in capsys.readouterr().err
    assert embed_benchmark_tables.main([str(page)]) == 0 and embed_benchmark_tables.main([str(page), "--check"]) == 0
    assert page.read_text().endswith("<!-- /figures -->\nend\n") and "| old |" not in page.read_text()


@pytest.mark.parametrize("text", ["no marks", "<!-- figures: benchmarks/none.json -->\n<!-- /figures -->\n"])
def test_what_cannot_be_filled_is_one_line(tmp_path, capsys, text):
    page = tmp_path / "page.md"
    page.write_text(text)
    assert embed_benchmark_tables.main([str(page)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
