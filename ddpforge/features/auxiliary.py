"""Auxiliary modules of a task: placed by the strategy, saved and updated as the task declares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from ddpforge import compat
from ddpforge.components.local_code import component_name
from ddpforge.errors import CheckpointError, PluginError, StrategyError, UsageError
from ddpforge.features.frozen_weights import checksum, checksums_match
from ddpforge.interfaces import (
    AuxiliaryModule,
    Callback,
    Replica,
    StepInfo,
    Strategy,
    Task,
    TensorShard,
    World,
    read_all,
)
from ddpforge.strategies.buffers import equalise_buffers
from ddpforge.strategies.named_state import match, match_form, tensors
from ddpforge.training.blocks import find_blocks
from ddpforge.training.features import Assembled, Feature, OwnedState
from ddpforge.training.initial_weights import load_initial

__all__ = ["OWNER", "AuxiliaryModules", "PlacedAuxiliary", "declared", "place"]

OWNER = "task."  # prefix of auxiliary modules in checkpoints, which store them like callbacks


def declared(task: Task, model: nn.Module) -> dict[str, AuxiliaryModule]:
    """Returns the auxiliary modules that `task` declares for the bare `model`, frozen and in their declared mode.

    Raises PluginError for an invalid declaration, and UsageError for a module that does not fit the model.
    """
    found = dict(task.auxiliary_modules(model))
    trained = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, beside in found.items():
        where = f"`{name}` of {component_name(task)}.auxiliary_modules"
        if not isinstance(beside, AuxiliaryModule) or not isinstance(beside.module, nn.Module):
            raise PluginError(
                f"{where} is a {type(beside).__name__}", hints=["return {name: AuxiliaryModule(module=…)}"]
            )
        if not name.isidentifier():
            raise PluginError(f"{where} is not a plain name", hints=["use letters, digits and `_`"])
        for own, parameter in beside.module.named_parameters():
            if id(parameter) in trained:
                raise PluginError(
                    f"{where}: its `{own}` is the same parameter as `{trained[id(parameter)]}` of the model",
                    hints=["copy the module: copy.deepcopy(model)"],
                )
        beside.module.requires_grad_(False).train(beside.training)
        _check_sources(beside, model, where)
    return found


def _check_sources(beside: AuxiliaryModule, model: nn.Module, where: str) -> None:
    """Checks the settings of a declaration, and that the followed module has the same parameters and buffers.

    Raises PluginError for settings that contradict each other, UsageError for a difference from the followed module.
    """
    if beside.updates_buffers and not beside.is_saved:
        raise PluginError(
            f"{where} updates statistics in training mode, and a resumed run would lose them with `saved = False`",
            hints=["remove `saved`, or set training = False"],
        )
    if beside.follows is None:
        if beside.momentum != 1.0:
            raise PluginError(
                f"{where} has a momentum, but follows no module", hints=['set follows = "" to follow the model']
            )
        return
    if beside.weights is not None:
        raise PluginError(f"{where} has both `follows` and `weights`", hints=["remove one of them"])
    if not (callable(beside.momentum) or 0 <= beside.momentum <= 1):
        raise PluginError(f"{where} has the momentum {beside.momentum}", hints=["give a number from 0 to 1"])
    if beside.momentum != 1.0 and not beside.is_saved:
        raise PluginError(
            f"{where} follows the model with a momentum, and a resumed run would restart it with `saved = False`",
            hints=["remove `saved`"],
        )
    try:
        leader = model.get_submodule(beside.follows)
    except AttributeError:
        raise UsageError(f"{where} follows `{beside.follows}`, which the model does not have") from None
    forms = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in leader.named_parameters()}
    for name, tensor in beside.module.named_parameters():
        if forms.get(name) != (tuple(tensor.shape), tensor.dtype):
            theirs = "not there" if name not in forms else " ".join(map(str, reversed(forms[name])))
            raise UsageError(
                f"{where}: its `{name}` is {tensor.dtype} {tuple(tensor.shape)}, but in the model, which it follows, "
                f"this parameter is {theirs}"
            )
    buffers = {name for name, _ in leader.named_buffers()}
    for name, _ in beside.module.named_buffers():
        if not beside.training and name not in buffers:
            raise UsageError(f"{where} has a buffer `{name}`, but the model, which it follows, has no such buffer")


def place(
    declarations: Mapping[str, AuxiliaryModule], strategy: Strategy, replica: Replica, world: World, *, begins: bool
) -> dict[str, PlacedAuxiliary]:
    """Places the auxiliary modules with the strategy; returns them by their names in checkpoints.

    If a run `begins`, they get their initial weights. Otherwise the caller restores the saved ones from a checkpoint.
    """
    return {
        f"{OWNER}{name}": PlacedAuxiliary(name, beside, strategy, replica, world, begins=begins)
        for name, beside in declarations.items()
    }


class AuxiliaryModules(Feature):
    """Auxiliary modules of the task."""

    def __init__(self, placed: Mapping[str, PlacedAuxiliary]) -> None:
        self._placed = placed

    @staticmethod
    @override
    def declared_modules(task: Task, model: nn.Module) -> Mapping[str, AuxiliaryModule]:
        return declared(task, model)

    @classmethod
    def of(cls, run: Assembled) -> Self | None:
        """Places the modules that the task declares; returns None if it declares none."""
        parts = run.parts
        if not parts.auxiliary:
            return None
        return cls(place(parts.auxiliary, parts.strategy, run.replica, run.world, begins=run.begins))

    @override
    def callbacks(self) -> Mapping[str, Callback]:
        return self._placed

    @override
    def stateful_modules(self) -> Sequence[nn.Module]:
        return [one.module for one in self._placed.values() if one.beside.training]


class PlacedAuxiliary(OwnedState):
    """Auxiliary module as a strategy has placed it; a callback on every rank."""

    def __init__(
        self, name: str, beside: AuxiliaryModule, strategy: Strategy, replica: Replica, world: World, *, begins: bool
    ) -> None:
        """Raises the errors of reading its weights, and StrategyError if it cannot follow the model here."""
        self.name, self.beside, self.module = name, beside, beside.module
        self._replica, self._world = replica, world
        if strategy.train.sync_batchnorm and beside.training:
            nn.SyncBatchNorm.convert_sync_batchnorm(self.module)  # type: ignore[no-untyped-call]
        self._weights = strategy.place_auxiliary(self.module, find_blocks(self.module, ()))
        _, self._aliases = tensors(self.module)
        if begins or not beside.is_saved:
            self.begin()
        self._fingerprint = None if beside.is_saved else checksum(self._held(), world.global_ranks)

    def begin(self) -> None:
        """Loads the initial weights from `weights`, or copies them from the followed module, if either is declared."""
        source, ranks = self.beside.weights, self._world.global_ranks
        if source is not None:
            key = f"weights of {self.name}"
            load_initial(source, self._held(), self._aliases, self._take, ranks, key=key, whole=True)
        if self.beside.follows is not None:
            self._follow(0.0)

    # -- between steps
    def on_step(self, info: StepInfo) -> None:
        """Moves the weights towards those of the model."""
        momentum = self.beside.momentum
        factor = momentum(info.step - 1) if callable(momentum) else momentum
        if factor != 1.0:
            self._follow(factor)

    @torch.no_grad()
    def _follow(self, momentum: float) -> None:
        """Sets each parameter to `momentum` * itself + (1 - `momentum`) * the model's; 0 makes a copy.

        Copies the model's buffers too, unless the module is in training mode.
        """
        assert self.beside.follows is not None
        prefix = f"{self.beside.follows}." if self.beside.follows else ""
        parts = self._weights.frozen()
        try:
            leaders = [self._replica.weights.elements(prefix + name, part.region) for name, part in parts.items()]
        except ValueError as error:
            raise StrategyError(
                f"`{self.name}` cannot follow the model: this strategy shards the two in different ways: {error}",
                hints=[
                    "the strategy's `place_auxiliary` must shard a module in the same way as `wrap` shards the model"
                ],
            ) from error
        mine = [part.tensor.view(-1) for part in parts.values()]
        if mine:
            compat.foreach("lerp_", mine, leaders, 1.0 - momentum)
        self._weights.mark_changed()
        if not self.beside.training:
            theirs = dict(self._replica.unwrapped.get_submodule(self.beside.follows).named_buffers())
            for name, buffer in self.module.named_buffers():
                buffer.copy_(theirs[name])

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Puts a module in training mode into evaluation mode inside, with equal buffers on all ranks."""
        if not self.beside.training:
            yield
            return
        equalise_buffers(self.module, self._world.global_ranks)
        self.module.eval()
        try:
            yield
        finally:
            self.module.train()

    # -- to disk and back
    def state(self) -> Mapping[str, Tensor | TensorShard | float]:
        """Returns all tensors of the module; if it is not saved, checksums of its weights. Collective."""
        if self._fingerprint is not None:
            return self._fingerprint
        if self.beside.follows is not None:
            equalise_buffers(self.module, self._world.global_ranks)
        return self._held()

    def restore(self, state: Mapping[str, Any] | None, is_another: Callable[[], bool]) -> None:
        """Restores the module; with another task it begins as in a new run."""
        if is_another():
            self.begin()
        elif state is None:
            raise CheckpointError(f"the checkpoint has no auxiliary module `{self.name}`, which the task uses")
        else:
            self.load_state(state)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores a result of `state`; raises CheckpointError for another module, or for other weights."""
        if self._fingerprint is None:
            match(set(self._held()), set(state))
            self._take(state)
            return
        if not checksums_match(state, self._fingerprint):
            raise CheckpointError(
                f"the weights of the auxiliary module `{self.name}` differ from those at the start of this run",
                hints=[
                    f"load the same again: {self.beside.weights}" if self.beside.weights else "load the same again",
                    "or start a new run with checkpoint.init_from",
                ],
            )

    def _held(self) -> dict[str, Tensor | TensorShard]:
        """Returns this rank's part of each tensor."""
        parts, (found, _) = self._weights.frozen(), tensors(self.module)
        return {name: parts.get(name, tensor.detach()) for name, tensor in found.items()}

    def _take(self, saved: Mapping[str, Any]) -> None:
        parts = {
            name: held if isinstance(held, TensorShard) else TensorShard.whole(held)
            for name, held in self._held().items()
        }
        for name, part in parts.items():
            match_form(f"{name} of {self.name}", part.shape, part.tensor.dtype, saved[name])
        read_all((saved[name], part.region, part.tensor) for name, part in parts.items())
        self._weights.mark_changed()
