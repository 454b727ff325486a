"""Rank 0 writes, every rank learns how it went, and a run never starts from scratch by accident."""

import logging
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint.doubles import checkpoint_of, steps_in

from ddpforge.checkpoint import Checkpoints
from ddpforge.checkpoint.retention import committed
from ddpforge.errors import CheckpointError, ExitCode, PeerFailed
from ddpforge.recipe.schema import KeepSection


def alone(folder: Path, **keep: Any) -> Checkpoints:
    return Checkpoints(folder, keep=KeepSection(**keep), is_main=True, broadcast=lambda value: value)


class Ranks:
    """Two ranks as threads; what rank 0 broadcasts is pickled, as between processes."""

    def __init__(self, folder: Path) -> None:
        self._barrier = threading.Barrier(2, timeout=10)
        self._sent = b""
        self._checkpoints = [
            Checkpoints(folder, keep=KeepSection(), is_main=True, broadcast=self._send),
            Checkpoints(folder, keep=KeepSection(), is_main=False, broadcast=self._receive),
        ]

    def _send(self, value: Any) -> Any:
        self._sent = pickle.dumps(value)
        self._barrier.wait()
        return value

    def _receive(self, value: Any) -> Any:
        self._barrier.wait()
        return pickle.loads(self._sent)

    def run(self, action: Callable[[Checkpoints], Any]) -> list[Any]:
        """What `action` returns or raises on each rank."""
        results: list[Any] = [None, None]

        def work(rank: int) -> None:
            try:
                results[rank] = action(self._checkpoints[rank])
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def test_one_checkpoint_is_written_and_all_ranks_know_it(folder: Path) -> None:
    first, second = Ranks(folder).run(lambda checkpoints: checkpoints.save(checkpoint_of(5)))

    assert first == second
    assert [path for path, _ in committed(folder)[0]] == [first]


def test_all_ranks_load_the_same(folder: Path) -> None:
    ten = write(folder, checkpoint_of(10))
    write(folder, checkpoint_of(20))
    ranks = Ranks(folder)

    assert [steps_in(loaded) for loaded in ranks.run(lambda checkpoints: checkpoints.load())] == [{20}, {20}]
    assert [steps_in(loaded) for loaded in ranks.run(lambda checkpoints: checkpoints.load(ten))] == [{10}, {10}]


def test_nothing_to_load_is_none_on_every_rank(tmp_path: Path) -> None:
    assert Ranks(tmp_path / "missing").run(lambda checkpoints: checkpoints.load()) == [None, None]


@pytest.mark.parametrize(
    "action",
    [
        lambda checkpoints: checkpoints.save(checkpoint_of(5)),
        lambda checkpoints: checkpoints.load(Path("nowhere")),
    ],
)
def test_a_failure_on_rank_0_ends_every_rank_and_only_rank_0_has_words(
    tmp_path: Path, action: Callable[[Checkpoints], Any]
) -> None:
    (tmp_path / "file").write_text("")

    first, second = Ranks(tmp_path / "file").run(action)

    assert isinstance(first, CheckpointError)
    assert isinstance(second, PeerFailed)
    assert second.exit_code == first.exit_code == ExitCode.ENVIRONMENT


def test_a_defect_on_rank_0_does_not_leave_the_others_waiting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(*arguments: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("ddpforge.checkpoint.retention.prune", break_down)

    first, second = Ranks(folder).run(lambda checkpoints: checkpoints.save(checkpoint_of(5)))

    assert isinstance(first, ZeroDivisionError)
    assert isinstance(second, PeerFailed)
    assert second.exit_code == ExitCode.FAILED


def test_a_rank_that_dies_during_the_save_costs_nothing_that_was_written(folder: Path) -> None:
    def peers_are_gone(value: Any) -> Any:
        raise RuntimeError("connection closed by peer")

    checkpoints = Checkpoints(folder, keep=KeepSection(), is_main=True, broadcast=peers_are_gone)
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        checkpoints.save(checkpoint_of(5))

    loaded = alone(folder).load()
    assert loaded is not None
    assert steps_in(loaded) == {5}


def test_saving_keeps_what_the_recipe_says(folder: Path) -> None:
    checkpoints = alone(folder, last=1, best=1, by="eval/loss")
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 4.0)):
        checkpoints.save(checkpoint_of(step, metrics={"eval/loss": loss}))

    assert [manifest.step for _, manifest in committed(folder)[0]] == [4, 2]
    assert checkpoints.is_best({"eval/loss": 0.5})
    assert not checkpoints.is_best({"eval/loss": 1.0})


def test_a_damaged_newest_is_passed_over_aloud(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("ddpforge"), "propagate", True)
    write(folder, checkpoint_of(10))
    (write(folder, checkpoint_of(20)) / "optimizer.safetensors").write_bytes(b"")

    loaded = alone(folder).load()

    assert loaded is not None
    assert steps_in(loaded) == {10}
    assert "optimizer.safetensors is damaged: it has 0 bytes" in caplog.text


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_from_scratch(folder: Path) -> None:
    for step in (10, 20):
        (write(folder, checkpoint_of(step)) / "COMMIT").unlink()

    with pytest.raises(CheckpointError, match=r"none of the checkpoints in .* is intact.*step-000000020") as caught:
        alone(folder).load()
    assert "--fresh" in caught.value.hints[0]


def test_a_named_checkpoint_is_never_replaced_by_another(folder: Path) -> None:
    write(folder, checkpoint_of(10))
    path = write(folder, checkpoint_of(20))
    (path / "COMMIT").unlink()

    with pytest.raises(CheckpointError, match="COMMIT"):
        alone(folder).load(path)


def test_loading_clears_what_a_killed_process_left(folder: Path) -> None:
    (folder / ".step-000000020-abcd.tmp").mkdir()

    assert alone(folder).load() is None
    assert not list(folder.iterdir())
