"""Checkpoints and resume: a run that was stopped must go on as if it had not been."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from museum.case import Case
from museum.cases.a_denominators import classes
from museum.cases.b_gradients import Tied
from museum.training import ENTROPY, Perceptron, Training

THEME = "Checkpoints and resume"
OPTIONS = "load_state_dict of torch's optimizers restores the options of groups, as documented"
ADAMW = partial(torch.optim.AdamW, lr=0.05)


def stopped(**more: Any) -> dict[str, Any]:
    """Returns a training that is stopped, and the uninterrupted one."""
    given: dict[str, Any] = {
        "model": Perceptron, "data": lambda: classes(24), "loss": ENTROPY, "micro": 2, "epochs": 2,
        "optimizer": ADAMW, "shuffle": True, "stop": 4,
    }  # fmt: skip
    training = Training(**{**given, **more})
    note = "warned: loaders need a state_dict, https://pytorch.org/data/0.8/torchdata.stateful_dataloader.html"
    return {"training": training, "same_as": replace(training, stop=0, rest={}), "notes": {"pl": note}}


HALVING = lambda step, steps: 0.5 ** (step // 4)  # noqa: E731

CASES = [
    Case(
        name="resume-at-an-epoch",
        wrong="The optimizer's state, or the number of the step, is not restored.",
        references=["AutoModel#763", "torchtitan#4168"],
        **stopped(stop=12, shuffle=False),
    ),
    Case(
        name="resume-in-mid-epoch",
        wrong="A resume in the middle of an epoch repeats samples, or leaves some out.",
        references=["accelerate#2016", "accelerate#4071", "pytorch-lightning#19764", "prime-rl#3164"],
        **stopped(stop=16),
        trainers=["forge", "accelerated", "hf", "pl"],
    ),
    Case(
        name="resume-with-workers",
        wrong="The loader's processes begin before its state is loaded: each resume begins the data anew.",
        references=["prime-rl#3332"],
        **stopped(stop=16, workers=2),
        trainers=["forge", "accelerated", "hf", "pl"],
    ),
    Case(
        name="resume-on-ranks-with-accumulation",
        wrong="The position counts micro-batches of one rank as steps, or steps as micro-batches.",
        references=["gpt-neox#308", "accelerate#4012"],
        **stopped(stop=4, accumulate=2, ranks=2, epochs=2),
        trainers=["forge", "accelerated", "hf", "pl"],
    ),
    Case(
        name="resume-with-dropout",
        wrong="Random numbers of dropout are not restored, or something draws from them before.",
        references=["pytorch-lightning#13843", "Megatron-Bridge#5257", "accelerate#4283"],
        **stopped(model=partial(Perceptron, dropout=0.5), stop=16),
        trainers=["forge", "accelerated", "hf", "pl"],
    ),
    Case(
        name="resume-with-schedule",
        wrong="The schedule is loaded without its optimizer, or begins anew.",
        references=["torchtitan#4168", "AutoModel#763"],
        **stopped(stop=12, shuffle=False, factor=HALVING),
    ),
    Case(
        name="resume-with-changed-decay",
        wrong="The checkpoint's weight decay comes back over the configured one.",
        references=["axolotl#4012"],
        training=Training(
            model=Perceptron,
            data=lambda: classes(24),
            loss=ENTROPY,
            epochs=2,
            stop=12,
            optimizer=partial(torch.optim.SGD, lr=0.5, weight_decay=0.5),
            rest={"optimizer": partial(torch.optim.SGD, lr=0.5, weight_decay=0.0)},
        ),
        notes=dict.fromkeys(("loop", "accelerated", "hf", "pl", "zero"), OPTIONS),
    ),
    Case(
        name="resume-with-changed-rate",
        wrong="The checkpoint's learning rate comes back over the configured one.",
        references=["axolotl#4012"],
        training=Training(
            model=Perceptron,
            data=lambda: classes(24),
            loss=ENTROPY,
            epochs=2,
            stop=12,
            optimizer=partial(torch.optim.SGD, lr=0.5),
            rest={"optimizer": partial(torch.optim.SGD, lr=0.05)},
        ),
        notes=dict.fromkeys(("loop", "accelerated", "hf", "pl", "zero"), OPTIONS),
    ),
    Case(
        name="resume-on-fewer-ranks",
        wrong="On another number of ranks the optimizer's state is lost, or samples come twice.",
        references=["fairseq#3117", "accelerate#4105", "DeepSpeed#5405"],
        **stopped(shuffle=False, ranks=2, stop=6, rest={"ranks": 1, "micro": 4}),
    ),
    Case(
        name="resume-of-zero-on-fewer-ranks",
        wrong="A sharded checkpoint resumes on another number of ranks with a fresh optimizer.",
        references=["DeepSpeed#5405", "DeepSpeed#6691"],
        **stopped(shuffle=False, ranks=2, stop=6, strategy="zero1", rest={"ranks": 1, "micro": 4}),
        trainers=["forge", "zero", "hf", "accelerated"],
    ),
    Case(
        name="resume-of-tied-weights",
        wrong="A resume makes two weights of a shared one.",
        references=["AutoModel#2511", "torchtitan#3764"],
        **stopped(model=Tied, stop=12, shuffle=False),
    ),
    Case(
        name="resume-keeps-batchnorm",
        wrong="Running means of BatchNorm begin anew.",
        references=["pytorch-image-models#110"],
        **stopped(model=partial(Perceptron, norm=True), stop=12, shuffle=False),
    ),
]
