"""The base of strategies that let Accelerate form the world; it wraps models that every rank holds whole."""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar, cast

import psutil
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from accelerate import Accelerator
from accelerate.commands.config import default_config_file, load_config_from_file
from accelerate.utils import DistributedType, InitProcessGroupKwargs, KwargsHandler, patch_environment
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddpforge.errors import StrategyError, UsageError
from ddpforge.interfaces import CanonicalState, Exploring, Part, Refusal, SavedTensor, Strategy, World
from ddpforge.strategies import replicated
from ddpforge.strategies.devices import Agreement, choose_device
from ddpforge.strategies.own_state import OwnState
from ddpforge.strategies.precision import precision_for
from ddpforge.strategies.share import share
from ddpforge.strategies.trial import refuse_sparse
from ddpforge.strategies.watch import refuse_loss, watched

if TYPE_CHECKING:
    from ddpforge.recipe.schema import TrainSection

__all__ = ["AcceleratedStrategy"]

T = TypeVar("T")
log = logging.getLogger("ddpforge")

# What the launcher's variables are when nobody set anything, and the keys of the recipe that decide instead.
_SAYS_NOTHING = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_USE_DEEPSPEED": "false",
    "ACCELERATE_USE_FSDP": "false",
    "ACCELERATE_DYNAMO_BACKEND": "no",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
}
_DECIDED_BY = {
    "ACCELERATE_MIXED_PRECISION": "train.precision",
    "ACCELERATE_DYNAMO_BACKEND": "train.compile",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "train.micro_batch",
    "ACCELERATE_GRADIENT_CLIPPING": "train.clip_norm",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "strategy.stage",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "strategy.offload_optimizer",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "strategy.offload_parameters",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "strategy.extra",
}


_ON_GPUS = "cuda:nccl,cpu:gloo"  # gloo for what is on the host: objects, and the shards of cpu_offload


def _backend(device: torch.device) -> dict[str, str]:
    """What Accelerate is told of the group where a launcher announced one; it knows what there is for CPUs."""
    return {"backend": _ON_GPUS} if device.type == "cuda" and "LOCAL_RANK" in os.environ else {}


GRAPHS = ("reduce-overhead", "max-autotune")  # modes of torch.compile


def _one_pass(train: TrainSection) -> str:
    """What makes a step one forward pass of each rank."""
    if train.elastic_shards:
        return f"elastic_shards = ranks, and micro_batch = {train.global_batch} / ranks"
    return f"micro_batch = {train.global_batch} / ranks"


def _told_cpu() -> bool:
    return os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"


class AcceleratedStrategy(Strategy):
    """A replicated model in a world that Accelerate set up.

    A subclass says what it adds with `handlers` (Accelerator options) and checks what it got with `check`; that is
    all a strategy of this family needs. Loaders, schedules and optimizers never enter Accelerate. `group` says that
    a process group is needed even by a single process.
    """

    allows_unused_parameters: ClassVar[bool] = True
    unused_hints: ClassVar[tuple[str, ...]] = ()  # what else to do about parameters that forward does not use
    group: ClassVar[bool] = False

    def __init__(self) -> None:
        self.accelerator: Accelerator
        self._updated = False  # whether the weights have been, since this process began

    # -- for subclasses
    def handlers(self) -> list[KwargsHandler]:
        """Options for the Accelerator."""
        return []

    def check(self, model: nn.Module) -> None:
        """Raises StrategyError when the prepared `model` is not what the recipe asked for."""

    # -- before the loop
    def device_type(self, train: TrainSection) -> str:
        """What the recipe says, or `accelerate launch --cpu`, or a GPU where there is one."""
        return "cpu" if train.device == "auto" and _told_cpu() else super().device_type(train)

    def refusals(self, train: TrainSection, ranks: int, device: str) -> Iterator[Refusal]:
        """SyncBatchNorm on a CPU, and gradients that would add up in memory of CUDA graphs."""
        if train.sync_batchnorm and device != "cuda":
            hint = "torch.nn.SyncBatchNorm has no CPU implementation; leave train.sync_batchnorm out"
            yield Refusal(
                "train.sync_batchnorm", f"train.sync_batchnorm needs CUDA, and this run is on {device}", (hint,)
            )
        together = max(1, train.per_pass(self.data_ranks(ranks))) * self.data_ranks(ranks)
        if device == "cuda" and train.compile in GRAPHS and train.global_batch > together:
            yield Refusal(
                "train.compile",
                f'train.compile = "{train.compile}" replays CUDA graphs, whose memory is used again in every forward '
                f"pass, and gradients of {train.global_batch // together} passes are to add up there",
                ('set train.compile = "default"', f"or let each rank make one pass per step, with {_one_pass(train)}"),
            )

    def setup(self, train: TrainSection) -> World:
        """Joins the gloo (CPU) or NCCL (CUDA) process group that the launcher announced, and checks its size."""
        self._refuse_contradictions(train)
        device = choose_device(self.device_type(train), asked=train.device != "auto" or _told_cpu())
        on_cpu = device.type == "cpu"
        for refusal in self.refusals(train, int(os.environ.get("WORLD_SIZE", "1")), device.type):
            raise StrategyError(refusal.message, hints=refusal.hints)
        timeout = timedelta(seconds=train.timeout.seconds)
        self._agreement = Agreement(device, timeout)
        handlers = [InitProcessGroupKwargs(timeout=timeout, **_backend(device)), *self.handlers()]
        with patch_environment(ACCELERATE_USE_DEEPSPEED="false", ACCELERATE_USE_FSDP="false"):
            # Accelerate forms the world and nothing more; what shards the model is handed its own options.
            self.accelerator = Accelerator(cpu=on_cpu, mixed_precision="no", kwargs_handlers=handlers)
        self._check_world()
        if self.group and not dist.is_initialized():
            backend = "gloo" if on_cpu else _ON_GPUS
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)

        state = self.accelerator
        self.world = World(
            rank=state.process_index,
            size=state.num_processes,
            local_rank=max(0, state.local_process_index),
            device=device,
            data_rank=state.process_index,
            data_size=state.num_processes,
        )
        if device.type == "cuda":
            self._look_at_gpus(train)
        self.train = train
        self.precision = precision_for(train.precision, self.world.device)
        return self.world

    def limit_waiting(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """Makes `train.timeout` hold in groups that a library has formed, which have torch's own timeout."""
        timeout = timedelta(seconds=self.train.timeout.seconds)
        c10d: Any = dist.distributed_c10d
        set_timeout = getattr(dist, "set_timeout", None) or c10d._set_pg_timeout  # its older name
        for group in groups:
            set_timeout(timeout, group)

    def _look_at_gpus(self, train: TrainSection) -> None:
        """Says what could be faster."""
        idle = torch.cuda.device_count() - 1
        if self.world.size == 1 and idle:
            log.info("%d more GPUs are idle: ddpforge launch RECIPE --nproc %d", idle, idle + 1)
        if train.precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
            name = torch.cuda.get_device_name(self.world.device)
            log.warning('%s computes bf16 by emulation, which is slow; train.precision = "fp16" is not', name)

    def launcher_may_say(self, train: TrainSection) -> dict[str, str]:
        """Variables of `accelerate launch` that say what the recipe says, and the value with which they do."""
        return {
            "ACCELERATE_MIXED_PRECISION": {"fp32": "no"}.get(train.precision, train.precision),
            "ACCELERATE_USE_DEEPSPEED": "false",
            "ACCELERATE_USE_FSDP": "false",
            "ACCELERATE_DYNAMO_BACKEND": "no",
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
        }

    def _refuse_contradictions(self, train: TrainSection) -> None:
        """The recipe owns training, the launcher owns the world: where the launcher says otherwise, show both."""
        if train.device == "cuda" and _told_cpu():
            raise StrategyError(
                'the launcher says ACCELERATE_USE_CPU=true, and the recipe train.device = "cuda"',
                hints=["leave `--cpu` out of the launcher's flags and `accelerate config`, or train.device out"],
            )
        for variable, wanted in self.launcher_may_say(train).items():
            said = os.environ.get(variable, wanted)
            if said.lower() not in (wanted, _SAYS_NOTHING.get(variable)):
                key = _DECIDED_BY.get(variable, "strategy.use")
                raise StrategyError(
                    f"the launcher says {variable}={said}, which `{key}` in the recipe decides",
                    hints=[f"leave it out of the launcher's flags and `accelerate config`, and set `{key}`"],
                )

    def _check_world(self) -> None:
        promised = int(os.environ.get("WORLD_SIZE", "1"))
        got = self.accelerator.num_processes
        expected = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
        if got != promised or self.accelerator.distributed_type not in expected:
            raise StrategyError(
                f"the launcher started {promised} processes, but Accelerate formed a world of {got} "
                f"({self.accelerator.distributed_type})",
                hints=["unset ACCELERATE_* variables, or start with `ddpforge launch RECIPE --nproc N`"],
            )
        asked = processes_asked_for()
        if got < asked:
            raise StrategyError(
                f"`accelerate launch` was asked for {asked} processes and started {got}; on a machine without GPUs "
                "it starts several only with --multi_gpu",
                hints=[
                    f"ddpforge launch RECIPE --nproc {asked}",
                    f"torchrun --nproc-per-node {asked} -m ddpforge run RECIPE",
                    f"accelerate launch --multi_gpu --num_processes {asked} -m ddpforge run RECIPE",
                ],
            )

    def wrap(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """Moves the model to the device; converts BatchNorm to SyncBatchNorm where the recipe asks for it."""
        return self.converted(model.to(self.world.device))

    def converted(self, model: nn.Module) -> nn.Module:
        """The model, with SyncBatchNorm for BatchNorm where the recipe asks for it."""
        if not self.train.sync_batchnorm:
            return model
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        return converted

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Moves the model to the device, wraps it, and compiles it where the recipe asks for it."""
        self._parameters = list(model.parameters())
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        self._bare = model
        self._own = OwnState(optimizer)
        self.look_at(model, optimizer)

        prepared = self.distributed(model)
        self.check(prepared)
        if self.train.compile != "off" and not self.train.compile_blocks:
            # In place, and on the wrapper: state keeps its names, and DDP's buckets still overlap with backward.
            prepared.compile(mode=self.train.compile)
        return prepared, optimizer

    def look_at(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Raises StrategyError for a model and an optimizer that do not fit together, before anything is trained."""
        refuse_sparse(optimizer, model, sharded=bool(self.contract.shards))
        for name, parameter in model.named_parameters():
            if parameter.dtype == torch.float64 and self.precision.dtype is not None:
                raise StrategyError(
                    f"parameter `{name}` is float64, which autocast leaves alone, and train.precision is "
                    f'"{self.train.precision}"',
                    hints=['set train.precision = "fp32", or build the model in float32'],
                )

    def distributed(self, model: nn.Module) -> nn.Module:
        """The model, wrapped so that its gradients are averaged over ranks."""
        if dist.is_initialized():
            self._share_constants(model)
        with warnings.catch_warnings():
            # torch 2.15 renamed the option by which DDP leaves buffers alone; older ones know only this name.
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
            # Accelerate would hand DDP the local rank for a device, and ranks may see one GPU each. It needs none.
            with patch_environment(ACCELERATE_BYPASS_DEVICE_MAP="true"):
                prepared: nn.Module = self.accelerator.prepare_model(model)
        return prepared

    def _share_constants(self, model: nn.Module) -> None:
        """Makes buffers and frozen parameters equal; DDP would do it, but for some dtypes it cannot."""
        frozen = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
        constants = frozen | dict(model.named_buffers())
        for tensor in constants.values():
            share(tensor)
        ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        ignore(model, list(constants))

    # -- one step
    def forward(self) -> AbstractContextManager[Any]:
        """Autocast for bf16 and fp16; nothing for fp32. Until the first update, training passes are watched."""
        if self._updated or not self._bare.training:
            return self.autocast()
        return self._watched()

    def autocast(self) -> AbstractContextManager[Any]:
        """What the precision asks for around a forward pass."""
        return self.precision.forward()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        shards = self.contract.shards
        with (
            self.autocast(),
            watched(
                self._bare,
                shards_weights="weights" in shards,
                shards_gradients=bool(shards),
                eager=self.train.compile == "off",
            ),
        ):
            yield

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of `loss`, scaled up for fp16."""
        refuse_loss(loss)
        self.precision.backward(loss)

    def step(self, model: nn.Module, optimizer: Optimizer) -> Tensor:
        """Unscales, measures the norm, clips, updates, clears: in this order at every precision."""
        self._updated = True
        self.precision.unscale(optimizer)
        norm = self.norm(self._gradients())
        if self.train.clip_norm is not None:
            self.clip(self.train.clip_norm, norm)

        self.precision.update(optimizer, norm)
        self._clear()
        return norm

    def explore(self, model: nn.Module, optimizer: Exploring) -> Tensor:
        """Unscales, measures the norm, lets the optimizer move the weights if that is finite, clears."""
        self.precision.unscale(cast(Optimizer, optimizer))
        norm = self.norm(self._gradients())
        self.precision.leave()
        if math.isfinite(number := norm.item()):
            optimizer.explore(number)
        self._clear()
        return norm

    def _clear(self) -> None:
        for parameter in self._trained:  # what zero_grad does, without its 20 µs of bookkeeping
            parameter.grad = None

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """The norm of all gradients together (0-d)."""
        return torch.nn.utils.get_total_norm(gradients)

    def clip(self, largest: float, norm: Tensor) -> None:
        """Scales the gradients, whose norm is `norm`, down to the `largest` norm."""
        torch.nn.utils.clip_grads_with_norm_(self._trained, largest, norm)

    def overflowed(self) -> bool:
        """True when a non-finite norm only lowered fp16's loss scale."""
        return self.precision.overflowed()

    def _gradients(self) -> list[Tensor]:
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if len(gradients) != len(self._trained):
            self._explain_gradients()
        return gradients

    def _explain_gradients(self) -> None:
        """A gradient is missing, or is where none should be; counting them is free, so every step is checked."""
        frozen = {id(p) for p in self._parameters} - {id(p) for p in self._trained}
        thawed = [self._names[id(p)] for p in self._parameters if p.grad is not None and id(p) in frozen]
        if thawed:
            raise StrategyError(
                f"parameter `{thawed[0]}` was frozen when the model was wrapped and gets gradients now; they are not "
                "synchronised over ranks, nor does the optimizer know it",
                hints=["leave requires_grad alone during a run; freeze and unfreeze between runs"],
            )

        unused = [p for p in self._trained if p.grad is None]
        if len(unused) == len(self._trained):
            raise UsageError(
                "the loss depends on no trained parameter: backward gave none of them a gradient",
                hints=["look for `.detach()`, `.item()` or `torch.no_grad()` on the way to the loss"],
            )
        if unused and not self.allows_unused_parameters:
            self.refuse_unused(unused)

    def refuse_unused(self, parameters: Sequence[nn.Parameter]) -> NoReturn:
        """Raises the StrategyError for parameters that forward did not use on this rank."""
        more = f" and {len(parameters) - 1} more" if len(parameters) > 1 else ""
        raise StrategyError(
            f"parameter `{self._names[id(parameters[0])]}`{more} got no gradient on rank {self.world.rank}: "
            "forward did not use it",
            hints=["remove it from the model, or set requires_grad = False", *self.unused_hints],
        )

    # -- agreement
    def total(self, values: Tensor) -> Tensor:
        """`values` summed over data ranks; the first operation on them waits for it, on gloo too.

        Ranks that see the same data give the same values, so that of each data rank's only one counts.
        """
        values = values.to(self.world.device, non_blocking=True)
        if self.world.size == 1:
            return values
        summed: Tensor = functional.all_reduce(values, "sum", cast(dist.ProcessGroup, dist.group.WORLD))
        alike = self.world.size // self.world.data_size
        return summed / alike if alike > 1 else summed

    def broadcast(self, value: T) -> T:
        """Rank 0's `value`."""
        if self.world.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def sync_buffers(self, model: nn.Module) -> None:
        """BatchNorm statistics become their mean over ranks (each rank has seen other data); others rank 0's.

        Running statistics are linear in the batches, so when they are averaged does not change what they become.
        """
        if self.world.size == 1:
            return
        averaged = list(_running_statistics(self._bare))
        ids = {id(buffer) for buffer in averaged}
        for buffer in self._bare.buffers():
            if id(buffer) in ids:
                dist.all_reduce(buffer)
                buffer /= self.world.size
            else:
                share(buffer)

    # -- to disk and back
    def unwrap(self, model: nn.Module) -> nn.Module:
        """The bare model."""
        return self._bare

    def state(self, model: nn.Module, optimizer: Optimizer) -> CanonicalState[Tensor | Part]:
        """Every rank holds everything."""
        return replace(replicated.capture(self._bare, optimizer), shared=self._own.capture())

    def load_state(
        self, model: nn.Module, optimizer: Optimizer, state: CanonicalState[SavedTensor], *, partial: bool = False
    ) -> None:
        """Every rank takes everything."""
        replicated.restore(self._bare, optimizer, state, partial=partial)
        self._own.restore(state.shared)

    def loop_state(self) -> Mapping[str, int | float]:
        """The loss scale of fp16."""
        return self.precision.state()

    def load_loop_state(self, state: Mapping[str, int | float]) -> None:
        """The loss scale of fp16."""
        self.precision.load_state(state)

    def close(self) -> None:
        """Waits for all ranks, then leaves the process group."""
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()


def _running_statistics(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            for buffer in (module.running_mean, module.running_var):
                if buffer is not None:
                    yield buffer


def processes_asked_for() -> int:
    """How many processes `accelerate launch` was told to start, when this process is the only one it started.

    It hands a lone process no WORLD_SIZE: only its command line and its configuration file say what was wanted.
    """
    if "WORLD_SIZE" in os.environ or "ACCELERATE_MIXED_PRECISION" not in os.environ:
        return 1
    try:
        words = psutil.Process().parent().cmdline()
    except (psutil.Error, AttributeError):
        return 1
    if not any("accelerate" in word for word in words):
        return 1
    if number := _value_of("--num-processes", words):
        return int(number)

    file = _value_of("--config-file", words)
    if file is None and ("--cpu" in words or not os.path.isfile(default_config_file)):
        return 1
    return int(load_config_from_file(file).num_processes)


def _value_of(flag: str, words: Sequence[str]) -> str | None:
    """What a command line says after `flag`, which Accelerate lets people spell with underscores too."""
    for word, following in pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == flag:
            return value if equals else following
    return None
