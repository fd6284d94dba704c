"""Machine code of loops in which a condition is decided, which leaves some of their values with fewer dimensions."""

from dtkernels.lang import parse
from dtkernels.show import Subject, Written


def test_what_is_guarded_keeps_the_dimension_of_its_guard(tmp_path, monkeypatch):
    """Where ``y > x + 3`` all over a tile, the minimum is over a row of infinities, guarded as any row is."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("DTKERNELS_CACHE", str(tmp_path / "dtkernels"))
    program = parse("""Func t, m, f; In A, B; Var y; RVar x; t[x, y] = where(y <= x + 3, B[x] - A[y], inf); m[x] = rmin(t[x, y], y);
    f[y] = rsum(where(y <= x + 3, 0, where(m[x] > 1, B[x], 0)), x); t.fuse_at(f, x); m.fuse_at(f, x); f.tensorize(y:0);""")
    assert ".entry" in Subject(Written("decided", program, scheduled=True), "h200", (7, 7), "fp16").text("ptx")
