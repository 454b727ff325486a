"""Changes of a script's run whose result is known, and how they are made in a process that runs the script."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from ddpforge.api import perturb

__all__ = [
    "BEGINS",
    "Counts",
    "ScriptChange",
    "change_process",
    "change_torch",
    "has_mask",
    "keeps_updates",
    "padded",
    *("imported", "reseed", "trainer_of"),
]

BEGINS: list[Callable[[], None]] = []
"""Functions to call when training begins: passes before it, e.g. of checks, belong to no step."""
_PADDED = 3  # columns of padding
_LABELS = -100  # is left out of the loss by torch and by transformers


@dataclass(frozen=True)
class ScriptChange:
    """Change of a script's run whose result is known.

    Attributes:
        order: Reverse the samples of each batch.
        doubled: Give each sample of a batch twice.
        padding: Pad the tokens of a batch further on the right, outside of its attention mask.
        workers: Number of loader processes.
        split: Divide batches by this number, and accumulate over this number of times more of them.
        divide: Divide the batch of a process by this number, because this number of processes train.
        perturbed: Seed of a change of each trained weight by one unit in the last place; 0 is none.
        dtype: The dtype whose last place that is; without it that of the weights.
        scale: Multiply losses by this number; SGD's learning rate is divided by it.
        clip: Replaces the norm to clip to; 0 clips nothing.
        frozen: Add a module to the model that is not trained.
        evaluation: Evaluate before each step, by the trainer's own arguments.
        checkpointing: Switch activation checkpointing, by the trainer's own arguments.
        compile: Compile the model.
        reseed: Set all seeds anew before the first forward pass.
        save: Folder for a checkpoint of the trainer after `save_at` steps.
        resume: Folder of a checkpoint with which the trainer begins.
        batches: Batch sizes of the unchanged run, in the order in which they were set: a script may divide by itself.
    """

    order: bool = False
    doubled: bool = False
    padding: bool = False
    workers: int | None = None
    split: int = 1
    divide: int = 1
    perturbed: int = 0
    dtype: str = ""
    scale: float = 1.0
    clip: float | None = None
    frozen: bool = False
    evaluation: bool = False
    checkpointing: bool = False
    compile: bool = False
    reseed: bool = False
    save: str = ""
    save_at: int = 1
    resume: str = ""
    batches: Sequence[int] = ()

    def part_of(self, size: int, place: int) -> int:
        """Returns the size for the `place`-th batch that the script sets to `size`; ends the process if it has none."""
        parts = self.split * self.divide
        if place < len(self.batches) and size * self.divide == self.batches[place] != size:
            parts = self.split  # the script has divided by the number of ranks
        if size % parts:
            raise SystemExit(f"prove: a batch of {size} cannot be divided by {parts}")
        return size // parts


@dataclass
class Counts:
    """Counts of events that show if a change had an effect."""

    loaders: int = 0  # DataLoaders that the script built
    clipped: int = 0  # calls of clip_grad_norm_
    padded: int = 0  # batches with more padding
    evaluated: int = 0  # forward passes without gradients
    checkpointed: int = 0  # calls of torch.utils.checkpoint
    compiled: int = 0  # modules
    frozen: int = 0  # modules that were added
    reseeded: int = 0


def imported(script: str) -> frozenset[str]:
    """Returns the names of the packages that the text of a script imports."""
    lines = re.findall(r"^\s*(?:from|import) +([\w., ]+)", script, re.MULTILINE)
    return frozenset(name.strip().split(".")[0].split(" ")[0] for line in lines for name in line.split(","))


def trainer_of(script: str) -> str:
    """Returns the trainer that a script uses: "transformers", "lightning", "accelerate", or "" for a loop."""
    packages = imported(script)
    if "trl" in packages or ("transformers" in packages and re.search(r"\b\w*Trainer\b", script)):
        return "transformers"
    if packages & {"lightning", "pytorch_lightning"}:
        return "lightning"
    return "accelerate" if "accelerate" in packages else ""


# ---------------------------------------------------------------------------------------------- all scripts
def change_torch(counts: Counts) -> None:
    """Changes functions of torch that libraries keep when they are imported.

    Replaces dropout and the batch statistics of BatchNorm: both depend on the composition of a forward pass.
    """
    _count_checkpoints(counts)
    function = torch.nn.functional
    attention, normalize = function.scaled_dot_product_attention, function.batch_norm

    def kept(inputs: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return inputs

    def attended(*args: Any, **kwargs: Any) -> Tensor:
        args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        return attention(*args, **(kwargs | ({"dropout_p": 0.0} if "dropout_p" in kwargs else {})))

    def normalized(
        inputs: Tensor, mean: Any, variance: Any, weight: Any = None, bias: Any = None, *rest: Any, **more: Any
    ) -> Any:
        training = rest[0] if rest else more.pop("training", False)
        return normalize(inputs, mean, variance, weight, bias, bool(training and mean is None), *rest[1:], **more)

    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
        setattr(function, name, kept)
    function.scaled_dot_product_attention = attended
    function.batch_norm = normalized  # type: ignore[assignment]


def _count_checkpoints(counts: Counts) -> None:
    import torch.utils.checkpoint as module

    checkpoint = module.checkpoint

    def watched(*args: Any, **kwargs: Any) -> Any:
        counts.checkpointed += 1
        return checkpoint(*args, **kwargs)

    module.checkpoint = watched


def change_process(
    change: ScriptChange, script: str, batches: list[int], counts: Counts, before: Callable[[], None]
) -> None:
    """Changes functions of torch and of trainers in this process.

    Args:
        script: the text of the script.
        batches: receives the batch sizes that the script sets.
        before: is called before gradients are clipped.
    """
    trainer = trainer_of(script)
    if trainer == "transformers":
        _change_transformers(change, batches)
    elif trainer == "lightning":
        _change_lightning(change)
    elif trainer == "accelerate" and change.split > 1:
        accelerator = __import__("accelerate").Accelerator
        _more(accelerator, "gradient_accumulation_steps", lambda value: (value or 1) * change.split)
    _change_loaders(change, batches, counts, uses_arguments=trainer == "transformers")
    _change_clipping(change, counts, before)
    if change.frozen:
        _add_frozen(counts)
    if change.perturbed:
        _perturb_optimized(change)
    if change.scale != 1:
        _scale_losses(change.scale)


def _change_loaders(change: ScriptChange, batches: list[int], counts: Counts, *, uses_arguments: bool) -> None:
    """Changes the loaders of training; with `uses_arguments`, the trainer's arguments set their batch."""
    build = DataLoader.__init__
    divided: dict[int, tuple[Any, int]] = {}  # by the dataset: trainers build a loader again from one that is changed

    @wraps(build)  # trainers read the signature to build the loader again, with their own sampler
    def watched(loader: DataLoader[Any], dataset: Any, batch_size: Any = 1, *args: Any, **kwargs: Any) -> None:
        counts.loaders += 1
        sets = isinstance(batch_size, int) and not uses_arguments and kwargs.get("batch_sampler") is None
        if sets and divided.get(id(dataset), (None, 0))[1] != batch_size:
            batches.append(batch_size)
            batch_size = change.part_of(batch_size, len(batches) - 1)
            divided[id(dataset)] = dataset, batch_size
        if change.workers is not None:
            args = args[:3]  # up to batch_sampler; the next one is num_workers
            kwargs |= {"num_workers": change.workers, "persistent_workers": False, "prefetch_factor": None}
            kwargs.pop("multiprocessing_context", None)
        build(loader, dataset, batch_size, *args, **kwargs)
        if change.order or change.doubled or change.padding:
            _wrap_collate(loader, change, counts)

    DataLoader.__init__ = watched  # type: ignore[method-assign,assignment]


def _wrap_collate(loader: DataLoader[Any], change: ScriptChange, counts: Counts) -> None:
    collate = loader.collate_fn
    # Samples without batches are not collated.
    if (loader.batch_size is None and loader.batch_sampler is None) or hasattr(collate, "changed_by_prove"):
        return

    def changed(samples: Any) -> Any:
        samples = list(samples)
        if change.order:
            samples.reverse()
        batch = collate(samples + samples if change.doubled else samples)
        counts.padded += change.padding and has_mask(batch)
        return padded(batch) if change.padding else batch

    changed.changed_by_prove = True  # type: ignore[attr-defined]
    loader.collate_fn = changed


def has_mask(batch: Any) -> bool:
    """True if the batch has an attention mask of two dimensions."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return isinstance(mask, Tensor) and mask.dim() == 2


def padded(batch: Any) -> Any:
    """Returns the batch with more padding, if it has an attention mask."""
    if has_mask(batch):
        shape = batch["attention_mask"].shape
        for name, one in list(batch.items()):
            if isinstance(one, Tensor) and one.shape == shape:
                batch[name] = nn.functional.pad(one, (0, _PADDED), value=_LABELS if "labels" in name else 0)
    return batch


def _change_clipping(change: ScriptChange, counts: Counts, before: Callable[[], None]) -> None:
    clip = nn.utils.clip_grad_norm_

    def watched(parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> Any:
        counts.clipped += 1
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        before()
        if change.clip == 0:
            return nn.utils.get_total_norm([one.grad for one in parameters if one.grad is not None])
        return clip(parameters, (change.clip or max_norm) * change.scale, *args, **kwargs)

    nn.utils.clip_grad_norm_ = watched


def _add_frozen(counts: Counts) -> None:
    """Adds a frozen module to the largest module that has the parameters of an optimizer, before it is built."""
    import gc

    build = Optimizer.__init__

    def watched(optimizer: Optimizer, params: Any, *args: Any, **kwargs: Any) -> None:
        params = list(params)
        first = next(
            (one for group in params for one in (group["params"] if isinstance(group, dict) else [group])), None
        )
        first = first[1] if isinstance(first, tuple) else first
        modules = [one for one in gc.get_objects() if isinstance(one, nn.Module)]
        roots = [one for one in modules if any(first is each for each in one.parameters())]
        # Containers call all that they hold.
        others = (nn.parallel.DistributedDataParallel, nn.DataParallel, nn.Sequential, nn.ModuleList, nn.ModuleDict)
        roots = [one for one in roots if not isinstance(one, others) and not hasattr(one, "_orig_mod")]
        if roots and not counts.frozen:
            largest = max(roots, key=lambda one: len(list(one.modules())))
            with torch.random.fork_rng():
                largest.frozen_by_prove = nn.Linear(2, 2).requires_grad_(False)
            counts.frozen += 1
        build(optimizer, params, *args, **kwargs)

    Optimizer.__init__ = watched  # type: ignore[method-assign,assignment]


def _perturb_optimized(change: ScriptChange) -> None:
    """Changes the parameters of each optimizer when it is built."""
    build, low = Optimizer.__init__, getattr(torch, change.dtype) if change.dtype else None
    known: dict[int, Tensor] = {}

    def watched(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        build(optimizer, *args, **kwargs)
        params = [one for group in optimizer.param_groups for one in group["params"]]
        new = {str(len(known) + place): one for place, one in enumerate(params) if id(one) not in known}
        perturb({name: one for name, one in new.items() if one.requires_grad}, low, seed=change.perturbed)
        known.update((id(one), one) for one in new.values())

    Optimizer.__init__ = watched  # type: ignore[method-assign,assignment]


def _scale_losses(scale: float) -> None:
    """Multiplies losses; around each step, changes the options of optimizers so that the update is the same."""
    backward = torch.autograd.backward

    def scaled(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        found = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        return backward([one * scale if one.numel() == 1 else one for one in found], *args, **kwargs)

    def options(factor: float) -> Callable[..., None]:
        def change(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            for group in optimizer.param_groups if keeps_updates(optimizer) else ():
                if isinstance(optimizer, torch.optim.SGD):
                    group["lr"], group["weight_decay"] = group["lr"] / factor, group["weight_decay"] * factor
                else:
                    group["eps"] = group["eps"] * factor

        return change

    torch.autograd.backward = scaled
    register_optimizer_step_pre_hook(options(scale))
    register_optimizer_step_post_hook(options(1 / scale))


def keeps_updates(optimizer: Optimizer) -> bool:
    """True for optimizers whose updates are the same if a multiple of the gradient meets a multiple of an option."""
    adam = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)
    # Adam without decoupled decay adds the weights to the gradients.
    decays = not isinstance(optimizer, torch.optim.AdamW) and any(
        one.get("weight_decay") for one in optimizer.param_groups
    )
    return isinstance(optimizer, torch.optim.SGD) or (isinstance(optimizer, adam) and not decays)


def reseed() -> None:
    """Sets the global seeds of Python, numpy and torch anew."""
    random.seed(987)
    torch.manual_seed(987)
    with suppress(ImportError):
        __import__("numpy").random.seed(987)


# ---------------------------------------------------------------------------------------------- trainers
def _change_transformers(change: ScriptChange, batches: list[int]) -> None:
    """Changes the arguments of the Trainer, which splits batches, evaluates and saves by itself."""
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_utils import IntervalStrategy, SaveStrategy

    def of_arguments(arguments: Any) -> None:
        batches.append(arguments.per_device_train_batch_size)
        size = change.part_of(arguments.per_device_train_batch_size, len(batches) - 1)
        arguments.per_device_train_batch_size = size
        arguments.gradient_accumulation_steps *= change.split

    def of_trainer(trainer: Any, args: Any, kwargs: Any) -> None:
        arguments = kwargs.get("args") or (args[1] if len(args) > 1 else None)
        if arguments is None:
            return
        if change.evaluation and (kwargs.get("eval_dataset") or (args[4] if len(args) > 4 else None)) is not None:
            arguments.eval_strategy, arguments.eval_steps = IntervalStrategy.STEPS, 1
        if change.checkpointing:
            arguments.gradient_checkpointing = not arguments.gradient_checkpointing
            arguments.gradient_checkpointing_kwargs = {"use_reentrant": False}
        if change.save:
            arguments.output_dir = change.save
            arguments.save_strategy, arguments.save_steps = SaveStrategy.STEPS, change.save_at

    def without_checkpointing(trainer: Any, args: Any, kwargs: Any) -> None:
        if not trainer.args.gradient_checkpointing:  # TRL turns it on before
            trainer.model.gradient_checkpointing_disable()

    if change.checkpointing:
        _before(Trainer, "train", without_checkpointing)
    _before(TrainingArguments, "__post_init__", lambda arguments, args, kwargs: of_arguments(arguments))
    _before(Trainer, "__init__", of_trainer)
    if change.resume:
        found = next(iter(sorted(Path(change.resume).glob("checkpoint-*"))), None)

        def resumed(trainer: Any, args: Any, kwargs: Any) -> None:
            kwargs["resume_from_checkpoint"] = str(found)

        _before(Trainer, "train", resumed)


def _change_lightning(change: ScriptChange) -> None:
    for module in ("lightning.pytorch", "pytorch_lightning"):
        with suppress(ImportError):
            _change_lightning_of(module, change)


def _change_lightning_of(module: str, change: ScriptChange) -> None:
    trainer = __import__(module, fromlist=["Trainer"]).Trainer
    if change.split > 1:
        _more(trainer, "accumulate_grad_batches", lambda value: (value or 1) * change.split)
    if change.evaluation:
        _more(trainer, "val_check_interval", lambda value: 1)
    if change.divide > 1 and not torch.cuda.is_available():
        ranks = int(os.environ["LOCAL_WORLD_SIZE"])  # on a CPU, "auto" is one device, and refuses torchrun
        _more(trainer, "devices", lambda value: ranks if value in (None, "auto") else value)
        _more(trainer, "accelerator", lambda value: "cpu" if value in (None, "auto") else value)
    if change.save:
        saver = __import__(f"{module}.callbacks", fromlist=["ModelCheckpoint"]).ModelCheckpoint
        saves = saver(dirpath=change.save, every_n_train_steps=change.save_at, save_top_k=-1)
        _more(trainer, "enable_checkpointing", lambda value: True)
        _more(trainer, "callbacks", lambda value: [*(value or []), saves])
    if change.resume:
        saved = next(iter(sorted(Path(change.resume).glob("*.ckpt"))), None)
        _before(trainer, "fit", lambda one, args, kwargs: kwargs.update(ckpt_path=str(saved)))


def _before(kind: type, method: str, action: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> None:
    original = getattr(kind, method)

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        action(self, args, kwargs)
        return original(self, *args, **kwargs)

    setattr(kind, method, changed)


def _more(kind: type, argument: str, change: Callable[[Any], Any]) -> None:
    def changed(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kwargs[argument] = change(kwargs.get(argument))

    _before(kind, "__init__", changed)
