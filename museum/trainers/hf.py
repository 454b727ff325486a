"""HF Trainer with its documented hooks: `compute_loss_func` for a mean over items, `resume_from_checkpoint`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

from museum.trainers.common import RATES, reset_seed
from museum.training import Loss, NotApplicableError, Result, Training

__all__ = ["WithLoss", "arguments_for", "train"]


class WithLoss(nn.Module):
    """A model that returns its loss, as those of transformers; a mean over the batch."""

    def __init__(self, net: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Returns the outputs, and the loss if there are labels."""
        outputs = self.net(inputs)
        return {"logits": outputs} if labels is None else {"loss": self.loss.mean(outputs, labels), "logits": outputs}


def collate(samples: Any) -> dict[str, Tensor]:
    """Returns a batch with the names that Trainer knows."""
    inputs, labels = default_collate(samples)
    return {"inputs": inputs, "labels": labels}


def arguments_for(training: Training, folder: Path, phase: str = "whole", **more: Any) -> dict[str, Any]:
    """Returns the TrainingArguments of a training; what it does not name has its default."""
    given: dict[str, Any] = {
        "output_dir": str(folder / "hf"),
        "per_device_train_batch_size": training.micro,
        "per_device_eval_batch_size": training.micro,
        "gradient_accumulation_steps": training.accumulate,
        "num_train_epochs": training.epochs,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "ddp_backend": "gloo" if training.ranks > 1 else None,
        "dataloader_pin_memory": False,
        "dataloader_num_workers": training.workers,
        "dataloader_persistent_workers": training.persistent,
        "remove_unused_columns": False,
        "seed": training.seed,
        "bf16": training.precision == "bf16",
    }
    if training.clip or not training.defaults:
        given["max_grad_norm"] = training.clip or 0.0
    if training.unused:
        given["ddp_find_unused_parameters"] = True
    if not training.shuffle:
        given["train_sampling_strategy"] = "sequential"
    if training.stop and phase == "first":
        given |= {"save_strategy": "steps", "save_steps": training.stop}
    if training.eval_data:
        given |= (
            {"eval_strategy": "steps", "eval_steps": training.eval_steps}
            if training.eval_steps
            else {"eval_strategy": "epoch"}
        )
    if training.strategy == "fsdp":
        given |= {"fsdp": "full_shard", "fsdp_config": {"fsdp_version": 2}}
    elif training.strategy != "ddp":
        given["deepspeed"] = {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zero_optimization": {"stage": int(training.strategy[-1])},
            "zero_allow_untested_optimizer": True,
        }
    return given | more


def train(training: Training, folder: Path, phase: str, **more: Any) -> Result:
    """Trains; in the phase "rest" from the checkpoint of the phase "first"."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    arguments = TrainingArguments(**arguments_for(training, folder, phase, **more))
    bare = training.build()
    model = WithLoss(bare, training.loss)
    optimizer = training.build_optimizer(bare)
    factor, steps = training.factor, training.steps() if training.factor else 0
    lambdas = (lambda step: factor(step, steps)) if factor else (lambda step: 1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambdas)

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_save(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = phase == "first"

    options: dict[str, Any] = {}
    if training.counted:
        options["compute_loss_func"] = partial(_loss_of_items, training.loss)
    trainer = Trainer(
        model,
        arguments,
        train_dataset=training.data(),
        eval_dataset=training.eval_data() if training.eval_data else None,
        data_collator=collate,
        optimizers=(optimizer, schedule),
        callbacks=[Stop()],
        **options,
    )
    reset_seed(training)
    trainer.train(resume_from_checkpoint=phase == "rest" or None)
    if training.strategy != "ddp" and isinstance(trainer.model_wrapped, DistributedDataParallel):
        raise NotApplicableError("on CPUs Accelerate runs DDP in place of it, see fsdp-does-not-run")
    history = trainer.state.log_history
    result = Result(rates=RATES)
    result.losses = [row["loss"] for row in history if "loss" in row]
    result.norms = [row["grad_norm"] for row in history if "grad_norm" in row]
    result.evals = [row["eval_loss"] for row in history if "eval_loss" in row]
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if training.strategy == "ddp":
        state = model.state_dict()
    result.weights = {
        name.removeprefix("net."): (one.full_tensor() if hasattr(one, "full_tensor") else one).double().tolist()
        for name, one in state.items()
    }
    return result


def _loss_of_items(loss: Loss, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    total = loss.total(outputs["logits"], labels)
    if num_items_in_batch is None:
        raise NotApplicableError("Trainer gave no num_items_in_batch")
    return total / num_items_in_batch
