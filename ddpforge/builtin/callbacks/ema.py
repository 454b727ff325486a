"""An exponential moving average of the weights, which evaluates better than the weights themselves."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ddpforge.errors import CheckpointError
from ddpforge.interfaces import Callback, Part, RunContext, StepInfo, read_all

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger("ddpforge")


class EMA(Callback):
    """Keeps `average = decay * average + (1 - decay) * weight` for every trainable parameter.

    Averages are held in fp32 at least. They start at the initial weights, or, where a run is resumed that kept
    none, at the weights after its next step. Buffers are the live model's. A parameter that is frozen at the
    start is left out: its average is itself. Where weights are sharded, the averages are too.
    """

    def __init__(
        self,
        decay: Annotated[float, Field(gt=0, lt=1, description="How much of the old average an update keeps.")],
        every: Annotated[int, Field(ge=1, le=2**31, description="Optimizer steps per update.")] = 1,
        evaluate: Annotated[bool, Field(description="Evaluate the averaged weights, not the live ones.")] = True,
    ) -> None:
        self._decay = decay
        self._every = every
        self._evaluate = evaluate

    def on_start(self, run: RunContext) -> None:
        """Copies the initial weights: as much of each as this rank holds."""
        from torch.optim.swa_utils import get_ema_multi_avg_fn

        self._update = get_ema_multi_avg_fn(self._decay)  # type: ignore[no-untyped-call]
        self._weights = run.weights
        self._live = [part.tensor for part in run.weights.parts().values()]
        self._averages = [_at_least_fp32(tensor).clone() for tensor in self._live]
        self._begun = False

    def on_step(self, info: StepInfo) -> None:
        """Moves the averages towards the weights, in one fused operation."""
        if self._begun and info.step % self._every:
            return
        if not self._begun and info.step > 1:
            logger.info("ema: the checkpoint holds no averages; they start at step %d", info.step)
            _copy(self._averages, self._live)
        self._begun = True
        if info.step % self._every == 0:
            self._update(self._averages, [_at_least_fp32(tensor) for tensor in self._live], 0)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Holds the averages in the model's own parameters; costs one more copy of the weights meanwhile."""
        if self._evaluate and not self._begun:  # the averages are still those of weights that nobody trained
            logger.warning("ema: there are no averages yet; this evaluation is of the weights themselves")
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
        self._weights.changed()

    def state(self) -> Mapping[str, Part]:
        """The averages by parameter name: as much of each as this rank holds."""
        return {name: part.of(average) for (name, part), average in self._pairs()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from saved averages; raises CheckpointError unless they are of exactly this model."""
        others = self._weights.elsewhere()
        expected = {name: part.shape for name, part in self._weights.parts().items()}
        found = {name: tuple(average.shape) for name, average in state.items() if name not in others}
        if found != expected:
            names = sorted(name for name in expected | found if expected.get(name) != found.get(name))
            raise CheckpointError(
                f"the averaged weights in the checkpoint are not of this model: {', '.join(names)} differ",
                hints=["resume with the model and the ema callback that the checkpoint was made with"],
            )
        read_all((state[name], part.region, average) for (name, part), average in self._pairs())
        self._begun = True

    def _pairs(self) -> Iterator[tuple[tuple[str, Part], Tensor]]:
        return zip(self._weights.parts().items(), self._averages, strict=True)


def _copy(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    import torch

    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


def _at_least_fp32(weight: Tensor) -> Tensor:
    """`weight` itself where its dtype is wide enough."""
    import torch

    return weight.to(torch.promote_types(weight.dtype, torch.float32))
