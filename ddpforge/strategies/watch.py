"""Looks at the first forward passes for what would be trained wrongly or fail later, and refuses it by name."""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from ddpforge import compat
from ddpforge.errors import StrategyError, UsageError

__all__ = ["Guard", "refuse_loss", "watched"]

_SHARDING = ("torch.distributed.", "deepspeed.")
_BETWEEN = ("torch.", f"{__name__}.")  # modules through which a call comes here
_MARKS = {"requires_grad_", "share_memory_"}  # change no value
_OPERATORS = ("add", "and", "floordiv", "lshift", "mod", "mul", "or", "pow", "rshift", "sub", "truediv", "xor")
_ASSIGNMENTS = {"__setitem__", "__idiv__", *(f"__i{name}__" for name in _OPERATORS)}
_EMBEDDINGS = {nn.functional.embedding, nn.functional.embedding_bag}


@contextmanager
def watched(model: nn.Module, *, shards_weights: bool, shards_gradients: bool, eager: bool) -> Iterator[None]:
    """Raises UsageError or StrategyError for what a forward pass of `model` must not do.

    It must not write into parameters: what the optimizer, checkpoints and other ranks have would not be that. Where
    weights or gradients are sharded, it must not do what sharding cannot follow. Compiled code (not `eager`) cannot be
    watched inside; there only the parameters are compared.
    """
    versions = {name: compat.version(parameter) for name, parameter in model.named_parameters()}
    with _replaced(model):
        if eager:
            with _Forward(model, sharded=shards_weights or shards_gradients):
                yield
        else:
            yield
    for name, parameter in model.named_parameters():
        if not shards_weights and versions[name] != compat.version(parameter):  # gathered weights are new tensors
            _refuse_write(model, name)


def _is_mover() -> bool:
    """True if the caller may move a parameter: code that shards, and a module on its way to a device."""
    frame: FrameType | None = inspect.currentframe()
    name = ""
    while frame is not None and (name := f"{frame.f_globals.get('__name__', '')}.").startswith(_BETWEEN):
        if name.startswith(_SHARDING) or frame.f_code.co_name == "_apply":
            return True
        frame = frame.f_back
    return frame is not None and name.startswith(_SHARDING)


@contextmanager
def _replaced(model: nn.Module) -> Iterator[None]:
    """Refuses a parameter that is put in the place of another."""
    names = {id(module): name for name, module in model.named_modules()}

    def hook(module: nn.Module, name: str, _: object) -> None:
        if id(module) in names and not _is_mover():
            _refuse_write(model, f"{names[id(module)]}.{name}".lstrip("."))

    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _refuse_write(model: nn.Module, name: str) -> NoReturn:
    owner, _, _ = name.rpartition(".")
    kind = type(model.get_submodule(owner)).__name__.removeprefix("FSDP")
    raise UsageError(
        f"forward changes parameter `{name}` of `{owner or 'the model'}` ({kind}): the optimizer changes it too, ranks "
        "would come apart, and sharded weights would forget it",
        hints=[
            "change weights in a callback after the step, through its `weights`",
            "or keep what forward changes in a buffer, and compute the weight that is used from it",
        ],
    )


# ---------------------------------------------------------------------------------------------- writes
class _Memory:
    """The memory that parameters of `model` occupy now, of those that `chosen` names."""

    def __init__(self, model: nn.Module, chosen: Container[str] | None = None) -> None:
        self._held: dict[torch.UntypedStorage, list[tuple[str, Tensor]]] = {}
        for name, parameter in model.named_parameters():
            if chosen is None or name in chosen:
                tensor = _local(parameter)
                self._held.setdefault(tensor.untyped_storage(), []).append((name, tensor))

    def owner(self, tensor: Tensor) -> str | None:
        """The name of the parameter that a tensor is (a view of), if there is one."""
        tensor = _local(tensor)
        if tensor.layout is not torch.strided:
            return None
        for name, held in self._held.get(tensor.untyped_storage(), ()):
            begin = tensor.storage_offset() * tensor.itemsize
            first = held.storage_offset() * held.itemsize
            if not held.numel() or first <= begin < first + held.nbytes or begin <= first < begin + tensor.nbytes:
                return name
        return None


def _local(tensor: Tensor) -> Tensor:
    """The tensor, or this rank's part of a distributed one."""
    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()
    return part


def _written(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that a function of torch writes into, by its name: `add_`, `+=`, `x[…] = y`, `out=`.

    Not those that an operator in C++, with another name, writes into by the way.
    """
    name: str = getattr(function, "__name__", "")
    places = [kwargs.get("out")]
    in_place = name.endswith("_") and name not in _MARKS and not name.endswith("__")
    if in_place or name in _ASSIGNMENTS or kwargs.get("inplace"):
        places.append(args[0] if args else kwargs.get("tensor", kwargs.get("input")))
    elif function in _EMBEDDINGS and kwargs.get("max_norm") is not None:
        places += args[:2]  # the weight is the first or the second
    for place in places:
        yield from (x for x in (place if isinstance(place, list | tuple) else [place]) if isinstance(x, Tensor))


class _Writes(TorchFunctionMode):
    """Refuses what is written into parameters of `model`, also into `parameter.data`, or put in its place."""

    def __init__(self, model: nn.Module, chosen: Container[str] | None = None, *, stays: bool = False) -> None:
        """Parameters that may move (not `stays`) are looked up at every write."""
        super().__init__()
        self._model, self._chosen, self._stays = model, chosen, stays
        self._memory: _Memory | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__self__", None) is torch.Tensor.data and func.__name__ == "__set__":
            for name, parameter in self._model.named_parameters():
                if parameter is args[0] and (self._chosen is None or name in self._chosen) and not _is_mover():
                    self.refuse(name)
        for tensor in _written(func, args, kwargs):
            # An empty one is no parameter, unless all are empty outside of forward: those that ZeRO has not gathered.
            owner = self._found().owner(tensor) if tensor.numel() or self._stays else None
            if owner is not None and not _is_mover():
                self.refuse(owner)
        return func(*args, **kwargs)

    def refuse(self, name: str) -> None:
        """Raises the error of a write into that parameter."""
        _refuse_write(self._model, name)

    def _found(self) -> _Memory:
        memory = self._memory or _Memory(self._model, self._chosen)
        self._memory = memory if self._stays else None
        return memory


class Guard:
    """Refuses what callbacks write into a model's parameters where it would be lost; `off` while `Weights` does it."""

    def __init__(self, model: nn.Module, lost: Container[str]) -> None:
        self._model, self._lost, self.off = model, lost, False

    @contextmanager
    def on(self) -> Iterator[None]:
        """Watches what is done within."""
        mode = _Writes(self._model, self._lost, stays=True)
        mode.refuse = self._refuse  # type: ignore[method-assign]
        with mode:
            yield

    def _refuse(self, name: str) -> None:
        if not self.off:
            raise StrategyError(
                f"a callback writes into parameter `{name}` of the model, and the optimizer or other ranks hold it "
                "elsewhere: it would be lost",
                hints=[
                    "write into `weights.parts()`, or `weights.frozen()`, which `on_start` is given, and call "
                    "`weights.changed()`"
                ],
            )


# ---------------------------------------------------------------------------------------------- forward passes
class _Forward(_Writes):
    """Also refuses gradients that the loss computes itself, and sparse ones where they are sharded."""

    def __init__(self, model: nn.Module, *, sharded: bool) -> None:
        super().__init__(model)
        self._sharded = sharded

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.backward or func is torch.autograd.backward:
            raise UsageError(
                "the task's loss calls backward itself, and the strategy does it again",
                hints=["return the loss and leave backward to the strategy"],
            )
        if self._sharded and func is torch.autograd.grad:
            raise StrategyError(
                "the loss computes gradients of its own (torch.autograd.grad), and where weights or gradients are "
                "sharded that is taken for the backward pass of the step",
                hints=['set strategy.use = "ddp"'],
            )
        if self._sharded and func in _EMBEDDINGS and kwargs.get("sparse"):
            for tensor in args[:2]:  # the weight is the first or the second
                self._refuse_sparse(tensor)
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except RuntimeError as error:
            if "DTensor" in str(error):
                self._refuse_parts(func, (*args, *kwargs.values()), error)
            raise

    def _refuse_parts(self, func: Any, given: Iterable[Any], error: RuntimeError) -> None:
        """Raises StrategyError for a tensor of which ranks have parts, where torch takes whole ones only."""
        parts = [x for each in given for x in (each if isinstance(each, list | tuple) else (each,))]
        parts = [x for x in parts if isinstance(x, Tensor) and hasattr(x, "to_local")]
        what = f"`{getattr(func, '__name__', func)}`"
        for name, parameter in self._model.named_parameters():
            if any(x is parameter for x in parts):
                raise StrategyError(
                    f"{what} uses parameter `{name}` where this rank has a part of it: sharded weights are whole only "
                    "within the forward of the block that they belong to",
                    hints=[
                        "call the module that has the parameter, or use it in the forward of its block",
                        "or name in train.blocks a class that has both the parameter and what uses it",
                        'or set strategy.use = "ddp"',
                    ],
                ) from error
        if parts:
            raise StrategyError(
                f"{what} mixes whole tensors with one of which each rank has a part: logits that "
                "strategy.loss_parallel leaves cut, or what is computed of a sharded weight outside of its block",
                hints=[
                    "give such logits to torch.nn.functional.cross_entropy alone, without label_smoothing and weight, "
                    "or leave strategy.loss_parallel out",
                    'or set strategy.use = "ddp"',
                ],
            ) from error

    def _refuse_sparse(self, weight: Tensor) -> None:
        if name := _Memory(self._model).owner(weight):
            raise StrategyError(
                f"parameter `{name}` gets sparse gradients, and sharded ones are dense",
                hints=["leave out `sparse = True` of the embedding", 'or set strategy.use = "ddp"'],
            )


# ---------------------------------------------------------------------------------------------- the loss
def refuse_loss(loss: Tensor) -> None:
    """Raises UsageError unless `loss` is a number that depends on a trained parameter."""
    if loss.ndim:
        raise UsageError(
            f"the task's loss has the shape {list(loss.shape)}, not []: it must be one number, summed over the batch",
            hints=["end the task's `loss` with `.sum()`"],
        )
    if not loss.requires_grad:
        raise UsageError(
            "the loss depends on no trained parameter: there is nothing to learn from it",
            hints=["look for `.detach()`, `.item()`, `torch.no_grad()` or a frozen model on the way to the loss"],
        )
