"""Every published program, at its published schedule, on a GPU: divisible and odd sizes, against float64."""

from pathlib import Path

import pytest
import torch
from oracle import check

from dtkernels.lang import parse

PROGRAMS = sorted((Path(__file__).parent.parent / "golden" / "programs").glob("*.dt"))
#: extents for every label that the programs use, divisible by the published tiles and not
SIZES = {"divisible": dict.fromkeys("xymnkl", 512), "odd": {"x": 130, "y": 517, "m": 67, "n": 131, "k": 33, "l": 101}, "one": dict.fromkeys("xymnkl", 1)}


def inputs(algorithm, sizes, dtype):
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn([sizes[label] for label in algorithm.plain_labels(t)], generator=generator).to(dtype) for t in algorithm.inputs]
    return tensors, [0.5] * len(algorithm.scalars)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("path", PROGRAMS, ids=[p.stem for p in PROGRAMS])
def test_published_program(path, sizes, dtype):
    text = path.read_text()
    if ".block(" not in text and ".tensorize(" not in text:  # single elements by one program: keep it short
        sizes = {label: min(n, 16) for label, n in sizes.items()}
    tensors, scalars = inputs(parse(text).algorithm, sizes, dtype)
    check(text, *(t.cuda() for t in tensors), *scalars)
