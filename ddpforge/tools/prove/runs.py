"""Runs of a script under changes, in processes that one process forks, and the numbers that they leave."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from ddpforge.errors import UsageError
from ddpforge.tools.prove.changes import ScriptChange, trainer_of
from ddpforge.tools.prove.observed import Order

__all__ = ["Observed", "Options", "ScriptRuns"]

_OUTPUT = 30  # lines of a failed script to show
_NOT_INHERITED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Observed:
    """Numbers of a run, by step; gradients and updates by parameter.

    Attributes:
        losses: Sums over the backward passes of a step, on average over the ranks.
        norms: Norms of all gradients, before clipping.
        updates: Norms of the changes of the weights.
        resolution: One unit in the last place of the weights, relative to these norms.
        samples: Fingerprints of the samples of a step, of one rank after the other.
        modes: The modules in evaluation mode, the first one for each forward pass of training.
        passes: Number of backward passes of the first step on rank 0.
        batches: Batch sizes that the script set.
        counts: Counts of events, by their name in `Counts`.
        dtype: Dtype of autocast, or empty.
    """

    gradients: Sequence[Mapping[str, Tensor]]
    losses: Sequence[float] = ()
    norms: Sequence[float] = ()
    updates: Sequence[Mapping[str, float]] = ()
    resolution: Sequence[Mapping[str, float]] = ()
    samples: Sequence[Sequence[str]] = ()
    modes: Sequence[Sequence[str]] = ()
    passes: int = 1
    batches: Sequence[int] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    dtype: str = ""

    @classmethod
    def read(cls, folder: Path, ranks: int) -> Observed:
        """Reads the files of a run."""
        each = [json.loads((folder / f"steps-{rank}.json").read_text()) for rank in range(ranks)]
        files = sorted(folder.glob("gradients-*.safetensors"), key=lambda file: int(file.stem.partition("-")[2]))
        rows = [one["steps"] for one in each]
        steps = rows[0][: len(files)]

        def all_ranks(key: str, step: int) -> list[Any]:
            return [one for rank in rows if step < len(rank) for one in rank[step][key]]

        return cls(
            gradients=[load_file(file) for file in files],
            losses=[sum(all_ranks("losses", step)) / ranks for step in range(len(steps))],
            norms=[one["norm"] for one in steps],
            updates=[one["updates"] for one in steps],
            resolution=[one["resolution"] for one in steps],
            samples=[all_ranks("samples", step) for step in range(len(steps))],
            modes=[one["modes"] for one in steps],
            passes=len(steps[0]["losses"]) if steps else 0,
            batches=each[0]["batches"],
            counts=each[0]["counts"],
            dtype=each[0]["dtype"],
        )


@dataclass(frozen=True)
class Options:
    """Options of a script itself, as texts with places for values; empty if it has none.

    Attributes:
        batch: Sets the samples of a micro-batch: "--bs {}".
        accumulate: Sets the micro-batches of a step: "--ga {}".
        samples: Samples of a step, if `batch` is given.
        save: Trains some steps, saves and ends: "--steps {steps} --out {path}".
        resume: Continues from this: "--resume {path}".
        evaluate: Evaluates at every step: "--eval-every 1".
        checkpointing: Turns activation checkpointing on.
        torchrun: Starts one process, too, with the variables of torchrun.
    """

    batch: str = ""
    accumulate: str = ""
    samples: int = 8
    save: str = ""
    resume: str = ""
    evaluate: str = ""
    checkpointing: str = ""
    torchrun: bool = False


class ScriptRuns:
    """Runs of one script. Use it in a `with` block, whose end kills all processes."""

    def __init__(self, script: Path, arguments: Sequence[str], folder: Path, steps: int, options: Options) -> None:
        self.text = script.read_text(encoding="utf-8")
        self._script, self._arguments, self._folder, self.steps, self.options = (
            script,
            arguments,
            folder,
            steps,
            options,
        )
        self._joins = options.torchrun or any(word in self.text for word in ("init_process_group", "LOCAL_RANK"))
        self._number, self._lock = 0, threading.Lock()
        self._waiting: dict[int, Future[int]] = {}
        self._ended = False

    @property
    def name(self) -> str:
        """Returns the path of the script."""
        return str(self._script)

    @property
    def trains_in(self) -> str:
        """Returns the trainer of the script, see `trainer_of`."""
        return trainer_of(self.text)

    @property
    def joins_ranks(self) -> bool:
        """True if the script can train in several processes."""
        return self._joins or bool(self.trains_in)

    def __enter__(self) -> ScriptRuns:
        variables = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        variables |= {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false"}
        variables |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        if not torch.cuda.is_available():
            variables["ACCELERATE_USE_CPU"] = "true"  # otherwise its ranks on CPUs do not join each other
        self._log = (self._folder / "server.txt").open("w+b")
        self._server = subprocess.Popen(
            [sys.executable, "-m", "ddpforge.tools.prove.observed", str(self._script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=variables,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()
        self._reader.join()
        for pipe in (self._server.stdin, self._server.stdout, self._log):
            with suppress(OSError):
                if pipe:
                    pipe.close()

    def _read(self) -> None:
        assert self._server.stdout is not None
        try:
            for line in self._server.stdout:
                number, code = json.loads(line)
                self._waiting.pop(number).set_result(code)
        finally:  # the process has ended: no run is answered any more
            with self._lock:
                self._ended = True
                for one in self._waiting.values():
                    one.set_result(-1)

    # ------------------------------------------------------------------------------------------ one run
    def run(
        self, change: ScriptChange, *, ranks: int = 1, steps: int | None = None, more: Sequence[str] = ()
    ) -> Observed:
        """Runs the script under a change, with `more` arguments; raises UsageError if it fails."""
        with self._lock:
            self._number += 1
            number = self._number
        folder = self._folder / str(number)
        folder.mkdir()
        options = self._sizes(change)
        if options:  # the script changes its batches by itself
            change = replace(change, split=1, divide=1)
        port = _free_port() if self._joins or ranks > 1 else 0
        arguments = [*self._arguments, *options, *more]
        order = Order(number, str(folder), steps or self.steps, asdict(change), arguments, ranks, port)
        code = self._carry_out(order)
        if code or not all((folder / f"steps-{rank}.json").exists() for rank in range(ranks)):
            raise UsageError(
                f"{self.name} failed with exit code {code}:\n" + "\n".join(self._last(folder)),
                hints=["it must work alone; arguments of the script come after `--`"],
            )
        found = Observed.read(folder, ranks)
        if not found.gradients and not (self.options.save and more):
            raise UsageError(f"{self.name} ended without an optimizer step in its process")
        return found

    def _carry_out(self, order: Order) -> int:
        assert self._server.stdin is not None
        answer: Future[int] = Future()
        with self._lock:
            if self._ended:
                return -1
            self._waiting[order.number] = answer
            try:
                self._server.stdin.write(json.dumps(asdict(order)).encode() + b"\n")
                self._server.stdin.flush()
            except OSError:
                return -1
        return answer.result()

    def _last(self, folder: Path) -> list[str]:
        files = sorted(folder.glob("output-*.txt")) or [Path(self._log.name)]
        texts = [file.read_text(errors="replace").rstrip() for file in files]
        failed = next((text for text in texts if "Error" in text), texts[0])
        return failed.splitlines()[-_OUTPUT:]

    def _sizes(self, change: ScriptChange) -> list[str]:
        """Returns the script's own options for its micro-batches."""
        if not self.options.batch:
            return []
        micro, rest = divmod(self.options.samples, change.split * change.divide)
        if rest or not micro:
            raise UsageError(f"--samples {self.options.samples} cannot be divided by {change.split * change.divide}")
        accumulate = self.options.accumulate
        return [
            *self.options.batch.format(micro).split(),
            *(accumulate.format(change.split).split() if accumulate else []),
        ]


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
