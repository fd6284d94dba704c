# ruff: noqa: E501 (programs read best on one line)
"""Convolutions as products: what the default schedule chooses for them, and tiles that descriptors shift, compiled without a GPU."""

import pytest
import torch

from dtkernels.algebra.autodiff.gradient import gradient
from dtkernels.algebra.pipeline import prepare, prepare_algorithm
from dtkernels.autoschedule.default_schedule import default_schedule
from dtkernels.codegen.emit.module import emit
from dtkernels.codegen.pipeline import lower
from dtkernels.codegen.target import target
from dtkernels.codegen.transforms.warp_specialize.backend_select import backend
from dtkernels.lang import parse
from dtkernels.lang.errors import DTError
from dtkernels.lang.schedule import Program
from dtkernels.runtime.build.source_cache import load_module
from dtkernels.runtime.build.triton_compile import build, record_launches

H100 = target("h100")
CONV1 = "Func f; In A, W; Var b, o, x; RVar c, r; Extent x = A[2] - W[2] + 1; f[b, o, x] = rdot(A[b, c, x + r], W[o, c, r], c, r);"
CONV2 = "Func f; In A, W; Var b, o, y, x; RVar c, r, s; Extent y = (A[2] + 2 - W[2]) / {0} + 1; Extent x = (A[3] + 2 - W[3]) / {0} + 1; f[b, o, y, x] = rdot(A[b, c, {0} * y + r - 1, {0} * x + s - 1], W[o, c, r, s], c, r, s);"
TILES = "f.block(b:1, o:128, x:128); f.tensorize(b:1, o:128, x:128, c:64); f.num_warps(8); f.stage(A:c, W:c); f.descriptor(A, W); f.persistent(); f.specialize_warps(r);"


def compiled(text, shapes, dtype=torch.bfloat16):
    module = load_module(emit(prepare(parse(text)), "call", H100), "windows")
    return [build(launch, H100) for launch in record_launches(module, "call", [torch.empty(s, dtype=dtype, device="meta") for s in shapes])]


def test_a_shifted_tile_is_loaded_by_a_producer():
    """Its descriptor has the extent of the input, not that of the label; one loop goes through channels and taps."""
    (kernel,) = (k for k in lower(prepare(parse(CONV1 + TILES))) if k.name == "f")
    assert backend(kernel, H100)[0] == "gluon", backend(kernel, H100)
    source = emit(prepare(parse(CONV1 + TILES)), "call", H100)
    gluon = source[source.index("@gluon.jit") :]
    assert "gl.cast(x_first + r, gl.int32)" in gluon and "swizzled_map(A_rows_out, (size_b, size_A_2, size_c)," in gluon
    assert gluon.count("for c_step in range(0, gl.cdiv(size_c, TILE_c) * size_r, 1):") == 2
    made = compiled(CONV1 + TILES, [(4, 128, 1032), (256, 128, 3)])
    assert any("gluon" in m.metadata.name for m in made) and all(m.asm for m in made)


def test_a_tile_is_not_shifted_along_its_last_dimension():
    """It would begin at no multiple of 16 bytes: an illegal instruction on an H100."""
    with pytest.raises(DTError, match=r"descriptor\(A\): found the index \(x \+ r\)"):
        lower(prepare(parse(CONV1 + TILES.replace("A:c, W:c", "W:c"))))


def test_a_tile_that_is_summed_is_not_shifted():
    text = "Func d; In D, A; Var o, c, r; RVar b, x; Extent r = A[2] - D[2] + 1; d[o, c, r] = rdot(D[b, o, x], A[b, c, x + r], b, x); d.block(o:64, c:64, r:1); d.tensorize(o:64, c:64, x:64); "
    lower(prepare(parse(text + "d.descriptor(D);")))
    with pytest.raises(DTError, match=r"descriptor\(A\): found the index \(x \+ r\)"):
        lower(prepare(parse(text + "d.descriptor(A);")))


def test_what_is_written_is_not_shifted():
    text = "Func f; In A, B; Var x, y; f[x, y] = write(A[x, y], B[x, y + 3]); f.block(x:8, y:64); f.tensorize(x:8, y:64);"
    lower(prepare(parse(text)))
    with pytest.raises(DTError, match="descriptor"):
        lower(prepare(parse(text + "f.descriptor(f);")))


@pytest.mark.parametrize("stages", ["", "f.unroll(r:3);"])
def test_loops_are_joined_unless_one_is_unrolled(stages):
    source = emit(prepare(parse(CONV1 + "f.block(b:1, o:64, x:64); f.tensorize(b:1, o:64, x:64, c:32);" + stages)), "call", H100)
    assert ("c_step" in source) == (not stages)


def test_loops_with_loads_of_their_own_are_not_joined():
    text = CONV1.replace("A[b, c, x + r]", "A[b, c, x + r] * v[c]").replace("In A, W", "In A, W, v") + "f.block(b:1, o:64, x:64); f.tensorize(b:1, o:64, x:64, c:32);"
    assert "c_step" not in emit(prepare(parse(text)), "call", H100)


def chosen(text, sizes, itemsize=2, wanted=()):
    algorithm = parse(text).algorithm
    outputs = ("f",)
    if wanted:
        found = gradient(algorithm, outputs=outputs, wanted=wanted)
        algorithm, outputs = found.backward, tuple(found.grads.values())
    algorithm = prepare_algorithm(algorithm, outputs)
    return Program(algorithm, default_schedule(algorithm, outputs, sizes, itemsize, H100))


IMAGES = {"b": 32, "c": 128, "o": 128, "y": 28, "x": 28, "r": 3, "s": 3, "A_2": 28, "A_3": 28}


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("stride", [1, 2])
def test_small_images_are_read_with_channels_last_in_tiles_over_all_positions(stride, itemsize):
    schedule = chosen(CONV2.format(stride), IMAGES, itemsize).schedule
    assert schedule.merged("f") == {"b_y_x": ("b", "y", "x")} and schedule.sizes("f", "block")["b_y_x"] >= 64
    assert [str(p) for p in schedule.of("f", "stage")] == ["f.stage(A:c, W:c);"]


@pytest.mark.parametrize("itemsize", [2, 4])
def test_few_channels_and_their_taps_are_one_sum(itemsize):
    schedule = chosen(CONV2.format(2), {**IMAGES, "c": 3, "o": 64, "y": 112, "x": 112, "r": 7, "s": 7}, itemsize).schedule
    assert schedule.merged("f")["c_r_s"] == ("c", "r", "s") and schedule.sizes("f", "tensorize")["c_r_s"] >= 32


def test_gradients_of_weights_have_taps_and_channels_as_one_label_and_split_the_sum():
    """Of copies with channels last, so that each load is a whole vector."""
    program = chosen(CONV2.format(1), IMAGES, 2, ("A", "W"))
    assert program.schedule.sizes("d_W", "split") and program.schedule.merged("d_W")["r_s_c"] == ("r", "s", "c")
    assert [str(p) for p in program.schedule.of("d_W", "stage")] == ["d_W.stage(d_f:o, A:c);"]
    assert [k.name for k in lower(program)].count("d_f_rows") == 1


def test_large_sums_of_one_label_are_products_as_before():
    """A product without windows, with one label on each side, has no such candidates."""
    text = "Func f; In A, B; Var x, y; RVar k; f[x, y] = rdot(A[x, k], B[k, y], k);"
    assert not chosen(text, {"x": 4096, "y": 4096, "k": 4096}).schedule.merged("f")
