"""Helpers of the built-in tasks: checks of batches and outputs, metrics by name, cross-entropy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from pydantic import Field

from ddpforge.errors import UsageError, says_memory_is_full
from ddpforge.interfaces import Metric, class_names_of
from ddpforge.interfaces.forms import described

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "IGNORED",
    "IgnoredClass",
    "IgnoredTarget",
    "LabelSmoothing",
    "Metrics",
    "ZLoss",
    "are_probabilities",
    "beside_targets",
    "by_name",
    "cross_entropy",
    "number_of_classes",
    "one_tensor",
    "pair",
    "parts_of",
    "reject_no_class",
    "reject_target_kind",
    "reject_targets",
]

IGNORED = -100  # the default `ignore_index` of torch's losses

IgnoredTarget = Annotated[int, Field(ge=-(2**31), lt=2**31, description="Target that is not counted, e.g. padding.")]
IgnoredClass = Annotated[
    int | None, Field(ge=-(2**31), lt=2**31, description="Class that is not counted; absent: none.")
]
LabelSmoothing = Annotated[
    float, Field(ge=0, lt=1, description="Probability that is distributed evenly over all classes.")
]
ZLoss = Annotated[
    float | None,
    Field(gt=0, lt=1, description="Weight of the z-loss, e.g. 1e-4, which keeps the logits small; absent: none."),
]
Metrics = Annotated[Sequence[Metric], Field(description="Metrics to report in addition to the loss.")]

_LARGE = 2**24  # logits. Autograd would keep them three times in float32 at its peak: 192 MiB.
_OWN = "or write a task of your own: `ddpforge plugins new`"


def by_name(metrics: Sequence[Metric], *own: str) -> dict[str, Metric]:
    """Returns the recipe's metrics by name, for a task's `reports`; raises ValueError if two have the same name.

    `own` are names that the task itself reports in addition to the loss.
    """
    found = {metric.name: metric for metric in metrics}
    if taken := sorted(found.keys() & {"loss", *own}):
        raise ValueError(f"metrics: the task already reports `{taken[0]}`; remove the metric, or give it another name")
    if len(found) < len(metrics):
        raise ValueError(f"metrics must differ by name, got {[metric.name for metric in metrics]}")
    return found


def pair(batch: Any, task: str, names: str) -> tuple[Any, Tensor]:
    """Returns the two parts of a batch; raises UsageError if it is not a pair.

    `names` describes the expected batch for the error message, e.g. "(inputs, classes)".
    """
    from torch import Tensor

    if isinstance(batch, tuple | list) and len(batch) == 2 and isinstance(batch[1], Tensor):
        return batch[0], batch[1]
    hints = ["return pairs as samples of the dataset, or give it a method `collate(samples)` that returns one", _OWN]
    if isinstance(batch, Mapping) and "input_ids" in batch:
        # Its labels are the tokens themselves: tasks of ddpforge-transformers shift them.
        hints = ["set the task of its model: causal_lm, or sequence_classification for classes (ddpforge-transformers)"]
    elif isinstance(batch, Mapping):
        hints.insert(0, f"name the keys in the recipe: {_keys_of(batch)}")
    elif isinstance(batch, tuple | list) and len(batch) == 2 and type(next(iter(batch[1]), None)) is str:
        hints = [
            "the targets are texts: return the number of each class, e.g. names.index(name)",
            "the dataset csv numbers a column of texts itself",
        ]
    elif isinstance(batch, tuple | list) and len(batch) > 2:
        hints = ["return two values as a sample, e.g. `return image, label`", _OWN]
    elif isinstance(batch, Tensor):
        hints.insert(0, "its samples have no targets: torch.utils.data.TensorDataset(inputs, targets) has pairs")
    raise UsageError(f"task {task} takes a batch {names}; the data gives {described(batch)}", hints=hints)


_TARGETS = ("label", "labels", "target", "targets", "class", "y")


def _keys_of(batch: Mapping[str, Any]) -> str:
    """Returns keys of a recipe that name the inputs and the targets of a batch, by the usual names of targets."""
    names = [str(name) for name in batch]
    target = next((name for name in names if name.lower() in _TARGETS), names[-1] if len(names) > 1 else "label")
    inputs = next((name for name in names if name != target), "image")
    return f'[data] inputs = ["{inputs}"], targets = "{target}"'


def parts_of(batch: Any) -> tuple[Any, Tensor | None]:
    """Splits a batch into the model's inputs and the targets; the targets are None if the batch has none."""
    from torch import Tensor

    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1] if isinstance(batch[1], Tensor) else None
    return batch, None


def beside_targets(columns: dict[str, Tensor], targets: Tensor | None) -> dict[str, Tensor]:
    """Returns the columns of a prediction; adds the targets as `target` if there are any."""
    return columns if targets is None else columns | {"target": targets}


def one_tensor(outputs: Any, task: str) -> Tensor:
    """Returns the model's outputs; raises UsageError if they are not a tensor."""
    from torch import Tensor

    if isinstance(outputs, Tensor):
        return outputs
    raise UsageError(
        f"task {task} takes one tensor from the model, which returns {described(outputs)}",
        hints=["return only the tensor from the model's forward", _OWN],
    )


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = IGNORED,
    reduction: str = "sum",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Returns the cross-entropy of logits [N, C, ...] and int64 classes [N, ...], in float32 for any precision.

    With `z_loss` and the reduction "sum", each counted target adds `z_loss` times the squared logsumexp of its logits
    [N, C].

    The result is bitwise equal to `torch.nn.functional.cross_entropy` of `logits.float()`, except with `z_loss`, and
    for sums over bf16 logits [N, C] of 32 MiB or more: these are added up in parts, and take less memory.
    """
    import torch
    import torch.nn.functional as F

    large = logits.dtype == torch.bfloat16 and logits.ndim == 2 and logits.numel() >= _LARGE
    sharded = hasattr(logits, "full_tensor")
    if large and reduction == "sum" and not (sharded or torch.compiler.is_compiling()):  # the compiler fuses the rest
        from ddpforge.builtin.tasks.large_logits import low_memory_cross_entropy

        return low_memory_cross_entropy(logits, targets, ignore_index, label_smoothing, z_loss)
    if z_loss:
        plain = cross_entropy(logits, targets, ignore_index=ignore_index, label_smoothing=label_smoothing)
        return plain + z_loss * logits.float().logsumexp(1).square().masked_fill(targets == ignore_index, 0).sum()
    # torch's loss over sharded logits supports only float32.
    if sharded or label_smoothing:
        options: dict[str, Any] = {"label_smoothing": label_smoothing} if label_smoothing else {}
        return F.cross_entropy(logits.float(), targets, reduction=reduction, ignore_index=ignore_index, **options)
    probabilities = F.log_softmax(logits, dim=1, dtype=torch.float32)
    return F.nll_loss(probabilities, targets, reduction=reduction, ignore_index=ignore_index)


def reject_targets(error: Exception, task: str, outputs: Tensor, targets: Tensor) -> NoReturn:
    """Raises UsageError for targets that the loss rejected with `error`; re-raises an out-of-memory `error`."""
    if says_memory_is_full(error):
        raise error
    about = f"targets {described(targets)}"
    if targets.numel() and not targets.is_floating_point():
        about += f" from {int(targets.min())} to {int(targets.max())}"
    if targets.is_floating_point() and "Long" in str(error):
        raise UsageError(
            f"task {task} takes whole numbers as classes, but the targets are {described(targets)}",
            hints=["return the class as an int or an int64 tensor", 'for numbers, set task.use = "regression"'],
        ) from error
    raise UsageError(
        f"task {task}: the model's outputs {described(outputs)} and the {about} do not fit together: {error}",
        hints=list(_ways(outputs, targets)),
    ) from error


def _ways(outputs: Tensor, targets: Tensor) -> Iterator[str]:
    """Yields ways to mend targets that do not fit the outputs of a classifier."""
    import torch

    if outputs.ndim == 2 and targets.ndim == 2 and targets.shape[1] == 1:
        yield "return one number for each sample: label.squeeze(-1), which makes a batch [B] of [B, 1]"
    elif outputs.shape == targets.shape and not targets.is_floating_point():
        yield "return the number of the class: label.argmax(-1), or the probabilities of all classes as float32"
    elif targets.dtype not in (torch.int64, torch.uint8) and not targets.is_floating_point():
        yield "return the class as an int, or label.long()"
    elif outputs.ndim > 2 and targets.ndim == 1:
        yield "the model's outputs are [B, classes]: is a dimension of the inputs too many, e.g. [1, 8] for [8]?"
    if outputs.ndim:
        yield f"there are {outputs.shape[-1]} classes, from 0 to {outputs.shape[-1] - 1}"


def number_of_classes(data: Any) -> int | None:
    """Returns the number of a dataset's classes, as `classes` or as the number of their names; None if unknown."""
    classes = getattr(data, "classes", None)
    return classes if isinstance(classes, int) else len(class_names_of(data)) or None


def reject_target_kind(data: Any, kind: str, task: str, wanted: str) -> None:
    """Raises UsageError if the dataset's attribute `target_kind` is `kind`, because the task takes `wanted`."""
    if getattr(data, "target_kind", None) != kind:
        return
    names = class_names_of(data)
    what = "numbers" if kind == "number" else f"classes{': ' if names else ''}{', '.join(names[:5])}"
    other, way = ("regression", "class") if kind == "number" else ("classification", "number")
    raise UsageError(
        f"task {task} takes {wanted}, but the targets of {type(data).__name__} are {what}{' …' * (len(names) > 5)}",
        hints=[f'set task.use = "{other}"', f'or, for the dataset csv, set target_kind = "{way}"'],
        key="task.use",
    )


def are_probabilities(targets: Tensor) -> bool:
    """True for targets that are probabilities of classes, float [B, C]."""
    return targets.is_floating_point() and targets.ndim == 2


def reject_no_class(classes: Tensor, task: str) -> None:
    """Raises UsageError for a negative class, or for rows that are not probabilities, in a batch on the CPU."""
    # torch's losses would ignore or refuse a negative class. Reading classes on a GPU would wait for it.
    if classes.device.type != "cpu" or not classes.numel():
        return
    if are_probabilities(classes):
        sums = classes.sum(dim=1)
        if bool((classes < 0).any()) or bool(((sums - 1).abs() > 1e-2).any()):
            raise UsageError(
                f"task {task}: float targets [B, C] are probabilities of classes, but a row has the sum "
                f"{float(sums[(sums - 1).abs().argmax()]):.4g}",
                hints=["return int64 classes, or probabilities of 0 or more with the sum 1"],
            )
        return
    if classes.is_floating_point():
        return
    if (least := int(classes.min())) < 0:
        raise UsageError(
            f"task {task}: a sample has the class {least}, but classes start at 0",
            hints=[f"set task.ignore_index = {least}: these samples then count neither in the loss nor in metrics"],
        )
