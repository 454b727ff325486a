"""Rollouts of a training: the generations of each prompt with their rewards, a log of them, and its replay."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpforge import disk
from ddpforge.errors import UsageError

from ddpforge_transformers.sampling import Completion

__all__ = ["Replay", "Rollout", "rollout_line", "write_rollouts"]

_FORMAT = 1  # of the lines


@dataclass(frozen=True)
class Rollout:
    """Generations of one prompt, and the rewards of each function for them."""

    seed: int  # of the sample: it names the rollout in a log
    prompt_ids: list[int]
    completions: list[Completion]
    rewards: list[list[float]]  # of each function, one number per completion

    @property
    def tokens(self) -> int:
        """Number of the generated tokens."""
        return sum(len(one.tokens) for one in self.completions)


def rollout_line(one: Rollout, names: Sequence[str], advantages: Sequence[float], **more: Any) -> str:
    """Returns a line of a log: a JSON object with everything for a replay, and texts and advantages for a reader."""
    row = {
        "rollout": _FORMAT,
        "sample": one.seed,
        **more,
        "rewards": dict(zip(names, one.rewards, strict=True)),
        "advantages": list(advantages),
        "prompt_ids": one.prompt_ids,
        "completion_ids": [each.tokens for each in one.completions],
        "logps": [each.logps for each in one.completions],
    }
    return json.dumps(row, ensure_ascii=False) + "\n"


def write_rollouts(folder: Path, step: int, lines: Iterable[str]) -> None:
    """Writes the rollouts of a step to `folder`/step-00000001.jsonl, in an order that does not depend on ranks."""
    folder.mkdir(exist_ok=True)
    text = "".join(sorted(lines, key=lambda line: int(json.loads(line)["sample"])))
    with disk.appearing(folder / f"step-{step:08d}.jsonl") as draft:
        disk.write_new(draft, [text.encode()])


class Replay:
    """Rollouts of a log, by their samples. Only the places of lines are in memory."""

    def __init__(self, path: Path, names: Sequence[str], generations: int) -> None:
        """Raises ValueError for a path without rollouts, and for lines that are not rollouts of these rewards."""
        self._path, self._names, self._generations = path, list(names), generations
        self._places: dict[int, tuple[Path, int]] = {}
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        for file in files:
            try:
                self._places |= {seed: (file, place) for seed, place in self._read(file)}
            except OSError as error:
                raise ValueError(f"rollouts: {file} cannot be read: {error.strerror}") from error
        if not self._places:
            raise ValueError(f"rollouts: {path} has no rollouts; give RUN/rollouts of a run, or one of its files")

    def _read(self, file: Path) -> Iterable[tuple[int, int]]:
        place = 0
        with file.open("rb") as opened:
            for number, line in enumerate(opened, 1):
                yield self._parsed(line, f"{file}, line {number}").seed, place
                place += len(line)

    def __call__(self, seed: int, prompt_ids: list[int]) -> Rollout:
        """Returns the rollout of a sample; raises UsageError if the log does not have it, or of another prompt."""
        again = [
            "a replay needs the data, the seed and the batches of the run that wrote the log",
            "remove task.rollouts to generate",
        ]
        if seed not in self._places:
            raise UsageError(
                f"rollouts: {self._path} has no rollout of the sample {seed} of this step",
                hints=again,
                key="task.rollouts",
            )
        file, place = self._places[seed]
        with file.open("rb") as opened:
            opened.seek(place)
            found = self._parsed(opened.readline(), str(file))
        if found.prompt_ids != prompt_ids:
            raise UsageError(
                f"rollouts: the rollout of the sample {seed} in {file} has another prompt than the data",
                hints=again,
                key="task.rollouts",
            )
        return found

    def _parsed(self, line: bytes, where: str) -> Rollout:
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or row.get("rollout") != _FORMAT:
                raise ValueError("it is not a rollout of this version")
            ids, logps, rewards = row["completion_ids"], row["logps"], row["rewards"]
            if list(rewards) != self._names:
                raise ValueError(f"its rewards are {', '.join(rewards)}; task.rewards has {', '.join(self._names)}")
            if len(ids) != self._generations:
                raise ValueError(f"it has {len(ids)} completions; task.num_generations is {self._generations}")
            each = [Completion(tokens, values) for tokens, values in zip(ids, logps, strict=True)]
            if any(not one.tokens or len(one.tokens) != len(one.logps) for one in each):
                raise ValueError("its tokens and log-probabilities have different lengths")
            if any(len(values) != len(ids) for values in rewards.values()):
                raise ValueError("it has not one reward for each completion")
            return Rollout(row["sample"], row["prompt_ids"], each, [*rewards.values()])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"rollouts: {where} cannot be replayed: {what}") from error
