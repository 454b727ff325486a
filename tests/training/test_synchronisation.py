"""The host never waits for the device within a step: counted on the `meta` device, whose numbers nobody can read.

Strategies whose step lets the host run ahead: one process, DDP with another rank that is not there, and FSDP on a CPU,
as torch shards nothing on `meta`. Not here are DeepSpeed, which reads norms and flags by itself (tests/gpu count how
often), pipelines, whose stages compute with what others send, and several GPUs in one process.
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
from ddpforge.builtin.tasks.language_modelling import LanguageModelling
from ddpforge.data import MicroBatch
from ddpforge.interfaces import Strategy, Total, World
from ddpforge.ranks.collectives import CollectiveRanks, ProcessGroup, SingleRank
from ddpforge.ranks.metric_reduction import MetricReduction
from ddpforge.strategies.ddp import DDP
from ddpforge.strategies.fsdp import FSDP
from ddpforge.strategies.single import Single
from ddpforge.tools.simulation.fake import fake_world
from ddpforge.training.step import Stepper

DEVICE = torch.device("meta")


class Crossings(TorchDispatchMode):
    """Counts what crosses between host and device; a number that is read is 1, tensors are zeros."""

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
    """Stands in for a fused optimizer, which skips a step that is not finite by itself, on the device."""

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
def without_the_others() -> Iterator[CollectiveRanks]:
    """One of two ranks on the device, of which the other is not there; what DDP compares at its start is left out."""
    with ExitStack() as stack:
        stack.enter_context(fake_world(2))
        for name in ("_verify_param_shape_across_processes", "_sync_module_states"):
            stack.enter_context(patch.object(of_ddp, name, lambda *_, **__: None))
        yield ProcessGroup(dist.group.WORLD, DEVICE)  # type: ignore[arg-type]


def as_it_is(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Stands in for an all-reduce."""
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
        replica.module.register_comm_hook(None, as_it_is)
    return Stepper(strategy.world, replica, LanguageModelling(), seed=0)


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}], ids=["plain", "clipped"])
@pytest.mark.parametrize(("optimizer", "reads"), [(Fused, 0), (AdamW, 1)], ids=["fused", "not fused"])
@pytest.mark.parametrize("strategy", [Single, DDP])
def test_a_step_reads_nothing_but_a_norm_for_optimizers_that_cannot(
    strategy: type[Strategy], optimizer: type[Optimizer], reads: int, options: dict[str, Any]
) -> None:
    """Two micro-batches: inputs, targets and counts are sent without waiting."""
    with without_the_others() if strategy is DDP else nullcontext(SingleRank(DEVICE)) as ranks:
        steps = stepper(strategy(), ranks, optimizer, **options)
        for number in range(1, 5):
            with counted() as found:
                steps.train_step(number, micro(0), [micro(0), micro(1)], measure=number == 4)
            if number > 2:  # the first one is looked at, and in the second DDP orders its buckets
                assert (found["read"], found["sent, waiting"]) == (reads, 0), found
                assert found["sent"] <= 6, found


class Reads(TorchDispatchMode):
    """Counts numbers that are read, wherever they are."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("optimizer", "reads"), [(Fused, 0), (SGD, 1)], ids=["fused", "not fused"])
@pytest.mark.parametrize("no_sync", [False, True])
def test_a_step_of_fsdp_reads_nothing_but_a_norm_for_optimizers_that_cannot(
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
        replica.precision.device = DEVICE
        for _ in range(3):
            with Reads() as found:
                for last in (False, True):
                    with replica.forward(last=last):
                        loss = replica.module(micro(0).data[0]).square().sum()
                    replica.backward(loss)
                replica.step()
        assert found.count == reads


def test_numbers_of_a_step_cross_once_each_way() -> None:
    """Losses and metrics are on the device, clocks and votes on the host; they take turns in the row."""
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
