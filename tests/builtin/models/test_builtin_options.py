"""Options of built-in components are described, and invalid values are refused before anything is built."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from ddpforge.components.options_table import options_table
from ddpforge.components.registry import Registry

REGISTRY = Registry.installed()
OURS = [
    (entry.kind, entry.name)
    for kind in ("model", "data", "task", "metric", "optimizer", "schedule")
    for entry in REGISTRY.entries(kind)
    if entry.distribution == "ddpforge"
]


def options(kind: str, name: str) -> type[BaseModel]:
    return REGISTRY.options_model(kind, name, Path())


@pytest.mark.parametrize(("kind", "name"), OURS)
def test_every_option_is_described(kind: str, name: str) -> None:
    assert [row.name for row in options_table(options(kind, name)) if not row.description] == []


@pytest.mark.parametrize(
    ("kind", "name", "table"),
    [
        ("model", "mlp", '{"inputs": 0, "outputs": 1}'),
        ("model", "mlp", '{"inputs": 1, "outputs": 1, "hidden": [-1]}'),
        ("model", "mlp", '{"inputs": 1, "outputs": 1, "activation": "selu"}'),
        ("model", "mlp", '{"inputs": 1, "outputs": 1, "dropout": 1.0}'),
        ("model", "cnn", '{"classes": true}'),
        ("model", "cnn", '{"width": 1000000}'),
        ("model", "gpt", '{"layers": 0}'),
        ("model", "gpt", '{"heads": 2.0}'),
        ("model", "gpt", '{"dropout": -0.1}'),
        ("model", "gpt", '{"depth": 3}'),
        ("model", "torchvision", '{"arch": "resnet18", "classes": -1}'),
        ("data", "digits", "{}"),
        ("data", "digits", '{"split": "eval"}'),
        ("data", "text", '{"split": "train", "block_size": 0}'),
        ("data", "text", '{"split": "train", "eval_fraction": 1.0}'),
        ("data", "text", '{"split": "train", "path": 3}'),
        ("data", "torchvision", '{"name": "ImageNet", "split": "train"}'),
        ("data", "torchvision", '{"name": "MNIST", "split": "train", "mean": [0.5], "std": [0.0]}'),
        ("task", "classification", '{"label_smoothing": 1.0}'),
        ("task", "classification", '{"metrics": ["acuracy"]}'),
        ("task", "language_modeling", '{"ignore_index": "pad"}'),
        ("task", "regression", '{"loss": "rmse"}'),
        ("task", "regression", '{"loss": "huber", "delta": 0.0}'),
        ("metric", "topk", '{"k": 0}'),
        ("optimizer", "adamw", "{}"),
        ("optimizer", "adamw", '{"lr": 0.0}'),
        ("optimizer", "adamw", '{"lr": NaN}'),
        ("optimizer", "adamw", '{"lr": 1e30}'),
        ("optimizer", "adamw", '{"lr": 0.1, "betas": [0.9]}'),
        ("optimizer", "adamw", '{"lr": 0.1, "betas": [0.9, 1.0]}'),
        ("optimizer", "adamw", '{"lr": 0.1, "weight_decay": -0.1}'),
        ("optimizer", "adamw", '{"lr": 0.1, "fused": "yes"}'),
        ("optimizer", "sgd", '{"lr": 0.1, "momentum": 1.0}'),
        ("schedule", "cosine", '{"final": 1.5}'),
        ("schedule", "cosine", '{"warmup": 100}'),
        ("schedule", "cosine", '{"warmup": "-1st"}'),
        ("schedule", "step", '{"milestones": []}'),
        ("schedule", "step", '{"milestones": ["1ep"], "gamma": 0.0}'),
        ("schedule", "wsd", "{}"),
        ("schedule", "wsd", '{"decay": "1ep", "shape": "sqrt"}'),
    ],
)
def test_invalid_options_are_refused(kind: str, name: str, table: str) -> None:
    with pytest.raises(ValidationError):
        options(kind, name).model_validate_json(table)


@pytest.mark.parametrize(
    ("kind", "name", "table", "expected"),
    [
        ("model", "mlp", '{"inputs": 1, "outputs": 1, "hidden": [8, 8]}', {"hidden": [8, 8]}),
        ("data", "text", '{"split": "eval", "path": "books"}', {"path": Path("books")}),
        ("optimizer", "adamw", '{"lr": 1, "betas": [0.9, 0.95]}', {"lr": 1.0, "betas": (0.9, 0.95), "fused": "auto"}),
        ("optimizer", "sgd", '{"lr": 0.1, "fused": false}', {"fused": False}),
    ],
)
def test_recipe_values_are_converted_to_the_types_of_options(
    kind: str, name: str, table: str, expected: dict[str, Any]
) -> None:
    validated = dict(options(kind, name).model_validate_json(table))
    assert validated | expected == validated
