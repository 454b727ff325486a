"""Fixtures: a folder for checkpoints, and an fsync that does nothing."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes fsync do nothing, for speed; `doubles.Disk` simulates the loss of unsynced data."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoints"
    path.mkdir()
    return path
