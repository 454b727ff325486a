"""Datasets start with the same random numbers each: both parts of a random split fit together."""

from pathlib import Path
from typing import Any

import pytest
from support.stages import staged

import ddpforge

CODE = """
import random
import numpy as np
import torch
from torch.utils.data import TensorDataset, random_split

def split(part: str, by: str, extra: int = 0):
    torch.rand(extra), np.random.rand(extra), [random.random() for _ in range(extra)]
    data = TensorDataset(torch.arange(31.0)[:, None], torch.arange(31) % 2)
    if by == "torch":
        parts = random_split(data, [22, 9])
    else:
        order = list(range(31))
        random.shuffle(order) if by == "python" else np.random.shuffle(order)
        parts = [torch.utils.data.Subset(data, order[:22]), torch.utils.data.Subset(data, order[22:])]
    return parts[part == "val"]
"""
RECIPE: dict[str, Any] = {
    "recipe": 2,
    "name": "split",
    "model": {"use": "mlp", "inputs": 1, "outputs": 2, "hidden": [4]},
    "task": {"use": "classification"},
    "optimizer": {"use": "sgd", "lr": 1e-3},
    "train": {"length": "1st", "global_batch": 6},
    "checkpoint": {"every": "1st"},
}


def numbers(data: Any) -> set[int]:
    return {int(data[i][0]) for i in range(len(data))}


@pytest.mark.parametrize("by", ["torch", "numpy", "python"])
def test_no_sample_of_a_random_split_without_a_seed_is_trained_and_evaluated_on(by: str) -> None:
    Path("mine.py").write_text(CODE)
    parts = {
        key: {"use": "./mine.py:split", "by": by, "part": part} for key, part in (("train", "train"), ("eval", "val"))
    }
    recipe = {**RECIPE, "data": parts}
    built = staged(recipe).stage.data
    assert numbers(built["train"]) | numbers(built["eval"]) == set(range(31))

    ddpforge.train(recipe, fresh=True)
    loaded = ddpforge.load("runs/split")
    assert numbers(loaded.data("eval")) == numbers(built["eval"])
    assert numbers(loaded.data("train")) == numbers(built["train"])


def test_random_numbers_of_a_dataset_change_neither_the_weights_nor_another_dataset() -> None:
    Path("mine.py").write_text(CODE)

    def built(extra: int) -> tuple[set[int], list[float]]:
        data = {"use": "./mine.py:split", "by": "torch", "part": "train"}
        stage = staged({**RECIPE, "data": {"train": data | {"extra": extra}, "eval": data}}).stage
        return numbers(stage.data["eval"]), [p.sum().item() for p in stage.model.parameters()]

    assert built(0) == built(5)


def test_another_seed_of_the_recipe_is_another_split() -> None:
    Path("mine.py").write_text(CODE)
    data = {"train": {"use": "./mine.py:split", "by": "torch", "part": "train"}}
    splits = {
        tuple(numbers(staged({**RECIPE, "data": data}, f"train.seed={seed}").stage.data["train"])) for seed in range(4)
    }
    assert len(splits) == 4
