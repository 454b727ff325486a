"""Finding a recipe: a bare name is a bundled recipe; text with a separator or `.toml` is a path."""

from pathlib import Path

import pytest

from ddpforge.errors import RecipeError
from ddpforge.recipe import bundled, find_recipe, load_recipe, render


def _refusal(name: str | Path) -> str:
    with pytest.raises(RecipeError) as caught:
        find_recipe(name)
    return render(caught.value)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text("")
    Path("plain").write_text("")


def test_find_recipe_accepts_names_and_paths() -> None:
    assert find_recipe("digits") == bundled()["digits"]
    assert find_recipe("mine.toml") == Path("mine.toml")
    assert find_recipe("./plain") == Path("plain")
    assert find_recipe(Path("plain")) == Path("plain")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("digit", "did you mean `digits`?"),
        ("digits.yaml", "recipes are TOML files: `digits.toml`"),
        ("plain", "write a file in this folder as `./plain`"),
        ("mien.toml", "did you mean `mine.toml`?"),
        ("digits.toml", "`digits` without a path is a recipe that ships with ddpforge"),
        ("no/such.toml", "there is no folder `no`"),
        ("./", "`./` is a folder, not a recipe"),
        ("a\0b.toml", "a�b.toml"),
        ("x" * 5000, "no recipe named"),
        ("x" * 5000 + ".toml", "no such recipe"),
    ],
)
def test_a_missing_recipe_is_an_error_with_a_similar_name(name: str, said: str) -> None:
    assert said in _refusal(name)


@pytest.mark.parametrize("name", sorted(bundled()))
def test_every_bundled_recipe_is_valid(name: str) -> None:
    loaded = load_recipe(name)
    Path("resolved.toml").write_text(loaded.dumps(), encoding="utf-8")
    assert load_recipe("resolved.toml").recipe == loaded.recipe
