"""Runs a script and a recipe from the same weights with the same samples, and finds the step at which they part."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, NoReturn

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ddpforge.api import (
    PERTURBED,
    UPDATES,
    VISIBLE,
    Dealt,
    Rounding,
    excesses,
    perturb,
    relative,
    resolution_of,
    restored_backend_flags,
)
from ddpforge.errors import StoppedBeforeStart, UsageError
from ddpforge.ranks import process_exit
from ddpforge.recipe import load_recipe
from ddpforge.recipe.toml import toml_value
from ddpforge.tools.script_comparison.record import (
    INITIAL,
    INPUTS,
    ScriptRecord,
    ScriptStep,
    fingerprints,
    joined,
    norms_of_changes,
)
from ddpforge.tools.trials.ephemeral_run import EphemeralRun, open_ephemeral

__all__ = ["ComparedStep", "ScriptComparison", "compare_script", "run_alone"]

log = logging.getLogger("ddpforge")

_SUM = 1e-3  # largest relative difference between the recipe's loss and the script's per sample, if that is a sum
_LR = 1e-6  # largest relative difference of learning rates that counts as rounding
_LEAST = 1e-12  # smaller numbers are compared relative to this
_UPDATE = 1e-3  # of the norm of an update, with a given tolerance: Adam enlarges the rounding of small gradients
_OUTPUT = 15  # lines of a failed script to print
_MOST_OUTPUT = 1 << 16  # bytes of its output that are read for them
# Variables of `torchrun --nproc-per-node 1`.
_ONE_RANK = {
    **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
    **{"MASTER_ADDR": "localhost", "MASTER_PORT": "0"},
}
_RECORDER = "ddpforge.tools.script_comparison.recorder"


@dataclass(frozen=True)
class ComparedStep:
    """Step of the script and of the recipe.

    Attributes:
        loss: Of the script and of the recipe.
        lr: Of the first parameter group of both.
        difference: Of the losses, relative to the script's.
        allowed: Largest difference of the losses that is rounding.
        parts: Reasons why the step differs, the first cause first; empty if it is the same.
        notes: Differences that alone are not a reason.
    """

    step: int
    loss: tuple[float, float]
    lr: tuple[float, float]
    difference: float
    allowed: float
    parts: Sequence[str]
    notes: Sequence[str]


@dataclass(frozen=True)
class ScriptComparison:
    """Compared steps; `notes` are differences that the comparison has evened out."""

    steps: Sequence[ComparedStep]
    notes: Sequence[str]

    @property
    def parted(self) -> ComparedStep | None:
        """Returns the first step that differs, None if no step does."""
        return next((one for one in self.steps if one.parts), None)

    def as_dict(self) -> dict[str, Any]:
        """Returns the comparison for JSON."""
        parted = self.parted
        return {
            "same": parted is None,
            "parted_at": parted.step if parted else None,
            "parted_in": list(parted.parts) if parted else [],
            "tolerance": max(one.allowed for one in self.steps),
            "largest_difference": max(one.difference for one in self.steps),
            "notes": list(self.notes),
            "steps": [asdict(one) for one in self.steps],
        }

    def lines(self) -> Iterator[str]:
        """Yields the comparison as lines of text: a table, notes, and the verdict."""
        yield f"{'step':>6}  {'script':>13}  {'recipe':>13}  {'difference':>10}"
        for one in self.steps:
            mark = f"  {one.parts[0].partition(':')[0]}" if one.parts else ""
            yield f"{one.step:>6}  {one.loss[0]:>13.8g}  {one.loss[1]:>13.8g}  {one.difference:>10.1e}{mark}"
        yield ""
        yield from (f"note: {note}" for note in self.notes)
        parted = self.parted
        if parted is None:
            most = max(one.difference for one in self.steps), max(one.allowed for one in self.steps)
            yield f"same: {len(self.steps)} steps, largest difference of the loss {most[0]:.1e} (allowed {most[1]:.0e})"
            return
        yield f"they part at step {parted.step}"
        yield from (f"  {part}" for part in parted.parts)
        before = [f"step {one.step}: {note}" for one in self.steps[: parted.step] for note in one.notes]
        yield from (f"  {note}" for note in before[:1])


@process_exit.forbid_sys_exit()
@restored_backend_flags()
def compare_script(
    script: Path,
    arguments: Sequence[str],
    recipe: str | Path,
    *,
    steps: int,
    sets: Sequence[str] = (),
    tolerance: float | None = None,
    torchrun: bool = False,
) -> ScriptComparison:
    """Trains `steps` steps of a script, in a process of its own, and of a recipe, in this process; compares them.

    Without `tolerance`, rounding is measured: the recipe trains again from weights that differ in the last place.

    Raises UsageError if the script cannot be compared, ForgeError as a run does.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("a script is compared in one process", hints=["start this command without a launcher"])
    if not script.is_file():
        raise UsageError(f"there is no script {script}", hints=["give the path of a Python file"])
    load_recipe(recipe, sets=sets)  # before the script trains
    with TemporaryDirectory(prefix="ddpforge-script-") as name:
        folder = Path(name)
        record = _recorded(script, arguments, folder, steps, torchrun=torchrun)
        trained = _Trained(recipe, sets, folder, record)
        near = [] if tolerance else [_Trained(recipe, sets, folder, record, seed) for seed in range(1, 1 + PERTURBED)]
        limits = _Limits.given(tolerance) if tolerance else _Limits.measured(trained, near)
        return _compared(record.steps, trained, steps, limits)


# ---------------------------------------------------------------------------------------------- the script
def _recorded(script: Path, arguments: Sequence[str], folder: Path, steps: int, *, torchrun: bool) -> ScriptRecord:
    command = [sys.executable, "-m", _RECORDER, str(folder), str(steps), str(script), *arguments]
    # A file, not a pipe: processes that the script leaves behind would hold a pipe open.
    with (folder / "output.txt").open("w+b") as output:
        code = run_alone(command, os.environ | (_ONE_RANK if torchrun else {}), output)
        output.seek(max(0, output.tell() - _MOST_OUTPUT))
        said = output.read().decode(errors="replace")
    if code:
        reads = ["the script reads from the terminal: give its answers as arguments"] if "EOFError" in said else []
        last = said.rstrip().splitlines()[-_OUTPUT:]
        raise UsageError(
            f"{script} failed with exit code {code} before step {steps}:\n" + "\n".join(last),
            hints=[
                *reads,
                f"it must work alone: {'torchrun' if torchrun else 'python'} {script}",
                "arguments of the script come after `--`",
                *([] if torchrun else ["--torchrun sets the variables of torchrun, for scripts that join ranks"]),
            ],
        )
    record = ScriptRecord.read(folder)
    if record.problem:
        raise UsageError(f"{script} cannot be compared: {record.problem}")
    if not record.steps:
        raise UsageError(
            f"{script} ended without an optimizer step in its process",
            hints=["a script that starts processes of its own must be able to train without them"],
        )
    if any(one.indices is None for one in record.steps):
        raise UsageError(
            f"{script} draws no indices through the sampler of a torch DataLoader, and the inputs of its model cannot "
            "be replayed",
            hints=["give the DataLoader a map-style dataset (__len__ and __getitem__); streams cannot be compared"],
        )
    return record


def _stop(*_: object) -> NoReturn:
    raise StoppedBeforeStart("stopped while the script trained; its processes were ended")


def run_alone(command: Sequence[str], env: Mapping[str, str], output: IO[bytes]) -> int:
    """Runs a command without input in a session of its own; returns its exit code.

    Its processes are killed when it ends, and when this process receives SIGTERM or Ctrl-C.
    """
    process = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
    before = signal.getsignal(signal.SIGTERM)
    in_main = threading.current_thread() is threading.main_thread()
    try:
        if in_main:
            signal.signal(signal.SIGTERM, _stop)
        return process.wait()
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, before)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# ---------------------------------------------------------------------------------------------- the recipe
class _Trained:
    """Steps of the recipe, as records like those of the script."""

    def __init__(
        self, recipe: str | Path, sets: Sequence[str], folder: Path, record: ScriptRecord, perturbed: int = 0
    ) -> None:
        """Trains; `perturbed` is the seed of a change of the initial weights in their last place, 0 for none."""
        self.resolution: list[Mapping[str, float]] = []  # of the updates
        self._perturbed = perturbed
        self.notes: list[str] = []
        self.steps: list[ScriptStep] = []
        self._initial = load_file(folder / INITIAL)
        self._record = record
        self._batches: list[list[list[str]]] = []
        self.other_size = ""
        self.rename: Mapping[str, str] = {}
        file = folder / "indices.json"
        file.write_text(json.dumps([one.indices for one in record.steps]))
        inputs = folder / INPUTS if record.has_inputs else None
        if inputs:
            self.notes.append("the script has no DataLoader: the recipe gets the inputs of the script's model as data")
            log.log(
                logging.DEBUG if perturbed else logging.WARNING, "%s, in batches for task model_loss", self.notes[-1]
            )
        changes = _overrides(recipe, sets, file, inputs)
        with open_ephemeral(recipe, sets=[*sets, *changes], change=self._prepare) as trial:
            self._train(trial)

    def _prepare(self, dealt: Dealt) -> Dealt:
        """Gives the model the script's initial weights, and removes the evaluations."""
        if dealt.recipe.optimizer.updates:
            raise UsageError("the recipe has several updates ([optimizer.updates]); a script has one")
        length = len(dealt.data["train"]) if hasattr(dealt.data["train"], "__len__") else None
        if not self._record.has_inputs:
            self.other_size = _other_size(self._record.steps, dealt.recipe.train.global_batch, length)
        if self._record.samples not in (None, length):
            self.notes.append(
                f"the script's dataset has {self._record.samples} samples, that of the recipe {length}: epochs differ"
            )
        self.rename, note = _names(self._initial, dealt.model)
        self.notes += [note] if note else []
        dealt.model.load_state_dict({self.rename[name]: one for name, one in self._initial.items()})
        if self._perturbed:
            low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dealt.recipe.train.precision)
            perturb(dict(dealt.model.named_parameters()), low, seed=self._perturbed)
        return replace(dealt, evaluation={})

    def _train(self, trial: EphemeralRun) -> None:
        replica = trial.trainer.replica
        handle = replica.unwrapped.register_forward_pre_hook(self._record_inputs, with_kwargs=True)
        trial.trainer.end = len(self._record.steps)
        before = _weights(trial)
        for info in trial.steps(len(self._record.steps)):
            after = _weights(trial)
            updates = norms_of_changes(before, after)
            self.resolution.append(resolution_of(before, updates))
            self.steps.append(
                ScriptStep(
                    losses=[info.metrics["train/loss"]],
                    indices=None,
                    batch=joined(self._batches),
                    lr=info.lr,
                    updates=updates,
                )
            )
            before, self._batches = after, []
        handle.remove()
        if not self.steps:
            raise StoppedBeforeStart("a stop was requested before the first step", hints=["a trial keeps nothing"])

    def _record_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            self._batches.append(fingerprints((args, kwargs)))


def _overrides(recipe: str | Path, sets: Sequence[str], indices: Path, inputs: Path | None) -> list[str]:
    loaded = load_recipe(recipe, sets=sets).recipe
    kept = f"{__package__}.replay:RecordedInputs"
    return [
        *([f"data.train={{use='{kept}',file={toml_value(str(inputs))}}}"] if inputs else []),
        *(["~data.sampler"] if loaded.data.sampler else []),
        "data.sampler.use=ddpforge.tools.script_comparison.replay:Replay",
        f"data.sampler.indices={toml_value(str(indices))}",
        "track.every=1st",
        *(["~checkpoint.init_from"] if loaded.checkpoint.init_from else []),
    ]


def _weights(trial: EphemeralRun) -> dict[str, Tensor]:
    return {name: part.tensor.detach().clone() for name, part in trial.trainer.replica.weights.shards().items()}


def _names(initial: Mapping[str, Tensor], model: nn.Module) -> tuple[dict[str, str], str]:
    """Returns the names in the model by the script's names, and a note if one of them has a prefix.

    Raises UsageError if names or shapes do not match.
    """
    own = model.state_dict()
    for ours, theirs in [("", ""), *(("", one) for one in _prefixes(initial)), *((one, "") for one in _prefixes(own))]:
        found = {name: ours + name.removeprefix(theirs) for name in initial if name.startswith(theirs)}
        if len(found) == len(initial) and set(found.values()) == own.keys():
            _check_shapes(initial, found, own)
            whose = f"the script's names begin with `{theirs}`" if theirs else f"the recipe's names begin with `{ours}`"
            return found, f"{whose}, which is no difference" if ours or theirs else ""
    only = [sorted(initial.keys() - own.keys()), sorted(own.keys() - initial.keys())]
    sides = zip(("script", "recipe"), only, strict=True)
    apart = [f"only the {side} has {_some(names)}" for side, names in sides if names]
    raise UsageError(
        f"the initial weights do not match: {'; '.join(apart)}",
        hints=["build the script's model in [model]: its class, with the same options"],
        key="model",
    )


def _check_shapes(initial: Mapping[str, Tensor], names: Mapping[str, str], own: Mapping[str, Tensor]) -> None:
    for name, mine in names.items():
        if initial[name].shape != own[mine].shape:
            raise UsageError(
                f"the initial weights do not match: `{mine}` has the shape {list(own[mine].shape)}, in the script "
                f"{list(initial[name].shape)}",
                hints=["give [model] the options of the script's model"],
                key="model",
            )


def _prefixes(names: Mapping[str, Tensor]) -> list[str]:
    """Returns the prefixes of whole words that all names have, e.g. "net." and "net.body."."""
    first, last = min(names, default=""), max(names, default="")  # all other names are between them
    common = takewhile(lambda pair: pair[0] == pair[1], zip(first.split(".")[:-1], last.split(".")[:-1], strict=False))
    words = [word for word, _ in common]
    return [".".join(words[: number + 1]) + "." for number in range(len(words))]


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# ---------------------------------------------------------------------------------------------- both
@dataclass(frozen=True)
class _Limits:
    """Largest relative differences that are rounding, of the loss by step, and of updates by step and name."""

    loss: Callable[[int], float]
    update: Callable[[int, str], float]

    @classmethod
    def given(cls, tolerance: float) -> _Limits:
        return cls(lambda step: tolerance, lambda step, name: _UPDATE)

    @classmethod
    def measured(cls, trained: _Trained, near: Sequence[_Trained]) -> _Limits:
        def losses(one: _Trained) -> list[dict[str, float]]:
            return [{"loss": step.losses[0]} for step in one.steps]

        loss = Rounding.measured(losses(trained), *map(losses, near))
        updates, *others = ([step.updates for step in one.steps] for one in [trained, *near])
        update = Rounding.measured(updates, *others, factor=UPDATES, resolution=trained.resolution)
        return cls(lambda step: min(VISIBLE.loss, loss.allowed(step, "loss")), update.allowed)


def _compared(script: Sequence[ScriptStep], trained: _Trained, asked: int, limits: _Limits) -> ScriptComparison:
    notes = list(trained.notes)
    if len(script) < asked:
        notes.append(f"the script ended after step {len(script)}")
    if len(trained.steps) < len(script):
        notes.append(f"the recipe ended after step {len(trained.steps)}: see train.length")
    summed = _sums_over_samples(script[0], trained.steps[0])
    if summed:
        notes.append("the script's loss is a sum over the samples of a step: it is divided by their number here")
    mean = not summed and _compares_means(script[0], trained.steps[0])
    if mean:
        notes.append(
            f"the script adds the gradients of {len(script[0].losses)} micro-batches and does not divide their losses: "
            "its gradient is as many times larger"
        )
    steps = []
    for number, (theirs, mine) in enumerate(zip(script, trained.steps, strict=False), start=1):
        size = len(theirs.indices or ()) if summed else len(theirs.losses) if mean else 1
        loss = sum(theirs.losses) / size, mine.losses[0]
        difference, allowed = _relative(*loss), limits.loss(number)
        parts = [*([trained.other_size] if trained.other_size and number == 1 else []), *_batch(theirs, mine)]
        if not difference <= allowed:
            parts.append(f"loss: {loss[0]:.8g} in the script, {loss[1]:.8g} in the recipe")
        if _relative(theirs.lr, mine.lr) > _LR:
            parts.append(f"lr: {theirs.lr:.8g} in the script, {mine.lr:.8g} in the recipe")
        noted = [*_update(theirs, mine, trained.rename, partial(limits.update, number))]
        steps.append(ComparedStep(number, loss, (theirs.lr, mine.lr), difference, allowed, parts, noted))
    return ScriptComparison(steps, notes)


def _sums_over_samples(script: ScriptStep, recipe: ScriptStep) -> bool:
    """True if the script's loss is the recipe's loss times the samples of the step."""
    samples = len(script.indices or ())
    return samples > 1 and _relative(recipe.losses[0], sum(script.losses) / samples) < _SUM


def _compares_means(script: ScriptStep, recipe: ScriptStep) -> bool:
    """True if the mean of the losses of a step's micro-batches is nearer to the recipe's loss than their sum."""
    total, count = sum(script.losses), len(script.losses)
    return abs(total / count - recipe.losses[0]) < abs(total - recipe.losses[0])


def _batch(script: ScriptStep, recipe: ScriptStep) -> Iterator[str]:
    """Yields the difference of the batches. One of both models may get more inputs, e.g. the labels."""
    theirs, mine = [set(map(tuple, one.batch)) for one in (script, recipe)]
    if not (theirs <= mine or mine <= theirs):
        yield "batch: the inputs of the models differ, although the samples have the same indices"


def _other_size(steps: Sequence[ScriptStep], global_batch: int, samples: int | None) -> str:
    """Describes steps of the script that never have the recipe's number of samples; "" if one has it.

    The last step of an epoch may have fewer.
    """
    size = max(len(one.indices or ()) for one in steps)
    if size == min(global_batch, samples or global_batch):
        return ""
    return f"batch: {size} samples per step in the script, train.global_batch = {global_batch} in the recipe"


def _update(
    script: ScriptStep, recipe: ScriptStep, rename: Mapping[str, str], allowed: Callable[[str], float]
) -> Iterator[str]:
    """Yields the difference of the updates; names the five parameters that differ most."""
    named = {rename[name]: norm for name, norm in script.updates.items()}
    if missing := sorted(recipe.updates.keys() ^ named.keys()):
        frozen = "recipe" if missing[0] in named else "script"
        yield f"update: {_some(missing)} is not trained in the {frozen}"
        return
    if found := excesses(named, recipe.updates, allowed):
        first, *others = found
        more = [f"`{one.name}` × {one.multiple:.4g}" for one in others if one.multiple is not None]
        yield (
            f"update: the norm of the change of `{first.name}` is {named[first.name]:.6g} in the script, "
            f"{recipe.updates[first.name]:.6g} in the recipe ({first.difference:.1e} apart)"
            + (f"; also {', '.join(more)}" if more else "")
        )


def _relative(reference: float, value: float) -> float:
    return math.inf if math.isnan(value) else relative(value, reference, _LEAST)
