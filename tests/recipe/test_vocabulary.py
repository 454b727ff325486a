"""Hints for keys of other tools: they give ddpforge's name of the key."""

from collections.abc import Callable

import pytest

from ddpforge.errors import RecipeError
from ddpforge.recipe import LoadedRecipe
from ddpforge.recipe.layers import SLOTS
from ddpforge.recipe.vocabulary import Vocabulary, foreign_keys, foreign_sections

Load = Callable[..., LoadedRecipe]


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("train.epochs", 'length = "1ep"'),
        ("train.steps", 'length = "1st"'),
        ("train.max_steps", 'length = "1st"'),
        ("train.batch_size", "`global_batch` per step, over all ranks, and `micro_batch` per forward pass"),
        ("data.batch_size", "`global_batch` per step"),
        ("optimizer.learning_rate", "lr = 1"),
        ("train.lr", "`lr` is a key of [optimizer]"),
        ("optimizer.clip_norm", "`clip_norm` is a key of [train]"),
        ("train.gradient_accumulation_steps", "global_batch / (micro_batch × ranks)"),
        ("train.accumulate", "global_batch / (micro_batch × ranks)"),
        ("train.num_processes", "the launcher sets"),
        ("strategy.world_size", "the launcher sets"),
        ("train.mixed_precision", 'precision = "bf16"'),
        ("train.max_grad_norm", "clip_norm = 1`"),
        ("train.gradient_clipping", "clip_norm = 1`"),
        ("train.gradient_checkpointing", "activation_checkpointing = true"),
        ("train.activation_offloading", "activation_offload = true"),
        ("strategy.zero_stage", 'ddpforge writes `stage = 1` in [strategy], which needs `use = "deepspeed"` there'),
        ("strategy.num_replicate", 'replicas = 1` in [strategy], which needs `use = "fsdp"` there'),
        ("train.save_every", 'every = "1ep"` in [checkpoint]'),
        ("model.type", "keys of [model]: use"),
        ("train.evaluation_strategy", 'eval_every = "1'),
        ("train.accelerator", "the device is `device` in [train]"),
        ("train.limit_train_batches", "--dry-run 5"),
        ("train.sequence_len", "e.g. `block_size`"),
        ("train.max_epochs", 'length = "1ep"'),
    ],
)
def test_the_hint_for_a_foreign_key_has_ddpforges_name(load: Load, key: str, said: str) -> None:
    sets = ["strategy.use=ddp"] if key.startswith("strategy") else []
    with pytest.raises(RecipeError) as caught:
        load(None, f"{key}=1", *sets)
    (problem,) = caught.value.problems
    assert problem.key == key
    assert any(said in hint for hint in problem.hints)


def test_a_foreign_key_gets_no_second_hint_with_a_similar_name(load: Load) -> None:
    with pytest.raises(RecipeError) as caught:
        load(None, "train.max_epochs=3")
    assert caught.value.problems[0].hints == ('ddpforge writes `length = "3ep"` in [train]',)


@pytest.mark.parametrize(
    ("sets", "message", "hint"),
    [
        (["output_dir=~/runs"], "without `~` and variables; use `--out DIR`", ""),
        (["output_dir=$SCRATCH/runs"], "without `~` and variables; use `--out DIR`", ""),
        (
            ["data.train.path=${DATA}/x"],
            "`${DATA}` is not a reference",
            "for the environment variable, write ${env:DATA}",
        ),
        (["track=wandb"], "[track] must be a table", "[track.wandb]"),
        (["callbacks=[1]"], "[callbacks] must be a table", "[callbacks.ema]"),
        (["data.train=x.csv"], "[data.train] must be a table", 'use = "csv" and path = "x.csv"'),
        (["+train.seed=1"], "is not KEY=VALUE", "a key needs no + to be added: train.seed=1"),
        (
            ["callbacks.model_checkpoint.every=1"],
            "no callback named `model_checkpoint`",
            "checkpoints are [checkpoint]",
        ),
    ],
)
def test_values_in_a_wrong_form_have_a_hint_with_what_to_write(
    load: Load, sets: list[str], message: str, hint: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        load(None, *sets)
    (problem,) = caught.value.problems
    assert message in problem.message
    assert hint in "; ".join(problem.hints)


@pytest.mark.parametrize(
    ("assigned", "said"),
    [
        ("train.num_train_epochs=3", 'length = "3ep"'),
        ("train.max_steps=500", 'length = "500st"'),
        ("train.save_steps=500", 'every = "500st"'),
        ("train.eval_steps=50", 'eval_every = "50st"'),
        ("track.logging_steps=7", 'every = "7st"'),
        ("optimizer.learning_rate=2e-5", "lr = 2e-05"),
        ("train.fp16=true", 'precision = "fp16"'),
        ("train.bf16=true", 'precision = "bf16"'),
        ("train.fp16=false", 'precision = "fp32"'),
        ('train.mixed_precision="16-mixed"', 'precision = "fp16"'),
        ("train.max_grad_norm=0.5", "clip_norm = 0.5"),
        ("train.gradient_checkpointing=false", "activation_checkpointing = false"),
        ("checkpoint.save_total_limit=7", "keep = { last = 7 }"),
        ("train.random_seed=42", "seed = 42"),
        ("train.num_workers=8", "workers = 8"),
        ("schedule.warmup_steps=20", 'warmup = "20st"'),
        ("schedule.warmup_ratio=0.1", '10 % of this run: warmup = "0.5ep"'),
        ("schedule.warmup_ratio=0.1", 'ddpforge writes `warmup = "10%"`'),
        ("train.ema=true", "add [callbacks.ema]"),
        ("ema.decay=0.9", "add [callbacks.ema]"),
        ("peft.r=8", "adapters are a model around another"),
        ("push_to_hub=true", "ddpforge export RUN --push-to-hub"),
        ("train.use_fp8=true", 'fp8 = "tensorwise"'),
        ("train.fp8=true", "did you mean `tensorwise`?"),
        ("train.cudnn_deterministic=true", "deterministic = true"),
        ("train.matmul_precision=high", "tf32 = true"),
        ("train.resume_from_checkpoint=x", "the same command resumes"),
        ("peft=1", "adapters are a model around another"),
        ("report_to=wandb", "each tracker is a table"),
    ],
)
def test_the_hint_has_the_users_value(load: Load, assigned: str, said: str) -> None:
    sets = ["schedule.use=constant"] if assigned.startswith("schedule") else []
    with pytest.raises(RecipeError) as caught:
        load(None, assigned, *sets)
    assert any(said in hint for problem in caught.value.problems for hint in problem.hints)


@pytest.mark.parametrize(
    ("assigned", "said", "unsaid"),
    [
        ("schedule.warmup=0.1", '"0.1ep" (epochs)', "0.1st"),
        ("schedule.warmup=0.1", '10 % of this run: warmup = "0.5ep"', "0.1h"),
        ("schedule.warmup=7", '"7st" (steps)', "7h"),
        ("train.length=7", '"7h" (hours)', "never"),
        ("train.compile=true", "did you mean `default`?", "never"),
        ("train.compile=false", "did you mean `off`?", "never"),
        ("train.precision=bfloat16", "did you mean `bf16`?", "fp8"),
        ("train.eval_every=never", "remove [data.eval]", "needs a unit"),
        ("checkpoint.every=false", "keep = { last = 1 }", "needs a unit"),
        ("checkpoint.every=0", "keep = { last = 1 }", '"0ep"'),
        ('model={class_path="my.Net"}', 'use = "my:Net"', '"my.Net"'),
        ("optimizer.use=torch.optim.RMSprop", "did you mean `torch.optim:RMSprop`?", "never"),
        ("optimizer.use=RMSprop", "write the class of torch: `torch.optim:RMSprop`", "never"),
        ("strategy.use=zero3", 'use = "deepspeed" and stage = 3', "never"),
        ("model.use=resnet18", 'use = "torchvision" and arch = "resnet18"', "never"),
        ("data.train.use=hf", 'use = "hugging_face"', "never"),
        ("train.device=gpu", "did you mean `cuda`?", "`cpu`"),
        ("train.device=cuda:0", "did you mean `cuda`?", "`cpu`"),
        ("train.length=1000 steps", 'write length = "1000st"', "needs a unit"),
        ("train.hang_timeout=10 min", 'write hang_timeout = "10m"', "needs a unit"),
        ("train.device=tpu", "one of: auto, cpu, cuda", "did you mean"),
        ("train.device=rocm", "did you mean `cuda`?", "`cpu`"),
        ("train.device=mps", "dropped in 0.6.0", "did you mean"),
        ("train.precision=fp8", 'set train.fp8 = "tensorwise"', "did you mean"),
        ("train.length=1h30m", 'write length = "90m"', "never"),
        ("train.length=2 hours", 'write length = "2h"', "never"),
        ("model.use=MLP", "did you mean `mlp`?", "never"),
        ('task.metrics=["acc"]', "did you mean `accuracy`?", "never"),
        ("optimizer.use=adamw_torch", "did you mean `adamw`?", "never"),
        ("track.wb.x=1", "did you mean `wandb`?", "never"),
        ("track.tensorboard.x=1", "no tracker for tensorboard is installed", "never"),
    ],
)
def test_the_hint_is_a_valid_setting(load: Load, assigned: str, said: str, unsaid: str) -> None:
    sets = ["schedule.use=cosine"] if assigned.startswith("schedule") else []
    text = 'model = { class_path = "my.Net" }\n' if "class_path" in assigned else None
    with pytest.raises(RecipeError) as caught:
        load(text) if text else load(None, assigned, *sets)
    hints = [hint for problem in caught.value.problems for hint in problem.hints]
    assert any(said in hint for hint in hints), hints
    assert not any(unsaid in hint for hint in hints), hints


def test_the_hint_names_an_option_that_was_removed_with_its_component(load: Load, valid: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load('extends = "base.toml"\n[optimizer]\nuse = "sgd"\n', base=valid)
    (problem,) = caught.value.problems
    said = '`optimizer.lr = 0.001` is an option of "adamw", and was removed with it; set it again here'
    assert problem.hints[0] == said


def test_a_foreign_name_for_a_required_key_is_one_problem(load: Load, valid: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(valid.replace("lr = 1e-3", "learning_rate = 1e-3").replace("[train]", "[trainer]"))
    assert [problem.message for problem in caught.value.problems] == [
        'unknown key `learning_rate` in [optimizer], which uses "adamw"',
        "unknown section [trainer]",
    ]


def test_every_hint_names_an_existing_key_or_section() -> None:
    vocabulary = Vocabulary()
    for alias, foreign in foreign_keys().items():
        table = foreign.path[:-1]
        assert not foreign.path or table in SLOTS or foreign.path[-1] in vocabulary.keys(table), alias
        assert alias not in vocabulary.keys(table)
    for section in foreign_sections().values():
        path = tuple(section.split("."))
        assert path in SLOTS or path in vocabulary.models or path[0] in ("track", "callbacks"), section
