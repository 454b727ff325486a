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
    """Strategy of one process with several devices; logs which strategy to use instead."""

    name: str  # in a recipe
    instead: str  # the strategy to use instead, and the reason

    def __init__(self, devices: Sequence[str] | None) -> None:
        self._named = devices

    def unsupported(self, train: TrainSection, ranks: int, device: str) -> Iterator[Unsupported]:
        """Yields: more than one process, devices of another type than the run's, and a model compiled as a whole."""
        if ranks > 1:
            yield Unsupported(
                "strategy.use",
                f'strategy.use = "{self.name}" needs one process with several devices, but {ranks} processes were '
                "started",
                ('set strategy.use = "ddp" or "fsdp"', "or start one process: `ddpforge run RECIPE`"),
            )
        for named in self._named or ():
            if not named.startswith(device):
                yield Unsupported(
                    "strategy.devices",
                    f"strategy.devices lists {named}, but this run is on {device}",
                    (f'set train.device = "{named.partition(":")[0]}"', "or remove strategy.devices"),
                )
                return
        if train.compile != "off" and not train.compile_blocks:
            yield Unsupported(
                "train.compile",
                f'train.compile = "{train.compile}" compiles the whole model for one device',
                ('set train.compile = "off"', 'or strategy.use = "ddp"'),
            )

    def setup(self, train: TrainSection, world: World) -> World:
        """Finds the devices, and logs which strategy to use instead; raises StrategyError for a missing GPU."""
        self.devices = [torch.device(name) for name in self._named or self._all(world.device.type)]
        there = torch.cuda.device_count()
        for device in self.devices:
            if device.type == "cuda" and (device.index or 0) >= there:
                raise StrategyError(
                    f"strategy.devices lists {device}, but there {'is 1 GPU' if there == 1 else f'are {there} GPUs'}",
                    hints=["remove strategy.devices to use all GPUs"],
                )
        log.warning('strategy.use = "%s" is for teaching and comparison: %s', self.name, self.instead)
        return super().setup(train, replace(world, device=self.devices[0]))

    def _all(self, kind: str) -> Sequence[str]:
        if kind == "cpu":
            return ("cpu", "cpu")
        return [f"cuda:{number}" for number in range(torch.cuda.device_count())]


class NaiveSplit(_OneProcess):
    """Splits the model's blocks over the devices of one process in equal shares. One device computes, the others wait.

    Tutorials and `device_map` call this model parallelism. The part of the model outside of blocks is on the first
    device. On a CPU it is of no use, except to show how it works: the CPU then counts as two devices.
    """

    name = "naive_split"
    instead = (
        'one device computes at a time while the others wait; "fsdp" and "pipeline" also split the model, but with one '
        "process per device, and keep all devices busy"
    )
    contract = Contract(
        clipping="before the update, by the norm of all gradients",
        accumulation="autograd, in the parameters' .grad, on their devices",
        reads_gradients=True,
        optimizers="several",
    )

    def __init__(self, *, devices: _Devices = None) -> None:
        super().__init__(devices)

    def wrap(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """Moves each block to its device, the rest to the first device, and adds hooks that move inputs and outputs."""
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
        """Returns the device number of each block, so that every device holds about the same number of parameters.

        The first device also holds `outside` parameters. Raises StrategyError if a device would hold no block.
        """
        sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks]
        count, total, before, places = len(self.devices), max(1, outside + sum(sizes)), outside, []
        for size in sizes:
            places.append(min(count - 1, int((before + size / 2) * count / total)))
            before += size
        if idle := set(range(1, count)) - {*places}:
            raise StrategyError(
                f"{len(blocks)} repeated blocks over {count} devices: no block is left for {self.devices[min(idle)]} "
                f"(number {min(idle) + 1})",
                hints=["set fewer devices in strategy.devices", "or the classes of smaller modules in train.blocks"],
            )
        return places

    def _refuse_shared(
        self, model: nn.Module, outside: Sequence[nn.Module], placed: Sequence[tuple[nn.Module, int]]
    ) -> None:
        """Raises StrategyError for a tensor that belongs to modules on different devices."""
        homes = {id(tensor): 0 for module in outside for tensor in _tensors(module, recurse=False)}
        names = {id(tensor): name for name, tensor in (*model.named_buffers(), *model.named_parameters())}
        for block, place in placed:
            for tensor in _tensors(block):
                if homes.setdefault(id(tensor), place) != place:
                    raise StrategyError(
                        f"`{names[id(tensor)]}` is shared by parts of the model on different devices",
                        hints=["set other classes in train.blocks, so that it belongs to one block or to none"],
                    )

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        """Returns the replica of the split model."""
        return _SplitReplica(self, model, optimizer, may_be_unused=True)


class DataParallel(_OneProcess):
    """torch.nn.DataParallel: one process copies the model to its GPUs in every pass, and splits the batch over them.

    Statistics of BatchNorm come from the first GPU's part of the batch. See
    https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html.
    """

    name = "data_parallel"
    instead = (
        'the model is copied in every pass, and one process serves all GPUs; "ddp", with one process per GPU, computes '
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
        """Yields in addition: a CPU, a duplicate GPU, and settings that have no effect on the copies of the model."""
        if device != "cuda":
            yield Unsupported(
                "strategy.use",
                f'strategy.use = "{self.name}" copies the model to GPUs, but this run is on {device}',
                ('set strategy.use = "ddp", with several processes on the CPU, or "naive_split"',),
            )
            return
        yield from super().unsupported(train, ranks, device)
        if len({*(self._named or ())}) < len(self._named or ()):
            yield Unsupported("strategy.devices", "strategy.devices lists a GPU twice", ("list each GPU once",))
        for key in ("activation_checkpointing", "compile_blocks", "sync_batchnorm"):
            if getattr(train, key):
                yield Unsupported(
                    f"train.{key}",
                    f"train.{key} has no effect on the copies of the model that torch.nn.DataParallel makes",
                    (f"remove train.{key}", 'or set strategy.use = "ddp"'),
                )

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        """Returns the replica of the model in a torch.nn.DataParallel."""
        module: nn.Module = nn.DataParallel(model, device_ids=self.devices)
        return _SplitReplica(self, model, optimizer, module=module, may_be_unused=True)


class _SplitReplica(WholeReplica):
    """Replica on several devices of one process, each with its own random numbers."""

    def __init__(self, strategy: _OneProcess, *parts: Any, **options: Any) -> None:
        super().__init__(strategy, *parts, **options)
        self._others = strategy.devices[1:]

    def run_microbatches(
        self, passes: Iterable[Pass], compute: Compute, *, trains: bool
    ) -> Iterator[tuple[Tensor, Any] | None]:
        """Runs the micro-batches; also seeds the other devices, each with a different seed."""
        seeded = (replace(one, seed=partial(self._seed, one)) for one in passes)
        return super().run_microbatches(seeded, compute, trains=trains)

    def _seed(self, one: Pass) -> None:
        one.seed()
        for number, device in enumerate(self._others, 1):
            if device.type == "cuda" and device != self.world.device:
                torch.cuda.default_generators[device.index].manual_seed(torch.initial_seed() + number)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Turns torch's error about tensors on different devices into a StrategyError with a hint."""
        try:
            with super().autocast():
                yield
        except RuntimeError as error:
            if "on the same device" not in str(error):
                raise
            raise StrategyError(
                f"the model computes with tensors of different devices between its blocks: {error}",
                hints=["set classes of larger modules in train.blocks, so that each block contains such a computation"],
            ) from error


def _tensors(module: nn.Module, *, recurse: bool = True) -> Iterator[Tensor]:
    yield from module.parameters(recurse)
    yield from module.buffers(recurse)


def _move_own(module: nn.Module, device: torch.device) -> None:
    """Moves the parameters and buffers of a module, not those of its children."""
    if next(module.children(), None) is None:
        module.to(device)
        return
    for parameter in module.parameters(recurse=False):
        parameter.data = parameter.data.to(device)
    for name, buffer in module.named_buffers(recurse=False):
        setattr(module, name, buffer.to(device))


def _to(device: torch.device, _: nn.Module, args: Any, kwargs: Any) -> Any:
    """Moves the inputs of a module to a device (forward pre-hook)."""
    return send_to_device((args, kwargs), device)


def _on(device: torch.device, _: nn.Module, args: Any, outputs: Any) -> Any:
    """Moves the outputs of a module to a device (forward hook)."""
    return send_to_device(outputs, device)
