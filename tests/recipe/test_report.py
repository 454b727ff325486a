"""Rendering of problems: a caret under the key or value, one line each, no control characters."""

from ddpforge.errors import RecipeError, UsageError
from ddpforge.recipe import Diagnostic, SourceSpan, render
from ddpforge.recipe.report import dotted, shown


def _lines(place: SourceSpan) -> list[str]:
    return render(Diagnostic("m", place=place)).split("\n")


def test_the_caret_is_under_the_span() -> None:
    assert _lines(SourceSpan("r.toml", 12, 3, 2, "a bc d")) == [
        "error: m",
        "  --> r.toml:12:3",
        "   |",
        "12 | a bc d",
        "   |   ^^",
    ]


def test_wide_characters_and_tabs_do_not_shift_the_caret() -> None:
    *_, line, caret = _lines(SourceSpan("r.toml", 1, 4, 2, "\t名=ab"))
    assert (line, caret) == ("1 |  名=ab", "  |     ^^")


def test_a_long_line_is_cut_around_the_span() -> None:
    *_, line, caret = _lines(SourceSpan("r.toml", 1, 5001, 3, "x" * 5000 + "abc" + "y" * 5000))
    assert len(line) < 200
    assert line[caret.index("^") :].startswith("abcy")
    assert caret.count("^") == 3


def test_a_problem_with_a_file_as_a_whole_shows_no_line() -> None:
    assert _lines(SourceSpan("r.toml")) == ["error: m", " --> r.toml"]


def test_control_characters_never_reach_the_terminal() -> None:
    problem = Diagnostic("\x1b[31m", place=SourceSpan("r\n", 1, 1, 1, "\x1b[2J"), hints=("\x07bell",))
    assert "\x1b" not in render(problem)
    assert "\x07" not in render(problem)


def test_long_hints_are_wrapped_with_an_indent() -> None:
    first, second = render(Diagnostic("m", hints=("word " * 25,))).split("\n")[1:]
    assert first.startswith("  = help: word word")
    assert second == "          " + "word " * 4 + "word"


def test_problems_are_counted_and_other_errors_have_their_hints() -> None:
    assert render(RecipeError([Diagnostic("a", "train.seed"), Diagnostic("b")])) == (
        "error: a\n\nerror: b\n\n2 errors in the recipe; nothing was started."
    )
    assert render(RecipeError([Diagnostic("no such recipe")])) == "error: no such recipe"
    assert render(UsageError("no", hints=["do this"])) == "error: no\n  = help: do this"


def test_keys_and_values_are_written_as_toml_writes_them() -> None:
    assert dotted(("a", "b c", 2, "é")) == 'a."b c"[2]."é"'
    assert shown({"a": [1, True, "x\n"], "b c": 1.5}) == '{ a = [1, true, "x\\n"], "b c" = 1.5 }'
    assert len(shown("x" * 1000)) == 60
