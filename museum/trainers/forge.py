"""ddpforge by `ddpforge.train` with the same objects; on each rank, as under torchrun."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from museum.trainers.common import RATES, rank
from museum.training import Loss, Result, Training

__all__ = ["Items", "recipe_for", "train"]

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"use": "ddp"},
    "fsdp": {"use": "fsdp"},
    **{f"zero{stage}": {"use": "deepspeed", "stage": stage} for stage in (1, 2, 3)},
}


def _task() -> Any:
    from ddpforge.interfaces import Task

    return Task


class Items(_task()):  # type: ignore[misc]
    """Task of a loss: the sum over a batch, and the number of its items."""

    def __init__(self, loss_of: Loss) -> None:
        self.loss_of = loss_of

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Returns the sum of the losses, and the outputs."""
        outputs = model(batch[0])
        return self.loss_of.total(outputs, batch[1]), outputs

    def count(self, batch: Any) -> Tensor:
        """Returns the weight of the batch's items."""
        return self.loss_of.weights(batch[1]).sum()


def recipe_for(training: Training, **train: Any) -> dict[str, Any]:
    """Returns the recipe of a training; what it does not name has its default."""
    recipe: dict[str, Any] = {
        "name": "museum",
        "strategy": STRATEGIES[training.strategy],
        "data": {"workers": training.workers},
        "train": {
            "length": f"{training.epochs}ep",
            "global_batch": training.batch,
            "micro_batch": training.micro,
            "device": "cpu",
            "seed": training.seed,
            "precision": training.precision,
            **training.forge,
            **train,
        },
        "track": {"every": "1st"},
        "checkpoint": {"every": f"{training.stop}st" if training.stop else "1000st"},
    }
    if not training.iterable:
        recipe["data"]["sampler"] = {"use": "shuffled" if training.shuffle else "sequential"}
    if training.unused:
        recipe["strategy"] = {"use": "ddp", "find_unused_parameters": True}
    if training.groups:
        recipe["optimizer"] = {
            "use": f"torch.optim:{training.optimizer.func.__name__}",
            **training.optimizer.keywords,
            "groups": {name: {"parameters": [f"{name}.*"], **options} for name, options in training.groups.items()},
        }
    if training.clip:
        recipe["train"]["clip_norm"] = training.clip
    if training.eval_steps:
        recipe["train"]["eval_every"] = f"{training.eval_steps}st"
    if training.checkpointing:
        recipe["train"]["activation_checkpointing"] = True
    return recipe


def train(training: Training, folder: Path, phase: str, **more: Any) -> Result:
    """Trains; in the phase "first" SIGTERM stops the run, and the same call resumes it."""
    import ddpforge
    from ddpforge.interfaces import Callback, StepInfo

    rows: list[dict[str, float]] = []
    evals: list[float] = []

    class Watch(Callback):
        def on_step(self, info: StepInfo) -> None:
            rows.append(dict(info.metrics))
            if phase == "first" and info.step == training.stop - 1:  # the step that follows is finished
                os.kill(os.getpid(), signal.SIGTERM)  # as a scheduler does

        def on_eval(self, step: int, metrics: Any) -> None:
            evals.append(metrics["eval/loss"])

    objects: dict[str, Any] = {}
    if training.factor:
        factor, steps = training.factor, training.steps()
        objects["schedule"] = lambda step: factor(step, steps)
    if training.eval_data:
        objects["eval_data"] = training.eval_data()
    if not training.groups:
        objects["optimizer"] = training.optimizer
    objects |= more.pop("objects", {})
    model = training.build()
    outcome = ddpforge.train(
        recipe_for(training, **more.pop("train", {})),
        model=model,
        task=Items(training.loss),
        train_data=training.data(),
        callbacks=[Watch()],
        out=folder / "runs",
        **more,
        **objects,
    )
    result = Result(rates=RATES, evals=evals)
    if phase == "first":
        return result
    result.losses = [row["train/loss"] for row in rows]
    result.norms = [row["train/grad_norm"] for row in rows if "train/grad_norm" in row]
    if rank() and training.strategy == "ddp":
        result.weights = Result.of_model(model)
    elif rank() == 0:
        trained = ddpforge.load(outcome.folder, model=training.build(), task=Items(training.loss)).model()
        result.weights = Result.of_model(trained)
    return result
