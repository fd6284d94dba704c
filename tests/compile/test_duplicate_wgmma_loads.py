"""What a product reads in shared memory is not written over before it has been read: Hopper's products go on while the next step begins."""

import re

import pytest
import torch

from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.target import target
from dtkernels.lang import parse
from dtkernels.runtime.build.source_cache import load_module
from dtkernels.runtime.build.triton_compile import build, record_launches

TEXT = """Func a, b, f; In A, B; Var x, y; RVar k; a[x] = rsum(A[x, k] * A[x, k], k); b[y] = rmax(B[y, k], k);
f[x, y] = rdot(A[x, k], B[y, k], k) * a[x] + b[y]; a.fuse_at(f, k); b.fuse_at(f, k);
"""
BESIDE = "Func f; In A, B; Var x, y; RVar k; f[x, y] = rdot(A[x, k], B[y, k], k) * rdot(A[x, k], B[k, y], k); "
TILES = "f.block(x:128, y:128); f.tensorize(x:128, y:128, k:64); f.num_warps(8); f.num_stages({stages}); {more}"
H200 = target("h200")


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("more", ["", "f.descriptor(A, B);", "f.descriptor(A, B, f); f.persistent();"])
@pytest.mark.parametrize("text, products", [(TEXT, 1), (BESIDE, 2)])
def test_no_load_is_begun_into_what_a_product_may_still_read(text, products, more, stages):
    """The row that a step loads ahead lands in slot (step + ahead) % slots; the product of that step is read from step % slots."""
    module = load_module(emit(parse(text + TILES.format(stages=stages, more=more)), target=H200), "apart")
    a, b = (torch.empty(4096, 4096, dtype=torch.bfloat16) for _ in "ab")
    found = 0
    for launch in record_launches(module, "f", (a, b)):
        ir = build(launch, H200).asm["ttgir"]
        assert "warp_group_dot_wait" in ir and f"pendings = {products}" in ir, "products are waited for a step later"
        for name, slots in re.findall(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+xbf16", ir):
            views = re.findall(rf"(%\w+) = ttg\.memdesc_index {name}\[%c\d+_i32\w*\]", ir)  # what is loaded before the loop
            ahead = sum(len(re.findall(rf"copy_global_to_local [^\n]*{view}\b", ir)) for view in views)
            assert 0 < ahead < int(slots), (launch.kernel.__name__, name, ahead, slots)
            found += 1
    assert found >= 2


STEPS = """Func a, f; In A, B; Var x, y; RVar k, j; a[x] = rsum(A[x, j, k] * A[x, j, k], k, j);
f[x, y] = rdot(A[x, j, k], B[j, k, y], k, j) * a[x]; a.fuse_at(f, j); f.block(x:128, y:128); f.tensorize(x:128, y:128, k:64, j:1); f.reorder(k, j);"""
AGAIN = """Func s, f; In Q, K; Var l; RVar x, d; s[l, x] = rdot(K[l, d], Q[x, d], d); f[l, d] = rdot(exp(s[l, x]), Q[x, d], x) + rsum(Q[x, d], x);
s.fuse_at(f, x); f.block(l:64, d:64); f.tensorize(l:64, d:64, x:64);"""


@pytest.mark.parametrize("text, shapes", [(STEPS, [(300, 3, 100), (3, 100, 300)]), (AGAIN, [(300, 100), (200, 100)])], ids=["single steps", "bound again"])
def test_what_is_loaded_twice_has_a_name_where_it_is_read(text, shapes):
    """In a loop over single elements, whose counter is the label itself; and beside an inner loop in which the same name is another tile."""
    module = load_module(emit(parse(text + "f.num_warps(4); f.num_stages(2);"), target=H200), "names")
    for launch in record_launches(module, "f", tuple(torch.empty(s, dtype=torch.bfloat16) for s in shapes)):
        assert "_read = tl.load" in launch.kernel.src and "warp_group_dot" in build(launch, H200).asm["ttgir"]
