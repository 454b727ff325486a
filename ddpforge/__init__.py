"""ddpforge: one TOML recipe becomes a correct, fast, distributed PyTorch training run.

Importing this package costs nothing; the public names below are loaded when they are first used (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpforge.recipe import Recipe as Recipe
    from ddpforge.recipe import load_recipe as load_recipe
    from ddpforge.runner import run as run

__version__ = "0.3.0"
__all__ = ["Recipe", "__version__", "load_recipe", "run"]

_LAZY = {"Recipe": "ddpforge.recipe", "load_recipe": "ddpforge.recipe", "run": "ddpforge.runner"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'ddpforge' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
