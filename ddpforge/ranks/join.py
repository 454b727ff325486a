"""Joins the processes that a launcher started: reads its environment, forms the process group, returns a `World`.

No other module uses an Accelerator.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import psutil
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.commands.config import default_config_file, load_config_from_file
from accelerate.utils import DistributedType, InitProcessGroupKwargs, patch_environment

from ddpforge import compat
from ddpforge.errors import SetupError, StrategyError
from ddpforge.interfaces import Ranks, Strategy, World, device_kind
from ddpforge.machine import ephemeral_ports
from ddpforge.ranks.backend_flags import set_backend_flags
from ddpforge.ranks.collectives import ProcessGroup, SingleRank
from ddpforge.ranks.devices import DeviceCheck, choose_device, cpu_requested, device_type
from ddpforge.ranks.environment import environment

if TYPE_CHECKING:
    from ddpforge.recipe.schema import TrainSection

__all__ = ["join", "leave", "limit_waiting"]

log = logging.getLogger("ddpforge")

# Default values of the launcher's variables, and the keys of the recipe that decide instead.
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
_LONGEST = 300  # maximum characters of a torch error that are shown


def join(train: TrainSection, strategy: Strategy) -> World:
    """Joins the process group of the launcher over the backend of the device, e.g. NCCL, and checks its size.

    Of `strategy`, this uses only the launcher's variables that it allows, and whether a single process needs a process
    group. In the returned world, all ranks see different data; the strategy's `setup` may change that.

    Raises:
        StrategyError: the launcher contradicts the recipe, or the world size is not the announced one
        SetupError: nodes are missing, or cannot reach each other
    """
    _reject_contradictions(train, strategy.launcher)
    set_backend_flags(train)
    device = choose_device(device_type(train), asked=train.device != "auto" or cpu_requested())
    kind = device_kind(device)
    environment().before_join(device)
    timeout = timedelta(seconds=train.collective_timeout.seconds)
    with _ports_named():
        agreement = DeviceCheck(device, timeout)
    handlers = [InitProcessGroupKwargs(timeout=timeout, **_backend(device))]
    with _ports_named():
        _meet_again(device, timeout)
        _form(device, timeout)
    with _ports_named(), patch_environment(ACCELERATE_USE_DEEPSPEED="false", ACCELERATE_USE_FSDP="false"):
        # Accelerate only forms the process group. Libraries that shard the model receive their options elsewhere.
        on_cpu = not _formed_by_accelerate(device)
        accelerator = Accelerator(cpu=on_cpu, mixed_precision="no", kwargs_handlers=[*handlers])
    _check_world(accelerator)
    if strategy.needs_process_group and not dist.is_initialized():
        if not kind.is_host:
            kind.make_current(device.index)  # a mesh of devices, which has no launcher's LOCAL_RANK, would guess it
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(kind.process_group, store=store, rank=0, world_size=1, timeout=timeout)

    everyone: Ranks = SingleRank(device)
    if accelerator.num_processes > 1:
        everyone = ProcessGroup(cast(dist.ProcessGroup, dist.group.WORLD), device, keeps=agreement, timeout=timeout)
    if not kind.is_host:
        _look_at_devices(train, device, everyone.size)
    return World(
        global_ranks=everyone, dp_ranks=everyone, device=device, local_rank=max(0, accelerator.local_process_index)
    )


def leave(world: World) -> None:
    """Waits for all ranks, then leaves the process group. Do not call it after a failure: other ranks may be gone."""
    if dist.is_initialized():
        world.global_ranks.barrier()
        dist.destroy_process_group()


def limit_waiting(groups: Iterable[dist.ProcessGroup], train: TrainSection) -> None:
    """Sets `train.collective_timeout` in process groups of a library, which otherwise have torch's default timeout."""
    timeout = timedelta(seconds=train.collective_timeout.seconds)
    for group in groups:
        compat.set_timeout(group, timeout)


@contextmanager
def _ports_named() -> Iterator[None]:
    """Replaces torch's error by a SetupError if ranks of several nodes cannot reach each other."""
    try:
        yield
    except RuntimeError as error:
        lost = isinstance(error, dist.DistError) or "gloo" in str(error).lower()
        if not lost or int(os.environ.get("GROUP_WORLD_SIZE", "1")) == 1:
            raise
        said = str(error).strip().partition("\n")[0][:_LONGEST]
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        here = f"rank {os.environ.get('RANK', '0')} on {socket.gethostname()}"
        raise SetupError(
            f"{here} cannot reach the other ranks (rendezvous {place}): {said}",
            hints=[
                f"open the ports for outgoing connections (ephemeral ports) between all nodes: {ephemeral_ports()}",
                "another rank may have ended before it joined: see the output of the other nodes",
            ],
        ) from error


def _meet_again(device: torch.device, timeout: timedelta) -> None:
    """Joins the process group if a bare torchrun has restarted the ranks; otherwise does nothing."""
    # torchrun's store still holds the addresses of the dead ranks: a prefix for each attempt keeps them apart.
    # `ddpforge launch` makes torchrun create a new store for each attempt, which needs no prefix.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or dist.is_initialized():
        return
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    agents = dist.TCPStore(host, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    store = dist.PrefixStore(f"attempt-{attempt}", agents)  # type: ignore[attr-defined]
    kind = device_kind(device)
    if not kind.is_host:
        kind.make_current(device.index)
    dist.init_process_group(kind.process_group, store=store, rank=rank, world_size=size, timeout=timeout)


def _formed_by_accelerate(device: torch.device) -> bool:
    """True if Accelerate forms the process group for this kind of devices itself."""
    return device.type == "cuda"  # for others it would choose the backend by its own rules, or has no rule


def _form(device: torch.device, timeout: timedelta) -> None:
    """Joins the process group of several ranks, if Accelerate would choose another backend; else does nothing."""
    kind = device_kind(device)
    if kind.is_host or _formed_by_accelerate(device) or dist.is_initialized():
        return
    kind.make_current(device.index)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group(kind.process_group, timeout=timeout)


def _backend(device: torch.device) -> dict[str, str]:
    """Returns Accelerate's option for the backend of the process group on GPUs; on CPUs its default is right."""
    launched = _formed_by_accelerate(device) and "LOCAL_RANK" in os.environ
    return {"backend": device_kind(device).process_group} if launched else {}


def _look_at_devices(train: TrainSection, device: torch.device, ranks: int) -> None:
    """Logs hints for more speed: idle devices, slow bf16."""
    kind = device_kind(device)
    idle = kind.count() - 1
    if ranks == 1 and idle:
        log.info("%d more GPUs are idle: ddpforge launch RECIPE --nproc %d", idle, idle + 1)
    if kind.type != "cuda":  # only CUDA emulates it
        return
    if train.precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        log.warning('%s computes bf16 by emulation, which is slow; train.precision = "fp16" is not', name)


# ---------------------------------------------------------------------------------------------- launcher's settings
def _reject_contradictions(train: TrainSection, more: Mapping[str, str]) -> None:
    """Raises StrategyError if a variable of the launcher contradicts the recipe, which alone decides about training."""
    if train.device not in ("auto", "cpu") and cpu_requested():
        raise StrategyError(
            f'the launcher sets ACCELERATE_USE_CPU=true, but the recipe has train.device = "{train.device}"',
            hints=["remove `--cpu` from the launcher's flags and `accelerate config`, or remove train.device"],
        )
    expected = {**_SAYS_NOTHING, "ACCELERATE_MIXED_PRECISION": {"fp32": "no"}.get(train.precision, train.precision)}
    if more:
        expected["ACCELERATE_GRADIENT_CLIPPING"] = "none" if train.clip_norm is None else str(train.clip_norm)
    for variable, wanted in {**expected, **more}.items():
        said = os.environ.get(variable, wanted)
        if said.lower() not in (wanted, _SAYS_NOTHING.get(variable)):
            key = _DECIDED_BY.get(variable, "strategy.use")
            raise StrategyError(
                f"the launcher sets {variable}={said}, but `{key}` in the recipe decides this",
                hints=[f"remove it from the launcher's flags and `accelerate config`, and set `{key}`"],
            )


def _check_world(accelerator: Accelerator) -> None:
    promised = int(os.environ.get("WORLD_SIZE", "1"))
    got = accelerator.num_processes
    expected = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
    if got != promised or accelerator.distributed_type not in expected:
        raise StrategyError(
            f"the launcher started {promised} processes, but Accelerate formed a process group of {got} "
            f"({accelerator.distributed_type})",
            hints=["unset ACCELERATE_* variables, or start with `ddpforge launch RECIPE --nproc N`"],
        )
    asked = processes_asked_for()
    if got < asked:
        raise StrategyError(
            f"`accelerate launch` should start {asked} processes but started {got}; on a machine without GPUs "
            "it starts several only with --multi_gpu",
            hints=[
                f"ddpforge launch RECIPE --nproc {asked}",
                f"torchrun --nproc-per-node {asked} -m ddpforge run RECIPE",
                f"accelerate launch --multi_gpu --num_processes {asked} -m ddpforge run RECIPE",
            ],
        )


def processes_asked_for() -> int:
    """Returns the number of processes that `accelerate launch` should have started, if it started only this one.

    Reads it from the command line or the configuration file of `accelerate launch`, because a single process gets no
    WORLD_SIZE. Returns 1 in all other cases.
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
    """Returns the value of `flag` on a command line; None without it. Flags may have underscores, as for Accelerate."""
    for word, following in pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == flag:
            return value if equals else following
    return None
