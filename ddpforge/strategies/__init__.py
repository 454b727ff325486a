"""Built-in strategies, and the building blocks for other strategies.

`TorchReplica` is a replica with gradients in `.grad`; `WholeReplica` also holds the whole model. `named_state` captures
and restores model and optimizer by parameter name. `Alone` is the only rank of a single process. `refuse_unlike` checks
that an optimizer updates parts of a weight as it updates the whole weight.
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
