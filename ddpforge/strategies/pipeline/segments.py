"""Steps of a model's forward pass, as the model declares them, and their cut into parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ddpforge.errors import StrategyError, UsageError

__all__ = [
    "Segment",
    "cut_evenly",
    "cut_where",
    "declaration",
    "declared_segments",
    "held_by",
    "named_tensors",
    "segment_signatures",
]

_HOW = (
    'list its steps in a class attribute, in their order: pipeline = ("enter", "blocks", ("leave", "norm")): modules, '
    "lists of modules, and methods, each with the modules that it uses",
    'or set strategy.use = "fsdp"',
)


@dataclass(frozen=True)
class Segment:
    """Step of a forward pass: `call` receives the previous step's result. `uses` names modules and tensors."""

    name: str
    call: Callable[..., Any]
    uses: tuple[str, ...]


def declaration(model: nn.Module) -> Any:
    """Returns the attribute `pipeline`; None if there is none, or if a subclass overrides `forward` without it."""
    if "pipeline" in vars(model):
        return model.pipeline
    first = next(kind for kind in type(model).__mro__ if {"forward", "pipeline"} & vars(kind).keys())
    return model.pipeline if "pipeline" in vars(first) else None


def declared_segments(model: nn.Module) -> list[Segment]:
    """Returns the steps in a model's attribute `pipeline`.

    Each entry is the name of a module, of a list of modules (called one after the other), or of a method. A tuple
    begins with such a name; the names of further modules and tensors that it uses follow.

    Raises UsageError if the model has no such attribute, and StrategyError unless the steps use all of its tensors.
    """
    declared = declaration(model)
    if not isinstance(declared, tuple | list) or not declared:
        raise UsageError(
            f"{type(model).__name__} does not declare the steps of its forward pass, so a pipeline cannot cut it",
            hints=_HOW,
        )
    steps = [step for entry in declared for step in _steps(model, entry)]
    used = {id(tensor) for step in steps for tensor in held_by(model, step)}
    if left := [name for name, tensor in named_tensors(model) if id(tensor) not in used]:
        raise StrategyError(
            f"no step in {type(model).__name__}.pipeline uses `{left[0]}`, so it would be on no rank",
            hints=[
                f'add its module to the method that uses it: pipeline = (…, ("method", "{left[0].partition(".")[0]}"))'
            ],
        )
    return steps


def _steps(model: nn.Module, entry: str | Sequence[str]) -> Iterator[Segment]:
    name, *uses = (entry,) if isinstance(entry, str) else entry
    for used in uses:
        if not any(other == used or other.startswith(f"{used}.") for other, _ in named_tensors(model)):
            raise StrategyError(f"{type(model).__name__}.pipeline: `{name}` lists `{used}`, which has no weights")
    modules = dict(model.named_modules(remove_duplicate=False))
    found = modules.get(name) or getattr(model, name, None)
    if isinstance(found, nn.ModuleList | nn.Sequential) and not uses:
        for key, child in found.named_modules(remove_duplicate=False):
            if not key or "." in key:
                continue
            yield Segment(f"{name}.{key}", child, (f"{name}.{key}",))
    elif callable(found):
        yield Segment(name, found, (name, *uses) if isinstance(found, nn.Module) else tuple(uses))
    else:
        near = get_close_matches(name, [key for key in modules if key], n=3)
        raise StrategyError(
            f"{type(model).__name__}.pipeline names `{name}`, which is neither a module nor a method of the model",
            hints=[f"near it are {', '.join(near)}"] if near else (),
        )


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields all parameters and buffers under each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def held_by(model: nn.Module, step: Segment) -> list[Tensor]:
    """Returns the parameters and buffers that a step uses, each once; ignores modules that this rank removed."""
    found: dict[int, Tensor] = {}
    for used in step.uses:
        one: Any = model
        for name in used.split("."):
            one = getattr(one, name, None)
        if one is not None:
            tensors = [one] if isinstance(one, Tensor) else [tensor for _, tensor in named_tensors(one)]
            found |= {id(tensor): tensor for tensor in tensors}
    return list(found.values())


# ---------------------------------------------------------------------------------------------- cuts
def cut_evenly(model: nn.Module, steps: Sequence[Segment], parts: int) -> list[int]:
    """Returns the number of the first step of each part, so that the most expensive part costs as little as possible.

    The cost of a step is its number of parameters. Embeddings that the first step looks up are free. Raises UsageError
    for fewer steps than parts.
    """
    # Each parameter takes one multiplication per position.
    if len(steps) < parts:
        raise UsageError(
            f"{type(model).__name__}.pipeline has {len(steps)} steps, too few for {parts} parts",
            hints=["use a deeper model or fewer ranks", 'schedules other than "1F1B" and "GPipe" give each rank two'],
        )
    looked_up = {id(tensor) for tensor in held_by(model, steps[0])} & {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    costs = [
        sum(
            t.numel()
            for t in held_by(model, step)
            if isinstance(t, nn.Parameter) and (number or id(t) not in looked_up)
        )
        for number, step in enumerate(steps)
    ]
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_filled(costs, middle, 1)) <= parts else (middle + 1, high)
    return _filled(costs, low, parts)


def _filled(costs: Sequence[int], most: int, parts: int) -> list[int]:
    """Begins a new part when the current one would cost more than `most`, or when too few parts would remain."""
    begins, cost = [0], costs[0]
    for number in range(1, len(costs)):
        missing = parts - len(begins)
        if cost + costs[number] > most or len(costs) - number == missing:
            begins.append(number)
            cost = 0
        cost += costs[number]
    return begins


def cut_where(steps: Sequence[Segment], split: Sequence[str], parts: int) -> list[int]:
    """Returns the number of the first step of each part: 0, then the steps that the recipe names."""
    names = [step.name for step in steps]
    for name in split:
        if name not in names[1:]:
            near = get_close_matches(name, names[1:], n=3, cutoff=0)
            raise UsageError(
                f"strategy.split_points: no part can begin with `{name}`", hints=[f"near it are {', '.join(near)}"]
            )
    begins = [0, *map(names.index, split)]
    if len(begins) != parts or any(one >= other for one, other in pairwise(begins)):
        raise UsageError(
            f"strategy.split_points must name {parts - 1} steps in their order, the first of each of {parts} parts but "
            f"the first part, but it has {len(split)}: {', '.join(split)}",
            hints=["remove it: parts then cost about the same"],
        )
    return begins


# ---------------------------------------------------------------------------------------------- equal stages
_PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))
_DEPTH = 3  # levels of nested objects
_STANDARD = vars(nn.Module()).keys()


def segment_signatures(
    model: nn.Module, stages: Sequence[Sequence[Segment]], styles: Mapping[str, Hashable]
) -> list[Hashable]:
    """Returns a key for each stage; stages of equal layers with equal `styles` (by full name) have equal keys.

    Unique keys are given to the first and the last stage, and to stages that share a tensor with another stage.
    """
    tensors = [{id(tensor) for step in steps for tensor in held_by(model, step)} for steps in stages]
    holders = Counter(key for held in tensors for key in held)
    modules = dict(model.named_modules(remove_duplicate=False))
    ways = {id(modules[name]): style for name, style in styles.items()}
    found: list[Hashable] = []
    for place, (steps, held) in enumerate(zip(stages, tensors, strict=True)):
        alone = place in (0, len(stages) - 1) or any(holders[key] > 1 for key in held)
        found.append(place if alone else tuple(_step(model, step, modules, ways) for step in steps))
    return found


def _step(model: nn.Module, step: Segment, modules: Mapping[str, nn.Module], ways: Mapping[int, Hashable]) -> Hashable:
    used = [modules[name] for name in step.uses if name in modules]
    called = () if isinstance(step.call, nn.Module) else (getattr(step.call, "__func__", step.call),)
    return *called, *(_tensor(tensor) for tensor in held_by(model, step)), *(_module(one, ways) for one in used)


def _module(module: nn.Module, ways: Mapping[int, Hashable]) -> Hashable:
    """Returns a key of a module: class, tensors, settings and children; objects that cannot be compared by identity."""
    return (
        type(module),
        tuple((name, _tensor(one)) for name, one in _own(module)),
        tuple((name, _value(value)) for name, value in sorted(vars(module).items()) if name not in _STANDARD),
        tuple(id(value) for name, value in vars(module).items() if "hooks" in name and value),
        tuple((name, _module(child, ways)) for name, child in module.named_children()),
        module.training,
        ways.get(id(module)),
    )


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def _tensor(tensor: Tensor) -> Hashable:
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def _value(value: Any, depth: int = 0) -> Hashable:
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, list | tuple):
        return type(value), *(_value(one, depth) for one in value)
    if isinstance(value, nn.Module | type | FunctionType) or not hasattr(value, "__dict__") or depth == _DEPTH:
        return id(value)
    return type(value), *((name, _value(one, depth + 1)) for name, one in sorted(vars(value).items()))
