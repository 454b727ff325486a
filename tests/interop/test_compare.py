"""Comparison of two checkpoints: the differences, and their sizes."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint.doubles import checkpoint_of, write
from checkpoint.worlds import write_sharded
from torch import Tensor

from ddpforge.errors import CheckpointError
from ddpforge.interfaces import CanonicalState
from ddpforge.interop.compare import Differences, TensorDifference, Value, compare

RECIPE = 'name = "x"\n[optimizer]\nlr = 1.0\n'


def differences(one: dict[str, Any], other: dict[str, Any]) -> Differences:
    paths = [write(Path(name), checkpoint_of(7, **change)) for name, change in (("one", one), ("other", other))]
    return compare(*paths)


def distance(one: Tensor, other: Tensor) -> tuple[str, int, float, float] | None:
    """Returns the note, the number of elements, and the largest differences of two weights."""
    states = [CanonicalState(model={"w": tensor}, optimizer={}) for tensor in (one, other)]
    found = differences(*({"state": state, "callbacks": {}} for state in states)).tensors
    if not found:
        return None
    (each,) = found
    assert (each.section, each.name) == ("model", "w")
    return each.note, each.elements, each.absolute, each.relative


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def values(found: list[Value]) -> dict[str, tuple[Any, Any]]:
    return {each.name: (each.a, each.b) for each in found}


def test_equal_states_in_different_shards_are_equal() -> None:
    found = compare(write(Path("one"), checkpoint_of(7)), write_sharded(Path("other"), checkpoint_of(7)))

    assert found.equal
    assert found.compared == {"model": 3, "optimizer": 2, "callbacks": 1}
    assert (found.tensors, found.facts, found.recipe) == ([], [], [])
    assert found.missing == found.unexpected == {"model": [], "optimizer": [], "callbacks": []}


def test_training_position_is_compared_and_time_and_strategy_are_not() -> None:
    found = differences(
        {"position": {"seconds": 1.0, "skipped": 1}, "loop": {"scale": 2.0}, "metrics": {"eval/loss": 1.0}},
        {
            "position": {"seconds": 2.0, "skipped": 1},
            "loop": {"scale": 2.0},
            "metrics": {"eval/loss": math.nan},
            "strategy": "ddp",
            "world_size": 4,
        },
    )
    assert found.equal
    about = values(found.about)
    assert about.pop("created")
    assert about == {"strategy": ("single", "ddp"), "world_size": (1, 4), "metrics.eval/loss": (1.0, None)}

    found = differences(
        {"position": {"skipped": 1}, "loop": {"scale": 2.0, "skipped": 0}, "samples": 70},
        {"position": {"skipped": 2}, "loop": {"scale": 4.0}, "samples": 71},
    )
    assert not found.equal
    assert values(found.facts) == {
        "samples": (70, 71),
        "position.skipped": (1, 2),
        "loop.scale": (2.0, 4.0),
        "loop.skipped": (0, None),
    }


def test_value_none_differs_from_an_absent_value() -> None:
    found = differences({"callbacks": {"mine": {"best": None}}}, {"callbacks": {"mine": {}}})

    assert values(found.facts) == {"callbacks: mine/best": (None, None)}
    assert not found.equal


def test_numbers_are_compared_as_facts_without_their_dtype() -> None:
    def state(step: float) -> CanonicalState[Tensor]:
        return CanonicalState(model={"w": torch.ones(1)}, optimizer={"w": {"step": torch.tensor(step)}}, aliases={})

    found = differences(
        {"state": state(1.0), "callbacks": {"stop": {"bad": 1}}},
        {"state": state(2.0), "callbacks": {"stop": {"bad": 2}}},
    )

    assert values(found.facts) == {"optimizer: w/step": (1.0, 2.0), "callbacks: stop/bad": (1, 2)}


def test_equivalent_recipes_are_equal_and_an_invalid_recipe_is_an_error() -> None:
    found = differences({"recipe": RECIPE}, {"recipe": RECIPE.replace('"x"', '"y"')})
    assert [(each.path, each.policy) for each in found.recipe] == [("name", "free")]
    assert found.equal
    assert not differences({"recipe": RECIPE}, {"recipe": RECIPE.replace("1.0", "2.0")}).equal

    with pytest.raises(CheckpointError, match=r"the recipe in other.* cannot be read"):
        differences({"recipe": RECIPE}, {"recipe": "= nonsense"})


def test_missing_and_unexpected_tensors_are_listed() -> None:
    states = [
        CanonicalState(model={"a": torch.ones(1), name: torch.ones(1)}, optimizer={}) for name in ("left", "right")
    ]
    found = differences(*({"state": state, "callbacks": {}} for state in states))

    assert (found.missing["model"], found.unexpected["model"]) == (["left"], ["right"])
    assert found.compared == {"model": 1, "optimizer": 0, "callbacks": 0}
    assert (found.tensors, found.equal) == ([], False)
    for state in states[:1]:
        less = CanonicalState(model={"a": torch.ones(1)}, optimizer={})
        for one, other in ((state, less), (less, state)):
            assert not differences({"state": one, "callbacks": {}}, {"state": other, "callbacks": {}}).equal


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1.0, 2.0, -4.0], [1.0, 2.0, -4.0], None),
        ([1.0, 2.0, -4.0], [1.0, 2.5, -5.0], (2, 1.0, 0.2)),
        ([1.0, 2.0, -4.0], [1.0, 2.0, 4.0], (1, 8.0, 2.0)),
        ([0.0, 2.0], [-0.0, 2.0], None),
        ([0.0, 2.0], [0.5, 2.0], (1, 0.5, 1.0)),
        ([math.inf, 2.0], [math.inf, 2.0], None),
        ([math.nan, 2.0], [math.nan, 2.0], None),
        ([math.nan, 2.0], [math.nan, 3.0], (1, 1.0, 1 / 3)),
    ],
)
def test_difference_is_the_maximum_over_elements(
    one: list[float], other: list[float], expected: tuple[int, float, float] | None
) -> None:
    found = distance(torch.tensor(one, dtype=torch.float64), torch.tensor(other, dtype=torch.float64))

    assert found == (None if expected is None else ("", *expected))


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_nonfinite_value_on_one_side_has_no_finite_difference(odd: float) -> None:
    finite, other = torch.tensor([1.0, 5.0, 3.0]), torch.tensor([1.0, odd, 2.0])

    for pair in ((finite, other), (other, finite)):
        found = distance(*pair)
        assert found is not None
        note, elements, absolute, relative = found
        assert (note, elements) == ("", 2)
        assert math.isnan(relative)
        assert not math.isfinite(absolute)


def test_tensors_are_compared_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpforge.interop.compare._STRIDE", 4)
    one = torch.arange(1.0, 11.0, dtype=torch.float64).view(2, 5)
    other = one.clone()
    other[0, 2], other[1, 2], other[1, 4] = 3.5, 10.0, 10.5

    assert distance(one, other) == ("", 3, 2.0, 0.2)
    other[0, 0] = 1e300
    assert distance(one, other) == ("", 4, 1e300, 1.0), "more than a float32 holds"


def test_integers_beyond_float_precision_differ() -> None:
    one = torch.tensor([2**60, 5, 7])

    assert distance(one, torch.tensor([2**60 + 1, 5, 7])) == ("", 1, 0.0, 0.0)
    assert distance(one, torch.tensor([2**60, 5, 9])) == ("", 1, 2.0, 2 / 9)
    assert distance(torch.tensor([True, False]), torch.tensor([True, True])) == ("", 1, 1.0, 1.0)


def test_another_dtype_is_a_difference_and_another_shape_has_no_distance() -> None:
    one = torch.tensor([1.0, 2.0])

    assert distance(one, one.double()) == ("float32 [2] → float64 [2]", 0, 0.0, 0.0)
    assert distance(one, torch.tensor([1.0, 3.0]).half()) == ("float32 [2] → float16 [2]", 1, 1.0, 1 / 3)
    assert distance(one, one.view(2, 1)) == ("float32 [2] → float32 [2, 1]", 0, 0.0, 0.0)


def test_differences_are_sorted_by_section_and_name() -> None:
    found = compare(write(Path("one"), checkpoint_of(1)), write(Path("other"), checkpoint_of(2)))

    assert [(each.section, each.name) for each in found.tensors] == [
        ("model", "layer.bias"),
        ("model", "layer.weight"),
        ("model", "norm.num_batches_tracked"),
        ("optimizer", "layer.bias/exp_avg"),
        ("optimizer", "layer.weight/exp_avg"),
        ("callbacks", "ema/layer.weight"),
    ]
    assert found.tensors[1] == TensorDifference(
        section="model", name="layer.weight", elements=15, absolute=1.0, relative=0.5
    )


def test_tensors_that_do_not_fit_into_memory_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [write(Path(name), checkpoint_of(7)) for name in ("one", "other")]
    largest = 2 * 15 * 4
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=largest))
    assert compare(*paths).equal

    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=largest - 1))
    with pytest.raises(
        CheckpointError, match=r"layer.weight \(model\) of one.* needs 120 bytes of memory, but only 119 are"
    ):
        compare(*paths)


def test_damaged_checkpoint_is_an_error() -> None:
    paths = [write(Path(name), checkpoint_of(7)) for name in ("one", "other")]
    shard = paths[1] / "shard-00000-of-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")

    with pytest.raises(CheckpointError, match="are not as written"):
        compare(*paths)
