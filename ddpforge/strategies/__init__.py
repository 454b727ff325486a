"""Built-in strategies, and the building blocks for other strategies.

`TorchReplica` is a replica with gradients in `.grad`; `WholeReplica` also holds the whole model. `named_state` captures
and restores model and optimizer by parameter name. `SingleRank` is the only rank of a single process.
`check_same_update` checks that an optimizer updates parts of a weight as it updates the whole weight.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpforge.ranks.collectives import SingleRank as SingleRank
    from ddpforge.strategies import named_state as named_state
    from ddpforge.strategies.optimizer_probe import check_same_update as check_same_update
    from ddpforge.strategies.torch_replica import TorchReplica as TorchReplica
    from ddpforge.strategies.torch_replica import WholeReplica as WholeReplica

__all__ = ["SingleRank", "TorchReplica", "WholeReplica", "check_same_update", "named_state"]

_HOMES = {"SingleRank": "ddpforge.ranks.collectives", "check_same_update": "ddpforge.strategies.optimizer_probe"}


def __getattr__(name: str) -> Any:
    if name == "named_state":
        return import_module("ddpforge.strategies.named_state")
    if name in __all__:
        return getattr(import_module(_HOMES.get(name, "ddpforge.strategies.torch_replica")), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
