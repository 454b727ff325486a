"""Grid of ranks: groups that hold different weights, see different data, or share one computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from ddpforge.interfaces import Ranks, Unsupported, World

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from ddpforge.ranks.collectives import CollectiveRanks

__all__ = ["MeshGroups", "ParallelDims", "divisions"]


def divisions(ranks: int, *dimensions: str) -> Iterator[dict[str, Any]]:
    """Yields sizes of the dimensions whose product divides `ranks`; sizes of 1 are absent."""
    for sizes in product([size for size in range(1, ranks + 1) if ranks % size == 0], repeat=len(dimensions)):
        if ranks % prod(sizes) == 0:
            yield {name: size for name, size in zip(dimensions, sizes, strict=True) if size > 1}


@dataclass(frozen=True)
class MeshGroups:
    """Groups of the grid that contain this rank."""

    mesh: DeviceMesh  # for FSDP: its last dimension shards; over a first of two, gradients are averaged
    data: Ranks  # ranks that see different data
    context: Ranks  # ranks that compute parts of the same sequences
    tensor: CollectiveRanks  # ranks that compute shares of the same layers
    tensor_mesh: DeviceMesh | None  # mesh of the `tensor` ranks, if there are several
    groups: tuple[dist.ProcessGroup, ...]  # all process groups of the mesh


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """Layout of ranks: ranks = replicas × shards × context × tensor; `tensor` ranks are neighbours.

    The number of shards follows from the number of ranks. Ranks of a `tensor` group compute shares of the same layers,
    ranks of a `context` group parts of the same sequences; both see the same samples. Weights are sharded over
    shards × context.
    """

    replicas: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def together(self) -> int:
        """Returns the number of neighbouring ranks that see the same samples."""
        return self.context * self.tensor

    def data_ranks(self, ranks: int) -> int:
        """Returns the number of groups of ranks that see different data."""
        return max(1, ranks // self.together)

    def fitting(self, ranks: int) -> ParallelDims:
        """Returns this grid with every size set to 1 that does not divide the remaining ranks or groups."""
        kept = {}
        for name in ("tensor", "context", "replicas"):
            size = getattr(self, name)
            kept[name] = 1 if ranks % size else size
            ranks //= kept[name]
        return ParallelDims(**kept)

    def unsupported(self, ranks: int) -> Iterator[Unsupported]:
        """Refuses the first size that does not divide the remaining ranks or groups."""
        left = ranks
        for name, size in (("tensor", self.tensor), ("context", self.context), ("replicas", self.replicas)):
            if left % size:
                fits = [str(n) for n in range(1, left + 1) if left % n == 0]
                yield Unsupported(
                    f"strategy.{name}",
                    f"strategy.{name} = {size} does not divide the {_groups(left, ranks // left)}",
                    (f"use one of {', '.join(fits)}" if left > 1 else "remove it",),
                )
                return
            left //= size

    def places(self, world: World) -> MeshGroups:
        """Forms the groups; all ranks must call it, in the same order."""
        from ddpforge.ranks.collectives import ProcessGroup, SingleRank

        ranks, together = world.global_ranks.size, self.together
        mesh = self._mesh(world)
        fsdp = [name for name in ("replicate", "shard") if name in (mesh.mesh_dim_names or ())]
        groups = mesh.get_all_groups()

        def alike(key: Callable[[int], tuple[int, int]], size: int) -> Ranks:
            """Forms the group of the `size` ranks with the same `key` as this rank."""
            if size == 1:
                return SingleRank(world.device)
            found: dict[tuple[int, int], list[int]] = {}
            for rank in range(ranks):
                found.setdefault(key(rank), []).append(rank)
            return world.global_ranks.split(list(found.values()))

        return MeshGroups(
            mesh=mesh[tuple(fsdp)],
            data=world.dp_ranks if together == 1 else alike(lambda rank: (0, rank % together), ranks // together),
            context=alike(lambda rank: (rank // together, rank % self.tensor), self.context),
            tensor=SingleRank(world.device)
            if self.tensor == 1
            else ProcessGroup(mesh.get_group("tensor"), world.device),
            tensor_mesh=None if self.tensor == 1 else mesh["tensor"],
            groups=tuple(groups),
        )

    def _mesh(self, world: World) -> DeviceMesh:
        """Returns the mesh of all ranks; of dimensions of size 1 it keeps only `shard`."""
        from torch.distributed.device_mesh import init_device_mesh

        shards = world.global_ranks.size // self.replicas // self.tensor
        sizes = {"replicate": self.replicas, "shard": shards, "tensor": self.tensor}
        kept = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
        return init_device_mesh(world.device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))


def _groups(number: int, size: int) -> str:
    """Returns the number of ranks, or of groups of `size` ranks, in words."""
    plural = "s" * (number > 1)
    return (
        f"{number} rank{plural}" if size == 1 else f"{number} group{plural} of {size} ranks that see the same samples"
    )
