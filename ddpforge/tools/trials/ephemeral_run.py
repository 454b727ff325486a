"""Opens a recipe for steps that leave nothing behind: no run folder, no tracker, no checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ddpforge.api import (
    Batches,
    CheckpointReader,
    Checkpoints,
    Dealt,
    MicroBatch,
    Problems,
    Trainer,
    WriterGroup,
    assemble,
    build_alike,
    check_chosen,
    choose,
    explain_determinism_error,
    explain_oom,
    join,
    leave,
    peers_of,
    training_begins,
    world_size,
)
from ddpforge.components.registry import Registry
from ddpforge.interfaces import StepInfo, Tracker, World
from ddpforge.ranks.environment import environment, raising_peer_failures
from ddpforge.recipe import load_recipe
from ddpforge.training.checkpoint_saver import CheckpointSaver
from ddpforge.training.progress import Progress

__all__ = ["EphemeralRun", "FirstBatches", "RepeatedBatches", "open_ephemeral", "without_the_rest"]


@dataclass(frozen=True)
class EphemeralRun:
    """Trainer at step 0 that keeps nothing, with its parts."""

    dealt: Dealt
    world: World
    trainer: Trainer

    def steps(self, most: int) -> Iterator[StepInfo]:
        """Trains at most `most` steps."""
        source = self.trainer.steps()
        try:
            yield from islice(source, most)
        finally:
            source.close()  # type: ignore[attr-defined]


@contextmanager
def open_ephemeral(
    source: str | Path, *, sets: Sequence[str] = (), change: Callable[[Dealt], Dealt] = lambda dealt: dealt
) -> Iterator[EphemeralRun]:
    """Opens the trial of a recipe, on every rank; `change` may replace components that were built.

    Raises ForgeError as a run does, OutOfMemory if memory is full.
    """
    environment().export_variables()
    registry = Registry.installed()
    loaded = load_recipe(source, sets=sets, registry=registry)
    problems = Problems(loaded)
    chosen = choose(loaded, registry, problems, ranks=world_size())
    check_chosen(chosen, problems)
    world = join(chosen)
    with raising_peer_failures():
        peers = peers_of(chosen.recipe, world)
        built, _ = build_alike(chosen, world, peers, problems, samples=True)
    dealt = change(built)
    training_begins()  # as in a run: a request to stop ends the trial after a step
    try:
        with TemporaryDirectory(prefix="ddpforge-trial-") as folder, ExitStack() as life:
            trial = EphemeralRun(dealt, world, _trainer(dealt, world, peers, Path(folder), life))
            yield trial
    except (RuntimeError, MemoryError) as error:
        if (explained := explain_determinism_error(explain_oom(error, chosen.recipe, world.dp_ranks.size))) is error:
            raise
        raise explained from error
    trial.trainer.replica.close()
    leave(world)


def _trainer(dealt: Dealt, world: World, peers: WriterGroup, folder: Path, life: ExitStack) -> Trainer:
    settings = dealt.recipe.checkpoint
    checkpoints = Checkpoints(folder, settings, peers=peers, ranks=world.global_ranks)
    return assemble(
        *(dealt, world, checkpoints, Tracker()),
        folder=folder,
        life=life,
        init_from=settings.init_from,
        saving=_NotSaving(),
    )


class _NotSaving(CheckpointSaver):
    """Saves nothing; records only the step that would have been saved."""

    def __init__(self) -> None:
        self.step, self.copying = None, False

    @property
    def ready(self) -> bool:
        """Returns False: nothing is being written."""
        return False

    def save(self, progress: Progress, metrics: Mapping[str, float], *, last: bool) -> None:
        """Records the step."""
        self.step = progress.step

    def reserve(self) -> None:
        """Does nothing, because nothing is copied."""

    def before_update(self) -> None:
        """Does nothing, because nothing is copied."""

    def wait_for_pending(self, *, last: bool = False) -> None:
        """Does nothing, because nothing is being written."""

    def newest(self) -> CheckpointReader | None:
        """Returns None: there is no checkpoint."""
        return None

    def is_best(self, metrics: Mapping[str, float]) -> bool:
        """Returns False: no checkpoint is the best."""
        return False


# ---------------------------------------------------------------------------------------------- other parts
def without_the_rest(dealt: Dealt, factor: Callable[[int], float]) -> Dealt:
    """Returns the stage without callbacks and evaluations; `factor` of a step multiplies the learning rates."""
    return replace(dealt, callbacks={}, evaluation={}, schedules={"": factor}, value_schedules={})


class _Instead:
    """Replaces a rank's batches; attributes that it does not have are those of the batches."""

    def __init__(self, batches: Batches, most: int) -> None:
        self._batches, self._most = batches, most

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


class FirstBatches(_Instead):
    """First `most` batches of an evaluation set; `seen` counts them."""

    seen = 0

    def evaluation(self) -> Iterator[MicroBatch]:
        """Yields the first batches once."""
        self.seen = 0
        for micro in islice(self._batches.evaluation(), self._most):
            self.seen += 1
            yield micro


class RepeatedBatches(_Instead):
    """First `most` global batches of training, repeated without end."""

    def training(self, start: int) -> Iterator[MicroBatch]:
        """Yields this rank's micro-batches without end; `start` is 0."""
        source = self._batches.training(0)
        kept = [list(_global_batch(source)) for _ in range(self._most)]
        for step in count(start):
            yield from kept[step % self._most]


def _global_batch(source: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
    """Yields this rank's micro-batches of the next global batch."""
    for micro in source:
        yield micro
        if micro.last:
            return
