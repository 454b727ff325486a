"""Losses that are plain functions of outputs and targets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ddpforge.builtin.tasks.forms import Metrics, beside_targets, by_name, described, pair, parts_of
from ddpforge.errors import UsageError
from ddpforge.interfaces import SampleColumns, Task, Total

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["LossFunction", "adopted"]

_Reduction = Annotated[
    Literal["mean", "sum"], Field(description="Whether the function returns a mean or a sum over the batch.")
]


class LossFunction(Task):
    """The loss `function(outputs, targets)`; a batch is (inputs, targets).

    The function returns one number, a mean or a sum over the batch as `reduction` states, or one number or more per
    sample. The first batch checks the reduction: the loss of a batch must be the sum of the losses of its halves.
    """

    items = "samples"

    def __init__(
        self, function: Callable[[Any, Any], Tensor], *, reduction: Literal["mean", "sum"], metrics: Metrics
    ) -> None:
        self.function, self.reduction = function, reduction
        self.reports = by_name(metrics)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        """Returns the loss as a sum over the batch, and the outputs; raises UsageError if it is no tensor."""
        inputs, targets = pair(batch, "of a loss function", "(inputs, targets)")
        outputs = model(inputs)
        return self._sum(outputs, targets), outputs

    def loss_from_outputs(self, outputs: Any, batch: Any) -> Tensor:
        """Returns the loss as a sum over the batch."""
        return self._sum(outputs, batch[1])

    def _sum(self, outputs: Any, targets: Tensor) -> Tensor:
        from torch import Tensor

        loss = self.function(outputs, targets)
        if not isinstance(loss, Tensor) or (loss.ndim and len(loss) != len(targets)):
            raise UsageError(
                f"the loss function returns {described(loss)}, not one number, or one for each sample",
                hints=["return a tensor: the mean or the sum over the batch, or the losses of the samples"],
                key="task.use",
            )
        if loss.ndim:
            return loss.float().reshape(len(loss), -1).mean(dim=1).sum()
        return loss.float() * len(targets) if self.reduction == "mean" else loss.float()

    def metrics(self, outputs: Any, batch: Any) -> Mapping[str, Total | SampleColumns]:
        """Returns the recipe's metrics."""
        return {name: metric(outputs, batch[1]) for name, metric in self.reports.items()}

    def predict(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        """Returns the `output` of the model, and the targets as `target` if the batch has them."""
        inputs, targets = parts_of(batch)
        return beside_targets({"output": model(inputs)}, targets)


def adopted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turns a loss `f(outputs, targets, **options)` into a component of a task; returns other functions unchanged.

    A function with its own option `reduction`, as those of `torch.nn.functional`, is called with "sum".
    """
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        return function
    needed = [n for n, one in parameters.items() if one.default is one.empty and one.kind <= one.POSITIONAL_OR_KEYWORD]
    if len(needed) != 2 or needed[0] == "model":
        return function
    has_own = "reduction" in parameters

    def component(*, metrics: Metrics = (), reduction: _Reduction = "mean", **options: Any) -> LossFunction:
        if has_own:
            options["reduction"] = reduction = "sum"
        return LossFunction(partial(function, **options), reduction=reduction, metrics=metrics)

    own = [
        one.replace(kind=one.KEYWORD_ONLY)
        for name, one in parameters.items()
        if name not in (*needed, "reduction") and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    ]
    keyword = inspect.Parameter.KEYWORD_ONLY
    if not has_own:
        own.append(inspect.Parameter("reduction", keyword, default="mean", annotation=_Reduction))
    own.append(inspect.Parameter("metrics", keyword, default=(), annotation=Metrics))
    component.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    component.__name__, component.__doc__ = function.__name__, function.__doc__
    component.__module__, component.__wrapped__ = function.__module__, function  # type: ignore[attr-defined]
    return component
