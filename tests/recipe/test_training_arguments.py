"""`ddpforge recipes from-hf`: TrainingArguments of transformers become a recipe."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ddpforge.cli import main
from ddpforge.errors import UsageError
from ddpforge.recipe import load_recipe
from ddpforge.recipe.schema import Recipe
from ddpforge.recipe.training_arguments import read_arguments, recipe_of

DEFAULTS: dict[str, Any] = {"per_device_train_batch_size": 8, "output_dir": "out/exp"}
COMPLETE = """[model]
use = "mlp"
inputs = 64
outputs = 10
[data.train]
use = "digits"
split = "train"
[data.eval]
use = "digits"
split = "test"
[task]
use = "classification"
"""


def loaded(tmp_path: Path, *, devices: int = 1, **arguments: Any) -> Recipe:
    """Returns the recipe for TrainingArguments with other values than the defaults, completed with digits."""
    text = recipe_of(DEFAULTS | arguments, devices=devices)
    text = re.sub(r"\[model\].*?(?=(label_smoothing.*?\n)?\n\[optimizer\])", COMPLETE, text, flags=re.DOTALL)
    (tmp_path / "r.toml").write_text(text)
    return load_recipe(tmp_path / "r.toml").recipe


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    recipe = loaded(tmp_path)
    assert (recipe.name, str(recipe.train.length), recipe.train.seed) == ("exp", "3ep", 42)
    assert (recipe.train.global_batch, recipe.train.micro_batch, recipe.train.clip_norm) == (8, 8, 1.0)
    wanted = {"lr": 5e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    assert wanted.items() <= dict(recipe.optimizer.options).items()
    assert (recipe.schedule.use, recipe.train.precision) == ("hf_linear", "fp32")
    assert (str(recipe.checkpoint.every), str(recipe.track.every)) == ("500st", "500st")


def test_batch_is_that_of_all_devices(tmp_path: Path) -> None:
    recipe = loaded(tmp_path, devices=4, gradient_accumulation_steps=3)
    assert (recipe.train.global_batch, recipe.train.micro_batch) == (96, 8)


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        ({"max_steps": 70}, "train.length", "70st"),
        ({"bf16": True}, "train.precision", "bf16"),
        ({"fp16": True}, "train.precision", "fp16"),
        ({"gradient_checkpointing": True}, "train.activation_checkpointing", "True"),
        ({"activation_checkpointing": True}, "train.activation_checkpointing", "True"),
        ({"activation_offloading": True}, "train.activation_offload", "True"),
        ({"torch_compile": True}, "train.compile", "default"),
        ({"max_grad_norm": 0.0}, "train.clip_norm", "None"),
        ({"eval_strategy": "steps", "eval_steps": 20}, "train.eval_every", "20st"),
        ({"eval_strategy": "epoch"}, "train.eval_every", "1ep"),
        ({"save_strategy": "epoch"}, "checkpoint.every", "1ep"),
        ({"logging_steps": 5}, "track.every", "5st"),
        ({"use_cpu": True}, "train.device", "cpu"),
        ({"lr_scheduler_type": "cosine", "warmup_steps": 3}, "schedule.use", "hf_cosine"),
        ({"lr_scheduler_type": "constant_with_warmup"}, "schedule.use", "constant"),
        ({"optim": "sgd"}, "optimizer.use", "sgd"),
        ({"optim": "rmsprop"}, "optimizer.use", "torch.optim:RMSprop"),
        ({"dataloader_drop_last": True}, "train.drop_last", "True"),
        ({"fsdp": "full_shard"}, "strategy.use", "fsdp"),
        ({"ddp_find_unused_parameters": True}, "strategy.use", "ddp"),
        ({"ddp_timeout": 60}, "train.collective_timeout", "60s"),
        (
            {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"},
            "checkpoint.keep.monitor",
            "eval/loss",
        ),
        ({"save_total_limit": 5}, "checkpoint.keep.last", "5"),
    ],
)
def test_arguments_have_their_keys(tmp_path: Path, arguments: dict[str, Any], key: str, value: str) -> None:
    found: Any = loaded(tmp_path, **arguments)
    for name in key.split("."):
        found = getattr(found, name)
    assert str(found) == value


@pytest.mark.parametrize(
    ("arguments", "warmup"),
    [({"warmup_steps": 30}, "30st"), ({"warmup_ratio": 0.03}, "3%"), ({"warmup_steps": 0.1}, "10%")],
)
def test_warmup_is_in_steps_or_a_share_of_the_run(tmp_path: Path, arguments: dict[str, Any], warmup: str) -> None:
    assert str(loaded(tmp_path, **arguments).schedule.options["warmup"]) == warmup


@pytest.mark.parametrize(("kind", "same"), [("linear", True), ("cosine", True), ("inverse_sqrt", False)])
def test_other_first_steps_of_a_warmup_are_noted(kind: str, same: bool) -> None:
    text = recipe_of(DEFAULTS | {"lr_scheduler_type": kind, "warmup_steps": 10}, devices=1)
    assert ("in transformers 0" in text) == (not same)


def test_weight_decay_spares_biases_and_norms_as_in_transformers(tmp_path: Path) -> None:
    recipe = loaded(tmp_path, weight_decay=0.1)
    assert recipe.optimizer.options["weight_decay"] == 0.1
    assert recipe.optimizer.no_decay == ("bias", "norm")


def test_label_smoothing_is_an_option_of_the_task(tmp_path: Path) -> None:
    assert "\nlabel_smoothing = 0.1\n" in recipe_of(DEFAULTS | {"label_smoothing_factor": 0.1}, devices=1)
    assert loaded(tmp_path, label_smoothing_factor=0.1).task.options["label_smoothing"] == 0.1


def test_arguments_without_a_key_are_comments() -> None:
    text = recipe_of(DEFAULTS | {"neftune_noise_alpha": 5.0, "deepspeed": "ds.json", "push_to_hub": False}, devices=1)
    assert "#   neftune_noise_alpha = 5.0: there is no NEFTune" in text
    assert '#   deepspeed = "ds.json": [strategy] use = "deepspeed"' in text
    assert "push_to_hub" not in text


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "is not JSON"),
        ("[]", "has no TrainingArguments"),
        ('{"lr": 1}', "lacks `per_device_train_batch_size`"),
    ],
)
def test_file_without_training_arguments_is_refused(tmp_path: Path, content: str, complaint: str) -> None:
    (tmp_path / "args.json").write_text(content)
    with pytest.raises(UsageError, match=complaint):
        read_arguments(tmp_path / "args.json")


def test_pickled_arguments_are_refused(tmp_path: Path) -> None:
    (tmp_path / "training_args.bin").write_bytes(b"")
    with pytest.raises(UsageError, match="is a pickle, which could run code"):
        read_arguments(tmp_path / "training_args.bin")


def test_command_prints_or_writes_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "args.json").write_text(json.dumps(DEFAULTS))
    asked = ["recipes", "from-hf", str(tmp_path / "args.json"), "--devices", "2"]
    printed = CliRunner().invoke(main, asked)
    assert (printed.exit_code, printed.output) == (0, recipe_of(DEFAULTS, devices=2))
    out = ["-o", str(tmp_path / "r.toml")]
    assert CliRunner().invoke(main, [*asked, *out]).exit_code == 0
    assert (tmp_path / "r.toml").read_text() == printed.output
    again = CliRunner().invoke(main, [*asked, *out])
    assert again.exit_code == 2
    assert "exists already" in again.output


EVIL = [
    'x\n[callbacks.log]\nuse = "subprocess:Popen"\n#',
    "1, best = 9",
    '" }\n[callbacks]\n',
    "\r[callbacks]",
    "x\u2028[callbacks]",
    "\x00",
    ["a\n[callbacks]"],
    {"a\n[callbacks]": 1},
    float("inf"),
    True,
    '"""',
    "\\",
]


@pytest.mark.parametrize("value", EVIL, ids=repr)
def test_no_value_of_the_arguments_can_add_a_table_or_a_key(value: object) -> None:
    """Regression: the name of a scheduler with a line break added a callback, whose code a check ran."""
    plain = {"per_device_train_batch_size": 8, "torch_compile": True, "load_best_model_at_end": True}
    names = (
        *(
            "per_device_train_batch_size",
            "learning_rate",
            "num_train_epochs",
            "output_dir",
            "lr_scheduler_type",
            "optim",
        ),
        *("warmup_steps", "warmup_ratio", "max_steps", "label_smoothing_factor", "adam_beta1", "adam_epsilon", "seed"),
        *("weight_decay", "max_grad_norm", "torch_compile_mode", "eval_steps", "save_steps", "save_total_limit"),
        *("metric_for_best_model", "greater_is_better", "report_to", "project", "run_name", "ddp_timeout", "fsdp"),
        *("per_device_eval_batch_size", "neftune_noise_alpha", "lr_scheduler_kwargs", "logging_steps", "bf16"),
        *("eval_strategy", "save_strategy", "logging_strategy", "gradient_accumulation_steps"),
    )
    written = 0
    for name in names:
        try:
            text = recipe_of({**plain, "eval_strategy": "steps", name: value}, devices=1)
        except UsageError:  # refused by name
            continue
        found = tomllib.loads(text)
        written += 1
        tables = {"recipe", "name", "model", "data", "task", "optimizer", "schedule", "train", "strategy", "checkpoint"}
        assert found.keys() <= tables | {"track"}, name
        assert found["checkpoint"].get("keep", {}).keys() <= {"last", "best", "monitor", "mode"}, name
    assert written >= 10
