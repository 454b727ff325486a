"""Finds values in a batch that explain an error of its forward pass, or a gradient that is not finite."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ddpforge.errors import Diverged, UsageError
from ddpforge.interfaces.forms import described

__all__ = ["CHECKS", "nonfinite_values", "raise_if_batch_explains"]

_DTYPE = re.compile(r"same dtype|scalar type|Input type \(.*\) and|not implemented for '|expected .* dtype")
_TARGET = re.compile(r"Target (-?\d+) is out of bounds")


def raise_if_batch_explains(error: Exception, model: nn.Module, batch: Any, key: str = "") -> None:
    """Raises UsageError, with the recipe's `key` of the data, if the batch explains an error of torch.

    It finds tensors of another dtype than the model's parameters, tokens beyond an embedding, and classes beyond the
    outputs. Returns if it finds none.
    """
    text = str(error)
    if isinstance(error, IndexError) and "index out of range in self" in text:
        found = _beyond_embedding(model, batch)
    elif isinstance(error, IndexError) and (target := _TARGET.search(text)):
        found = (
            f"a target of the batch is {target[1]}, which the model has no output for",
            "classes are 0, 1, …: " + ("raise the model's number of outputs, or number the targets from 0"),
        )
    elif isinstance(error, RuntimeError | NotImplementedError) and _DTYPE.search(text):
        found = _other_dtype(model, batch)
    else:
        return
    if found:
        raise UsageError(found[0], hints=[found[1], f"torch raised: {text.splitlines()[0]}"], key=key) from error


def nonfinite_values(batch: Any) -> str:
    """Names the first tensor of a batch with NaN or an infinite value, and its row; returns "" if there is none."""
    for name, tensor in _tensors(batch):
        if tensor.is_floating_point() and tensor.ndim and not bool((finite := torch.isfinite(tensor)).all()):
            row = int((~finite).flatten(1).any(1).nonzero()[0]) if tensor.ndim > 1 else int((~finite).nonzero()[0])
            what = "NaN" if bool(torch.isnan(tensor[row]).any()) else "an infinite value"
            return f"{name} ({described(tensor)}) has {what} in row {row}"
    return ""


def _other_dtype(model: nn.Module, batch: Any) -> tuple[str, str] | None:
    own = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    odd = [(name, one) for name, one in _tensors(batch) if one.dtype not in own and (name, one.dtype) != _TARGETS]
    floats = [(name, one) for name, one in odd if one.is_floating_point()]
    if not odd or not own:
        return None
    name, tensor = (floats or odd)[0]
    wanted = _called(sorted(own, key=str)[0])
    return (
        f"{name} of the batch is {described(tensor)}, but the parameters of the model are {wanted}",
        f"return {wanted} from the dataset: array.astype({wanted!r}), or tensor.to(torch.{wanted})",
    )


_TARGETS = ("part 1", torch.int64)  # classes, whose dtype is right


def _beyond_embedding(model: nn.Module, batch: Any) -> tuple[str, str] | None:
    """Describes values below 0 or beyond the largest embedding, or else sequences longer than an embedding has rows."""
    tables = [(one.num_embeddings, name or "the model") for name, one in model.named_modules() if _is_table(one)]
    integers = [one for one in _tensors(batch) if one[1].dtype in _INTEGERS and one[1].numel()]
    for part, tensor in integers if tables else ():
        least, most = int(tensor.min()), int(tensor.max())
        rows, name = max(tables)
        if least < 0 or most >= rows:
            return (
                f"{part} of the batch ({described(tensor)}) has values from {least} to {most}, but `{name}` has rows "
                f"for 0 to {rows - 1}",
                "give the model the vocabulary of the data, or the data the tokenizer of the model",
            )
    for part, tensor in integers:
        rows, name = min(tables, default=(0, ""))
        if name and tensor.ndim > 1 and tensor.shape[1] > rows:
            return (
                f"{part} of the batch ({described(tensor)}) has sequences of {tensor.shape[1]}, but `{name}` has "
                f"{rows} rows",
                "give the model as many positions, or cut the sequences",
            )
    return None


def _is_table(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag)


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def _called(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensors(batch: Any, name: str = "the tensor") -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a batch, each with its place: `inputs`, part 0."""
    if isinstance(batch, Tensor):
        yield name, batch
    elif isinstance(batch, Mapping):
        for key, part in batch.items():
            yield from _tensors(part, f"`{key}`")
    elif isinstance(batch, list | tuple):
        for number, part in enumerate(batch):
            yield from _tensors(part, f"part {number}" if name == "the tensor" else name)


def nonfinite_inputs(error: Exception, module: nn.Module, batch: Any, key: str) -> str:
    """Describes inputs that explain a gradient that is not finite; "" if there are none, or for any other error."""
    if not isinstance(error, Diverged):
        return ""
    odd = (name for name, one in module.named_parameters() if not bool(torch.isfinite(one.detach()).all()))
    weights = next((f"the weight `{name}` was NaN or infinite before the step" for name in odd), "")
    return f"the data: {found}" if (found := nonfinite_values(batch)) else weights


CHECKS = (("", raise_if_batch_explains), ("", nonfinite_inputs))
"""The explanations of a failed forward pass, and of a gradient that is not finite."""
