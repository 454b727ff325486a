"""Joins the processes that a launcher started: its environment in, a world out. The only home of an Accelerator."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, cast

import psutil
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.commands.config import default_config_file, load_config_from_file
from accelerate.utils import DistributedType, InitProcessGroupKwargs, patch_environment

from ddpforge import compat
from ddpforge.errors import EnvironmentProblem, ExitCode, PeerFailed, StrategyError
from ddpforge.interfaces import Ranks, Strategy, World
from ddpforge.launchers.nodes import NODES, fixed_number
from ddpforge.ranks.arithmetic import set_arithmetic
from ddpforge.ranks.collectives import Alone, Group
from ddpforge.ranks.devices import DeviceCheck, choose_device, device_type, told_cpu
from ddpforge.ranks.interface import choose_interface
from ddpforge.ranks.scheduling import set_batch_policy

if TYPE_CHECKING:
    from ddpforge.recipe.schema import TrainSection

__all__ = ["join", "leave", "limit_waiting"]

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
_LONGEST = 300  # characters of an error of torch's that are shown
_ON_GPUS = "cuda:nccl,cpu:gloo"  # gloo for what is on the host: objects, and the shards of cpu_offload


def join(train: TrainSection, strategy: Strategy) -> World:
    """Joins the gloo (CPU) or NCCL (CUDA) process group that the launcher announced, and checks its size.

    `strategy` only says what else the launcher may have been told, and whether a single process needs a group. All
    ranks of the world see different data; the strategy's `setup` may know better. Raises StrategyError where the
    launcher contradicts the recipe, or the world is not the one that was announced, and EnvironmentProblem where nodes
    are missing or do not reach each other.
    """
    _refuse_fewer_nodes()
    _refuse_contradictions(train, strategy.launcher)
    choose_interface()
    set_arithmetic(train)
    device = choose_device(device_type(train), asked=train.device != "auto" or told_cpu())
    on_cpu = device.type == "cpu"
    if on_cpu and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        set_batch_policy()
    timeout = timedelta(seconds=train.collective_timeout.seconds)
    with _ports_named():
        agreement = DeviceCheck(device, timeout)
    handlers = [InitProcessGroupKwargs(timeout=timeout, **_backend(device))]
    with _ports_named():
        _meet_again(device, timeout)
    with _ports_named(), patch_environment(ACCELERATE_USE_DEEPSPEED="false", ACCELERATE_USE_FSDP="false"):
        # Accelerate forms the world and nothing more; what shards the model is handed its own options.
        accelerator = Accelerator(cpu=on_cpu, mixed_precision="no", kwargs_handlers=[*handlers])
    _check_world(accelerator)
    if strategy.joins_alone and not dist.is_initialized():
        backend = "gloo" if on_cpu else _ON_GPUS
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)

    everyone: Ranks = Alone(device)
    if accelerator.num_processes > 1:
        everyone = Group(cast(dist.ProcessGroup, dist.group.WORLD), device, keeps=agreement, timeout=timeout)
    if device.type == "cuda":
        _look_at_gpus(train, device, everyone.size)
    return World(all=everyone, data=everyone, device=device, local_rank=max(0, accelerator.local_process_index))


def leave(world: World) -> None:
    """Waits for all ranks, then leaves the process group; not called when training failed, where peers may be gone."""
    if dist.is_initialized():
        world.all.barrier()
        dist.destroy_process_group()


def limit_waiting(groups: Iterable[dist.ProcessGroup], train: TrainSection) -> None:
    """Makes `train.collective_timeout` hold in groups that a library has formed, which have torch's own timeout."""
    timeout = timedelta(seconds=train.collective_timeout.seconds)
    for group in groups:
        compat.set_timeout(group, timeout)


@contextmanager
def _ports_named() -> Iterator[None]:
    """Raises EnvironmentProblem in place of torch's error where ranks of several nodes do not reach each other."""
    try:
        yield
    except RuntimeError as error:
        lost = isinstance(error, dist.DistError) or "gloo" in str(error).lower()
        if not lost or int(os.environ.get("GROUP_WORLD_SIZE", "1")) == 1:
            raise
        said = str(error).strip().partition("\n")[0][:_LONGEST]
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        here = f"rank {os.environ.get('RANK', '0')} on {socket.gethostname()}"
        raise EnvironmentProblem(
            f"{here} does not reach the others, who meet at {place}: {said}",
            hints=[
                f"open the ports between all nodes that their systems hand out by themselves: {_handed_out()}",
                "another rank may have ended before it joined: the other nodes' output says so",
            ],
        ) from error


def _handed_out() -> str:
    """The ports that this system gives to programs that name none."""
    try:
        return "-".join(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except OSError:
        return "49152-65535"


def _meet_again(device: torch.device, timeout: timedelta) -> None:
    """Joins ranks that a bare torchrun has started again: its store still holds the addresses of those that died.

    `ddpforge launch` has told torchrun to make a store for every attempt; one that was not told is used with names of
    this attempt's own.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or dist.is_initialized():
        return
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    agents = dist.TCPStore(host, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    store = dist.PrefixStore(f"attempt-{attempt}", agents)  # type: ignore[attr-defined]
    backend = "gloo" if device.type == "cpu" else _ON_GPUS
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def _backend(device: torch.device) -> dict[str, str]:
    """Accelerate's option for the group's backend, where a launcher announced one; for CPUs it knows by itself."""
    return {"backend": _ON_GPUS} if device.type == "cuda" and "LOCAL_RANK" in os.environ else {}


def _look_at_gpus(train: TrainSection, device: torch.device, ranks: int) -> None:
    """Says what could be faster."""
    idle = torch.cuda.device_count() - 1
    if ranks == 1 and idle:
        log.info("%d more GPUs are idle: ddpforge launch RECIPE --nproc %d", idle, idle + 1)
    if train.precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        log.warning('%s computes bf16 by emulation, which is slow; train.precision = "fp16" is not', name)


# ---------------------------------------------------------------------------------------------- what the launcher says
def _refuse_contradictions(train: TrainSection, more: Mapping[str, str]) -> None:
    """The recipe owns training, the launcher owns the world: where the launcher says otherwise, show both."""
    if train.device == "cuda" and told_cpu():
        raise StrategyError(
            'the launcher says ACCELERATE_USE_CPU=true, and the recipe train.device = "cuda"',
            hints=["leave `--cpu` out of the launcher's flags and `accelerate config`, or train.device out"],
        )
    expected = {**_SAYS_NOTHING, "ACCELERATE_MIXED_PRECISION": {"fp32": "no"}.get(train.precision, train.precision)}
    if more:
        expected["ACCELERATE_GRADIENT_CLIPPING"] = "none" if train.clip_norm is None else str(train.clip_norm)
    for variable, wanted in {**expected, **more}.items():
        said = os.environ.get(variable, wanted)
        if said.lower() not in (wanted, _SAYS_NOTHING.get(variable)):
            key = _DECIDED_BY.get(variable, "strategy.use")
            raise StrategyError(
                f"the launcher says {variable}={said}, which `{key}` in the recipe decides",
                hints=[f"leave it out of the launcher's flags and `accelerate config`, and set `{key}`"],
            )


def _check_world(accelerator: Accelerator) -> None:
    promised = int(os.environ.get("WORLD_SIZE", "1"))
    got = accelerator.num_processes
    expected = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
    if got != promised or accelerator.distributed_type not in expected:
        raise StrategyError(
            f"the launcher started {promised} processes, but Accelerate formed a world of {got} "
            f"({accelerator.distributed_type})",
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


def _refuse_fewer_nodes() -> None:
    """Raises on every rank where torchrun was to start a fixed number of nodes, and has gone on without some.

    Its rendezvous compares heartbeats by the nodes' wall clocks, and takes a node with another time for dead.
    """
    asked, got = nodes_asked_for(), int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    if asked is None or got >= asked:
        return
    speaks = os.environ.get("LOCAL_RANK", "0") == "0"
    raises = EnvironmentProblem if speaks else partial(PeerFailed, ExitCode.ENVIRONMENT)
    raise raises(
        f"{got} of {asked} nodes are here: the launcher on {socket.gethostname()} takes the others for dead",
        hints=[
            "compare the clocks of all nodes (`date`), which the rendezvous needs alike: chrony or ntpd",
            "`ddpforge launch --nnodes A:B` if fewer nodes may train",
        ],
    )


def nodes_asked_for() -> int | None:
    """The fixed number of nodes that a rendezvous of torchrun was started for; None where there is no such number.

    `ddpforge launch` passes it on; a bare torchrun has it on its command line.
    """
    if number := os.environ.get(NODES):
        return fixed_number([f"--nnodes={number}"])
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    try:
        words = psutil.Process().parent().cmdline()
    except (psutil.Error, AttributeError):
        return None
    return fixed_number(words) if any("torchrun" in word or "torch.distributed" in word for word in words) else None


def processes_asked_for() -> int:
    """The number of processes that `accelerate launch` was told to start, when this one is the only one it started.

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
    """The value of `flag` on a command line; Accelerate lets people spell flags with underscores too."""
    for word, following in pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == flag:
            return value if equals else following
    return None
