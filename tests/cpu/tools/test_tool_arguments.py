"""What the tools are asked wrongly is one line before anything is measured, and no traceback."""

import importlib
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[3] / "tools"), str(Path(__file__).parents[3] / "benchmarks")]

WRONG = [
    ("bench", "--ops nope", "unknown 'nope'; allowed: all, relu"),
    ("bench", "--ops softmax,,relu", "unknown ''"),
    ("bench", "--peers x", "unknown 'x'; allowed: all, none, eager"),
    ("bench", "--set zz", "unknown 'zz'"),
    ("bench", "--shapes 4x4", "--shapes needs --ops"),
    ("bench", "--ops softmax --shapes 0x4", "no workload softmax '0x4'"),
    ("bench", "--ops softmax --shapes 4ax4", "no workload softmax '4ax4'"),
    ("bench", "--ops softmax --shapes nan", "no workload softmax 'nan'"),
    ("bench", "--ops softmax --shapes -4x4", "argument --shapes: expected one argument"),
    ("bench", "--ops attention --shapes B1H4/3S8D8", "heads of queries a multiple"),
    ("bench", "--ops rope --set wide", "no shapes of rope in wide"),
    ("bench", "--dtype fp8", "invalid choice: 'fp8'"),
    ("bench", "--direction sideways", "invalid choice: 'sideways'"),
    ("bench", "--seconds nan", "'nan' is no number above 0"),
    ("bench", "--seconds -1", "'-1' is no number above 0"),
    ("bench", "--json {tmp}/none/x.json", "no such folder"),
    ("bench", "--json {tmp}", "a folder"),
    ("bench", "--json /proc/x.json", "/proc/x.json: cannot be written"),
    ("bench", "--frobnicate", "unrecognized arguments: --frobnicate"),
    ("bench", "stray", "unrecognized arguments: stray"),
    ("bench", "", "no GPU"),
    ("bench_models", "--models nope", "unknown 'nope'; allowed: llama"),
    ("bench_models", "--variants +compile", "unknown variant '+compile'"),
    ("bench_models", "--work x", "unknown 'x'; allowed: forward, train, checkpoint, generate"),
    ("bench_models", "--lengths 16,many", "'many' is no whole number from 1 on"),
    ("bench_models", "--lengths -3", "'-3' is no whole number from 1 on"),
    ("bench_models", "--tokens 0", "'0' is no whole number"),
    ("bench_models", "--device tpu", "no device 'tpu' here"),
    ("bench_models", "--json {tmp}/none/x", "no such folder"),
    ("bench_host_overhead", "--first attention", "invalid choice"),
    ("bench_host_overhead", "--dtype fp8", "invalid choice: 'fp8'"),
    ("bench_host_overhead", "--json {tmp}", "a folder"),
    ("bench_torch_compile", "--ops nope", "unknown 'nope'"),
    ("bench_torch_compile", "--shapes -1", "'-1' is no whole number"),
    ("bench_torch_compile", "--shapes nan", "'nan' is no whole number"),
    ("bench_torch_compile", "--json {tmp}", "a folder"),
    ("lora_training", "--steps 3", "'3' is no whole number from 4 on"),
    ("lora_training", "--hidden 100", "100 is no multiple of 64"),
    ("lora_training", "--length 9", "9 is no multiple of 8"),
    ("lora_training", "--dropout 1", "'1' is no number above 0, up to"),
    ("lora_training", "--rate nan", "'nan' is no number"),
    ("lora_training", "--plot {tmp}/x.doc", "allowed: .png, .svg, .pdf"),
    ("lora_training", "--json /proc/x.json", "/proc/x.json: cannot be written"),
    ("report", "--dtypes fp8", "unknown 'fp8'"),
    ("report", "--bench {tmp}/list.json --out {tmp}/out {tables}/nvidia_h200", "{tmp}/list.json: not written by tools/bench.py: it has no list of figures"),
    ("report", "--bench {tmp}/bad.json --out {tmp}/out {tables}/nvidia_h200", "{tmp}/bad.json: not JSON: "),
    ("report", "--bench {tmp}/none.json --out {tmp}/out {tables}/nvidia_h200", "{tmp}/none.json: No such file or directory"),
    ("report", "--bench {tmp} --out {tmp}/out {tables}/nvidia_h200", "{tmp}: Is a directory"),
    ("report", "--out {tmp}/list.json {tables}/nvidia_h200", "File exists"),
    ("report", "{tmp}", "{tmp}/gpu.yaml: No such file or directory"),
    ("report", "{tmp}/list.json", "Not a directory"),
    ("report", "{tmp}/corrupt/nvidia_h200", "{tmp}/corrupt/nvidia_h200/gpu.yaml: a mapping of name"),
    ("embed_benchmark_tables", "", "the following arguments are required: page"),
    ("embed_benchmark_tables", "{tmp}/none.md", "{tmp}/none.md: No such file or directory"),
    ("embed_benchmark_tables", "{tmp}", "{tmp}: Is a directory"),
    ("embed_benchmark_tables", "{tmp}/bytes", "{tmp}/bytes: no UTF-8 text: byte 0xff at offset 0"),
    ("embed_benchmark_tables", "{tmp}/page.md", "{tmp}/list.json: not written by tools/bench.py: it has no list of figures"),
    ("embed_benchmark_tables", "{tmp}/bad.md", "{tmp}/bad.json: not JSON: "),
    ("embed_benchmark_tables", "{tmp}/short.md", "{tmp}/short.json: not written by tools/bench.py: it has no gpu"),
    ("embed_benchmark_tables", "{tmp}/empty.md", "the page has no <!-- figures"),
    ("demo", "--encoder {tmp}/none", "no such folder"),
    ("demo", "--frobnicate", "unrecognized arguments"),
    ("write_manifests", "stray", "unrecognized arguments: stray"),
    ("build", "--gpu nvidia_none", "no table: "),
    ("build", "--ops nope", "no op 'nope'; allowed: all, add_rmsnorm, attention"),
    ("build", "--ops {tmp}/none.yaml", "no such file: {tmp}/none.yaml"),
    ("build", "--ops {tmp}/bad.yaml", "{tmp}/bad.yaml:2:1: not YAML"),
    ("build", "--tables {tmp}", "no table under"),
    ("build", "--tables {tmp}/damaged", "relu.yaml: not YAML"),
    ("build", "--tables {tmp}/corrupt", "gpu.yaml: a mapping of name"),
    ("build", "--default-schedules h300", "invalid choice: 'h300'"),
    ("build", "--default-schedules a100 --ops relu --tables {tmp}/list.json", "list.json/nvidia_a100: Not a directory"),
    ("build", "--jobs 0", "'0' is no whole number from 1 on"),
    ("build", "--few nan", "'nan' is no whole number from 1 on"),
    ("build", "--default-schedules a100 --dtypes fp8 --tables {tmp}", "unknown 'fp8'"),
    ("tune", "--ops nope", "no op 'nope'; allowed: all, add_rmsnorm, attention"),
    ("tune", "--ops {tmp}/bad.yaml --dry-run", "{tmp}/bad.yaml:2:1: not YAML"),
    ("tune", "--ops {tmp}/bytes.yaml --dry-run", "{tmp}/bytes.yaml: a spec is UTF-8 text: found byte 0xff at offset 0"),
    ("tune", "--ops {tmp}", "no op '{tmp}'"),
    ("tune", "--budget nan", "'nan' is no time; allowed: 90s, 30m, 2h"),
    ("tune", "--budget -3m", "expected one argument"),
    ("tune", "--gpu h300", "invalid choice: 'h300'"),
    ("tune", "--gpu h200", "h200 is what --dry-run pretends"),
    ("tune", "--shapes {tmp}/none.yaml --dry-run", "{tmp}/none.yaml: No such file or directory"),
    ("tune", "--shapes {tmp}/bad.yaml --dry-run", "{tmp}/bad.yaml:2:1: not YAML"),
    ("tune", "--shapes {tmp} --dry-run", "{tmp}: Is a directory"),
    ("tune", "--regret nan", "'nan' is no number above 0.999"),
    ("tune", "--workers 0", "'0' is no whole number from 1 on"),
    ("tune", "--jobs -1", "'-1' is no whole number from 0 on"),
    ("tune", "--limit -1", "'-1' is no number above 0"),
    ("tune", "--dtypes fp8", "unknown 'fp8'"),
    ("untuned", "--only (", "'(' is no regular expression"),
    ("untuned", "--only nope", "no case has 'nope' in its title; allowed: log_softmax"),
    ("untuned", "--seconds 0", "'0' is no number above 0"),
    ("untuned", "", "no GPU"),
    ("compare_liger", "--functions nope", "unknown 'nope'; allowed: all, add_rmsnorm"),
    ("compare_liger", "--check --missing", "not allowed with argument --check"),
    ("compare_liger", "--rows 0", "'0' is no whole number from 1 on"),
    ("compare_liger", "--tests {tmp}/none", "{tmp}/none: no such folder"),
    ("compare_liger", "--tests {tmp}", "not a checkout of Liger"),
    ("compare_liger", "--json {tmp}", "a folder"),
    ("check_tables", "--jobs 0", "'0' is no whole number from 1 on"),
    ("check_tables", "--tables {tmp}/none", "{tmp}/none: no such folder"),
    ("check_tables", "--tables {tmp}/list.json", "{tmp}/list.json: a file"),
    ("check_tables", "--rebuild most", "invalid choice: 'most'"),
]


@pytest.mark.parametrize("tool, asked, said", WRONG, ids=[f"{tool} {asked}"[:60] for tool, asked, _ in WRONG])
def test_a_wrong_option_is_one_line(tool, asked, said, tmp_path, monkeypatch, capsys):
    if tool in ("bench_models", "compare_liger", "lora_training", "demo"):
        pytest.importorskip("transformers")
    if tool == "lora_training":
        pytest.importorskip("peft")
    tables = Path(__file__).parents[3] / "schedule_tables"
    _files(tmp_path)
    argv = asked.format(tmp=tmp_path, tables=tables).split()
    monkeypatch.setattr(sys, "argv", [tool, *argv])
    main = importlib.import_module(tool).main
    code: object = 0
    try:
        code = main(argv) if main.__code__.co_argcount else main()
    except SystemExit as refused:
        code = refused.code
    out, err = capsys.readouterr()
    told = [*err.splitlines(), *(code.splitlines() if isinstance(code, str) else [])]
    assert code not in (0, None) and out == ""
    (line,) = told  # no usage, no traceback
    assert line.startswith(f"{tool}: ") and said.format(tmp=tmp_path) in line


def _files(folder: Path) -> None:
    """Files that are not what a tool wants."""
    texts = {"list.json": "[]", "bad.json": "{", "short.json": '{"figures": []}', "bad.yaml": "- [\n", "empty.md": ""}
    for name, text in texts.items():
        (folder / name).write_text(text)
    for page, data in (("page", "list"), ("bad", "bad"), ("short", "short")):
        (folder / f"{page}.md").write_text(f"<!-- figures: {folder}/{data}.json -->\n<!-- /figures -->\n")
    for name in ("bytes", "bytes.yaml"):
        (folder / name).write_bytes(b"\xff\xfe")
    (folder / "damaged" / "gpu").mkdir(parents=True)
    (folder / "damaged" / "gpu" / "gpu.yaml").write_text("name: NVIDIA H200\narch: 90\nmultiprocessors: 132\n")
    (folder / "damaged" / "gpu" / "relu.yaml").write_text("- [")
    (folder / "corrupt" / "nvidia_h200").mkdir(parents=True)
    (folder / "corrupt" / "nvidia_h200" / "gpu.yaml").write_text("- [")
