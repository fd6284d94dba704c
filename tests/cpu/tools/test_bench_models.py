"""The benchmark of whole models, on the toy: every variant takes its turn, and one that cannot run is reported."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

import bench_models


@pytest.mark.parametrize("work", ["train", "generate"])
def test_variants_are_timed_and_compared_with_the_first(work, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setenv("DTKERNELS_FALLBACK", "reference")
    monkeypatch.setattr(bench_models, "_done", [])
    monkeypatch.setattr(bench_models, "liger", lambda model: 1 / 0)
    variants = ["sdpa", "dtkernels", "dtkernels:all", "dtkernels:rope:rmsnorm", "liger"]
    sizes = ["--models", "toy", "--lengths", "16", "--tokens", "16", "--new", "3", "--repeats", "1", "--rounds", "2", "--device", "cpu", "--no-memory"]
    monkeypatch.setattr(sys, "argv", ["bench_models", *sizes, "--work", work, "--variants", ",".join(variants), "--json", str(tmp_path / "out.json")])
    assert bench_models.main() == 0
    lines, table = capsys.readouterr().out.split("\n\n")
    turns = [line.split()[4] for line in lines.splitlines()]
    assert turns == variants + variants[::-1]
    figures = json.loads((tmp_path / "out.json").read_text())["figures"]
    assert [f["variant"] for f in figures] == variants
    *timed, failed = figures
    assert all(f["milliseconds"] > 0 and f["fallbacks"] == 0 for f in timed)
    assert all(len(f["rounds"]) == len(f["times"]) == 2 and min(f["times"]) <= f["milliseconds"] <= max(f["times"]) for f in timed)
    agreed = [f["agreement"] for f in timed]
    assert all(a == "100% of tokens" for a in agreed) if work == "generate" else all(float(a[:-1].rpartition("(")[2]) < 1e-6 for a in agreed)
    assert "rope" in timed[3]["note"] and "swiglu" not in timed[3]["note"] and "swiglu" in timed[2]["note"] and timed[0]["note"] == ""
    assert [line.split()[4] for line in table.splitlines()] == ["variant", *variants] and table.splitlines()[1].split()[6] == "1.000"
    assert failed["milliseconds"] is None and failed["note"] == "ZeroDivisionError: division by zero"


def test_on_a_cpu_the_memory_of_each_variant_is_that_of_a_process_of_its_own(monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(bench_models, "_done", [])
    sizes = ["--models", "toy", "--lengths", "16", "--tokens", "16", "--repeats", "1", "--rounds", "1", "--device", "cpu"]
    assert bench_models.main([*sizes, "--work", "forward", "--variants", "sdpa,dtkernels"]) == 0
    _, sdpa, ours = [line.split() for line in capsys.readouterr().out.split("\n\n")[1].splitlines()]
    assert int(sdpa[7]) > 0 and int(ours[7]) > 0 and float(ours[8]) > 0 and int(sdpa[-1]) == 0 < int(ours[-1])


def test_a_variant_with_graphs_says_what_its_steps_took(monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(bench_models, "_done", [])
    sizes = ["--models", "toy", "--lengths", "8", "--tokens", "8", "--new", "3", "--repeats", "1", "--rounds", "1", "--device", "cpu", "--no-memory"]
    assert bench_models.main([*sizes, "--work", "generate", "--variants", "dtkernels:rope+graphs"]) == 0
    assert "graphs: 6 own path" in capsys.readouterr().out  # two steps of each of three runs, without CUDA graphs on a CPU


REFUSED = {
    "peer": "unknown variant 'peer'; allowed: sdpa",
    "": "unknown variant ''; allowed",
    "sdpa,dtkernels:nope": "unknown op 'nope' in 'dtkernels:nope'; allowed: attention",
    "sdpa:relu": "unknown variant 'sdpa:relu'",
    "sdpa+graphs": "unknown variant 'sdpa+graphs'; allowed with +graphs: dtkernels",
}


@pytest.mark.parametrize("asked", REFUSED)
def test_a_variant_that_there_is_none_of_is_refused_before_anything_is_timed(asked, capsys):
    with pytest.raises(SystemExit) as end:
        bench_models.main(["--models", "toy", "--variants", asked])
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == "" and REFUSED[asked] in err
