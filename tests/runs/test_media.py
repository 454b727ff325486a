"""Media files of a run: images, histograms, texts and tables logged by callbacks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ddpforge import disk
from ddpforge.interfaces import Histogram
from ddpforge.runs.media import MediaFiles


def started(folder: Path, resumed_at: int | None = None, **options: Any) -> MediaFiles:
    files = MediaFiles(**options)
    files.start(name="run", folder=folder, config={}, resumed_at=resumed_at)
    return files


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_every_kind_of_media_is_written_to_a_file(tmp_path: Path) -> None:
    files = started(tmp_path)
    image = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    files.log_media(12, "samples/ema", image, "image")
    files.log_media(12, "grads", Histogram((1, 2), (0.0, 0.5, 1.0), nonfinite=3), "histogram")
    files.log_media(12, "story", "naïve", "text")
    files.log_media(12, "worst", [{"id": 3, "loss": float("nan")}, {"id": 4, "loss": 0.5}], "table")
    shown = tmp_path / "shown"
    assert np.array_equal(np.asarray(Image.open(shown / "samples/ema/step-000000012.png")), image)
    histogram = json.loads((shown / "grads/step-000000012.json").read_text())
    assert histogram == {"counts": [1, 2], "edges": [0.0, 0.5, 1.0], "nonfinite": 3}
    assert (shown / "story/step-000000012.txt").read_text() == "naïve"
    rows = json.loads((shown / "worst/step-000000012.json").read_text())
    assert rows == [{"id": 3, "loss": None}, {"id": 4, "loss": 0.5}]


def test_a_run_without_media_has_no_folder(tmp_path: Path) -> None:
    started(tmp_path).finish(state="done", summary={})
    assert list(tmp_path.iterdir()) == []


def test_a_rewind_removes_media_of_later_steps(tmp_path: Path) -> None:
    files = started(tmp_path)
    for step in (1, 2, 3):
        files.log_media(step, "x", "text", "text")
    files.rewind(2)
    assert names(tmp_path / "shown") == ["x/step-000000001.txt", "x/step-000000002.txt"]


@pytest.mark.parametrize(("resumed_at", "left"), [(None, 0), (0, 0), (1, 1), (5, 3)])
def test_a_resume_removes_media_of_later_steps(tmp_path: Path, resumed_at: int | None, left: int) -> None:
    files = started(tmp_path)
    for step in (1, 2, 3):
        files.log_media(step, "x", "text", "text")
    started(tmp_path, resumed_at)
    assert len(names(tmp_path / "shown")) == left


def test_the_oldest_media_are_removed_above_the_size_limit(tmp_path: Path) -> None:
    """Uses a limit of two blocks of 4 KiB; files of earlier attempts count."""
    files = started(tmp_path, most=8192)
    for step in (1, 2):
        files.log_media(step, "a", "x", "text")
    files = started(tmp_path, resumed_at=2, most=8192)
    files.log_media(3, "b", "x" * 4096, "text")
    assert names(tmp_path / "shown") == ["a/step-000000002.txt", "b/step-000000003.txt"]
    files.log_media(4, "b", "x" * 4097, "text")
    assert names(tmp_path / "shown") == ["b/step-000000004.txt"]


def test_a_media_file_is_written_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = started(tmp_path)
    files.log_media(1, "x", "old", "text")

    def torn(file: Any, data: bytes) -> None:
        file.write(data[:1])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "write", torn)
        with pytest.raises(OSError, match="No space"):
            files.log_media(1, "x", "new", "text")
    assert (tmp_path / "shown/x/step-000000001.txt").read_text() == "old"
    files.log_media(1, "x", "new", "text")
    assert names(tmp_path / "shown") == ["x/step-000000001.txt"]
    assert (tmp_path / "shown/x/step-000000001.txt").read_text() == "new"
