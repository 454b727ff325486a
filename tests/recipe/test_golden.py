"""What people read when a recipe is wrong, to the letter: each `golden/*.toml` says on its first line how it is
checked, and the text beside it is the answer."""

import shlex
from pathlib import Path

import pytest

from ddpforge.components.registry import Registry
from ddpforge.errors import RecipeError
from ddpforge.recipe import check_world, load_recipe, render

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("*.txt")))
def test_errors_read_as_written_down(name: str, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GOLDEN)
    assert _answer(name, registry) == Path(f"{name}.txt").read_text(encoding="utf-8")


def _answer(name: str, registry: Registry) -> str:
    _, _, file, *options = shlex.split(Path(f"{name}.toml").read_text(encoding="utf-8").split("\n")[0][1:])
    given = list(zip(options[::2], options[1::2], strict=True))
    sets = [value for option, value in given if option == "--set"]
    ranks = [int(value) for option, value in given if option == "--ranks"]
    with pytest.raises(RecipeError) as caught:
        check_world(load_recipe(file, sets=sets, registry=registry), *ranks)
    return render(caught.value) + "\n"
