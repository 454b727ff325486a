"""The built-in strategies, and `WholeReplica`: what most of a strategy like DDP is made of."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpforge.strategies.torch_replica import WholeReplica

__all__ = ["WholeReplica"]


def __getattr__(name: str) -> Any:
    if name == "WholeReplica":
        from ddpforge.strategies.torch_replica import WholeReplica

        return WholeReplica
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
