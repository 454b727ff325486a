"""Exact error messages for invalid recipes: the first line of each `golden/*.toml` has the command, and the .txt file
of the same name has the expected output."""

import shlex
from pathlib import Path

import pytest

from ddpforge.components.registry import Registry
from ddpforge.errors import RecipeError
from ddpforge.recipe import check_world, load_recipe, render

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("*.txt")))
def test_error_messages_match_the_golden_files(name: str, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GOLDEN)
    assert _rendered_error(name, registry) == Path(f"{name}.txt").read_text(encoding="utf-8")


def _rendered_error(name: str, registry: Registry) -> str:
    _, _, file, *options = shlex.split(Path(f"{name}.toml").read_text(encoding="utf-8").split("\n")[0][1:])
    given = list(zip(options[::2], options[1::2], strict=True))
    sets = [value for option, value in given if option == "--set"]
    ranks = [int(value) for option, value in given if option == "--ranks"]
    with pytest.raises(RecipeError) as caught:
        check_world(load_recipe(file, sets=sets, registry=registry), *ranks)
    return render(caught.value) + "\n"
