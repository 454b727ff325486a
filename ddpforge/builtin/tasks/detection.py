"""Detection: boxes and classes in images of different sizes, with models of torchvision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeAlias

from pydantic import Field

from ddpforge.builtin.tasks.forms import Metrics, by_name
from ddpforge.errors import UsageError, described
from ddpforge.interfaces import SampleColumns, Task, Total

if TYPE_CHECKING:
    from torch import Tensor, nn

Batch: TypeAlias = "tuple[list[Tensor], list[dict[str, Tensor]]]"


class Detection(Task):
    """Losses of a model with the contract of torchvision's detection models; a batch is (images, targets).

    Images are a list of float tensors [C, H, W] of any size, targets a list of dicts: `boxes` float [n, 4] as x1, y1,
    x2, y2 in pixels, `labels` int64 [n], and further entries that the model takes, e.g. `masks`. Class 0 is the
    background.

    In training mode the model returns a dict of losses, each a mean over the batch; their weighted sum is the loss, and
    each is reported. In evaluation mode it returns a dict of `boxes`, `labels` and `scores` per image, and no loss.
    Metrics receive both lists: predictions and targets, as `torchmetrics.detection:MeanAveragePrecision` does.
    """

    evaluation_loss = False
    items = "images"

    def __init__(
        self,
        *,
        weights: Annotated[
            Mapping[str, float], Field(description="Factors of the model's losses by name; 1 for a loss without one.")
        ] = {},
        metrics: Metrics = (),
    ) -> None:
        self._weights = dict(weights)
        self.reports = by_name(metrics)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor | None, Any]:
        """Returns the weighted losses as a sum over images, and each loss; in evaluation mode None and predictions."""
        images, targets = _parts(batch)
        if not model.training:
            return None, _predictions(model(images))
        losses = _losses(model(images, targets))
        if unknown := sorted(self._weights.keys() - losses.keys()):
            hints = [f"it returns {', '.join(sorted(losses))}"]
            raise UsageError(f"the model returns no loss `{unknown[0]}`", hints=hints, key="task.weights")
        total: Any = sum(self._weights.get(name, 1.0) * part.float() for name, part in losses.items())
        return total * len(images), losses

    def metrics(self, outputs: Any, batch: Batch) -> Mapping[str, Total | SampleColumns]:
        """Returns each loss of the model in training, and the recipe's metrics in evaluations."""
        images, targets = batch
        if isinstance(outputs, Mapping):
            return {name: Total(part.detach().float() * len(images), len(images)) for name, part in outputs.items()}
        reports: Mapping[str, Any] = self.reports  # receive lists in place of tensors
        return {name: metric(outputs, targets) for name, metric in reports.items()}

    def predict(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        """Returns `boxes`, `labels` and `scores`, each with a tensor of n rows per image."""
        found = _predictions(model(batch[0] if isinstance(batch, tuple) else batch))
        return {key: [one[key] for one in found] for key in ("boxes", "labels", "scores")}


def _parts(batch: Any) -> Batch:
    """Returns images and targets; raises UsageError for a batch of another form."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        _reject_batch(batch)
    images, targets = batch
    if not (isinstance(images, Sequence) and isinstance(targets, Sequence) and len(images) == len(targets)):
        _reject_batch(batch)
    for target in targets:
        if not isinstance(target, Mapping) or not {"boxes", "labels"} <= target.keys():
            _reject_batch(batch)
        if target["boxes"].shape != (len(target["labels"]), 4):
            raise UsageError(
                f"task detection takes boxes [n, 4] and labels [n] of an image; the data gives {described(target)}",
                hints=["an image without objects has boxes [0, 4] and labels [0]"],
            )
    return [*images], [*targets]


def _reject_batch(batch: Any) -> NoReturn:
    raise UsageError(
        f"task detection takes a list of images and a list of targets, dicts with boxes and labels; the data gives "
        f"{described(batch)}",
        hints=[
            "give the dataset a method that keeps lists: def collate(self, samples): return tuple(map(list, "
            "zip(*samples)))",
            'or read annotations of COCO: data.train.use = "coco_detection"',
        ],
    )


def _losses(returned: Any) -> Mapping[str, Tensor]:
    """Returns a model's losses by name; raises UsageError for another form."""
    from torch import Tensor

    parts = returned.values() if isinstance(returned, Mapping) else ()
    if parts and all(isinstance(part, Tensor) and not part.ndim for part in parts):
        return returned  # type: ignore[no-any-return]
    raise UsageError(
        f"task detection takes a dict of losses from the model in training mode, which returns {described(returned)}",
        hints=["return one number for each loss, as torchvision's detection models do"],
    )


def _predictions(returned: Any) -> list[Mapping[str, Tensor]]:
    """Returns a model's predictions; raises UsageError for another form."""
    if isinstance(returned, list) and all(
        isinstance(one, Mapping) and {"boxes", "labels", "scores"} <= one.keys() for one in returned
    ):
        return returned
    raise UsageError(
        "task detection takes a list of dicts with boxes, labels and scores from the model in evaluation mode, which "
        f"returns {described(returned)}",
        hints=["return one dict per image, as torchvision's detection models do"],
    )
