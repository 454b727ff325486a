"""`ddpforge recipes`: what comes with ddpforge, and a copy of it to edit."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ddpforge.cli import main
from ddpforge.errors import ExitCode
from ddpforge.recipe import bundled, load_recipe


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["recipes", *arguments])


def test_every_bundled_recipe_is_listed_with_what_it_trains() -> None:
    lines = invoke("ls").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(bundled())
    assert any(line.startswith("digits") and "Handwritten digits" in line for line in lines)

    listed = json.loads(invoke("ls", "--json").stdout)["recipes"]
    assert [recipe["name"] for recipe in listed] == list(bundled())
    assert all(recipe["title"] for recipe in listed)


@pytest.mark.parametrize(
    ("target", "expected"), [([], "digits.toml"), (["mine.toml"], "mine.toml"), (["sub"], "sub/digits.toml")]
)
def test_a_copy_is_the_same_below_its_schema_and_its_path_is_printed(target: list[str], expected: str) -> None:
    Path("sub").mkdir()
    result = invoke("cp", "digits", *target)
    assert (result.exit_code, result.stdout) == (0, f"{expected}\n")
    text = Path(expected).read_text()
    assert text == "#:schema recipe.schema.json\n\n" + bundled()["digits"].read_text()
    assert load_recipe(expected).recipe == load_recipe("digits").recipe
    schema = json.loads(Path(expected).with_name("recipe.schema.json").read_text())
    assert {"model", "train"} < schema["properties"].keys()


def test_a_schema_that_is_there_is_left_alone() -> None:
    Path("recipe.schema.json").write_text("mine")
    assert invoke("cp", "digits").exit_code == 0
    assert Path("recipe.schema.json").read_text() == "mine"


def test_an_existing_file_is_not_overwritten() -> None:
    Path("digits.toml").write_text("mine")
    result = invoke("cp", "digits")
    assert result.exit_code == ExitCode.USAGE
    assert "digits.toml exists already" in result.stderr
    assert Path("digits.toml").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["digit"], "did you mean `digits`?"),
        (["digits", "no/such/folder.toml"], "cannot write no/such/folder.toml: No such file or directory"),
    ],
)
def test_mistakes_are_told_on_stderr(arguments: list[str], complaint: str) -> None:
    result = invoke("cp", *arguments)
    assert result.exit_code == ExitCode.USAGE
    assert result.stdout == ""
    assert complaint in result.stderr
