"""Statements of a schedule have a class for each form, whichever way they are made."""

import copy
import pickle
import typing

import pytest

from dtkernels.lang.parser import parse_schedule
from dtkernels.lang.schedule import (
    PRIMITIVES,
    AccumulateAt,
    Approximate,
    Bare,
    Evict,
    FuseAt,
    Grouped,
    IllFormed,
    Map,
    Merge,
    Named,
    Names,
    Number,
    OneSize,
    Primitive,
    Share,
    Sized,
    Sizes,
    SpecializeWarps,
    Stage,
)

STATEMENTS = {
    "f.compile();": Bare("f", "compile"),
    "f.block(x:16, y:8);": Sizes("f", "block", (Sized("x", 16), Sized("y", 8))),
    "f.num_warps(8);": Number("f", "num_warps", (8,)),
    "f.descriptor(A, B);": Names("f", "descriptor", ("A", "B")),
    "f.specialize_warps(k);": SpecializeWarps("f", "specialize_warps", ("k",)),
    "f.chunk(y:64);": OneSize("f", "chunk", (Sized("y", 64),)),
    "f.fuse_at(g, k);": FuseAt("f", "fuse_at", ("g", "k")),
    "f.accumulate_at(g, k);": AccumulateAt("f", "accumulate_at", ("g", "k")),
    "f.accumulate_at(g, k, ordered);": AccumulateAt("f", "accumulate_at", ("g", "k", "ordered")),
    "f.accumulate_at(g, k, named);": AccumulateAt("f", "accumulate_at", ("g", "k", "named")),
    "f.accumulate_at(g, k, sorted);": IllFormed("f", "accumulate_at", ("g", "k", "sorted")),
    "f.map(x:x1/8, y, x1);": Map("f", "map", (Grouped("x", "x1", 8), "y", "x1")),
    "f.two_tiles(d, n);": Names("f", "two_tiles", ("d", "n")),
    "f.merge(p, y, x);": Merge("f", "merge", ("p", "y", "x")),
    "f.merge(p, x);": IllFormed("f", "merge", ("p", "x")),
    "f.stage(A, B:c);": Stage("f", "stage", ("A", Named("B", "c"))),
    "f.evict(A:first);": Evict("f", "evict", (Named("A", "first"),)),
    "f.approximate(tanh, exp:1/4);": Approximate("f", "approximate", ("tanh", Share("exp", 1, 4))),
    "f.block(x);": IllFormed("f", "block", ("x",)),
    "f.num_warps();": IllFormed("f", "num_warps"),
    "f.fuse_at(g);": IllFormed("f", "fuse_at", ("g",)),
}


@pytest.mark.parametrize("text, expected", STATEMENTS.items())
def test_the_class_of_a_statement(text, expected):
    (parsed,) = parse_schedule(text).primitives
    again = Primitive(expected.func, expected.name, expected.args)
    for made in (parsed, again, pickle.loads(pickle.dumps(parsed)), copy.deepcopy(parsed)):
        assert type(made) is type(expected) and made == expected and hash(made) == hash(expected) and str(made) == text
    assert pickle.loads(pickle.dumps(parsed)).pos == parsed.pos


def test_fields_by_name():
    fused, warps = STATEMENTS["f.fuse_at(g, k);"], STATEMENTS["f.num_warps(8);"]
    assert (fused.consumer, fused.label, warps.number) == ("g", "k", 8)
    assert [STATEMENTS[f"f.accumulate_at(g, k{order});"].ordered for order in ("", ", ordered")] == [False, True]
    assert STATEMENTS["f.map(x:x1/8, y, x1);"].groups == (Grouped("x", "x1", 8),)


def test_the_names_of_a_class_are_those_of_its_form():
    classes = {c for c in Primitive.__subclasses__() if c is not IllFormed}
    names = {c: set(typing.get_args(typing.get_type_hints(c)["name"])) for c in classes}
    assert sorted(n for found in names.values() for n in found) == sorted(PRIMITIVES)
    examples = {type(s): s.args for s in STATEMENTS.values()}
    for c in classes:
        for n in names[c]:
            made = next((m for kind, args in examples.items() if type(m := Primitive("f", n, args)) is kind and kind is not IllFormed), None)
            assert isinstance(made, c), n
