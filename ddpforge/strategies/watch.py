"""Looks at the first forward passes for what would be trained wrongly or fail later, and refuses it by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ddpforge.errors import StrategyError, UsageError

__all__ = ["Guard", "refuse_loss", "watched", "written"]

_SHARDING = ("torch.distributed.", "deepspeed.")
_BETWEEN = ("torch.", f"{__name__}.")  # modules through which a call comes here
_EMBEDDINGS = {nn.functional.embedding, nn.functional.embedding_bag}


@contextmanager
def watched(model: nn.Module, *, shards_weights: bool, shards_gradients: bool, eager: bool) -> Iterator[None]:
    """Raises UsageError or StrategyError for what a forward pass of `model` must not do.

    It must not write into parameters: what the optimizer, checkpoints and other ranks have would not be that. Where
    weights or gradients are sharded, it must not do what sharding cannot follow. Compiled code (not `eager`) cannot be
    watched inside; there only the parameters are compared.
    """
    versions = {name: parameter._version for name, parameter in model.named_parameters()}
    with ExitStack() as stack:
        stack.enter_context(_replaced(model))
        if eager:
            stack.enter_context(_Writes(model, partial(_refuse_write, model)))
            stack.enter_context(_Setters(model, partial(_refuse_write, model)))
            stack.enter_context(_Gradients(model, sharded=shards_weights or shards_gradients))
        yield
    for name, parameter in model.named_parameters():
        if not shards_weights and versions[name] != parameter._version:  # gathered weights are new tensors
            _refuse_write(model, name)


def _is_mover(frame: FrameType | None) -> bool:
    """True if the caller may move a parameter: code that shards, and a module on its way to a device."""
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
        if id(module) in names and not _is_mover(sys._getframe(1)):
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
        self._held: dict[int, list[tuple[str, Tensor]]] = {}
        for name, parameter in model.named_parameters():
            if chosen is None or name in chosen:
                tensor = getattr(parameter, "_local_tensor", parameter)
                self._held.setdefault(tensor.untyped_storage()._cdata, []).append((name, tensor))

    def owner(self, tensor: Tensor) -> str | None:
        """The name of the parameter that a tensor is (a view of), if there is one."""
        for name, held in self._held.get(tensor.untyped_storage()._cdata, ()):
            begin = tensor.storage_offset() * tensor.itemsize
            first = held.storage_offset() * held.itemsize
            if not held.numel() or first <= begin < first + held.nbytes or begin <= first < begin + tensor.nbytes:
                return name
        return None


def written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operator writes into."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from (x for x in (value if isinstance(value, list | tuple) else [value]) if isinstance(x, Tensor))


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator that writes into a parameter, also into `parameter.data`, and gives its name to `refuse`."""

    def __init__(
        self,
        model: nn.Module,
        refuse: Callable[[str], None],
        chosen: Container[str] | None = None,
        *,
        callbacks: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model, self._refuse, self._chosen = model, refuse, chosen
        self._once = self._empty = callbacks  # what is not gathered is empty, and written into all the same
        self._memory: _Memory | None = None  # look up once where parameters are; else they may move

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable and not _is_mover(sys._getframe(1)):
            for tensor in written(func, args, kwargs):
                if hasattr(tensor, "_local_tensor") or not (tensor.numel() or self._empty):
                    continue
                if name := self._found().owner(tensor):
                    self._refuse(name)
        return func(*args, **kwargs)

    def _found(self) -> _Memory:
        memory = self._memory or _Memory(self._model, self._chosen)
        self._memory = memory if self._once else None
        return memory


class _Setters(TorchFunctionMode):
    """Sees `parameter.data = …`, and gives the parameter's name to `refuse`."""

    def __init__(self, model: nn.Module, refuse: Callable[[str], None], chosen: Container[str] | None = None) -> None:
        super().__init__()
        self._model, self._refuse, self._chosen = model, refuse, chosen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__set__" and getattr(func, "__self__", None) is torch.Tensor.data:
            self._look(args[0], sys._getframe(1))
        return func(*args, **(kwargs or {}))

    def _look(self, tensor: Tensor, caller: FrameType) -> None:
        if isinstance(tensor, nn.Parameter) and not _is_mover(caller):
            for name, parameter in self._model.named_parameters():
                if parameter is tensor and (self._chosen is None or name in self._chosen):
                    self._refuse(name)


class Guard:
    """Refuses what callbacks write into a model's parameters where it would be lost; `off` while `Weights` does it."""

    def __init__(self, model: nn.Module, lost: Container[str]) -> None:
        self._model, self._lost, self.off = model, lost, False

    @contextmanager
    def on(self) -> Iterator[None]:
        """Watches what is done within."""
        with (
            _Writes(self._model, self._refuse, self._lost, callbacks=True),
            _Setters(self._model, self._refuse, self._lost),
        ):
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


# ---------------------------------------------------------------------------------------------- gradients
class _Gradients(TorchFunctionMode):
    """Refuses gradients that the loss computes itself, and sparse ones where they are sharded."""

    def __init__(self, model: nn.Module, *, sharded: bool) -> None:
        super().__init__()
        self._model, self._sharded = model, sharded

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
            return func(*args, **kwargs)
        except RuntimeError as error:
            if "DTensor" in str(error):
                self._refuse_parts(func, (*args, *kwargs.values()), error)
            raise

    def _refuse_parts(self, func: Any, given: Iterable[Any], error: RuntimeError) -> None:
        """Raises StrategyError for a tensor of which ranks have parts, where torch takes whole ones only."""
        parts = [x for each in given for x in (each if isinstance(each, list | tuple) else (each,))]
        parts = [x for x in parts if isinstance(x, Tensor) and hasattr(x, "_local_tensor")]
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
                f"{what} mixes whole tensors with one of which each rank has a part: logits that strategy.loss = "
                '"vocabulary" leaves cut, or what is computed of a sharded weight outside of its block',
                hints=[
                    "give such logits to torch.nn.functional.cross_entropy alone, without label_smoothing and weight, "
                    "or leave strategy.loss out",
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
