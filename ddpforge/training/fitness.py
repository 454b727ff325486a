"""Refuses, by name and before anything is done with it, a model that no strategy could train as its author means it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import itemgetter

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from ddpforge.checkpoint.untrusted import DTYPES
from ddpforge.errors import UsageError

__all__ = ["check_model", "extent", "is_dense", "repeats", "watch_batchnorm"]

_Named = tuple[str, Tensor]


def check_model(model: nn.Module) -> None:
    """Raises UsageError, naming the module, parameter or buffer, unless `model` can be trained and saved."""
    for owner, module in model.named_modules():
        _refuse_lazy(owner, module)
        _refuse_max_norm(owner, module)
    for name, tensor in _tensors(model):
        _refuse_form(name, tensor)
    _refuse_overlap(model)
    _refuse_unsavable(model)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _called(name: str) -> str:
    return f"`{name}`" if name else "the model"


def _refuse_lazy(owner: str, module: nn.Module) -> None:
    own = (*module._parameters.values(), *module._buffers.values())
    if any(tensor is not None and is_lazy(tensor) for tensor in own):
        raise UsageError(
            f"{_called(owner)} ({type(module).__name__}) has no weights before its first forward pass, and optimizers, "
            "ranks and checkpoints need them before",
            hints=[
                f"name its sizes: nn.{type(module).__name__.removeprefix('Lazy')}",
                "or call the model once on a batch of zeros at the end of its constructor",
            ],
        )


def _refuse_max_norm(owner: str, module: nn.Module) -> None:
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        raise UsageError(
            f"{_called(owner)} ({type(module).__name__}) has max_norm = {module.max_norm:g}, with which forward "
            "changes its weights: ranks see different samples and would come apart",
            hints=[
                "leave max_norm out and scale the embedding's output, e.g. with torch.nn.functional.normalize",
                "or let a callback scale the rows after every step, through its `weights`",
            ],
        )


def _refuse_form(name: str, tensor: Tensor) -> None:
    kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        what = "quantized" if tensor.is_quantized else f"of layout {str(tensor.layout).removeprefix('torch.')}"
        raise UsageError(
            f"{kind} `{name}` is {what}: ranks exchange, and checkpoints hold, dense tensors",
            hints=["register its indices and values as dense buffers, and build it from them in forward"],
        )
    if kind == "parameter" and tensor.is_complex():
        raise UsageError(
            f"parameter `{name}` is {_dtype(tensor)}, and ddpforge trains real numbers",
            hints=["make it a real parameter of shape [..., 2], and use torch.view_as_complex(parameter) in forward"],
        )
    if kind == "parameter" and not tensor.is_meta and repeats(tensor):
        expanded = any(not step and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
        made = "expand" if expanded else "as_strided` or `unfold"
        raise UsageError(
            f"parameter `{name}` was made with `{made}`: several of its elements are one number in memory",
            hints=["end it with `.clone()`, or keep the smaller tensor as the parameter and expand it in forward"],
        )


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _refuse_overlap(model: nn.Module) -> None:
    """Refuses tensors that share memory: a move to a device tears them apart. One parameter may have two names."""
    held: dict[int, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, tensor in _tensors(model):
        if tensor.numel() and not tensor.is_meta:
            held[tensor.untyped_storage().data_ptr()].append((name, tensor))
    for together in held.values():
        for (name, one), (other, two) in _neighbours(together):
            if any(isinstance(tensor, nn.Parameter) for tensor in (one, two)) and _share(one, two):
                raise UsageError(
                    f"`{name}` and `{other}` share memory without being one parameter, and on another device they "
                    "would be two tensors",
                    hints=[
                        "to tie parameters use one: `self.b.weight = self.a.weight`, and transpose it in forward",
                        "to keep a copy end it with `.detach().clone()`",
                    ],
                )


def _neighbours(together: Sequence[_Named]) -> Iterator[list[_Named]]:
    """The pairs of tensors of one storage of which one begins within the other's extent, each by name."""
    ranges = sorted((*extent(tensor), number) for number, (_, tensor) in enumerate(together))
    for place, (_, stop, number) in enumerate(ranges):
        for start, _, other in ranges[place + 1 :]:
            if start >= stop:
                break
            yield sorted((together[number], together[other]), key=itemgetter(0))


def _share(one: Tensor, two: Tensor) -> bool:
    """True if two such tensors share an element: columns of one matrix lie between each other, and share none."""
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


def is_dense(tensor: Tensor) -> bool:
    """True if a tensor's elements fill the memory that it spans, in whatever order."""
    start, stop = extent(tensor)
    return not tensor.numel() or (stop - start == tensor.nbytes and not repeats(tensor))


def repeats(tensor: Tensor) -> bool:
    """True if several elements of a tensor are one number in memory."""
    axes = sorted((step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    reach = 0
    for step, size in axes:
        if step <= reach:
            break
        reach += step * (size - 1)
    else:
        return False
    if not tensor.numel():
        return False
    places = torch.arange(1 + sum(step * (size - 1) for step, size in axes))
    found: Tensor = torch.unique(places.as_strided(tensor.shape, tensor.stride()))
    return found.numel() < tensor.numel()


def extent(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor spans: the first, and the one after the last."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.itemsize
    return start, start + (int(last) + 1) * tensor.itemsize


def _refuse_unsavable(model: nn.Module) -> None:
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise UsageError(
                f"`{name}` in the model's state_dict is a {type(value).__name__}, and a checkpoint holds tensors only",
                hints=["keep it in a buffer, or rebuild it from the recipe"],
            )
        if _dtype(value) not in DTYPES:
            raise UsageError(
                f"`{name}` is {_dtype(value)}, and a checkpoint holds {', '.join(DTYPES)}",
                hints=["register_buffer(…, persistent=False), where the constructor can make it again"],
            )


# ---------------------------------------------------------------------------------------------- model and batches
def watch_batchnorm(model: nn.Module, full: int, last: int) -> None:
    """Has the first training pass refuse a BatchNorm for which a later micro-batch would be too small.

    `full` and `last` are the sizes of the smallest micro-batch of a full step, and of an epoch's last. A BatchNorm
    needs two values per channel: two samples, unless each has several (pixels), which only the first batch tells.
    """
    if min(full, last) > 1:
        return
    hints = ['set train.last_batch = "drop"', "or a train.global_batch that leaves another rest"]
    if full <= 1:
        hints = ["set train.micro_batch to 2 or more, and train.global_batch to twice the ranks or more"]
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
            _watch(name, module, hints)


def _watch(name: str, module: nn.Module, hints: list[str]) -> None:
    def look(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if not module.training:
            return
        handle.remove()
        if inputs[0].numel() == inputs[0].shape[0] * inputs[0].shape[1]:
            raise UsageError(
                f"{_called(name)} ({type(module).__name__}) normalises over the samples of a micro-batch, and there "
                "are micro-batches of one sample",
                hints=hints,
            )

    handle = module.register_forward_pre_hook(torch.compiler.disable(look))  # type: ignore[no-untyped-call]
