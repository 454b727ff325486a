"""Token mixers with a state, on blocks of documents: each document begins with an empty state.

Linear attention, state-space layers and short causal convolutions take no document mask. In a block of documents, the
mixer is called with the documents as rows of batches, padded on the right, and its outputs go back to their places.
A mixer is causal, so that the padding changes nothing before it: the outputs are those of each document alone,
whatever the mixer computes, on a CPU and with kernels. `probe.packing_fault` proves it for a model.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_map

__all__ = ["Documents", "separate_documents"]

_SMALLEST = 64  # tokens of the shortest padded batch


@dataclass(frozen=True)
class Documents:
    """Documents of a batch [B, T] in padded batches, one for each range of lengths: up to 64, 128, 256, ... T tokens.

    So at most half of the tokens are padding, apart from documents below 32 tokens. The number of batches depends on T
    alone: all ranks compute a layer equally often, which ZeRO-3 needs, as it gathers weights in each call.
    """

    shape: tuple[int, int]
    batches: tuple[Tensor, ...]
    """Place of each token in the B * T tokens, int64 [documents, longest of them]; the last token again as padding."""
    places: Tensor
    """Place of each token of [B, T] in the tokens of all batches, int64 [B * T]."""

    @classmethod
    def of(cls, positions: Tensor, rows: int) -> "Documents | None":
        """Returns the documents of positions, int64 [B or 1, T]; None if each row is one document.

        A document begins where a position is not the one before plus 1.
        """
        starts = np.ones(positions.shape, dtype=bool)
        starts[:, 1:] = (positions[:, 1:] != positions[:, :-1] + 1).cpu().numpy()
        if not starts[:, 1:].any():
            return None
        starts = np.broadcast_to(starts, (rows, positions.shape[1]))
        begins = np.flatnonzero(starts)
        sizes = np.diff(begins, append=starts.size)
        batches, places, taken = [], np.zeros(starts.size, dtype=np.int64), 0
        for chosen in _ranges(sizes, starts.shape[1]):
            first, size = begins[chosen], sizes[chosen]
            if not len(first):
                batches.append(np.zeros((1, 1), dtype=np.int64))  # its output has no place
                taken += 1
                continue
            steps = np.arange(size.max())
            indices = first[:, None] + np.minimum(steps, size[:, None] - 1)
            real = steps < size[:, None]
            places[indices[real]] = taken + np.flatnonzero(real)
            batches.append(indices)
            taken += indices.size
        there = positions.device
        return cls(
            (rows, positions.shape[1]),
            tuple(torch.from_numpy(one).to(there) for one in batches),
            torch.from_numpy(places).to(there),
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def apply(self, mixer: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the outputs [B, T, ...] of `mixer`, computed for each document alone.

        Each input tensor [B, T, ...] or [1, T, ...] is divided into documents, in containers as well. Members of a
        tuple of outputs that are not [B, T, ...] become None.
        """
        found = []
        for batch in self.batches:
            args_, kwargs_ = tree_map(lambda one, batch=batch: self._taken(one, batch), (args, kwargs))
            found.append(mixer(*args_, **kwargs_))
        if isinstance(found[0], tuple):
            return tuple(self._joined(parts) for parts in zip(*found, strict=True))
        return self._joined(tuple(found))

    def _taken(self, given: Any, batch: Tensor) -> Any:
        rows, length = self.shape
        if not isinstance(given, Tensor) or given.ndim < 2 or tuple(given.shape[:2]) not in {self.shape, (1, length)}:
            return given
        return given.expand(rows, *given.shape[1:]).flatten(0, 1)[batch]

    def _joined(self, parts: tuple[Any, ...]) -> Tensor | None:
        pairs = list(zip(parts, self.batches, strict=True))
        if not all(isinstance(part, Tensor) and part.shape[:2] == batch.shape for part, batch in pairs):
            return None
        joined = torch.cat([part.flatten(0, 1) for part in parts])[self.places]
        return joined.view(*self.shape, *joined.shape[1:])


def _ranges(sizes: NDArray[np.int64], longest: int) -> Iterator[NDArray[np.intp]]:
    """Yields the documents of each range of lengths; their number depends on `longest` alone."""
    low, high = 0, _SMALLEST
    while low < longest:
        yield np.flatnonzero((sizes > low) & (sizes <= high))
        low, high = high, 2 * high


def separate_documents(model: nn.Module) -> None:
    """Lets the token mixers with a state in `model` begin anew in each document of `position_ids`, in place.

    Names, parameters and outputs for other inputs do not change. Models without such mixers do not change at all.
    """
    mixers = set(_mixers(model))
    for path in sorted({each for mixer in mixers for each in _path(mixer, model)}):
        module = model.get_submodule(path)
        module.__class__ = _extended(_Mixer if path in mixers else _Carrier, type(module))
        module.register_forward_pre_hook(_give, with_kwargs=True)
    if mixers:
        model.register_forward_pre_hook(_begin, with_kwargs=True)
        model.register_forward_hook(_end, always_call=True)


def _path(mixer: str, model: nn.Module) -> Iterator[str]:
    """Yields the paths of the layer of a mixer, of the modules inside on the way to it, and of the mixer."""
    parts = mixer.split(".")
    first = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    for number in range(first, len(parts)):
        path = ".".join(parts[: number + 1])
        if not isinstance(model.get_submodule(path), nn.ModuleList):
            yield path


def _mixers(model: nn.Module) -> Iterator[str]:
    """Yields the paths of modules with a convolution over tokens, and of linear attention without one."""
    convolves = {name for name, one in model.named_modules() if any(type(c) is nn.Conv1d for c in one.children())}
    convolves.discard("")
    yield from convolves
    for name, module in model.named_modules():
        linear = getattr(module, "layer_type", None) == "linear_attention" and name not in convolves
        if linear and not {f"{name}.{path}" for path, _ in module.named_modules()} & convolves:
            yield name


class _Carrier:
    """Part of the class of a layer. Its documents are an argument: a recomputation has those of the first pass."""

    documents: Documents | None = None

    def forward(self, *args: Any, packed_documents: Documents | None = None, **kwargs: Any) -> Any:
        _set(self, packed_documents)
        try:
            return self._compute(packed_documents, super().forward, args, kwargs)  # type: ignore[misc]
        finally:
            _set(self, None)

    def _compute(self, documents: Documents | None, compute: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return compute(*args, **kwargs)


class _Mixer(_Carrier):
    """Part of the class of a mixer."""

    def _compute(self, documents: Documents | None, compute: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return compute(*args, **kwargs) if documents is None else documents.apply(compute, args, kwargs)


def _extended(part: type, kind: type) -> type:
    """Returns the class with `part` before it, of the same name: a function in an instance would not be copied."""
    return type(kind.__name__, (part, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


def _give(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if module.documents is None:
        return None
    return args, kwargs | {"packed_documents": module.documents}


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _begin(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Finds the documents by the rule of transformers' masks: in positions, without a padding mask or a cache."""
    positions = kwargs.get("position_ids")
    if positions is None or positions.ndim != 2:
        return
    if kwargs.get("attention_mask") is not None or kwargs.get("past_key_values") is not None:
        return
    given = kwargs.get("inputs_embeds")
    tokens = next((one for one in (given, kwargs.get("input_ids"), *args[:1]) if one is not None), positions)
    _set(model, Documents.of(positions, len(tokens)))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _end(model: nn.Module, args: Any, output: Any) -> None:
    _set(model, None)


def _set(within: Any, documents: Documents | None) -> None:
    """Sets the documents of all modules inside that take them."""
    for module in within.modules():
        if isinstance(module, _Carrier) and module is not within:
            module.documents = documents
