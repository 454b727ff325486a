"""The built-in strategies, and what others are made of.

`TorchReplica` is a replica whose gradients torch's autograd leaves in `.grad`, `WholeReplica` one that holds the whole
model. `named_state` captures and restores model and optimizer by parameter name, `Alone` are the ranks of a process by
itself, and `refuse_unlike` tries an optimizer on parts of weights.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpforge.ranks.collectives import Alone as Alone
    from ddpforge.strategies import named_state as named_state
    from ddpforge.strategies.optimizer_trial import refuse_unlike as refuse_unlike
    from ddpforge.strategies.torch_replica import TorchReplica as TorchReplica
    from ddpforge.strategies.torch_replica import WholeReplica as WholeReplica

__all__ = ["Alone", "TorchReplica", "WholeReplica", "named_state", "refuse_unlike"]

_HOMES = {"Alone": "ddpforge.ranks.collectives", "refuse_unlike": "ddpforge.strategies.optimizer_trial"}


def __getattr__(name: str) -> Any:
    if name == "named_state":
        return import_module("ddpforge.strategies.named_state")
    if name in __all__:
        return getattr(import_module(_HOMES.get(name, "ddpforge.strategies.torch_replica")), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
