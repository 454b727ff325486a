"""Components for recipe tests: one or two small ones of each kind, with typed options, without torch."""

from typing import Annotated, Literal

from pydantic import Field

from ddpforge.interfaces import Callback, Contract, Duration, Metric, Strategy, Tracker

Size = Annotated[int, Field(ge=1, le=65536, description="How many.")]
Rate = Annotated[float, Field(gt=0, le=100, description="Learning rate at the peak of the schedule.")]
Share = Annotated[float, Field(ge=0, lt=1, description="A probability.")]


def cnn(*, classes: Size, width: Size = 32, dropout: Share = 0.0) -> None: ...


def mlp(*, hidden: Annotated[list[Size], Field(min_length=1)] | Size = 64, classes: Size = 10) -> None: ...


def digits(*, split: Literal["train", "test"], limit: Size | None = None) -> None: ...


def folder(*, root: str, pattern: str = "*.png", labels: dict[str, int] | None = None) -> None: ...


def classification(*, metrics: list[Metric] = [], label_smoothing: Share = 0.0) -> None: ...  # noqa: B006


class Accuracy(Metric):
    name = "accuracy"

    def __init__(self, *, top: Size = 1) -> None: ...


def adamw(
    params: object,
    *,
    lr: Rate,
    betas: tuple[Share, Share] = (0.9, 0.999),
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.01,
) -> None: ...


def sgd(params: object, *, lr: Rate, momentum: Share = 0.0, nesterov: bool = False) -> None: ...


def constant(horizon: object, *, warmup: Duration = Duration(0, "st")) -> None: ...


def cosine(horizon: object, *, warmup: Duration = Duration(0, "st"), floor: Share = 0.0) -> None: ...


class DDP(Strategy):
    contract = Contract(
        clipping="torch, over all parameters, before every step",
        accumulation="torch, in the gradients",
    )

    def __init__(self, *, bucket: Annotated[int, Field(ge=1, le=4096, description="MiB.")] = 25) -> None: ...


class WandB(Tracker):
    def __init__(self, *, project: str, tags: list[str] = []) -> None: ...  # noqa: B006


class EMA(Callback):
    def __init__(self, *, decay: Share = 0.999) -> None: ...
