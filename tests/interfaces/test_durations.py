"""Durations: format, parsing, and conversion to steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from ddpforge.interfaces.durations import Duration, Horizon


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("5ep", 5, "ep"),
        ("0.5ep", 0.5, "ep"),
        ("100st", 100, "st"),
        ("30s", 30, "s"),
        ("1.5h", 1.5, "h"),
        ("0st", 0, "st"),
    ],
)
def test_a_duration_is_a_number_and_a_unit(text: str, value: float, unit: str) -> None:
    duration = Duration.parse(text)
    assert (duration.value, duration.unit) == (value, unit)
    assert str(duration) == text


@pytest.mark.parametrize(
    "text",
    ["", "5", "ep", "5 ep", " 5ep", "5ep\n", "-5ep", "+5ep", "1e3st", ".5ep", "5.ep", "1,5h", "5EP", "5epochs", "٣st"],
)
def test_invalid_durations_are_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be a duration such as \"5ep\""):
        Duration.parse(text)


def test_steps_are_whole_numbers_and_durations_are_bounded() -> None:
    assert Duration.parse("2.0st").value == 2
    with pytest.raises(ValueError, match="must be a whole number of steps"):
        Duration.parse("1.5st")
    with pytest.raises(ValueError, match="must be at most 1e\\+15st"):
        Duration.parse("1000000000000001st")
    with pytest.raises(ValueError, match="must be at most"):
        Duration.parse("9" * 400 + "ep")


@given(st.floats(0, 1e15), st.sampled_from(["ep", "h", "m", "s"]))
def test_formatted_durations_parse_to_the_same_value(value: float, unit: str) -> None:
    """Resolved recipes contain durations as text; small and large ones must not become 1e-05ep."""
    duration = Duration(value, unit)
    assert Duration.parse(str(duration)) == duration


@given(st.integers(0, 10**15))
def test_steps_are_written_as_whole_numbers(value: int) -> None:
    assert str(Duration(float(value), "st")) == f"{value}st"


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30), ("10m", 600), ("2h", 7200), ("0.5h", 1800)])
def test_wall_time_is_in_seconds(text: str, seconds: float) -> None:
    assert Duration.parse(text).is_time
    assert Duration.parse(text).seconds == seconds


def test_training_time_is_not_wall_time() -> None:
    assert not Duration.parse("5ep").is_time
    assert not Duration.parse("5st").is_time


def test_pydantic_reads_durations_from_text_only() -> None:
    adapter = TypeAdapter(Duration)
    assert adapter.validate_python("5ep") == Duration(5, "ep")
    assert adapter.dump_json(Duration(5, "ep")) == b'"5ep"'
    for wrong in (5, 5.0, "5", None):
        with pytest.raises(ValidationError):
            adapter.validate_python(wrong)


# ---------------------------------------------------------------------------------------------- conversion to steps
@pytest.mark.parametrize(
    ("text", "steps_per_epoch", "expected"),
    [
        ("5ep", 7, 35),
        ("0.5ep", 7, 4),        # rounded up
        ("0.1ep", 10, 1),
        ("1.1ep", 10, 11),      # though 1.1 × 10 is 11.000000000000002
        ("0.3ep", 10, 3),
        ("0.333333333333333ep", 3, 1),
        ("0.001ep", 7, 1),
        ("0.000000000001ep", 7, 1),
        ("0ep", 7, 0),
        ("12st", 7, 12),
    ],
)  # fmt: skip
def test_fractions_of_epochs_are_whole_steps_and_at_least_one(text: str, steps_per_epoch: int, expected: int) -> None:
    assert Horizon(None, steps_per_epoch).steps(Duration.parse(text)) == expected


@given(st.integers(1, 10_000), st.data())
def test_the_fraction_of_an_epoch_of_k_steps_is_k_steps(steps_per_epoch: int, data: st.DataObject) -> None:
    steps = data.draw(st.integers(1, 5 * steps_per_epoch))
    fraction = Duration(steps / steps_per_epoch, "ep")
    assert Horizon(None, steps_per_epoch).steps(fraction) == steps


def test_data_without_a_length_has_steps_and_no_epochs() -> None:
    horizon = Horizon(total=100, steps_per_epoch=None)
    assert horizon.steps(Duration.parse("12st")) == 12
    with pytest.raises(ValueError, match="5ep needs the length of an epoch"):
        horizon.steps(Duration.parse("5ep"))


def test_a_wall_time_cannot_be_converted_to_steps() -> None:
    with pytest.raises(ValueError, match="10m is a wall time; expected epochs or steps"):
        Horizon(None, 7).steps(Duration.parse("10m"))


@pytest.mark.parametrize(("text", "steps"), [("10%", 10), ("0.5%", 1), ("0%", 0), ("33.3%", 34), ("100%", 100)])
def test_percentages_refer_to_the_whole_run(text: str, steps: int) -> None:
    assert str(Duration.parse(text)) == text
    assert Horizon(100, None).steps(Duration.parse(text)) == steps


def test_percentages_are_refused_without_a_length_in_steps() -> None:
    with pytest.raises(ValueError, match=r"10% needs the run's length in steps, but train.length is a wall time"):
        Horizon(None, 10).steps(Duration.parse("10%"))
    with pytest.raises(ValueError, match="must be at most 100%"):
        Duration.parse("101%")
