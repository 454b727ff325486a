"""Tries a few samples on the built parts before training: what breaks a contract, or cannot be computed, is noted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from traceback import walk_tb

import torch
from torch import nn

from ddpforge.components.errors import where_raised
from ddpforge.components.local_code import PREFIX
from ddpforge.data import MicroBatch
from ddpforge.data.nests import take
from ddpforge.data.randomness import own_random_numbers
from ddpforge.errors import ForgeError, UsageError
from ddpforge.interfaces import Task
from ddpforge.ranks.devices import device_type
from ddpforge.recipe.origins import KeyPath
from ddpforge.training.callbacks import overriding
from ddpforge.training.contract import count_parameters
from ddpforge.training.evaluation import prefix
from ddpforge.training.parts import Parts, key_of
from ddpforge.training.rehearsal import FEW, Rehearsal, first_batch, first_halves, rehearse, try_before_model
from ddpforge.training.sums import SMALL, Halves

__all__ = ["rehearse_training", "try_out"]

log = logging.getLogger("ddpforge")

_OURS = "ddpforge.builtin.tasks."


def try_out(parts: Parts) -> dict[str, Rehearsal]:
    """Fetches a few samples of each dataset and evaluates them; returns what came of it, by the dataset's key."""
    found: dict[str, Rehearsal] = {}
    if not parts.fits:
        return found
    for key, data in parts.data.items():
        if hasattr(data, "__len__") and not len(data):
            continue  # which was told when steps were counted
        few: dict[str, int] = {"most": _most(parts, key), "seed": parts.recipe.train.seed}
        batches: list[MicroBatch] = []
        with parts.noting("data", *key.split(".")), _telling(parts, f"data.{key}"), own_random_numbers():
            batches.append(first_batch(data, **few))
        with parts.noting("task"), _telling(parts, f"data.{key}"), own_random_numbers():
            for batch in batches:
                found[key] = _rehearse(parts, key, batch, _gpu(parts), partial(first_halves, data, **few))
    evaluated = {name: found[key].metrics for name in parts.evaluations() if (key := key_of(name)) in found}
    if evaluated.keys() == parts.evaluations().keys() and _is_ours(parts.task):
        _find_metrics(parts, evaluated)
    return found


def rehearse_training(parts: Parts) -> None:
    """Looks at the first samples that training will use, and notes breaches of contract.

    Nothing is done that could matter for the run or be noticed by it: what is fetched is fetched once, loader
    processes fetch by themselves, and neither a plugin's loss nor a model from the recipe's own files is called, as
    they may do more than compute. An error in a model's forward pass that training would meet as well is told; any
    other (a model may need a GPU) is left to the first step.
    """
    home = type(parts.task).loss.__module__ if parts.fits and parts.trains else ""
    ours = home.startswith(_OURS)
    calls = _may_call_model(parts) and (ours or home.startswith(PREFIX))
    if not (ours or calls) or _has_loaders(parts):
        return
    with parts.noting("task"), own_random_numbers():
        whole = None
        try:
            whole = _first(parts)
            batch = _few(whole)
            if calls:
                metrics = _rehearse(parts, "train", batch, None).metrics
                if ours:
                    _find_metrics(parts, dict.fromkeys(parts.evaluations(), metrics))
            else:
                try_before_model(parts.task, batch.data)
        except ForgeError:
            raise
        except Exception as error:
            if calls and _fails_in_training(parts, error, whole):
                with _telling(parts, "data.train"):
                    raise
            log.debug("the first batch could not be evaluated before training: %s", error)


def _has_loaders(parts: Parts) -> bool:
    """True if loader processes fetch what is trained on."""
    return bool(parts.training.workers) if parts.is_open else parts.recipe.data.workers not in (0, "auto")


def _fails_in_training(parts: Parts, error: Exception, batch: MicroBatch | None) -> bool:
    """True if the model, which only computes, raises this error for a whole micro-batch and wherever ranks compute.

    Others' callbacks and strategies may change the model, or what the task gives it, before the first step; the
    framework itself does so for `sync_batchnorm`, and casts for fp16.
    """
    train, others = parts.recipe.train, [*parts.callbacks.values(), parts.built.strategy]
    if train.sync_batchnorm or train.precision == "fp16" or not _in_forward(parts, error):
        return False
    if any(not type(part).__module__.startswith("ddpforge.") for part in others):
        return False
    if batch is None or (not parts.is_open and _most(parts, "train") > FEW):
        return False  # `batch` is not a whole one
    try:
        # On the meta device shapes and dtypes fail as on any other.
        _rehearse(parts, "train", batch, None if device_type(train) == "cpu" else "meta")
    except Exception as again:
        return type(again) is type(error) and _in_forward(parts, again)
    return False


def _in_forward(parts: Parts, error: Exception) -> bool:
    """True if the error was raised within the forward pass of such a model."""
    forward = getattr(type(parts.model).forward, "__code__", None)
    return any(frame.f_code is forward for frame, _ in walk_tb(error.__traceback__))


def _may_call_model(parts: Parts) -> bool:
    if not parts.fits:
        return False
    models = [parts.model, *_modules_beside(parts)]
    if sum(count_parameters(model).all for model in models) > SMALL:
        return False
    local = any(type(module).__module__.startswith(PREFIX) for model in models for module in model.modules())
    return not local and not any(parameter.is_meta for parameter in parts.model.parameters())


def _modules_beside(parts: Parts) -> list[nn.Module]:
    return [beside.module for beside in parts.beside.values()]


def _first(parts: Parts) -> MicroBatch:
    if parts.is_open:
        return parts.training.first()
    return first_batch(parts.data["train"], most=_most(parts, "train"), seed=parts.recipe.train.seed)


def _gpu(parts: Parts) -> str | None:
    """The type of device that ranks will compute on; None if the model is there already."""
    return "cuda" if device_type(parts.recipe.train) == "cuda" and torch.cuda.is_available() else None


def _most(parts: Parts, key: str) -> int:
    train = parts.recipe.train
    micro = parts.batch.micro_batch if parts.built.batch is not None else train.global_batch
    return (train.eval_batch if key != "train" else None) or micro


def _rehearse(
    parts: Parts, key: str, batch: MicroBatch, device: str | None, halves: Callable[[], Halves] | None = None
) -> Rehearsal:
    return rehearse(
        parts.model,
        parts.task,
        batch,
        use="training" if key == "train" else "evaluation",
        precision=parts.recipe.train.precision,
        device=device,
        beside=_modules_beside(parts),
        halves=halves,
    )


def _find_metrics(parts: Parts, sets: Mapping[str, Mapping[str, float]]) -> None:
    """Asks whether the metrics by which the recipe decides are those of a set; `sets` has the metrics of each.

    Tasks that are not ours name some only now and then.
    """
    if overriding(parts.callbacks, "while_evaluating"):
        return  # what they report is known when they do
    known = {f"{prefix(name)}{metric}" for name, metrics in sets.items() for metric in metrics}
    wanted: list[tuple[KeyPath, object]] = [
        (("callbacks", name, "metric"), getattr(callback, "metric", "")) for name, callback in parts.callbacks.items()
    ]
    for path, metric in [*wanted, (("checkpoint", "keep", "by"), parts.recipe.checkpoint.keep.by)]:
        if known and str(metric).startswith("eval/") and metric not in known:
            error = UsageError(f"no evaluation reports {metric}", hints=[f"there are {', '.join(sorted(known))}"])
            parts.note(path, error)


@contextmanager
def _telling(parts: Parts, key: str) -> Iterator[None]:
    """Turns an error of a component into one that says what was being tried."""
    try:
        yield
    except ForgeError:
        raise
    except Exception as error:
        raise UsageError(
            f"a batch of [{key}] cannot be evaluated: {type(error).__name__}: {error}",
            hints=[*getattr(error, "__notes__", ()), *where_raised(error)],
        ) from error


def _is_ours(task: Task) -> bool:
    return type(task).__module__.startswith(_OURS)


def _few(batch: MicroBatch) -> MicroBatch:
    """The first samples of a batch, where it can be cut."""
    samples = min(batch.samples, FEW)
    try:
        return batch._replace(data=take(batch.data, 0, samples, batch.samples), samples=samples)
    except ValueError:
        return batch
