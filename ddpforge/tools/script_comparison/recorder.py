"""Program that runs a training script unmodified in this process, and records its first optimizer steps.

    python -m ddpforge.tools.script_comparison.recorder FOLDER STEPS SCRIPT [ARGUMENT...]

It replaces four functions of torch in this process, which trains nothing else: `Module.__call__` (inputs and initial
weights), `torch.autograd.backward` (losses), `DataLoader.__init__` and the samplers' `__iter__` (indices). The steps
come from torch's hooks for all optimizers.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from ddpforge.tools.script_comparison.record import (
    INITIAL,
    INPUTS,
    ScriptRecord,
    ScriptStep,
    fingerprints,
    joined,
    norms_of_changes,
    rows_of,
)

__all__ = ["Recorder", "main", "run_script", "unwrapped", "watch_calls", "watch_losses"]


_backward_passes: list[bool] = []  # that run now


@dataclass
class _Candidate:
    """Module that the script called, not from within another module: perhaps the trained model."""

    module: nn.Module
    initial: dict[str, Tensor]
    source: int | None  # the dataset of the newest indices before the first call
    batches: list[list[list[str]]] = field(default_factory=list)  # since the last step
    rows: list[Any] | None = field(default_factory=list)  # of all inputs, if the script has no DataLoader


class Recorder:
    """Records a script; ends the process after `most` optimizer steps."""

    def __init__(self, folder: Path, most: int) -> None:
        self._folder, self._most = folder, most
        self._steps: list[ScriptStep] = []
        self._losses: list[float] = []
        self._candidates: dict[int, _Candidate] = {}
        self._draws: list[tuple[int, list[int]]] = []  # the dataset, and the samples of a batch
        self._newest: int | None = None
        self._used = 0
        self._optimizer: Optimizer | None = None
        self._model: _Candidate | None = None
        self._before: dict[str, Tensor] = {}
        self._datasets: dict[int, Any] = {}  # by the id of a sampler; keeps them alive, so that ids stay unique
        self._drawing: set[int] = set()
        self._watched: set[type] = set()

    def install(self) -> None:
        """Begins to record in this process."""
        watch_calls(self._record_inputs)
        watch_losses(lambda loss: self._losses.append(loss))
        self._watch_loaders()
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    def finish(self, problem: str = "") -> None:
        """Writes the record."""
        has_inputs = bool(self._model and self._model.source is None and self._model.rows)
        if self._model:
            save_file(self._model.initial, self._folder / INITIAL)
            if has_inputs:
                torch.save(self._model.rows, self._folder / INPUTS)
        source = self._model.source if self._model else None
        lengths = [len(dataset) for _, dataset in self._datasets.values() if id(dataset) == source]
        ScriptRecord(self._steps, problem, has_inputs, lengths[0] if lengths else None).write(self._folder)

    def _end(self, problem: str = "") -> None:
        """Writes the record and ends the process: an exception would end in the script's own `except`."""
        self.finish(problem)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    # ------------------------------------------------------------------------------------------ inputs and weights
    def _record_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._model and self._model.module is not module:
            return
        found = self._candidates.get(id(module))
        if found is None:
            if not any(one.requires_grad for one in module.parameters()):
                return
            state = unwrapped(module).state_dict()
            initial = {name: one.detach().cpu().clone() for name, one in state.items() if isinstance(one, Tensor)}
            found = self._candidates[id(module)] = _Candidate(module, initial, self._newest)
        found.batches.append(fingerprints((args, kwargs)))
        rows = rows_of(args, kwargs) if found.source is None and found.rows is not None else None
        found.rows = None if rows is None or found.rows is None else [*found.rows, *rows]

    # ------------------------------------------------------------------------------------------ indices
    def _watch_loaders(self) -> None:
        build = DataLoader.__init__

        @wraps(build)  # trainers read the signature to build the loader again, with their own sampler
        def watched(loader: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
            build(loader, *args, **kwargs)
            sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
            if isinstance(loader.dataset, torch.utils.data.IterableDataset):
                return
            self._datasets[id(sampler)] = sampler, loader.dataset
            with suppress(TypeError):  # a list has no attributes: such a script draws no indices here
                self._watch_sampler(type(sampler))

        DataLoader.__init__ = watched  # type: ignore[method-assign,assignment]

    def _watch_sampler(self, kind: type) -> None:
        if kind in self._watched:
            return
        iterate = kind.__iter__  # type: ignore[attr-defined]

        def watched(sampler: Any) -> Iterator[Any]:
            source = iter(iterate(sampler))
            while True:
                outer = id(sampler) not in self._drawing  # a subclass may call the method of its base class
                self._drawing.add(id(sampler))
                try:
                    drawn = next(source)
                except StopIteration:
                    return
                finally:
                    if outer:
                        self._drawing.discard(id(sampler))
                if outer and id(sampler) in self._datasets:
                    self._record_draw(id(self._datasets[id(sampler)][1]), drawn)
                yield drawn

        kind.__iter__ = watched  # type: ignore[attr-defined]
        self._watched.add(kind)

    def _record_draw(self, dataset: int, drawn: Any) -> None:
        indices = [int(one) for one in (drawn if isinstance(drawn, list | tuple) else [drawn])]
        self._draws.append((dataset, indices))
        self._newest = dataset

    # ------------------------------------------------------------------------------------------ steps
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._optimizer is None:
            self._optimizer = optimizer
            self._model = self._owner(optimizer)
        if optimizer is not self._optimizer:
            self._end(
                f"it steps two optimizers, {type(self._optimizer).__name__} and {type(optimizer).__name__}; only "
                "scripts with one can be compared"
            )
        self._before = {name: value.detach().clone() for name, value in self._trained().items()}

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        assert self._model is not None
        if not self._losses:
            self._end(f"it called no `backward()` on a loss before step {len(self._steps) + 1}")
        self._steps.append(
            ScriptStep(
                losses=self._losses,
                indices=self._indices(len(self._losses)),
                batch=joined(self._model.batches),
                lr=float(optimizer.param_groups[0]["lr"]),
                updates=norms_of_changes(self._before, self._trained()),
            )
        )
        self._losses, self._model.batches = [], []
        if len(self._steps) == self._most:
            self._end()

    def _indices(self, batches: int) -> list[int] | None:
        """Returns the samples of the next batches that the script drew from its training data."""
        assert self._model is not None
        if self._model.source is None:
            rows = self._model.rows or []
            begin, self._used = self._used, len(rows)
            return list(range(begin, self._used)) or None
        drawn = [indices for dataset, indices in self._draws if dataset == self._model.source]
        taken = drawn[self._used : self._used + batches]
        self._used += batches
        return [index for indices in taken for index in indices] if len(taken) == batches else None

    def _owner(self, optimizer: Optimizer) -> _Candidate:
        """Returns the module that has all parameters of the optimizer."""
        trained = {id(one) for group in optimizer.param_groups for one in group["params"]}
        for found in self._candidates.values():
            if trained <= {id(one) for one in found.module.parameters()}:
                return found
        names = ", ".join(sorted({type(found.module).__name__ for found in self._candidates.values()})) or "none"
        self._end(
            f"no module that it called holds all parameters of {type(optimizer).__name__} (called with gradients: "
            f"{names}); put the modules into one nn.Module, and call it"
        )
        raise AssertionError

    def _trained(self) -> dict[str, Tensor]:
        assert self._model is not None
        named = unwrapped(self._model.module).named_parameters()
        return {name: one for name, one in named if one.requires_grad}


def watch_calls(
    before: Callable[[nn.Module, Any, Any], None], before_evaluation: Callable[[], None] = lambda: None
) -> None:
    """Calls `before` with each module that is called with gradients, and not from within another, and its arguments.

    Calls without gradients call `before_evaluation`. Calls within a backward pass are left out: activation
    checkpointing computes again there.
    """
    call, depth = nn.Module.__call__, 0

    def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        if not depth and not _backward_passes:
            if torch.is_grad_enabled():
                before(module, args, kwargs)
            else:
                before_evaluation()
        depth += 1
        try:
            return call(module, *args, **kwargs)
        finally:
            depth -= 1

    nn.Module.__call__ = watched  # type: ignore[method-assign]


def watch_losses(receive: Callable[[float], None]) -> None:
    """Calls `receive` with each number on which a backward pass begins."""
    backward = torch.autograd.backward

    def watched(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        for one in [tensors] if isinstance(tensors, Tensor) else tensors:
            if one.numel() == 1:
                receive(one.item())
        _backward_passes.append(True)
        try:
            return backward(tensors, *args, **kwargs)
        finally:
            _backward_passes.pop()

    torch.autograd.backward = watched


def unwrapped(module: nn.Module) -> nn.Module:
    """Returns the model inside DistributedDataParallel, DataParallel and torch.compile."""
    while isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel) or hasattr(module, "_orig_mod"):
        module = module.module if hasattr(module, "module") else module._orig_mod  # type: ignore[assignment]
    return module


def run_script(script: str, *arguments: str) -> None:
    """Runs the script as `python SCRIPT ARGUMENT...` does; returns if it exits with code 0."""
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            raise


def main(folder: str, steps: str, script: str, *arguments: str) -> None:
    """Runs a script, and records it until it ends, or has made `steps` steps."""
    recorder = Recorder(Path(folder), int(steps))
    recorder.install()
    run_script(script, *arguments)
    recorder.finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
