"""Logging: numbers in the log that are not those of the step."""

from museum.case import Case
from museum.cases.a_denominators import classes, ragged
from museum.training import ENTROPY, Perceptron, Training

THEME = "Logging"

CASES = [
    Case(
        name="logged-loss-on-ranks",
        wrong="The logged loss is that of rank 0.",
        references=["pytorch-lightning#2398", "TRL#6380"],
        training=Training(model=Perceptron, data=lambda: classes(16), loss=ENTROPY, ranks=2),
        checks=("losses",),
        notes={
            "loop": "documented: the tutorial prints the loss of its rank",
            "zero": "documented: the tutorial prints the loss of its rank",
        },
    ),
    Case(
        name="logged-loss-with-accumulation",
        wrong="The logged loss is that of the last micro-batch, or the sum of all.",
        references=["transformers#37766", "transformers#35651"],
        training=Training(model=Perceptron, data=lambda: classes(20), loss=ENTROPY, accumulate=4, counted=True),
        checks=("losses",),
        trainers=["forge", "hf", "pl"],
        tolerance=1e-4,
        notes={"pl": "documented: on_step logs the value of the micro-batch"},
    ),
    Case(
        name="logged-loss-of-tokens-on-ranks",
        wrong="The logged loss is a mean of means over micro-batches and ranks.",
        references=["TRL#6380", "TRL#6478"],
        training=Training(
            model=Perceptron,
            data=lambda: classes(16, ignored=(0, 1, 5, 6, 7, 9)),
            loss=ENTROPY,
            accumulate=2,
            ranks=2,
            counted=True,
        ),
        checks=("losses",),
        trainers=["forge", "hf", "pl"],
        tolerance=1e-4,
        notes={"pl": "documented: on_step logs the value of the micro-batch"},
    ),
]

__all__ = ["ragged"]
