"""Opens a recipe for steps that leave nothing behind: no run's folder, no tracker, no checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ddpforge.app.attempt import build_parts, on_every_rank
from ddpforge.app.run import join_ranks, load_parts, peers_of
from ddpforge.checkpoint.manager import Checkpoints
from ddpforge.checkpoint.reader import Reader
from ddpforge.data import Batches, MicroBatch
from ddpforge.interfaces import StepInfo, Tracker, World
from ddpforge.launchers.srun import adopt_slurm
from ddpforge.ranks.arithmetic import told_of_determinism
from ddpforge.ranks.join import leave
from ddpforge.ranks.signals import training_begins
from ddpforge.ranks.writers import Peers
from ddpforge.training.assemble import assemble
from ddpforge.training.fingerprint import compare_built
from ddpforge.training.loop import Trainer
from ddpforge.training.memory import explained
from ddpforge.training.parts import Parts
from ddpforge.training.progress import Progress
from ddpforge.training.saving import Saving
from ddpforge.watchdog.watch import beginning

__all__ = ["FirstBatches", "Repeated", "Trial", "opened", "without_the_rest"]


@dataclass(frozen=True)
class Trial:
    """A trainer at step 0 that keeps nothing, and what it is made of."""

    parts: Parts
    world: World
    trainer: Trainer

    def steps(self, most: int) -> Iterator[StepInfo]:
        """Trains so many steps at most."""
        source = self.trainer.steps()
        try:
            yield from islice(source, most)
        finally:
            source.close()  # type: ignore[attr-defined]


@contextmanager
def opened(
    source: str | Path, *, sets: Sequence[str] = (), change: Callable[[Parts], None] = lambda parts: None
) -> Iterator[Trial]:
    """The trial of a recipe, on every rank; `change` may put other parts in the place of those that were built.

    Raises ForgeError as a run does, OutOfMemory where memory is full.
    """
    adopt_slurm()
    parts = load_parts(source, sets)
    world = join_ranks(parts)
    with beginning():
        peers = peers_of(parts.recipe, world)
        on_every_rank(peers, lambda: build_parts(parts, world, rehearses=True))
        compare_built(parts, world)
    change(parts)
    training_begins()  # as of a run: a request to stop ends the trial with a step
    try:
        with TemporaryDirectory(prefix="ddpforge-trial-") as folder, ExitStack() as life:
            trial = Trial(parts, world, _trainer(parts, world, peers, Path(folder), life))
            yield trial
    except (RuntimeError, MemoryError) as error:
        if (told := told_of_determinism(explained(error, parts.recipe, world.data.size))) is error:
            raise
        raise told from error
    trial.trainer.replica.close()
    leave(world)


def _trainer(parts: Parts, world: World, peers: Peers, folder: Path, life: ExitStack) -> Trainer:
    settings = parts.recipe.checkpoint
    checkpoints = Checkpoints(folder, settings, peers=peers, ranks=world.all)
    trainer = assemble(parts, world, checkpoints, Tracker(), folder=folder, life=life, init_from=settings.init_from)
    trainer.saving = _NotSaving()
    return trainer


class _NotSaving(Saving):
    """Keeps nothing; only which step it would have kept."""

    def __init__(self) -> None:
        self.step = None

    @property
    def ready(self) -> bool:
        """Nothing is on its way."""
        return False

    def save(self, progress: Progress, metrics: Mapping[str, float], *, last: bool) -> None:
        """Notes the step."""
        self.step = progress.step

    def reserve(self) -> None:
        """Nothing is copied."""

    def before_update(self) -> None:
        """Nothing is copied."""

    def settle(self, *, last: bool = False) -> None:
        """There is nothing to wait for."""

    def newest(self) -> Reader | None:
        """There is none."""
        return None

    def is_best(self, metrics: Mapping[str, float]) -> bool:
        """Nothing is kept for being the best."""
        return False


# ---------------------------------------------------------------------------------------------- other parts
def without_the_rest(parts: Parts, factor: Callable[[int], float]) -> None:
    """Leaves the recipe's callbacks and evaluations out, and multiplies its learning rates with `factor` of a step."""
    parts.callbacks, parts.evaluation, parts.schedules = {}, {}, {}
    parts.built.schedule = factor


class _Instead:
    """Stands for a rank's batches; what it does not have itself is theirs."""

    def __init__(self, batches: Batches, most: int) -> None:
        self._batches, self._most = batches, most

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


class FirstBatches(_Instead):
    """The first `most` batches of an evaluation set; `seen` counts them."""

    seen = 0

    def evaluation(self) -> Iterator[MicroBatch]:
        """Some of the samples, once."""
        self.seen = 0
        for micro in islice(self._batches.evaluation(), self._most):
            self.seen += 1
            yield micro


class Repeated(_Instead):
    """The first `most` global batches of training, again and again."""

    def training(self, start: int) -> Iterator[MicroBatch]:
        """Without end; `start` is 0."""
        source = self._batches.training(0)
        kept = [list(_global_batch(source)) for _ in range(self._most)]
        for step in count(start):
            yield from kept[step % self._most]


def _global_batch(source: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
    """This rank's micro-batches of the next global batch."""
    for micro in source:
        yield micro
        if micro.last:
            return
