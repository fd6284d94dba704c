import torch

from dtkernels.codegen.analysis.product_types import BYTES
from dtkernels.lang import expr, tuning_space
from dtkernels.runtime.tables import table
from dtkernels.runtime.torch_support.dtypes import DTYPE_NAMES, FLOAT8_NAMES, INTEGER_DTYPES, TRITON_NAMES


def test_every_room_names_the_same_dtypes():
    """The tables import no parser and the language no torch, so that each has its own words for them."""
    assert {name: getattr(torch, long) for name, long in expr.DTYPES.items()} == {name: dtype for dtype, name in DTYPE_NAMES.items()}
    assert tuning_space.DTYPES == table.DTYPES == tuple(DTYPE_NAMES.values())
    assert {name: getattr(torch, f.torch) for name, f in expr.FLOAT8.items()} == {name: dtype for dtype, name in FLOAT8_NAMES.items()}
    assert {*DTYPE_NAMES, *FLOAT8_NAMES, *INTEGER_DTYPES, torch.bool} < set(TRITON_NAMES)


def test_the_ranges_of_float8_are_those_of_torch():
    for dtype, name in FLOAT8_NAMES.items():
        form, info = expr.FLOAT8[name], torch.finfo(dtype)
        assert (form.largest, 2.0**-form.fraction, 2.0 ** (1 - form.bias)) == (info.max, info.eps, info.smallest_normal)


def test_bytes_are_those_of_torch():
    assert all(getattr(torch, expr.TORCH_NAMES.get(name, name)).itemsize == size for name, size in BYTES.items())
