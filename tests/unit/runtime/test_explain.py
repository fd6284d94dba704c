"""``explain`` looks up the tables of a GPU that is not here: the row with its time, the next ones, or why there is none."""

import re

import pytest
from command_line import run

from dtkernels.runtime.select import table_loader
from dtkernels.runtime.signature.spec_hash import spec_hash
from dtkernels.runtime.tables.table import Gpu, Row, rows_text, write_gpu
from dtkernels.show import read

SCHEDULE = "total_shift.fuse_at(softmax, x);\ntotal.fuse_at(softmax, x);\nsoftmax.block(x:1);\nsoftmax.tensorize(x:1, y:0);\nsoftmax.compile();"
SPEC = spec_hash(read("softmax").program.algorithm)


def row(x: int, y: int, **more) -> Row:
    """A row of softmax."""
    given = {"microseconds": 100.0, "by": {"multiprocessors": 132}, "spec": SPEC, **more}
    return Row("softmax", "forward", "bf16", {"x": x, "y": y}, SCHEDULE, **given)


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Write rows of softmax as the H200's only table."""
    folder = tmp_path / "nvidia_h200"
    folder.mkdir()
    write_gpu(folder, Gpu("NVIDIA H200", 90, 132, 4.8e12))
    monkeypatch.setenv("DTKERNELS_TABLES", str(tmp_path))

    def write(*rows: Row) -> None:
        (folder / "softmax.yaml").write_text(rows_text(rows))
        table_loader.forget()

    table_loader.forget()
    yield write
    table_loader.forget()


def test_the_row_is_named_with_its_time_and_the_next_with_theirs(table, capsys):
    table(row(16384, 8192, microseconds=132.0), row(8192, 8192, microseconds=70.0), row(16384, 4096, microseconds=60.0))
    lines = run(capsys, "explain", "softmax", "--gpu", "h200", "--shape", "16384x8192").splitlines()
    assert lines[0] == "softmax: x 16384, y 8192; bf16; h200; table nvidia_h200"
    assert lines[2] == "  row softmax, forward, bf16, x=16384 y=8192, distance 0.00, measured 132 us: tuned at these sizes"
    assert "    softmax.block(x:1);" in lines
    (other,) = [line for line in lines if line.startswith("  row x=8192 y=8192: distance 0.50, predicted ")]
    assert other.endswith(" us, measured 70 us at its sizes") and 120 < float(other.split("predicted ")[1].split()[0]) <= 132
    assert any(line.startswith("  row x=16384 y=4096: distance 1.00, measured 60 us") and "its tile covers all of y: 4096" in line for line in lines)
    assert "  16384 programs (16384 along x), 124.1 per multiprocessor (132)" in lines


def test_the_kernels_are_those_of_the_row_that_is_taken(table, capsys):
    table(row(16384, 8192, by={}))
    (taken,) = [line for line in run(capsys, "explain", "softmax", "--shape", "16000x8000").splitlines() if "num_stages" in line]
    assert taken.startswith("  4 warps of 32")  # the default schedule says 16


def test_a_gpu_alike_takes_the_table(table, capsys):
    table(row(16384, 8192))
    text = run(capsys, "explain", "softmax", "--shape", "16384x8192", "--gpu", "h100")
    assert "; h100; table nvidia_h200\n" in text and "distance 0.00, measured 100 us" in text


@pytest.mark.parametrize(
    "rows, asked, why",
    [
        ([row(16384, 8192)], ["--gpu", "a100"], "there is no table for this GPU or a similar one (tables in "),
        ([], [], "table nvidia_h200 has no row for this kind of call (rows of softmax: none)"),
        ([row(16384, 8192)], ["--dtype", "fp32"], "has no row for this kind of call (rows of softmax: forward bf16)"),
        ([row(16384, 512)], [], "does not fit: its tile covers all of y: 512"),
        ([row(16384, 8192, spec="0" * 12)], [], "does not fit: written for another version of the spec"),
    ],
)
def test_the_default_schedule_is_named_with_the_reason(rows, asked, why, table, capsys):
    table(*rows)
    text = run(capsys, "explain", "softmax", "--shape", "16384x8192", *asked)
    assert re.search(r"\n  default schedule, predicted [\d.]+ us: ", text) and why in text


def test_a_row_that_is_not_measured_says_so(table, capsys):
    table(row(16384, 8192, measured=False), row(16384, 8000, microseconds=None))
    text = run(capsys, "explain", "softmax", "--shape", "16384x8192")
    assert "estimated 100 us: a schedule stored for these sizes" in text and "not measured" in text


def test_a_backward_has_the_gradients_that_the_table_has_rows_for(capsys):
    text = run(capsys, "explain", "dyt", "--backward", "--sizes", "x=4096,y=4096")
    assert "; gradients of A, w, b, alpha; table nvidia_h200\n" in text
    assert "\n  row dyt, forward, bf16, x=4096 y=4096, distance 0.00, " in text and "\n  row dyt, backward, bf16, x=4096 y=4096, distance 0.00, " in text


def test_parameters_choose_the_rows(capsys):
    sizes = ("--sizes", "b=4,h=32,m=4096,l=4096,n=128,d=128")
    text = run(capsys, "explain", "attention", "--backward", *sizes, "--param", "causal=true", "--param", "group=4")
    assert "row attention, forward (saving), bf16, b=4 h=32 m=4096 n=128 l=4096 d=128, causal=true group=4, distance 0.00" in text
    assert "row attention, backward, bf16, b=4 h=32 m=4096 n=128 l=4096 d=128 K_1=8 h_in=4, causal=true group=4, distance 0.00" in text
    assert "causal=true" not in run(capsys, "explain", "attention", *sizes, "--param", "causal=false").split("kernel")[0]


def test_a_forward_that_hands_over_a_product_is_looked_up_as_one(capsys):
    text = run(capsys, "explain", "two_mm", "--backward", "--sizes", "m=64,n=128,l=32,k=32")
    assert "row two_mm, forward (saving mm), bf16, " in text and "row two_mm, backward (mm), bf16, " in text


def test_a_spec_of_ones_own_is_looked_up_by_its_op(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("op: mine\ndoc: y\nalgorithm: 'Func mine; In A; Var i; mine[i] = 2 * A[i];'\n")
    assert "(rows of mine: none)" in run(capsys, "explain", tmp_path / "mine.yaml", "--shape", "4096")


def test_a_schedule_with_a_shared_sum_is_predicted_with_it(capsys):
    """The kernel of the shared sum reads what the gradients then read no more: without it the prediction was 90 times as long."""
    forward, backward = run(capsys, "explain", "groupnorm", "--backward", "--gpu", "h100", "--sizes", "n=112,g=1,c=64,s=4096").split("\nbackward:")
    times = [float(re.search(r"predicted (\S+) us", text)[1]) for text in (forward, backward)]
    assert "d_var_sum.block" in backward and times[1] < 3 * times[0]
