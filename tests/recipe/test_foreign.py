"""Keys that people bring along from other tools are met with what ddpforge calls them."""

from collections.abc import Callable

import pytest

from ddpforge.errors import RecipeError
from ddpforge.recipe import LoadedRecipe
from ddpforge.recipe.foreign import FOREIGN_KEYS, FOREIGN_SECTIONS
from ddpforge.recipe.layers import SLOTS
from ddpforge.recipe.vocabulary import Vocabulary

Load = Callable[..., LoadedRecipe]


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("train.epochs", 'length = "5ep"'),
        ("train.steps", 'length = "1000st"'),
        ("train.max_steps", 'length = "1000st"'),
        ("train.batch_size", "`global_batch` per step, over all ranks, and `micro_batch` per forward pass"),
        ("data.batch_size", "`global_batch` per step"),
        ("optimizer.learning_rate", "lr = 1e-3"),
        ("train.lr", "`lr` is a key of [optimizer]"),
        ("optimizer.clip_norm", "`clip_norm` is a key of [train]"),
        ("train.gradient_accumulation_steps", "global_batch / (micro_batch × ranks)"),
        ("train.accumulate", "global_batch / (micro_batch × ranks)"),
        ("train.num_processes", "the launcher decides"),
        ("strategy.world_size", "the launcher decides"),
        ("train.mixed_precision", 'precision = "bf16"'),
        ("train.max_grad_norm", "clip_norm = 1.0"),
        ("train.gradient_clipping", "clip_norm = 1.0"),
        ("train.gradient_checkpointing", "activation_checkpointing = true"),
        ("strategy.zero_stage", "stage = 3"),
        ("train.save_every", 'every = "1ep"` in [checkpoint]'),
        ("model.type", "keys of [model]: use"),
    ],
)
def test_the_hint_says_what_it_is_called_here(load: Load, key: str, said: str) -> None:
    sets = ["strategy.use=ddp"] if key.startswith("strategy") else []
    with pytest.raises(RecipeError) as caught:
        load(None, f"{key}=1", *sets)
    (problem,) = caught.value.problems
    assert problem.key == key
    assert any(said in hint for hint in problem.hints)


def test_a_foreign_name_for_a_required_key_is_one_problem(load: Load, valid: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(valid.replace("lr = 1e-3", "learning_rate = 1e-3").replace("[train]", "[trainer]"))
    assert [problem.message for problem in caught.value.problems] == [
        'unknown key `learning_rate` in [optimizer], which uses "adamw"',
        "unknown section [trainer]",
    ]


def test_every_hint_points_at_something_that_exists() -> None:
    vocabulary = Vocabulary()
    for alias, foreign in FOREIGN_KEYS.items():
        table = foreign.path[:-1]
        assert not foreign.path or table in SLOTS or foreign.path[-1] in vocabulary.keys(table), alias
        assert alias not in vocabulary.keys(table)
    for section in FOREIGN_SECTIONS.values():
        path = tuple(section.split("."))
        assert path in SLOTS or path in vocabulary.models or path[0] in ("track", "callbacks"), section
