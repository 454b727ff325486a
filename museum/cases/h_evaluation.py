"""Evaluation and metrics: means over other samples, and evaluations that change training."""

from dataclasses import replace
from functools import partial

import torch

from museum.case import Case
from museum.cases.a_denominators import classes, numbered, ragged
from museum.training import ENTROPY, Perceptron, Scalar, Training

THEME = "Evaluation and metrics"
STILL = partial(torch.optim.SGD, lr=1e-12)
DROPOUT = Training(
    model=partial(Perceptron, dropout=0.5), data=lambda: classes(16), loss=ENTROPY,
    eval_data=lambda: classes(6), eval_steps=1, shuffle=True,
)  # fmt: skip
EVALUATING = ["forge", "loop", "accelerated", "hf", "pl"]

CASES = [
    *(
        Case(
            name=f"metric-{name}",
            wrong=wrong,
            references=references,
            training=Training(
                model=partial(Scalar, 1.0), data=lambda: numbered(12), eval_data=data, optimizer=STILL, **layout
            ),
            checks=("evals",),
            trainers=EVALUATING,
        )
        for name, wrong, references, data, layout in (
            (
                "on-three-ranks",
                "Samples that the sampler repeats, so that all ranks have equally many, are counted twice.",
                ["pytorch#25162", "pytorch-lightning#7929", "rf-detr#1507", "accelerate#2007"],
                lambda: numbered(10),
                {"micro": 2, "ranks": 3},
            ),
            (
                "of-an-incomplete-batch",
                "The mean of batch means: the samples of a smaller last batch count more.",
                ["torchtitan#4167", "pytorch-lightning#2924"],
                lambda: numbered(10),
                {"micro": 4},
            ),
            (
                "of-unequal-lengths",
                "The mean of batch means: the tokens of short samples count more.",
                ["torchtitan#4167", "torchtitan#4195", "TRL#6380"],
                lambda: ragged(1, 5, 2, 7),
                {"micro": 1, "counted": True},
            ),
            (
                "of-unequal-lengths-on-ranks",
                "The mean over ranks of means: tokens of the rank with fewer count more.",
                ["TRL#6380", "TRL#6439"],
                lambda: ragged(1, 5, 2, 7),
                {"micro": 1, "ranks": 2, "counted": True},
            ),
        )
    ),
    Case(
        name="evaluation-moves-dropout",
        wrong="An evaluation draws random numbers, so that training goes on with other dropout.",
        references=["torchtitan#4148"],
        training=DROPOUT,
        same_as=replace(DROPOUT, eval_data=None, eval_steps=0),
        notes=dict.fromkeys(
            ("loop", "hf", "pl"),
            "each iterator of a DataLoader draws a seed from the global generator, that of dropout",
        ),
        trainers=EVALUATING,
    ),
    Case(
        name="evaluation-moves-batchnorm",
        wrong="An evaluation changes running means, or leaves the model in evaluation mode.",
        references=["torchtitan#4148"],
        training=replace(DROPOUT, model=partial(Perceptron, norm=True), shuffle=False),
        same_as=replace(DROPOUT, model=partial(Perceptron, norm=True), shuffle=False, eval_data=None, eval_steps=0),
        trainers=EVALUATING,
    ),
]
