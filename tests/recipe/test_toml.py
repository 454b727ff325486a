"""Positions of all keys and values in a TOML text, for every notation of TOML."""

import pytest

from ddpforge.recipe.report import KeyPath
from ddpforge.recipe.toml import Origin, Source

TEXT = '''\
top = 1 # a comment = 2
"quoted key" = "x"
dotted.inner."last part" = [1, [2, "]"], {x = "}", y.z = 4}]
[data.train]
text = """
two "" lines"""
keep = { last = 3, best = { by = 'eval' } }
[[list]]
when = 1979-05-27 07:32:00
[[list]]
[list.sub]
numbers = [
  1,  # one
  22,
]
'''


@pytest.mark.parametrize(
    ("path", "line", "column", "width"),
    [
        (("top",), 1, 7, 1),
        (("quoted key",), 2, 16, 3),
        (("dotted", "inner", "last part"), 3, 28, 33),
        (("dotted", "inner", "last part", 1, 1), 3, 36, 3),
        (("dotted", "inner", "last part", 2, "x"), 3, 47, 3),
        (("dotted", "inner", "last part", 2, "y", "z"), 3, 58, 1),
        (("data", "train"), 4, 2, 10),
        (("data", "train", "text"), 5, 8, 3),
        (("data", "train", "keep"), 7, 8, 36),
        (("data", "train", "keep", "best", "by"), 7, 34, 6),
        (("list", 0, "when"), 9, 8, 19),
        (("list", 1), 10, 3, 4),
        (("list", 1, "sub", "numbers", 1), 14, 3, 2),
    ],
)
def test_every_value_has_a_position(path: KeyPath, line: int, column: int, width: int) -> None:
    place = Source("r.toml", TEXT).place(path)
    assert (place.line, place.column, place.width) == (line, column, width)
    assert place.text == TEXT.split("\n")[line - 1]


@pytest.mark.parametrize(
    ("path", "line", "column", "width"),
    [
        (("quoted key",), 2, 1, 12),
        (("dotted",), 3, 1, 6),
        (("dotted", "inner", "last part"), 3, 14, 11),
        (("dotted", "inner", "last part", 2, "y", "z"), 3, 54, 1),
        (("data", "train", "keep", "best"), 7, 20, 4),
    ],
)
def test_every_key_has_a_position(path: KeyPath, line: int, column: int, width: int) -> None:
    place = Source("r.toml", TEXT).place(path, key=True)
    assert (place.line, place.column, place.width) == (line, column, width)


def test_a_missing_key_has_the_position_of_the_nearest_table() -> None:
    source = Source("r.toml", TEXT)
    assert str(source.place(("data", "train", "absent"))) == "r.toml:4:2"
    assert str(source.place(("list", 1, "sub", "numbers", 9))) == "r.toml:12:11"
    assert str(source.place(("absent", "too"))) == "r.toml"


def test_an_origin_shows_file_line_and_variables() -> None:
    source = Source("r.toml", TEXT)
    variable = Origin(Source("base.toml", TEXT), ("top",))
    assert str(Origin()) == "default"
    assert str(Origin(source, ("list", 0, "when"))) == "r.toml:9"
    assert str(Origin(source, ("top",), (("vars.x", variable), ("env:Y", None)))) == (
        "r.toml:1, vars.x from base.toml:1, env:Y"
    )
