"""The loop of Accelerate's documentation: `accumulate`, `clip_grad_norm_`, `save_state`, `skip_first_batches`."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from museum.trainers.common import RATES, loader
from museum.training import NotApplicableError, Result, Training

__all__ = ["train"]


def train(training: Training, folder: Path, phase: str) -> Result:
    """Trains; in the phase "rest" from the checkpoint of the phase "first"."""
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import set_seed

    result = Result()
    options: dict[str, Any] = {}
    if training.strategy == "fsdp":
        from accelerate import FullyShardedDataParallelPlugin

        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    elif training.strategy != "ddp":
        from accelerate import DeepSpeedPlugin

        options["deepspeed_plugin"] = DeepSpeedPlugin(zero_stage=int(training.strategy[-1]))
    if training.unused:
        from accelerate import DistributedDataParallelKwargs

        options["kwargs_handlers"] = [DistributedDataParallelKwargs(find_unused_parameters=True)]
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16" if training.precision == "bf16" else "no",
        gradient_accumulation_steps=1 if training.counted else training.accumulate,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        **options,
    )
    bare = training.build()
    inner = training.build_optimizer(bare)
    schedule: Any = None
    if training.factor:
        factor, total = training.factor, training.steps()
        schedule = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: factor(step, total))
    # `loader` has no DistributedSampler: `prepare` distributes the batches.
    model, optimizer, batches, schedule = accelerator.prepare(bare, inner, loader(training), schedule)
    if training.strategy != "ddp" and isinstance(model, DistributedDataParallel):
        raise NotApplicableError("on CPUs Accelerate runs DDP in place of it, see fsdp-does-not-run")
    done = 0
    if phase == "rest":
        accelerator.load_state(str(folder / "state"))
        done = training.stop
    else:
        set_seed(training.seed, device_specific=True)
    if training.counted:
        return _by_items(training, accelerator, model, optimizer, batches, result)
    steps = done
    for epoch in range(training.epochs):
        per_epoch = -(-len(batches) // training.accumulate)
        if done >= (epoch + 1) * per_epoch:
            continue
        active = batches
        batches.set_epoch(epoch)
        if done > epoch * per_epoch:
            active = accelerator.skip_first_batches(batches, (done - epoch * per_epoch) * training.accumulate)
        for inputs, targets in active:
            with accelerator.accumulate(model):
                loss = training.loss.mean(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients and training.clip:
                    result.norms.append(float(accelerator.clip_grad_norm_(model.parameters(), training.clip)))
                optimizer.step()
                if schedule:
                    schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                steps += 1
                result.losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
                if phase == "first" and steps == training.stop:
                    accelerator.save_state(str(folder / "state"))
                    return result
        if training.eval_data:
            result.evals.append(_evaluate(training, accelerator, model))
    return _finish(result, accelerator, model)


def _by_items(training: Training, accelerator: Any, model: Any, optimizer: Any, batches: Any, result: Result) -> Result:
    """Trains as the guide "Gradient accumulation on training samples of variable size" does."""
    if training.strategy != "ddp":
        raise NotApplicableError("the guide has no such strategy")
    for _ in range(training.epochs):
        source = iter(batches)
        while group := list(islice(source, training.accumulate)):
            items = sum(training.loss.weights(targets).sum() for _, targets in group)
            items = accelerator.gather(torch.as_tensor(items).reshape(1)).sum().item()
            for number, (inputs, targets) in enumerate(group, start=1):
                last = number == len(group)
                waits = not last and accelerator.num_processes > 1
                with accelerator.no_sync(model) if waits else nullcontext():
                    loss = training.loss.total(model(inputs), targets) * accelerator.num_processes / items
                    accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if training.eval_data:
            result.evals.append(_evaluate(training, accelerator, model))
    return _finish(result, accelerator, model)


def _evaluate(training: Training, accelerator: Any, model: Any) -> float:
    """Returns the mean loss of all samples by `gather_for_metrics`, as the documentation's examples compute it."""
    from torch.utils.data import DataLoader

    data: Any = training.eval_data() if training.eval_data else None
    batches = accelerator.prepare(DataLoader(data, training.micro))
    model.eval()
    losses = []
    with torch.no_grad():
        for inputs, targets in batches:
            loss = training.loss.mean(model(inputs), targets)
            losses.append(accelerator.gather_for_metrics(loss.repeat(len(inputs))))
    model.train()
    return torch.cat(losses).mean().item()


def _finish(result: Result, accelerator: Any, model: Any) -> Result:
    result.rates = RATES
    state = accelerator.get_state_dict(model)
    result.weights = {
        name: (one.full_tensor() if hasattr(one, "full_tensor") else one).double().tolist()
        for name, one in state.items()
    }
    return result
