"""Checks the first forward passes for operations that would train wrongly or fail later; names the parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from ddpforge import compat
from ddpforge.errors import StrategyError, UsageError

__all__ = ["ParameterGuard", "PartialWeights", "check_loss", "guarded_forward"]

_SHARDING = ("torch.distributed.", "deepspeed.")
_OPERATIONS = "deepspeed.runtime.zero.linear."  # replaces torch.nn.functional.linear; its caller reads the weight
_BETWEEN = ("torch.", _OPERATIONS, f"{__name__}.")  # modules between the caller and this code
_MARKS = {"requires_grad_", "share_memory_"}  # change no value
_OPERATORS = ("add", "and", "floordiv", "lshift", "mod", "mul", "or", "pow", "rshift", "sub", "truediv", "xor")
_ASSIGNMENTS = {"__setitem__", "__idiv__", *(f"__i{name}__" for name in _OPERATORS)}
_EMBEDDINGS = {nn.functional.embedding, nn.functional.embedding_bag}


@contextmanager
def guarded_forward(model: nn.Module, *, shards_weights: bool, shards_gradients: bool, eager: bool) -> Iterator[None]:
    """Raises UsageError or StrategyError for forbidden operations in a forward pass of `model`.

    A forward pass must not write into parameters: the optimizer, checkpoints and other ranks would have other values.
    With sharded weights or gradients, some operations on them are forbidden too. In compiled code (not `eager`) only
    writes into parameters and their replacement are found.
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
            _reject_write(model, name)


def _is_mover() -> bool:
    """True if the caller may replace a parameter: code that shards, or `Module._apply` (e.g. a move to a device)."""
    frame: FrameType | None = inspect.currentframe()
    name = ""
    while frame is not None and (name := f"{frame.f_globals.get('__name__', '')}.").startswith(_BETWEEN):
        sharding = name.startswith(_SHARDING) and not name.startswith(_OPERATIONS)
        if sharding or frame.f_code.co_name == "_apply":
            return True
        frame = frame.f_back
    return frame is not None and name.startswith(_SHARDING)


@contextmanager
def _replaced(model: nn.Module) -> Iterator[None]:
    """Raises UsageError if code within the block replaces a parameter by another."""
    names = {id(module): name for name, module in model.named_modules()}

    def hook(module: nn.Module, name: str, _: object) -> None:
        if id(module) in names and not _is_mover():
            _reject_write(model, f"{names[id(module)]}.{name}".lstrip("."))

    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _reject_write(model: nn.Module, name: str) -> NoReturn:
    owner, _, _ = name.rpartition(".")
    kind = type(model.get_submodule(owner)).__name__.removeprefix("FSDP")
    raise UsageError(
        f"forward changes parameter `{name}` of `{owner or 'the model'}` ({kind}): the optimizer changes it too, ranks "
        "would diverge, and sharded weights would lose the change",
        hints=[
            "change weights in a callback after the step, through its `weights`",
            "or keep the values that forward changes in a buffer, and compute the weight from it",
        ],
    )


# ---------------------------------------------------------------------------------------------- writes
class _Memory:
    """Memory that the parameters of `model` occupy now; if `chosen` is given, only the parameters that it names."""

    def __init__(self, model: nn.Module, chosen: Container[str] | None = None) -> None:
        self._held: dict[torch.UntypedStorage, list[tuple[str, Tensor]]] = {}
        for name, parameter in model.named_parameters():
            if chosen is None or name in chosen:
                tensor = _local(parameter)
                self._held.setdefault(tensor.untyped_storage(), []).append((name, tensor))

    def owner(self, tensor: Tensor) -> str | None:
        """Returns the name of the parameter that shares memory with the tensor, or None."""
        tensor = _local(tensor)
        if tensor.layout is not torch.strided:
            return None
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # of a tensor inside torch.vmap, as in masks of flex_attention
            return None
        for name, held in self._held.get(storage, ()):
            begin = tensor.storage_offset() * tensor.itemsize
            first = held.storage_offset() * held.itemsize
            if not held.numel() or first <= begin < first + held.nbytes or begin <= first < begin + tensor.nbytes:
                return name
        return None


def _local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a distributed tensor; any other tensor as it is."""
    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()
    return part


def _written(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yields the tensors that a torch function writes into, judged by its name: `add_`, `+=`, `x[…] = y`, `out=`.

    It misses writes of C++ operators with other names.
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
    """Raises an error for writes into parameters of `model` or their `.data`, and for a replaced `.data`."""

    def __init__(self, model: nn.Module, chosen: Container[str] | None = None, *, stays: bool = False) -> None:
        """Finds the memory of the parameters once if it `stays` where it is; otherwise at every write."""
        super().__init__()
        self._model, self._chosen, self._stays = model, chosen, stays
        self._memory: _Memory | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__self__", None) is torch.Tensor.data and func.__name__ == "__set__":
            for name, parameter in self._model.named_parameters():
                if parameter is args[0] and (self._chosen is None or name in self._chosen) and not _is_mover():
                    self.reject(name)
        for tensor in _written(func, args, kwargs):
            # Empty tensors are not parameters, except outside of forward, when ZeRO has not gathered its parameters.
            owner = self._found().owner(tensor) if tensor.numel() or self._stays else None
            if owner is not None and not _is_mover():
                self.reject(owner)
        return func(*args, **kwargs)

    def reject(self, name: str) -> None:
        """Raises the error for a write into this parameter."""
        _reject_write(self._model, name)

    def _found(self) -> _Memory:
        memory = self._memory or _Memory(self._model, self._chosen)
        self._memory = memory if self._stays else None
        return memory


class ParameterGuard:
    """Raises an error if a callback writes into a parameter in `lost`; `off` while `Weights` itself writes."""

    def __init__(self, model: nn.Module, lost: Container[str]) -> None:
        self._model, self._lost, self.off = model, lost, False

    @contextmanager
    def on(self) -> Iterator[None]:
        """Checks all writes within the block."""
        mode = _Writes(self._model, self._lost, stays=True)
        mode.reject = self._reject  # type: ignore[method-assign]
        with mode:
            yield

    def _reject(self, name: str) -> None:
        if not self.off:
            raise StrategyError(
                f"a callback writes into parameter `{name}` of the model, but the optimizer or other ranks hold its "
                "values elsewhere: the change would be lost",
                hints=[
                    "write into `weights.shards()` or `weights.frozen()`, then call `weights.mark_changed()`; "
                    "`on_start` receives `weights`"
                ],
            )


# ---------------------------------------------------------------------------------------------- forward passes
class _Forward(_Writes):
    """Also raises an error if the loss computes gradients itself, and for sparse gradients that would be sharded."""

    def __init__(self, model: nn.Module, *, sharded: bool) -> None:
        super().__init__(model)
        self._sharded = sharded

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.backward or func is torch.autograd.backward:
            raise UsageError(
                "the task's loss calls backward itself, but the strategy calls it too",
                hints=["return the loss and leave backward to the strategy"],
            )
        if self._sharded and func is torch.autograd.grad:
            raise StrategyError(
                "the loss computes gradients itself (torch.autograd.grad), but with sharded weights or gradients that "
                "would be taken for the backward pass of the step",
                hints=['set strategy.use = "ddp"'],
            )
        if self._sharded and func in _EMBEDDINGS and kwargs.get("sparse"):
            for tensor in args[:2]:  # the weight is the first or the second
                self._reject_sparse(tensor)
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except RuntimeError as error:
            if "DTensor" in str(error):
                self._reject_parts(func, (*args, *kwargs.values()), error)
            raise

    def _reject_parts(self, func: Any, given: Iterable[Any], error: RuntimeError) -> None:
        """Raises StrategyError if a torch function failed because an argument is split over ranks."""
        if any(isinstance(x, Tensor) and hasattr(x, "to_local") for x in _members(given)):
            raise StrategyError(
                f"`{_operation(func)}` mixes whole tensors with a tensor that is split over ranks: logits under "
                "strategy.loss_parallel, or a value computed from a sharded weight outside of its block",
                hints=[
                    "pass such logits only to torch.nn.functional.cross_entropy, without label_smoothing and weight, "
                    "or remove strategy.loss_parallel",
                    'or set strategy.use = "ddp"',
                ],
            ) from error

    def _reject_sparse(self, weight: Tensor) -> None:
        if name := _Memory(self._model).owner(weight):
            raise StrategyError(
                f"parameter `{name}` gets sparse gradients, but sharded gradients are dense",
                hints=["remove `sparse = True` from the embedding", 'or set strategy.use = "ddp"'],
            )


# ---------------------------------------------------------------------------------------------- partial weights
_FORM = {  # read no values
    *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad", "grad_fn", "name", "names"),
    *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "nbytes", "itemsize", "_version", "output_nr"),
    *("size", "dim", "numel", "nelement", "ndimension", "stride", "__len__", "__hash__", "__repr__", "__dir__"),
    *("is_floating_point", "is_complex", "is_signed", "is_contiguous", "element_size", "get_device", "is_same_size"),
    *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "retains_grad"),
}


class PartialWeights:
    """Weights that are whole on this rank only within forward passes; refuses other code that reads their values.

    Such a read gives no error: a number of one shard, or of an empty or old tensor.
    """

    # While reads are refused, the weights have another class, which sees each torch function that receives one of them.
    # Nothing else costs time: a mode would see every operation of the forward pass.

    def __init__(self, advice: Sequence[str], *, is_whole: Callable[[Any, bool], bool] | None = None) -> None:
        """Takes the hints of the error.

        Args:
            is_whole: if each module gathers its own weights when it is called: True for a weight that is gathered now,
                and, if the second argument is True, also in the backward pass.
        """
        self._advice, self._is_whole = advice, is_whole
        self._names: dict[int, str] = {}
        self._weights: list[tuple[Tensor, type, type]] = []
        self._modules: set[int] = set()
        self._kinds: dict[type, type] = {}
        self._places: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._hidden: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._refuses = False

    def add(self, module: nn.Module, whose: str, *, called: nn.Module | None = None) -> None:
        """Adds the weights of a module; `whose` names it. Reads are allowed within the forward of `called`."""
        self._modules |= {id(one) for one in module.modules()}
        for name, parameter in module.named_parameters():
            self._names[id(parameter)] = f"`{name}` of {whose}"
            kind = type(parameter)
            guarded = self._kinds.setdefault(kind, self._guarded(kind))
            self._weights.append((parameter, kind, guarded))
        if called is not None:
            states: list[bool] = []

            def begin() -> None:
                states.append(self._refuses)
                self._set(False)

            _around_forward(called, begin, lambda: self._set(states.pop()))

    def hide(self, model: nn.Module, names: Container[str]) -> None:
        """Also refuses reads of these weights of `model` after its forward, which leaves them gathered, but not exact.

        Ranks may gather a share of a layer, or rounded values.
        """
        chosen = {id(parameter) for name, parameter in model.named_parameters() if name in names}
        self._places = [
            (module, key, parameter)
            for module in model.modules()
            for key, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in chosen
        ]
        inside: list[None] = []

        def begin() -> None:
            inside.append(None)
            self._show()

        def end() -> None:
            inside.pop()
            if self._refuses and not inside:
                self._hide()

        for module in {model, *(module for module, *_ in self._places)} if self._places else ():
            _around_forward(module, begin, end)

    def _hide(self) -> None:
        for module, key, parameter in self._places:
            gathered = module._parameters[key]
            if gathered is not None and gathered is not parameter:
                self._hidden.append((module, key, gathered))
                module._parameters[key] = parameter

    def _show(self) -> None:
        for module, key, gathered in self._hidden:
            module._parameters[key] = gathered
        self._hidden.clear()

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Raises StrategyError within the block for code that reads a weight outside of forward passes."""
        before = self._refuses
        self._set(True)
        try:
            yield
        finally:
            self._set(before)

    def _set(self, refuses: bool) -> None:
        if refuses != self._refuses:
            self._refuses = refuses
            if refuses:
                self._hide()
            else:
                self._show()
            for parameter, kind, guarded in self._weights:
                parameter.__class__ = guarded if refuses else kind

    def _guarded(self, kind: type) -> type:
        """Returns a subclass of a kind of parameter: its torch functions are checked first."""

        def checked(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if _operation(func) not in _FORM and not self._may_read():
                self._check(func, [*args, *kwargs.values()], list(_written(func, args, kwargs)))
            return kind.__torch_function__(func, types, args, kwargs)  # type: ignore[attr-defined]

        return type(kind.__name__, (kind,), {"__torch_function__": classmethod(checked), "__module__": __name__})

    def _may_read(self) -> bool:
        """True if the operation is of code that shards, of this module, or of a module that has its weights."""
        frame: FrameType | None = inspect.currentframe()
        frame = frame.f_back.f_back if frame and frame.f_back else None  # the caller of the torch function
        if frame is None or (frame.f_globals.get("__name__") == __name__ and frame.f_code.co_name != _HANDLER):
            return True
        if _is_mover():
            return True
        while self._is_whole and frame is not None:
            if frame.f_code.co_name == "forward" and id(frame.f_locals.get("self")) in self._modules:
                return True
            frame = frame.f_back
        return False

    def _check(self, func: Any, given: Iterable[Any], written: Sequence[Tensor]) -> None:
        in_backward = torch.is_grad_enabled() and _operation(func) not in ("data", "detach")
        for tensor in _members(given):
            if not self._is_whole and any(tensor is target for target in written):
                continue  # each rank changes its rows
            name = self._names.get(id(tensor))
            if name and not (self._is_whole and self._is_whole(tensor, in_backward)):
                raise StrategyError(
                    f"`{_operation(func)}` uses parameter {name} while this rank may have only a part of it: "
                    "weights that are spread over ranks are whole only within the forward of their block",
                    hints=self._advice,
                )


_HANDLER = "__torch_function__"


def _around_forward(module: nn.Module, begin: Callable[[], None], end: Callable[[], None]) -> None:
    """Calls `begin` before each forward pass of a module, and `end` after it."""

    def before(*_: Any) -> None:
        begin()

    def after(*_: Any) -> None:
        end()

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)


def _members(given: Iterable[Any]) -> Iterator[Any]:
    """Yields arguments of a torch function, and the members of lists and tuples."""
    for each in given:
        if isinstance(each, list | tuple):
            yield from _members(each)
        else:
            yield each


def _operation(func: Any) -> str:
    """Returns the name of a torch function; of an attribute's getter or setter, the attribute's name."""
    name: str = getattr(func, "__name__", str(func))
    return getattr(func.__self__, "__name__", name) if name in ("__get__", "__set__") else name


# ---------------------------------------------------------------------------------------------- the loss
def check_loss(loss: Tensor) -> None:
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
