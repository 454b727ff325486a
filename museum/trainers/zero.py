"""DeepSpeed's engine as in its tutorial: `engine.backward(loss)` and `engine.step()` for each micro-batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from museum.trainers.common import RATES, join, loader, reset_seed
from museum.training import NotApplicableError, Result, Training

__all__ = ["train"]


def train(training: Training, folder: Path, phase: str) -> Result:
    """Trains; in the phase "rest" from the checkpoint of the phase "first"."""
    import deepspeed

    join()
    result = Result()
    stage = 0 if training.strategy == "ddp" else int(training.strategy[-1]) if "zero" in training.strategy else -1
    if stage < 0:
        raise NotApplicableError("DeepSpeed has no FSDP")
    config = {
        "train_micro_batch_size_per_gpu": training.micro,
        "gradient_accumulation_steps": training.accumulate,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": training.precision == "bf16"},
    }
    if training.clip or not training.defaults:
        config["gradient_clipping"] = training.clip or 0.0
    bare = training.build()
    optimizer = training.build_optimizer(bare)
    schedule: Any = None
    if training.factor:
        factor, steps = training.factor, training.steps()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step, steps))
    engine, optimizer, _, schedule = deepspeed.initialize(
        model=bare, optimizer=optimizer, config=config, lr_scheduler=schedule, dist_init_required=False
    )
    batches = loader(training, shards=True)
    per_epoch = len(batches) // training.accumulate
    done = 0
    if phase == "rest":
        path, _ = engine.load_checkpoint(str(folder / "ds"))
        if path is None:
            raise RuntimeError("nothing was loaded")
        done = training.stop
        if done % per_epoch:
            raise NotApplicableError("DeepSpeed has no resume of the data in mid-epoch")
    else:
        reset_seed(training)
    for epoch in range(done // per_epoch if per_epoch else 0, training.epochs):
        if hasattr(batches.sampler, "set_epoch"):
            batches.sampler.set_epoch(epoch)
        for inputs, targets in batches:
            loss = training.loss.mean(engine(inputs), targets)
            engine.backward(loss)
            updates = engine.is_gradient_accumulation_boundary()
            engine.step()
            if updates:
                result.losses.append(loss.item())
                result.norms.append(float(engine.get_global_grad_norm() or 0.0))
                if phase == "first" and len(result.losses) == training.stop:
                    engine.save_checkpoint(str(folder / "ds"))
                    return result
        if training.eval_data:
            raise NotApplicableError("DeepSpeed has no evaluation")
    result.rates = RATES
    with deepspeed.zero.GatheredParameters(list(bare.parameters())) if stage == 3 else _nothing():
        result.weights = Result.of_model(bare.float())
    dist.barrier()
    return result


def _nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()
