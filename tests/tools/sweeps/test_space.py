"""Search space of a sweep: variants, and the names of its runs."""

import math

import pytest

from ddpforge.errors import UsageError
from ddpforge.tools.sweeps.space import SearchSpace, ValueRange


def grid(*words: str) -> list[tuple[str, ...]]:
    return [variant.sets for variant in SearchSpace.parse(words).grid()]


def test_grid_has_every_combination_of_varied_values() -> None:
    assert grid("optimizer.lr=1e-4,1e-3", "train.seed=0..2", "train.length=5ep") == [
        ("train.length=5ep", f"optimizer.lr={lr}", f"train.seed={seed}")
        for lr in ("1e-4", "1e-3")
        for seed in (0, 1, 2)
    ]


def test_commas_in_brackets_and_quotes_do_not_separate_values() -> None:
    sets = grid("model.hidden=[8, 8],[16]", """x='a,b',"c",{ d = "}", e = [1, 2] }""", "z=[1,2]")
    assert [one[1:] for one in sets[:3]] == [
        ("model.hidden=[8, 8]", "x='a,b'"),
        ("model.hidden=[8, 8]", 'x="c"'),
        ("model.hidden=[8, 8]", 'x={ d = "}", e = [1, 2] }'),
    ]
    assert (len(sets), sets[0][0]) == (6, "z=[1,2]")


def names(*words: str) -> list[str]:
    return [variant.name for variant in SearchSpace.parse(words).grid()]


def test_run_names_have_values_and_the_shortest_unique_keys() -> None:
    assert names("optimizer.lr=1e-4,1e-3", "train.seed=0..1")[1:3] == ["lr-1e-4_seed-1", "lr-1e-3_seed-0"]
    assert names("a.lr=1,2", "b.lr=1,2")[0] == "a.lr-1_b.lr-1"


def test_run_names_that_lose_characters_have_a_digest() -> None:
    found = names("x=[1],{1}", "y='s/t','s t'", f"z={'a' * 300},b")
    assert len(set(found)) == 8
    assert all(len(name) < 100 and name.replace("_", "").replace("-", "").isalnum() for name in found)


def test_larger_sweep_keeps_the_names_and_draws_of_a_smaller_one() -> None:
    assert set(names("lr=1,2", "seed=0..1")) < set(names("lr=1,2,3", "seed=0..4"))
    space = SearchSpace.parse(["lr=1e-4..1e-1:log", "seed=0..9"])
    few, many = space.drawn(5, 0), space.drawn(9, 0)
    assert many[:5] == few
    assert space.drawn(5, 1) != few


def test_values_are_drawn_from_the_whole_range() -> None:
    space = SearchSpace.parse(["lr=1e-4..1e-1:log", "width=1..3", "drop=0.0..0.5", "act=a,b", "size=8..512:log"])
    drawn = [dict(text.split("=") for text in variant.sets) for variant in space.drawn(400, 0)]
    rates = sorted(float(one["lr"]) for one in drawn)
    assert 1e-4 <= rates[0] < 1.2e-4
    assert 0.08 < rates[-1] <= 0.1
    assert math.log10(rates[200]) == pytest.approx(-2.5, abs=0.2)
    assert {one["width"] for one in drawn} == {"1", "2", "3"}
    assert {one["act"] for one in drawn} == {"a", "b"}
    assert max(float(one["drop"]) for one in drawn) <= 0.5
    sizes = [int(one["size"]) for one in drawn]
    assert min(sizes) >= 8
    assert sum(size < 64 for size in sizes) == pytest.approx(200, abs=40)


def test_corners_combine_each_value_with_the_first_of_the_others() -> None:
    space = SearchSpace.parse(["lr=1e-4..1e-1:log", "seed=0,1", "fixed=5"])
    assert list(space.corners()) == [
        ("fixed=5", "lr=0.0001", "seed=0"),
        ("fixed=5", "lr=0.1", "seed=0"),
        ("fixed=5", "lr=0.0001", "seed=0"),
        ("fixed=5", "lr=0.0001", "seed=1"),
    ]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["train.seed=1"], "no key has several values in"),
        (["seed=4..0"], "the range 4..0 must begin below its end"),
        (["lr=0..1:log"], "must begin above zero"),
        (["lr=1e-4..1e-1"], "lr has too many values between 0.0001 and 0.1"),
        (["width=8..512:log"], "width has too many values between 8 and 512"),
        (["a=0..999", "b=0..999"], "the grid has 1,000,000 runs, more than 10,000"),
    ],
)
def test_invalid_search_spaces_are_rejected(words: list[str], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        SearchSpace.parse(words).grid()


def test_run_names_of_long_values_are_short_and_unique() -> None:
    long = "x" * 300
    names = [run.name for run in SearchSpace.parse([f"name={long},{long}y,z"]).grid()]
    assert len(set(names)) == 3
    assert [len(name) for name in names] == [80 + 7, 80 + 7, len("name-z")]


def test_single_list_is_rejected_with_a_hint_for_several() -> None:
    with pytest.raises(UsageError) as caught:
        SearchSpace.parse(["model.hidden=[8,16]"])
    assert "write several as KEY=[…],[…]" in caught.value.hints[1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0..4", ValueRange(0, 4, True)),
        ("-1..1.5", ValueRange(-1, 1.5, False)),
        ("1e-4..1e-1:log", ValueRange(1e-4, 0.1, False, True)),
        ("8..512:log", ValueRange(8, 512, True, True)),
        ("a..b", None),
        ("1...2", None),
        ("1,2", None),
    ],
)
def test_value_ranges_are_parsed(text: str, expected: ValueRange | None) -> None:
    assert ValueRange.parse(text) == expected
