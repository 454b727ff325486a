"""Whole runs: episodes of the ranks, and training results."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Train = Callable[..., list[dict[str, Any]]]

SHORT = (
    "schedule.use=constant",
    "train.length=8st",
    "train.eval_every=4st",
    "track.every=1st",
    "data.eval.count=6",
    "task.max_steps=120",
)
WATCH = """
from pathlib import Path
from ddpforge.interfaces import Callback
from ddpforge_rl import PolicyGradient

class Watched(PolicyGradient):
    '''Writes the seeds of this rank's episodes to a file.'''

    def _play(self, seeds, *, sample):
        import os
        if sample:
            with Path(f"played-{os.environ.get('WORLD_SIZE', 1)}-{os.environ.get('RANK', 0)}").open("a") as file:
                file.writelines(f"{seed}\\n" for seed in seeds)
        return super()._play(seeds, sample=sample)

class Weights(Callback):
    '''Writes the weights of each rank to a file after every step.'''

    def on_start(self, run):
        self.model, self.file = run.model, Path(f"weights-{run.world.global_ranks.size}-{run.world.global_ranks.rank}")

    def on_step(self, info):
        with self.file.open("a") as file:
            print([p.double().sum().item() for p in self.model.parameters()], file=file)
"""


def curve(rows: list[dict[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


def test_ranks_share_the_episodes_and_train_the_same_curve(train: Train, tmp_path: Path) -> None:
    """Losses of 8 steps agree up to rounding, and returns exactly.

    Rounding changes a probability by 1e-7. An action changes only if its random number is that close, which does not
    happen in these steps. In a long run it may happen; then the curves diverge.
    """
    (tmp_path / "watch.py").write_text(WATCH)
    task = (f"task.use={tmp_path}/watch.py:Watched", "task.env=CartPole-v1")
    watch = (*task, *SHORT, f"callbacks.weights.use={tmp_path}/watch.py:Weights")
    one, two = train("one", *watch), train("two", *watch, ranks=2)
    for name in ("train/loss", "eval/loss"):
        assert curve(two, name) == pytest.approx(curve(one, name), rel=1e-4)
    for name in ("train/return", "eval/return"):
        assert curve(two, name) == curve(one, name)
    assert len(curve(one, "train/loss")) == 8

    alone, first, second = ((tmp_path / f"played-{name}").read_text().split() for name in ("1-0", "2-0", "2-1"))
    assert len(first) == len(second) == 8 * 8
    assert not set(first) & set(second)
    assert sorted(alone) == sorted(first + second)
    assert len(set(alone)) == 8 * 16
    weights = [(tmp_path / f"weights-2-{rank}").read_text() for rank in (0, 1)]
    assert weights[0] == weights[1]
    assert len(set(weights[0].splitlines())) == 8


def test_sharded_policies_play_the_same_episodes(train: Train) -> None:
    """Under FSDP the number of acting steps differs between ranks; evaluations run in between."""
    ddp, fsdp = (train(name, *SHORT, f"strategy.use={name}", ranks=2) for name in ("ddp", "fsdp"))
    assert curve(fsdp, "train/loss") == pytest.approx(curve(ddp, "train/loss"), rel=1e-4)
    assert curve(fsdp, "eval/return") == curve(ddp, "eval/return")


@pytest.mark.slow
def test_cartpole_reaches_a_return_of_400(train: Train) -> None:
    rows = train("cartpole", ranks=2, launcher=True)
    assert curve(rows, "train/return")[0] < 60
    assert curve(rows, "eval/return")[-1] >= 400
