"""What the tools are asked wrongly is one line before anything is measured, and no traceback."""

import importlib
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[2] / "tools"), str(Path(__file__).parents[2] / "benchmarks")]

WRONG = [
    ("bench", "--ops nope", "unknown 'nope'; allowed: all, relu"),
    ("bench", "--ops softmax,,relu", "unknown ''"),
    ("bench", "--peers x", "unknown 'x'; allowed: all, none, eager"),
    ("bench", "--set zz", "unknown 'zz'"),
    ("bench", "--shapes 4x4", "--shapes needs --ops"),
    ("bench", "--ops softmax --shapes 0x4", "no workload softmax '0x4'"),
    ("bench", "--ops softmax --shapes 4ax4", "no workload softmax '4ax4'"),
    ("bench", "--ops attention --shapes B1H4/3S8D8", "heads of queries a multiple"),
    ("bench", "--ops rope --set wide", "no shapes of rope in wide"),
    ("bench", "--seconds nan", "'nan' is no number above 0"),
    ("bench", "--json {tmp}/none/x.json", "no such folder"),
    ("bench", "--json {tmp}", "a folder"),
    ("bench", "", "no GPU"),
    ("bench_models", "--work x", "unknown 'x'; allowed: forward, train, checkpoint, generate"),
    ("bench_models", "--lengths 16,many", "'many' is no whole number from 1 on"),
    ("bench_models", "--tokens 0", "'0' is no whole number"),
    ("bench_models", "--device tpu", "no device 'tpu' here"),
    ("host_time", "--first attention", "invalid choice"),
    ("compile_policy", "--ops nope", "unknown 'nope'"),
    ("compile_policy", "--shapes -1", "'-1' is no whole number"),
    ("lora_training", "--steps 3", "'3' is no whole number from 4 on"),
    ("lora_training", "--hidden 100", "100 is no multiple of 64"),
    ("lora_training", "--length 9", "9 is no multiple of 8"),
    ("lora_training", "--dropout 1", "'1' is no number above 0, up to"),
    ("lora_training", "--rate nan", "'nan' is no number"),
    ("lora_training", "--plot {tmp}/x.doc", "allowed: .png, .svg, .pdf"),
    ("report", "--dtypes fp8", "unknown 'fp8'"),
    ("report", "--bench {tmp}/list.json --out {tmp}/out {tables}/nvidia_h200", "TypeError"),
    ("report", "--out {tmp}/list.json {tables}/nvidia_h200", "File exists"),
    ("report", "{tmp}", "gpu.yaml"),
    ("figures", "{tmp}/page.md", "TypeError"),
    ("demo", "--encoder {tmp}/none", "no such folder"),
    ("build", "--gpu nvidia_none", "no table: "),
    ("build", "--tables {tmp}", "no table under"),
    ("build", "--tables {tmp}/damaged", "relu.yaml: not YAML"),
    ("build", "--jobs 0", "'0' is no whole number from 1 on"),
    ("build", "--formula a100 --dtypes fp8 --tables {tmp}", "unknown 'fp8'"),
    ("untuned", "--only (", "'(' is no regular expression"),
    ("untuned", "--only nope", "no case has 'nope' in its title; allowed: log_softmax"),
    ("untuned", "--seconds 0", "'0' is no number above 0"),
    ("untuned", "", "no GPU"),
    ("check_tables", "--jobs 0", "'0' is no whole number from 1 on"),
]


@pytest.mark.parametrize("tool, asked, said", WRONG, ids=[f"{tool} {asked}"[:60] for tool, asked, _ in WRONG])
def test_a_wrong_option_is_one_line(tool, asked, said, tmp_path, monkeypatch, capsys):
    if tool in ("bench_models", "lora_training", "demo"):
        pytest.importorskip("transformers")
    if tool == "lora_training":
        pytest.importorskip("peft")
    tables = Path(__file__).parents[2] / "schedule_tables"
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "page.md").write_text(f"<!-- figures: {tmp_path}/list.json -->\n<!-- /figures -->\n")
    (tmp_path / "damaged" / "gpu").mkdir(parents=True)
    (tmp_path / "damaged" / "gpu" / "gpu.yaml").write_text("name: NVIDIA H200\narch: 90\nmultiprocessors: 132\n")
    (tmp_path / "damaged" / "gpu" / "relu.yaml").write_text("- [")
    argv = asked.format(tmp=tmp_path, tables=tables).split()
    monkeypatch.setattr(sys, "argv", [tool, *argv])
    main = importlib.import_module(tool).main
    code: object = 0
    try:
        code = main(argv) if main.__code__.co_argcount else main()
    except SystemExit as refused:
        code = refused.code
    told = [*capsys.readouterr().err.splitlines(), *([code] if isinstance(code, str) else [])]
    assert code not in (0, None) and said in told[-1], told
