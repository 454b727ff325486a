"""Conformance kit: checks that a component keeps the contract of its kind. Plugin authors and ddpforge itself use it.

`ddpforge plugins test`, `pytest --pyargs ddpforge.testing --ddpforge-dist NAME` and `conform` run the same checks. They
read options and other settings from `ddpforge_testing.toml`; see `ddpforge.testing.settings`.

The names below are loaded on first use (PEP 562), because the process that forks ranks must not import torch yet.
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
