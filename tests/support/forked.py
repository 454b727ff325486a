"""Tests of strategies without a recipe and a run: forked ranks train step by step and return numbers."""

import gc
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch._dynamo  # by the first optimizer of every process: 2 seconds
import torch.distributed.algorithms.ddp_comm_hooks.default_hooks
import torch.distributed.fsdp
import torch.nn.attention.bias
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ddpforge.components.hooks import hooks
from ddpforge.errors import StrategyError
from ddpforge.interfaces import CanonicalState, Strategy, World
from ddpforge.ranks.join import join
from ddpforge.recipe.schema import TrainSection
from ddpforge.testing.ranks import reserved_port
from support.saved_tensors import Saved

hooks("environment")  # otherwise imported by every rank, as the replicas
for module in ("ddp_replica", "fsdp.replica"):
    import_module(f"ddpforge.strategies.{module}")


def in_ranks(
    ranks: int,
    action: Callable[[int], Any],
    *,
    timeout: float = 90,
    forking: Callable[[int], AbstractContextManager[None]] = lambda rank: nullcontext(),
) -> list[Any]:
    """Returns the results of `action(rank)` in each of `ranks` forked processes, which may form a process group.

    A single process has no launcher's environment. A rank that raises fails the test with its traceback. Each process
    is forked within `forking(rank)`. Rank 0 keeps the rendezvous store until the others have ended: they may still be
    joining a group that rank 0 has joined.
    """
    with TemporaryDirectory() as folder, reserved_port() as port:
        answers = [Path(folder) / str(rank) for rank in range(ranks)]
        children: list[int] = []
        stays, leaves = os.pipe()
        for rank, answer in enumerate(answers):
            with forking(rank):
                if (child := os.fork()) == 0:
                    os.close(leaves)
                    _be(rank, ranks, port, action, answer, stays)
            children.append(child)
        os.close(stays)
        _wait(children, timeout, leaves)
        found = [pickle.loads(answer.read_bytes()) if answer.exists() else (False, "ended") for answer in answers]
    failed = [f"rank {rank}: {said}" for rank, (well, said) in enumerate(found) if not well]
    assert not failed, "\n".join(failed)
    return [value for _, value in found]


def _be(rank: int, ranks: int, port: int, action: Callable[[int], Any], answer: Path, stays: int) -> None:
    """Becomes one rank; never returns."""
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    if ranks > 1:
        os.environ.update({name: str(value) for name, value in world.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)  # recreates torch's thread pool, which a fork breaks, before several threads do
    os.environ["OMP_NUM_THREADS"] = "1"  # otherwise accelerate requests more threads of the parent's pool
    gc.freeze()  # keeps the collector off the parent's objects: a scan would copy their memory pages
    try:
        AcceleratorState._reset_state(reset_partial_state=True)  # left over from another test
        torch.manual_seed(0)
        well, found = True, pickle.dumps((True, action(rank)))
    except BaseException:
        well, found = False, pickle.dumps((False, traceback.format_exc()))
    part = answer.with_suffix(".part")
    part.write_bytes(found)
    part.rename(answer)
    if well and rank == 0:
        os.read(stays, 1)  # returns when the parent has closed the other end
    os._exit(0)


def _wait(children: Sequence[int], timeout: float, leaves: int) -> None:
    """Waits for all children and releases the first one last; kills the rest at the timeout."""
    deadline, left = time.monotonic() + timeout, set(children)
    with os.fdopen(leaves, "wb") as door:
        while left:
            for child in list(left):
                if os.waitpid(child, os.WNOHANG)[0]:
                    left.remove(child)
                elif time.monotonic() > deadline:
                    os.kill(child, signal.SIGKILL)
            if left == {children[0]}:
                door.close()
            time.sleep(0.005)


def train(**options: Any) -> TrainSection:
    """Returns the [train] table of a recipe for CPU."""
    return TrainSection.model_validate({"length": "1st", "global_batch": 4, "device": "cpu"} | options)


def set_up(strategy: Strategy, **options: Any) -> World:
    """Joins the other ranks with the options of `train(**options)`; returns the strategy's world."""
    settings = train(**options)
    return strategy.setup(settings, join(settings, strategy))


def refused(kind: type[Exception], action: Callable[[], object]) -> str:
    """Returns message and hints of the error of `kind` that `action` must raise."""
    with pytest.raises(kind) as found:
        action()
    return " | ".join([found.value.message, *found.value.hints])  # type: ignore[attr-defined]


def saved(state: CanonicalState[Any]) -> CanonicalState[Any]:
    """Returns a state of whole tensors in the form in which a checkpoint returns it."""

    def read(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return Saved(value.clone()) if value.ndim else value.clone()

    return CanonicalState(
        {name: Saved(value.clone()) for name, value in state.model.items()},
        {name: {key: read(value) for key, value in entry.items()} for name, entry in state.optimizer.items()},
        dict(state.aliases),
        {name: read(value) for name, value in state.extra_state.items()},
        dict(state.scalars),
    )


class Training:
    """Model and optimizer under a strategy, on this rank; the loss is the sum of the model's outputs."""

    def __init__(
        self,
        strategy: Strategy,
        build: Callable[[], nn.Module],
        optimizer: Callable[[Any], Optimizer] = lambda weights: SGD(weights, lr=1.0),
        blocks: Callable[[Any], Sequence[nn.Module]] = lambda model: (),
        **options: Any,
    ) -> None:
        self.strategy, settings = strategy, train(**options)
        for refusal in strategy.unsupported(settings, int(os.environ.get("WORLD_SIZE", "1")), "cpu"):
            raise StrategyError(refusal.message, hints=refusal.hints)
        self.world = set_up(strategy, **options)
        with strategy.init_context():
            model = build()
        model = strategy.wrap(model, blocks(model))
        self.optimizer = optimizer(model.parameters())
        self.replica: Any = strategy.prepare(model, self.optimizer)
        self.model = self.replica.module

    def backward(self, *inputs: Tensor) -> None:
        """Runs forward and backward, one micro-batch per input."""
        for number, x in enumerate(inputs, 1):
            with self.replica.forward(last=number == len(inputs)):
                loss = self.model(x).sum()
            self.replica.backward(loss)

    def step(self, *inputs: Tensor) -> float:
        """Runs one step; returns the gradient norm."""
        self.backward(*inputs)
        return float(self.replica.step().item())

    def state(self) -> Any:
        return self.replica.state()

    def weights(self) -> dict[str, list[float]]:
        """Returns this rank's shards of the trained weights."""
        return {name: part.tensor.flatten().tolist() for name, part in self.replica.weights.shards().items()}
