"""What a spec may say of tuning, and that anything else is refused in one line."""

import pytest

from dtkernels.lang.errors import DTError
from dtkernels.lang.spec import parse_spec
from dtkernels.lang.tuning_space import read_families, read_shapes
from dtkernels.ops.registry import shipped, shipped_names

TEXT = "f.block(x:{a}); f.num_warps({b});"


def test_a_family_is_every_combination_of_its_space():
    (family,) = read_families([{"schedule": TEXT, "space": {"a": [1, 2], "b": 4}}], "s")
    assert list(family.texts()) == ["f.block(x:1); f.num_warps(4);", "f.block(x:2); f.num_warps(4);"]


def test_shapes_are_every_combination_of_their_sizes():
    (shapes,) = read_shapes([{"sizes": {"x": [1, 2], "y": 8}, "held_out": True, "params": {"causal": True}}], "s")
    assert list(shapes.each()) == [{"x": 1, "y": 8}, {"x": 2, "y": 8}]
    assert shapes.held_out and shapes.params == {"causal": True} and shapes.directions == ("forward", "backward")


BAD_FAMILIES = {
    "unknown key": {"schedule": TEXT, "space": {"a": 1, "b": 2}, "spaces": {}},
    "names in the text": {"schedule": TEXT, "space": {"a": 1}},
    "those of the space": {"schedule": "f.num_warps({b});", "space": {"a": 1, "b": 2}},
    "schedule is DT text": {"schedule": 3},
    "direction": {"schedule": "f.num_warps(4);", "direction": "sideways"},
    "dtypes": {"schedule": "f.num_warps(4);", "dtypes": ["fp8"]},
    "space of a": {"schedule": "f.block(x:{a});", "space": {"a": [1.5]}},
}


@pytest.mark.parametrize("said", BAD_FAMILIES)
def test_a_family_that_is_wrong_is_refused(said):
    with pytest.raises(DTError, match="entry 1") as caught:
        read_families([BAD_FAMILIES[said]], "spec.yaml")
    assert said in str(caught.value) and "\n" not in str(caught.value)


BAD_SHAPES = {
    "unknown key": {"sizes": {"x": 1}, "size": 2},
    "sizes maps labels": {},
    "size of x": {"sizes": {"x": "many"}},
    "1 to 2^40": {"sizes": {"x": 0}},
    "held_out is": {"sizes": {"x": 1}, "held_out": "yes"},
    "params maps": {"sizes": {"x": 1}, "params": {"causal": "yes"}},
    "directions": {"sizes": {"x": 1}, "directions": ["up"]},
}


@pytest.mark.parametrize("said", BAD_SHAPES)
def test_shapes_that_are_wrong_are_refused(said):
    with pytest.raises(DTError, match="entry 1") as caught:
        read_shapes([BAD_SHAPES[said]], "spec.yaml")
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_spec_with_a_wrong_family_names_its_file():
    text = "op: f\ndoc: d\nalgorithm: |\n  Func f; In A; Var x;\n  f[x] = A[x];\nschedules:\n- {schedule: 'f.block(x:{n});'}\n"
    with pytest.raises(DTError, match=r"my\.yaml: schedules: entry 1"):
        parse_spec(text, "my.yaml")


def test_every_op_that_is_tuned_says_where_to_judge_the_choice():
    tuned = [name for name in shipped_names() if shipped(name).spec.shapes]
    assert len(tuned) >= 6
    for name in tuned:
        spec = shipped(name).spec
        assert any(s.held_out for s in spec.shapes) and any(not s.held_out for s in spec.shapes), name
