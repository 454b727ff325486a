"""Modules beside the model: what a task declares, placed by the strategy, kept and moved as declared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ddpforge import compat
from ddpforge.errors import CheckpointError, PluginError, StrategyError, UsageError
from ddpforge.interfaces import Beside, Callback, Part, Replica, StepInfo, Strategy, Task, World, read_all
from ddpforge.interop.initial import load_initial
from ddpforge.strategies.buffers import equalise_buffers
from ddpforge.strategies.named_state import match, match_form, tensors
from ddpforge.training.blocks import find_blocks
from ddpforge.training.left_out import measure, same
from ddpforge.training.turns import name_of

__all__ = ["OWNER", "BesideModule", "declared", "place", "with_statistics"]

OWNER = "task."  # begins the names under which checkpoints hold such modules, among the callbacks


def declared(task: Task, model: nn.Module) -> dict[str, Beside]:
    """The modules that `task` uses beside `model`, frozen and in their mode; both are as they were built.

    Raises PluginError for what is no declaration, and UsageError for one that does not fit the model.
    """
    found = dict(task.beside(model))
    trained = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, beside in found.items():
        where = f"`{name}` of {name_of(task)}.beside"
        if not isinstance(beside, Beside) or not isinstance(beside.module, nn.Module):
            raise PluginError(f"{where} is a {type(beside).__name__}", hints=["return {name: Beside(module=…)}"])
        if not name.isidentifier():
            raise PluginError(f"{where} is not a plain name", hints=["use letters, digits and `_`"])
        for own, parameter in beside.module.named_parameters():
            if id(parameter) in trained:
                raise PluginError(
                    f"{where}: its `{own}` is the model's own `{trained[id(parameter)]}`",
                    hints=["copy the module: copy.deepcopy(model)"],
                )
        beside.module.requires_grad_(False).train(beside.training)
        _check_sources(beside, model, where)
    return found


def _check_sources(beside: Beside, model: nn.Module, where: str) -> None:
    """Raises UsageError unless a module that follows another has what that has."""
    if beside.keeps_statistics and not beside.is_saved:
        raise PluginError(
            f"{where} keeps statistics while it trains, which with `saved = False` a resumed run would lose",
            hints=["leave `saved` out, or set training = False"],
        )
    if beside.follows is None:
        if beside.momentum != 1.0:
            raise PluginError(f"{where} has a momentum, and follows nothing", hints=['set follows = "", the model'])
        return
    if beside.weights is not None:
        raise PluginError(f"{where} follows the model and has weights of its own", hints=["leave one of both out"])
    if not (callable(beside.momentum) or 0 <= beside.momentum <= 1):
        raise PluginError(f"{where} has the momentum {beside.momentum}", hints=["give a number from 0 to 1"])
    if beside.momentum != 1.0 and not beside.is_saved:
        raise PluginError(
            f"{where} moves with the model, and with `saved = False` a resumed run would start it from scratch",
            hints=["leave `saved` out"],
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
                f"{where}: its `{name}` is {tensor.dtype} {tuple(tensor.shape)}, and the model's, which it follows, is "
                f"{theirs}"
            )
    buffers = {name for name, _ in leader.named_buffers()}
    for name, _ in beside.module.named_buffers():
        if not beside.training and name not in buffers:
            raise UsageError(f"{where} has a buffer `{name}`, and the model, which it follows, has none")


def place(
    declarations: Mapping[str, Beside], strategy: Strategy, replica: Replica, world: World, *, begins: bool
) -> dict[str, BesideModule]:
    """Has the strategy place the modules; by the names under which checkpoints hold them.

    Where a run `begins` they get their initial weights; else what a checkpoint holds is to be restored.
    """
    return {
        f"{OWNER}{name}": BesideModule(name, beside, strategy, replica, world, begins=begins)
        for name, beside in declarations.items()
    }


def with_statistics(model: nn.Module, callbacks: Iterable[Callback]) -> nn.Module:
    """The model and those modules beside it whose buffers forward passes change."""
    beside = [one.module for one in callbacks if isinstance(one, BesideModule) and one.beside.training]
    return nn.ModuleList([model, *beside]) if beside else model


class BesideModule(Callback):
    """A module beside the model, as a strategy has placed it; on every rank, like any callback."""

    def __init__(
        self, name: str, beside: Beside, strategy: Strategy, replica: Replica, world: World, *, begins: bool
    ) -> None:
        """Raises what reading its weights raises, and StrategyError where the strategy cannot let it follow."""
        self.name, self.beside, self.module = name, beside, beside.module
        self._replica, self._world = replica, world
        if strategy.train.sync_batchnorm and beside.training:
            nn.SyncBatchNorm.convert_sync_batchnorm(self.module)  # type: ignore[no-untyped-call]
        self._weights = strategy.beside(self.module, find_blocks(self.module, ()))
        _, self._aliases = tensors(self.module)
        if begins or not beside.is_saved:
            self.begin()
        self._fingerprint = None if beside.is_saved else measure(self._held(), world.all)

    def begin(self) -> None:
        """Gives it its initial weights, where its constructor did not."""
        source, ranks = self.beside.weights, self._world.all
        if source is not None:
            key = f"weights of {self.name}"
            load_initial(source, self._held(), self._aliases, self._take, ranks, key=key, whole=True)
        if self.beside.follows is not None:
            self._follow(0.0)

    # -- between steps
    def on_step(self, info: StepInfo) -> None:
        """Moves it towards the model."""
        momentum = self.beside.momentum
        factor = momentum(info.step - 1) if callable(momentum) else momentum
        if factor != 1.0:
            self._follow(factor)

    @torch.no_grad()
    def _follow(self, momentum: float) -> None:
        """Its parameters become `momentum` times themselves and the rest the model's; at 0 it is a copy."""
        assert self.beside.follows is not None
        prefix = f"{self.beside.follows}." if self.beside.follows else ""
        parts = self._weights.frozen()
        try:
            leaders = [self._replica.weights.elements(prefix + name, part.region) for name, part in parts.items()]
        except ValueError as error:
            raise StrategyError(
                f"`{self.name}` cannot follow the model under this strategy, which lays them out differently: {error}",
                hints=["the strategy's `beside` must spread a module as its `wrap` does the model"],
            ) from error
        mine = [part.tensor.view(-1) for part in parts.values()]
        if mine:
            compat.foreach("lerp_", mine, leaders, 1.0 - momentum)
        self._weights.changed()
        if not self.beside.training:
            theirs = dict(self._replica.bare.get_submodule(self.beside.follows).named_buffers())
            for name, buffer in self.module.named_buffers():
                buffer.copy_(theirs[name])

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluates with it as with the model."""
        if not self.beside.training:
            yield
            return
        equalise_buffers(self.module, self._world.all)
        self.module.eval()
        try:
            yield
        finally:
            self.module.train()

    # -- to disk and back
    def state(self) -> Mapping[str, Tensor | Part | float]:
        """All its tensors; or, of what is not saved, by what they can be told from others."""
        if self._fingerprint is not None:
            return self._fingerprint
        if self.beside.follows is not None:  # called on every rank, as all that is saved
            equalise_buffers(self.module, self._world.all)
        return self._held()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state` gave; raises CheckpointError for another module, or for other weights."""
        if self._fingerprint is None:
            match(set(self._held()), set(state))
            self._take(state)
            return
        if not same(state, self._fingerprint):
            raise CheckpointError(
                f"the weights of `{self.name}`, beside the model, are not those that this run began with",
                hints=[
                    f"give it those again: {self.beside.weights}" if self.beside.weights else "give it those again",
                    "or begin another run with checkpoint.init_from",
                ],
            )

    def _held(self) -> dict[str, Tensor | Part]:
        """As much of each tensor as this rank holds."""
        parts, (found, _) = self._weights.frozen(), tensors(self.module)
        return {name: parts.get(name, tensor.detach()) for name, tensor in found.items()}

    def _take(self, saved: Mapping[str, Any]) -> None:
        parts = {name: held if isinstance(held, Part) else Part.whole(held) for name, held in self._held().items()}
        for name, part in parts.items():
            match_form(f"{name} of {self.name}", part.shape, part.tensor.dtype, saved[name])
        read_all((saved[name], part.region, part.tensor) for name, part in parts.items())
        self._weights.changed()
