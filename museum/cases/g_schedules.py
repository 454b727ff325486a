"""Schedules and optimizers: learning rates that are not those of the settings."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch

from museum.case import Case
from museum.cases.a_denominators import classes, numbered
from museum.trainers.common import RATES
from museum.training import ENTROPY, Perceptron, Training

THEME = "Schedules and optimizers"
SGD = partial(torch.optim.SGD, lr=0.5)


def cosine(step: int, steps: int) -> float:
    """Returns the factor of the learning rate: half a cosine from 1 towards 0."""
    return 0.5 * (1 + math.cos(math.pi * step / steps))


def _warm_hf(folder: Path) -> Any:
    from transformers import Trainer, TrainingArguments

    from museum.trainers import hf

    training = Training(data=lambda: numbered(8), micro=2)
    given = hf.arguments_for(training, folder, lr_scheduler_type="constant", warmup_steps=2, optim="sgd")
    model = hf.WithLoss(training.build(), training.loss)
    trainer = Trainer(model, TrainingArguments(**given), train_dataset=training.data(), data_collator=hf.collate)
    trainer.train()
    return RATES[0][0] < RATES[-1][0]


def _warm_forge(folder: Path) -> Any:
    import ddpforge
    from museum.trainers import forge

    training = Training(data=lambda: numbered(8), micro=2)
    recipe = forge.recipe_for(training) | {"schedule": {"use": "constant", "warmup": "2st"}}
    ddpforge.train(
        recipe, model=training.build(), task=forge.Items(training.loss), train_data=training.data(),
        optimizer=training.optimizer, out=folder,
    )  # fmt: skip
    return RATES[0][0] < RATES[-1][0]


CASES = [
    *(
        Case(
            name=f"schedule-{name}",
            wrong="The schedule moves once per process or per micro-batch, and not once per optimizer step.",
            references=["accelerate#2926", "accelerate#2142", "transformers#24088"],
            training=Training(data=lambda: numbered(16), micro=1, optimizer=SGD, factor=cosine, **layout),
            checks=("rates",),
            notes={"accelerated": "documented: https://huggingface.co/docs/accelerate/concept_guides/performance"},
        )
        for name, layout in (("on-ranks", {"ranks": 2}), ("with-accumulation", {"accumulate": 4}))
    ),
    Case(
        name="rates-of-groups",
        wrong="All groups of parameters get the learning rate of the first.",
        references=["DeepSpeed#8201", "DeepSpeed#8171", "peft#3499"],
        training=Training(
            model=Perceptron,
            data=lambda: classes(8),
            loss=ENTROPY,
            optimizer=SGD,
            factor=cosine,
            groups={"last": {"lr": 0.05}},
        ),
        checks=("weights",),
    ),
    Case(
        name="decay-of-groups",
        wrong="A group without weight decay is decayed.",
        references=["DeepSpeed#8179"],
        training=Training(
            model=Perceptron,
            data=lambda: classes(8),
            loss=ENTROPY,
            optimizer=partial(torch.optim.AdamW, lr=0.05, weight_decay=0.5),
            groups={"last": {"weight_decay": 0.0}},
        ),
    ),
    Case(
        name="warm-up-of-a-constant-rate",
        wrong="Warm-up steps are ignored under a constant schedule.",
        references=["unsloth#8464"],
        trials={"forge": _warm_forge, "hf": _warm_hf},
        right=lambda: True,
        notes={"hf": "documented: lr_scheduler_type='constant_with_warmup' is the one that warms up"},
    ),
    Case(
        name="same-curve-adamw",
        wrong="Momenta or the number of updates depend on accumulation and ranks.",
        references=["torchtitan#3029", "llm-foundry#1521"],
        training=Training(
            model=Perceptron,
            data=lambda: classes(48),
            loss=ENTROPY,
            micro=2,
            accumulate=2,
            ranks=2,
            optimizer=partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
            clip=0.1,
        ),
    ),
]
