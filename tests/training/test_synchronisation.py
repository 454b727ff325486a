"""Checks that the host does not wait for the device within a step, on the `meta` device, whose values cannot be read.

Covers the strategies with an asynchronous step: one process, DDP with one simulated rank, and FSDP on a CPU, because
torch does not shard on `meta`. Not covered: DeepSpeed, which reads norms and flags itself (tests/gpu counts these
reads), pipelines, whose stages depend on data of other ranks, and several GPUs in one process.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.parallel.distributed as of_ddp
from support.forked import train
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from ddpforge.builtin.models.gpt import GPT
from ddpforge.builtin.tasks.language_modeling import LanguageModeling
from ddpforge.data import MicroBatch
from ddpforge.interfaces import Strategy, Total, World
from ddpforge.ranks.collectives import CollectiveRanks, ProcessGroup, SingleRank
from ddpforge.ranks.metric_reduction import MetricReduction
from ddpforge.strategies.ddp import DDP
from ddpforge.strategies.fsdp import FSDP
from ddpforge.strategies.precision import precision_for
from ddpforge.strategies.single import Single
from ddpforge.tools.simulation.fake import fake_world
from ddpforge.training.step import Stepper

DEVICE = torch.device("meta")


class Crossings(TorchDispatchMode):
    """Counts transfers between host and device. A value read from the device is 1, a tensor is zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device == DEVICE:
            self.found["read"] += 1
            return 1.0
        if func is torch.ops.aten._to_copy.default and args[0].device == DEVICE != kwargs.get("device", DEVICE):
            self.found["read"] += 1
            return torch.zeros(args[0].shape, dtype=args[0].dtype)
        if func is torch.ops.aten.copy_.default and args[1].device == DEVICE != args[0].device:
            self.found["read"] += 1
            return args[0]
        out = func(*args, **kwargs)
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            copies = func is torch.ops.aten.copy_.default
            source = args[1] if copies else args[0]
            waits = not (args[2] if copies and len(args) > 2 else kwargs.get("non_blocking", False))
            if source.device != DEVICE and out.device == DEVICE:
                self.found["sent, waiting" if waits else "sent"] += 1
        return out


class Fused(SGD):
    """Replaces a fused optimizer, which skips a nonfinite step on the device."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None) -> None: ...


@contextmanager
def counted() -> Iterator[Counter[str]]:
    with Crossings() as crossings:
        yield crossings.found


def micro(number: int) -> MicroBatch:
    tokens = torch.randint(0, 64, (4, 17))
    return MicroBatch((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), 4, 8, number == 1, 0, number)


@contextmanager
def one_simulated_rank() -> Iterator[CollectiveRanks]:
    """Yields one of two ranks on the device; the other does not exist. Skips the checks of DDP at its start."""
    with ExitStack() as stack:
        stack.enter_context(fake_world(2))
        for name in ("_verify_param_shape_across_processes", "_sync_module_states"):
            stack.enter_context(patch.object(of_ddp, name, lambda *_, **__: None))
        yield ProcessGroup(dist.group.WORLD, DEVICE)  # type: ignore[arg-type]


def identity_hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Replaces an all-reduce: returns the bucket unchanged."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def gpt() -> GPT:
    return GPT(vocab_size=64, block_size=16, layers=2, heads=2, width=16)


def stepper(strategy: Strategy, ranks: CollectiveRanks, optimizer: type[Optimizer], **options: Any) -> Stepper:
    strategy.setup(train(**options), World(global_ranks=ranks, dp_ranks=ranks, device=DEVICE, local_rank=0))
    model: nn.Module = gpt().to(DEVICE)
    replica: Any = strategy.prepare(model, optimizer(model.parameters(), lr=0.1))  # type: ignore[call-arg]
    if ranks.size > 1:
        replica.module.register_comm_hook(None, identity_hook)
    return Stepper(strategy.world, replica, LanguageModeling(), seed=0)


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}], ids=["plain", "clipped"])
@pytest.mark.parametrize(("optimizer", "reads"), [(Fused, 0), (AdamW, 1)], ids=["fused", "not fused"])
@pytest.mark.parametrize("strategy", [Single, DDP])
def test_a_step_reads_at_most_the_norm_from_the_device(
    strategy: type[Strategy], optimizer: type[Optimizer], reads: int, options: dict[str, Any]
) -> None:
    """Two micro-batches. Inputs, targets and counts are sent asynchronously."""
    with one_simulated_rank() if strategy is DDP else nullcontext(SingleRank(DEVICE)) as ranks:
        steps = stepper(strategy(), ranks, optimizer, **options)
        for number in range(1, 5):
            with counted() as found:
                steps.train_step(number, micro(0), [micro(0), micro(1)], measure=number == 4)
            if number > 2:  # the first step is checked, and in the second DDP reorders its buckets
                assert (found["read"], found["sent, waiting"]) == (reads, 0), found
                assert found["sent"] <= 6, found


class Reads(TorchDispatchMode):
    """Counts values that are read from any device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("optimizer", "reads"), [(Fused, 0), (SGD, 1)], ids=["fused", "not fused"])
@pytest.mark.parametrize("no_sync", [False, True])
def test_a_step_of_fsdp_reads_at_most_the_norm_from_the_device(
    no_sync: bool, optimizer: type[Optimizer], reads: int
) -> None:
    """On the CPU, with an update as on a GPU."""
    with fake_world(2) as world:
        strategy = FSDP(no_sync=no_sync)
        strategy.setup(train(clip_norm=1.0), world)
        with strategy.init_context():
            model = gpt()
        model = strategy.wrap(model, list(model.blocks))  # type: ignore[assignment]
        replica: Any = strategy.prepare(model, optimizer(model.parameters(), lr=0.1))  # type: ignore[call-arg]
        replica.precision = precision_for("fp32", DEVICE)
        for _ in range(3):
            with Reads() as found:
                for last in (False, True):
                    with replica.forward(last=last):
                        loss = replica.module(micro(0).data[0]).square().sum()
                    replica.backward(loss)
                replica.step()
        assert found.count == reads


def test_metrics_of_a_step_are_transferred_once_in_each_direction() -> None:
    """Losses and metrics are on the device, clocks and requests on the host. The row interleaves them."""
    ranks = SingleRank(DEVICE)
    names = [f"{place}{number}" for number in range(6) for place in ("device", "host")]
    known = {name: Total(torch.ones((), dtype=torch.float64), 1) for name in names}
    host = SingleRank()
    means = MetricReduction(host, host.all_reduce_sum)
    assert means(known, {}) == dict.fromkeys(names, 1.0)
    means._ranks, means._add_up = ranks, ranks.all_reduce_sum
    totals = {name: Total(total.sum.to(DEVICE), 1) if "device" in name else total for name, total in known.items()}
    with counted() as found:
        means(totals, {})
    assert dict(found) == {"sent": 1, "read": 1}
