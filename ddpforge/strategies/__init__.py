"""The built-in strategies, and what others are made of: replicas whose gradients torch's autograd leaves in `.grad`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpforge.strategies.torch_replica import TorchReplica as TorchReplica
    from ddpforge.strategies.torch_replica import WholeReplica as WholeReplica

__all__ = ["TorchReplica", "WholeReplica"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from ddpforge.strategies import torch_replica

        return getattr(torch_replica, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
