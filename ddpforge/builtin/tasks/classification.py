"""Classification: one class per sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import Field

from ddpforge.builtin.tasks.forms import (
    IGNORED,
    IgnoredClass,
    LabelSmoothing,
    Metrics,
    are_probabilities,
    beside_targets,
    by_name,
    number_of_classes,
    one_tensor,
    pair,
    parts_of,
    reject_no_class,
    reject_target_kind,
    reject_targets,
)
from ddpforge.errors import UsageError
from ddpforge.interfaces import Data, SampleColumns, Task, Total

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Batch: TypeAlias = "tuple[Tensor, Tensor]"


class Classification(Task):
    """Cross-entropy of logits [B, C] and int64 classes [B]; a batch is (inputs, classes).

    Targets may also be the probabilities of all classes, float [B, C], as the dataset `mixup` gives them. Metrics then
    compare with the most probable class.
    The loss is computed in float32 for any precision of the model. Only the loss is reported, unless the recipe names
    metrics, e.g. ["accuracy", "top5"]. Samples of the class `ignore_index` count neither in the loss nor in metrics.
    Without `ignore_index` every class counts, and a negative class is an error.
    """

    task_name = "classification"  # in errors
    compiles = ("sum_of_losses",)

    def __init__(
        self,
        *,
        label_smoothing: LabelSmoothing = 0.0,
        ignore_index: IgnoredClass = None,
        class_weights: Annotated[
            Sequence[Annotated[float, Field(ge=0)]] | None,
            Field(
                min_length=2,
                description="Weight of each class: the loss is the weighted mean over all samples of a step, on any"
                " number of ranks.",
            ),
        ] = None,
        metrics: Metrics = (),
    ) -> None:
        self.label_smoothing, self.ignore_index = label_smoothing, ignore_index
        self.class_weights = None if class_weights is None else tuple(class_weights)
        if class_weights is not None and not any(class_weights):
            raise ValueError("class_weights are all 0, so no sample would count")
        self.items = "samples" if ignore_index is None and class_weights is None else "targets"
        self.reports = by_name(metrics)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the summed cross-entropy, and the logits."""
        from torch import Tensor

        is_pair = type(batch) is tuple and len(batch) == 2 and isinstance(batch[1], Tensor)
        inputs, classes = batch if is_pair else pair(batch, "classification", "(inputs, classes)")
        outputs = model(inputs)
        logits = outputs if isinstance(outputs, Tensor) else one_tensor(outputs, "classification")
        return self.cross_entropy(logits, classes), logits

    def loss_from_outputs(self, outputs: Tensor, batch: Any) -> Tensor:
        """Returns the summed cross-entropy."""
        return self.cross_entropy(outputs, self.classes_of(batch))

    def cross_entropy(self, logits: Tensor, classes: Tensor) -> Tensor:
        """Returns the summed cross-entropy; raises UsageError for classes that the logits do not have."""
        try:
            return self.sum_of_losses(logits, classes)
        except (IndexError, RuntimeError, ValueError) as error:
            reject_targets(error, self.task_name, logits, classes)

    def sum_of_losses(self, logits: Tensor, classes: Tensor) -> Tensor:
        """Returns the summed cross-entropy, in float32."""
        import torch.nn.functional as F

        return F.cross_entropy(
            logits.float(),
            classes,
            weight=None if self.class_weights is None else self._weights(logits.device),
            reduction="sum",
            label_smoothing=self.label_smoothing,
            ignore_index=IGNORED if self.ignore_index is None else self.ignore_index,
        )

    def _weights(self, device: torch.device) -> Tensor:
        import torch

        return torch.tensor(self.class_weights, device=device)

    def classes_of(self, batch: Any) -> Tensor:
        """Returns the classes of a batch, or their probabilities."""
        return pair(batch, self.task_name, "(inputs, classes)")[1]

    def count(self, batch: Any) -> Tensor | None:
        """Counts the classes that are not `ignore_index`; without it, raises UsageError for a negative class."""
        if self.ignore_index is not None or self.class_weights is not None:
            targets = self.classes_of(batch)
            if are_probabilities(targets):
                option = "class_weights" if self.ignore_index is None else "ignore_index"
                raise UsageError(
                    f"task {self.task_name}: the targets are probabilities, so no class can be ignored or weighted",
                    hints=[f"remove {option}"],
                    key=f"task.{option}",
                )
            if self.ignore_index is None:
                reject_no_class(targets, self.task_name)
            counted = targets if self.ignore_index is None else targets[targets != self.ignore_index]
            weights = None if self.class_weights is None else self._weights(targets.device)
            return counted_weight(weights, counted)
        from torch import Tensor

        # Reading classes on a GPU would wait for it. A subclass may take batches of another form.
        classes = batch[1] if isinstance(batch, tuple | list) and len(batch) == 2 else None
        if not isinstance(classes, Tensor) or not classes.is_cpu:
            return None
        if classes.is_floating_point() or (classes < 0).any():
            reject_no_class(classes, self.task_name)
        return None

    def metrics(self, outputs: Tensor, batch: Any) -> Mapping[str, Total | SampleColumns]:
        """Returns the recipe's metrics, without samples of the class `ignore_index`."""
        classes = self.classes_of(batch)
        if are_probabilities(classes):
            classes = classes.argmax(dim=1)
        if self.ignore_index is not None and self.reports:
            counted = classes != self.ignore_index
            outputs, classes = outputs[counted], classes[counted]
        return {name: metric(outputs, classes) for name, metric in self.reports.items()}

    def predict(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        """Returns the most probable `class`, its `probability`, and the true class, `target`, if the batch has it."""
        inputs, classes = parts_of(batch)
        return beside_targets(chosen(one_tensor(model(inputs), "classification")), classes)

    def check(self, model: nn.Module, data: Data) -> None:
        """Raises UsageError if the targets are numbers, or the data has more classes than the model has outputs."""
        reject_target_kind(data, "number", "classification", "classes")
        classes, outputs = number_of_classes(data), getattr(model, "outputs", None)
        if classes is not None and outputs is not None and classes > outputs:
            raise UsageError(
                f"the data has {classes} classes and the model {outputs} outputs",
                hints=[f"set the option of [model] for its outputs (`classes`, `outputs`) to {classes}"],
                key="model.classes",  # if the model has no such option, the error is at [model]
            )


def counted_weight(weights: Tensor | None, classes: Tensor) -> Tensor:
    """Returns the sum of the weights of classes, or their number without weights (0-d)."""
    import torch

    if weights is None:
        return torch.tensor(classes.numel(), device=classes.device)
    try:
        return weights[classes].sum()
    except IndexError as error:
        raise UsageError(
            f"a sample has the class {int(classes.max())}, but class_weights has {len(weights)} weights",
            hints=["write a weight for each class"],
            key="task.class_weights",
        ) from error


def chosen(logits: Tensor) -> dict[str, Tensor]:
    """Returns the most probable class of each sample, and its probability."""
    probability, found = logits.float().softmax(dim=1).max(dim=1)
    return {"class": found, "probability": probability}
