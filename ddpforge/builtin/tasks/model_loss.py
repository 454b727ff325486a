"""Models that return their own loss."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ddpforge.builtin.tasks.forms import IGNORED, IgnoredTarget, Metrics, by_name
from ddpforge.errors import UsageError, described
from ddpforge.interfaces import SampleColumns, Task, Total

if TYPE_CHECKING:
    from torch import Tensor, nn


class ModelLoss(Task):
    """The loss that the model itself returns, as models of nanoGPT, Transformers and torchvision's detection do.

    A batch that is a tuple is passed by position, `model(*batch)`, a dict by name, `model(**batch)`. With `data.inputs`
    and `data.targets` the values of these keys are passed by position. The model returns one number, a tuple with one
    number in it, or a dict or ModelOutput: its entry `loss`, or a dict of losses, which are added up.

    `reduction` and `over` state the model's loss. ddpforge needs a sum over the batch, so a mean is multiplied by the
    samples, or by the counted targets. The first batch checks it: the loss of a batch must be the sum of the losses of
    its halves.

    Metrics get the model's output (`output` names an entry of a dict; otherwise `logits`, or the first tensor that is
    no loss), and the targets of the batch.
    """

    def __init__(
        self,
        *,
        reduction: Annotated[
            Literal["mean", "sum"], Field(description="Whether the model returns a mean or a sum over the batch.")
        ] = "mean",
        over: Annotated[
            Literal["samples", "targets"],
            Field(description="Items of the mean, and of the loss that is reported: samples, or targets that count."),
        ] = "samples",
        target: Annotated[
            str, Field(min_length=1, description="Key of the targets in a batch that is a dict, to count and compare.")
        ] = "labels",
        shift: Annotated[
            bool, Field(description="The model predicts target t + 1 at position t: the first target is not counted.")
        ] = False,
        ignore_index: IgnoredTarget = IGNORED,
        weights: Annotated[
            Mapping[str, float], Field(description="Factors of a dict of losses by name; 1 for a loss without one.")
        ] = {},
        output: Annotated[
            str | None, Field(min_length=1, description="Entry of the model's dict for metrics and predictions.")
        ] = None,
        evaluation_loss: Annotated[
            bool,
            Field(description="False: the model returns losses only in training mode; evaluations report metrics."),
        ] = True,
        metrics: Metrics = (),
    ) -> None:
        self.evaluation_loss = evaluation_loss
        self.reduction, self.over, self.ignore_index = reduction, over, ignore_index
        self.items = "samples" if over == "samples" else "tokens"
        self._target, self._shift, self._weights, self._output = target, shift, dict(weights), output
        self.reports = by_name(metrics)
        self._names: set[str] = set()

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor | None, Any]:
        """Returns the loss of the model as a sum over the batch, and the result of its forward pass.

        The loss is None in an evaluation with `evaluation_loss = false`.
        """
        returned = call(model, self._countable(batch) if self._counts_targets else batch)
        if not (self.evaluation_loss or model.training):
            return None, (returned, None)
        parts = self._losses(returned)
        loss = sum(self._weights.get(name, 1.0) * part.float() for name, part in parts.items())
        if self.reduction == "mean":
            loss = loss * self._size(batch)
        return loss, (returned, parts if len(parts) > 1 else {})  # type: ignore[return-value]

    def count(self, batch: Any) -> Tensor | None:
        """Returns the number of targets that count; None for a loss over samples."""
        return None if self.over == "samples" else self._counted(batch)

    def metrics(self, outputs: Any, batch: Any) -> Mapping[str, Total | SampleColumns]:
        """Returns each loss of a dict by name, and the recipe's metrics of outputs and targets.

        With `evaluation_loss = false` a model may return only losses in training: it then has no metrics there.
        """
        returned, parts = outputs
        is_evaluation, parts = parts is None, parts or {}
        size = self._size(batch)
        factor = size if self.reduction == "mean" else 1
        found: dict[str, Total | SampleColumns] = {
            name: Total(part.detach().float() * factor, size) for name, part in parts.items()
        }
        may_lack = not (self.evaluation_loss or is_evaluation)
        if self.reports and not (may_lack and self._find_output(returned) is None):
            output, targets = self._output_of(returned), self._targets(batch)
            found |= {name: metric(output, targets) for name, metric in self.reports.items()}
        return found

    def predict(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        """Returns the model's `output`, see `metrics`."""
        return {"output": self._output_of(call(model, batch))}

    # -- parts
    def _losses(self, returned: Any) -> dict[str, Tensor]:
        """Returns the losses in the result of a forward pass, by name."""
        from torch import Tensor

        if isinstance(returned, Tensor):
            found = {"loss": returned}
        elif (entries := _entries(returned)) is not None:
            loss = entries.get("loss")
            found = {"loss": loss} if loss is not None else {k: v for k, v in entries.items() if _is_number(v)}
        elif isinstance(returned, tuple | list):
            numbers = [one for one in returned if _is_number(one)]
            found = {"loss": numbers[0]} if len(numbers) == 1 else {}
        else:
            found = {}
        if not found or not all(map(_is_number, found.values())):
            raise UsageError(
                f"task model_loss takes the loss that the model returns, but it returns {described(returned)}",
                hints=[
                    "return one number, a tuple with one number in it, or a dict with `loss` or with losses",
                    "use a task that computes the loss from the model's outputs, such as classification",
                ],
            )
        if unknown := sorted(self._weights.keys() - found.keys()):
            raise UsageError(
                f"the model returns no loss `{unknown[0]}`",
                hints=[f"it returns {', '.join(sorted(found))}"],
                key="task.weights",
            )
        return found

    def _size(self, batch: Any) -> Any:
        if self.over == "targets":
            return self._counted(batch)
        return self.batch_samples or samples_in(batch)

    @property
    def _counts_targets(self) -> bool:
        return self.over == "targets" and self.reduction == "mean"

    def _countable(self, batch: Any) -> Any:
        """Returns a batch without any counted target with other targets, so that its mean is a number; others as is.

        The mean over no target is 0 / 0, and so are its gradients; the loss is multiplied by 0 targets.
        """
        import torch

        targets = self._targets(batch)
        other = torch.full_like(targets, 1 if self.ignore_index == 0 else 0)
        targets = torch.where(self._counted(batch) > 0, targets, other)  # nothing waits for the device
        if isinstance(batch, Mapping):
            return {**batch, self._target: targets}
        return (*batch[:-1], targets)

    def _counted(self, batch: Any) -> Tensor:
        targets = self._targets(batch)
        if self._shift and targets.ndim < 2:
            raise UsageError(
                f"task.shift = true skips the first target of each sequence, but the targets are {described(targets)}",
                hints=["remove task.shift"],
                key="task.shift",
            )
        counted: Tensor = (targets[:, 1:] if self._shift else targets) != self.ignore_index
        return counted.sum()

    def _targets(self, batch: Any) -> Any:
        """Returns the targets of a batch: the entry of a dict, or the last value of a tuple."""
        if isinstance(batch, Mapping):
            if self._target not in batch:
                hints = [f"it has {', '.join(map(str, batch))}"]
                raise UsageError(f"the batch has no `{self._target}`", hints=hints, key="task.target")
            return batch[self._target]
        if isinstance(batch, tuple | list) and len(batch) > 1:
            return batch[-1]
        raise UsageError(
            f"task model_loss needs targets to count or compare, but the data gives {described(batch)}",
            hints=['set task.over = "samples", and remove task.metrics'],
            key="task.over",
        )

    def _find_output(self, returned: Any) -> Any:
        """Returns the output that metrics and predictions read; None if there is none."""
        from torch import Tensor

        entries = _entries(returned)
        if entries is not None:
            name = self._output or "logits"
            if name in entries:
                return entries[name]
            found = [value for value in entries.values() if isinstance(value, Tensor) and not _is_number(value)]
        else:
            values = returned if isinstance(returned, tuple | list) else [returned]
            found = [value for value in values if isinstance(value, Tensor) and not _is_number(value)]
        return found[0] if found and self._output is None else None

    def _output_of(self, returned: Any) -> Any:
        """Returns the output as `_find_output` does; raises UsageError if there is none."""
        if (output := self._find_output(returned)) is not None:
            return output
        entries = _entries(returned)
        hints = [f"it returns {', '.join(entries)}"] if entries else ["return outputs in addition to the loss"]
        raise UsageError(
            f"the model returns no output for metrics and predictions: {described(returned)}",
            hints=hints,
            key="task.output",
        )


def call(model: nn.Module, batch: Any) -> Any:
    """Calls the model with a batch: a dict by name, a tuple by position, anything else as one argument."""
    names: Mapping[str, Any] = batch if isinstance(batch, Mapping) else {}
    values: list[Any] = [] if names else [batch]
    if not names and isinstance(batch, tuple | list):
        first, *others = batch
        values = [*first, *others] if isinstance(first, tuple) else [first, *others]
    try:
        return model(*values, **names)
    except TypeError as error:
        _explain_arguments(error, model, values, names)
        raise


def _explain_arguments(error: TypeError, model: nn.Module, values: list[Any], names: Mapping[str, Any]) -> None:
    """Raises UsageError if the batch does not fit the parameters of the model's `forward`."""
    try:
        parameters = inspect.signature(model.forward)
        parameters.bind(*values, **names)
    except ValueError:  # a function without a signature
        return
    except TypeError:
        given = ", ".join(names) if names else f"{len(values)} values by position"
        raise UsageError(
            f"task model_loss calls the model with the batch, {given}, but its forward is {type(model).__name__}"
            f"{parameters}",
            hints=[
                "the model must compute its loss itself, from inputs and targets",
                'choose the values of a dict by their keys: [data] inputs = ["image"], targets = "label"',
                "or use a task that computes the loss from the model's outputs, such as classification",
            ],
        ) from error


def samples_in(batch: Any) -> int:
    """Returns the number of samples in a batch: the length of its first tensor, or of its first list in a tuple."""
    parts = [*batch.values()] if isinstance(batch, Mapping) else batch
    return _length(parts[0] if isinstance(batch, Mapping | tuple | list) else parts)


def _length(part: Any) -> int:
    if isinstance(part, Mapping | tuple):
        return _length(next(iter(part.values() if isinstance(part, Mapping) else part)))
    return len(part)


def _entries(returned: Any) -> Mapping[str, Any] | None:
    """Returns the entries of a dict, a ModelOutput or a dataclass; None for anything else."""
    if isinstance(returned, Mapping):
        return returned
    if is_dataclass(returned) and not isinstance(returned, type):
        return {field.name: getattr(returned, field.name) for field in fields(returned)}
    return None


def _is_number(value: Any) -> bool:
    """True for a floating-point tensor without dimensions."""
    from torch import Tensor

    return isinstance(value, Tensor) and not value.ndim and value.is_floating_point()
