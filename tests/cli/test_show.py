"""`ddpforge show`: prints the resolved recipe with origins, its batch sizes, and the strategy's contract."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ddpforge.cli import main
from ddpforge.recipe import load_recipe


def _show(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["show", *arguments])


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(
        """\
recipe = 2
name = "small"
model = { use = "cnn", classes = 10 }
data.train = { use = "digits", split = "train" }
task = { use = "classification", metrics = ["accuracy", "top5"] }
optimizer = { use = "adamw", lr = 1e-3 }
train = { length = "2ep", global_batch = 64, micro_batch = 8 }
""",
        encoding="utf-8",
    )
    return "small.toml"


def test_every_value_is_followed_by_its_origin(recipe: str) -> None:
    lines = _show(recipe, "--set", "train.seed=7").stdout.split("\n")
    told = {line.partition(" = ")[0]: line.rpartition("# ")[2] for line in lines if " = " in line and "  # " in line}
    assert told["name"] == "small.toml:2"
    assert told["metrics"] == "small.toml:5"
    assert told["seed"] == "--set"
    assert told["precision"] == "default"
    assert len({line.index("  # ") for line in lines if "  # " in line}) == 1


def test_the_output_loads_as_an_equal_recipe(recipe: str) -> None:
    Path("shown.toml").write_text(_show(recipe).stdout, encoding="utf-8")
    assert load_recipe("shown.toml").recipe == load_recipe(recipe).recipe


def test_show_prints_the_batch_and_the_contract(recipe: str) -> None:
    lines = _show(recipe, "--ranks", "2").stdout.split("\n")
    assert "# batch: 64 per step = 8 per forward pass × 4 accumulation × 2 ranks" in lines
    assert any(line.startswith("# ddp shards: nothing") for line in lines)
    assert "# ddp averages over ranks: gradients" in lines
    assert "# ddp master weights: float32" in lines
    assert "# ddp gradients are reduced in: float32" in lines


def test_show_prints_the_config_generated_for_another_library(recipe: str) -> None:
    Path("telling.py").write_text(
        "from ddpforge.strategies.ddp import DDP\n\n"
        "class Telling(DDP):\n"
        "    def generated_config(self, train, ranks):\n"
        '        return {"engine": {"clip": train.clip_norm, "ranks": ranks}}\n'
    )
    use = ("--set", 'strategy.use="./telling.py:Telling"', "--set", "train.clip_norm=0.5", "--ranks", "2")
    shown = _show(recipe, *use).stdout
    comment = shown[shown.index("# engine: ") :].replace("\n# ", "\n").removeprefix("# engine: ")
    assert json.loads(comment) == {"clip": 0.5, "ranks": 2}
    assert json.loads(_show(recipe, *use, "--json").stdout)["generated"] == {"engine": json.loads(comment)}


def test_ranks_that_do_not_divide_the_batch_are_an_error(recipe: str) -> None:
    result = _show(recipe, "--ranks", "3")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "nearest global_batch: 48 or 72, with micro_batch = 8" in result.stderr


def test_replicas_that_do_not_divide_the_ranks_are_an_error(recipe: str) -> None:
    result = _show(recipe, "--ranks", "2", "--set", "strategy.use=fsdp", "--set", "strategy.replicas=3")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "strategy.replicas = 3 does not divide the 2 ranks" in result.stderr


def test_json_has_recipe_origins_batch_and_contract(recipe: str) -> None:
    shown = json.loads(_show(recipe, "--ranks", "2", "--json").stdout)
    assert shown["recipe"]["train"]["global_batch"] == 64
    assert shown["origins"]["train.global_batch"] == "small.toml:7"
    sizes = {"global_batch": 64, "micro_batch": 8, "accumulation": 4, "data_ranks": 2, "max_tokens": None}
    assert shown["batch"] == sizes
    assert shown["contract"]["shards"] == []


def test_shown_parameter_groups_load_as_an_equal_recipe(recipe: str) -> None:
    groups = (
        "optimizer.groups={matrices={parameters=['2d'], use='muon', lr=0.02}, head={parameters=['*.bias'], lr=0.1}}"
    )
    Path("shown.toml").write_text(_show(recipe, "--set", groups).stdout, encoding="utf-8")
    assert load_recipe("shown.toml").recipe == load_recipe(recipe, sets=[groups]).recipe


def test_values_are_set_with_or_without_the_option_in_any_order(recipe: str) -> None:
    shown = json.loads(
        _show(recipe, "train.seed=7", "--set", "train.length=3ep", "name=b", "~task.metrics", "--json").stdout
    )
    assert [shown["recipe"]["train"][key] for key in ("seed", "length")] == [7, "3ep"]
    assert shown["recipe"]["name"] == "b"
    assert shown["recipe"]["task"]["metrics"] == []
