"""Process of one trainer: imports it once, forks ranks for each case, and prints one line of JSON per verdict.

    python -m museum.worker TRAINER CASE...

Each case has its own processes and folder: a crash, a hang or a changed setting of one does not reach another.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from museum import oracle
from museum.case import Case, all_cases
from museum.trainers import TRAINERS
from museum.training import SEEN, NotApplicableError, Result, Training
from museum.verdict import Failure, Verdict, compare, of_failure

__all__ = ["judge", "main"]

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "ACCELERATE_USE_CPU": "true",
    "DS_ACCELERATOR": "cpu",
    "WANDB_MODE": "disabled",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "NO_COLOR": "1",
    "MASTER_ADDR": "127.0.0.1",
}


def judge(case: Case, trainer: str) -> Verdict:
    """Tries a case on a trainer in new processes, and compares."""
    folder = Path(tempfile.mkdtemp(prefix="museum-"))
    try:
        if case.trials:
            found = _in_ranks(
                lambda _: case.trials[trainer](folder), case.ranks, folder, "trial", trainer, case.seconds
            )
            assert case.right is not None
            return found if isinstance(found, Verdict) else compare(found[0], case.right(), case.tolerance)
        assert case.training is not None
        found = _train(case.training, trainer, folder / "a", case.seconds)
        if isinstance(found, Verdict):
            return found
        if case.measure is not None:
            return compare({"measured": case.measure(found)}, {"measured": case.expected}, case.tolerance)
        if case.same_as is not None:
            expected = _train(case.same_as, trainer, folder / "b", case.seconds)
            if isinstance(expected, Verdict):
                return expected
            right = expected[0]
        else:
            right = asdict((case.oracle or oracle.train)(case.training))
        return _compare_results(case, found, right)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _compare_results(case: Case, found: list[Any], right: Mapping[str, Any]) -> Verdict:
    worst = Verdict("right", "0")
    for number, one in enumerate(found):
        if number and not one["weights"]:
            continue  # a rank without the whole weights
        for check in case.checks:
            if number and check not in ("weights", "ranks"):
                continue  # rank 0 reports
            if check == "ranks":
                verdict = compare({"weights": one["weights"]}, {"weights": found[0]["weights"]}, 0.0)
                if verdict.verdict != "right":
                    return replace(verdict, text=f"rank {number}: {verdict.text}")
                continue
            verdict = compare({check: one[check]}, {check: right[check]}, case.tolerance)
            if verdict.verdict != "right":
                return replace(verdict, text=f"rank {number}: {verdict.text}" if number else verdict.text)
            worst = max(worst, verdict, key=lambda each: float(each.text))
    return worst


def _train(training: Training, trainer: str, folder: Path, seconds: float) -> list[Any] | Verdict:
    folder.mkdir()
    adapter = TRAINERS[trainer].adapter()
    phases = ["first", "rest"] if training.stop else ["whole"]
    found: list[Any] | Verdict = []
    for phase in phases:
        given = training.second() if phase == "rest" else training
        if phase == "rest" and training.between:
            training.between(folder)

        def work(_: int, given: Training = given, phase: str = phase) -> dict[str, Any]:
            result: Result = adapter.train(given, folder, phase)
            result.extra.setdefault("seen", SEEN)
            return asdict(result)

        found = _in_ranks(work, given.ranks, folder, phase, trainer, seconds)
        if isinstance(found, Verdict):
            return found
    return found


def _in_ranks(
    work: Callable[[int], Any], ranks: int, folder: Path, phase: str, trainer: str, seconds: float
) -> list[Any] | Verdict:
    """Returns the answers of `ranks` new processes, or a verdict if one fails."""
    from ddpforge.testing.ranks import reserved_port

    children = {}
    with reserved_port() as port:
        for rank in range(ranks):
            child = os.fork()
            if not child:
                _be_rank(work, rank, ranks, port, folder, phase, trainer)
            children[child] = rank
        late = _wait(children, folder, phase, seconds)
    answers = []
    failures = []
    for rank in range(ranks):
        path = folder / f"{phase}-{rank}.json"
        answer = json.loads(path.read_text()) if path.exists() else None
        if answer is not None and "failure" in answer:
            failures.append(Failure(**answer["failure"]))
        elif answer is not None:
            answers.append(answer["answer"])
            _import(answer["imported"])
    if failures:
        order = sorted(failures, key=lambda one: (not one.not_applicable, not one.on_purpose))
        return of_failure(order[0])
    if late:
        return Verdict("crashes", f"no end within {seconds:.0f} s")
    if len(answers) < ranks:
        return Verdict("crashes", "a process ended without a result")
    return answers


def _be_rank(
    work: Callable[[int], Any], rank: int, ranks: int, port: int, folder: Path, phase: str, trainer: str
) -> None:
    """Runs a rank; never returns."""
    with suppress(BaseException):
        os.setpgid(0, 0)
        world = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0,
            "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "museum", "GROUP_WORLD_SIZE": 1, "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": ranks, "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0,
        }  # fmt: skip
        if ranks > 1 or trainer == "zero":
            os.environ.update({name: str(value) for name, value in world.items()})
        output = os.open(folder / f"output-{phase}-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        path = folder / f"{phase}-{rank}.json"
        os.chdir(folder)
        try:
            from museum.trainers import common

            common.RATES.clear()
            SEEN.clear()
            before = set(sys.modules)
            answer: dict[str, Any] = {"answer": work(rank)}
            answer["imported"] = sorted(set(sys.modules) - before)
        except BaseException as error:
            import traceback

            traceback.print_exc()
            answer = {"failure": asdict(Failure.of(error, trainer))}
        _write(path, answer)
        _leave(ranks)
    os._exit(0)


def _import(names: list[str]) -> None:
    """Imports what a rank had to import, so that the next ones need not."""
    for name in names:
        if name not in sys.modules and name.partition(".")[0] not in ("__main__", "museum"):
            with suppress(BaseException):
                import_module(name)


def _write(path: Path, answer: Any) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(answer, default=str))
    new.rename(path)


def _leave(ranks: int) -> None:
    """Leaves the process group as scripts do."""
    import torch.distributed as dist

    sys.stdout.flush()
    sys.stderr.flush()
    if ranks > 1 and dist.is_initialized():
        time.sleep(0.1)  # the others may still read from this rank


def _wait(children: dict[int, int], folder: Path, phase: str, seconds: float) -> bool:
    """Waits for all ranks; ends all of them a while after one has failed. Returns True if some did not end."""
    end, waiting, late = time.monotonic() + seconds, dict(children), False
    while waiting:
        for child in list(waiting):
            if os.waitpid(child, os.WNOHANG)[0]:
                rank = waiting.pop(child)
                answer = folder / f"{phase}-{rank}.json"
                if not answer.exists() or "failure" in json.loads(answer.read_text()):
                    end = min(end, time.monotonic() + 10)
        if waiting and time.monotonic() > end:
            late = True
            for child in waiting:
                with suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
            break
        time.sleep(0.02)
    return late


def main(trainer: str, *names: str) -> None:
    """Judges the cases in this order, and prints a line of JSON for each."""
    os.environ.update(_ENVIRONMENT)
    out = os.dup(1)
    os.dup2(2, 1)  # imports of libraries print
    import torch

    torch.set_num_threads(1)
    for module in TRAINERS[trainer].preloads:
        with suppress(ImportError):
            import_module(module)
    from museum.trainers.common import watch_rates

    watch_rates()
    cases = all_cases()
    for name in names:
        if trainer not in cases[name].tried_by():
            continue
        began = time.monotonic()
        try:
            verdict = judge(cases[name], trainer)
        except NotApplicableError as error:
            verdict = Verdict("not applicable", str(error))
        row = {"case": name, "trainer": trainer, **verdict.as_dict(), "seconds": round(time.monotonic() - began, 1)}
        os.write(out, (json.dumps(row) + "\n").encode())


if __name__ == "__main__":
    main(*sys.argv[1:])

__all__ += ["Result"]
