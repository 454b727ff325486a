"""Gradients and reductions: doubled, missing, of a shard, or of other memory."""

import os
from functools import partial

import torch
from torch import Tensor, nn

from museum.case import Case
from museum.cases.a_denominators import classes, numbered
from museum.training import ENTROPY, Perceptron, Rows, Scalar, Training

THEME = "Gradients and reductions"
SGD = partial(torch.optim.SGD, lr=1.0)
DDP = "https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html"
BUFFERS = f"documented: buffers are broadcast at the begin of a forward pass, {DDP}"
SHARDED = ["forge", "loop", "accelerated", "hf"]
ZERO = ["forge", "accelerated", "hf", "zero"]


class Branches(nn.Module):
    """Two weights; a sample takes `b` if its number is at least 5, else `a`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Scalar(), Scalar()

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the outputs of the branches that the batch needs."""
        high = inputs >= 5
        if high.all() or not high.any():
            return (self.b if high.all() else self.a)(inputs)  # type: ignore[no-any-return]
        return torch.where(high, self.b(inputs), self.a(inputs))


class Transposed(nn.Module):
    """A weight whose memory is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.arange(12.0).reshape(3, 4) / 12).t())

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns inputs @ weight."""
        return inputs @ self.weight


class Gaps(nn.Module):
    """A weight whose memory has gaps: every other column of a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.column = nn.Parameter((torch.arange(512.0).reshape(4, 128) / 512)[:, ::2])
        self.bias = nn.Parameter(torch.zeros(64))

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns 64 outputs per sample."""
        return (inputs @ self.column).sin() + self.bias


class Tied(nn.Module):
    """Input and output layer are one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.last = nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns four outputs per sample."""
        return self.last(self.first(inputs).tanh())  # type: ignore[no-any-return]


class Reused(nn.Module):
    """A module that a forward pass uses twice."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns three outputs of two encodings of each sample."""
        return self.head(torch.cat([self.encoder(inputs), self.encoder(inputs.flip(1))], dim=1).tanh())  # type: ignore[no-any-return]


def other_start() -> nn.Module:
    """Returns a model that each rank begins with other weights."""
    torch.manual_seed(int(os.environ.get("RANK", "0")))
    return Perceptron()


def _classified(**more: object) -> Training:
    return Training(**{"model": Perceptron, "data": lambda: classes(16), "loss": ENTROPY, "ranks": 2, **more})  # type: ignore[arg-type]


CASES = [
    Case(
        name="clip-not-asked",
        wrong="A gradient is clipped though the settings name no clipping.",
        references=[
            "DeepSpeed#8068",
            "accelerate#3807",
            "https://huggingface.co/docs/transformers/main_classes/trainer",
        ],
        training=Training(
            data=lambda: Rows(torch.full((4, 1), 100.0), torch.zeros(4, 1, dtype=torch.long)), defaults=True
        ),
        notes={
            "hf": "documented: max_grad_norm is 1.0 by default",
            "zero": "documented: gradient_clipping is 1.0 by default",
        },
    ),
    Case(
        name="clip-with-accumulation",
        wrong="Clipping acts on the gradient of a micro-batch or of a rank and not of the step.",
        references=["DeepSpeed#5150", "axolotl#1382"],
        training=_classified(micro=2, accumulate=2, clip=0.1),
    ),
    Case(
        name="clip-fsdp",
        wrong="Each rank clips by the norm of its shard: too large a factor, another one on each rank.",
        references=["LlamaFactory#10640", "pytorch#170862", "pytorch-lightning#19235"],
        training=_classified(strategy="fsdp", clip=0.1),
        trainers=SHARDED,
    ),
    *(
        Case(
            name=f"clip-zero{stage}",
            wrong=f"Under ZeRO-{stage} clipping has no effect, or another one than on one process.",
            references=["DeepSpeed#5150", "accelerate#2791"],
            training=_classified(strategy=f"zero{stage}", clip=0.1),
            trainers=ZERO,
        )
        for stage in (1, 2, 3)
    ),
    Case(
        name="norm-reported",
        wrong="The reported norm of the gradient is that of a rank or of a shard.",
        references=["LlamaFactory#10640", "VeOmni#862"],
        training=_classified(micro=2, accumulate=2, clip=100.0),
        checks=("norms",),
        trainers=SHARDED,
    ),
    Case(
        name="norm-reported-fsdp",
        wrong="The reported norm of the gradient is that of a shard.",
        references=["LlamaFactory#10640", "VeOmni#862"],
        training=_classified(strategy="fsdp", clip=100.0),
        checks=("norms",),
        trainers=SHARDED,
    ),
    Case(
        name="tied-weights-norm",
        wrong="A weight that two layers share counts twice in the norm, so the gradient is clipped too much.",
        references=["Megatron-LM#7227", "Megatron-LM#7228"],
        training=_classified(model=Tied, clip=0.1),
    ),
    Case(
        name="tied-weights-fsdp",
        wrong="Sharding unties a shared weight: each copy gets half of the gradient.",
        references=["accelerate#4171", "torchtitan#1524"],
        training=_classified(model=Tied, strategy="fsdp"),
        trainers=SHARDED,
    ),
    *(
        Case(
            name=f"module-used-twice-{strategy}",
            wrong="A module that is used twice in a forward pass gets the gradient of one use only.",
            references=["DeepSpeed#8224", "DeepSpeed#7718"],
            training=_classified(model=Reused, strategy=strategy, micro=2, accumulate=2),
            trainers=trainers,
        )
        for strategy, trainers in (("fsdp", SHARDED), ("zero2", ZERO))
    ),
    Case(
        name="transposed-parameter",
        wrong="The gradient of a parameter in transposed memory is reduced in a copy, and stays that of a rank.",
        references=["SkyRL#1886"],
        training=_classified(model=Transposed),
    ),
    Case(
        name="parameter-with-gaps",
        wrong="A fused optimizer trains a part of a parameter whose memory has gaps.",
        references=["https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html"],
        training=_classified(model=Gaps, ranks=1, optimizer=partial(torch.optim.AdamW, lr=0.1, fused=True)),
        trainers=["forge", "loop", "accelerated", "hf", "pl"],
    ),
    Case(
        name="branch-per-rank",
        wrong="A parameter that only some ranks use keeps the gradient of these ranks, or the ranks wait for ever.",
        references=["pytorch-lightning#17212", "WeatherGenerator#2632"],
        training=Training(model=Branches, data=lambda: _by_rank(), micro=1, ranks=2, unused=True),
        trainers=["forge", "loop", "accelerated", "hf", "pl", "zero"],
    ),
    Case(
        name="branch-per-micro-batch",
        wrong="A parameter that only one micro-batch of a step uses is not reduced over ranks.",
        references=["pytorch-lightning#21794", "AutoModel#2990"],
        training=Training(model=Branches, data=lambda: _by_micro_batch(), micro=1, accumulate=2, ranks=2, unused=True),
    ),
    Case(
        name="other-start-per-rank",
        wrong="Ranks begin with different weights, because each seeds itself before the model is made.",
        references=["torchtitan#1777", "OLMo-core#319"],
        training=_classified(model=other_start),
        trainers=["forge", "loop", "accelerated", "hf", "pl", "zero"],
    ),
    Case(
        name="other-start-per-rank-fsdp",
        wrong="Shards are cut from a different random model on each rank.",
        references=["torchtitan#1777", "torchtitan#670"],
        training=_classified(model=other_start, strategy="fsdp"),
        trainers=SHARDED,
    ),
    Case(
        name="batchnorm-buffers",
        wrong="Ranks have other running means of BatchNorm at the end, and only those of rank 0 are saved.",
        references=["pytorch#30718", "pytorch#48988"],
        training=_classified(model=partial(Perceptron, norm=True)),
        checks=("ranks",),
        notes=dict.fromkeys(("loop", "accelerated", "hf", "pl"), BUFFERS),
        oracle=lambda training: _one_process(training),
    ),
]


def _by_rank() -> Rows:
    """Returns numbers of which rank 0 gets those below 5, and rank 1 the others."""
    return Rows(torch.tensor([[1.0], [5.0], [2.0], [6.0]]), torch.zeros(4, 1, dtype=torch.long))


def _by_micro_batch() -> Rows:
    """Returns numbers of which the first micro-batch of both ranks gets those below 5."""
    return Rows(torch.tensor([[1.0], [2.0], [5.0], [6.0]]), torch.zeros(4, 1, dtype=torch.long))


def _one_process(training: Training) -> object:
    from museum.oracle import train

    return train(training)


__all__ = ["SGD", "numbered"]
