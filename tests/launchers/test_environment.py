"""Environment of a launched rank: the number of nodes is checked before ranks join, and the launcher gets reports."""

from pathlib import Path

import psutil
import pytest

from ddpforge.components.hooks import hooks
from ddpforge.errors import PeerFailed, SetupError
from ddpforge.launchers.environment import LauncherEnvironment, nodes_asked_for, reject_fewer_nodes
from ddpforge.launchers.exit_record import ExitRecords


def test_launcher_slurm_watchdog_and_the_record_of_time_are_environments_like_those_of_plugins() -> None:
    assert [one.__name__ for one in hooks("environment")] == [
        *("LauncherEnvironment", "SlurmEnvironment", "TimeEnvironment", "WatchdogEnvironment")
    ]


def test_launcher_gets_reports_of_begin_and_halt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = tmp_path / "verdict"
    verdict.touch()
    monkeypatch.setenv("DDPFORGE_VERDICT", str(verdict))
    launcher = LauncherEnvironment()
    assert not launcher.is_restart()
    launcher.on_begin()
    assert launcher.is_restart()
    launcher.on_halt()
    records = ExitRecords(verdict, 1)
    assert (records.begun, records.halted) == (True, True)


# ---------------------------------------------------------------------------------------------- too few nodes
class Launcher:
    """Fake of psutil's process of a rank's parent."""

    words = ""

    def parent(self) -> "Launcher":
        return self

    def cmdline(self) -> list[str]:
        return self.words.split()


@pytest.mark.parametrize(
    ("nodes", "words", "asked"),
    [
        ("2", "", 2),  # passed by `ddpforge launch`
        ("1:3", "torchrun --nnodes=2", None),
        (None, "python torchrun --nnodes 2 --rdzv-backend c10d", 2),
        (None, "python -m torch.distributed.run --nnodes=3", 3),
        (None, "python torchrun --nnodes 1:2", None),
        (None, "python torchrun --standalone", None),
        (None, "python launcher.py --nnodes 2", None),
    ],
)
def test_fewer_nodes_than_requested_are_rejected(
    monkeypatch: pytest.MonkeyPatch, nodes: str | None, words: str, asked: int | None
) -> None:
    """Without this, if torchrun's rendezvous drops a node, each host trains its own complete run."""
    monkeypatch.setattr(Launcher, "words", words)
    monkeypatch.setattr(psutil, "Process", Launcher)
    monkeypatch.delenv("DDPFORGE_NODES", raising=False)
    if nodes:
        monkeypatch.setenv("DDPFORGE_NODES", nodes)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert nodes_asked_for() == asked
    for here, there, raises in ((1, 0, SetupError), (1, 1, PeerFailed), (2, 0, None), (3, 0, None)):
        monkeypatch.setenv("GROUP_WORLD_SIZE", str(here))
        monkeypatch.setenv("LOCAL_RANK", str(there))
        if raises and asked:
            with pytest.raises(raises, match=f"only 1 of {asked} nodes have joined") as refused:
                reject_fewer_nodes()
            assert refused.value.exit_code == 3
        elif not asked or here >= asked:
            reject_fewer_nodes()
