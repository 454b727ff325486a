"""Loader processes: resources are checked before they start; batches that they cannot send are errors."""

import multiprocessing
import resource
import shutil
import tempfile
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ddpforge.data import RankShare, collating, fetching, workers
from ddpforge.data.collating import collate_of
from ddpforge.data.workers import refuse_missing_resources
from ddpforge.errors import PluginError, SetupError
from ddpforge.training import loaders
from ddpforge.training.loaders import open_data


class Rows:
    """Eight rows. `odd`: what goes wrong with a batch in a loader process."""

    def __init__(self, odd: str = "") -> None:
        self.odd = odd

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        if self.odd == "hangs" and index > 1:
            time.sleep(15)  # longer than the timeout, and not longer than a test may take
        return torch.full((2,), float(index))

    def collate(self, samples: Any) -> Any:
        rows = torch.stack(samples)
        return {"rows": rows, "how": lambda: 0} if self.odd == "a lambda" else rows


def fetched(data: Any, patience: float = 0.0) -> list[Any]:
    share = RankShare(0, 1, 2)
    options: dict[str, Any] = {"seed": 0, "drop_last": False, "workers": 2, "prefetch": 2, "pin": False}
    opened = open_data(data, global_batch=2, share=share, patience=patience, **options)
    return [micro.data.tolist() for micro in opened.evaluation()]


Usage = namedtuple("Usage", "total used free")


def test_a_temporary_folder_with_a_name_too_long_for_sockets_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/" + 74 * "x")
    refuse_missing_resources(2, 2)  # 75 and 32 characters; the limit of a socket is 107
    monkeypatch.setattr(tempfile, "tempdir", "/" + 75 * "x")
    with pytest.raises(SetupError, match=r"data.workers = 2 needs sockets .* too long .*: /xxx") as found:
        refuse_missing_resources(2, 2)
    assert "set TMPDIR to a shorter path, such as /tmp" in found.value.hints


def test_full_shared_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(1 << 26, (1 << 26) - 4096, 4096))
    with pytest.raises(SetupError, match=f"{tmp_path} has only 4096 bytes free"):
        refuse_missing_resources(2, 2, shm=tmp_path)
    refuse_missing_resources(2, 2, shm=tmp_path / "absent")


def test_the_limit_of_open_files_is_raised_or_the_run_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits, raised = [(40, 100_000)], []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[0])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: raised.append(pair))
    refuse_missing_resources(8, 2)
    assert raised == [(4096, 100_000)]
    refuse_missing_resources(400, 2)
    assert 4 * 400 * (4 + 2 * 2) < raised[1][0] < 100_000  # four times the need: four files, and two per batch
    limits[0] = (40, 5000)
    refuse_missing_resources(400, 2)
    assert raised[2] == (5000, 5000)
    limits[0] = (40, 40)
    with pytest.raises(SetupError, match=r"data.workers = 8 needs about .* open files .* the limit is 40"):
        refuse_missing_resources(8, 2)


def test_a_batch_that_cannot_be_sent_raises_an_error_on_the_rank() -> None:
    with pytest.raises(PluginError, match=r"a loader process could not send a micro-batch: .*lambda"):
        fetched(Rows("a lambda"))


def test_a_system_error_in_a_loader_process_raises_an_error_on_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Happens if the temporary folder changes after the check, or if shared memory fills up."""
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    # A process keeps its first temporary folder, which another test may have made.
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", None)  # type: ignore[attr-defined]
    for module in (fetching, loaders):
        monkeypatch.setattr(module, "refuse_missing_resources", lambda *_: None)
    with pytest.raises(SetupError, match="could not send a micro-batch: OSError: AF_UNIX path too long"):
        fetched(Rows())


def test_full_shared_memory_in_collate_is_a_setup_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Any) -> Any:
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")

    monkeypatch.setattr(collating, "default_collate", full)
    with pytest.raises(SetupError, match=r"a loader process could not make a micro-batch: .*No space") as found:
        collate_of([])([torch.zeros(1)])
    assert any("/dev/shm" in hint for hint in found.value.hints)


def test_hanging_loader_processes_time_out_after_hang_timeout() -> None:
    with pytest.raises(SetupError, match=r"no micro-batch came from 2 loader processes for 1 s \(train.hang_timeout\)"):
        fetched(Rows("hangs"), patience=1.0)
    assert fetched(Rows(), patience=60.0) == [[[i, i], [i + 1, i + 1]] for i in (0.0, 2.0, 4.0, 6.0)]


def test_other_errors_are_not_resource_errors() -> None:
    assert not workers.lacks_resources(RuntimeError("DataLoader worker exited"))
