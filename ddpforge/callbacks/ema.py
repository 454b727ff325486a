"""An exponential moving average of the weights, which evaluates better than the weights themselves."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ddpforge.errors import CheckpointError
from ddpforge.interfaces import Callback, StepInfo, Weights, World

logger = logging.getLogger("ddpforge")


class EMA(Callback):
    """Keeps `average = decay * average + (1 - decay) * weight` for every trainable parameter.

    Averages are held in fp32 at least. They start at the initial weights, or, where a run goes on that kept
    none, at the weights after its next step. Buffers are the live model's. A parameter that is frozen at the
    start is left out: its average is itself. Where weights are sharded, the averages are too.
    """

    def __init__(
        self,
        decay: Annotated[float, Field(gt=0, lt=1, description="How much of the old average an update keeps.")],
        every: Annotated[int, Field(ge=1, le=2**31, description="Optimizer steps per update.")] = 1,
        evaluate: Annotated[bool, Field(description="Evaluate the averaged weights, not the live ones.")] = True,
    ) -> None:
        self._every = every
        self._evaluate = evaluate
        self._update = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]

    def on_start(self, model: nn.Module, world: World, weights: Weights) -> None:
        """Copies the initial weights: as much of each as this rank holds."""
        self._weights = weights
        self._averages = {name: _at_least_fp32(part).clone() for name, part in weights.parts().items()}
        self._begun = False

    def on_step(self, info: StepInfo) -> None:
        """Moves the averages towards the weights, in one fused operation."""
        if self._begun and info.step % self._every:
            return
        live = self._weights.parts().values()
        averages = list(self._averages.values())
        if not self._begun and info.step > 1:
            logger.info("ema: the checkpoint holds no averages; they start at step %d", info.step)
            _copy(averages, live)
        self._begun = True
        if info.step % self._every == 0:
            self._update(averages, [_at_least_fp32(part) for part in live], 0)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Holds the averages in the model's own parameters; costs one more copy of the weights meanwhile."""
        if not self._evaluate:
            yield
            return

        parts = list(self._weights.parts().values())
        live = [part.clone() for part in parts]
        try:
            self._write(self._averages.values())
            yield
        finally:
            self._write(live)

    def _write(self, sources: Iterable[Tensor]) -> None:
        _copy(self._weights.parts().values(), sources)
        self._weights.changed()

    def state(self) -> Mapping[str, Tensor]:
        """The averages by parameter name."""
        return self._weights.gather(self._averages)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from saved averages; raises CheckpointError unless they are of exactly this model."""
        expected = self._weights.shapes()
        found = {name: tuple(average.shape) for name, average in state.items()}
        if found != expected:
            names = sorted(name for name in expected | found if expected.get(name) != found.get(name))
            raise CheckpointError(
                f"the averaged weights in the checkpoint are not of this model: {', '.join(names)} differ",
                hints=["resume with the model and the ema callback that the checkpoint was made with"],
            )
        parts = self._weights.split(state)
        _copy(self._averages.values(), (parts[name] for name in self._averages))
        self._begun = True


@torch.no_grad()
def _copy(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _at_least_fp32(weight: Tensor) -> Tensor:
    """`weight` itself where its dtype is wide enough."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32))
