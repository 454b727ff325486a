"""Evaluates a model: forward passes over the evaluation sets, and means over all ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from ddpforge.data import Batches, MicroBatch, mix, seed_all, to_device
from ddpforge.errors import ExitCode, PeerFailed, UsageError
from ddpforge.interfaces import Callback, Compute, Draws, Pass, Replica, Rows, Task, Total, World
from ddpforge.ranks import phases
from ddpforge.ranks.signals import NoData, waiting_for_data
from ddpforge.training.callbacks import add_numbers
from ddpforge.training.consensus import Interrupted, Looks
from ddpforge.training.fingerprint import Fingerprint
from ddpforge.training.step import measure
from ddpforge.training.task_checks import CheckedTask, check_whole
from ddpforge.training.totals import add, items_of, loss_total
from ddpforge.training.turns import finished, of_turn, of_turns, reports_of

__all__ = ["Evaluator", "prefix"]

_EVALUATION = 0xE7A1  # keeps the random numbers of evaluation apart from all others
_CALLBACKS = -1  # stands where a batch has its number
_Result = tuple[MicroBatch, Any, tuple[Tensor, Any] | None]
"""A micro-batch, the part of it that is this rank's, and its loss and outputs; None where another rank has those."""
_COUNTED = "?counted"  # the items of a set, on a rank


def prefix(name: str) -> str:
    """The prefix of an evaluation set's metrics: "eval/NAME/", or "eval/" for the one that has no name."""
    return f"eval/{name}/" if name else "eval/"


class Evaluator:
    """Evaluates a replica on evaluation sets, on one rank, in step with the others: every sample counts once.

    `sets` holds this rank's batches of each by name; a set that is alone has the name "". Callbacks wrap an evaluation
    in their `evaluating`. Nothing is updated, and no optimizer is needed.
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
    ) -> None:
        self.sets, self.callbacks = sets, callbacks
        self._world, self._replica, self._task = world, replica, task
        self._seed = seed
        self.looks = Looks()  # whether to continue
        self.failed_together = False  # whether all ranks know that the newest evaluation has failed
        self._has_begun = False  # whether a batch has ever been evaluated
        self._turns = {turn: CheckedTask(one, "evaluation") for turn, one in of_turns(task).items()}

    def evaluate(self, step: int) -> dict[str, float]:
        """Means over each set, as of the weights after `step`; called on every rank. `prefix` begins their names.

        Raises Interrupted where `looks` finds that ranks are to stop. Whatever else it raises, callbacks have given
        back the weights that they evaluate with, and `failed_together` is true if no rank waits for another.
        """
        if not self.sets:
            raise UsageError("the recipe has no [data.eval] to evaluate on")
        found: dict[str, float] = {}
        failure: Exception | None = None
        self.looks.restart()
        with self.evaluating():
            try:
                for name, batches in self.sets.items():
                    means = self._means(name, batches.evaluation(), step)
                    found |= {f"{prefix(name)}{metric}": value for metric, value in means.items()}
                for name, callback in self.callbacks.items():
                    self._ask(name, callback, step, found)
            except Exception as error:
                failure = error  # callbacks are left as if all went well: they give weights back
        if failure:
            self.failed_together |= self._world.all.size == 1
            raise failure
        return found

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Lets forward passes inside be those of an evaluation: its weights, its mode, and no gradients."""
        phases.mark(phases.EVAL)
        self._replica.sync_buffers()
        self._replica.module.eval()
        with self._wrapped(), torch.no_grad():
            yield
        self._replica.module.train()

    def _ask(self, name: str, callback: Callback, step: int, found: dict[str, float]) -> None:
        """Adds to `found` what a callback measures of the weights that are evaluated."""
        seed_all(mix(self._seed, _EVALUATION, _CALLBACKS, self._world.data.rank), self._world.device)
        add_numbers(found, name, "while_evaluating", callback.while_evaluating(step), prefix="eval/")

    def _means(self, name: str, micro_batches: Iterable[MicroBatch], step: int) -> dict[str, float]:
        """Evaluates the set `name`; returns its means over all ranks, finished by the task.

        Raises UsageError for a set in which no target counts, as a mean over none is not a number.
        """
        read = Fingerprint()
        quantities: dict[str, Total | Rows] = {}
        counted: Tensor | float = 0.0
        for turn in self._turns:
            found = self.quantities(read.noted(micro_batches), turn)
            if "loss" in found:
                counted = counted + cast(Total, found["loss"]).count
            quantities |= {of_turn(one, turn): quantity for one, quantity in found.items()}
        size = {_COUNTED: Total(torch.as_tensor(counted, dtype=torch.float64), 1)}
        means = self._world.all.mean({**quantities, **size, **read.totals()}, reports_of(self._task))
        read.refuse_another(means, step=step)
        if not means.pop(_COUNTED):
            self.failed_together = True
            raise UsageError(
                f"no target of [{'.'.join(('data', 'eval', *([name] if name else [])))}] counts: its loss is not a "
                "number",
                hints=["look at the targets that the dataset gives (`ddpforge data show`): all are the ignored one"],
            )
        return finished(self._task, means)

    def quantities(self, micro_batches: Iterable[MicroBatch], turn: str = "") -> dict[str, Total | Rows]:
        """This rank's sums and counts, and rows, with the losses of a turn; stand-ins at the end count nothing."""
        task = self._turns[turn]

        def compute(module: nn.Module, one: Pass) -> tuple[Tensor, Any]:
            one.seed()
            return task.loss(module, one.batch)

        found: dict[str, Total | Rows] = {}
        results = self.results(self._whole(micro_batches), compute)
        for micro, batch, result in results if self._has_begun else self._begun(results):
            if result is not None:  # else another rank has the loss, and counts it
                loss, outputs = result
                measured = measure(task, outputs, batch) if micro.samples else {}
                add(found, {"loss": loss_total(loss, items_of(self._task, micro)), **measured})
        return found

    def _begun(self, results: Iterator[_Result]) -> Iterator[_Result]:
        """Yields `results`, once all ranks know that none has failed at the first of all.

        A loss that cannot be evaluated fails there, on all ranks, after all that has been trained so far. Where one has
        failed, every rank raises: what was trained can still be saved.
        """
        self._has_begun, failure = True, None
        first: list[_Result] = []
        try:
            first.append(next(results))
        except Exception as error:
            failure = error
        if any(self._world.all.everyone(failure is not None)):
            self.failed_together = True
            raise failure or PeerFailed(ExitCode.FAILED, "the evaluation has failed on another rank")
        yield from chain(first, results)

    def _whole(self, micro_batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """The micro-batches, each looked at when its turn comes; raises what `check_whole` raises."""
        source = iter(micro_batches)
        while True:
            try:
                with waiting_for_data:
                    micro = next(source)
            except StopIteration:
                return
            except NoData as error:
                raise Interrupted from error
            check_whole(self._task, micro)
            yield micro

    def results(self, micro_batches: Iterable[MicroBatch], compute: Compute) -> Iterator[_Result]:
        """Runs forward passes: yields each micro-batch, what of it is this rank's, and what `compute` made of that.

        Where another rank has that, it is None.
        """
        running: deque[tuple[MicroBatch, Any]] = deque()

        def passes() -> Iterator[Pass]:
            for number, micro in enumerate(micro_batches):
                phases.mark(phases.EVAL)
                batch = self._replica.own_part(to_device(micro.data, self._world.device))
                running.append((micro, batch))
                yield Pass(batch=batch, seed=partial(self._seed_pass, number, micro))

        try:
            for result in self._replica.passes(passes(), compute, trains=False):
                yield *running.popleft(), result
                self.looks.after_part()
        finally:
            self._task.draws = Draws()

    def _seed_pass(self, number: int, micro: MicroBatch) -> None:
        """Seeds what a pass draws: of each sample by its place, of all else by the pass."""
        seed_all(mix(self._seed, _EVALUATION, number, self._world.data.rank), self._world.device)
        places = [] if micro.places is None else micro.places.tolist()
        self._task.draws = Draws([mix(self._seed, _EVALUATION, place) for place in places])

    @property
    def is_cut(self) -> bool:
        """True if ranks share the samples of a batch, so that none has a whole one."""
        return type(self._replica).own_part is not Replica.own_part

    @contextmanager
    def _wrapped(self) -> Iterator[None]:
        with ExitStack() as observed, ExitStack() as stack:
            with self._replica.weights.observing():
                for callback in self.callbacks.values():
                    stack.enter_context(callback.evaluating())
            try:
                yield
            finally:
                observed.enter_context(self._replica.weights.observing())  # which the callbacks leave within
