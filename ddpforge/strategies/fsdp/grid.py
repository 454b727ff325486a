"""The places of ranks in a grid: which hold other weights, see other data, or share one computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpforge.interfaces import Ranks, Refusal, World

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from ddpforge.ranks.collectives import Connected

__all__ = ["Grid", "Places"]


@dataclass(frozen=True)
class Places:
    """The groups of a grid that this rank is in."""

    mesh: DeviceMesh  # for FSDP: over its last dimension it shards, over one before it gradients are averaged
    data: Ranks  # that see different data
    context: Ranks  # that compute parts of the same sequences
    tensor: Connected  # that compute shares of the same layers
    tensor_mesh: DeviceMesh | None  # the same, where they are several
    groups: tuple[dist.ProcessGroup, ...]  # of the mesh


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Ranks = replicas × shards × context × tensor, the last being neighbours; as many shards as ranks are left.

    Ranks of one `tensor` group compute shares of the same layers, those of one `context` group parts of the same
    sequences: together they see the same samples. Weights are sharded over shards × context.
    """

    replicas: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def together(self) -> int:
        """The number of neighbouring ranks that see the same samples."""
        return self.context * self.tensor

    def data_ranks(self, ranks: int) -> int:
        """Counts the ranks that see different data."""
        return max(1, ranks // self.together)

    def fitting(self, ranks: int) -> Grid:
        """The same without the sizes that do not divide the ranks, or the groups that are made of them."""
        kept = {}
        for name in ("tensor", "context", "replicas"):
            size = getattr(self, name)
            kept[name] = 1 if ranks % size else size
            ranks //= kept[name]
        return Grid(**kept)

    def refusals(self, ranks: int) -> Iterator[Refusal]:
        """Names the first size that does not divide the ranks, or the groups that the sizes before it make of them."""
        left = ranks
        for name, size in (("tensor", self.tensor), ("context", self.context), ("replicas", self.replicas)):
            if left % size:
                fits = [str(n) for n in range(1, left + 1) if left % n == 0]
                yield Refusal(
                    f"strategy.{name}",
                    f"strategy.{name} = {size} does not divide the {_groups(left, ranks // left)}",
                    (f"use one of {', '.join(fits)}" if left > 1 else "leave it out",),
                )
                return
            left //= size

    def places(self, world: World) -> Places:
        """Forms the groups; called on every rank, in the same order."""
        from ddpforge.ranks.collectives import Alone, Group

        ranks, together = world.all.size, self.together
        mesh = self._mesh(world)
        fsdp = [name for name in ("replicate", "shard") if name in (mesh.mesh_dim_names or ())]
        groups = mesh.get_all_groups()

        def alike(key: Callable[[int], tuple[int, int]], size: int) -> Ranks:
            """The `size` ranks that have the same `key` as this one, in a group of their own."""
            if size == 1:
                return Alone(world.device)
            found: dict[tuple[int, int], list[int]] = {}
            for rank in range(ranks):
                found.setdefault(key(rank), []).append(rank)
            return world.all.split(list(found.values()))

        return Places(
            mesh=mesh[tuple(fsdp)],
            data=world.data if together == 1 else alike(lambda rank: (0, rank % together), ranks // together),
            context=alike(lambda rank: (rank // together, rank % self.tensor), self.context),
            tensor=Alone(world.device) if self.tensor == 1 else Group(mesh.get_group("tensor"), world.device),
            tensor_mesh=None if self.tensor == 1 else mesh["tensor"],
            groups=tuple(groups),
        )

    def _mesh(self, world: World) -> DeviceMesh:
        """All ranks; of dimensions that are 1, only `shard` is needed."""
        from torch.distributed.device_mesh import init_device_mesh

        shards = world.all.size // self.replicas // self.tensor
        sizes = {"replicate": self.replicas, "shard": shards, "tensor": self.tensor}
        kept = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
        return init_device_mesh(world.device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))


def _groups(number: int, size: int) -> str:
    """So many ranks, or groups of `size` of them, in words."""
    plural = "s" * (number > 1)
    return (
        f"{number} rank{plural}" if size == 1 else f"{number} group{plural} of {size} ranks that see the same samples"
    )
