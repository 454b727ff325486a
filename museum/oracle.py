"""The right result of a training: one process in float64, each step one batch, with plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from museum.training import Result, Training

__all__ = ["train"]


def train(training: Training) -> Result:
    """Returns the result: every item of a step has the same weight, whatever the layout."""
    result = Result()
    data: Any = training.data()
    model = training.build().double()
    optimizer = training.build_optimizer(model)
    base = [group["lr"] for group in optimizer.param_groups]
    steps = training.steps()
    for _ in range(training.epochs):
        for start in range(0, len(data), training.batch):
            if training.stop and len(result.rates) == training.stop:
                training = training.second()
                _change(optimizer, training, model)
            if training.factor:
                for group, rate in zip(optimizer.param_groups, base, strict=True):
                    group["lr"] = rate * training.factor(len(result.rates), steps)
            result.rates.append([group["lr"] for group in optimizer.param_groups])
            rows = [data[index] for index in range(start, min(start + training.batch, len(data)))]
            inputs, targets = default_collate(rows)
            loss = training.loss.mean(model(_double(inputs)), _double(targets))
            if not loss.isfinite():
                continue  # such a step changes nothing
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])
            if training.clip:
                nn.utils.clip_grad_norm_(model.parameters(), training.clip)
            optimizer.step()
            result.losses.append(loss.item())
            result.norms.append(float(norm))
            if training.eval_data and training.eval_steps and len(result.rates) % training.eval_steps == 0:
                result.evals.append(evaluate(training, model))
        if training.eval_data and not training.eval_steps:
            result.evals.append(evaluate(training, model))
    result.weights = Result.of_model(model)
    return result


def evaluate(training: Training, model: nn.Module) -> float:
    """Returns the mean loss over all items of the evaluation data, each sample once."""
    data: Any = training.eval_data() if training.eval_data else []
    inputs, targets = default_collate([data[index] for index in range(len(data))])
    model.eval()
    with torch.no_grad():
        loss = training.loss.mean(model(_double(inputs)), _double(targets)).item()
    model.train()
    return loss


def _change(optimizer: torch.optim.Optimizer, training: Training, model: nn.Module) -> None:
    """Applies the options of a changed optimizer, and keeps its state."""
    new = training.build_optimizer(model).param_groups
    for group, other in zip(optimizer.param_groups, new, strict=True):
        group.update({key: value for key, value in other.items() if key != "params"})


def _double(value: Tensor | Sequence[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    return [_double(one) for one in value]
