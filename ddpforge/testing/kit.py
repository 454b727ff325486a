"""Runs the checks of components and returns their results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType

from ddpforge.errors import ForgeError
from ddpforge.testing import checks as checks  # registers them
from ddpforge.testing.cases import Case, find_cases
from ddpforge.testing.multi_rank_runs import MultiRankRuns
from ddpforge.testing.registered_checks import Check, checks_of
from ddpforge.testing.report import Breach, KitInterrupted, NotApplicable, Result, place_of

__all__ = ["Kit", "conform"]

_FIRST = ("importable", "builds", "takes-a-batch")  # if one of these fails, the other checks are skipped


class Kit:
    """Context manager that runs the checks of some components; `quick` skips checks that start processes."""

    def __init__(
        self, cases: Sequence[Case], *, quick: bool = False, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self.cases, self.quick = list(cases), quick
        self._worlds = MultiRankRuns(self.cases, say)
        self._broken: dict[int, str] = {}  # id of a case to its failed check in _FIRST

    def __enter__(self) -> Kit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worlds.close()

    def pairs(self) -> Iterator[tuple[Case, Check]]:
        """Yields each component with each check of its kind."""
        for case in self.cases:
            for check in checks_of(case.kind):
                if not (check.starts_ranks and self.quick):
                    yield case, check

    def run(self) -> Iterator[Result]:
        """Runs all checks, and yields each result as soon as it is known."""
        for case, check in self.pairs():
            yield self.result(case, check)

    def result(self, case: Case, check: Check) -> Result:
        """Runs one check of one component and returns its result."""
        began = time.monotonic()
        verdict = partial(Result, case.kind, case.label, check.name)
        if reason := case.skipped(check.name):
            return verdict("skipped", found=f"by its settings: {reason}")
        if earlier := self._broken.get(id(case)):
            return verdict("skipped", found=f"not possible: {earlier} failed")
        try:
            check.function(case, self._worlds)
        except NotApplicable as reason:
            return verdict("skipped", found=str(reason))
        except KitInterrupted:
            raise
        except Breach as breach:
            failure = breach
        except Exception as error:
            expected = "the component to keep the contract of its kind"
            message = error.message if isinstance(error, ForgeError) else str(error)
            where = place_of(error, case.component)
            hints = getattr(error, "hints", ())
            failure = Breach(expected, f"{type(error).__name__}: {message}", where=where, hints=hints)
        else:
            return verdict("passed", time.monotonic() - began)
        if check.name in _FIRST:
            self._broken[id(case)] = check.name
        return verdict(
            "failed",
            time.monotonic() - began,
            expected=failure.expected,
            found=failure.found,
            where=failure.where or case.where,
            hints=failure.hints,
        )


def conform(target: str, *, kind: str | None = None, names: Sequence[str] = (), quick: bool = False) -> None:
    """Raises AssertionError with all failures of the components in a distribution or file; for tests of plugins."""
    with Kit(find_cases(target, kind=kind, names=tuple(names)), quick=quick) as kit:
        failed = [result for result in kit.run() if result.status == "failed"]
    texts = [f"{one.kind} {one.name}: {one.check}\n{one.text()}" for one in failed]
    if texts:
        raise AssertionError("\n\n".join(texts))
