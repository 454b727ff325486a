"""Evaluates a model: forward passes over the evaluation sets, and means over all ranks."""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from ddpforge.data import Batches, MicroBatch, mix, seed_all, to_device
from ddpforge.errors import ExitCode, ForgeError, PeerFailed, UsageError
from ddpforge.interfaces import Callback, Compute, Pass, Replica, SampleColumns, SampleRNG, Task, Total, World
from ddpforge.ranks import heartbeat
from ddpforge.ranks.failures import exit_code_of
from ddpforge.ranks.signals import NoData, waiting_for_data
from ddpforge.training.callbacks import add_numbers
from ddpforge.training.checks import check_together
from ddpforge.training.consensus import EvaluationInterrupted, PeriodicCheck
from ddpforge.training.features import Feature, methods_of
from ddpforge.training.step import measure
from ddpforge.training.task_checks import CheckedTask, check_whole, naming_dataset
from ddpforge.training.totals import add, items_of, loss_total
from ddpforge.training.updates import finish_metrics, metric_name, reported_metrics, tasks_by_update

__all__ = ["Evaluator", "metric_prefix"]

log = logging.getLogger("ddpforge")

T = TypeVar("T")

_EVALUATION = 0xE7A1  # separates the seeds of evaluation from all other seeds
_CALLBACKS = -1  # in the seed of callbacks, in place of a batch number
_Result = tuple[MicroBatch, Any, tuple[Tensor, Any] | None]
"""A micro-batch, this rank's part of it, and its loss and outputs; None if another rank has the outputs."""
_COUNTED = "?counted"  # key of the items of a set on a rank
_WITHOUT = "?without"  # key of zeros for batches without a loss, which count


def metric_prefix(name: str) -> str:
    """Returns the prefix of an evaluation set's metrics: "eval/NAME/", or "eval/" for a set without a name."""
    return f"eval/{name}/" if name else "eval/"


class Evaluator:
    """Evaluates a replica on evaluation sets, on one rank, in step with the others: every sample counts once.

    `sets` holds this rank's batches of each set by name; a set without a name has "". Callbacks wrap an evaluation in
    their `evaluating`. An evaluation updates no weights and needs no optimizer.
    """

    def __init__(
        self,
        *,
        world: World,
        replica: Replica,
        task: Task,
        sets: Mapping[str, Batches],
        callbacks: Mapping[str, Callback],
        seed: int,
        features: Sequence[Feature] = (),
        looks: PeriodicCheck | None = None,
    ) -> None:
        self._features = features
        self.sets, self.callbacks = sets, callbacks
        self._world, self._replica, self._task = world, replica, task
        self._seed = seed
        self._looks = looks or PeriodicCheck()  # polls for a stop
        self.failed_together = False  # whether the newest evaluation failed and all ranks know it
        self._has_begun = False  # whether any batch was evaluated
        self._updates = {update: CheckedTask(one, "evaluation") for update, one in tasks_by_update(task).items()}

    def evaluate(self, step: int) -> dict[str, float]:
        """Returns the means over each set, for the weights after `step`; names begin with `prefix`. Collective.

        Raises UsageError without an evaluation set, and EvaluationInterrupted if ranks agree to stop. After any error,
        callbacks have restored the weights of training, and `failed_together` is True if no rank waits for another.
        """
        if not self.sets:
            raise UsageError("the recipe has no evaluation set: add [data.eval]")
        found: dict[str, float] = {}
        failure: Exception | None = None
        self._looks.restart()
        self._task.step_of_run = step
        with self.evaluating():
            try:
                for name, batches in self.sets.items():
                    means = self._means(name, batches.evaluation(), step)
                    found |= {f"{metric_prefix(name)}{metric}": value for metric, value in means.items()}
                for name, callback in self.callbacks.items():
                    seed_all(mix(self._seed, _EVALUATION, _CALLBACKS, self._world.dp_ranks.rank), self._world.device)
                    add_numbers(found, name, "while_evaluating", callback.while_evaluating(step), prefix="eval/")
            except Exception as error:
                failure = error  # raised after the block: callbacks end without an error, and restore the weights
        if failure:
            self.failed_together |= self._world.global_ranks.size == 1
            raise failure
        return found

    def try_first_batches(self) -> None:
        """Evaluates the first batch of each set, with its metrics, and drops the numbers: errors come before training.

        Collective. Callbacks are not called. Raises UsageError for a set that cannot be evaluated, and PeerFailed on
        the other ranks. A `finish` that refuses the values of so few samples is only logged.
        """
        if not self._replica.may_evaluate_first:
            return
        looks, self._looks = self._looks, PeriodicCheck()  # whose pace is that of whole evaluations
        try:
            self._try_sets()
        finally:
            self._looks, self._has_begun = looks, False

    def _try_sets(self) -> None:
        with self.evaluating(callbacks=False):
            for name, batches in self.sets.items():
                key = f"data.eval.{name}" if name else "data.eval"
                try:
                    first = self._together(key, partial(self._first_of, batches))
                    found = self._together(key, partial(self._quantities, partial(iter, first)))
                except EvaluationInterrupted:
                    return
                means = self._world.global_ranks.reduce_metrics(found, reported_metrics(self._task))
                del means[_COUNTED]
                try:
                    with warnings.catch_warnings(), naming_dataset(key):
                        warnings.simplefilter("ignore")
                        finish_metrics(self._task, means)
                except UsageError as error:
                    if not isinstance(error.__cause__, ValueError | ArithmeticError):
                        raise
                    if self._world.is_rank_zero:
                        log.warning("%s; this may be because of the few samples", error.message)

    def _first_of(self, batches: Batches) -> list[MicroBatch]:
        return list(islice(self._whole(batches.evaluation()), 1))

    def _quantities(self, micro_batches: Callable[[], Iterable[MicroBatch]]) -> dict[str, Total | SampleColumns]:
        """Returns the totals and rows of all updates by the names of metrics, and the number of items.

        `micro_batches` is called for each update.
        """
        quantities: dict[str, Total | SampleColumns] = {}
        counted: Any = 0.0
        for update in self._updates:
            found = self.quantities(micro_batches(), update)
            counted = sum((cast(Total, found[one]).count for one in ("loss", _WITHOUT) if one in found), counted)
            found.pop(_WITHOUT, None)
            quantities |= {metric_name(one, update): quantity for one, quantity in found.items()}
        counted = torch.tensor(counted) if isinstance(counted, float | int) else counted
        return {**quantities, _COUNTED: Total(counted, 1)}

    def _together(self, key: str, action: Callable[[], T]) -> T:
        """Returns the result of `action`, if it fails on no rank; else raises its error, which names `key`."""
        failure: Exception | None = None
        try:
            with naming_dataset(key):
                result = action()
        except ForgeError as error:
            failure, error.key = error, error.key or key
        except Exception as error:
            failure = error
        mine = None if failure is None else exit_code_of(failure)
        codes = self._world.global_ranks.all_gather_object(mine)
        if failure is not None:
            raise failure
        for rank, code in enumerate(codes):
            if code is not None:
                raise PeerFailed(code, f"a batch of [{key}] cannot be evaluated on rank {rank}")
        return result

    @contextmanager
    def evaluating(self, *, callbacks: bool = True) -> Iterator[None]:
        """Prepares forward passes inside for evaluation: its weights, evaluation mode, and no gradients."""
        heartbeat.beat(heartbeat.EVAL)
        self._replica.sync_buffers()
        self._replica.module.eval()
        self._task.evaluates = True
        try:
            with self._wrapped() if callbacks else nullcontext(), torch.no_grad():
                yield
        finally:
            self._task.evaluates = False
        self._replica.module.train()

    def _means(self, name: str, micro_batches: Iterable[MicroBatch], step: int) -> dict[str, float]:
        """Evaluates the set `name`; returns its means over all ranks, after the task's `finish`.

        Raises UsageError if no target of the set counts.
        """
        quantities = self._quantities(lambda: self._noted(micro_batches))
        own = {key: value for totals in methods_of(self._features, "totals") for key, value in totals().items()}
        means = self._world.global_ranks.reduce_metrics({**quantities, **own}, reported_metrics(self._task))
        for take in methods_of(self._features, "take"):
            take(means, step)
        if not means.pop(_COUNTED):
            self.failed_together = True
            raise UsageError(
                f"no target of [{'.'.join(('data', 'eval', *([name] if name else [])))}] counts: its loss is not a "
                "number",
                hints=["look at the targets of the dataset (`ddpforge data show`): all have the ignored value"],
            )
        return finish_metrics(self._task, means)

    def _noted(self, micro_batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Yields the same micro-batches, and passes each on to the features."""
        noting = methods_of(self._features, "after_draw")
        for micro in micro_batches:
            for note in noting:
                note(micro)
            yield micro

    def quantities(self, micro_batches: Iterable[MicroBatch], update: str = "") -> dict[str, Total | SampleColumns]:
        """Returns this rank's totals and rows, with the losses of `update`; padding samples do not count."""
        task = self._updates[update]

        def compute(module: nn.Module, one: Pass) -> tuple[Tensor, Any]:
            one.seed()
            task.task.batch_samples = one.samples
            try:
                loss, outputs = task.loss(module, one.batch)
            except Exception as error:
                check_together("failed_pass", error, module, one.batch, "")
                raise
            # Measured within the forward pass of the replica, which refuses reads of sharded weights.
            measured = measure(task, outputs, one.batch) if one.needs_outputs else {}
            has = self._task.evaluation_loss  # with "some", the loss of a padding pass is not of the dataset
            has_loss = loss is not None and (one.needs_outputs if has == "some" else has)
            return (loss, ("loss", measured)) if has_loss else (torch.zeros(()), (_WITHOUT, measured))

        found: dict[str, Total | SampleColumns] = {}
        results = self.results(self._whole(micro_batches), compute)
        for micro, _, result in results if self._has_begun else self._begun(results):
            if result is not None:  # otherwise another rank has the loss, and counts it
                loss, (name, measured) = result
                add(found, {name: loss_total(loss, items_of(self._task, micro)), **measured})
        return found

    def _begun(self, results: Iterator[_Result]) -> Iterator[_Result]:
        """Yields `results` after all ranks have computed the first one; raises on every rank if any rank failed.

        A loss that cannot be evaluated fails at the first result. Because all ranks raise together, they can still save
        the trained weights.
        """
        self._has_begun, failure = True, None
        first: list[_Result] = []
        try:
            first.append(next(results))
        except Exception as error:
            failure = error
        if any(self._world.global_ranks.all_gather_object(failure is not None)):
            self.failed_together = True
            raise failure or PeerFailed(ExitCode.FAILED, "the evaluation has failed on another rank")
        yield from chain(first, results)

    def _whole(self, micro_batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Yields each checked micro-batch; raises UsageError (`check_whole`), or EvaluationInterrupted without data."""
        source = iter(micro_batches)
        while True:
            try:
                with waiting_for_data:
                    micro = next(source)
            except StopIteration:
                return
            except NoData as error:
                raise EvaluationInterrupted from error
            check_whole(self._task, micro)
            yield micro

    def results(self, micro_batches: Iterable[MicroBatch], compute: Compute) -> Iterator[_Result]:
        """Runs forward passes: yields each micro-batch, this rank's part of it, and the result of `compute`.

        The result is None if another rank has it.
        """
        running: deque[tuple[MicroBatch, Any]] = deque()

        def passes() -> Iterator[Pass]:
            for number, micro in enumerate(micro_batches):
                heartbeat.beat(heartbeat.EVAL)
                batch = self._replica.local_batch(to_device(micro.data, self._world.device))
                running.append((micro, batch))
                yield Pass(
                    batch=batch,
                    samples=micro.samples or None,
                    seed=partial(self._seed_pass, number, micro),
                    needs_outputs=micro.samples > 0,
                )

        try:
            for result in self._replica.run_microbatches(passes(), compute, trains=False):
                yield *running.popleft(), result
                self._looks.after_part()
        finally:
            self._task.rng = SampleRNG()

    def _seed_pass(self, number: int, micro: MicroBatch) -> None:
        """Seeds the RNG of a pass: that of each sample by its place in the data, all others by the pass."""
        seed_all(mix(self._seed, _EVALUATION, number, self._world.dp_ranks.rank), self._world.device)
        places = [] if micro.places is None else micro.places.tolist()
        self._task.rng = SampleRNG([mix(self._seed, _EVALUATION, place) for place in places])

    @property
    def is_cut(self) -> bool:
        """True if ranks share the positions of each sample, so that no rank has a whole sample."""
        return type(self._replica).local_batch is not Replica.local_batch

    @contextmanager
    def _wrapped(self) -> Iterator[None]:
        with ExitStack() as observed, ExitStack() as stack:
            with self._replica.weights.callback_guard():
                for callback in self.callbacks.values():
                    stack.enter_context(callback.evaluating())
            try:
                yield
            finally:
                observed.enter_context(
                    self._replica.weights.callback_guard()
                )  # while the callbacks leave their contexts
