"""The host never waits for the device within a step: counted on the `meta` device, whose numbers nobody can read."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from forked import train
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from ddpforge.builtin.models.gpt import GPT
from ddpforge.builtin.tasks.language_modelling import LanguageModelling
from ddpforge.data import MicroBatch
from ddpforge.interfaces import Total, World
from ddpforge.ranks.collectives import Alone
from ddpforge.ranks.means import Means
from ddpforge.strategies.single import Single
from ddpforge.training.batchnorm import BatchNormAverager
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


def stepper(optimizer: type[Optimizer], **options: Any) -> Stepper:
    strategy, alone = Single(), Alone(DEVICE)
    strategy.setup(train(**options), World(all=alone, data=alone, device=DEVICE, local_rank=0))
    model: nn.Module = GPT(vocab_size=64, block_size=16, layers=2, heads=2, width=16).to(DEVICE)
    replica = strategy.prepare(model, optimizer(model.parameters(), lr=0.1))  # type: ignore[call-arg]
    return Stepper(
        strategy.world,
        replica,
        LanguageModelling(),
        replica.optimizer,  # type: ignore[attr-defined]
        BatchNormAverager(None),
        seed=0,
        skips=False,
    )


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}], ids=["plain", "clipped"])
@pytest.mark.parametrize(("optimizer", "reads"), [(Fused, 0), (AdamW, 1)], ids=["fused", "not fused"])
def test_a_step_reads_nothing_but_a_norm_for_optimizers_that_cannot(
    optimizer: type[Optimizer], reads: int, options: dict[str, Any]
) -> None:
    """Two micro-batches: inputs, targets and counts are sent without waiting."""
    steps = stepper(optimizer, **options)
    for number in range(1, 4):
        with counted() as found:
            steps.train(number, micro(0), [micro(0), micro(1)], measure=number == 3)
        if number > 1:  # the first one is looked at
            assert (found["read"], found["sent, waiting"]) == (reads, 0), found
            assert found["sent"] <= 6, found


def test_numbers_of_a_step_cross_once_each_way() -> None:
    """Losses and metrics are on the device, clocks and votes on the host; they take turns in the row."""
    ranks = Alone(DEVICE)
    names = [f"{place}{number}" for number in range(6) for place in ("device", "host")]
    known = {name: Total(torch.ones((), dtype=torch.float64), 1) for name in names}
    host = Alone()
    means = Means(host, host.sum)
    assert means(known, {}) == dict.fromkeys(names, 1.0)
    means._ranks, means._add_up = ranks, ranks.sum
    totals = {name: Total(total.sum.to(DEVICE), 1) if "device" in name else total for name, total in known.items()}
    with counted() as found:
        means(totals, {})
    assert dict(found) == {"sent": 1, "read": 1}
