"""A rank's part of the model, as torch's pipelines call it, and stubs that replace the model in calls of the task."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ddpforge import compat
from ddpforge.compat import tree_flatten, tree_map_only
from ddpforge.errors import StrategyError
from ddpforge.interfaces import Compute, Pass, device_kind, mix
from ddpforge.ranks import heartbeat
from ddpforge.strategies.pipeline.segments import Segment

__all__ = ["StageMicroBatch", "StageModule", "StageOutput", "call_signature"]


@dataclass
class StageMicroBatch:
    """Micro-batch that is being computed: the model's inputs, and the results."""

    one: Pass
    inputs: tuple[tuple[Any, ...], Mapping[str, Any]]
    form: tuple[Any, ...] = ()  # key of its shapes; the same on all ranks that compute it
    output: Any = None  # of the model, on the rank with the last part
    result: tuple[Tensor, Any] | None = None  # the loss, and the task's outputs


class StageModule(nn.Module):
    """Some consecutive steps of the model; the part is number `number` of `parts` parts.

    Args:
        steps: The steps, in their order.
        tensors: All parameters and buffers that the steps use.
        elsewhere: Names of tensors and modules that only other ranks have.
        begin: Called after the part's RNG was seeded.
        forward: Wraps the steps of a forward pass.
        through: Calls the function that takes the steps.
    """

    # The part registers the parameters of its steps: schedules that split the backward pass skip all others.

    def __init__(
        self,
        number: int,
        parts: int,
        steps: Sequence[Segment],
        tensors: Sequence[Tensor],
        elsewhere: Collection[str],
        device: torch.device,
        begin: Callable[[], None],
        forward: Callable[[], AbstractContextManager[Any]],
        through: Callable[..., Any],
    ) -> None:
        super().__init__()
        self.number, self.last = number, number == parts - 1
        self._steps, self._elsewhere = list(steps), elsewhere
        self._device, self._begin, self._around, self._through = device, begin, forward, through
        self.weights = nn.ParameterList([tensor for tensor in tensors if isinstance(tensor, nn.Parameter)])
        for place, tensor in enumerate(tensors):
            if not isinstance(tensor, nn.Parameter):
                self.register_buffer(f"buffer_{place}", tensor, persistent=False)
        self.micros: Sequence[StageMicroBatch] = ()  # micro-batches that are being computed

    def forward(self, *x: Any, number: int) -> Any:
        """Returns the inputs of the next part; the last part stores the model's output, which may be any object."""
        _mark(heartbeat.FORWARD)
        micro = self.micros[number]
        args, named = (tuple(map(_received, x)), {}) if self.number else micro.inputs
        micro.one.seed()
        _seed_on(self.number, self._device)
        self._begin()
        with micro.one.context(), self._around():
            found = self._through(self._take_steps, *args, **named)
        _mark(heartbeat.BACKWARD)
        if not self.last:
            return tree_map_only(Tensor, _sent, _travels(found, self._steps[-1]))
        micro.output = found
        return torch.zeros(())

    def _take_steps(self, *args: Any, **named: Any) -> Any:
        found = self._call(self._steps[0], args, named)
        for step in self._steps[1:]:
            found = self._call(step, found if isinstance(found, tuple) else (found,), {})
        return found

    def _call(self, step: Segment, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        try:
            return step.call(*args, **named)
        except AttributeError as error:
            if not isinstance(error.obj, nn.Module) or error.name not in self._elsewhere:
                raise
            raise StrategyError(
                f"`{step.name}` uses `{error.name}` of {type(error.obj).__name__}, which is on another rank: "
                "`pipeline` does not list it for this step",
                hints=[f'list it: pipeline = (…, ("{step.name}", …, "{error.name}"), …)'],
            ) from error


def _sent(x: Tensor) -> Tensor:
    """Returns an activation as a contiguous tensor, not a view: views can be neither sent nor detached in place."""
    x = x.contiguous()
    return x.clone() if compat.is_view(x) else x


def _received(x: Tensor) -> Tensor:
    """Returns a copy of an activation, because the first layer may work in place; makes its gradient contiguous."""
    if not x.requires_grad:
        return x
    x = x.clone()
    x.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]
    return x


def _mark(phase: int) -> None:
    if torch.is_grad_enabled():  # an evaluation is one phase
        heartbeat.beat(phase)


def _seed_on(number: int, device: torch.device) -> None:
    """Seeds the RNG of a part, with a seed from the pass's seed and the part's number."""
    seed = mix(torch.initial_seed(), number + 1)
    torch.default_generator.manual_seed(seed)
    device_kind(device).seed(seed, device)


def _travels(found: Any, step: Segment) -> Any:
    if isinstance(found, Tensor) or (isinstance(found, tuple) and all(isinstance(x, Tensor) for x in found)):
        return found
    raise StrategyError(
        f"`{step.name}` returns a {type(found).__name__}, but a pipeline can send only a tensor or a tuple of tensors "
        "to the next rank",
        hints=["return tensors, or cut elsewhere with strategy.split_points"],
    )


# ---------------------------------------------------------------------------------------------- stubs of the model
class _Called(Exception):
    """Raised by the stub model: the task called the model."""


class _Stub(nn.Module):
    """Raises StrategyError for each attribute that the task uses: it can only call the model."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            return super().__getattr__(name)
        raise StrategyError(
            f"the task's loss uses `{name}` of the model, but under a pipeline it can only call the model",
            hints=["store it in `start` or `check`, if it is not a weight", 'or set strategy.use = "fsdp"'],
        )


class StageInputs(_Stub):
    """Stub model that records the inputs of the task's call, and ends it."""

    def forward(self, *args: Any, **named: Any) -> Any:
        """Records the inputs; always raises."""
        self.inputs = args, named
        raise _Called


class StageOutput(_Stub):
    """Stub model that returns the model's output to the task, once."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self._output, self._calls = output, 0

    def forward(self, *args: Any, **named: Any) -> Any:
        """Returns the output, for any inputs; raises StrategyError if called again."""
        self._calls += 1
        if self._calls > 1:
            raise StrategyError(
                "the task calls the model more than once for a batch, but a pipeline computes only one forward pass",
                hints=["call it once, with all inputs in one batch (torch.cat)", 'or set strategy.use = "fsdp"'],
            )
        return self._output


def call_signature(one: Pass, compute: Compute) -> StageMicroBatch:
    """Runs the task up to its call of the model; returns a micro-batch with the model's inputs."""
    stand_in = StageInputs()
    try:
        compute(stand_in, one)
    except _Called:
        return StageMicroBatch(one, stand_in.inputs, _form(stand_in.inputs))
    raise StrategyError(
        "the task's loss does not call the model",
        hints=["call `model(…)`, not one of its methods or modules", 'or set strategy.use = "fsdp"'],
    )


def _form(inputs: Any) -> tuple[Any, ...]:
    """Returns a key of inputs: inputs with equal keys give activations of equal shapes."""
    leaves, structure = tree_flatten(inputs)
    return (str(structure), *(_known(leaf) for leaf in leaves))


def _known(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype
    return leaf if isinstance(leaf, bool | int | float | str | None) else type(leaf).__qualname__
