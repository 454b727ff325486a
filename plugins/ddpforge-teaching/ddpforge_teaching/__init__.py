"""Several devices in one process, for teaching and comparison: a naive split of a model, and torch.nn.DataParallel."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import torch
from accelerate.utils import send_to_device
from ddpforge.errors import StrategyError
from ddpforge.interfaces import Compute, Contract, Pass, Replica, Strategy, Unsupported, World
from ddpforge.strategies import WholeReplica
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from ddpforge.recipe.schema import TrainSection

__all__ = ["DataParallel", "NaiveSplit"]

ddpforge_plugin_api = 3

log = logging.getLogger("ddpforge")

_Devices = Annotated[
    Sequence[Annotated[str, Field(pattern=r"^(cpu|cuda:\d{1,4})$")]] | None,
    Field(min_length=1, max_length=1024, description='Devices of this process, e.g. ["cuda:0", "cuda:1"]; all GPUs.'),
]


class _OneProcess(Strategy):
    """One process that computes on several devices, and says what to use instead."""

    name: str  # in a recipe
    instead: str  # what replaces it, and why

    def __init__(self, devices: Sequence[str] | None) -> None:
        self._named = devices

    def unsupported(self, train: TrainSection, ranks: int, device: str) -> Iterator[Unsupported]:
        """More than one process, and devices of another kind than the run's."""
        if ranks > 1:
            yield Unsupported(
                "strategy.use",
                f'strategy.use = "{self.name}" is for one process with several devices, and {ranks} processes were '
                "started",
                ('set strategy.use = "ddp" or "fsdp"', "or start one process: `ddpforge run RECIPE`"),
            )
        for named in self._named or ():
            if not named.startswith(device):
                yield Unsupported(
                    "strategy.devices",
                    f"strategy.devices names {named}, and this run computes on {device}",
                    (f'set train.device = "{named.partition(":")[0]}"', "or leave strategy.devices out"),
                )
                return
        if train.compile != "off" and not train.compile_blocks:
            yield Unsupported(
                "train.compile",
                f'train.compile = "{train.compile}" compiles the model as a whole, for one device',
                ('set train.compile = "off"', 'or strategy.use = "ddp"'),
            )

    def setup(self, train: TrainSection, world: World) -> World:
        """Finds the devices; says what replaces the strategy."""
        self.devices = [torch.device(name) for name in self._named or self._all(world.device.type)]
        there = torch.cuda.device_count()
        for device in self.devices:
            if device.type == "cuda" and (device.index or 0) >= there:
                raise StrategyError(
                    f"strategy.devices names {device}, and there {'is 1 GPU' if there == 1 else f'are {there} GPUs'}",
                    hints=["leave strategy.devices out, for all that there are"],
                )
        log.warning('strategy.use = "%s" is for teaching and comparison: %s', self.name, self.instead)
        return super().setup(train, replace(world, device=self.devices[0]))

    def _all(self, kind: str) -> Sequence[str]:
        if kind == "cpu":
            return ("cpu", "cpu")
        return [f"cuda:{number}" for number in range(torch.cuda.device_count())]


class NaiveSplit(_OneProcess):
    """One process, and the model's blocks over its devices in equal shares; one device computes, the others wait.

    What `device_map` and the tutorials call model parallelism. Outside of blocks the model is on the first device. On a
    CPU there is nothing to gain: it is there twice, to see how it works.
    """

    name = "naive_split"
    instead = (
        'one device computes at a time while the others wait; "fsdp" and "pipeline", with a process for each device, '
        "split the model too, and keep all busy"
    )
    contract = Contract(
        clipping="before the update, by the norm of all gradients",
        accumulation="autograd, in the parameters' .grad, each on its device",
        reads_gradients=True,
        optimizers="several",
    )

    def __init__(self, *, devices: _Devices = None) -> None:
        super().__init__(devices)

    def wrap(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """Moves the blocks to their devices, and the rest to the first; what goes into a block then follows it."""
        first, inside = self.devices[0], {id(module) for block in blocks for module in block.modules()}
        outside = [module for module in model.modules() if id(module) not in inside]
        places = self._places(blocks, sum(p.numel() for module in outside for p in module.parameters(recurse=False)))
        self._refuse_shared(model, outside, list(zip(blocks, places, strict=True)))
        for module in outside:
            _move_own(module, first)
        for block, place in zip(blocks, places, strict=True):
            block.to(self.devices[place])
            block.register_forward_pre_hook(partial(_to, self.devices[place]), with_kwargs=True)
        for block, (_, following) in zip(blocks, pairwise([*places, 0]), strict=True):
            block.register_forward_hook(partial(_on, self.devices[following]))
        return model

    def _places(self, blocks: Sequence[nn.Module], outside: int) -> list[int]:
        """The number of each block's device: equal shares of the parameters, of which those `outside` are the first's.

        Raises StrategyError where a device would get nothing.
        """
        sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks]
        count, total, before, places = len(self.devices), max(1, outside + sum(sizes)), outside, []
        for size in sizes:
            places.append(min(count - 1, int((before + size / 2) * count / total)))
            before += size
        if idle := set(range(1, count)) - {*places}:
            raise StrategyError(
                f"{len(blocks)} repeated blocks over {count} devices leave nothing for {self.devices[min(idle)]} "
                f"(number {min(idle) + 1})",
                hints=["name fewer devices in strategy.devices", "or the classes of smaller parts in train.blocks"],
            )
        return places

    def _refuse_shared(
        self, model: nn.Module, outside: Sequence[nn.Module], placed: Sequence[tuple[nn.Module, int]]
    ) -> None:
        """A tensor that would have to be on two devices."""
        homes = {id(tensor): 0 for module in outside for tensor in _tensors(module, recurse=False)}
        names = {id(tensor): name for name, tensor in (*model.named_buffers(), *model.named_parameters())}
        for block, place in placed:
            for tensor in _tensors(block):
                if homes.setdefault(id(tensor), place) != place:
                    raise StrategyError(
                        f"`{names[id(tensor)]}` belongs to parts of the model on different devices",
                        hints=["name other classes in train.blocks, so that it lies in one block or in none"],
                    )

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        """The model as it lies on its devices."""
        return _SplitReplica(self, model, optimizer, may_be_unused=True)


class DataParallel(_OneProcess):
    """torch.nn.DataParallel: one process copies the model to its GPUs at every pass; each gets a part of the batch.

    Statistics of BatchNorm are those of the first GPU's part. See
    https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html.
    """

    name = "data_parallel"
    instead = (
        'the model is copied at every pass and one process serves all GPUs; "ddp", with a process for each, computes '
        "the same faster"
    )
    contract = Contract(
        clipping="before the update, by the norm of all gradients",
        accumulation="autograd, in the .grad of the parameters on the first GPU",
        reads_gradients=True,
        optimizers="several",
        loss_in_model=False,
    )

    def __init__(self, *, devices: _Devices = None) -> None:
        super().__init__(devices)

    def unsupported(self, train: TrainSection, ranks: int, device: str) -> Iterator[Unsupported]:
        """Also a CPU, a GPU that is named twice, and what torch's copies of a model do not do."""
        if device != "cuda":
            yield Unsupported(
                "strategy.use",
                f'strategy.use = "{self.name}" copies the model to GPUs, and this run computes on {device}',
                ('set strategy.use = "ddp", which has a process for each part of the CPU, or "naive_split"',),
            )
            return
        yield from super().unsupported(train, ranks, device)
        if len({*(self._named or ())}) < len(self._named or ()):
            yield Unsupported("strategy.devices", "strategy.devices names a GPU twice", ("name each once",))
        for key in ("activation_checkpointing", "compile_blocks", "sync_batchnorm"):
            if getattr(train, key):
                yield Unsupported(
                    f"train.{key}",
                    f"train.{key} has no effect on the copies of the model that torch.nn.DataParallel makes",
                    (f"leave train.{key} out", 'or set strategy.use = "ddp"'),
                )

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        """The model in a torch.nn.DataParallel."""
        module: nn.Module = nn.DataParallel(model, device_ids=self.devices)
        return _SplitReplica(self, model, optimizer, module=module, may_be_unused=True)


class _SplitReplica(WholeReplica):
    """A model on several devices of one process, each with random numbers of its own."""

    def __init__(self, strategy: _OneProcess, *parts: Any, **options: Any) -> None:
        super().__init__(strategy, *parts, **options)
        self._others = strategy.devices[1:]

    def run_microbatches(
        self, passes: Iterable[Pass], compute: Compute, *, trains: bool
    ) -> Iterator[tuple[Tensor, Any] | None]:
        """Also seeds the other devices: from one seed all would draw the same numbers."""
        seeded = (replace(one, seed=partial(self._seed, one)) for one in passes)
        return super().run_microbatches(seeded, compute, trains=trains)

    def _seed(self, one: Pass) -> None:
        one.seed()
        for number, device in enumerate(self._others, 1):
            if device.type == "cuda" and device != self.world.device:
                torch.cuda.default_generators[device.index].manual_seed(torch.initial_seed() + number)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Also says in the recipe's words what torch says of tensors on different devices."""
        try:
            with super().autocast():
                yield
        except RuntimeError as error:
            if "on the same device" not in str(error):
                raise
            raise StrategyError(
                f"between its blocks the model computes with tensors of different devices: {error}",
                hints=["name larger classes in train.blocks, which hold all that is computed together"],
            ) from error


def _tensors(module: nn.Module, *, recurse: bool = True) -> Iterator[Tensor]:
    yield from module.parameters(recurse)
    yield from module.buffers(recurse)


def _move_own(module: nn.Module, device: torch.device) -> None:
    """Moves a module without its children: by `to` the whole model would pass through the first device."""
    if next(module.children(), None) is None:
        module.to(device)
        return
    for parameter in module.parameters(recurse=False):
        parameter.data = parameter.data.to(device)
    for name, buffer in module.named_buffers(recurse=False):
        setattr(module, name, buffer.to(device))


def _to(device: torch.device, _: nn.Module, args: Any, kwargs: Any) -> Any:
    """A hook that gives a module its inputs on a device."""
    return send_to_device((args, kwargs), device)


def _on(device: torch.device, _: nn.Module, args: Any, outputs: Any) -> Any:
    """A hook that gives a module's outputs on to a device."""
    return send_to_device(outputs, device)
