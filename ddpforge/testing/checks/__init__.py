"""Checks by kind of component. Each is a function of a case that raises Breach; its docstring is the requirement."""

from ddpforge.testing.checks import (
    callback,
    common,
    data,
    device,
    model,
    optimizer,
    relations,
    sampler,
    schedule,
    strategy,
    task,
    tracker,
)

__all__ = [
    "callback",
    "common",
    "data",
    "device",
    "model",
    "optimizer",
    "relations",
    "sampler",
    "schedule",
    "strategy",
    "task",
    "tracker",
]
