"""Steps an optimizer on small weights, to check its behaviour before training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddpforge.errors import StrategyError
from ddpforge.strategies.composite_optimizer import constructor_of, member_optimizers

__all__ = [
    "check_independent_updates",
    "check_same_update",
    "check_sparse_gradients",
    "probe_optimizer",
]

_Groups = list[dict[str, Any]]


def probe_optimizer(
    optimizer: Optimizer, group: Mapping[str, Any], *values: Sequence[Tensor]
) -> tuple[list[Tensor], dict[str, Any]]:
    """Steps another optimizer of the same kind, with the options of `group` and lr = 0.1, on small weights.

    Args:
        optimizer: Is not changed.
        group: The options of one of its parameter groups.
        values: One sequence per weight: its initial value, then its gradient in each step.

    Returns:
        The updated weights, and the optimizer's state of the first.

    Raises:
        StrategyError: The optimizer needs state that its constructor made for each weight.
        Exception: Any other error of the optimizer.
    """
    weights = [start.clone().requires_grad_() for start, *_ in values]
    make: Any = constructor_of(optimizer)
    other: Optimizer = make([{**group, "params": weights, "lr": 0.1}]) if make else type(optimizer)(weights)  # type: ignore[call-arg]
    (mine,) = (one for _, member in member_optimizers(other) for one in member.param_groups)
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
            f"{type(optimizer).__name__} needs state that its constructor makes for each weight, but weights are split "
            "later",
            hints=["create the state of a weight in `step`, if it has none yet", 'or set strategy.use = "ddp"'],
        ) from error
    return [weight.detach() for weight in weights], other.state[weights[0]]


def check_same_update(
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
    """Raises StrategyError if the optimizer updates parts of a weight differently from the whole weight.

    Args:
        optimizer: Is not changed.
        device: Device of the model's weights.
        cuts: Functions that return a part of a tensor [rows, 4], or distribute it over ranks.
        fails: End of the error message if the optimizer raises an error; its name comes first.
        differs: End of the error message if the updates differ.
        hints: Hints for both errors.
        rows: Number of rows of the tested weight.
        flat: Parts are of the flattened weight. Then the shape of the optimizer's state is not checked.

    Returns:
        The optimizer's state of a whole weight.
    """
    name, kept = type(optimizer).__name__, dict[str, Any]()
    for group in optimizer.param_groups:
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(rows, 4, generator=generator).to(device) for _ in range(4)]
        try:
            whole, state = probe_optimizer(optimizer, group, values, values[::-1])
            found = []
            for cut in cuts:
                parts = [cut(value) for value in values]
                found.append(probe_optimizer(optimizer, group, parts, parts[::-1])[0])
        except Exception as error:
            raise StrategyError(f"{name} {fails}: {error}", hints=hints) from error
        kept |= state
        for key, value in state.items():
            if not flat and (shape := tuple(getattr(value, "shape", ()))) not in ((), (rows, 4)):
                raise StrategyError(
                    f"{name} keeps `{key}` of a weight of shape [{rows}, 4] in the shape {list(shape)}: it cannot be "
                    "split over ranks like the weight",
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


def check_independent_updates(optimizer: Optimizer, device: torch.device) -> None:
    """Raises StrategyError if the update of a weight depends on other weights, as in L-BFGS, but ranks hold a part."""
    for _, member in member_optimizers(optimizer):
        for group in member.param_groups:
            generator = torch.Generator().manual_seed(0)
            first, second = ([torch.randn(4, 4, generator=generator).to(device) for _ in range(4)] for _ in range(2))
            try:
                together, _ = probe_optimizer(member, group, first, second)
                alone, _ = probe_optimizer(member, group, first)
            except StrategyError:  # state that the constructor makes for each weight: no state of all weights together
                continue
            if (together[0] - alone[0]).abs().max() > 1e-3 * (alone[0] - first[0]).abs().max():
                raise StrategyError(
                    f"{type(member).__name__} updates all weights together, but each rank holds a part of the model",
                    hints=['set strategy.use = "ddp", or use another optimizer'],
                )


def _local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a distributed tensor; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def check_sparse_gradients(optimizer: Optimizer, model: nn.Module, *, sharded: bool) -> None:
    """Raises StrategyError if embeddings give sparse gradients that the optimizer cannot use or save.

    If gradients are `sharded`, no optimizer can use sparse ones. SparseAdam is refused for dense gradients.
    """
    owners = {
        weight: (member, group)
        for _, member in member_optimizers(optimizer)
        for group in member.param_groups
        for weight in group["params"]
    }
    sparse = set[Tensor]()
    for name, module in model.named_modules():
        if not (isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad):
            continue
        gives = f"`{name}` ({type(module).__name__}) gives sparse gradients, but "
        if sharded:
            raise StrategyError(
                f"{gives}sharded gradients are dense",
                hints=["remove `sparse = True` from the embedding", 'or set strategy.use = "ddp"'],
            )
        sparse.add(module.weight)
        if reason := _rejects_sparse(*owners[module.weight], module.weight):
            raise StrategyError(
                f"{gives}{type(owners[module.weight][0]).__name__} {reason}",
                hints=[
                    "remove `sparse = True` from the embedding",
                    'or set optimizer.use = "sgd" with fused = false and without momentum',
                ],
            )
    for name, weight in model.named_parameters():
        if weight in owners and weight not in sparse and isinstance(owners[weight][0], torch.optim.SparseAdam):
            raise StrategyError(
                f"SparseAdam takes sparse gradients only, but the gradient of `{name}` is dense",
                hints=['set optimizer.use = "adamw"'],
            )


def _rejects_sparse(optimizer: Optimizer, group: Mapping[str, Any], weight: Tensor) -> str | None:
    """Returns the reason why the optimizer cannot use or save sparse gradients of `weight`; None if it can."""
    gradient = torch.sparse_coo_tensor(
        torch.tensor([[0, 2]]), torch.ones(2, 3), (4, 3), device=weight.device, check_invariants=True
    )
    try:
        _, state = probe_optimizer(optimizer, group, [torch.zeros(4, 3, device=weight.device), gradient, gradient])
    except StrategyError:  # the trial needs state of the constructor: look at that state
        state = optimizer.state[weight]
    except RuntimeError as error:
        return f"does not take them: {error}"
    kept = [key for key, value in state.items() if isinstance(value, Tensor) and value.is_sparse]
    return f"keeps its `{kept[0]}` sparse, which no checkpoint can hold" if kept else None
