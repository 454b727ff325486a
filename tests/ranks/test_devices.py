"""Devices of ranks: each rank has its own device of the configured type, or an error gives the reason."""

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.doubles import Elsewhere
from support.stages import chosen_with
from torch import nn

from ddpforge.components.installed import Entry
from ddpforge.components.registry import Registry
from ddpforge.errors import StrategyError
from ddpforge.guard.static import check_compile
from ddpforge.interfaces import Strategy, World, device_kind
from ddpforge.interfaces import device as kinds
from ddpforge.ranks import devices, join
from ddpforge.ranks.devices import check, choose_device, device_type
from ddpforge.recipe.schema import TrainSection
from ddpforge.strategies import ddp_replica
from ddpforge.strategies.ddp import DDP
from ddpforge.strategies.deepspeed import DeepSpeed, zero
from ddpforge.strategies.fsdp import FSDP


def train(**options: Any) -> TrainSection:
    return TrainSection.model_validate({"length": "1st", "global_batch": 4} | options)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "RANK", "CUDA_VISIBLE_DEVICES", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns `machine(gpus=2, local_rank=1, …)`, which fakes torch's GPUs and the launcher's variables."""

    def make(*, gpus: int, driver: bool = True, **variables: object) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(devices, "has_nvidia_gpu", lambda: driver)
        for name, value in variables.items():
            monkeypatch.setenv(name.upper(), str(value))

    return make


# ---------------------------------------------------------------------------------------------- this rank's device
def chosen(**options: Any) -> torch.device:
    settings = train(**options)
    return choose_device(device_type(settings), asked=settings.device != "auto")


@pytest.mark.parametrize(
    ("gpus", "driver", "device", "expected"),
    [
        (0, False, "auto", "cpu"),
        (0, True, "cpu", "cpu"),
        (1, True, "auto", "cuda:0"),
        (1, True, "cuda", "cuda:0"),
        (1, True, "cpu", "cpu"),
    ],
)
def test_device_follows_the_recipe_or_the_hardware(
    machine: Any, gpus: int, driver: bool, device: str, expected: str
) -> None:
    machine(gpus=gpus, driver=driver)
    assert str(chosen(device=device)) == expected


def test_unusable_gpu_is_an_error_instead_of_a_fallback_to_the_cpu(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update")

    machine(gpus=0, driver=True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(StrategyError, match=r"this machine has a GPU.*driver on your system is too old") as refused:
        chosen()
    assert refused.value.hints == ('to train on the CPU, set train.device = "cpu"',)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(StrategyError, match=r'train.device = "cuda".*was built without CUDA'):
        chosen(device="cuda")


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_gpus_are_not_used(machine: Any, hidden: str) -> None:
    machine(gpus=0, driver=True, cuda_visible_devices=hidden)
    assert chosen().type == "cpu"


def test_gpu_in_cuda_visible_devices_must_exist(machine: Any) -> None:
    machine(gpus=0, driver=False, cuda_visible_devices="0,1")
    with pytest.raises(StrategyError, match="CUDA_VISIBLE_DEVICES=0,1 names a GPU"):
        chosen()


@pytest.mark.parametrize(("gpus", "rank", "index"), [(2, 0, 0), (2, 1, 1), (1, 1, 0)])
def test_rank_uses_the_gpu_of_its_local_rank_or_its_only_visible_gpu(
    machine: Any, gpus: int, rank: int, index: int
) -> None:
    machine(gpus=gpus, local_rank=rank, local_world_size=2)
    assert chosen() == torch.device("cuda", index)


def test_more_processes_than_gpus_are_rejected(machine: Any) -> None:
    machine(gpus=2, local_rank=0, local_world_size=3)
    with pytest.raises(StrategyError, match="3 processes would share 2 GPUs") as refused:
        chosen()
    assert refused.value.hints[0] == "ddpforge launch RECIPE --nproc 2"


def test_contradiction_of_accelerate_and_the_recipe_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert device_type(train()) == "cpu"
    with pytest.raises(StrategyError, match=r'ACCELERATE_USE_CPU=true, but the recipe has train.device = "cuda"'):
        join.join(train(device="cuda"), DDP())


# ---------------------------------------------------------------------------------------------- other accelerators
class Lone(kinds.CPU):
    """Accelerator of a plugin for which torch has no collectives."""

    name = "lone"
    noun, backend, is_host = "a lone device", None, False


class Many(kinds.DeviceKind):
    """Accelerators of a plugin, in torch's slot for other backends."""

    name, type, noun, backend = "many", "privateuseone", "one of many", "manyccl"


@pytest.fixture
def accelerators(machine: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Returns `accelerators(lone=1, many=2)`, which gives the machine these devices, and no GPU of NVIDIA."""
    machine(gpus=0, driver=False)
    known = {kind.type: kind for kind in (device_kind("cuda"), Many(), Lone(), device_kind("cpu"))}
    monkeypatch.setattr(kinds, "_KINDS", known)

    def make(**counts: int) -> None:
        for name in ("lone", "many"):
            count = counts.get(name, 0)
            kind = known["privateuseone" if name == "many" else name]
            monkeypatch.setattr(kind, "is_available", lambda count=count: count > 0)
            monkeypatch.setattr(kind, "count", lambda count=count: count)

    return make


@pytest.mark.parametrize(
    ("there", "expected", "count"),
    [({"many": 1}, "privateuseone:0", 1), ({"many": 2}, "privateuseone:0", 2), ({}, "cpu", 0)],
)
def test_auto_is_the_accelerator_of_the_machine(
    accelerators: Callable[..., None], there: dict[str, int], expected: str, count: int
) -> None:
    accelerators(**there)
    assert str(chosen()) == expected
    assert devices.accelerators() == count
    assert str(chosen(device="cpu")) == "cpu"


@pytest.mark.parametrize("device", ["lone", "auto"])
def test_several_processes_on_a_device_without_collectives_are_rejected(
    accelerators: Callable[..., None], monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    accelerators(lone=1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(StrategyError, match=r"2 processes cannot train on .*: a lone device trains with") as no:
        choose_device(device if device == "lone" else device_type(train()), asked=device == "lone")
    assert no.value.hints == (
        "start one process: ddpforge run RECIPE",
        'to train on the CPU, set train.device = "cpu"',
    )


def test_each_rank_has_its_own_device_of_a_plugin(
    accelerators: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerators(many=2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert chosen() == torch.device("privateuseone", 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(StrategyError, match="3 processes would share 2 GPUs"):
        chosen()


def test_device_that_torch_cannot_use_is_an_error(accelerators: Callable[..., None]) -> None:
    accelerators()
    with pytest.raises(StrategyError, match=r"torch cannot use one of many: torch .* finds no privateuseone device"):
        choose_device("many", asked=True)


def test_auto_finds_the_plugin_of_another_backend_of_torch(
    accelerators: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lab(kinds.CPU):
        """A device of a laboratory, in torch's slot for other backends."""

        name, type, is_host = "lab", "privateuseone", False

    accelerators()
    monkeypatch.setattr(kinds, "_KINDS", {kind: device_kind(kind) for kind in ("cuda", "cpu")})
    entry = Entry("device", "lab", "lab-device", "1.0", "lab:Lab")
    registry = Registry([entry])
    monkeypatch.setattr(registry, "load", lambda *_: Lab)
    monkeypatch.setattr(devices.Registry, "installed", lambda: registry)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert devices.detected_kind().name == "cpu"
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("privateuseone"))
    assert devices.detected_kind().name == "lab"
    assert device_kind(torch.device("privateuseone", 0)).name == "lab"


def test_process_group_of_other_kinds_has_their_backend(
    accelerators: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forms the group before Accelerate, which would choose another backend."""
    accelerators(many=2)
    formed: list[tuple[str, Any]] = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(device_kind("privateuseone"), "make_current", lambda index: formed.append(("current", index)))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, timeout: formed.append((backend, timeout)))
    join._form(torch.device("privateuseone", 1), timedelta(minutes=2))
    assert formed == [("current", 1), ("privateuseone:manyccl,cpu:gloo", timedelta(minutes=2))]
    formed.clear()
    for device in ("cpu", "cuda"):
        join._form(torch.device(device), timedelta(minutes=2))
    assert formed == [], "Accelerate forms these"


# ---------------------------------------------------------------------------------------------- all ranks' devices
def gpu(uuid: str, host: str = "a", visible: str | None = None, index: int = 0) -> dict[str, Any]:
    return {"kind": "cuda", "host": host, "gpu": [uuid, visible, index]}


CPU: dict[str, Any] = {"kind": "cpu", "host": "b", "gpu": None}


@pytest.mark.parametrize(
    "ranks",
    [
        [gpu("1"), gpu("2")],
        [gpu("1", visible="0"), gpu("2", visible="1")],
        [gpu("1"), gpu("1", host="b")],
        [gpu("1", visible="MIG-1"), gpu("1", visible="MIG-2")],
        [CPU, CPU],
    ],
    ids=["two", "one each", "two hosts", "parts of one", "CPUs"],
)
def test_consistent_devices_are_accepted(ranks: list[dict[str, Any]]) -> None:
    check(ranks)


def test_two_processes_on_one_gpu_are_rejected() -> None:
    with pytest.raises(StrategyError, match="ranks 0 and 2 would share a GPU of a") as refused:
        check([gpu("1"), gpu("2"), gpu("1")])
    assert refused.value.hints[0] == "ddpforge launch RECIPE --nproc 2"


def test_two_processes_share_a_gpu_if_nccl_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepts the variable for NCCL 2.30, which reads it; NCCL 2.28 would fail in the first collective."""
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    check([gpu("1"), gpu("1")])
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    with pytest.raises(StrategyError, match=r"share a GPU .*; NCCL 2\.28\.9 ignores NCCL_MULTI_RANK_GPU_ENABLE"):
        check([gpu("1"), gpu("1")])


def test_ranks_on_gpus_and_cpus_are_rejected() -> None:
    with pytest.raises(StrategyError, match="rank 1 on b has cpu, rank 0 on a has cuda"):
        check([gpu("1"), CPU, gpu("2"), CPU])


def test_ranks_exchange_devices_before_the_process_group_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks raise the error if only one of them has a GPU."""
    store = dist.HashStore()  # type: ignore[attr-defined]

    def joined(rank: int) -> str:
        store.set(f"ddpforge/device/{rank}", json.dumps(CPU if rank else gpu("1")))
        with pytest.raises(StrategyError) as refused:
            check([json.loads(store.get(f"ddpforge/device/{other}")) for other in range(2)])
        return refused.value.message

    with ThreadPoolExecutor() as pool:
        first, second = pool.map(joined, range(2))
    assert first == second

    def rendezvous(url: str, timeout: timedelta) -> Iterator[Any]:
        yield store, 1, 2

    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "x"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "rendezvous", rendezvous)
    with pytest.raises(StrategyError, match="ranks compute on different devices"):
        devices.DeviceCheck(torch.device("cpu"), timedelta(seconds=1))


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", None])
def test_device_check_is_skipped_without_variables_of_a_launcher(
    monkeypatch: pytest.MonkeyPatch, missing: str | None
) -> None:
    asked: list[str] = []

    def rendezvous(url: str, timeout: timedelta) -> Iterator[Any]:
        asked.append(url)
        store = dist.HashStore()  # type: ignore[attr-defined]
        store.set("ddpforge/device/0", json.dumps(CPU))
        yield store, 1, 2

    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "x"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    if missing:
        monkeypatch.delenv(missing)
    monkeypatch.setattr(dist, "rendezvous", rendezvous)
    devices.DeviceCheck(torch.device("cpu"), timedelta(seconds=1))
    assert asked == ([] if missing else ["env://"])
    monkeypatch.setenv("WORLD_SIZE", "1")
    devices.DeviceCheck(torch.device("cpu"), timedelta(seconds=1))
    assert len(asked) == (missing is None)


def test_device_check_waits_for_the_timeout_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[timedelta] = []

    def rendezvous(url: str, timeout: timedelta) -> Iterator[Any]:
        waits.append(timeout)
        raise RuntimeError("nobody came")
        yield

    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "x"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "rendezvous", rendezvous)
    with pytest.raises(RuntimeError, match="nobody came"):
        join.join(train(device="cpu", collective_timeout="7m"), DDP())
    assert waits == [timedelta(minutes=7)]


# ---------------------------------------------------------------------------------------------- GPU index for libraries
FOUR = Elsewhere(ranks=4, rank=3)
SEES_ONE = World(global_ranks=FOUR, dp_ranks=FOUR, local_rank=3, device=torch.device("cuda", 0))


def test_deepspeed_uses_the_visible_gpu_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the local rank to 0 for DeepSpeed, as the fourth rank of a host has one visible GPU with index 0."""
    told: list[str] = []
    monkeypatch.setenv("LOCAL_RANK", "3")

    def initialize(**_: Any) -> tuple[SimpleNamespace]:
        told.append(os.environ["LOCAL_RANK"])
        return (SimpleNamespace(training=True),)

    library = SimpleNamespace(DeepSpeedConfig=lambda _: None, init_distributed=lambda **_: None, initialize=initialize)
    monkeypatch.setattr(zero, "_share", lambda tensors, device, ranks: None)
    zero.start(library, nn.Linear(1, 1), None, {"zero_optimization": {"stage": 1}}, SEES_ONE)  # type: ignore[arg-type]
    assert told == ["0"]


def test_ddp_uses_the_device_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    class Told(Exception):
        pass

    def wrapped(wrapper: object, model: nn.Module, **options: Any) -> None:
        raise Told(options.get("device_ids"))

    monkeypatch.setattr(ddp_replica.DistributedDataParallel, "__init__", wrapped)
    monkeypatch.setattr(DDP, "_share", lambda self, model: None)
    strategy = DDP()
    strategy.setup(train(), SEES_ONE)
    with pytest.raises(Told) as told:
        strategy.prepare(model := nn.Linear(1, 1), torch.optim.SGD(model.parameters()))
    assert told.value.args == (None,)  # DDP uses the model's device


@pytest.mark.parametrize(("launched", "backend"), [(True, "cuda:nccl,cpu:gloo"), (False, None)])
def test_process_group_has_gloo_for_cpu_tensors_in_addition_to_nccl(
    monkeypatch: pytest.MonkeyPatch, machine: Any, launched: bool, backend: str | None
) -> None:
    """Reduces shards under cpu_offload and fp16's overflows, and exchanges objects, over gloo."""
    machine(gpus=1, **({"local_rank": 0} if launched else {}))

    class Told(Exception):
        pass

    def accelerator(*, kwargs_handlers: list[Any], **_: Any) -> None:
        raise Told(kwargs_handlers[0].to_kwargs().get("backend"))

    monkeypatch.setattr(join, "Accelerator", accelerator)
    with pytest.raises(Told) as told:
        join.join(train(precision="fp16"), FSDP(cpu_offload=True))
    assert told.value.args == (backend,)


# ---------------------------------------------------------------------------------------------- CUDA graphs
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
@pytest.mark.parametrize(
    ("strategy", "ranks", "device", "options", "refused"),
    [
        (DDP(), 2, "cuda", {}, None),
        (DDP(), 2, "cuda", {"micro_batch": 2}, None),
        (DDP(), 2, "cuda", {"micro_batch": 1}, "gradients of 2 passes"),
        (DDP(), 1, "cuda", {"virtual_ranks": 4}, "gradients of 4 passes"),
        (DDP(), 2, "cpu", {"micro_batch": 1}, None),
        (FSDP(), 2, "cuda", {}, "FSDP gathers them again"),
        (FSDP(), 2, "cpu", {}, None),
        (DeepSpeed(stage=3), 2, "cuda", {}, "ZeRO stage 3 gathers them again"),
        (DeepSpeed(stage=2), 2, "cuda", {}, None),
        (DeepSpeed(stage=2), 2, "cuda", {"micro_batch": 1}, "gradients of 2 passes"),
    ],
)
def test_cuda_graphs_are_rejected_if_memory_addresses_change(
    mode: str, strategy: Strategy, ranks: int, device: str, options: dict[str, Any], refused: str | None
) -> None:
    settings = train(compile=mode, **options)
    chosen = chosen_with(settings, ranks=strategy.data_ranks(ranks), device=device)
    refusals = [*check_compile(chosen), *strategy.unsupported(settings, ranks, device)]
    messages = [refusal.message for refusal in refusals]
    found = [message for message in messages if "CUDA graphs" in message]  # ZeRO-3 has another message with old torch
    assert len(found) == (refused is not None)
    assert refused is None or refused in found[0]
