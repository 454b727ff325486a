"""TensorBoard's own reader reads each step's newest values, and media."""

import importlib.util
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ddpforge.builtin.trackers.tensorboard import TensorBoardTracker
from ddpforge.errors import PluginError
from ddpforge.interfaces import Histogram


def started(folder: Path, resumed_at: int | None = None) -> TensorBoardTracker:
    tracker = TensorBoardTracker()
    tracker.start(name="run", folder=folder, config={"optimizer": {"lr": 0.1}}, resumed_at=resumed_at)
    return tracker


def finish(tracker: TensorBoardTracker, state: str = "done") -> None:
    tracker.finish(state=state, summary={"eval/loss": 0.5})


def read(folder: Path) -> Any:
    reader = EventAccumulator(str(folder / "tensorboard"), {"scalars": 0, "images": 0, "tensors": 0, "histograms": 0})
    reader.Reload()
    return reader


def scalars(folder: Path, tag: str = "train/loss") -> dict[int, float]:
    return {event.step: event.value for event in read(folder).Scalars(tag)}


def texts(folder: Path, tag: str) -> dict[int, str]:
    events = read(folder).Tensors(f"{tag}/text_summary")
    return {event.step: event.tensor_proto.string_val[0].decode() for event in events}


def test_tensorboard_has_scalars_by_step_recipe_and_final_state(tmp_path: Path) -> None:
    tracker = started(tmp_path)
    for step in (1, 2, 3):
        tracker.log(step, {"train/loss": 1.0 / step, "lr": 0.5})
    finish(tracker, "preempted")
    assert scalars(tmp_path) == pytest.approx({1: 1.0, 2: 0.5, 3: 1 / 3})
    assert scalars(tmp_path, "lr") == {1: 0.5, 2: 0.5, 3: 0.5}
    assert '"lr": 0.1' in texts(tmp_path, "config")[0]
    assert '"state": "preempted"' in texts(tmp_path, "end")[3]


@pytest.mark.parametrize("resumes", [False, True])
def test_repeated_steps_count_once(tmp_path: Path, resumes: bool) -> None:
    tracker = started(tmp_path)
    for step in (1, 2, 3):
        tracker.log(step, {"train/loss": 1.0})
    if resumes:
        finish(tracker)
        tracker = started(tmp_path, resumed_at=1)
    else:
        tracker.rewind(1)
    tracker.log(2, {"train/loss": 2.0})
    finish(tracker)
    assert scalars(tmp_path) == {1: 1.0, 2: 2.0}


def test_tensorboard_has_all_media(tmp_path: Path) -> None:
    tracker = started(tmp_path)
    image = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    tracker.log_media(7, "samples", image, "image")
    tracker.log_media(7, "gradients", Histogram((1, 0, 2), (0.0, 0.5, 1.0, 1.5)), "histogram")
    tracker.log_media(7, "story", "once\n<upon> *a* time", "text")
    tracker.log_media(7, "worst", [{"id": 3, "said": "a|b"}, {"id": 4, "said": None}], "table")
    finish(tracker)
    (event,) = read(tmp_path).Images("samples")
    assert event.step == 7
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(event.encoded_image_string))), image)
    (event,) = read(tmp_path).Histograms("gradients")
    found = event.histogram_value
    assert (event.step, found.num, found.min, found.max) == (7, 3, 0.0, 1.5)
    counts = dict(zip(found.bucket_limit, found.bucket, strict=True))
    assert {limit: counts[limit] for limit in (0.5, 1.0, 1.5)} == {0.5: 1, 1.0: 0, 1.5: 2}
    assert texts(tmp_path, "story") == {7: "    once\n    <upon> *a* time"}
    assert texts(tmp_path, "worst") == {7: "| id | said |\n| --- | --- |\n| 3 | a\\|b |\n| 4 | None |"}


def test_error_for_missing_tensorboard_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PluginError, match="tensorboard is not installed") as error:
        TensorBoardTracker()
    assert error.value.hints == ("pip install 'tensorboard>=2.18'",)
