"""Losses that are plain functions of outputs and targets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ddpforge.builtin.tasks.forms import Metrics, beside_targets, by_name, pair, parts_of
from ddpforge.errors import UsageError, says_memory_is_full
from ddpforge.interfaces import SampleColumns, Task, Total
from ddpforge.interfaces.forms import described

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

    Args:
        values: the function without a reduction, if `function` sums over all values and the loss is their mean.
        ignore_index: the class that is not counted, for a sum over classes; the loss is then the mean over the others.
    """

    def __init__(
        self,
        function: Callable[[Any, Any], Tensor],
        *,
        reduction: Literal["mean", "sum"],
        metrics: Metrics,
        values: Callable[[Any, Any], Tensor] | None = None,
        ignore_index: int | None = None,
    ) -> None:
        self.function, self.reduction = function, reduction
        self.items = "samples" if ignore_index is None else "targets"
        self._values, self._ignored = values, ignore_index
        self._per_sample: dict[Any, float] = {}  # values of each sample, by the forms of outputs and targets
        self.reports = by_name(metrics)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        """Returns the loss as a sum over the batch, and the outputs; raises UsageError if it is not a tensor."""
        inputs, targets = pair(batch, "of a loss function", "(inputs, targets)")
        outputs = model(inputs)
        return self._sum(outputs, targets, self.batch_samples or len(targets)), outputs

    def loss_from_outputs(self, outputs: Any, batch: Any) -> Tensor:
        """Returns the loss as a sum over the batch."""
        return self._sum(outputs, batch[1], len(batch[1]))

    def _sum(self, outputs: Any, targets: Tensor, samples: int) -> Tensor:
        from torch import Tensor

        try:
            loss = self.function(outputs, targets)
        except (IndexError, RuntimeError, ValueError) as error:
            if not isinstance(outputs, Tensor) or not _is_of_torch(self.function) or says_memory_is_full(error):
                raise
            raise UsageError(
                f"the loss {_name(self.function)} does not accept outputs {described(outputs)} with targets "
                f"{described(targets)}: {error}",
                hints=[
                    'classes [B] need a loss of classes: cross_entropy, or task.use = "classification"',
                    "other losses compare each output: give targets of the outputs' shape and dtype",
                ],
                key="task.use",
            ) from error
        if not isinstance(loss, Tensor) or (loss.ndim and len(loss) != samples):
            raise UsageError(
                f"the loss function returns {described(loss)}, not one number, or one for each sample",
                hints=["return a tensor: the mean or the sum over the batch, or the losses of the samples"],
                key="task.use",
            )
        if loss.ndim:
            return loss.float().reshape(len(loss), -1).mean(dim=1).sum()
        if self.reduction == "mean":
            return loss.float() * samples
        each = (
            1.0 if self._values is None or self._counts(targets) else self._values_of_sample(outputs, targets, samples)
        )
        return loss.float() if each == 1.0 else loss.float() / each

    def _values_of_sample(self, outputs: Any, targets: Tensor, samples: int) -> float:
        """Returns the number of values of each sample that the loss sums over; 1 if the function never returns them."""
        import torch

        form = (tuple(getattr(outputs, "shape", ())), tuple(targets.shape), targets.dtype, samples)
        if form not in self._per_sample:
            assert self._values is not None
            with torch.no_grad():
                values = self._values(outputs, targets)
            self._per_sample[form] = values.numel() / samples if values.ndim else 1.0
        return self._per_sample[form]

    def _counts(self, targets: Any) -> bool:
        return self._ignored is not None and not targets.is_floating_point()

    def count(self, batch: Any) -> Tensor | None:
        """Returns the number of classes that count; None if each sample counts once."""
        targets = pair(batch, "of a loss function", "(inputs, targets)")[1]
        if self._ignored is None or not self._counts(targets):
            return None
        return targets.ne(self._ignored).sum()

    def metrics(self, outputs: Any, batch: Any) -> Mapping[str, Total | SampleColumns]:
        """Returns the recipe's metrics."""
        return {name: metric(outputs, batch[1]) for name, metric in self.reports.items()}

    def predict(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        """Returns the `output` of the model, and the targets as `target` if the batch has them."""
        inputs, targets = parts_of(batch)
        return beside_targets({"output": model(inputs)}, targets)


def _is_of_torch(function: Any) -> bool:
    named = getattr(function, "func", function)
    return str(getattr(named, "__module__", "")).startswith("torch.")


def _name(function: Any) -> str:
    named = getattr(function, "func", function)
    return getattr(named, "__name__", type(named).__name__)


def adopted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turns a loss `f(outputs, targets, **options)` into a component of a task; returns other functions unchanged.

    A function with its own option `reduction`, as those of `torch.nn.functional`, is called with "sum", and the loss is
    the mean over its values; over the targets that count, if it has an `ignore_index`.
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
        if not has_own:
            return LossFunction(partial(function, **options), reduction=reduction, metrics=metrics)
        ignored = options.get("ignore_index", getattr(parameters.get("ignore_index"), "default", None))
        summed, values = (partial(function, **options, reduction=one) for one in ("sum", "none"))
        return LossFunction(summed, reduction="sum", metrics=metrics, values=values, ignore_index=ignored)

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
