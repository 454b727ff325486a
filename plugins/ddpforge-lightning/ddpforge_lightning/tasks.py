"""Task `lightning`: the loss and the metrics of a LightningModule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ddpforge.builtin.tasks.model_loss import samples_in
from ddpforge.errors import UsageError
from ddpforge.interfaces import SampleColumns, Task, Total
from pydantic import Field

from ddpforge_lightning.hooks import ModuleHooks
from ddpforge_lightning.metric_objects import MetricObjects
from ddpforge_lightning.module import NoBatchIndex, checked, others_named, overrides, run_of
from ddpforge_lightning.source import NONE

if TYPE_CHECKING:
    from ddpforge.interfaces import World
    from torch import Tensor, nn

__all__ = ["LightningTask"]

ddpforge_plugin_api = 3

_Logged = dict[str, tuple[Any, Any]]
"""Value and number of samples of each call of `self.log`."""


class LightningTask(Task):
    """The `training_step` of the model, a LightningModule, and in evaluations its `validation_step` or `test_step`.

    ddpforge needs a sum over the batch, so a mean is multiplied by the samples. Before the first step, the loss of a
    batch must be the sum of the losses of its halves. Values of `self.log` are metrics of the same names: means over
    the samples of all ranks.
    """

    def __init__(
        self,
        *,
        reduction: Annotated[
            Literal["mean", "sum"], Field(description="Whether the steps return a mean or a sum over the batch.")
        ] = "mean",
        evaluation: Annotated[
            Literal["validation_step", "test_step"], Field(description="Method that evaluations call.")
        ] = "validation_step",
        evaluation_loss: Annotated[
            str | Literal[False] | None,
            Field(
                description="Logged value that is the loss of an evaluation; absent: the returned loss, or else the"
                " only logged value with a name that ends with `loss`; false: evaluations have no loss."
            ),
        ] = None,
    ) -> None:
        self.reduction, self._evaluation, self._named = reduction, evaluation, evaluation_loss or None
        self.evaluation_loss = evaluation_loss is not False
        self._metrics = MetricObjects()
        self.reports = self._metrics.reports
        self.callback: ModuleHooks = ModuleHooks(evaluation.removesuffix("_step"), self._metrics)
        self._module: Any = None

    def start(self, model: nn.Module, world: World) -> None:
        """Checks the module, and keeps it; see `check`."""
        self._module = checked(model)
        run_of(model)
        self._metrics.start(model)

    def check(self, model: nn.Module, data: Any) -> None:
        """Raises UsageError if the model is not a LightningModule, or needs a Trainer."""
        checked(model)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        """Returns the loss of the step as a sum over the batch, and the logged values."""
        name = self._evaluation if self.evaluates else "training_step"
        if not self.evaluates:
            self.callback.before_training_step()
        logged: _Logged = {}
        objects: dict[str, Any] = {}  # values of the batch
        returned, states = self._call(model, name, batch, logged, objects)
        size = self.batch_samples or samples_in(batch)
        outputs: dict[str, Any] = {}
        for one, (value, count) in logged.items():
            outputs[one] = (value, size if count is None else count)
        outputs |= states
        if self.evaluates and not self.evaluation_loss:
            return None, outputs
        numbers = {one: value for one, (value, _) in logged.items()} | objects
        loss, is_mean = self._loss_of(name, returned, numbers)
        return loss * size if is_mean else loss, outputs

    def metrics(self, outputs: Any, batch: Any) -> Mapping[str, Total | SampleColumns]:
        """Returns the logged values, except for "loss", which ddpforge reports itself, and the states of metrics."""
        states = self._metrics.quantities(outputs)
        values = {one: found for one, found in outputs.items() if one not in states and one != "loss"}
        return {name: Total(value * size, size) for name, (value, size) in values.items()} | states

    def predict(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        """Returns the result of `predict_step`: columns by name, or one tensor, named `output`.

        Raises UsageError if the module has none: Lightning's own calls `forward` with the whole batch.
        """
        if not overrides(self._module, "predict_step"):
            raise UsageError(
                f"{type(self._module).__name__} has no predict_step, which `ddpforge predict` calls",
                hints=["write predict_step(self, batch, batch_idx) that returns e.g. {'class': logits.argmax(1)}"],
            )
        returned, _ = self._call(model, "predict_step", batch, {}, {})
        return returned if isinstance(returned, Mapping) else {"output": returned}

    def finish(self, metrics: dict[str, float]) -> dict[str, float]:
        """Returns the means, and the results of the metric objects that are logged."""
        return self._metrics.finish(metrics, evaluates=self.evaluates)

    def state(self) -> Mapping[str, int | None]:
        """Returns the step and the length of the run, which `self.current_epoch` needs in `ddpforge eval`."""
        return run_of(self._module).lengths() if self._module is not None else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores the step and the length of the run."""
        run_of(self._module).restore(state)

    # -- parts
    def _call(
        self, model: nn.Module, name: str, batch: Any, logged: _Logged, objects: dict[str, Any]
    ) -> tuple[Any, Mapping[str, Any]]:
        """Calls a step of the module through `model`, so that the strategy sees a forward pass.

        Returns its result, and the states that metric objects have of the batch. See `_recorder`.
        """
        module = self._module
        if self.evaluates and not overrides(module, name):
            raise UsageError(
                f"{type(module).__name__} has no {name}, which an evaluation calls",
                hints=[f"write {name}", "or remove [data.eval]"],
                key="task.evaluation",
            )
        if self.evaluates and not run_of(module).evaluates:
            run_of(checked(module, self._evaluation)).evaluates = True
        step = getattr(module, name)
        arguments = [batch, NoBatchIndex()][: len(inspect.signature(step).parameters)]

        # Within the step, `self(x)` is the module's own forward again. An attribute of the object hides the method.
        def forward(*arguments: Any) -> Any:
            del module.forward
            return step(*arguments)

        self._metrics.reset()
        module.forward = forward
        module.log = _recorder(logged, self._metrics, objects, evaluates=self.evaluates, losses=[self._named])
        try:
            with others_named(module):
                returned = model(*arguments)
            return returned, self._metrics.taken()
        finally:
            vars(module).pop("forward", None)
            del module.log
            self._metrics.reset()

    def _loss_of(self, name: str, returned: Any, logged: Mapping[str, Any]) -> tuple[Tensor, bool]:
        """Returns the loss of a step, and True if it is a mean over the batch, as all logged values are."""
        from torch import Tensor

        is_mean = self.reduction == "mean"

        if self.evaluates and self._named is not None:
            if self._named not in logged:
                hints = [f"it logs {', '.join(logged)}"] if logged else []
                raise UsageError(f"{name} logs no `{self._named}`", hints=hints, key="task.evaluation_loss")
            found: Any = logged[self._named]
            is_mean = True
        else:
            found = returned.get("loss") if isinstance(returned, Mapping) else returned
            losses = [value for one, value in logged.items() if one.endswith("loss")]
            if self.evaluates and found is None and len(losses) == 1:
                found, is_mean = losses[0], True
        if isinstance(found, Tensor) and not found.ndim:
            return found, is_mean
        hints = ["return the loss, or a dict with `loss`"]
        if found is None and not self.evaluates:
            hints.append(f"Lightning skips a batch for None: {NONE}")
        if self.evaluates:
            hints.append('or log it, and name it: task.evaluation_loss = "val_loss"')
            hints.append("or evaluate without a loss: task.evaluation_loss = false")
        raise UsageError(f"{name} returns no loss: {type(found).__name__}", hints=hints, key="task")


def _recorder(
    logged: _Logged,
    metrics: MetricObjects,
    objects: dict[str, Any],
    *,
    evaluates: bool = False,
    losses: Collection[str | None] = (),
) -> Callable[..., None]:
    """Returns a replacement of `self.log`.

    It adds numbers to `logged`, and metric objects to `metrics`. An object that may be the loss, by its name or as one
    of `losses`, adds its value of the batch to `objects`.
    """
    import torch

    # on_step, on_epoch, prog_bar, logger, sync_dist and others change nothing: every value is a mean over all ranks.
    def log(name: str, value: Any, *_: Any, batch_size: int | None = None, reduce_fx: Any = "mean", **__: Any) -> None:
        if hasattr(value, "compute"):
            metrics.log(name, value, evaluates=evaluates)
            if name in losses or name.endswith("loss"):
                objects[name] = metrics.value_of_batch(value)
            return
        if reduce_fx not in ("mean", torch.mean):
            raise UsageError(f'self.log("{name}", reduce_fx=…): ddpforge reports means', key="model.use")
        metrics.note_value(name, value)
        if not isinstance(value, torch.Tensor | int | float):
            raise UsageError(f'self.log("{name}", …) receives a {type(value).__name__}, not a number', key="model.use")
        value = torch.as_tensor(value).detach().float()
        if value.numel() != 1:
            raise UsageError(
                f'self.log("{name}", …) receives {list(value.shape)}, not one number',
                hints=["log its mean"],
                key="model.use",
            )
        logged[name] = (value.reshape(()), batch_size)

    return log
