"""Compiles what a task computes of the model's outputs, so that nothing between logits and loss is kept in memory."""

from __future__ import annotations

import torch

from ddpforge.errors import PluginError
from ddpforge.interfaces import Task
from ddpforge.recipe.schema import TrainSection

__all__ = ["compile_losses"]


def compile_losses(task: Task, train: TrainSection) -> None:
    """Compiles the methods in `task.compiles` where the recipe compiles the model; raises PluginError for no method.

    Without CUDA graphs, whatever the mode: those of the model hold its outputs only until it is called again.
    """
    for name in task.compiles if train.compile != "off" else ():
        method = getattr(task, name, None)
        if not callable(method):
            raise PluginError(f"{type(task).__name__}.compiles names `{name}`, which is no method of it")
        setattr(task, name, torch.compile(method))
