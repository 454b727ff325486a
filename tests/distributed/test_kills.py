"""A rank is killed (-9) at any moment of training and saving: the next attempt resumes, with the same final result."""

import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.launched import Ranks, Zygote
from support.sharding import DDP, FSDP, ZERO, Bench

from ddpforge.checkpoint.reader import CheckpointReader

LENGTH = 80
MORE = """
[callbacks.ema]
decay = 0.9
[callbacks.killed]
use = "./parts.py:Killed"
[checkpoint]
every = "2st"
layout = "{layout}"
"""
LONGEST = 0.015  # seconds per step up to the kill; undisturbed training takes about as long


CASES = {"ddp": (DDP, "sharded"), "fsdp": (FSDP, "sharded"), "fsdp-full": (FSDP, "full"), "zero2": (ZERO[2], "sharded")}


@pytest.mark.parametrize(
    ("case", "kills", "steps"),
    [
        pytest.param("zero2", 1, 20, id="zero2-1"),
        *(pytest.param(case, 80, LENGTH, id=f"{case}-80", marks=pytest.mark.full) for case in CASES),
    ],
)
def test_run_survives_any_number_of_kills(
    tmp_path: Path, ddpforge: Callable[..., Ranks], case: str, kills: int, steps: int
) -> None:
    """Covers traps 16, 18 and 22, with dropout. Starts runs until `kills` ranks were killed."""
    bench = Bench(tmp_path, ddpforge)
    strategy, layout = CASES[case]
    options = {"model": "dropout = 0.2", "length": f"{steps}st", "more": MORE.format(layout=layout)}
    bench("undisturbed", strategy, **options)
    expected = contents(bench, "undisturbed", steps)
    moment = random.Random(f"{case} {kills}")

    killed = run = 0
    while killed < kills:
        run += 1
        attempt = 0
        while True:
            attempt += 1
            assert attempt < 200, "the run does not get on"
            env = {"KILL_RANK": str(moment.randrange(2)), "KILL_AFTER": str(moment.uniform(0, steps * LONGEST))}
            ranks = bench(f"run-{run}", strategy, fails=True, env=env if killed < kills else None, **options)
            if -signal.SIGKILL in ranks.codes:
                killed += 1
            if not any(ranks.codes):
                break
            assert -signal.SIGKILL in ranks.codes, ranks.stderr
            assert "passed over" not in ranks.stderr
        found = contents(bench, f"run-{run}", steps)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert bench.column(f"run-{run}") == bench.column("undisturbed")


@pytest.mark.parametrize(
    ("case", "kills"),
    [
        pytest.param("fsdp", 1, id="fsdp-1", marks=pytest.mark.full),
        *(pytest.param(case, 34, id=f"{case}-34", marks=pytest.mark.full) for case in ("ddp", "fsdp", "zero3")),
    ],
)
def test_launch_with_restarts_survives_any_number_of_kills(
    tmp_path: Path, ddpforge: Callable[..., Ranks], zygote: Zygote, case: str, kills: int
) -> None:
    """Starts launches, one command each, until `kills` ranks were killed; with dropout."""
    bench = Bench(tmp_path, ddpforge)
    strategy = {"ddp": DDP, "fsdp": FSDP, "zero3": ZERO[3]}[case]
    more = MORE.format(layout="sharded").replace(":Killed", ":KilledAgain")
    options = {"model": "dropout = 0.2", "length": f"{LENGTH}st", "more": more}
    bench("undisturbed", strategy, **options)
    expected = contents(bench, "undisturbed")

    def killed() -> int:
        return len(lines.read_text().splitlines()) if (lines := tmp_path / ".killed").exists() else 0

    run = 0
    while (done := killed()) < kills:
        run += 1
        name = f"run-{run}"
        text = (tmp_path / "undisturbed.toml").read_text()
        (tmp_path / f"{name}.toml").write_text(text.replace('"undisturbed"', f'"{name}"'))
        env = {"KILLS": str(kills - done), "KILL_SEED": f"{case} {run}", "KILL_AFTER": str(LENGTH * LONGEST)}
        ranks = zygote.run(["run", f"{name}.toml"], nproc=2, cwd=tmp_path, env=env, timeout=1200, restarts=kills - done)
        assert ranks.codes == [0], ranks.stderr
        found = contents(bench, name)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        assert bench.column(name) == bench.column("undisturbed")


def contents(bench: Bench, name: str, steps: int = LENGTH) -> dict[str, torch.Tensor]:
    """Returns every tensor of a run's last checkpoint, verified."""
    reader = CheckpointReader(bench.newest(name))
    assert reader.metadata.step == steps
    sections = ("model", "optimizer", "callbacks")
    return {f"{section}: {name}": reader.read(section, name) for section in sections for name in reader.names(section)}
