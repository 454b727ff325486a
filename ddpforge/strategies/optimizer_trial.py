"""Tries an optimizer out on small weights, to find out what it would do before it does it to a model's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddpforge.errors import StrategyError
from ddpforge.strategies.several import members

__all__ = ["refuse_sparse", "refuse_unlike", "remember", "tried"]

_Groups = list[dict[str, Any]]
_makers: WeakKeyDictionary[Optimizer, Callable[[_Groups], Optimizer]] = WeakKeyDictionary()


def remember(optimizer: Optimizer, make: Callable[[_Groups], Optimizer]) -> None:
    """Has another such `optimizer` made by `make`, from groups of small weights.

    The recipe's optimizers are remembered. Of any other, the class is called with the weights alone.
    """
    _makers[optimizer] = make


def tried(
    optimizer: Optimizer, group: Mapping[str, Any], *values: Sequence[Tensor]
) -> tuple[list[Tensor], dict[str, Any]]:
    """Steps another such optimizer, with the options of `group`, on one weight for each of `values`.

    Each begins with its first value and gets the others as gradients. Returns the weights, and the state that the
    optimizer keeps of the first. Raises StrategyError for an optimizer that needs what its constructor kept of each
    weight, and whatever it raises itself.
    """
    weights = [start.clone().requires_grad_() for start, *_ in values]
    make: Any = _makers.get(optimizer)
    other: Optimizer = make([{**group, "params": weights, "lr": 0.1}]) if make else type(optimizer)(weights)  # type: ignore[call-arg]
    (mine,) = (one for _, member in members(other) for one in member.param_groups)
    mine |= {key: value for key, value in group.items() if key != "params"} | {"lr": 0.1}
    other.state.clear()
    try:
        for gradients in list(zip(*values, strict=True))[1:]:
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient.clone()
            other.step()
    except Exception as error:
        if not any(weight in optimizer.state for one in optimizer.param_groups for weight in one["params"]):
            raise
        raise StrategyError(
            f"{type(optimizer).__name__} needs what its constructor keeps of each weight, and weights are split later",
            hints=["let it make the state of a weight in `step`, where there is none", 'or set strategy.use = "ddp"'],
        ) from error
    return [weight.detach() for weight in weights], other.state[weights[0]]


def refuse_unlike(
    optimizer: Optimizer,
    device: torch.device,
    cuts: Sequence[Callable[[Tensor], Tensor]],
    *,
    fails: str,
    differs: str,
    hints: Sequence[str],
    rows: int = 4,
    flat: bool = False,
) -> dict[str, Any]:
    """Raises StrategyError for an optimizer that does not do with parts of a weight what it does with the whole.

    Args:
        optimizer: It stays as it is.
        device: The one that the weights will be on.
        cuts: Each makes of a tensor [rows, 4] a part of it, or lays it over ranks.
        fails: The words, behind the optimizer's name, for one that raises an error.
        differs: The words for one whose updates are others.
        hints: What to do about either.
        rows: The length of the weight that is tried.
        flat: Parts are of the flattened weight, in which state that is not per element cannot be placed either.

    Returns:
        The state that it keeps of a whole weight.
    """
    name, kept = type(optimizer).__name__, dict[str, Any]()
    for group in optimizer.param_groups:
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(rows, 4, generator=generator).to(device) for _ in range(4)]
        try:
            whole, state = tried(optimizer, group, values, values[::-1])
            found = []
            for cut in cuts:
                parts = [cut(value) for value in values]
                found.append(tried(optimizer, group, parts, parts[::-1])[0])
        except Exception as error:
            raise StrategyError(f"{name} {fails}: {error}", hints=hints) from error
        kept |= state
        for key, value in state.items():
            if not flat and (shape := tuple(getattr(value, "shape", ()))) not in ((), (rows, 4)):
                raise StrategyError(
                    f"{name} keeps `{key}` of a weight of shape [{rows}, 4] in the shape {list(shape)}, and which rank "
                    "would have what of it is not known",
                    hints=hints,
                )
        moved = (whole[0] - values[0]).abs().max()
        for cut, parts in zip(cuts, found, strict=True):
            if any(
                (_local(part) - _local(cut(weight))).abs().max() > 1e-3 * moved
                for part, weight in zip(parts, whole, strict=True)
            ):
                raise StrategyError(f"{name} {differs}", hints=hints)
    return kept


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that lies over ranks."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def refuse_sparse(optimizer: Optimizer, model: nn.Module, *, sharded: bool) -> None:
    """Raises StrategyError where embeddings give sparse gradients and the optimizer cannot take or save them.

    Where gradients are `sharded` nothing can take them.
    """
    owners = {
        weight: (member, group)
        for _, member in members(optimizer)
        for group in member.param_groups
        for weight in group["params"]
    }
    sparse = set[Tensor]()
    for name, module in model.named_modules():
        if not (isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad):
            continue
        gives = f"`{name}` ({type(module).__name__}) gives sparse gradients, and "
        if sharded:
            raise StrategyError(
                f"{gives}sharded ones are dense",
                hints=["leave out `sparse = True` of the embedding", 'or set strategy.use = "ddp"'],
            )
        sparse.add(module.weight)
        if reason := _refuses_sparse(*owners[module.weight], module.weight):
            raise StrategyError(
                f"{gives}{type(owners[module.weight][0]).__name__} {reason}",
                hints=[
                    "leave out `sparse = True` of the embedding",
                    'or set optimizer.use = "sgd" with fused = false and without momentum',
                ],
            )
    for name, weight in model.named_parameters():
        if weight in owners and weight not in sparse and isinstance(owners[weight][0], torch.optim.SparseAdam):
            raise StrategyError(
                f"SparseAdam takes sparse gradients only, and that of `{name}` is dense",
                hints=['set optimizer.use = "adamw"'],
            )


def _refuses_sparse(optimizer: Optimizer, group: Mapping[str, Any], weight: Tensor) -> str | None:
    """Returns why an optimizer cannot have the sparse gradients of one of its weights."""
    gradient = torch.sparse_coo_tensor(
        torch.tensor([[0, 2]]), torch.ones(2, 3), (4, 3), device=weight.device, check_invariants=True
    )
    try:
        _, state = tried(optimizer, group, [torch.zeros(4, 3, device=weight.device), gradient, gradient])
    except StrategyError:  # it steps with the state that it has
        state = optimizer.state[weight]
    except RuntimeError as error:
        return f"does not take them: {error}"
    kept = [key for key, value in state.items() if isinstance(value, Tensor) and value.is_sparse]
    return f"keeps its `{kept[0]}` sparse, which no checkpoint can hold" if kept else None
