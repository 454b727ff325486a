"""Refuses what no strategy can do with a recipe, before ranks join."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import torch

from ddpforge.interfaces import Contract, Refusal, Task
from ddpforge.recipe.schema import Recipe, TrainSection

__all__ = ["general_refusals", "refusals_of_float8", "refusals_of_optimizers", "refusals_of_score"]

_SEVERAL = ('set strategy.use = "ddp" (without compression = "powersgd"), "fsdp" or "single"',)

_FLOAT8 = (8, 9)  # the compute capability from which on tensor cores multiply it


def general_refusals(train: TrainSection, data_ranks: int, device: str) -> Iterator[Refusal]:
    """CUDA needed on a CPU, and gradients that would add up in memory of CUDA graphs."""
    for key, what in (("tf32", "multiplies in TF32"), ("cudnn_benchmark", "lets cuDNN choose")):
        if getattr(train, key) and device != "cuda":
            message = f"train.{key} {what}, which a GPU does, and this run is on {device}"
            yield Refusal(f"train.{key}", message, (f"leave train.{key} out",))
    if train.cudnn_benchmark and train.deterministic:
        message = (
            "train.cudnn_benchmark chooses by time, now this algorithm and now that, and train.deterministic forbids it"
        )
        yield Refusal("train.cudnn_benchmark", message, ("leave one of both out",))
    if train.sync_batchnorm and device != "cuda":
        hint = "torch.nn.SyncBatchNorm has no CPU implementation; leave train.sync_batchnorm out"
        yield Refusal("train.sync_batchnorm", f"train.sync_batchnorm needs CUDA, and this run is on {device}", (hint,))
    together = max(1, train.per_pass(data_ranks)) * data_ranks
    if device == "cuda" and train.uses_cuda_graphs and train.global_batch > together:
        yield Refusal(
            "train.compile",
            f'train.compile = "{train.compile}" replays CUDA graphs, whose memory is used again in every forward '
            f"pass, and gradients of {train.global_batch // together} passes are to add up there",
            ('set train.compile = "default"', f"or let each rank make one pass per step, with {_one_pass(train)}"),
        )


def refusals_of_optimizers(recipe: Recipe, contract: Contract, device: str) -> Iterator[Refusal]:
    """Several optimizers under a strategy that takes one; turns with CUDA graphs, whose memory is used again."""
    for name, group in recipe.optimizer.groups.items():
        if group.use != recipe.optimizer.use and contract.optimizers == "one":
            yield Refusal(
                f"optimizer.groups.{name}.use",
                f'strategy.use = "{recipe.strategy.use}" takes one optimizer; [optimizer.groups.{name}] has another',
                (*_SEVERAL, "or leave its `use` out: settings of one optimizer may differ"),
            )
    if not recipe.optimizer.turns:
        return
    if contract.optimizers == "one":
        yield Refusal(
            "optimizer.turns",
            f'strategy.use = "{recipe.strategy.use}" makes one update a step, and [optimizer.turns] asks for several',
            _SEVERAL,
        )
    if device == "cuda" and recipe.train.uses_cuda_graphs:
        yield Refusal(
            "train.compile",
            f'train.compile = "{recipe.train.compile}" replays CUDA graphs, and each turn trains other parameters',
            ('set train.compile = "default"',),
        )


def refusals_of_float8(recipe: Recipe, contract: Contract, device: str) -> Iterator[Refusal]:
    """Float8 where it cannot be computed: on CPUs and older GPUs, without torchao, by strategies that share layers."""
    if recipe.train.fp8 == "off":
        return

    def refusal(message: str, *hints: str) -> Refusal:
        return Refusal(
            "train.fp8",
            f'train.fp8 = "{recipe.train.fp8}" {message}',
            (*hints, f"{'or ' * bool(hints)}leave train.fp8 out"),
        )

    if device != "cuda":
        yield refusal(f"multiplies in float8, which a GPU does, and this run is on {device}")
    elif torch.cuda.is_available() and (found := torch.cuda.get_device_capability()) < _FLOAT8:
        there, needed = [".".join(map(str, pair)) for pair in (found, _FLOAT8)]
        yield refusal(f"needs a GPU of compute capability {needed} (L4, RTX 40, H100), and this one has {there}")
    if find_spec("torchao") is None:
        yield refusal("computes with torchao, which is not installed", "pip install 'ddpforge[fp8]'")
    if not contract.float8:
        yield refusal(
            f'needs whole layers, and strategy.use = "{recipe.strategy.use}" as it is set here computes them otherwise',
            'set strategy.use = "ddp", "fsdp" (without `tensor`) or "single"',
        )


def refusals_of_score(recipe: Recipe, task: Task, contract: Contract) -> Iterator[Refusal]:
    """A loss within the model's forward pass, under a strategy that does not leave that whole."""
    if task.scores_in_model and not contract.scores:
        yield Refusal(
            "task.loss_chunk" if "loss_chunk" in recipe.task.options else "task.use",
            f'task.use = "{recipe.task.use}" computes its loss within the model\'s forward pass, and strategy.use = '
            f'"{recipe.strategy.use}" as it is set here cuts that up',
            ("leave task.loss_chunk out", 'or set strategy.use = "ddp", "fsdp" (without `tensor`) or "deepspeed"'),
        )


def _one_pass(train: TrainSection) -> str:
    """Spells the settings that make a step one forward pass of each rank."""
    if train.elastic_shards:
        return f"elastic_shards = ranks, and micro_batch = {train.global_batch} / ranks"
    return f"micro_batch = {train.global_batch} / ranks"
