"""Nested batches and samples (pytrees of tensors): takes them apart, moves them, and compares them."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import inspect
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddpforge.errors import UsageError
from ddpforge.interfaces import device_kind

__all__ = ["close", "digest", "is_object", "leaves", "may_hold", "merge", "pinned", "select", "take", "to_device"]

_SMALL = 256 << 10  # bytes, which PCIe 4 copies in 10 microseconds: less than a second stream costs the host


def leaves(tree: Any) -> Iterator[Any]:
    """Yields all leaves (values that are not containers), in order."""
    if isinstance(tree, Mapping):
        for key in tree:
            yield from leaves(tree[key])
    elif isinstance(tree, list | tuple) and not is_object(tree):
        for item in tree:
            yield from leaves(item)
    else:
        yield tree


def may_hold(batch: Any, samples: int) -> bool:
    """False if the batch has tensors or lists, and none has the length `samples`; always True for objects."""
    lengths = [*_lengths(batch)]
    return samples in lengths or not lengths or any(map(is_object, leaves(batch)))


def _lengths(tree: Any) -> Iterator[int]:
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from _lengths(value)
    elif isinstance(tree, list | tuple) and not is_object(tree):
        yield len(tree)
        for value in tree:
            yield from _lengths(value)
    elif getattr(tree, "shape", ()):
        yield tree.shape[0]


def take(batch: Any, start: int, stop: int, samples: int) -> Any:
    """Returns the samples from `start` to `stop` (exclusive) of a batch of `samples` samples, as `select` does."""
    return select(batch, slice(start, stop), samples)


def select(batch: Any, rows: slice | Sequence[int], samples: int) -> Any:
    """Returns the samples at the places `rows` of a batch of `samples` samples.

    Tensors of another length are not cut. A list is cut if it has `samples` items of one form, e.g. images of
    different sizes. Raises ValueError for an object that contains samples, such as a batch of graphs.
    """
    if isinstance(batch, Tensor):
        return batch[rows] if _runs_over(batch, samples) else batch
    if is_object(batch):
        raise ValueError(f"a {type(batch).__name__} cannot be cut into samples")
    if isinstance(batch, Mapping):
        return _like(batch, {key: select(value, rows, samples) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(select(value, rows, samples) for value in batch))
    if isinstance(batch, list | tuple):
        if len(batch) == samples and _has_samples(batch):
            return batch[rows] if isinstance(rows, slice) else type(batch)(batch[row] for row in rows)
        return type(batch)(select(value, rows, samples) for value in batch)
    return batch


def merge(batches: Sequence[Any], rows: Sequence[Sequence[int]]) -> Any:
    """Returns one batch of the samples of several batches; `rows` has the places of their samples in the result.

    The batches have one structure, as torch's default_collate makes it: tensors and lists of samples, in dicts and
    lists.
    """
    first, places = batches[0], [row for of_batch in rows for row in of_batch]
    back = sorted(range(len(places)), key=places.__getitem__)
    if isinstance(first, Tensor):
        return torch.cat([*batches])[back]
    if isinstance(first, Mapping):
        return _like(first, {key: merge([batch[key] for batch in batches], rows) for key in first})
    if isinstance(first, list | tuple) and any(isinstance(leaf, Tensor) for leaf in leaves(first)):
        columns = (merge(parts, rows) for parts in zip(*batches, strict=True))
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    samples = [sample for batch in batches for sample in batch]
    return [samples[place] for place in back]


def _like(mapping: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Puts values into a mapping of the same class, as torch's default_collate does; into a dict if it cannot."""
    if type(mapping) is dict or not isinstance(mapping, MutableMapping):
        return values
    try:
        filled = copy.copy(mapping)
        filled.update(values)
    except (TypeError, RuntimeError):  # e.g. a mapping of fixed size
        return values
    return filled


def _runs_over(leaf: Any, samples: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == samples


def _has_samples(items: Sequence[Any]) -> bool:
    """True if each item of a list is one sample; False if each item is a column of all samples."""
    tensors = [leaf for leaf in leaves(items) if isinstance(leaf, Tensor)]
    of_one_form = len({*map(_form, items)}) == 1
    return not tensors or (of_one_form and not all(_runs_over(leaf, len(items)) for leaf in tensors))


def _form(item: Any) -> tuple[Any, ...]:
    if isinstance(item, Tensor):
        return item.dtype, item.ndim
    if isinstance(item, Mapping):
        return tuple((key, _form(value)) for key, value in item.items())
    if isinstance(item, list | tuple):
        return type(item), *map(_form, item[:1])
    return (type(item),)


def digest(tree: Any) -> str:
    """Returns a hash of the leaves, which is equal for equal trees in every process."""
    found = hashlib.sha256()
    for leaf in leaves(tree):
        if not isinstance(leaf, Tensor) and (hasattr(leaf, "__array__") or hasattr(leaf, "__array_interface__")):
            leaf = np.asarray(leaf)  # e.g. PIL images
            leaf = torch.from_numpy(leaf.copy()) if leaf.dtype.kind in "biufc" else leaf.tolist()
        if is_object(leaf) and (inside := tuple(leaf) if isinstance(leaf, tuple) else getattr(leaf, "__dict__", None)):
            found.update(f"{type(leaf).__name__} {digest(inside)}".encode())
        elif isinstance(leaf, Tensor):
            found.update(f"{leaf.dtype}{list(leaf.shape)}".encode())
            found.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            text = repr(leaf)
            if " at 0x" in text:
                text = ""  # an address in memory, which differs between processes
            found.update(f"{type(leaf).__name__} {text}".encode())
    return found.hexdigest()


def close(one: Any, other: Any, tolerance: float = 1e-5) -> bool:
    """True if two values (tensors, numbers, text) are equal up to rounding."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape:
            return False
        return torch.allclose(one.cpu().double(), other.cpu().double(), rtol=tolerance, atol=tolerance, equal_nan=True)
    if isinstance(one, float) and isinstance(other, int | float):
        return close(torch.tensor(one), torch.tensor(float(other)), tolerance)
    return type(one) is type(other) and bool(one == other)


def to_device(batch: Any, device: torch.device) -> Any:
    """Returns the same tree of tensors on `device`; copies from pinned memory are asynchronous.

    An object of a class with a method `to(device)`, such as a batch of graphs, is moved by that method. Copies to a
    device with streams use a separate one and overlap with earlier forward and backward passes, see
    https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams; batches of up to 256 KiB use the current stream.
    """
    kind = device_kind(device)
    if kind.is_host and type(batch) is tuple and {type(x) is Tensor and x.is_cpu for x in batch} == {True}:
        return batch
    if not kind.has_streams or sum(leaf.nbytes for leaf in leaves(batch) if isinstance(leaf, Tensor)) <= _SMALL:
        return _moved(batch, device)
    aside, here = _stream_for_copies(device), kind.current_stream(device)
    with kind.on_stream(aside):
        moved = _moved(batch, device, here)
    here.wait_stream(aside)
    for leaf in leaves(moved):
        if isinstance(leaf, Tensor):
            leaf.record_stream(here)  # its memory is not reused for another copy while `here` reads it
    return moved


@functools.cache
def _stream_for_copies(device: torch.device) -> Any:
    return device_kind(device).new_stream(device)


def _moved(batch: Any, device: torch.device, here: Any = None) -> Any:
    if isinstance(batch, Tensor):
        _reject_float64(batch, device)
        return batch.to(device, non_blocking=True)
    if _moves_itself(batch):
        # The tensors in an object are unknown, so `record_stream` cannot protect them: copy on the stream that reads.
        with device_kind(device).on_stream(here) if here and is_object(batch) else contextlib.nullcontext():
            return copy.copy(batch).to(device, **_options_of_to(batch))  # some work in place
    if isinstance(batch, Mapping):
        return _like(batch, {key: _moved(value, device, here) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_moved(value, device, here) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_moved(value, device, here) for value in batch)
    return batch


def _reject_float64(tensor: Tensor, device: torch.device) -> None:
    """Raises UsageError for a float64 tensor if the device lacks this dtype."""
    if tensor.dtype in (torch.float64, torch.complex128) and not (kind := device_kind(device)).has_float64:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise UsageError(
            f"a batch has a {dtype} tensor of shape {list(tensor.shape)}, but {kind.noun} has no {dtype} "
            f'(train.device = "{kind.name}")',
            hints=["return float32 from the dataset or its transform: `x.float()`"],
        )


def pinned(batch: Any) -> Any:
    """Returns the same tree with its tensors in pinned memory; an object with a method `pin_memory` pins itself."""
    if callable(getattr(batch, "pin_memory", None)):
        return batch.pin_memory()
    if isinstance(batch, Mapping):
        return _like(batch, {key: pinned(value) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(pinned, batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map(pinned, batch))
    return batch


def _moves_itself(value: Any) -> bool:
    return callable(getattr(type(value), "to", None))


def is_object(value: Any) -> bool:
    """True for an object with a method `to`, but no tensor or mapping: a batch of graphs, packed sequences."""
    return _moves_itself(value) and not isinstance(value, Tensor | Mapping)


def _options_of_to(batch: Any) -> Mapping[str, Any]:
    """Returns the keyword arguments for an object's `to`: `non_blocking=True` if it accepts that."""
    try:
        parameters = inspect.signature(batch.to).parameters.values()
    except ValueError:  # written in C
        return {}
    takes = any(parameter.name == "non_blocking" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return {"non_blocking": True} if takes else {}
