"""Joining: processes of a launcher become a world, or an error names a contradiction of launcher and recipe."""

import logging
import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.doubles import Elsewhere
from support.forked import in_ranks, refused, train

from ddpforge.errors import SetupError, StrategyError
from ddpforge.interfaces import World
from ddpforge.ranks import join
from ddpforge.ranks.collectives import ProcessGroup
from ddpforge.strategies.ddp import DDP
from ddpforge.strategies.single import Single

only_linux = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has SCHED_BATCH")


def joined() -> World:
    return join.join(train(), DDP())


# ---------------------------------------------------------------------------------------------- a world
def test_all_reduce_sums_over_data_parallel_ranks_and_broadcast_sends_the_value_of_rank_0() -> None:
    def rank(number: int) -> Any:
        world = joined()
        assert world.local_rank == number
        total = world.dp_ranks.all_reduce_sum(torch.tensor([1.0 + number, 2.0], dtype=torch.float64)).tolist()
        said = world.global_ranks.broadcast({"rank": number})
        mine, _ = dist.new_subgroups(1)
        same = replace(world, dp_ranks=ProcessGroup(mine))  # both see the same data
        sums = [ranks.all_reduce_sum(torch.tensor([4.0])).tolist() for ranks in (same.dp_ranks, same.global_ranks)]
        return total, sums, said, (world.global_ranks.rank, world.local_rank, world.global_ranks.size)

    found = in_ranks(2, rank)
    assert [each[:3] for each in found] == [([3.0, 4.0], [[4.0], [8.0]], {"rank": 0})] * 2
    assert [each[3] for each in found] == [(0, 0, 2), (1, 1, 2)]


def test_leave_destroys_the_process_group() -> None:
    def rank(number: int) -> Any:
        world = joined()
        before = dist.is_initialized()
        join.leave(world)
        return (
            before,
            dist.is_initialized(),
            (world.dp_ranks.rank, world.dp_ranks.size, world.is_rank_zero, str(world.device)),
        )

    assert in_ranks(2, rank) == [(True, False, (0, 2, True, "cpu")), (True, False, (1, 2, False, "cpu"))]


@only_linux
def test_threads_of_gloo_have_the_batch_scheduling_policy() -> None:
    def policies() -> dict[str, int]:
        return {thread: os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")}

    def rank(number: int) -> Any:
        before = policies()
        joined()
        new = {thread: policy for thread, policy in policies().items() if thread not in before}
        later = dist.new_group()  # as libraries create their groups
        dist.all_reduce(torch.ones(1), group=later)
        return set(before.values()), set(new.values()), set(policies().values())

    other, batch = os.SCHED_OTHER, os.SCHED_BATCH
    assert in_ranks(2, rank) == [({other}, {batch}, {batch})] * 2


@only_linux
def test_single_process_keeps_its_scheduling_policy() -> None:
    def rank(number: int) -> Any:
        joined()
        return os.sched_getscheduler(0)

    assert in_ranks(1, rank) == [os.SCHED_OTHER]


def test_leave_waits_for_all_ranks(tmp_path: Path) -> None:
    """Without this, a rank that has left would end the ranks that still compute."""

    def rank(number: int) -> Any:
        world = joined()
        left = tmp_path / "left"
        if number:
            for _ in range(50):  # the other one has time to leave
                assert not left.exists()
                time.sleep(0.01)
            join.leave(world)
            return True
        join.leave(world)
        left.touch()
        return True

    assert in_ranks(2, rank) == [True, True]


# ---------------------------------------------------------------------------------------------- launcher's settings
@pytest.mark.parametrize(
    ("variable", "said", "options", "fits"),
    [
        ("MIXED_PRECISION", "no", {"precision": "bf16"}, True),  # the launcher's default
        ("MIXED_PRECISION", "BF16", {"precision": "bf16"}, True),
        ("MIXED_PRECISION", "fp16", {"precision": "bf16"}, False),
        ("MIXED_PRECISION", "fp32", {}, False),
        ("USE_DEEPSPEED", "True", {}, False),
        ("USE_DEEPSPEED", "FALSE", {}, True),
        ("USE_FSDP", "true", {}, False),
        ("DYNAMO_BACKEND", "INDUCTOR", {}, False),
        ("DYNAMO_BACKEND", "NO", {}, True),
        ("GRADIENT_ACCUMULATION_STEPS", "1", {}, True),
        ("GRADIENT_ACCUMULATION_STEPS", "2", {}, False),
    ],
)
def test_launcher_settings_that_contradict_the_recipe_are_rejected(
    monkeypatch: pytest.MonkeyPatch, variable: str, said: str, options: dict[str, str], fits: bool
) -> None:
    def rank(number: int) -> Any:
        if fits:
            join.join(train(**options), Single())
            return ""
        return refused(StrategyError, lambda: join.join(train(**options), Single()))

    monkeypatch.setenv(f"ACCELERATE_{variable}", said)
    monkeypatch.setattr(join, "processes_asked_for", lambda: 1)
    keys = {
        "MIXED_PRECISION": "train.precision",
        "DYNAMO_BACKEND": "train.compile",
        "GRADIENT_ACCUMULATION_STEPS": "train.micro_batch",
    }
    key = keys.get(variable, "strategy.use")
    message = in_ranks(1, rank)[0]
    said = f"the launcher sets ACCELERATE_{variable}={said}, but `{key}` in the recipe decides this | "
    assert message.startswith("" if fits else said)
    assert bool(message) != fits


def test_fewer_processes_than_requested_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(number: int) -> Any:
        return refused(StrategyError, lambda: join.join(train(), Single()))

    monkeypatch.setattr(join, "processes_asked_for", lambda: 2)
    (message,) = in_ranks(1, rank)
    assert message.startswith("`accelerate launch` should start 2 processes but started 1")
    assert " | ddpforge launch RECIPE --nproc 2 | " in message


def test_process_group_of_another_size_than_world_size_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    class Alone(join.Accelerator):  # type: ignore[misc]
        num_processes = 1

    def rank(number: int) -> Any:
        return refused(StrategyError, lambda: join.join(train(), DDP()))

    monkeypatch.setattr(join, "Accelerator", Alone)
    said = "the launcher started 2 processes, but Accelerate formed a process group of 1"
    assert [message.startswith(said) for message in in_ranks(2, rank)] == [True, True]


@pytest.mark.parametrize(
    ("gpus", "ranks", "precision", "native", "said"),
    [
        (1, 1, "bf16", True, []),
        (3, 1, "fp32", True, ["2 more GPUs are idle: ddpforge launch RECIPE --nproc 3"]),
        (3, 3, "fp32", False, []),
        (1, 1, "fp32", False, []),
        (1, 1, "bf16", False, ['Old computes bf16 by emulation, which is slow; train.precision = "fp16" is not']),
    ],
)
def test_faster_use_of_gpus_is_suggested(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    gpus: int,
    ranks: int,
    precision: str,
    native: bool,
    said: list[str],
) -> None:
    """Fakes a host with GPUs."""

    class Believes:
        process_index = local_process_index = 0
        num_processes = ranks
        distributed_type = join.DistributedType.MULTI_GPU

    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation or native)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old")
    monkeypatch.setattr(join, "choose_device", lambda kind, asked: torch.device("cuda", 0))
    monkeypatch.setattr(join, "DeviceCheck", lambda device, timeout: None)
    monkeypatch.setattr(join, "Accelerator", lambda **_: Believes())
    monkeypatch.setattr(join, "ProcessGroup", lambda group, device, keeps, timeout: Elsewhere(ranks))
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with caplog.at_level(logging.INFO, "ddpforge"):
        join.join(train(precision=precision, device="cuda"), DDP())
    assert caplog.messages == said


def test_ranks_restarted_by_plain_torchrun_do_not_connect_to_dead_ranks() -> None:
    """torchrun's store outlives the ranks, with their addresses under the keys that the next ranks read."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def attempt(count: int) -> list[Any]:
        def rank(number: int) -> Any:
            os.environ.update(
                MASTER_PORT=str(store.port),
                TORCHELASTIC_USE_AGENT_STORE="True",
                TORCHELASTIC_RESTART_COUNT=str(count),
            )
            return joined().global_ranks.all_gather_object(number)

        return in_ranks(2, rank)

    assert [attempt(count) for count in range(3)] == [[[0, 1], [0, 1]]] * 3


# ---------------------------------------------------------------------------------------------- closed ports
def test_error_names_a_closed_port_between_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own error comes after `train.collective_timeout`, with C++ frames and without a hint about ports."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nothing listens there
        port = closed.getsockname()[1]
        environment = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GROUP_WORLD_SIZE": "2"}

        def rank(_: int) -> str:
            os.environ.update(environment)
            try:
                join.join(train(collective_timeout="1s"), DDP())
            except SetupError as error:
                return " | ".join([error.message, *error.hints])
            return ""

        (said,) = in_ranks(1, rank)
    assert said.startswith(
        f"rank 1 on {socket.gethostname()} cannot reach the other ranks (rendezvous 127.0.0.1:{port}): "
    )
    assert "frame #" not in said
    assert "open the ports for outgoing connections (ephemeral ports) between all nodes: " in said
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    with pytest.raises(RuntimeError), join._ports_named():  # one node: no port is closed
        raise RuntimeError("gloo: no")
