"""ddpforge runs a correct, fast, distributed PyTorch training from one TOML recipe.

The import of this package is cheap: the public names below are loaded on first use (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpforge.app.api import TrainedRun as TrainedRun
    from ddpforge.app.api import evaluate as evaluate
    from ddpforge.app.api import launch as launch
    from ddpforge.app.api import load as load
    from ddpforge.app.api import predict as predict
    from ddpforge.app.evaluate import Evaluation as Evaluation
    from ddpforge.app.evaluate import Prediction as Prediction
    from ddpforge.app.objects import run as run
    from ddpforge.app.objects import train as train
    from ddpforge.app.run import Outcome as Outcome
    from ddpforge.recipe import Recipe as Recipe
    from ddpforge.recipe import load_recipe as load_recipe

__version__ = "0.5.0"
_LAZY = {
    **dict.fromkeys(("Recipe", "load_recipe"), "ddpforge.recipe"),
    **dict.fromkeys(("Evaluation", "Prediction"), "ddpforge.app.evaluate"),
    "Outcome": "ddpforge.app.run",
    **dict.fromkeys(("run", "train"), "ddpforge.app.objects"),
    **dict.fromkeys(("TrainedRun", "evaluate", "launch", "load", "predict"), "ddpforge.app.api"),
}
__all__ = [
    "Evaluation",
    "Outcome",
    "Prediction",
    "Recipe",
    "TrainedRun",
    "__version__",
    "evaluate",
    "launch",
    "load",
    "load_recipe",
    "predict",
    "run",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise import_module("ddpforge.components.attributes").missing_name(__name__, name)


def __dir__() -> list[str]:
    return sorted(__all__)
