"""The conformance kit: checks that a component keeps the contract of its kind, for authors and for ddpforge itself.

`ddpforge plugins test`, `pytest --pyargs ddpforge.testing --ddpforge-dist NAME` and `conform` run the same checks. What
a component needs in order to be tried out is read from `ddpforge_testing.toml`; see `ddpforge.testing.settings`.

The names below are loaded when they are first used (PEP 562): what forks ranks must not import torch in its own way.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpforge.testing.kit import Kit as Kit
    from ddpforge.testing.kit import conform as conform
    from ddpforge.testing.report import Breach as Breach
    from ddpforge.testing.report import Result as Result

_LAZY = {
    **dict.fromkeys(("Kit", "conform"), "ddpforge.testing.kit"),
    **dict.fromkeys(("Breach", "Result"), "ddpforge.testing.report"),
}
__all__ = ["Breach", "Kit", "Result", "conform"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'ddpforge.testing' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
