"""`ddpforge plan`: table and JSON, and the search for the largest micro-batch that fits."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner
from support.isolated import apart

from ddpforge.cli import main
from ddpforge.cli.plan import _seconds
from ddpforge.recipe import load_recipe

RECIPE = """\
recipe = 2
name = "planned"

[model]
use = "mlp"
inputs = 64
hidden = [256, 256]
outputs = 10

[data.train]
use = "digits"
split = "train"

[task]
use = "classification"

[optimizer]
use = "adamw"
lr = 1e-3  # found by a sweep

[train]
length = "2ep"
global_batch = 256
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("recipe.toml").write_text(RECIPE, encoding="utf-8")
    return "recipe.toml"


class Output(NamedTuple):
    exit_code: int
    stdout: str
    output: str


def _plan(*arguments: str) -> Output:
    def said() -> Output:
        done = CliRunner().invoke(main, ["plan", *arguments])
        return Output(int(done.exit_code), done.stdout, done.output)

    return apart(said)


def _json(*arguments: str) -> Any:
    return json.loads(_plan(*arguments, "--json").stdout)


def test_a_table_has_a_row_for_every_strategy(recipe: str) -> None:
    said = _plan(recipe, "--ranks=2", "--strategies=ddp,fsdp").stdout
    assert "85,002 parameters" in said
    assert "batch: 256 per step = 128 per forward pass × 1 accumulation × 2 ranks" in said
    assert [line.split()[0] for line in said.splitlines() if line.startswith(("ddp ", "fsdp "))] == ["ddp", "fsdp"]
    assert "sends per step, all_reduce over 2 ranks: 340.0 kB" in said  # 85,002 × 4 bytes × 2 · (2 - 1) / 2


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2801, "280 ms"), (0.00296, "3 ms"), (0.9996, "1000 ms"), (1.25, "1.2 s"), (4e-6, "4 µs")]
)
def test_the_time_of_a_step_has_two_digits_and_no_exponent(seconds: float, text: str) -> None:
    assert _seconds(seconds) == text


def test_json_has_the_sizes_in_bytes(recipe: str) -> None:
    (one,) = _json(recipe, "--ranks=2", "--strategies=ddp")
    weights = 85_002 * 4
    assert one["state"]["weights"] == weights
    assert one["state"]["gradients"] == pytest.approx(weights, abs=64)
    assert one["state"]["optimizer state"] == pytest.approx(2 * weights, abs=64)  # and the step counts
    assert one["wire"] == {"all_reduce over 2": weights}
    sizes = {"global_batch": 256, "micro_batch": 128, "accumulation": 1, "data_ranks": 2, "max_tokens": None}
    assert one["batch"] == sizes
    assert sum(one["kinds"].values()) == one["peak"] == one["needs"]


def test_the_recipes_own_strategy_is_planned_by_default(recipe: str) -> None:
    (one,) = _json(recipe, "--ranks=4", "strategy.use=fsdp")
    assert (one["strategy"], one["ranks"]) == ("fsdp", 4)


def test_a_plan_that_does_not_fit_exits_with_1(recipe: str) -> None:
    assert _plan(recipe, "--memory=100MB").exit_code == 0
    too_much = _plan(recipe, "--memory=1MB")
    assert too_much.exit_code == 1
    assert "too much" in too_much.stdout


def test_a_plan_for_a_device_gives_the_source_of_its_overhead_and_speed(recipe: str) -> None:
    said = _plan(recipe, "--device=h100").stdout
    assert "not measured" in said
    assert "published speeds of h100 (https://www.nvidia.com" in said
    (one,) = _json(recipe, "--device=h100")
    assert one["needs"] == int(one["peak"] * 1.1 + 1.5 * 2**30)


def test_explain_lists_the_largest_tensors(recipe: str) -> None:
    said = _plan(recipe, "--explain").stdout
    assert "the largest tensors at the peak:\n" in said
    assert "256×256 float32" in said


@pytest.mark.parametrize("budget", [1_800_000, 2_000_000])
def test_auto_finds_the_largest_micro_batch_that_fits(recipe: str, budget: int) -> None:
    found = _json(recipe, "--auto", "--strategies=single", f"--memory={budget}B")
    (plain,) = found["choices"]  # one choice: an MLP has no blocks to recompute
    size = plain["micro_batch"]
    assert 1 < size < 256
    assert plain["forecast"]["peak"] <= budget
    (more,) = _json(recipe, "--strategies=single", f"train.micro_batch={2 * size}")
    assert more["peak"] > budget


def test_auto_writes_the_best_choice_into_the_recipe_and_keeps_the_rest(recipe: str) -> None:
    done = _plan(recipe, "--auto", "--strategies=single", "--memory=2MB", "--write")
    assert done.exit_code == 0, done.output
    text = Path(recipe).read_text(encoding="utf-8")
    assert "lr = 1e-3  # found by a sweep" in text
    written = load_recipe(recipe).recipe
    assert written.strategy.use == "single"
    assert written.train.micro_batch
    assert _plan(recipe, "--memory=2MB").exit_code == 0


@pytest.mark.full
def test_auto_tries_every_kind_of_activation_checkpointing_on_a_model_with_blocks(recipe: str) -> None:
    model = '[model]\nuse = "gpt"\nvocab_size = 256\nblock_size = 64\nlayers = 4\nheads = 4\nwidth = 64\n'
    data = '[data.train]\nuse = "text"\nsplit = "train"\nblock_size = 64\n[task]\nuse = "language_modeling"\n'
    head, _, tail = RECIPE.partition("[optimizer]")
    Path(recipe).write_text(head.partition("[model]")[0] + model + data + "[optimizer]" + tail, encoding="utf-8")
    answer = _json(recipe, "--auto", "--strategies=single", "--memory=60MB")
    found = answer["choices"]
    assert [one["activation_checkpointing"] for one in found] == [False, "selective", True]
    sizes = [one["micro_batch"] for one in found]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    for one in found:
        loaded = load_recipe(recipe, sets=[f"{key}={value}" for key, value in one["sets"].items()]).recipe
        assert loaded.train.activation_checkpointing == one["activation_checkpointing"]
    done = _plan(recipe, "--auto", "--strategies=single", "--memory=60MB", "--write")
    assert done.exit_code == 0, done.output
    written = load_recipe(recipe).recipe.train
    assert written.activation_checkpointing == answer["best"]["activation_checkpointing"]


def test_writing_another_strategy_removes_the_options_of_the_old_one(recipe: str) -> None:
    with_options = '\n[strategy]\nuse = "ddp"\nbucket_cap_mb = 10\n'
    Path(recipe).write_text(RECIPE + with_options, encoding="utf-8")
    assert _plan(recipe, "--auto", "--strategies=single", "--memory=2MB", "--write").exit_code == 0
    assert load_recipe(recipe).recipe.strategy.options == {}


def test_a_recipe_error_is_shown_with_its_line(recipe: str) -> None:
    Path(recipe).write_text(RECIPE.replace("global_batch = 256", "global_batch = 255"), encoding="utf-8")
    done = _plan(recipe, "--ranks=2")
    assert done.exit_code == 2
    assert "recipe.toml:23" in done.output


def test_auto_reports_that_nothing_fits(recipe: str) -> None:
    done = _plan(recipe, "--auto", "--strategies=single", "--memory=1MB")
    assert done.exit_code == 1
    assert "none fits" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--write"], "--write needs --auto"),
        (["--auto"], "--auto needs a --memory, or a --device other than cpu"),
        (["--device=abacus"], "abacus"),
        (["--memory=much"], "not a size"),
    ],
)
def test_a_usage_error_exits_with_2(recipe: str, arguments: list[str], said: str) -> None:
    done = _plan(recipe, *arguments)
    assert done.exit_code == 2
    assert said in done.output


def test_write_refuses_a_bundled_recipe(recipe: str) -> None:
    done = _plan("digits", "--auto", "--strategies=single", "--memory=1GB", "--write")
    assert "ddpforge recipes cp digits" in done.output
    assert done.exit_code == 2
