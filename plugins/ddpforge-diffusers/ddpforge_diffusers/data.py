"""Samples for generative training: scaled images or latents, each with a seed for its times and noise."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from ddpforge.errors import UsageError
from ddpforge.interfaces import Data
from pydantic import Field
from torch import Tensor

__all__ = ["DiffusionData"]

ddpforge_plugin_api = 3

Range = Literal["unit", "symmetric", "any"]
_EXPECTED = "expected a tensor, a pair (tensor, class), or a mapping with the key `sample`"
_SEEDS = 2**62
_CONDITIONS = ("embeddings", "pooled")


class DiffusionData:
    """Samples of the dataset `of`, as the tasks `flow_matching` and `ddpm` take them.

    A sample of `of` is a tensor [C, H, W], a pair of such a tensor and a class, or a mapping with the keys `sample` and
    possibly `label`, `embeddings` [T, D] and `pooled` [D]. It becomes a mapping with the same keys: `sample` is
    float32, `label` int64. The further key `seed`, int64, is the seed of the sample's times and noise. It depends only
    on the recipe's seed, the epoch and the sample, so losses are the same on any ranks and with any accumulation.

    Raises UsageError for samples of another form, values outside of `range`, and classes that do not exist.
    """

    gives_seeds = True
    random = True

    def __init__(
        self,
        *,
        of: Annotated[Data, Field(description="Dataset of images or latents, not a stream.")],
        range: Annotated[
            Range,
            Field(
                description='Values of a sample: "unit", 0 to 1, which become -1 to 1; "symmetric", -1 to 1; or "any",'
                " for latents. The last two are unchanged."
            ),
        ] = "unit",
        classes: Annotated[
            int | None, Field(ge=1, le=2**24, description="Number of classes; absent: that of the dataset.")
        ] = None,
    ) -> None:
        if not (hasattr(of, "__len__") and hasattr(of, "__getitem__")):
            raise ValueError(f"of: {type(of).__name__} is a stream; only a dataset with a length has seeds of samples")
        if not len(of):
            raise ValueError(f"of: {type(of).__name__} has no sample")
        self.data: Any = of
        self.range: Range = range
        own = getattr(of, "classes", None)
        if classes is not None and isinstance(own, int) and classes < own:
            raise ValueError(f"classes = {classes}, but {type(of).__name__} has {own} classes")
        self.classes: int | None = classes or (own if isinstance(own, int) else None)
        self.forkable = getattr(of, "forkable", False)
        self.shape: tuple[int, ...] | None = None
        self.example = self[0]
        self.shape = tuple(self.example["sample"].shape)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Returns the sample as a mapping; raises UsageError if it does not fit."""
        # Drawn first: the dataset may draw a number of values that depends on the sample.
        seed = torch.randint(_SEEDS, ())
        parts = self._parts(self.data[index], index)
        sample = self._scaled(parts["sample"], index)
        found = {"sample": sample, "seed": seed}
        if "label" in parts:
            found["label"] = self._label(parts["label"], index)
        for name in _CONDITIONS:
            if name in parts:
                found[name] = torch.as_tensor(parts[name], dtype=torch.float32)
        return found

    def _parts(self, value: Any, index: int) -> Mapping[str, Any]:
        if isinstance(value, Mapping):
            parts = value
        elif isinstance(value, tuple | list) and len(value) == 2:
            parts = {"sample": value[0], "label": value[1]}
        elif isinstance(value, tuple | list) and len(value) == 1:
            parts = {"sample": value[0]}
        else:
            parts = {"sample": value}
        if "sample" not in parts:
            raise self._mistake(index, f"has the keys {', '.join(map(repr, parts))}; {_EXPECTED}")
        if unknown := sorted(map(str, parts.keys() - {"sample", "label", *_CONDITIONS})):
            raise self._mistake(index, f"has the unknown key `{unknown[0]}`; known: sample, label, embeddings, pooled")
        return parts

    def _scaled(self, sample: Any, index: int) -> Tensor:
        if not isinstance(sample, Tensor):
            raise self._mistake(index, f"is a {type(sample).__name__}; {_EXPECTED}")
        if not sample.is_floating_point():
            raise self._mistake(index, f"is {sample.dtype}; expected floating-point numbers: divide bytes by 255")
        if sample.ndim != 3:
            raise self._mistake(index, f"has the shape {list(sample.shape)}; expected [C, H, W]")
        if self.shape is not None and tuple(sample.shape) != self.shape:
            raise self._mistake(
                index, f"has the shape {list(sample.shape)}, but sample 0 has {list(self.shape)}: resize all to one"
            )
        low, high = (float(edge) for edge in torch.aminmax(sample))
        if not (abs(low) < float("inf") and abs(high) < float("inf")):
            raise self._mistake(index, "has values that are not finite")
        lowest = {"unit": 0.0, "symmetric": -1.0}.get(self.range, low)
        highest = high if self.range == "any" else 1.0
        if low < lowest - 1e-3 or high > highest + 1e-3:
            raise self._mistake(
                index,
                f'has values from {low:.3g} to {high:.3g}, but range = "{self.range}" is {lowest:g} to {highest:g};'
                ' set range = "symmetric" for images from -1 to 1, and range = "any" for latents',
                key="range",
            )
        scaled: Tensor = sample.float()
        return 2 * scaled - 1 if self.range == "unit" else scaled

    def _label(self, label: Any, index: int) -> Tensor:
        found = torch.as_tensor(label)
        if found.ndim or found.is_floating_point():
            raise self._mistake(index, f"has the label {label!r:.60}; expected the whole number of a class")
        if self.classes is not None and not 0 <= int(found) < self.classes:
            raise self._mistake(
                index, f"has the class {int(found)}, but there are {self.classes}: 0 to {self.classes - 1}"
            )
        return found.long()

    def _mistake(self, index: int, fault: str, key: str = "of") -> UsageError:
        return UsageError(f"{key}: sample {index} of {type(self.data).__name__} {fault}", key=key)

    def __getattr__(self, name: str) -> Any:
        # Samples have another form than the dataset's own, which it collates or fetches together.
        if name.startswith("__") or name in ("data", "collate", "shape", "classes"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        return getattr(self.data, name)
