"""`ddpforge recipes`: lists and copies bundled recipes, and upgrades recipe files."""

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
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["recipes", *arguments])


def test_ls_lists_every_bundled_recipe_with_its_title() -> None:
    lines = invoke("ls").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(bundled())
    assert any(line.startswith("digits") and "Handwritten digits" in line for line in lines)

    listed = json.loads(invoke("ls", "--json").stdout)["recipes"]
    assert [recipe["name"] for recipe in listed] == list(bundled())
    assert all(recipe["title"] for recipe in listed)


@pytest.mark.parametrize(
    ("target", "expected"), [([], "digits.toml"), (["mine.toml"], "mine.toml"), (["sub"], "sub/digits.toml")]
)
def test_cp_adds_a_schema_line_and_prints_the_path(target: list[str], expected: str) -> None:
    Path("sub").mkdir()
    result = invoke("cp", "digits", *target)
    schema = str(Path(expected).with_name("recipe.schema.json"))
    assert (result.exit_code, result.stdout.splitlines()) == (0, [expected, schema])
    text = Path(expected).read_text()
    assert text == "#:schema recipe.schema.json\n\n" + bundled()["digits"].read_text()
    assert load_recipe(expected).recipe == load_recipe("digits").recipe
    assert {"model", "train"} < json.loads(Path(schema).read_text())["properties"].keys()


def test_cp_keeps_an_existing_schema() -> None:
    Path("recipe.schema.json").write_text("mine")
    assert invoke("cp", "digits").exit_code == 0
    assert Path("recipe.schema.json").read_text() == "mine"


def test_cp_does_not_overwrite_a_file() -> None:
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
def test_usage_errors_are_printed_on_stderr(arguments: list[str], complaint: str) -> None:
    result = invoke("cp", *arguments)
    assert result.exit_code == ExitCode.USAGE
    assert result.stdout == ""
    assert complaint in result.stderr


# ---------------------------------------------------------------------------------------------- upgrade
OLD = 'recipe = 1\n[train]\nstall = "5m" # minutes\nlast_batch = "drop"\n'
NEW = 'recipe = 2\n[train]\nhang_timeout = "5m" # minutes\ndrop_last = true\n'
SAID = """\
  line 1: recipe = 1 → recipe = 2
  line 3: train.stall → train.hang_timeout
  line 4: train.last_batch = "drop" → train.drop_last = true
"""


def test_upgrade_changes_files_in_place_and_prints_each_change() -> None:
    Path("old.toml").write_text(OLD)
    Path("new.toml").write_text(NEW)
    done = invoke("upgrade", "old.toml", "new.toml")
    assert done.exit_code == 0
    assert done.stdout == f"old.toml: upgraded\n{SAID}new.toml: nothing to upgrade\n"
    assert Path("old.toml").read_text() == Path("new.toml").read_text() == NEW


def test_upgrade_check_writes_nothing_and_fails_if_a_file_would_change() -> None:
    Path("old.toml").write_text(OLD)
    done = invoke("upgrade", "--check", "old.toml")
    assert (done.exit_code, done.stdout) == (1, f"old.toml: would be upgraded\n{SAID}")
    assert Path("old.toml").read_text() == OLD
    Path("old.toml").write_text(NEW)
    assert invoke("upgrade", "--check", "old.toml").exit_code == 0


def test_upgrade_reports_invalid_files_and_upgrades_the_others() -> None:
    Path("bad.toml").write_text(OLD.replace("drop", "dorp"))
    Path("other.toml").write_text("[tool]\n")
    Path("old.toml").write_text(OLD)
    done = invoke("upgrade", "bad.toml", "other.toml", "absent.toml", "old.toml")
    assert done.exit_code == ExitCode.USAGE
    assert done.stdout == f"old.toml: upgraded\n{SAID}"
    for said in (
        '`train.last_batch` is now `train.drop_last`, and "dorp" has no counterpart',
        "--> bad.toml:4:14",
        "`other.toml` is not a recipe",
        "no such file: `absent.toml`",
    ):
        assert said in done.stderr
    assert Path("bad.toml").read_text() == OLD.replace("drop", "dorp")
    assert invoke("upgrade").exit_code == ExitCode.USAGE
