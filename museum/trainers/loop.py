"""The loop of torch's tutorials: DistributedDataParallel or fully_shard, DistributedSampler, accumulation."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from museum.trainers.common import RATES, join, loader, reset_seed
from museum.training import NotApplicableError, Result, Training

__all__ = ["train"]


def train(training: Training, folder: Path, phase: str) -> Result:
    """Trains; in the phase "rest" from the checkpoint of the phase "first"."""
    result = Result()
    if training.ranks > 1:
        join()
    model = bare = training.build()
    if training.strategy == "fsdp":
        model = _sharded(bare, training)
    elif training.strategy != "ddp":
        raise NotApplicableError(f"torch has no {training.strategy}")
    elif training.ranks > 1:
        model = DistributedDataParallel(bare, find_unused_parameters=training.unused)
    optimizer = training.build_optimizer(bare)
    schedule = _schedule(training, optimizer)
    batches = loader(training, shards=True)
    first_epoch = 0
    if phase == "rest":
        saved = torch.load(folder / "checkpoint.pt")
        bare.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if schedule:
            schedule.load_state_dict(saved["schedule"])
        first_epoch = saved["epoch"]
        if training.stop * training.accumulate % len(batches):
            raise NotApplicableError("torch has no resume in mid-epoch")
    else:
        reset_seed(training)
    steps = 0
    for epoch in range(first_epoch, training.epochs):
        if isinstance(batches.sampler, DistributedSampler):
            batches.sampler.set_epoch(epoch)
        for number, (inputs, targets) in enumerate(batches, start=1):
            updates = number % training.accumulate == 0 or number == len(batches)
            waits = training.ranks > 1 and not updates and training.strategy == "ddp"
            with model.no_sync() if waits else nullcontext():  # type: ignore[operator,union-attr]
                with torch.autocast("cpu", torch.bfloat16, enabled=training.precision == "bf16"):
                    loss = training.loss.mean(model(inputs), targets)
                (loss / training.accumulate).backward()
            if not updates:
                continue
            if training.clip:
                norm = nn.utils.clip_grad_norm_(model.parameters(), training.clip)
                result.norms.append(float(_whole(norm)))
            optimizer.step()
            optimizer.zero_grad()
            if schedule:
                schedule.step()
            result.losses.append(loss.item())
            steps += 1
            if phase == "first" and steps == training.stop:
                ended = epoch + (number == len(batches))
                state = {"model": bare.state_dict(), "optimizer": optimizer.state_dict(), "epoch": ended}
                torch.save(state | {"schedule": schedule and schedule.state_dict()}, folder / "checkpoint.pt")
                return result
            if training.eval_data and training.eval_steps and steps % training.eval_steps == 0:
                result.evals.append(_evaluate(training, model))
        if training.eval_data and not training.eval_steps:
            result.evals.append(_evaluate(training, model))
    result.rates = RATES
    result.weights = {name: _whole(one).double().tolist() for name, one in bare.state_dict().items()}
    return result


def _schedule(training: Training, optimizer: torch.optim.Optimizer) -> Any:
    factor, steps = training.factor, training.steps() if training.factor else 0
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step, steps)) if factor else None


def _sharded(model: nn.Module, training: Training) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (training.ranks,))
    for module in model.children():
        if list(module.parameters()):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _evaluate(training: Training, model: nn.Module) -> float:
    """Returns the mean loss of the batches, as the tutorials compute it."""
    from torch.utils.data import DataLoader

    data: Any = training.eval_data() if training.eval_data else None
    sampler = DistributedSampler(data, shuffle=False) if training.ranks > 1 else None
    model.eval()
    with torch.no_grad():
        losses = [training.loss.mean(model(one), two) for one, two in DataLoader(data, training.micro, sampler=sampler)]
    model.train()
    total = torch.stack(losses).mean()
    if training.ranks > 1:
        torch.distributed.all_reduce(total)
        total /= training.ranks
    return total.item()
