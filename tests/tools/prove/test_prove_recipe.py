"""`ddpforge prove RECIPE`: relations hold for ddpforge's own training, and a wrong task breaks one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from ddpforge.cli import main
from ddpforge.data import MicroBatch
from ddpforge.tools.prove.of_recipe import _OfRecipe
from ddpforge.tools.prove.trained import ChangedBatches

RECIPE = """\
recipe = 2
name = "tiny"
model = { use = "mlp", inputs = 64, outputs = 10, hidden = [8] }
data.train = { use = "digits", split = "test" }
data.eval = { use = "digits", split = "test" }
task = { use = "%s" }
optimizer = { use = "adamw", lr = 0.01 }
train = { length = "1ep", global_batch = 24, micro_batch = 6, clip_norm = 0.1 }
"""
WRONG = """
import torch.nn.functional as F

from ddpforge.interfaces import Task


class ByPlace(Task):
    def loss(self, model, batch):
        outputs = model(batch[0])
        each = F.cross_entropy(outputs, batch[1], reduction="none")
        return (each * each.new_tensor(range(len(each)))).sum(), outputs
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(RECIPE % "classification")
    return tmp_path


def proved(*arguments: str, code: int) -> dict[str, Any]:
    done = CliRunner().invoke(main, ["prove", "tiny.toml", "--json", *arguments])
    assert done.exit_code == code, done.output
    return {one["name"]: one for one in json.loads(done.stdout)["relations"]}


@pytest.mark.slow
def test_all_relations_hold_for_a_recipe_in_bf16_with_accumulation_and_clipping() -> None:
    found = proved("--set", "train.precision=bf16", code=0)
    results = {name: one["result"] for name, one in found.items()}
    assert [name for name, one in results.items() if one != "holds"] == ["padding", "checkpointing"]
    assert found["padding"]["why"] == "no batch has an attention mask"
    assert found["again"]["difference"] == found["resume"]["difference"] == 0


@pytest.mark.full  # test_order_is_reversed_… shows the change
def test_a_task_that_looks_at_places_breaks_the_order(folder: Path) -> None:
    (folder / "wrong.py").write_text(WRONG)
    (folder / "tiny.toml").write_text(RECIPE % "./wrong.py:ByPlace")
    found = proved("--ranks", "1", code=1)
    assert found["order"]["meaning"] == "the loss depends on the place of a sample in its batch"
    assert found["order"]["broken"]["step"] == 1


def micro(samples: int = 3) -> MicroBatch:
    data = {"x": torch.arange(3), "label": [torch.arange(3)], "scale": torch.tensor(2.0)}
    return MicroBatch(data, samples, samples, last=True, shard=0, number=0, items=5)


def changed(how: str, samples: int = 3) -> MicroBatch:
    class Batches:
        def training(self, start: int) -> Any:
            yield micro(samples)

    (found,) = ChangedBatches(Batches(), how).training(0)  # type: ignore[arg-type]
    return found


def test_order_is_reversed_and_samples_are_doubled_in_all_tensors_with_a_row_for_each() -> None:
    reverse, twice = changed("order"), changed("doubled")
    assert (reverse.data["x"].tolist(), reverse.data["label"][0].tolist()) == ([2, 1, 0], [2, 1, 0])
    assert float(reverse.data["scale"]) == 2
    assert twice.data["x"].tolist() == [0, 1, 2, 0, 1, 2]
    assert (twice.samples, twice.step_samples, twice.items) == (6, 6, 10)


def test_a_batch_that_only_pads_a_step_is_not_changed() -> None:
    assert changed("doubled", samples=0).data["x"].tolist() == [0, 1, 2]


def test_settings_of_each_relation_are_those_of_the_recipe(folder: Path) -> None:
    runs = _OfRecipe("tiny.toml", ["train.global_batch=12"], folder, 3)
    tried = {one.name: one for one in runs.relations(4)}
    assert tried["split"].more[-1] == "train.micro_batch=3"
    assert [tried[name].more[-1] for name in ("ranks", "ranks 4")] == ["train.micro_batch=6", "train.micro_batch=3"]
    assert "train.clip_norm=1000000" in tried["order"].more  # after clipping all gradients have the same norm
    assert tried["clipping"].more[-1] == "~train.clip_norm"
    assert "train.clip_norm=1000000" not in tried["clipping"].more


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tiny.toml", "--batch", "--bs {}"], "--batch is for a script"),
        (["tiny.toml", "--", "x"], "arguments is for a script"),
        (["train.py", "--set", "a=1"], "--set is for a recipe"),
        (["absent.toml"], "absent.toml"),
    ],
)
def test_options_of_scripts_and_recipes_are_not_mixed(words: list[str], message: str) -> None:
    done = CliRunner().invoke(main, ["prove", *words])
    assert done.exit_code == 2
    assert message in done.stderr


def test_a_relation_to_skip_must_exist(folder: Path) -> None:
    done = CliRunner().invoke(main, ["prove", "tiny.toml", "--skip", "oder"])
    assert done.exit_code == 2
    assert "there is no relation `oder` to skip" in done.stderr
