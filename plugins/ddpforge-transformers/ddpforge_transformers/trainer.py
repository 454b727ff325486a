"""`Trainer.compute_loss` of transformers as a task: a subclass's own loss, in ddpforge's training."""

import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Annotated, Any, Literal, get_type_hints

import torch
from ddpforge.builtin.tasks.forms import IGNORED, IgnoredTarget, Metrics
from ddpforge.builtin.tasks.model_loss import ModelLoss
from ddpforge.errors import UsageError, described
from ddpforge.interfaces import SampleColumns, Total, World
from pydantic import Field
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer_pt_utils import LabelSmoother

__all__ = ["TrainerLoss", "adopted"]

ddpforge_plugin_api = 3

_MODEL_LOSS = get_type_hints(ModelLoss.__init__, include_extras=True)
_Smoothing = Annotated[float, Field(ge=0, lt=1, description="`label_smoothing_factor` of TrainingArguments.")]
_INSTEAD = {
    "training_step": "[train] sets accumulation, precision and clipping",
    "evaluate": "evaluations call compute_loss; task.metrics get the model's output",
    "evaluation_loop": "evaluations call compute_loss; task.metrics get the model's output",
    "prediction_step": "evaluations call compute_loss; task.metrics get the model's output",
    "create_optimizer": "[optimizer] names the optimizer, and [optimizer.groups] the groups of parameters",
    "create_scheduler": "[schedule] names the schedule: hf_linear, hf_cosine, or a function of the step",
    "get_train_dataloader": "[data.train] names the dataset, and [data.sampler] the order",
}


class _Missing(UsageError, AttributeError):
    """Error for an attribute that only a running Trainer has; `hasattr` is False for it."""


class _Refusing(SimpleNamespace):
    """Values that compute_loss may read; any other name is an error."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name) if name.startswith("__") else _missing(f"{self.owner}.{name}")


class _WithoutTraining(Trainer):  # type: ignore[misc]  # transformers has no types
    """Base class that replaces Trainer's constructor: an object with compute_loss that trains nothing."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.model: nn.Module | None = None
        self.label_smoother = self.compute_loss_func = None
        self.model_accepts_loss_kwargs = False
        self.args = _Refusing(owner="self.args", average_tokens_across_devices=False, n_gpu=0)
        self.accelerator = _Refusing(
            owner="self.accelerator", parallelism_config=None, unwrap_model=lambda model, *_: model
        )
        self.logged: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name) if name.startswith("__") else _missing(f"self.{name}")

    def log(self, logs: Mapping[str, Any], *_: Any, **__: Any) -> None:
        """Keeps the numbers of compute_loss for the metrics."""
        self.logged |= logs


def _missing(name: str) -> _Missing:
    return _Missing(
        f"compute_loss uses {name}, which only a running Trainer has",
        hints=[
            "set it in __init__ of the Trainer's subclass from an argument, and give this argument as an option of"
            " [task]",
            "or write a task: docs/extend has the interface",
        ],
        key="task.use",
    )


class TrainerLoss(ModelLoss):
    """Loss of `compute_loss` of a subclass of transformers' Trainer. A batch is a dict, as from a data collator.

    The method is called with the model and a batch, and returns the loss and the model's outputs. It may use attributes
    that the subclass's `__init__` sets, `self.model`, `self.log`, `self.label_smoother` and Trainer's own
    `compute_loss`. Other attributes of a Trainer are refused by name. The other options are those of `model_loss`.
    """

    def __init__(self, trainer: type[Trainer], arguments: Mapping[str, Any], **options: Any) -> None:
        smoothing: float = options.pop("label_smoothing")
        super().__init__(**options)
        for name in _INSTEAD:
            if getattr(trainer, name, None) is not getattr(Trainer, name, None):
                raise UsageError(
                    f"{trainer.__name__}.{name} would not be called: only compute_loss is",
                    hints=[f"remove it: {_INSTEAD[name]}"],
                    key="task.use",
                )
        self._takes_items = "num_items_in_batch" in inspect.signature(trainer.compute_loss).parameters
        bases = (_WithoutTraining,) if trainer is Trainer else (trainer, _WithoutTraining)
        bare: Any = type(trainer.__name__, bases, {})  # super().__init__ of the subclass calls ours
        self._trainer: Any = bare(**arguments)
        self._trainer.args.label_smoothing_factor = smoothing
        if smoothing:
            self._trainer.label_smoother = LabelSmoother(epsilon=smoothing, ignore_index=self.ignore_index)

    def start(self, model: nn.Module, world: World) -> None:
        """Gives the object `self.model`."""
        self._trainer.model = model

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        """Returns the loss as a sum over the batch, and the outputs with all numbers that compute_loss logged."""
        if not isinstance(batch, Mapping):
            raise UsageError(
                f"compute_loss takes a dict, but the data gives a {type(batch).__name__}",
                hints=["return dicts from the dataset, with the names that the model's forward has"],
                key="data.train",
            )
        self._trainer.logged = {}
        loss, outputs = self._computed(model, dict(self._countable(batch) if self._counts_targets else batch))
        logged = {name: torch.as_tensor(value).detach() for name, value in self._trainer.logged.items()}
        loss = loss.float()
        return loss * self._size(batch) if self.reduction == "mean" else loss, (outputs, logged)

    def _computed(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, Any]:
        """Calls compute_loss; returns the loss and the outputs, None if it returns only the loss."""
        options: dict[str, Any] = {"return_outputs": True}
        name = type(self._trainer).__name__
        if self._takes_items:
            options["num_items_in_batch"] = self._counted(batch) if self.over == "targets" else None
        try:
            returned = self._trainer.compute_loss(model, batch, **options)
        except TypeError as error:
            if "unexpected keyword argument" in str(error):
                raise UsageError(
                    f"{name}.compute_loss: {error}; the batch has {', '.join(batch)}",
                    hints=[
                        "leave columns that the model does not take out of the dataset, or pop them in compute_loss"
                    ],
                    key="task.use",
                ) from error
            if self._takes_items and "NoneType" in str(error):
                raise UsageError(
                    f"{name}.compute_loss divides by num_items_in_batch, which is None for a loss over samples",
                    hints=['set task.over = "targets": num_items_in_batch is then the number of counted labels'],
                    key="task.over",
                ) from error
            raise
        loss, outputs = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise UsageError(
                f"{name}.compute_loss returns {described(returned)}, not one number",
                hints=["return (loss, outputs) if return_outputs, else loss"],
                key="task.use",
            )
        return loss.reshape(()), outputs

    def metrics(self, outputs: Any, batch: Any) -> Mapping[str, Total | SampleColumns]:
        """Returns the logged numbers, as means over samples, and the recipe's metrics of outputs and targets."""
        returned, logged = outputs
        size = self._size(batch)
        found: dict[str, Any] = {name: Total(value.float() * size, size) for name, value in logged.items()}
        return found | dict(super().metrics((returned, {}), batch))

    def predict(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        """Returns the model's `output`, as metrics get it."""
        _, (returned, _) = self.loss(model, batch)
        return {"output": self._output_of(returned)}


def adopted(trainer: type[Trainer]) -> Callable[..., TrainerLoss]:
    """Turns a subclass of Trainer into a task. Its options are those of its `__init__` that Trainer's has not."""
    known = set(inspect.signature(Trainer.__init__).parameters)
    own = [
        one.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, one in inspect.signature(trainer.__init__).parameters.items()
        if name not in known and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]

    def component(
        *,
        reduction: Literal["mean", "sum"] = "mean",
        over: Literal["samples", "targets"] = "samples",
        target: str = "labels",
        shift: bool = False,
        ignore_index: IgnoredTarget = IGNORED,
        output: str | None = None,
        label_smoothing: _Smoothing = 0.0,
        metrics: Metrics = (),
        **arguments: Any,
    ) -> TrainerLoss:
        return TrainerLoss(
            trainer,
            arguments,
            **{"reduction": reduction, "over": over, "target": target, "shift": shift, "metrics": metrics},
            **{"ignore_index": ignore_index, "output": output, "label_smoothing": label_smoothing},
        )

    mine = [one for one in inspect.signature(component).parameters.values() if one.kind is one.KEYWORD_ONLY]
    mine = [one.replace(annotation=_MODEL_LOSS.get(one.name, one.annotation)) for one in mine]
    if taken := {one.name for one in mine} & {one.name for one in own}:
        raise ValueError(f"{trainer.__name__}.__init__ has `{min(taken)}`, which is an option of the task; rename it")
    component.__signature__ = inspect.Signature([*own, *mine])  # type: ignore[attr-defined]
    component.__name__, component.__doc__ = trainer.__name__, TrainerLoss.__doc__
    component.__module__, component.__wrapped__ = trainer.__module__, trainer.__init__  # type: ignore[attr-defined]
    return component
