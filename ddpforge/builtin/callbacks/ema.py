"""Exponential moving average of the weights, which often evaluates better than the weights themselves."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ddpforge.errors import CheckpointError
from ddpforge.interfaces import Callback, RunContext, StepInfo, TensorShard, read_all

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger("ddpforge")


class EMA(Callback):
    """Maintains `average = decay * average + (1 - decay) * weight` for every trainable parameter.

    Averages have at least fp32 precision, and are sharded like the weights. They start at the initial weights. If a
    resumed checkpoint has no averages, they start at the weights after the next step. Buffers are not averaged.
    Parameters that are frozen at the start are skipped.
    """

    def __init__(
        self,
        decay: Annotated[
            float, Field(gt=0, lt=1, examples=[0.999], description="Weight of the old average in an update.")
        ],
        warmup: Annotated[
            bool, Field(description="Use a smaller decay at first: at most (1 + n) / (10 + n) in update n from 0.")
        ] = False,
        every: Annotated[int, Field(ge=1, le=2**31, description="Optimizer steps per update.")] = 1,
        evaluate: Annotated[bool, Field(description="Evaluate the averaged weights, not the live ones.")] = True,
    ) -> None:
        self._decay, self._warmup = decay, warmup
        self._every = every
        self._evaluate = evaluate

    def on_start(self, run: RunContext) -> None:
        """Copies this rank's parts of the initial weights."""
        self._weights = run.weights
        self._live = [part.tensor for part in run.weights.shards().values()]
        self._averages = [_at_least_fp32(tensor).clone() for tensor in self._live]
        self._begun = False

    def on_step(self, info: StepInfo) -> None:
        """Updates the averages in one fused operation."""
        if self._begun and info.step % self._every:
            return
        if not self._begun and info.step > 1:
            logger.info("ema: the checkpoint contains no averages; they start at step %d", info.step)
            _copy(self._averages, self._live)
        self._begun = True
        if info.step % self._every == 0:
            self._update(info.step // self._every - 1)

    def _update(self, number: int) -> None:
        """Makes the update `number` (0 for the first of the run)."""
        from torch.optim.swa_utils import get_ema_multi_avg_fn

        decay = min(self._decay, (1 + number) / (10 + number)) if self._warmup else self._decay
        update = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        update(self._averages, [_at_least_fp32(tensor) for tensor in self._live], 0)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Replaces the model's parameters by the averages during an evaluation; needs one more copy of the weights."""
        if self._evaluate and not self._begun:  # the averages are still the untrained initial weights
            logger.warning("ema: there are no averages yet; this evaluation uses the weights themselves")
        if not self._evaluate or not self._begun:
            yield
            return

        live = [tensor.clone() for tensor in self._live]
        try:
            self._write(self._averages)
            yield
        finally:
            self._write(live)

    def _write(self, sources: Iterable[Tensor]) -> None:
        _copy(self._live, sources)
        self._weights.mark_changed()

    def state(self) -> Mapping[str, TensorShard]:
        """Returns this rank's parts of the averages by parameter name."""
        return {name: part.of(average) for (name, part), average in self._pairs()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores saved averages; raises CheckpointError unless their names and shapes are those of this model."""
        others = self._weights.remote_names()
        expected = {name: part.shape for name, part in self._weights.shards().items()}
        found = {name: tuple(average.shape) for name, average in state.items() if name not in others}
        if found != expected:
            names = sorted(name for name in expected | found if expected.get(name) != found.get(name))
            raise CheckpointError(
                f"the averaged weights in the checkpoint do not fit this model: {', '.join(names)} differ",
                hints=["resume with the model and the ema callback of the checkpoint"],
            )
        read_all((state[name], part.region, average) for (name, part), average in self._pairs())
        self._begun = True

    def _pairs(self) -> Iterator[tuple[tuple[str, TensorShard], Tensor]]:
        return zip(self._weights.shards().items(), self._averages, strict=True)


def _copy(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    import torch

    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


def _at_least_fp32(weight: Tensor) -> Tensor:
    """Returns `weight` in fp32, or `weight` itself if its dtype has at least that precision."""
    import torch

    return weight.to(torch.promote_types(weight.dtype, torch.float32))
