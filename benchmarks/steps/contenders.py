"""Contenders: each trains the same model on the same samples, and calls `side.done` after every step.

All use torch's AdamW as in their documentation, or all use its fused form. They clip the gradient by its norm if the
session sets `clip`, and print the loss every 10 steps. For the other tools, everything that a bare loop does not have
is off: progress bars, loggers, checkpoints. For ddpforge, all defaults of a recipe are on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from relay import Side
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.utils.data import DataLoader, DistributedSampler, default_collate
from work import LOG_EVERY, LR, MODELS, RECIPE, make_data, make_model

import ddpforge
from ddpforge.interfaces import Callback, RunContext, StepInfo

__all__ = ["CONTENDERS", "Task", "Turns", "by_ddpforge", "loss_of"]

STRATEGIES = {
    "ddp": 'use = "ddp"',
    "fsdp": 'use = "fsdp"',
    "zero1": 'use = "deepspeed"\nstage = 1',
    "zero2": 'use = "deepspeed"\nstage = 2',
    "zero3": 'use = "deepspeed"\nstage = 3',
}


class Task:
    """Task of a contender: name of the work, number of ranks, strategy, and its side of the relay.

    `clip`: maximum norm of the gradient; 0: no clipping. `fused`: use torch's fused AdamW.
    """

    def __init__(
        self, work: str, ranks: int, strategy: str, clip: float, side: Side, folder: Path, *, fused: bool
    ) -> None:
        self.name, self.work, self.ranks, self.strategy, self.clip = work, MODELS[work], ranks, strategy, clip
        self.side, self.folder, self.fused = side, folder, fused
        self.total = side.total
        self.is_main = ranks == 1 or dist.get_rank() == 0

    @property
    def micro_batch(self) -> int:
        """Number of samples per step on one rank."""
        return self.work.batch // self.ranks

    def model(self) -> nn.Module:
        """Builds the model with its initial weights."""
        torch.manual_seed(0)
        model: nn.Module = make_model(self.name)
        return model

    def optimizer(self, model: nn.Module) -> AdamW:
        """Builds AdamW as in tutorials; unless `fused` is set, torch chooses its implementation."""
        return AdamW(model.parameters(), lr=LR, fused=self.fused or None)

    def loader(self, *, shards: bool = False) -> DataLoader[Any]:
        """Builds a loader that shuffles; with `shards`, it distributes the samples over ranks."""
        data: Any = make_data(self.name)
        sampler = DistributedSampler(data) if shards and self.ranks > 1 else None
        collate = getattr(data, "collate", None)
        return DataLoader(data, self.micro_batch, sampler=sampler, shuffle=sampler is None, collate_fn=collate)

    def batches(self, loader: DataLoader[Any]) -> Iterator[tuple[int, Any]]:
        """Returns an iterator over (step, batch), from step 1, over as many epochs as needed."""
        return islice(enumerate(_epochs(loader), 1), self.total)

    def clip_gradients(self, model: nn.Module) -> None:
        """Clips as in torch's documentation."""
        if self.clip:
            nn.utils.clip_grad_norm_(model.parameters(), self.clip)

    def say(self, step: int, loss: Tensor) -> None:
        """Prints the loss every `LOG_EVERY` steps, on rank 0."""
        if step % LOG_EVERY == 0 and self.is_main:
            print(f"step {step} loss {loss.item():.4f}")


def _epochs(loader: DataLoader[Any]) -> Iterator[Any]:
    for epoch in count():
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        yield from loader


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean cross-entropy per sample, or per token."""
    return cross_entropy(logits.flatten(0, -2), targets.flatten())


# ---------------------------------------------------------------------------------------------- by hand
def by_hand(task: Task) -> None:
    """Trains like PyTorch's tutorial of DDP; without DDP on one rank."""
    from torch.nn.parallel import DistributedDataParallel

    bare = task.model()
    model = DistributedDataParallel(bare) if task.ranks > 1 else bare
    optimizer = task.optimizer(model)
    for step, (inputs, targets) in task.batches(task.loader(shards=True)):
        loss = loss_of(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        task.clip_gradients(model)
        optimizer.step()
        task.say(step, loss)
        task.side.done(bare)


def fsdp_by_hand(task: Task) -> None:
    """Trains like the tutorial of FSDP2: every block is a unit, and so is the rest."""
    from torch.distributed.fsdp import fully_shard

    model: Any = task.model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = task.optimizer(model)
    for step, (inputs, targets) in task.batches(task.loader(shards=True)):
        loss = loss_of(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        task.clip_gradients(model)
        optimizer.step()
        task.say(step, loss)
        task.side.done()


def deepspeed_by_hand(task: Task) -> None:
    """Trains like DeepSpeed's tutorial of ZeRO, with torch's optimizer."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": task.micro_batch,
        "zero_optimization": {"stage": int(task.strategy[-1])},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": task.clip,
    }
    model = task.model()
    optimizer = task.optimizer(model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    for step, (inputs, targets) in task.batches(task.loader(shards=True)):
        loss = loss_of(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        task.say(step, loss)
        task.side.done()


# ---------------------------------------------------------------------------------------------- ddpforge
class Turns(Callback):
    """Reports every step to the relay."""

    side: Side  # that of this process

    def on_start(self, run: RunContext) -> None:
        self.model = run.model

    def on_step(self, info: StepInfo) -> None:
        self.side.done(self.model)


def by_ddpforge(task: Task) -> None:
    """Trains with a recipe, with all defaults on."""
    Turns.side = task.side
    recipe = task.folder / f"{task.name}.toml"
    if task.is_main:
        recipe.write_text(
            RECIPE.format(
                name=task.name,
                model=task.work.model,
                task=task.work.task,
                data=task.work.data,
                steps=task.total,
                batch=task.work.batch,
                micro_batch=task.micro_batch,
                strategy=STRATEGIES[task.strategy],
                lr=LR,
                clip=f"clip_norm = {task.clip}" if task.clip else "",
                log_every=LOG_EVERY,
            )
        )
    if task.ranks > 1:
        dist.barrier()
    ddpforge.run(recipe, out=task.folder / "runs")


# ---------------------------------------------------------------------------------------------- others
def by_accelerate(task: Task) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    bare = task.model()
    model, optimizer, loader = accelerator.prepare(bare, task.optimizer(bare), task.loader())
    for step, (inputs, targets) in task.batches(loader):
        loss = loss_of(model(inputs), targets)
        optimizer.zero_grad()
        accelerator.backward(loss)
        if task.clip:
            accelerator.clip_grad_norm_(model.parameters(), task.clip)
        optimizer.step()
        task.say(step, loss)
        task.side.done(bare)


def by_fabric(task: Task) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=task.ranks, strategy="ddp" if task.ranks > 1 else "auto")
    fabric.launch()
    bare = task.model()
    model, optimizer = fabric.setup(bare, task.optimizer(bare))
    for step, (inputs, targets) in task.batches(fabric.setup_dataloaders(task.loader())):
        loss = loss_of(model(inputs), targets)
        optimizer.zero_grad()
        fabric.backward(loss)
        if task.clip:
            fabric.clip_gradients(model, optimizer, max_norm=task.clip, error_if_nonfinite=False)
        optimizer.step()
        task.say(step, loss)
        task.side.done(bare)


def by_lightning(task: Task) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = task.model()

        def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
            inputs, targets = batch
            loss = loss_of(self.model(inputs), targets)
            task.say(self.global_step + 1, loss)
            return loss

        def configure_optimizers(self) -> AdamW:
            return task.optimizer(self)

    class TurnsOfLightning(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            task.side.done(module.model)

    lightning.Trainer(
        accelerator="cpu",
        devices=task.ranks,
        strategy="ddp" if task.ranks > 1 else "auto",
        max_epochs=-1,
        max_steps=task.total,
        gradient_clip_val=task.clip or None,
        callbacks=[TurnsOfLightning()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), task.loader())


def by_trainer(task: Task) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class OurTrainer(Trainer):
        def compute_loss(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Tensor:
            return loss_of(model(inputs["inputs"]), inputs["targets"])

    class TurnsOfTrainer(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            task.side.done(model)

    data: Any = make_data(task.name)

    def collate(samples: Any) -> dict[str, Tensor]:
        inputs, targets = getattr(data, "collate", default_collate)(samples)
        return {"inputs": inputs, "targets": targets}

    arguments = TrainingArguments(
        output_dir=str(task.folder / "trainer"),
        per_device_train_batch_size=task.micro_batch,
        max_steps=task.total,
        learning_rate=LR,
        weight_decay=0.01,  # AdamW's own default
        lr_scheduler_type="constant",
        max_grad_norm=task.clip,
        logging_steps=LOG_EVERY,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo" if task.ranks > 1 else None,
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )
    model = task.model()
    callbacks: list[TrainerCallback] = [TurnsOfTrainer()]
    OurTrainer(model, arguments, train_dataset=data, data_collator=collate, callbacks=callbacks).train()


def _tuned(train: Callable[[Task], None]) -> Callable[[Task], None]:
    """Returns the loop with fused AdamW, and with SCHED_BATCH, so that gloo's threads disturb each other less."""

    def tuned(task: Task) -> None:
        task.fused = True
        if task.ranks > 1:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        train(task)

    return tuned


def _by_hand(train: Callable[[Task], None]) -> dict[str, Callable[[Task], None]]:
    return {"by hand": train, "by hand again": train, "by hand, tuned": _tuned(train)}


CONTENDERS: dict[str, dict[str, Callable[[Task], None]]] = {
    "ddp": {
        **_by_hand(by_hand),
        "Accelerate": by_accelerate,
        "Fabric": by_fabric,
        "Lightning": by_lightning,
        "HF Trainer": by_trainer,
    },
    "fsdp": _by_hand(fsdp_by_hand),
    **{f"zero{stage}": _by_hand(deepspeed_by_hand) for stage in (1, 2, 3)},
}
