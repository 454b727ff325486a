"""ddpforge: one TOML recipe becomes a correct, fast, distributed PyTorch training run.

Importing this package costs nothing; the public names below are loaded when they are first used (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpforge.api import TrainedRun as TrainedRun
    from ddpforge.api import evaluate as evaluate
    from ddpforge.api import launch as launch
    from ddpforge.api import load as load
    from ddpforge.api import predict as predict
    from ddpforge.recipe import Recipe as Recipe
    from ddpforge.recipe import load_recipe as load_recipe
    from ddpforge.runner import Evaluation as Evaluation
    from ddpforge.runner import Outcome as Outcome
    from ddpforge.runner import Prediction as Prediction
    from ddpforge.runner import run as run

__version__ = "0.4.0"
_LAZY = {
    **dict.fromkeys(("Recipe", "load_recipe"), "ddpforge.recipe"),
    **dict.fromkeys(("Evaluation", "Outcome", "Prediction", "run"), "ddpforge.runner"),
    **dict.fromkeys(("TrainedRun", "evaluate", "launch", "load", "predict"), "ddpforge.api"),
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
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'ddpforge' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
