"""Checks of a bare model: raises an error for a tensor that no strategy can train, or no checkpoint can hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import itemgetter

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ddpforge import compat
from ddpforge.checkpoint.untrusted import DTYPES
from ddpforge.errors import UsageError
from ddpforge.training.dense_memory import extent, is_dense, repeats

__all__ = [
    "CHECKS",
    "check_compiled",
    "check_forms",
    "check_max_norm",
    "check_overlap",
    "check_savable",
    "check_uninitialised",
]

_Named = tuple[str, Tensor]


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields parameters and buffers by name, without those of lazy modules: they have no shape."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not is_lazy(tensor):
            yield name, tensor


def _called(name: str) -> str:
    return f"`{name}`" if name else "the model"


def check_compiled(model: nn.Module) -> None:
    """Raises UsageError for a module that `torch.compile` returned: it changes the names of weights in checkpoints."""
    for owner, module in model.named_modules():
        if compat.is_compiled(module):
            name = f"`{owner}`" if owner else "the model"
            raise UsageError(
                f"{name} is the result of torch.compile, under which weights have other names in checkpoints",
                hints=[
                    'use the bare module, and set train.compile = "default"',
                    "or compile it in place, which keeps the names: module.compile()",
                ],
            )


def check_uninitialised(model: nn.Module) -> None:
    """Raises UsageError for a lazy module, which has no weights before its first forward pass."""
    for owner, module in model.named_modules():
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if any(is_lazy(tensor) for tensor in own):
            raise UsageError(
                f"{_called(owner)} ({type(module).__name__}) has no weights before its first forward pass, but "
                "optimizers, ranks and checkpoints need them earlier",
                hints=[
                    f"set its sizes: nn.{type(module).__name__.removeprefix('Lazy')}",
                    "or call the model once on a batch of zeros at the end of its constructor",
                ],
            )


def check_max_norm(model: nn.Module) -> None:
    """Raises UsageError for an embedding that changes its weights in the forward pass."""
    for owner, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise UsageError(
                f"{_called(owner)} ({type(module).__name__}) has max_norm = {module.max_norm:g}, so forward changes "
                "its weights: ranks have different samples, and their weights would diverge",
                hints=[
                    "remove max_norm and scale the embedding's output, e.g. with torch.nn.functional.normalize",
                    "or let a callback scale the rows after every step, through its `weights`",
                ],
            )


def check_forms(model: nn.Module) -> None:
    """Raises UsageError for sparse, quantized and complex parameters, and for those made with `expand`."""
    for name, tensor in _tensors(model):
        _check_form(name, tensor)


def _check_form(name: str, tensor: Tensor) -> None:
    kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        what = "quantized" if tensor.is_quantized else f"of layout {str(tensor.layout).removeprefix('torch.')}"
        raise UsageError(
            f"{kind} `{name}` is {what}, but ranks exchange, and checkpoints hold, only dense tensors",
            hints=["register its indices and values as dense buffers, and build it from them in forward"],
        )
    if kind == "parameter" and tensor.is_complex():
        raise UsageError(
            f"parameter `{name}` is {_dtype(tensor)}, but ddpforge trains only real numbers",
            hints=["make it a real parameter of shape [..., 2], and use torch.view_as_complex(parameter) in forward"],
        )
    if kind == "parameter" and not tensor.is_meta and repeats(tensor):
        expanded = any(not step and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
        made = "expand" if expanded else "as_strided` or `unfold"
        raise UsageError(
            f"parameter `{name}` was made with `{made}`: several of its elements share a place in memory",
            hints=["end it with `.clone()`, or keep the smaller tensor as the parameter and expand it in forward"],
        )


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def check_overlap(model: nn.Module) -> None:
    """Raises UsageError for tensors that share memory, because a move to another device separates them.

    A parameter may have two names.
    """
    held: dict[int, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, tensor in _tensors(model):
        if tensor.numel() and not tensor.is_meta:
            held[tensor.untyped_storage().data_ptr()].append((name, tensor))
    for together in held.values():
        for (name, one), (other, two) in _neighbours(together):
            if any(isinstance(tensor, nn.Parameter) for tensor in (one, two)) and _share(one, two):
                raise UsageError(
                    f"`{name}` and `{other}` share memory but are not one parameter: on another device they would "
                    "be two tensors",
                    hints=[
                        "to tie parameters use one: `self.b.weight = self.a.weight`, and transpose it in forward",
                        "to keep a copy end it with `.detach().clone()`",
                    ],
                )


def _neighbours(together: Sequence[_Named]) -> Iterator[list[_Named]]:
    """Yields the pairs of tensors with overlapping extents in one storage, each sorted by name."""
    ranges = sorted((*extent(tensor), number) for number, (_, tensor) in enumerate(together))
    for place, (_, stop, number) in enumerate(ranges):
        for start, _, other in ranges[place + 1 :]:
            if start >= stop:
                break
            yield sorted((together[number], together[other]), key=itemgetter(0))


def _share(one: Tensor, two: Tensor) -> bool:
    """True if two tensors with overlapping extents share an element; different columns of a matrix share none."""
    if is_dense(one) and is_dense(two):
        return True
    seen = torch.zeros(max(extent(one)[1], extent(two)[1]), dtype=torch.bool)
    for tensor in (one, two):
        size = tensor.itemsize
        steps = (*(step * size for step in tensor.stride()), 1)
        places = seen.as_strided((*tensor.shape, size), steps, int(tensor.storage_offset()) * size)
        if tensor is two:
            return bool(places.any())
        places.fill_(True)
    return False


def check_savable(model: nn.Module) -> None:
    """Raises UsageError for an entry of the model's state_dict that no checkpoint can hold."""
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise UsageError(
                f"`{name}` in the model's state_dict is a {type(value).__name__}, but a checkpoint holds only tensors",
                hints=["keep it in a buffer, or rebuild it from the recipe"],
            )
        if _dtype(value) not in DTYPES:
            raise UsageError(
                f"`{name}` is {_dtype(value)}, but a checkpoint holds only {', '.join(DTYPES)}",
                hints=["register_buffer(…, persistent=False), if the constructor can make it again"],
            )


CHECKS = (
    ("", check_compiled),
    ("", check_uninitialised),
    ("", check_max_norm),
    ("", check_forms),
    ("", check_overlap),
    ("", check_savable),
)
"""The checks of the recipe's model and of auxiliary modules; the caller has the key."""
