"""Program that runs training scripts unmodified, each in a forked process and under one change, and observes them.

    python -m ddpforge.tools.prove.observed SCRIPT

It reads a line of JSON for each run from its input, see `Order`, and writes a line with the run's number and exit code
when it has ended. Large libraries are imported once. The forked process replaces functions of torch, trains nothing
else, and ends after some optimizer steps. Each rank writes `steps-RANK.json`; rank 0 also writes
`gradients-STEP.safetensors` for each step.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import select
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddpforge.api import resolution_of
from ddpforge.tools.prove.changes import (
    BEGINS,
    Counts,
    ScriptChange,
    change_process,
    change_torch,
    imported,
    keeps_updates,
    reseed,
    trainer_of,
)
from ddpforge.tools.script_comparison.record import norms_of_changes
from ddpforge.tools.script_comparison.recorder import run_script, unwrapped, watch_calls, watch_losses

__all__ = ["Observer", "Order", "main"]

_MOST = 1 << 16  # elements of a parameter's gradient that are kept, evenly spaced


@dataclass(frozen=True)
class Order:
    """Run of a script: `steps` optimizer steps under a change, on several ranks with torchrun's variables."""

    number: int
    folder: str
    steps: int
    change: Mapping[str, Any]
    arguments: Sequence[str]
    ranks: int = 1
    port: int = 0  # 0: no variables of torchrun
    variables: Mapping[str, str] = field(default_factory=dict)


class Observer:
    """Observer of a script in this process."""

    def __init__(self, folder: Path, most: int, change: ScriptChange, counts: Counts) -> None:
        self._folder, self._most, self._change = folder, most, change
        self._modules: dict[int, nn.Module] = {}  # called with gradients, and not from within another module
        self._rows: list[dict[str, Any]] = []
        self._first: Optimizer | None = None
        self._rank = int(os.environ.get("RANK", "0"))
        self._batches: list[int] = []
        self.counts = counts
        self._low = ""
        self._norm = 0.0
        self._before: dict[int, Tensor] = {}
        self._begin()

    def _begin(self) -> None:
        """Begins to collect a step."""
        self._losses: list[float] = []
        self._samples: list[str] = []
        self._modes: list[str] = []
        self._unclipped: dict[int, Tensor] = {}  # gradients before they were clipped, by the parameter's id

    def install(self, script: str) -> None:
        """Begins to observe and to change this process; `script` is the text of the script."""
        BEGINS.append(self._begin)
        watch_calls(self._record_inputs, self._record_evaluation)
        register_module_forward_pre_hook(self._record_autocast)
        watch_losses(lambda loss: self._losses.append(loss))
        change_process(self._change, script, self._batches, self.counts, self._before_clipping)
        register_optimizer_step_pre_hook(self._before_step)
        # After the step, because a closure of the step may compute the gradients.
        register_optimizer_step_post_hook(self._after_step)

    def finish(self) -> None:
        """Writes the numbers of all steps."""
        found = {"steps": self._rows, "batches": self._batches, "counts": asdict(self.counts), "dtype": self._low}
        (self._folder / f"steps-{self._rank}.json").write_text(json.dumps(found))

    def _end(self) -> None:
        """Ends the process: an exception would end in the script's own `except`."""
        self.finish()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    # ------------------------------------------------------------------------------------------ forward passes
    def _record_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not any(one.requires_grad for one in module.parameters()):
            return
        if id(module) not in self._modules:
            self._prepare(module)
            self._modules[id(module)] = module
        self._samples += _fingerprints(args, kwargs)
        self._modes += [name or "the model" for name, one in module.named_modules() if not one.training][:1]

    def _record_evaluation(self) -> None:
        self.counts.evaluated += 1

    def _prepare(self, module: nn.Module) -> None:
        """Changes a module before its first forward pass."""
        if self._change.reseed and not self._modules:
            reseed()
            self.counts.reseeded += 1
        if self._change.compile:
            unwrapped(module).compile(backend="aot_eager", dynamic=False)  # traced; its kernels are torch's own
            self.counts.compiled += 1

    def _record_autocast(self, module: nn.Module, inputs: Any) -> None:
        """Records the dtype in which the model computes, if that is not the dtype of its weights."""
        for device in {one.device.type for one in module.parameters(recurse=False)} if not self._low else ():
            if torch.is_autocast_enabled(device):
                self._low = str(torch.get_autocast_dtype(device)).removeprefix("torch.")

    # ------------------------------------------------------------------------------------------ steps
    def _before_clipping(self) -> None:
        """Keeps the gradients: after clipping, all have the same norm, whatever they were multiplied by."""
        scale, with_gradient = self._change.scale, [one for _, one in self._named() if one.grad is not None]
        self._unclipped = {id(one): _sample(one.grad / scale) for one in with_gradient if one.grad is not None}
        self._norm = _norm(one.grad for one in with_gradient) / scale

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._first = self._first or optimizer
        if optimizer is self._first:
            # By id: the names are known after the first forward pass, which the closure of a step may make.
            trained = (one for group in optimizer.param_groups for one in group["params"] if one.requires_grad)
            self._before = {id(one): one.detach().clone() for one in trained}

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer is not self._first:
            return
        trained = self._trained(optimizer)
        before = {name: self._before[id(one)] for name, one in trained.items() if id(one) in self._before}
        updates, scale = norms_of_changes(before, trained), self._change.scale
        row = {
            "losses": [one / scale for one in self._losses],
            "samples": self._samples,
            "norm": self._norm if self._unclipped else _norm(one.grad for one in trained.values()) / scale,
            "updates": updates if scale == 1 or keeps_updates(optimizer) else {},
            "resolution": resolution_of(before, updates),
            "modes": self._modes,
        }
        self._rows.append(row)
        if not self._rank:
            found = {
                name: self._unclipped[id(one)] if id(one) in self._unclipped else _sample(one.grad / scale)
                for name, one in trained.items()
                if one.grad is not None
            }
            save_file(found, self._folder / f"gradients-{len(self._rows)}.safetensors")
        self._begin()
        if len(self._rows) == self._most or (scale != 1 and not keeps_updates(optimizer)):
            self._end()

    def _trained(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Returns the parameters of an optimizer by their names in the model."""
        names = {id(one): name for name, one in self._named()}
        return {
            names.get(id(one), f"group {number}, parameter {place}"): one
            for number, group in enumerate(optimizer.param_groups)
            for place, one in enumerate(group["params"])
            if one.requires_grad
        }

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        for module in self._modules.values():
            yield from unwrapped(module).named_parameters()


def _norm(gradients: Iterator[Tensor | None]) -> float:
    return math.hypot(*(float(one.double().norm()) for one in gradients if one is not None))


def _fingerprints(args: Any, kwargs: Any) -> list[str]:
    """Returns one text for each row of the first tensor: of tokens, without padding."""
    first = next((one for one in _tensors((args, kwargs)) if one.dim()), None)
    if first is None:
        return []
    mask = kwargs.get("attention_mask")
    masked = isinstance(mask, Tensor) and mask.shape == first.shape
    rows = []
    for number, row in enumerate(first.detach().cpu()):
        if masked:
            row = row[mask[number].detach().cpu().bool()]
        elif row.dim() == 1 and not row.is_floating_point() and len(row) > 1:
            row = _without_ends(row)
        data = row.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        rows.append(hashlib.blake2b(data).hexdigest()[:16])
    return rows


def _without_ends(row: Tensor) -> Tensor:
    """Returns tokens without padding at both ends."""
    kept = (row != row[-1]).nonzero()
    row = row[: int(kept[-1]) + 1] if len(kept) else row[:1]
    kept = (row != row[0]).nonzero()
    return row[int(kept[0]) :] if len(kept) else row[:1]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(one)


def _sample(gradient: Tensor) -> Tensor:
    flat = gradient.detach().cpu().float().reshape(-1)
    return flat[:: max(1, flat.numel() // _MOST)].contiguous().clone()


# ---------------------------------------------------------------------------------------------- forked runs
def _import_libraries(script: str) -> None:
    """Imports libraries of the script that take seconds, once for all its runs.

    An import that fails here fails in the script too, which reports it.
    """
    packages = imported(script)
    names = ("transformers", "trl", "lightning", "lightning.pytorch", "accelerate", "datasets")
    slow = ["torch._dynamo", *(name for name in names if name.partition(".")[0] in packages)]
    if "ddpforge" in packages:
        parts = ("app.run", "tools.trials.ephemeral_run", "tools.parity.probe", "strategies.ddp_replica")
        slow += [f"ddpforge.{part}" for part in parts]
    if trainer_of(script) == "transformers":
        # The Trainer imports the others, if they are installed. DeepSpeed may not touch a GPU in a process that forks.
        slow += ["transformers.trainer", "mlflow", *(["deepspeed"] if "ACCELERATE_USE_CPU" in os.environ else [])]
    for name in slow:
        with suppress(Exception):
            __import__(name)
    if "trl" in packages:
        with suppress(Exception):
            trl = __import__("trl")
            _ = [getattr(trl, name) for name in trl.__all__ if name in script]  # trl imports names on first use


def _observe(order: Order, script: str, rank: int, counts: Counts) -> None:
    """Runs the script in this forked process."""
    folder = Path(order.folder)
    output = os.open(folder / f"output-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(order.variables)
    if order.port:
        place = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "ROLE_RANK": rank}
        world = {"WORLD_SIZE": order.ranks, "LOCAL_WORLD_SIZE": order.ranks, "MASTER_PORT": order.port}
        os.environ.update({name: str(value) for name, value in {**place, **world}.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_RUN_ID="prove")
    observer = Observer(folder, order.steps, ScriptChange(**order.change), counts)
    observer.install(Path(script).read_text(encoding="utf-8"))
    run_script(script, *order.arguments)
    observer.finish()


def _forked(order: Order, script: str, rank: int, counts: Counts) -> int:
    """Returns the process id of a forked run."""
    sys.stdout.flush()
    sys.stderr.flush()
    if process := os.fork():
        return process
    code = 1
    try:
        _observe(order, script, rank, counts)
        code = 0
    except SystemExit as error:
        if error.code and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def main(script: str) -> None:
    """Serves runs of a script, until its input ends and all runs have ended."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print when they are imported
    counts = Counts()  # of each forked process by itself
    change_torch(counts)
    _import_libraries(Path(script).read_text(encoding="utf-8"))
    running: dict[int, int] = {}  # the number of a run by its processes
    codes: dict[int, int] = {}
    begun, open_input, rest = dict[int, int](), True, b""
    while open_input or running:
        if open_input and select.select([0], [], [], 0.02 if running else None)[0]:
            data = os.read(0, 1 << 16)
            open_input = bool(data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                order = Order(**json.loads(line))
                begun[order.number] = order.ranks
                running |= {_forked(order, script, rank, counts): order.number for rank in range(order.ranks)}
        while running:
            process, status = os.waitpid(-1, os.WNOHANG if open_input else 0)
            if not process:
                break
            if (number := running.pop(process, None)) is None:
                continue
            code = os.waitstatus_to_exitcode(status)
            codes[number] = codes.get(number) or code
            if code:  # the other ranks would wait for it
                for other in [one for one, its in running.items() if its == number]:
                    os.kill(other, 9)
            if number not in running.values():
                answers.write(json.dumps([number, codes.pop(number)]) + "\n")
                answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
