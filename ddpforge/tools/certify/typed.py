"""Types of tensor parallelism: `spmd_types` follows each activation of a share of layers, for any number of ranks.

A tensor is the same on all ranks (invariant, or replicated if its gradients are partial), different (varying), or a
summand (partial). The checker derives the type of each operation's result; a sum that is missing or doubled, a whole
weight whose gradient is not summed, or a summand that is used as if it were whole is an error of types. Values do not
matter: one process computes on a fake process group. See https://meta-pytorch.org/spmd_types/.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from ddpforge import compat
from ddpforge.api import build_without_ranks, deal, find_blocks, load_recipe
from ddpforge.components.registry import Registry
from ddpforge.errors import ForgeError, RecipeError, UsageError, pip_install
from ddpforge.strategies.tensor.sharding_plan import resolve
from ddpforge.strategies.tensor.tensor_parallel import TensorParallel
from ddpforge.tools.simulation.fake import fake_world

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TypedRow", "typed_rows"]


@dataclass(frozen=True)
class TypedRow:
    """Check of the types of one layout; `reason` is why it was refused, or the error of types."""

    layout: str
    verdict: str  # "typed", "refused", "mistyped", or "not followed" if the checker cannot follow the model
    reason: str = ""


def typed_rows(recipe: str, sizes: Sequence[int], sets: Sequence[str] = ()) -> Iterator[TypedRow]:
    """Yields a row for each number of ranks that share layers, without and with activations cut along the sequence.

    Raises UsageError if `spmd_types` is not installed.
    """
    try:
        import_module("spmd_types.checker")
    except ImportError:
        raise UsageError("types need spmd_types", hints=[pip_install("typed")]) from None
    registry = Registry.installed()
    for size in sizes:
        for sequence in (False, True):
            text = f"tensor={size}{', sequence_parallel' if sequence else ''}"
            options = ["strategy.use=fsdp", f"strategy.tensor={size}"]
            options += ["strategy.sequence_parallel=true"] if sequence else []
            try:
                loaded = load_recipe(recipe, sets=[*sets, *options, "train.micro_batch=2"], registry=registry)
                with fake_world(size) as world:
                    built = build_without_ranks(loaded, registry, ranks=size, device="cpu")
                    yield _row(text, built, world, size, sequence)
            except ForgeError as error:
                reason = error.problems[0].message if isinstance(error, RecipeError) else error.message
                yield TypedRow(text, "refused", reason)


def _row(text: str, built: Any, world: Any, size: int, sequence: bool) -> TypedRow:
    from spmd_types.types import SpmdTypeError
    from torch.distributed.device_mesh import init_device_mesh

    spmd: Any = import_module("spmd_types")  # it declares no public names
    model, task = built.model.to_empty(device="meta").train(), built.task
    blocks = find_blocks(model, built.recipe.train.blocks)
    plan = resolve(model, None, blocks, ranks=size, sequence=sequence, split_logits=False)
    shares = TensorParallel(plan, world.global_ranks, torch.device("cpu"), sequence=sequence, logits=None)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tensor",))
    group = mesh.get_group("tensor")
    shares.moves = _TypedMoves(group)  # type: ignore[assignment]
    shares.random = SimpleNamespace(begin=_nothing, end=_nothing, forget=_nothing)  # type: ignore[assignment]
    shares.cut(model, model)
    shares.attach(model)
    model.to_empty(device="cpu")  # the share; models may read values of their inputs
    batch = next(deal(built, world).training.training(0)).data
    try:
        with spmd.set_current_mesh(mesh), spmd.checker.typecheck(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of collectives that the checker calls
            for name, parameter in model.named_parameters():
                kind = spmd.V if name in shares.cuts else spmd.R if name in shares.summed else spmd.I
                spmd.assert_type(parameter, {group: kind})
            for one in (*model.buffers(), *compat.tree_leaves(batch)):
                if isinstance(one, torch.Tensor):
                    spmd.assert_type(one, {group: spmd.I})
            loss, _ = task.loss(model, batch)
            spmd.assert_type(loss, {group: spmd.I})
    except SpmdTypeError as error:
        reason = " ".join(str(error).split("\n\n")[0].split())
        # The model reads a value of a tensor that it has made itself, and that has no type.
        return TypedRow(text, "not followed" if "missing axis" in reason else "mistyped", reason)
    except Exception as error:  # of a model whose operations the checker does not know
        return TypedRow(text, "not followed", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    return TypedRow(text, "typed")


def _nothing() -> None:
    pass


class _TypedMoves:
    """The moves of `ActivationCollectives` with the types of their arguments and results."""

    def __init__(self, group: Any) -> None:
        self._spmd, self._group = import_module("spmd_types"), group

    def enter(self, x: Tensor) -> Tensor:
        found: Tensor = self._spmd.convert(x, self._group, src=self._spmd.I, dst=self._spmd.R)
        return found

    def leave(self, x: Tensor) -> Tensor:
        found: Tensor = self._spmd.all_reduce(x, self._group, src=self._spmd.P, dst=self._spmd.I)
        return found

    def cut(self, x: Tensor, dim: int) -> Tensor:
        found: Tensor = self._spmd.convert(x, self._group, src=self._spmd.I, dst=self._spmd.S(dim))
        return found

    def join(self, x: Tensor, dim: int, total: int) -> Tensor:
        found: Tensor = self._spmd.all_gather(x, self._group, src=self._spmd.S(dim), dst=self._spmd.I)
        return found.narrow(dim, 0, total)

    def enter_cut(self, x: Tensor, dim: int) -> Tensor:
        found: Tensor = self._spmd.all_gather(x, self._group, src=self._spmd.S(dim), dst=self._spmd.R)
        return found

    def leave_cut(self, x: Tensor, dim: int) -> Tensor:
        found: Tensor = self._spmd.reduce_scatter(x, self._group, src=self._spmd.P, dst=self._spmd.S(dim))
        return found
