"""Media for trackers: one format per kind; invalid values are refused."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ddpforge.errors import PluginError, UsageError
from ddpforge.guard.sum_reduction import check_sum_reduction
from ddpforge.interfaces import Histogram, MediaKind, Task, Tracker
from ddpforge.training.media import MediaLogger
from ddpforge.training.trackers import TrackerGroup


class Screen(Tracker):
    """Tracker that records all media."""

    def __init__(self) -> None:
        self.all: list[tuple[int, str, Any, str]] = []

    def log_media(self, step: int, name: str, value: Any, kind: MediaKind) -> None:
        self.all.append((step, name, value, kind))
        self.value = value


def shown(value: Any, kind: Any, name: str = "x") -> Any:
    screen = Screen()
    MediaLogger(screen, is_rank_zero=True)(name, value, kind)
    return screen.value


def refused(value: Any, kind: Any, name: str = "x") -> str:
    with pytest.raises(PluginError) as error:
        shown(value, kind, name)
    return " | ".join([error.value.message, *error.value.hints])


def test_float_images_become_bytes_and_grey_images_become_rgb() -> None:
    image = shown(torch.tensor([[0.0, 0.5], [1.0, 0.25]]), "image")
    assert (image.dtype, image.shape) == (np.uint8, (2, 2, 3))
    assert image[..., 0].tolist() == image[..., 2].tolist() == [[0, 128], [255, 64]]


def test_channels_first_becomes_channels_last() -> None:
    image = shown(np.arange(12, dtype=np.uint8).reshape(3, 2, 2), "image")
    assert image[0, 1].tolist() == [1, 5, 9]


def test_several_images_become_a_grid_in_rows() -> None:
    """Three images of 4 × 5 pixels: two in the first row, one in the second, with gaps of two black pixels."""
    images = torch.stack([torch.full((1, 4, 5), value) for value in (0.2, 0.4, 0.6)])
    grid = shown(images, "image")
    assert grid.shape == (10, 12, 3)
    assert [grid[0, 0, 0], grid[0, 7, 0], grid[6, 0, 0]] == [51, 102, 153]
    assert grid[4:6].max() == grid[:, 5:7].max() == grid[6:, 7:].max() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.int64])
def test_images_of_any_dtype_are_accepted(dtype: torch.dtype) -> None:
    expected = 1 if dtype == torch.int64 else 255
    assert shown(torch.ones(2, 2, dtype=dtype), "image").max() == expected


def test_a_histogram_counts_finite_values() -> None:
    value = torch.tensor([0.0, 1.0, 1.0, 64.0, float("nan"), float("inf")], requires_grad=True)
    found = shown(value, "histogram")
    assert (sum(found.counts), found.counts[0], found.counts[1], found.counts[-1]) == (4, 1, 2, 1)
    assert (found.edges[0], found.edges[1], found.edges[-1], len(found.edges)) == (0.0, 1.0, 64.0, 65)
    assert found.nonfinite == 2
    assert sum(shown([], "histogram").counts) == 0
    ready = Histogram((1,), (0.0, 1.0))
    assert shown(ready, "histogram") is ready


def test_text_and_tables_are_logged_unchanged() -> None:
    assert shown("once upon a time", "text") == "once upon a time"
    assert shown("half \udcff", "text") == "half ?"
    rows = [{"a": 1, "b": torch.tensor(0.5)}, {"b": None, "a": "x"}]
    assert shown(rows, "table") == [{"a": 1, "b": 0.5}, {"a": "x", "b": None}]


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        (torch.zeros(2, 3, 4), "image", "an image of shape [2, 3, 4] | expected a tensor or array [height, width], ["),
        (torch.zeros(4), "image", "an image of shape [4]"),
        (torch.zeros(0, 3, 4, 4), "image", "an image of shape [0, 3, 4, 4]"),
        (torch.zeros(8, 5000), "image", "an image of 5000 × 8 pixels | expected at most 4096 each way"),
        ("picture", "image", "a str of <U7"),
        (torch.zeros(2, dtype=torch.complex64), "histogram", "a Tensor of complex64 | expected a tensor, array or"),
        ([[1], [1, 2]], "histogram", "a list of object"),
        ([torch.ones(1, requires_grad=True)], "histogram", "a list of object"),
        (Histogram((1, 2), (0.0, 1.0)), "histogram", "a Histogram of 2 counts and 2 edges"),
        (3.5, "text", "a float | expected a string"),
        ("a" * 1_000_001, "text", "text of 1,000,001 characters | expected at most 1,000,000"),
        ("rows", "table", "a str | expected a list of mappings with the same columns"),
        ([1], "table", "a list | expected a list of mappings with the same columns"),
        ([{"a": 1}, {"b": 1}], "table", "expected a list of mappings with the same columns"),
        ([{"a": [1]}], "table", "a list in a cell | expected numbers, strings, true, false or None"),
        ([{"a": 1}] * 10_001, "table", "a table of 10,001 rows of 1 columns | expected at most 10,000 rows of 100"),
        (1, "video", "kind 'video' | expected one of image, histogram, text, table"),
    ],
)
def test_a_value_with_an_invalid_format_is_refused(value: Any, kind: str, words: str) -> None:
    assert words in refused(value, kind)


@pytest.mark.parametrize(
    "name", ["", "../up", "a//b", "a/../b", ".hidden", "a/.b", "a b", "ä", "/root", "a" * 201, "a/"]
)
def test_a_name_that_is_not_a_relative_file_path_is_refused(name: str) -> None:
    assert "words of letters, digits" in refused("x", "text", name)


@pytest.mark.parametrize("value", [float("nan"), -0.1, 1.1, float("inf")])
def test_images_with_values_out_of_range_are_skipped_with_one_warning(
    value: float, caplog: pytest.LogCaptureFixture
) -> None:
    screen = Screen()
    shows = MediaLogger(screen, is_rank_zero=True)
    with caplog.at_level(logging.WARNING, "ddpforge"):
        for shows.step in (3, 4):
            shows("samples", torch.full((2, 2), value), "image")
    assert screen.all == []
    (record,) = caplog.records
    assert record.getMessage().startswith("step 3: image `samples` is not shown: its values go from ")


def test_a_histogram_with_a_range_too_small_for_bins_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    MediaLogger(screen := Screen(), is_rank_zero=True)("weights", [1.0, 1.0000000000000002], "histogram")
    (message,) = caplog.messages
    assert (screen.all, message[:60]) == ([], "step 0: histogram `weights` is not shown: its values go from")


def test_a_table_without_rows_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    MediaLogger(screen := Screen(), is_rank_zero=True)("worst", [], "table")
    assert (screen.all, caplog.messages) == ([], ["step 0: table `worst` is not shown: it has no rows"])


def test_media_are_logged_at_the_current_step() -> None:
    shows = MediaLogger(screen := Screen(), is_rank_zero=True)
    for shows.step in (1, 2):
        shows("a/b", "x", "text")
    assert screen.all == [(1, "a/b", "x", "text"), (2, "a/b", "x", "text")]


def test_only_the_main_rank_logs_media() -> None:
    MediaLogger(screen := Screen(), is_rank_zero=False)("no name", object(), "image")
    assert screen.all == []


def test_the_check_for_a_mean_loss_logs_no_media(tmp_path: Path) -> None:
    """Trackers hold files, which cannot be copied."""

    class Means(Task):
        def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
            self.log_media("batch", batch, "histogram")
            outputs = model(batch)
            return outputs.square().mean(), outputs

    task, screen = Means(), Screen()
    with (tmp_path / "file").open("w") as screen.file:  # type: ignore[attr-defined]
        task.log_media = MediaLogger(screen, is_rank_zero=True)  # type: ignore[method-assign]
        with pytest.raises(UsageError, match="returns a mean over the batch"):
            check_sum_reduction(nn.Linear(2, 1), task, torch.rand(8, 2), 8)
    assert screen.all == []


@pytest.mark.parametrize(("resumed_at", "step"), [(None, 0), (7, 7)])
def test_media_logged_before_trackers_start_are_buffered(tmp_path: Path, resumed_at: int | None, step: int) -> None:
    group = TrackerGroup({"screen": (screen := Screen())})
    MediaLogger(group, is_rank_zero=True)("model", "two layers", "text")
    assert screen.all == []
    group.start(name="run", folder=tmp_path, config={}, resumed_at=resumed_at)
    assert screen.all == [(step, "model", "two layers", "text")]
