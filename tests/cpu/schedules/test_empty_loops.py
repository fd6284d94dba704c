"""What several kernels read is right where an extent is 0: nothing is stored from inside a loop that is not run."""

import pytest
import torch

import dtkernels
from dtkernels.autoschedule.cost.kernel_config import read_schedule
from dtkernels.runtime.select.row_ranking import candidates
from dtkernels.runtime.tables.table import Row

TEXT = "Func s, f, g; In A, B; Var x; RVar y; s[x] = rsum(A[x, y], y); f[x, y] = B[x, y] * s[x]; g[x] = exp(s[x]) + rsum(f[x, y] * f[x, y], y);"
STORED = "s.fuse_at(f, x);\ns.store();\nf.block(x:4);\nf.tensorize(x:4, y:16);\ng.block(x:4);\ng.compile();"


@pytest.mark.parametrize("columns", [0, 3])
def test_a_func_that_two_kernels_read(columns):
    a, b = (torch.randn(5, columns, generator=torch.Generator().manual_seed(i)) for i in range(2))
    s = a.sum(1)
    truth = s.exp() + ((b * s[:, None]) ** 2).sum(1)
    assert torch.allclose(dtkernels.compile(TEXT)(a, b), truth, rtol=1e-5, atol=1e-5)


def test_a_row_that_stores_inside_a_loop_is_passed_over_where_an_extent_is_0():
    assert read_schedule(STORED).stored_inside == {"s"} and not read_schedule("s.fuse_at(f, x);\nf.compile();").stored_inside
    row = Row("g", "forward", "fp32", {"x": 5, "y": 3}, STORED, "a" * 12, microseconds=5.0, by={"multiprocessors": 132})
    refusals = [candidates([row], row.key, {"x": 5, "y": y}, row.spec)[0].refused for y in (0, 3)]
    assert refusals[0].startswith("an extent is 0, and s would be written") and not refusals[1]


@pytest.mark.parametrize("place, tiles", [("x", "f.block(x:4, y:4); f.tensorize(x:4, y:4);"), ("y", "f.block(x:4);"), ("y", "f.tensorize(x:4, y:4);")])
def test_a_schedule_that_stores_inside_an_empty_loop_says_so(place, tiles):
    """It returned memory as it was."""
    own = dtkernels.compile(f"{TEXT} s.fuse_at(f, {place}); s.store(); {tiles}")
    a, b = torch.ones(5, 3), torch.ones(5, 3)
    assert torch.allclose(own(a, b), dtkernels.compile(TEXT)(a, b))
    with pytest.raises(ValueError, match=r"g: s is stored inside loops over y, which are empty: leave out s.store\(\)"):
        own(torch.ones(5, 0), torch.ones(5, 0))
    assert own(torch.ones(0, 3), torch.ones(0, 3)).shape == (0,)
