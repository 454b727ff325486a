"""Collates samples to batches, with the dataset's `collate` or torch's default; takes a batch's inputs and targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import default_collate

from ddpforge.data.workers import explained, lacks_resources
from ddpforge.errors import PluginError, UsageError

if TYPE_CHECKING:
    from ddpforge.recipe.schema import DataSection

__all__ = ["WHOLE_BATCH", "BatchKeys", "collate_of"]


@dataclass(frozen=True)
class BatchKeys:
    """Keys of a batch that is a mapping: those of the model's inputs, and that of the targets. Empty: the whole batch.

    One input is a value, several are a tuple. With `targets` the batch becomes a pair (inputs, targets).
    """

    inputs: tuple[str, ...] = ()
    targets: str | None = None

    @classmethod
    def of(cls, data: DataSection) -> BatchKeys:
        """Returns the keys that a recipe sets."""
        return cls(data.inputs or (), data.targets)

    def __bool__(self) -> bool:
        return bool(self.inputs or self.targets)

    def __call__(self, batch: Any) -> Any:
        """Returns the inputs, or the pair of inputs and targets; raises UsageError if the batch does not have them."""
        if not isinstance(batch, Mapping):
            raise UsageError(
                f"data.inputs and data.targets name keys of a batch, but the data gives a {type(batch).__name__}",
                hints=["remove them: a batch (inputs, targets) needs no keys"],
                key="data.inputs" if self.inputs else "data.targets",
            )
        for option, keys in (("inputs", self.inputs), ("targets", [self.targets] if self.targets else ())):
            if missing := [key for key in keys if key not in batch]:
                hints = [f"it has {', '.join(map(str, batch))}"]
                raise UsageError(f"the batch has no `{missing[0]}`", hints=hints, key=f"data.{option}")
        others = tuple(key for key in batch if key != self.targets)
        values = tuple(batch[key] for key in self.inputs or others)
        inputs = values[0] if len(values) == 1 else values
        return inputs if self.targets is None else (inputs, batch[self.targets])


WHOLE_BATCH = BatchKeys()


def collate_of(data: Any, keys: BatchKeys = WHOLE_BATCH) -> Callable[[Sequence[Any]], Any]:
    """Returns the dataset's `collate`, or torch's `default_collate` with an error that names the dataset.

    With `keys` the collated batch has only their values.
    """
    collate = getattr(data, "collate", None) or partial(_stacked, type(data).__name__)
    return partial(_selected, collate, keys) if keys else collate


def _selected(collate: Callable[[Sequence[Any]], Any], keys: BatchKeys, samples: Sequence[Any]) -> Any:
    return keys(collate(samples))


def _stacked(name: str, samples: Sequence[Any]) -> Any:
    try:
        return default_collate(list(samples))
    except (RuntimeError, TypeError) as error:
        if lacks_resources(error):  # in a loader process, batches are made in shared memory
            raise explained(error, "a loader process could not make a micro-batch") from error
        raise PluginError(
            f"the samples of {name} cannot be stacked to a batch: {error}",
            hints=_ways(str(error), samples),
        ) from error


def _ways(error: str, samples: Sequence[Any]) -> list[str]:
    """Returns hints for samples that torch cannot stack."""
    if any(sample is None for sample in samples):
        return ["`__getitem__` returned None: does it end with `return`?"]
    if "NoneType" in error:
        return ["a part of a sample is None: return a tensor or a number instead, or leave the part out"]
    if "PIL" in error:
        return ["turn images into tensors, e.g. with torchvision.transforms.v2.functional.pil_to_tensor(image)"]
    return ["give samples of one form, or give the dataset a method `collate(samples)` that pads them"]
