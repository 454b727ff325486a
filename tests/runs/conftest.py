"""A folder for checkpoints, on a disk that nobody waits for."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits for the real disk: `doubles.Disk` keeps account of what a missing fsync would lose."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoints"
    path.mkdir()
    return path
