"""Tells which stages of a pipeline hold the same layers: `ddpforge plan` simulates one of them for all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ddpforge.strategies.pipeline.steps import Step, held_by

__all__ = ["forms"]

_PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))
_DEPTH = 3  # of objects within objects
_STANDARD = vars(nn.Module()).keys()


def forms(model: nn.Module, stages: Sequence[Sequence[Step]], styles: Mapping[str, Hashable]) -> list[Hashable]:
    """Describes what each stage holds and does: equal for stages of equal layers, in equal `styles` by full names.

    The first and the last are like no other, nor is one that shares a tensor with another.
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


def _step(model: nn.Module, step: Step, modules: Mapping[str, nn.Module], ways: Mapping[int, Hashable]) -> Hashable:
    used = [modules[name] for name in step.uses if name in modules]
    called = () if isinstance(step.call, nn.Module) else (getattr(step.call, "__func__", step.call),)
    return *called, *(_tensor(tensor) for tensor in held_by(model, step)), *(_module(one, ways) for one in used)


def _module(module: nn.Module, ways: Mapping[int, Hashable]) -> Hashable:
    """Its class, its tensors, its settings, and its children; what cannot be compared is like itself only."""
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
