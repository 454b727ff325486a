"""Checks of built components: model, data, task, strategy and optimizer must fit together."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from ddpforge.components.local_code import component_name
from ddpforge.data.batch_assignment import Even
from ddpforge.errors import ForgeError, UsageError, recipe_faults
from ddpforge.features.auxiliary import OWNER
from ddpforge.features.float8 import check_float8
from ddpforge.features.sources import by_name
from ddpforge.features.task_state import NAME, check_no_parameters, has_state
from ddpforge.guard.sources import check_names, check_sources, warn_of_late_weights
from ddpforge.guard.static import kind_of
from ddpforge.interfaces import EpochBatchSampler, Task
from ddpforge.training.blocks import check_blocks as check_blocks_of
from ddpforge.training.blocks import find_blocks
from ddpforge.training.contract import contract_of
from ddpforge.training.initial_weights import find_initial
from ddpforge.training.optimizers import build_optimizer, check_parameters
from ddpforge.training.parameter_groups import parameter_groups
from ddpforge.training.stages import MISSING, Built
from ddpforge.training.updates import batches_per_step

__all__ = [
    "CHECKS",
    "FIT",
    "check_auxiliary",
    "check_batches",
    "check_blocks",
    "check_float64",
    "check_layers",
    "check_master_dtype",
    "check_methods",
    "check_optimizer",
    "check_own_parameters",
    "check_parameter_groups",
    "check_strategy_data",
    "check_task",
]

Errors = Iterator[ForgeError]

_FEW = 100  # checked steps of an order whose sizes are not known in advance


def check_batches(built: Built) -> Errors:
    """Yields errors for data and orders with a batch too small for all ranks, if the loss compares all samples."""
    if not built.task.whole_batch:
        return
    batch = built.recipe.train.global_batch
    for key, data in built.data.items():
        if key != "train" and hasattr(data, "__len__"):
            yield from _too_small(built, f"data.{key}", Even(data, batch).smallest)
    if not built.trains:
        return
    total, order = built.plan.horizon.total, built.sampler
    steps = total and total * batches_per_step(built.updates)
    if isinstance(order, EpochBatchSampler):
        last = order.steps_per_epoch - 1
        if steps is None or steps > last:
            yield from _too_small(built, "data.train", order.size(last))
    elif order:
        for step in range(min(_FEW, steps or _FEW)):  # in a long run, `check_whole` checks later steps
            if not built.data_ranks <= (size := len(order(step))) <= batch:
                yield UsageError(
                    f"{component_name(built.task)} compares all samples of a step with each other, but step {step} "
                    f"of the sampler {component_name(order)} has {size} sample(s) for {built.data_ranks} ranks and "
                    f"train.global_batch = {batch}",
                    hints=["give every step a sample for each rank, and at most train.global_batch samples"],
                    key="data.sampler",
                )
                break


def _too_small(built: Built, key: str, smallest: int) -> Errors:
    """Yields an error if the smallest batch of a dataset has fewer samples than there are ranks."""
    ways = ["set train.drop_last = true", "or train on fewer ranks"]
    if smallest < built.data_ranks:
        yield UsageError(
            f"{component_name(built.task)} compares all samples of a batch with each other, but a batch of [{key}] has "
            f"{smallest} sample(s) for {built.data_ranks} ranks",
            hints=ways if key == "data.train" else ways[1:],
            key=key,
        )


def check_auxiliary(built: Built) -> Errors:
    """Yields an error for each callback with the name of an auxiliary module or of the task's state.

    Raises UsageError for missing weights of an auxiliary module.
    """
    names = [NAME] if built.task is not MISSING and has_state(built.task) else []
    if NAME in names and NAME in built.recipe.callbacks:
        yield UsageError(f"callbacks.{NAME} has the name under which the task's state is saved", hints=["rename it"])
    for name, beside in built.auxiliary.items():
        if f"{OWNER}{name}" in built.recipe.callbacks:
            yield UsageError(f"callbacks.{OWNER}{name} has the name of an auxiliary module", hints=["rename it"])
        if beside.weights is not None and not beside.is_saved:
            find_initial(beside.weights, f"weights of {name}")


def check_own_parameters(built: Built) -> None:
    """Raises UsageError for parameters in the task, which no optimizer trains."""
    if built.trains:
        check_no_parameters(built.task, built.model, built.auxiliary.values())


def check_task(built: Built) -> None:
    """Raises UsageError for a dataset or a model that the task cannot use."""
    for data in _datasets(built):
        _check_documents(built.task, data)
        try:
            with recipe_faults():
                built.task.check(built.model, data)
        except UsageError as error:
            _name_option(built, data, error)
            raise


def check_methods(built: Built) -> None:
    """Raises UsageError for a method of a dataset that cannot be called with its argument."""
    for data in _datasets(built):
        for name, argument in (("__getitem__", "index"), ("collate", "samples")):
            method = getattr(data, name, None)
            try:
                signature = inspect.signature(method) if callable(method) else None
            except ValueError:  # written in C
                continue
            try:
                if signature is not None:
                    signature.bind(None)
            except TypeError as error:
                raise UsageError(
                    f"{type(data).__name__}.{name} is called with one argument, the {argument}: {error}",
                    hints=[f"def {name}(self, {argument})"],
                ) from error


def _check_documents(task: Task, data: Any) -> None:
    """Raises UsageError for samples of several documents if the task would let these see each other."""
    if getattr(data, "document_mask", False) and not getattr(task, "separates_documents", False):
        raise UsageError(
            f"samples of {component_name(data)} have several documents that must not see each other, but the task "
            f"{component_name(task)} does not keep them apart",
            hints=["set document_mask = false, or do not pack the samples", "or use a task that does, e.g. causal_lm"],
            key="task.use",
        )


def _name_option(built: Built, data: object, error: UsageError) -> None:
    """Makes an error about the number of classes name the option of the recipe's model."""
    model = built.recipe.model
    if error.key != "model.classes":
        return
    options = built.registry.options_model("model", model.use, model.base).model_fields
    found = next((name for name in ("classes", "outputs", "num_classes", "num_labels") if name in options), None)
    if found:
        error.key, error.hints = f"model.{found}", (f"set model.{found} = {getattr(data, 'classes', '')}",)


def check_strategy_data(built: Built) -> None:
    """Raises UsageError for a dataset that the strategy cannot use."""
    for data in _datasets(built):
        built.strategy.check_data(data)


def _datasets(built: Built) -> Iterator[Any]:
    """Yields every dataset, and the sources of training data one by one."""
    for data in built.data.values():
        yield from by_name(data).values()


def check_blocks(built: Built) -> None:
    """Raises UsageError for blocks that the model lacks, or that the strategy cannot use."""
    train = built.recipe.train
    with recipe_faults():
        found = find_blocks(built.model, train.blocks)
        check_blocks_of(found, train)
    try:
        built.strategy.check(built.model, built.task, found)
    except ForgeError as error:
        error.key = error.key or "strategy"
        raise


def check_layers(built: Built) -> None:
    """Raises UsageError if the recipe sets float8 and it applies to no layer."""
    train = built.recipe.train
    if train.fp8 == "off":
        return
    try:
        blocks = find_blocks(built.model, train.blocks)
    except ValueError:
        return  # see `check_blocks`
    with recipe_faults("train.fp8"):
        check_float8(built.model, blocks, train)


def check_float64(built: Built) -> None:
    """Raises UsageError for a float64 tensor of the model if the ranks' devices lack this dtype."""
    import torch

    kind = kind_of(built)
    if kind.has_float64:
        return
    for name, tensor in (*built.model.named_parameters(), *built.model.named_buffers()):
        if tensor.dtype in (torch.float64, torch.complex128):
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise UsageError(
                f'`{name}` of the model is {dtype}, which {kind.noun} does not have (train.device = "{kind.name}")',
                hints=["build the model in float32", 'or compute on the CPU: train.device = "cpu"'],
            )


def check_master_dtype(built: Built) -> None:
    """Raises UsageError for a trainable parameter of another dtype than the strategy's master weights."""
    master = contract_of(built.strategy).master_dtype
    for name, parameter in built.model.named_parameters() if built.trains else ():
        dtype = str(parameter.dtype).removeprefix("torch.")
        if parameter.requires_grad and dtype not in (master, "float64"):
            raise UsageError(
                f"parameter `{name}` is {dtype}, but the optimizer updates {master} weights: updates smaller than a "
                "rounding step would be lost",
                hints=[
                    'build the model in float32; train.precision = "bf16" still computes in bfloat16',
                    "or freeze the parameter: train.freeze",
                ],
            )


def check_parameter_groups(built: Built) -> None:
    """Raises UsageError for globs of the optimizer that match no parameter, and for parameters in several updates."""
    with recipe_faults("train.freeze" if built.recipe.train.freeze and not _trainable(built) else ""):
        if built.trains:
            optimizer, blocks = built.recipe.optimizer, built.recipe.train.blocks
            check_parameters(built.registry, optimizer, built.model, list(built.updates), blocks)
        else:
            parameter_groups(built.model, ())


def _trainable(built: Built) -> bool:
    return any(parameter.requires_grad for parameter in built.model.parameters())


def check_optimizer(built: Built) -> None:
    """Raises UsageError if the optimizer refuses the model's parameters; skipped if these have no memory."""
    if not built.trains or any(parameter.is_meta for parameter in built.model.parameters()):
        return
    recipe = built.recipe
    with recipe_faults():
        build_optimizer(built.registry, recipe.optimizer, built.model, list(built.updates), recipe.train.blocks)


FIT = (("data", check_methods), ("task", check_task))
"""The checks that must pass before samples are tried."""

CHECKS = (
    ("data.train", warn_of_late_weights),
    ("data.train", check_sources),
    ("data", check_names),
    ("data", check_batches),
    ("task", check_auxiliary),
    ("task", check_own_parameters),
    ("strategy", check_strategy_data),
    ("train.blocks", check_blocks),
    ("train.fp8", check_layers),
    ("train.device", check_float64),
    ("model", check_master_dtype),
    ("optimizer", check_parameter_groups),
)
"""The checks of `Built`, each with the recipe's key of its errors."""
