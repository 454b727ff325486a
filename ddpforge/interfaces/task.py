"""Tasks, which define what is learnt and what is reported about it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ddpforge.interfaces.draws import Draws

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ddpforge.interfaces.beside import Beside
    from ddpforge.interfaces.metric import Metric, Rows, Total
    from ddpforge.interfaces.shown import ShownKind
    from ddpforge.interfaces.world import World

__all__ = ["Task"]


class Task(ABC):
    """Defines what is learnt: the loss of a batch, and what to report about it.

    A task with `turns` has several updates a step, one after the other, each of its own part of the parameters
    (`[optimizer.updates.NAME]`), e.g. ("discriminator", "generator"). Its `loss` is told which: `loss(model, batch,
    turn)`. What is reported of a turn has its name behind it, "loss/generator", and `loss` is then the sum of all.
    """

    turns: Sequence[str] = ()

    reports: Mapping[str, Metric] = MappingProxyType({})
    """The metrics among what `metrics` returns, by the names there. Set it in the constructor of a task that takes
    metrics. It tells which `finish` makes numbers of a total and which direction is better. Both are asked of the task
    and not of a total: the direction before there is any, and `finish` also on a rank that had no sample.
    """

    items: str = "items"
    """The name of what `count` counts, in the plural: "tokens" makes the metric `train/tokens_per_second`."""

    whole_batch: bool = False
    """True of a loss that compares the samples of a step with each other, as InfoNCE does. Each rank then has some of
    them, in one forward pass; what would break a step up further is refused before training. `world.data.gather` of the
    world that `start` is told has what the other ranks computed.
    """

    by_position: bool = False
    """True of a loss that is a sum over the positions of sequences, and is computed at each from the model's output and
    the batch, all [B, T, …], at that position alone. Where a strategy cuts sequences over ranks, `loss` and `metrics`
    are given some of the positions; `count` always counts all.
    """

    takes_split_logits: bool = False
    """True of a loss that takes nothing but `torch.nn.functional.cross_entropy` of logits, over their last dimension:
    each rank may then have a part of that, and the logits are a `DTensor` (strategy.loss_parallel = true).
    """

    scores_in_model: bool = False
    """True of a loss that is computed within the model's forward pass: `model(inputs, score=function)` returns what the
    function makes of the hidden states and the weights of the output layer, `score(hidden, weight)`. A model says
    `takes_score = True`. Strategies that cut forward passes, or share the output layer, refuse such a task.
    """

    compiles: Sequence[str] = ()
    """The names of methods that `train.compile` compiles beside the model: what makes a loss of its outputs, as a
    function of tensors. Fused, logits of many classes are read and written once.
    """

    predicts_next_token: bool = False
    """True of a task whose model gives, for tokens [B, T], logits [B, T, V] of the token after each, from those up to
    it: `ddpforge generate` draws text from that.
    """

    draws: Draws = Draws()
    """Random numbers for the samples of a batch, for `loss` to draw: `self.draws.randn(len(images), 32, device=…)`."""

    def start(self, model: nn.Module, world: World) -> None:
        """Called on every rank before the first step or evaluation, with the bare model: keep what `loss` needs.

        A task that is only tried, before ranks join, is told a world of one rank.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        """The loss *summed* over the batch's items (0-d, with gradients), and the outputs that `metrics` reads.

        Return a sum, not a mean: gradients are divided once, by the number of items in the whole global batch,
        so that accumulation, ranks and uneven ends all weigh every item the same.
        """

    def beside(self, model: nn.Module) -> Mapping[str, Beside]:
        """Declares, by name, the modules that `loss` uses beside the model: a teacher, a momentum encoder.

        Called once, with the model as it was built. Strategies place them in place: `loss` calls the same modules.
        """
        return {}

    def count(self, batch: Any) -> Tensor | None:
        """Counts the items that the loss sums over, or adds their weights (0-d tensor on the batch's own device).

        None means one per sample, which needs no communication. Tasks that weigh tokens, pixels or samples override
        it; weights are real numbers, 0 or more. The batch is still on the CPU when this is called.
        """
        return None

    def metrics(self, outputs: Any, batch: Any) -> Mapping[str, Total | Rows]:
        """Further quantities of a batch, computed at evaluation and at the steps that log; never for training.

        It is never called for a batch that only fills up.
        """
        return {}

    def finish(self, metrics: dict[str, float]) -> dict[str, float]:
        """Turns finished metrics into what is reported, e.g. adds a perplexity; keys have no `train/` prefix yet."""
        return metrics

    def predict(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        """Predicts a batch for `ddpforge predict`: columns by name, each with one value for every sample.

        A column is a tensor [B, …], or a sequence of B numbers, strings, tensors or lists of these. By default columns
        are the outputs that `loss` returns: a tensor is called `output`. Override it for another choice, and for
        batches without targets. The model must be called as `loss` calls it, once.
        """
        _, outputs = self.loss(model, batch)
        return outputs if isinstance(outputs, Mapping) else {"output": outputs}

    def show(self, name: str, value: Any, kind: ShownKind) -> None:
        """Shows something of the present step, see `Show`; for `loss`, `metrics` and `finish` to call, not to override.

        Before the first step and under `ddpforge eval` nothing happens.
        """

    def state(self) -> Mapping[str, Tensor | int | float | str | bool | None]:
        """Returns what a resumed run needs of the task: a running mean, a memory bank, a counter. It is in checkpoints.

        The same on every rank that computes the loss: where each counts its own samples, add up what `world.data` of
        `start` has of all. What a model keeps in buffers and what is declared in `beside` is saved without this.
        """
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state` returned, after `start`: at a resume, a rollback, and before `ddpforge eval`.

        Tensors are on the CPU. A run may resume on another number of ranks.
        """

    def check(self, model: nn.Module, data: Any) -> None:
        """Raises ValueError when model and data cannot belong together (classes, vocabulary), before training."""
