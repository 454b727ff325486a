"""Tasks, which define the loss and the reported metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from ddpforge.interfaces.sample_rng import SampleRNG

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ddpforge.interfaces.auxiliary import AuxiliaryModule
    from ddpforge.interfaces.callback import Callback
    from ddpforge.interfaces.media import MediaKind
    from ddpforge.interfaces.metric import Metric, SampleColumns, Total
    from ddpforge.interfaces.world import World

__all__ = ["Task"]


class _Step:
    """Step of the run, as an attribute of a task. A task's own attribute of this name has precedence: no `__set__`."""

    def __get__(self, task: Task | None, owner: type[Task]) -> int:
        return 0 if task is None else vars(task).get("step_of_run", 0)


class Task(ABC):
    """Base class of tasks: the loss of a batch, and the metrics to report.

    A task with `updates`, e.g. ("discriminator", "generator"), makes alternating updates: several updates per step, one
    after the other, each of its own part of the parameters (`[optimizer.updates.NAME]`). Its loss receives the name of
    the update: `loss(model, batch, update)`. The metrics of an update end with its name, as "loss/generator"; the
    metric "loss" is the sum of the losses of all updates.
    """

    updates: Sequence[str] = ()

    reports: Mapping[str, Metric] = MappingProxyType({})
    """Metrics that compute values of `metrics`, by the names there. Set it in the constructor of a task that takes
    metrics. ddpforge uses them for `finish` and for the direction that is better.
    """
    # The task declares them, because the direction is needed before there is a total, and `finish` is also called on
    # ranks that had no sample.

    items: str = "items"
    """Plural noun for the items that `count` counts: "tokens" gives the metric `train/tokens_per_second`."""

    whole_batch: bool = False
    """Set to True if the loss compares the samples of a step with each other, as InfoNCE does. Each rank then computes
    its samples of the step in one forward pass; settings that would split them further are refused before training.
    `world.dp_ranks.all_gather` (see `start`) returns the results of all data-parallel ranks.
    """

    evaluation_loss: bool | Literal["some"] = True
    """Set to False if the model computes its loss only in training mode, as torchvision's detection models do. In an
    evaluation, `loss` then returns None as the loss: `(None, outputs)`. Evaluations report only metrics. Set it to
    "some" if only some datasets have a loss: it is then None for batches of the others.
    """

    by_position: bool = False
    """Set to True if the loss is a sum over the positions of sequences, and each summand depends only on the model's
    output and the batch, all [B, T, …], at that position. If a strategy splits sequences over ranks, `loss` and
    `metrics` receive some of the positions; `count` always receives all of them.
    """

    takes_split_logits: bool = False
    """Set to True if the loss uses logits only in `torch.nn.functional.cross_entropy` over their last dimension. The
    logits may then be a `DTensor` that is sharded in this dimension (strategy.loss_parallel = true).
    """

    loss_in_model: bool = False
    """Set to True if the loss is computed within the model's forward pass: `model(inputs, loss_function=f)` returns
    `f(hidden, weight)` for the hidden states and the weights of the output layer. The model must have
    `takes_loss_function = True`. Strategies that split forward passes or shard the output layer refuse such a task.
    """

    compiles: Sequence[str] = ()
    """Names of methods that `train.compile` compiles in addition to the model: functions of tensors that compute the
    loss from the model's outputs. A fused loss reads and writes the logits only once.
    """

    predicts_next_token: bool = False
    """Set to True if the model returns, for tokens [B, T], logits [B, T, V] of the next token at each position,
    computed from the tokens up to that position, or is an encoder-decoder model of transformers. `ddpforge generate`
    requires it.
    """

    separates_documents: bool = False
    """Set to True if `loss` keeps the documents of a sample apart, and `check` refuses models that do not. Other tasks
    cannot use data with several documents in a sample (`document_mask = True`).
    """

    evaluates: bool = False
    """True while an evaluation or prediction calls `loss`, e.g. for another loss there. ddpforge sets it."""

    batch_samples: int | None = None
    """Number of samples in the batch that `loss` receives, for a loss that is their mean; None if it is not known.
    ddpforge sets it."""

    step: int = _Step()  # type: ignore[assignment]
    """Number of the current step, from 1, for a loss that changes over time: `beta = min(1, self.step / 1000)`; in an
    evaluation, the step of the weights; 0 before the first step. A resume continues it. A task may have an attribute
    `step` of its own in its place."""

    step_of_run: int = 0
    """Value of `step`; ddpforge sets it."""

    callback: Callback | None = None
    """Callback of the task itself, e.g. to do something at the end of an epoch. Set it in the constructor. It has no
    state; ddpforge calls it before the recipe's callbacks."""

    rng: SampleRNG = SampleRNG()
    """RNG for the samples of a batch, for use in `loss`: `self.rng.randn(len(images), 32, device=…)`."""

    def start(self, model: nn.Module, world: World) -> None:
        """Prepares the task; called on every rank before the first step or evaluation, with the bare model.

        The checks before training call it with a world of one rank.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        """Returns the loss *summed* over the batch's items (0-d, with gradients), and the outputs that `metrics` reads.

        With `evaluation_loss = False` the loss is None if `model.training` is False; with "some" it may be.

        Return a sum, not a mean. Gradients are divided once, by the number of items in the global batch, so every item
        has the same weight for any gradient accumulation, any world size and incomplete last batches.
        """

    def auxiliary_modules(self, model: nn.Module) -> Mapping[str, AuxiliaryModule]:
        """Returns the auxiliary modules of `loss` by name, e.g. a teacher or a momentum encoder.

        Called once, with the model as it was built. Strategies modify these modules in place, so `loss` calls the same
        objects.
        """
        return {}

    def count(self, batch: Any) -> Tensor | None:
        """Returns the number of items in the loss, or the sum of their weights (0-d, on the device of the batch).

        None means one item per sample, which needs no communication. Override it in tasks that weight tokens, pixels or
        samples; weights are real numbers of 0 or more. The batch is still on the CPU when this is called.
        """
        return None

    def metrics(self, outputs: Any, batch: Any) -> Mapping[str, Total | SampleColumns]:
        """Returns further metrics of a batch, in evaluations and at steps that log; they do not affect training.

        Not called for padding batches.
        """
        return {}

    def loss_from_outputs(self, outputs: Any, batch: Any) -> Tensor:
        """Returns the summed loss (0-d) of samples from the outputs of `loss`, without calling the model.

        `outputs` and `batch` have only the samples of one source. Called at steps that log, without gradients, for the
        losses of the sources [data.train.NAME]. Without this method these are not reported. A class that overrides
        `loss` must override it too.
        """
        raise NotImplementedError

    def finish(self, metrics: dict[str, float]) -> dict[str, float]:
        """Returns the metrics to report, e.g. with an added perplexity; keys have no `train/` prefix yet."""
        return metrics

    def predict(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        """Predicts a batch for `ddpforge predict`: returns columns by name, each with one value per sample.

        A column is a tensor [B, …], or a sequence of B numbers, strings, tensors or lists of these. By default the
        columns are the outputs of `loss`; a single tensor is named `output`. Override it for other columns, and for
        batches without targets. Call the model once, in the same way as `loss`.
        """
        _, outputs = self.loss(model, batch)
        return outputs if isinstance(outputs, Mapping) else {"output": outputs}

    def log_media(self, name: str, value: Any, kind: MediaKind) -> None:
        """Displays a value of the current step, see `LogMedia`. Call it in `loss`, `metrics` or `finish`.

        Not to be overridden. Does nothing before the first step and under `ddpforge eval`.
        """

    def state(self) -> Mapping[str, Tensor | int | float | str | bool | None]:
        """Returns the task's state for checkpoints, e.g. a running mean, a memory bank or a counter.

        It must be the same on every rank that computes the loss. If each rank counts its own samples, sum the counts
        over `world.dp_ranks` (see `start`). Checkpoints contain the model's buffers and auxiliary modules without this.
        """
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state`; called after `start` at a resume, a rollback, and before `ddpforge eval`.

        Tensors are on the CPU. A run may resume on a different world size.
        """

    def check(self, model: nn.Module, data: Any) -> None:
        """Raises ValueError if model and data do not fit together (classes, vocabulary); called before training."""
