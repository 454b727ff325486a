"""All errors of a recipe are reported in one pass, at the key that they concern."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.small_recipe import CODE, RECIPE, SETS, told
from support.stages import Staged

from ddpforge.errors import ForgeError
from ddpforge.recipe.report import render


def test_an_error_in_the_model_constructor_is_reported(parts: Callable[..., Staged]) -> None:
    Path("mine.py").write_text(CODE + "\ndef broken():\n    raise ValueError('no wheels')\n")
    assert "no wheels" in told(parts("model={use='./mine.py:broken'}"))["model"]


def test_an_invalid_evaluation_set_is_reported_at_its_own_key(parts: Callable[..., Staged]) -> None:
    Path("mine.py").write_text(CODE + "\ndef none(seed: int):\n    return []\n")
    found = told(parts(*SETS, "data.eval.three.use=./mine.py:none"), strict=True)
    assert found == {"data.eval.three": "list is empty: it has no samples"}


def test_a_single_setup_error_keeps_its_exit_code_and_hints(parts: Callable[..., Staged]) -> None:
    Path("mine.py").write_text(
        CODE + "\nfrom ddpforge.errors import SetupError\n"
        "def absent(seed: int):\n    raise SetupError('no disk', hints=['mount it'])\n"
    )
    with pytest.raises(ForgeError, match="no disk") as caught:
        parts("data.train.use=./mine.py:absent").problems.raise_if_any()
    assert (caught.value.exit_code, caught.value.hints) == (3, ("mount it",))
    assert "--> --set:1:6" in render(caught.value)


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_run_reports_all_errors_and_creates_no_folder(
    ddpforge: Callable[..., object], tmp_path: Path, nproc: int
) -> None:
    (tmp_path / "run.toml").write_text(RECIPE)
    (tmp_path / "mine.py").write_text(CODE)
    wrong = ('optimizer.no_decay=["biass"]', 'train.blocks=["Nope"]', "data.train.gives=dict")
    sets = [word for text in wrong for word in ("--set", text)]
    failed = ddpforge("run", "run.toml", *sets, nproc=nproc, fails=True)
    assert set(failed.codes) == {2}  # type: ignore[attr-defined]
    said = failed.stderr  # type: ignore[attr-defined]
    assert "3 errors in the recipe; nothing was started." in said
    for message in ("`biass` matches no parameter", "has no Nope", "the data gives a dict with x float32 [4, 4]"):
        assert message.replace("[4, 4]", f"[{8 // nproc}, 4]") in said
    assert "Traceback" not in said
    assert not (tmp_path / "runs").exists()


def test_problems_have_keys_as_json(parts: Callable[..., Staged]) -> None:
    found = told(parts("optimizer.no_decay=['biass']"))
    assert json.dumps(list(found)) == '["optimizer.no_decay"]'


WORDS = """
from torch import nn

class Net(nn.Linear):
    def __init__(self, width: int = 4, depth: int = 2) -> None:
        super().__init__(4, 3)
        if depth % 2 == 0:
            raise ValueError("{said}")
"""


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ("with this width, depth must be odd, not 2", "model"),
        ("depth: it must be odd, not 2", "model.depth"),
        ("depth = 2 is even", "model.depth"),
        ("train: it must be odd", "model"),
    ],
)
def test_an_error_is_reported_at_the_option_that_begins_its_message(
    parts: Callable[..., Staged], said: str, key: str
) -> None:
    Path("words.py").write_text(WORDS.format(said=said))
    assert told(parts("model={use='./words.py:Net', width=3, depth=2}")).keys() == {key}


def test_a_model_with_too_few_outputs_is_reported(parts: Callable[..., Staged]) -> None:
    mlp = "model={use='mlp', inputs=64, outputs=7}"
    found = told(parts(mlp, "data.train={use='digits', split='train'}"))
    assert found == {"model.outputs": "the data has 10 classes and the model 7 outputs"}
