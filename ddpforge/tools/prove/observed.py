"""Program that runs a training script unmodified in this process, under one change, and writes its first gradients.

    python -m ddpforge.tools.prove.observed FOLDER STEPS CHANGE SCRIPT [ARGUMENT...]

CHANGE is JSON, see `ScriptChange`. The program replaces functions of torch in this process, which trains nothing else,
and ends it after STEPS optimizer steps. Dropout is off, and BatchNorm uses its running statistics: both depend on the
composition of a forward pass by design. Each rank writes `steps-RANK.json`: losses, and fingerprints of the samples;
rank 0 also writes `gradients-STEP.safetensors` for each step.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from ddpforge.tools.script_comparison.recorder import run_script, unwrapped, watch_calls, watch_losses

__all__ = ["Observer", "ScriptChange", "main"]

_MOST = 1 << 16  # elements of a parameter's gradient that are kept, evenly spaced


@dataclass(frozen=True)
class ScriptChange:
    """ScriptChange of a script's run whose result is known.

    Attributes:
        order: Reverse the samples of each batch.
        doubled: Give each sample of a batch twice.
        workers: Number of loader processes.
        split: Divide batches by this number, and accumulate over this number of times more of them.
        divide: Divide the batch of a process by this number, because this number of processes train.
        rounding: ScriptChange each weight by one unit in the last place before the first step.
        batches: Batch sizes of the unchanged run, in the order in which they were set: a script may divide by itself.
    """

    order: bool = False
    doubled: bool = False
    workers: int | None = None
    split: int = 1
    divide: int = 1
    rounding: bool = False
    batches: Sequence[int] = ()

    def part_of(self, size: int, place: int) -> int:
        """Returns the size for the `place`-th batch that the script sets to `size`; ends the process if it has none."""
        parts = self.split * self.divide
        if place < len(self.batches) and size * self.divide == self.batches[place] != size:
            parts = self.split  # the script has divided by the number of ranks
        if size % parts:
            raise SystemExit(f"prove: a batch of {size} cannot be divided by {parts}")
        return size // parts


class Observer:
    """Observer of a script in this process."""

    def __init__(self, folder: Path, most: int, change: ScriptChange) -> None:
        self._folder, self._most, self._change = folder, most, change
        self._modules: dict[int, nn.Module] = {}  # called with gradients, and not from within another module
        self._losses: list[float] = []
        self._rows: list[dict[str, Any]] = []
        self._first: Optimizer | None = None
        self._rank = int(os.environ.get("RANK", "0"))
        self._samples: list[str] = []  # of the step
        self._batches: list[int] = []
        self._loaders = 0

    def install(self, script: str) -> None:
        """Begins to observe and to change this process; `script` is the text of the script."""
        watch_calls(self._record_inputs)
        watch_losses(lambda loss: self._losses.append(loss))
        self._watch_loaders(uses_arguments=self._change_trainers(script))
        _without_dropout()
        # After the step, because a closure of the step may compute the gradients.
        register_optimizer_step_post_hook(self._after_step)

    def finish(self) -> None:
        """Writes the losses of all steps."""
        found = {"steps": self._rows, "batches": self._batches, "loaders": self._loaders}
        (self._folder / f"steps-{self._rank}.json").write_text(json.dumps(found))

    def _end(self) -> None:
        """Ends the process: an exception would end in the script's own `except`."""
        self.finish()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _record_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not any(one.requires_grad for one in module.parameters()):
            return
        if id(module) not in self._modules:
            self._modules[id(module)] = module
            if self._change.rounding:
                _perturb(module)
        self._samples += _fingerprints(args, kwargs)

    def _watch_loaders(self, *, uses_arguments: bool) -> None:
        """Changes the loaders of training; with `uses_arguments`, the trainer's arguments set their batch."""
        build, change = DataLoader.__init__, self._change

        def watched(loader: DataLoader[Any], dataset: Any, batch_size: Any = 1, *args: Any, **kwargs: Any) -> None:
            self._loaders += 1
            if isinstance(batch_size, int) and not uses_arguments and kwargs.get("batch_sampler") is None:
                self._batches.append(batch_size)
                batch_size = change.part_of(batch_size, len(self._batches) - 1)
            if change.workers is not None:
                args = args[:3]  # up to batch_sampler; the next one is num_workers
                kwargs |= {"num_workers": change.workers, "persistent_workers": False, "prefetch_factor": None}
                kwargs.pop("multiprocessing_context", None)
            build(loader, dataset, batch_size, *args, **kwargs)
            if change.order or change.doubled:
                _wrap_collate(loader, change)

        DataLoader.__init__ = watched  # type: ignore[method-assign,assignment]

    def _change_trainers(self, script: str) -> bool:
        """Changes arguments of trainers that accumulate by themselves; returns True if these set the batch."""
        if "transformers" in script or "trl" in script:
            with suppress(ImportError):
                from transformers import TrainingArguments

                _before(TrainingArguments, "__post_init__", self._split_arguments)
                return True
        if self._change.split > 1 and "lightning" in script:
            for module in ("lightning.pytorch", "pytorch_lightning"):
                with suppress(ImportError):
                    trainer = __import__(module, fromlist=["Trainer"]).Trainer
                    _more_accumulation(trainer, "accumulate_grad_batches", self._change.split)
        elif self._change.split > 1 and "Accelerator" in script:
            accelerator = __import__("accelerate").Accelerator
            _more_accumulation(accelerator, "gradient_accumulation_steps", self._change.split)
        return False

    def _split_arguments(self, arguments: Any) -> None:
        self._batches.append(arguments.per_device_train_batch_size)
        size = self._change.part_of(arguments.per_device_train_batch_size, len(self._batches) - 1)
        arguments.per_device_train_batch_size = size
        arguments.gradient_accumulation_steps *= self._change.split

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._first = self._first or optimizer
        if optimizer is not self._first:
            return
        if not self._rank:
            self._write_gradients(optimizer)
        self._rows.append({"losses": self._losses, "samples": self._samples})
        self._losses, self._samples = [], []
        if len(self._rows) == self._most:
            self._end()

    def _write_gradients(self, optimizer: Optimizer) -> None:
        names = dict(self._names())
        gradients = {}
        for number, group in enumerate(optimizer.param_groups):
            for place, one in enumerate(group["params"]):
                if one.grad is not None:
                    gradients[names.get(id(one), f"group {number}, parameter {place}")] = _sample(one.grad)
        save_file(gradients, self._folder / f"gradients-{len(self._rows) + 1}.safetensors")

    def _names(self) -> Iterator[tuple[int, str]]:
        for module in self._modules.values():
            for name, one in unwrapped(module).named_parameters():
                yield id(one), name


def _fingerprints(args: Any, kwargs: Any) -> list[str]:
    """Returns one text for each row of the first tensor: of tokens, without what fills both ends."""
    first = next((one for one in _tensors((args, kwargs)) if one.dim()), None)
    if first is None:
        return []
    rows = []
    for row in first.detach().cpu():
        if row.dim() == 1 and not row.is_floating_point() and len(row) > 1:
            kept = (row != row[-1]).nonzero()
            row = row[: int(kept[-1]) + 1] if len(kept) else row[:1]
            kept = (row != row[0]).nonzero()
            row = row[int(kept[0]) :] if len(kept) else row[:1]
        rows.append(hashlib.blake2b(row.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16])
    return rows


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(one)


def _sample(gradient: Tensor) -> Tensor:
    flat = gradient.detach().cpu().float().reshape(-1)
    return flat[:: max(1, flat.numel() // _MOST)].contiguous().clone()


def _perturb(module: nn.Module) -> None:
    """Changes each weight by one unit in the last place of the dtype in which the module computes."""
    generator = torch.Generator().manual_seed(0)
    device = next((one.device.type for one in module.parameters()), "cpu")
    low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    with torch.no_grad():
        for one in module.parameters():
            if one.requires_grad and one.is_floating_point():
                signs = torch.randint(0, 2, one.shape, generator=generator).mul(2).sub(1).to(one)
                one.add_(one * signs * torch.finfo(low or one.dtype).eps)


def _wrap_collate(loader: DataLoader[Any], change: ScriptChange) -> None:
    collate = loader.collate_fn
    # Samples without batches are not collated; a trainer may build a loader again, from one that is changed already.
    if (loader.batch_size is None and loader.batch_sampler is None) or hasattr(collate, "changed_by_prove"):
        return

    def changed(samples: Any) -> Any:
        samples = list(samples)
        if change.order:
            samples.reverse()
        return collate(samples + samples if change.doubled else samples)

    changed.changed_by_prove = True  # type: ignore[attr-defined]
    loader.collate_fn = changed


def _without_dropout() -> None:
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


def _before(kind: type, method: str, action: Callable[[Any], None]) -> None:
    original = getattr(kind, method)

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        action(self)
        return original(self, *args, **kwargs)

    setattr(kind, method, changed)


def _more_accumulation(kind: type, argument: str, times: int) -> None:
    original = kind.__init__  # type: ignore[misc]

    def changed(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs[argument] = (kwargs.get(argument) or 1) * times
        original(self, *args, **kwargs)

    kind.__init__ = changed  # type: ignore[misc]


def main(folder: str, steps: str, change: str, script: str, *arguments: str) -> None:
    """Runs a script under a change, and observes it until it ends, or has made `steps` steps."""
    observer = Observer(Path(folder), int(steps), ScriptChange(**json.loads(change)))
    observer.install(Path(script).read_text(encoding="utf-8"))
    run_script(script, *arguments)
    observer.finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
