"""The checks, by kind: each is a function of a case that raises Breach, and its docstring says what is expected."""

from ddpforge.testing.checks import callback, common, data, model, optimizer, sampler, schedule, strategy, task, tracker

__all__ = ["callback", "common", "data", "model", "optimizer", "sampler", "schedule", "strategy", "task", "tracker"]
