"""Errors in Python have the help lines of the command line, below their message."""

import copy
import pickle
import traceback

import pytest

import ddpforge
from ddpforge.errors import ForgeError, PluginError, RecipeError, SetupError, SourceSpan, UsageError, library, require


def test_hints_are_printed_below_an_exception() -> None:
    error = UsageError("no length", hints=['set train.length = "5ep"'])
    error.place = SourceSpan("run.toml", 3, 1)
    assert "".join(traceback.format_exception_only(error)).splitlines() == [
        "ddpforge.errors.UsageError: no length",
        " --> run.toml:3:1",
        ' help: set train.length = "5ep"',
    ]


@pytest.mark.parametrize("copied", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_a_copied_error_keeps_its_hints_and_notes(copied: object) -> None:
    error = ForgeError("full", hints=["free some memory"])
    error.add_note("on rank 3")
    assert copied(error).__notes__ == [" help: free some memory", "on rank 3"]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("hint", "note"),
    [
        ("start from scratch with --fresh; or wait", "start from scratch with fresh=True; or wait"),
        ("choose a folder with --out other/runs", 'choose a folder with out="other/runs"'),
        ("continue: --allow-change run", 'continue: allow_change=["run"]'),
        ("or set it: --set name=NAME, once", 'or set it: sets=["name=NAME"], once'),
        ("choose one with --step 40 or --best", "choose one with step=40 or best=True"),
    ],
)
def test_options_of_the_command_line_are_arguments_in_python(hint: str, note: str) -> None:
    assert UsageError("", hints=[hint]).__notes__ == [f" help: {note}"]


def test_every_problem_of_a_recipe_has_its_place_and_its_help_in_python() -> None:
    with pytest.raises(RecipeError) as caught:
        ddpforge.train({"name": "run", "train": {"epochs": 2, "batch_size": 32}})
    notes = caught.value.__notes__
    (at,) = (n for n, note in enumerate(notes) if note == "unknown key `epochs` in [train]")
    assert notes[at + 1].startswith(" --> dict:")
    assert notes[at + 2] == ' help: ddpforge writes `length = "2ep"` in [train]'


# ---------------------------------------------------------------------------------------------- optional libraries
def test_error_for_a_missing_library_names_its_extra() -> None:
    with pytest.raises(SetupError, match="nolibrary is not installed") as refused:
        library("nolibrary.inner", "webdataset")
    assert refused.value.hints == ("pip install 'msgpack>=1' 'pillow>=10' 'webdataset<2,>=0.2.100'",)
    assert library("json", "none").dumps([1]) == "[1]"
    with pytest.raises(PluginError, match="nolibrary is not installed"):
        require("nolibrary", "webdataset")
