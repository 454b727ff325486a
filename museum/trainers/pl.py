"""Lightning's Trainer with a LightningModule whose training_step returns the mean loss of a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from museum.trainers.common import RATES, loader
from museum.training import NotApplicableError, Result, Training

__all__ = ["train"]


def train(training: Training, folder: Path, phase: str) -> Result:
    """Trains; in the phase "rest" from the checkpoint of the phase "first"."""
    import lightning

    result = Result()
    # By default Lightning shuffles the training data of several ranks, whatever the loader says.
    own = training.ranks > 1 and not training.iterable and not training.defaults

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, number: int) -> Tensor:
            loss = training.loss.mean(self.net(batch[0]), batch[1])
            self.log("loss", loss, on_step=True, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, number: int) -> None:
            self.log("eval_loss", training.loss.mean(self.net(batch[0]), batch[1]), sync_dist=True)

        def train_dataloader(self) -> DataLoader[Any]:
            return loader(training, shards=own)

        def val_dataloader(self) -> Any:
            return _evaluations(training, own) if training.eval_data else []

        def configure_optimizers(self) -> Any:
            optimizer = training.build_optimizer(self.net)
            if not training.factor:
                return optimizer
            factor, steps = training.factor, training.steps()
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step, steps))
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    class Watch(lightning.Callback):  # type: ignore[misc]
        seen = 0

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_step > self.seen:
                self.seen = trainer.global_step
                result.losses.append(float(trainer.callback_metrics["loss"]))
                if phase == "first" and self.seen == training.stop:
                    trainer.save_checkpoint(folder / "stop.ckpt")
                    trainer.should_stop = True

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            if not trainer.sanity_checking:
                result.evals.append(float(trainer.callback_metrics["eval_loss"]))

    strategies: dict[str, Any] = {"ddp": "ddp" if training.ranks > 1 else "auto"}
    if training.unused:
        strategies["ddp"] = "ddp_find_unused_parameters_true"
    if training.strategy not in strategies:
        raise NotApplicableError("Lightning's sharded strategies need CUDA")
    lightning.seed_everything(training.seed, workers=True)
    module = Module(training.model())
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=training.ranks,
        strategy=strategies[training.strategy],
        max_epochs=training.epochs,
        accumulate_grad_batches=training.accumulate,
        gradient_clip_val=training.clip,
        precision="bf16-mixed" if training.precision == "bf16" else "32-true",
        val_check_interval=training.eval_steps * training.accumulate or None,
        use_distributed_sampler=not own,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Watch()],
        default_root_dir=folder,
    )
    trainer.fit(module, ckpt_path=str(folder / "stop.ckpt") if phase == "rest" else None)
    result.rates = RATES
    result.weights = Result.of_model(module.net)
    return result


def _evaluations(training: Training, own: bool) -> DataLoader[Any]:
    data: Any = training.eval_data() if training.eval_data else None
    sampler = DistributedSampler(data, shuffle=False) if own else None
    return DataLoader(data, training.micro, sampler=sampler)
