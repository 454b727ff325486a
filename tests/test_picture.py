"""Picture of a run in a terminal: control sequences of the terminal, and the SVG."""

import importlib.util
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("picture", ROOT / "docs" / "picture.py")
assert spec
assert spec.loader
picture = importlib.util.module_from_spec(spec)
spec.loader.exec_module(picture)

FIRST = "\x1b[32m━━\x1b[0m   3/10 30% forward\r\nloss 2 & <more>"
SECOND = "\x1b[32m━━━━\x1b[0m 6/10 60% forward\r\nloss 1"
ERASED = "\r\x1b[2K\x1b[1A\x1b[2K"
OUTPUT = (
    f"\x1b[1mdigits\x1b[0m\r\n{FIRST}{ERASED}\x1b[36meval step 5\x1b[0m\r\n{SECOND}{ERASED}\x1b[1;31mdone\x1b[0m\r\n"
)


def lines(percent: int) -> list[str]:
    return ["".join(letter for letter, _ in line) for line in picture.chosen(OUTPUT, percent)]


def test_screen_is_the_last_one_up_to_a_percentage() -> None:
    assert lines(59) == ["digits", "━━   3/10 30% forward", "loss 2 & <more>"]
    assert lines(60) == ["digits", "eval step 5", "━━━━ 6/10 60% forward", "loss 1"]
    with pytest.raises(SystemExit, match="no progress bar"):
        picture.chosen(OUTPUT, 29)


def test_svg_has_the_colors_and_the_text() -> None:
    root = ElementTree.fromstring(picture.drawn(picture.chosen(OUTPUT, 59)))
    found = [(text.get("class"), text.text) for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert found == [
        ("bold", "$ ddpforge run digits"),
        ("bold", "digits"),
        ("green", "━━"),
        ("", "   3/10 30% forward"),
        ("", "loss 2 & <more>"),
    ]
    assert [picture.styled("bold green", codes) for codes in ("", "0", "31", "39", "22", "1;96")] == [
        "",
        "",
        "bold red",
        "bold",
        "green",
        "bold cyan",
    ]


def test_picture_of_the_readme_is_small_and_valid() -> None:
    file = ROOT / "docs" / "assets" / "run.svg"
    assert file.stat().st_size < 200_000
    assert "eval step" in "".join(ElementTree.parse(file).getroot().itertext())
