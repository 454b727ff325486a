"""FSDP's units, which are gathered together: a block, or the rest of a model. Checks if a model can be sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from ddpforge import compat
from ddpforge.errors import StrategyError

__all__ = [
    "GradientCoverage",
    "check_shardable",
    "check_sharded",
    "check_ties",
    "materialise",
    "mixed_precision_policy",
    "reduce_dtype",
    "tied_names",
]


def check_shardable(name: str, parameter: nn.Parameter) -> None:
    """Raises StrategyError for a parameter that cannot be sharded."""
    if not parameter.ndim:
        raise StrategyError(
            f"parameter `{name}` is a scalar, but FSDP shards along the first dimension",
            hints=["give it the shape [1]"],
        )
    if not parameter.numel() and parameter.requires_grad:
        raise StrategyError(
            f"parameter `{name}` has no elements: FSDP cannot shard it",
            hints=["remove it from the model, or set requires_grad = False"],
        )
    if not (parameter.is_floating_point() or parameter.is_complex()) and not compat.torch_has(compat.SHARDED_INTEGERS):
        raise StrategyError(
            f"parameter `{name}` holds integers, which torch {torch.__version__} cannot shard",
            hints=[f"pip install 'torch>={compat.SHARDED_INTEGERS}'", "or make it a buffer"],
        )
    if compat.has_gradient_hooks(parameter):
        raise StrategyError(
            f"parameter `{name}` has a gradient hook, but FSDP replaces it by another tensor, without hooks",
            hints=['change gradients in the optimizer or by a module hook, or set strategy.use = "ddp"'],
        )


def reduce_dtype(unit: nn.Module) -> torch.dtype:
    """Returns the dtype in which gradients of parameters that are not sharded yet are reduced: float32, or float64.

    Raises StrategyError for trained parameters of several dtypes.
    """
    found: dict[torch.dtype, str] = {}
    for name, parameter in unit.named_parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            found.setdefault(parameter.dtype, name)
    if len(found) > 1:
        (one, first), (other, second) = [(str(d).removeprefix("torch."), name) for d, name in found.items()][:2]
        raise StrategyError(
            f"parameter `{first}` is {one} and `{second}` is {other}, but FSDP gathers both together",
            hints=["build the model in one dtype", "or name classes in train.blocks with parameters of only one dtype"],
        )
    return torch.float64 if torch.float64 in found else torch.float32


def mixed_precision_policy(gather: torch.dtype | None, reduce: torch.dtype) -> MixedPrecisionPolicy:
    """Returns FSDP's policy: gathers weights in dtype `gather` (None: their own), reduces gradients in `reduce`."""
    # Inputs are not cast: as under every strategy, autocast decides the dtype of the residual stream.
    return MixedPrecisionPolicy(param_dtype=gather, reduce_dtype=reduce, cast_forward_inputs=False)


def tied_names(model: nn.Module) -> set[tuple[str, str]]:
    """Returns pairs of names of one parameter: the first name, and each further one."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {(first[id(p)], name) for name, p in named if first.setdefault(id(p), name) != name}


def check_ties(before: set[tuple[str, str]], model: nn.Module) -> None:
    """Raises StrategyError if sharding split a parameter with several names (`before`) into several parameters."""
    if broken := sorted(before - tied_names(model)):
        raise StrategyError(
            f"`{broken[0][0]}` and `{broken[0][1]}` are one parameter, but sharding in different blocks would make "
            "them two",
            hints=["name other classes in train.blocks, so that both names are in one block or in none"],
        )


def check_sharded(model: nn.Module) -> None:
    """Raises StrategyError unless every parameter is a DTensor, sharded over the last dimension of its mesh."""
    for name, parameter in model.named_parameters():
        if not isinstance(model, FSDPModule) or not isinstance(parameter, DTensor):
            raise StrategyError(f"FSDP did not shard parameter `{name}`: it is a {type(parameter).__name__}")
        rows = -(-parameter.shape[0] // parameter.device_mesh.size(-1))
        if len(parameter.to_local()) > rows or not parameter.placements[-1].is_shard(0):
            raise StrategyError(f"FSDP did not shard parameter `{name}`: it is placed as {parameter.placements}")


# ---------------------------------------------------------------------------------------------- used parameters
class GradientCoverage:
    """Names of parameters of `model` that got a gradient on this rank since `clear`."""

    # Every trained parameter must get a gradient on every rank: if ranks use different parameters, the reduction over
    # ranks adds gradients of different parameters.

    def __init__(self, model: nn.Module) -> None:
        self._found: set[str] = set()
        self._trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.clear = self._found.clear
        if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):  # not in torch 2.10 and 2.11
            # Then backward does not hang if ranks use different parameters; the error is reported after it.
            cast(FSDPModule, model).set_reduce_scatter_unused_params(True)
        for prefix, unit in model.named_modules():
            if isinstance(unit, FSDPModule):
                _at_first_forward(cast(nn.Module, unit), partial(self._watch, prefix))

    def all_of(self, parameters: int) -> bool:
        """True if this number of parameters got a gradient; cheap."""
        return len(self._found) == parameters

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def _watch(self, prefix: str, unit: nn.Module) -> None:
        """Adds hooks to the unit's parameters; call it while they are gathered."""
        # Backward gives gradients to gathered parameters, not to shards.
        for name, parameter in unit.named_parameters(prefix):
            if name in self._trained and not isinstance(parameter, DTensor):

                def note(_: Tensor, name: str = name) -> None:
                    self._found.add(name)

                trains = parameter.requires_grad  # False in another update; a hook needs True
                parameter.requires_grad_(True).register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
                parameter.requires_grad_(trains)


def _at_first_forward(unit: nn.Module, action: Callable[[nn.Module], None]) -> None:
    """Calls `action(unit)` once, at the beginning of the unit's forward, after FSDP gathered its parameters."""

    def hook(module: nn.Module, _: Any) -> None:
        handle.remove()
        action(module)

    handle = unit.register_forward_pre_hook(torch.compiler.disable(hook))  # type: ignore[no-untyped-call]


# ---------------------------------------------------------------------------------------------- the meta device
def materialise(model: nn.Module, *, then: Mapping[int, Callable[[nn.Module], None]]) -> None:
    """Initialises every layer on the CPU in the model's order; calls `then[id(module)]` when a module is complete.

    Each layer with tensors on the meta device needs `reset_parameters`, as torch's layers have it; otherwise
    StrategyError is raised. If the model's constructor builds layers in the order in which the model lists them, random
    numbers and weights equal those of a model that was built on the CPU.
    """
    _visit("", model, then, set())


def _visit(name: str, module: nn.Module, then: Mapping[int, Callable[[nn.Module], None]], seen: set[int]) -> None:
    if id(module) in seen:
        return
    seen.add(id(module))
    if any(tensor.is_meta for tensor in _own(module)):
        _reset(name, module)
    for child_name, child in module.named_children():
        _visit(f"{name}.{child_name}".lstrip("."), child, then, seen)
    if id(module) in then:
        then[id(module)](module)


def _reset(name: str, module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise StrategyError(
            f"`{name or 'the model'}` ({type(module).__name__}) has parameters or buffers but no reset_parameters: it "
            "cannot be initialised after its construction on the meta device",
            hints=["give that class a reset_parameters method", "or set strategy.meta = false"],
        )
    module.to_empty(device="cpu", recurse=False)
    for tensor in _own(module):
        tensor.data.fill_(torch.nan if tensor.is_floating_point() else 0)  # to find tensors that `reset` does not fill
    reset()
    forgotten = [key for key, tensor in module.named_parameters(recurse=False) if tensor.isnan().any()]
    if forgotten:
        raise StrategyError(
            f"reset_parameters of `{name}` ({type(module).__name__}) does not initialise `{forgotten[0]}`"
        )


def _own(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
