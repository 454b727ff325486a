"""Settings: keys that are unknown, numbers that can only be mistakes, and loaders that are divided already."""

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from museum.case import Case
from museum.cases.a_denominators import numbered
from museum.trainers import forge, hf
from museum.training import SEEN, Recorded, Training

THEME = "Settings and options"
SMALL = Training(data=lambda: numbered(4), micro=2)


def _accepted(build: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Returns a trial that answers if the settings were accepted; refusals are errors."""

    def trial(folder: Path) -> str:
        build(folder)
        return "accepted"

    return trial


def _forge(**train: Any) -> Callable[[Path], Any]:
    def build(folder: Path) -> None:
        import ddpforge

        recipe = forge.recipe_for(SMALL)
        recipe["optimizer"] = {"use": "sgd", "lr": train.pop("lr", 0.1)}
        recipe["train"].update(train)
        objects: dict[str, Any] = {
            "model": SMALL.build(), "task": forge.Items(SMALL.loss), "train_data": SMALL.data(),
        }  # fmt: skip
        ddpforge.train(recipe, out=folder, **objects)

    return build


def _hf(**more: Any) -> Callable[[Path], Any]:
    def build(folder: Path) -> None:
        from transformers import Trainer, TrainingArguments

        given = {**hf.arguments_for(SMALL, folder), **more}
        model = hf.WithLoss(SMALL.build(), SMALL.loss)
        Trainer(model, TrainingArguments(**given), train_dataset=SMALL.data(), data_collator=hf.collate).train()

    return build


def _lightning(**more: Any) -> Callable[[Path], Any]:
    def build(folder: Path) -> None:
        import lightning

        lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **more)

    return build


def _accelerate(**more: Any) -> Callable[[Path], Any]:
    def build(folder: Path) -> None:
        from accelerate import Accelerator

        Accelerator(cpu=True, **more)

    return build


def _deepspeed(more: Mapping[str, Any]) -> Callable[[Path], Any]:
    def build(folder: Path) -> None:
        import deepspeed

        torch.distributed.init_process_group("gloo")
        model = nn.Linear(2, 2)
        config = {"train_micro_batch_size_per_gpu": 2, **more}
        config = json.loads(json.dumps(config))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)

    return build


def _sgd(lr: float) -> Callable[[Path], Any]:
    return lambda folder: torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)


def _distributed() -> DataLoader[Any]:
    """Returns a loader that is divided among ranks by its sampler, as DDP scripts have it."""
    data = numbered(16)
    return DataLoader(data, 2, sampler=DistributedSampler(data, shuffle=False))


def _numbers() -> int:
    """Returns the number of different samples that all ranks have seen."""
    mine = torch.zeros(17)
    mine[[int(one) for one in chain(*SEEN)]] = 1
    torch.distributed.all_reduce(mine)
    return int((mine > 0).sum())


def _twice_accelerate(folder: Path) -> Any:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(Recorded(), _distributed())
    for inputs, _ in loader:
        model(inputs)
    return _numbers()


def _twice_lightning(folder: Path) -> Any:
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Recorded()

        def training_step(self, batch: Any, number: int) -> Any:
            return self.net(batch[0]).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

        def train_dataloader(self) -> Any:
            return _distributed()

    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Module())
    return _numbers()


def _twice_hf(folder: Path) -> Any:
    from transformers import Trainer, TrainingArguments

    class Own(Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            data = numbered(16)
            sampler = DistributedSampler(data, shuffle=False)  # type: ignore[var-annotated]
            return self.accelerator.prepare(DataLoader(data, 2, sampler=sampler, collate_fn=hf.collate))

    training = Training(model=Recorded, data=lambda: numbered(16), ranks=2)
    model = hf.WithLoss(training.build(), training.loss)
    Own(model, TrainingArguments(**hf.arguments_for(training, folder)), train_dataset=training.data()).train()
    return _numbers()


def _twice_forge(folder: Path) -> Any:
    import ddpforge

    training = Training(model=Recorded, data=lambda: numbered(16), ranks=2)
    objects: dict[str, Any] = {"train_data": _Undivided()}
    ddpforge.train(
        forge.recipe_for(training), model=training.build(), task=forge.Items(training.loss), out=folder,
        optimizer=partial(torch.optim.SGD, lr=1.0), **objects,
    )  # fmt: skip
    return 16


class _Undivided:
    """Builds the loader when ddpforge asks for the dataset, after ranks have joined."""

    def __new__(cls) -> Any:
        data = numbered(16)
        return DataLoader(data, 2, sampler=DistributedSampler(data, num_replicas=2, rank=0, shuffle=False))


CASES = [
    Case(
        name="loader-divided-already",
        wrong="A loader that is divided among ranks is divided again: half of the data are never seen.",
        references=["accelerate#3520", "accelerate#4062", "accelerate#4199"],
        trials={"forge": _twice_forge, "accelerated": _twice_accelerate, "hf": _twice_hf, "pl": _twice_lightning},
        right=lambda: 16,
        ranks=2,
    ),
    Case(
        name="unknown-key",
        wrong="A misspelt key is ignored, and its default applies.",
        references=["unsloth#10452", "LlamaFactory#7412"],
        trials={
            "forge": _accepted(_forge(clip_nrom=1.0)),
            "accelerated": _accepted(_accelerate(gradient_acumulation_steps=2)),
            "hf": _accepted(_hf(max_grad_nrom=1.0)),
            "pl": _accepted(_lightning(gradient_clip_vall=1.0)),
            "zero": _accepted(_deepspeed({"gradient_cliping": 1.0})),
        },
        right=lambda: "refused",
    ),
    Case(
        name="rate-is-nan",
        wrong="A learning rate that is not a number is accepted.",
        references=["https://docs.pytorch.org/docs/stable/generated/torch.optim.SGD.html"],
        trials={
            "forge": _accepted(_forge(lr=math.nan)),
            "loop": _accepted(_sgd(math.nan)),
            "hf": _accepted(_hf(learning_rate=math.nan)),
        },
        right=lambda: "refused",
    ),
    Case(
        name="accumulation-of-zero",
        wrong="An accumulation of 0 micro-batches is accepted.",
        references=["unsloth#10452", "LlamaFactory#7927"],
        trials={
            "forge": _accepted(_forge(micro_batch=0)),
            "accelerated": _accepted(_accelerate(gradient_accumulation_steps=0)),
            "hf": _accepted(_hf(gradient_accumulation_steps=0)),
            "pl": _accepted(_lightning(accumulate_grad_batches=0)),
            "zero": _accepted(_deepspeed({"gradient_accumulation_steps": 0})),
        },
        right=lambda: "refused",
    ),
]
