"""Fixtures: a registry with a few components without torch, and a function that writes and loads small recipes."""

import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from pydantic import BaseModel

from ddpforge.components.installed import Entry
from ddpforge.components.registry import Registry
from ddpforge.recipe import LoadedRecipe, load_recipe

PARTS = {
    "model": {"cnn": "cnn", "mlp": "mlp"},
    "data": {"digits": "digits", "folder": "folder"},
    "task": {"classification": "classification"},
    "metric": {"accuracy": "Accuracy"},
    "optimizer": {"adamw": "adamw", "sgd": "sgd"},
    "schedule": {"constant": "constant", "cosine": "cosine"},
    "strategy": {"ddp": "DDP"},
    "tracker": {"wandb": "WandB"},
    "callback": {"ema": "EMA"},
}
VALID = """\
recipe = 2
name = "digits"

[model]
use = "cnn"
classes = 10

[data.train]
use = "digits"
split = "train"

[data.eval]
use = "digits"
split = "test"

[task]
use = "classification"

[optimizer]
use = "adamw"
lr = 1e-3

[train]
length = "5ep"
global_batch = 256
micro_batch = 32
"""


class CachingRegistry(Registry):
    """Registry that caches options models, because tests load thousands of recipes in one process."""

    @cache  # noqa: B019
    def options_model(self, kind: str, use: str, base: Path = Path()) -> type[BaseModel]:
        return super().options_model(kind, use, base)


@pytest.fixture(scope="session")
def registry() -> Iterator[Registry]:
    sys.path.insert(0, str(Path(__file__).parent))
    yield CachingRegistry(
        Entry(kind, name, "parts", "1.0", f"recipe_parts:{target}")
        for kind, row in PARTS.items()
        for name, target in row.items()
    )
    sys.path.remove(str(Path(__file__).parent))


@pytest.fixture
def valid() -> str:
    """Returns the text of a valid recipe."""
    return VALID


@pytest.fixture
def load(tmp_path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LoadedRecipe]:
    """Returns `load(text, *sets, **files)`: writes recipe.toml and NAME.toml for each keyword; loads the first.

    Without `text` it writes the valid recipe. The working directory is empty otherwise.
    """
    monkeypatch.chdir(tmp_path)

    def load(text: str | None = None, *sets: str, **others: str) -> LoadedRecipe:
        for name, other in {"recipe": VALID if text is None else text, **others}.items():
            Path(f"{name}.toml").write_text(other, encoding="utf-8")
        return load_recipe("recipe.toml", sets=sets, registry=registry)

    return load
