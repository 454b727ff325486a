"""Checks LightningModules: a module that needs a Trainer is refused, except for the length of the run."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ddpforge.errors import UsageError

from ddpforge_lightning.source import INDEX, TRAINER, Finding, findings

if TYPE_CHECKING:
    from ddpforge.interfaces import Horizon
    from torch import nn

__all__ = [
    "HOOKS",
    "NoBatchIndex",
    "Run",
    "checked",
    "library_class",
    "others_named",
    "overridden",
    "overrides",
    "run_of",
    "with_others",
]

_LIBRARIES = ("pytorch_lightning.", "lightning.pytorch.")

_FIT = ("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_train_end", "on_fit_end")
_WHEN = ("start", "epoch_start", "epoch_end", "end")
HOOKS = frozenset((*_FIT, *(f"on_{kind}_{when}" for kind in ("validation", "test") for when in _WHEN)))
_SUPPORTED = {
    "forward",
    "training_step",
    "validation_step",
    "test_step",
    "configure_optimizers",
    "predict_step",
    *HOOKS,
}
_MENDS = {
    "backward": "let ddpforge call backward",
    "configure_callbacks": "name callbacks in [callbacks]",
    "configure_gradient_clipping": "set train.clip_norm",
    "configure_model": "build the layers in __init__",
    "lr_scheduler_step": "use a scheduler that needs no arguments in its `step`",
    "optimizer_step": "set [optimizer] without it; a warm-up is a schedule",
    "optimizer_zero_grad": "remove it: ddpforge sets gradients to None",
    "train_dataloader": "name the dataset in [data.train]",
    "val_dataloader": "name the dataset in [data.eval]",
    "test_dataloader": "name the dataset in [data.eval]",
    "setup": "build the layers in __init__",
}


def library_class(kind: type, name: str = "LightningModule") -> type | None:
    """Returns the class `name` of either library that `kind` derives from; None if there is none."""
    # Neither library is imported: a module that derives from it has imported its own.
    named = (base for base in kind.__mro__ if base.__name__ == name)
    return next((base for base in named if base.__module__.startswith(_LIBRARIES)), None)


def overridden(kind: type, base: type, supported: Collection[str]) -> list[str]:
    """Returns the methods of `base` that `kind` overrides and that are not in `supported`."""
    found: dict[str, None] = {}
    for owner in kind.__mro__[: kind.__mro__.index(base)]:
        for method in vars(owner):
            if not method.startswith("__") and method not in supported and _is_hook(getattr(base, method, None)):
                found[method] = None
    return [*found]


def overrides(module: nn.Module, method: str) -> bool:
    """True if the module's class defines `method` itself."""
    base = library_class(type(module))
    return base is not None and getattr(type(module), method) is not getattr(base, method)


def checked(module: nn.Module, evaluation: str | None = None) -> Any:
    """Returns `module`; raises UsageError unless it is a LightningModule that trains without a Trainer.

    The error has all places that need one, as far as they can be read. `evaluation` is the step of evaluations, if the
    run has any: "validation_step" or "test_step".
    """
    base = library_class(type(module))
    if base is None:
        module.parameters()  # a model that was not built raises its own error here
        raise UsageError(
            f"the model is a {type(module).__name__}, not a LightningModule",
            hints=['write [model] use = "./lit.py:LitNet", the class of your LightningModule'],
            key="model.use",
        )
    wrong = [*_of_class(module, base), *(one for one in _of_source(module, evaluation) if one.certain)]
    if wrong:
        raise with_others(UsageError(_described(wrong[0]), hints=[wrong[0].hint], key="model.use"), module)
    return module


@contextmanager
def others_named(module: nn.Module) -> Iterator[None]:
    """Adds the other places of `module` that need a Trainer to the hints of a UsageError from inside."""
    try:
        yield
    except UsageError as error:
        raise with_others(error, module) from error.__cause__


def with_others(error: UsageError, module: nn.Module) -> UsageError:
    """Returns `error`, with a hint for each other place of `module` that needs a Trainer."""
    base = library_class(type(module))
    for one in [*_of_class(module, base), *_of_source(module)] if base else []:
        line = f"also: {_described(one)}: {one.hint}"
        if one.what not in error.message and line not in error.hints:
            error.hints = (*error.hints, line)
    return error


def _described(one: Finding) -> str:
    return f"{one.what} ({one.place})" if one.place else one.what


def _of_class(module: Any, base: type) -> Iterator[Finding]:
    """Yields the findings in the class and the attributes of a module."""
    name = type(module).__name__
    if not module.automatic_optimization:
        hint = "return the loss from training_step; several updates per step: write a task with `updates`"
        yield Finding(f"{name} optimizes manually (automatic_optimization = False)", hint, "", True)
    if not overrides(module, "training_step"):
        yield Finding(f"{name} has no training_step", "return the loss there", "", True)
    for method in overridden(type(module), base, _SUPPORTED):
        hint = _MENDS.get(method, "move it to a callback of ddpforge, and remove it from the module")
        yield Finding(f"{name} overrides `{method}`, which a Trainer would call; ddpforge does not", hint, "", True)


def _of_source(module: Any, evaluation: str | None = None) -> list[Finding]:
    """Returns the findings in the source of the steps and hooks; certain only in methods that the run calls."""
    base = library_class(type(module))
    assert base is not None
    own = type(module).__mro__[: type(module).__mro__.index(base)]
    called = {"training_step", *_FIT}
    if evaluation:
        called |= {evaluation, *(f"on_{evaluation.removesuffix('_step')}_{when}" for when in _WHEN)}
    names = ("training_step", *_FIT, "configure_optimizers", "validation_step", "test_step", *sorted(HOOKS - {*_FIT}))
    methods = {name: name in called for name in names}
    library = sys.modules.get("torchmetrics")
    kinds = (library.Metric, library.MetricCollection) if library else ()
    metrics = [name for name, one in module.named_children() if isinstance(one, kinds)]
    return findings(own, methods, [name for name in dir(Run) if not name.startswith("_")], metrics)


def _is_hook(inherited: object) -> bool:
    """True for a method that a LightningModule has from Lightning, not from torch."""
    return callable(inherited) and getattr(inherited, "__module__", "").startswith(_LIBRARIES)


class Run:
    """Stands in for the Trainer of a module: the length of the run, and its step. Anything else raises UsageError.

    `step` is the number of optimizer steps so far. `scheduled` has the options of the optimizer that the recipe's
    schedules set, e.g. "lr" and "beta1"; `table` their values of each group at each step, as soon as these are known.
    """

    # Without a `__dict__`: the search for values that no checkpoint holds does not look into it.
    __slots__ = ("_epoch", "evaluates", "horizon", "scheduled", "step", "table")

    def __init__(self) -> None:
        self.horizon: Horizon | None = None
        self.step = 0
        self.evaluates = False  # whether the methods of evaluations are checked
        self._epoch: int | None = None
        self.scheduled: set[str] = set()
        self.table: dict[str, list[list[float]]] | None = None

    @property
    def estimated_stepping_batches(self) -> int:
        """Returns the number of optimizer steps of the run; raises UsageError if it is not known."""
        if self.horizon is None or self.horizon.total is None:
            raise UsageError(
                "self.trainer.estimated_stepping_batches: the length of the run in steps is not known",
                hints=['set train.length in steps or epochs, and [schedule] use = "lightning"'],
                key="train.length",
            )
        return self.horizon.total

    sanity_checking = False
    progress_bar_callback = None  # self.print reads it

    @property
    def max_steps(self) -> int:
        """Returns the number of optimizer steps of the run; raises UsageError if it is not known."""
        return self.estimated_stepping_batches

    @property
    def max_epochs(self) -> int:
        """Returns the number of epochs of the run, rounded up; raises UsageError if it is not known."""
        return -(-self.estimated_stepping_batches // self.num_training_batches)

    @property
    def num_training_batches(self) -> int:
        """Returns the number of optimizer steps of an epoch; raises UsageError if it is not known."""
        assert self.current_epoch >= 0  # raises if the length of epochs is not known
        assert self.horizon is not None
        return self.horizon.steps_per_epoch or 1

    @property
    def world_size(self) -> int:
        """Returns the number of ranks."""
        return int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def global_rank(self) -> int:
        """Returns this rank."""
        return int(os.environ.get("RANK", "0"))

    @property
    def local_rank(self) -> int:
        """Returns the number of this rank on its machine."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def is_global_zero(self) -> bool:
        """True on rank 0."""
        return self.global_rank == 0

    @property
    def global_step(self) -> int:
        """Returns the number of optimizer steps so far."""
        return self.step

    @property
    def current_epoch(self) -> int:
        """Returns the number of the epoch, from 0; raises UsageError if the length of epochs is not known."""
        if self.horizon is None or not self.horizon.steps_per_epoch:
            raise UsageError(
                "the LightningModule uses epochs, and their length in steps is not known",
                hints=['write [schedule] use = "lightning", which works without a scheduler too'],
                key="schedule",
            )
        return self.step // self.horizon.steps_per_epoch if self._epoch is None else self._epoch

    def lengths(self) -> dict[str, int | None]:
        """Returns the step, and the lengths of the run and of its epochs, for a checkpoint."""
        horizon = self.horizon
        return {
            "step": self.step,
            "total": horizon.total if horizon else None,
            "steps_per_epoch": horizon.steps_per_epoch if horizon else None,
        }

    def restore(self, lengths: Mapping[str, Any]) -> None:
        """Restores the result of `lengths`. An evaluation without training is in the epoch of the newest step."""
        self.step = lengths["step"]
        if self.horizon is None and (epoch := lengths["steps_per_epoch"]):
            from ddpforge.interfaces import Horizon

            self.horizon = Horizon(total=lengths["total"], steps_per_epoch=epoch)
            self._epoch = max(0, self.step - 1) // epoch

    @contextmanager
    def in_epoch(self, epoch: int | None) -> Iterator[None]:
        """Sets `current_epoch` inside, for hooks after the last step of an epoch; None changes nothing."""
        before, self._epoch = self._epoch, epoch if self._epoch is None else self._epoch
        try:
            yield
        finally:
            self._epoch = before

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UsageError(
            f"the LightningModule reads `{name}` of its Trainer, and ddpforge has no Trainer",
            hints=[
                TRAINER,
                "self.optimizers() and self.lr_schedulers() read others: the column `lr` has the rate of each row",
            ],
            key="model.use",
        )


def run_of(module: Any, horizon: Horizon | None = None) -> Run:
    """Returns the module's `Run`; makes one if there is none, and sets its `horizon`."""
    run = vars(module).get("_trainer")  # the property `trainer` raises without one
    if not isinstance(run, Run):
        run = module.trainer = Run()
    if horizon not in (None, run.horizon):
        run.horizon, run.table, run._epoch = horizon, None, None
    return run


def _refuse_index(self: object, *_: object) -> Any:
    raise UsageError(
        "the LightningModule reads `batch_idx`, and a batch has no number in ddpforge",
        hints=[INDEX],
        key="model.use",
    )


_READS = "eq ne lt le gt ge bool int index float hash add radd sub rsub mul rmul mod rmod floordiv truediv and format"
NoBatchIndex = type(
    "NoBatchIndex",
    (),
    {f"__{name}__": _refuse_index for name in _READS.split()} | {"__doc__": "Batch number that raises UsageError."},
)
