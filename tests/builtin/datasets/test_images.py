"""Pixels: one opener for all datasets, by mode, in the orientation of EXIF; everything else is refused by name."""

import io
import json
import logging
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from ddpforge.builtin.datasets import images
from ddpforge.builtin.datasets.coco import CocoDetection
from ddpforge.builtin.datasets.folders import ImageFolder
from ddpforge.builtin.datasets.images import open_image, pixels
from ddpforge.builtin.datasets.listing import LeftOut, files_below
from ddpforge.builtin.datasets.tar import Tar
from ddpforge.errors import UsageError

Draw = Callable[[], Image.Image]


def gray(value: float, dtype: Any) -> Image.Image:
    return Image.fromarray(np.full((8, 8), value, dtype))


def of_folder(folder: Path, name: str, data: bytes) -> Tensor:
    (folder / "class").mkdir()
    (folder / "class" / name).write_bytes(data)
    image: Tensor = ImageFolder(path=folder, size=8)[0][0]
    return image


def of_tar(folder: Path, name: str, data: bytes) -> Tensor:
    (folder / name).write_bytes(data)
    with tarfile.open(folder / "one.tar", "w") as archive:
        archive.add(folder / name, f"0{Path(name).suffix}")
    tar = Tar(path=str(folder / "one.tar"), fields=[Path(name).suffix[1:]])
    image: Tensor = tar.prepare(next(iter(tar)))[0]
    return image


def of_coco(folder: Path, name: str, data: bytes) -> Tensor:
    (folder / name).write_bytes(data)
    return coco(folder, {"file_name": name})[0][0]


def of_torchvision(folder: Path, name: str, data: bytes) -> Tensor:
    vision = pytest.importorskip("ddpforge.builtin.datasets.vision")
    (folder / "train/class").mkdir(parents=True)
    (folder / "train/class" / name).write_bytes(data)
    image: Tensor = vision.torchvision_dataset(name="ImageFolder", split="train", root=folder)[0][0]
    return image


def coco(folder: Path, image: dict[str, Any], *boxes: dict[str, Any], **options: Any) -> CocoDetection:
    content = {
        "images": [{"id": 1, **image}],
        "categories": [{"id": 5, "name": "cat"}],
        "annotations": [{"id": 70 + n, "image_id": 1, "category_id": 5, **box} for n, box in enumerate(boxes)],
    }
    (folder / "boxes.json").write_text(json.dumps(content))
    return CocoDetection(annotations=folder / "boxes.json", images=folder, **options)


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


READERS = [of_folder, of_tar, of_coco, of_torchvision]
MODES: dict[str, tuple[Draw, str, list[float]]] = {
    "L": (lambda: gray(51, np.uint8), "png", [0.2] * 3),
    "1": (lambda: Image.new("1", (8, 8), 1), "png", [1.0] * 3),
    "RGB": (lambda: Image.new("RGB", (8, 8), (255, 0, 51)), "png", [1.0, 0.0, 0.2]),
    "RGBA": (lambda: Image.new("RGBA", (8, 8), (255, 0, 51, 128)), "png", [1.0, 0.0, 0.2]),
    "LA": (lambda: Image.new("LA", (8, 8), (51, 128)), "png", [0.2] * 3),
    "P": (
        lambda: Image.new("RGB", (8, 8), (255, 0, 51)).convert("P", palette=Image.Palette.ADAPTIVE),
        "png",
        [1, 0, 0.2],
    ),
    "CMYK": (lambda: Image.new("CMYK", (8, 8), (0, 255, 0, 0)), "tiff", [1.0, 0.0, 1.0]),
    "I;16": (lambda: gray(30000, np.uint16), "png", [30000 / 65535] * 3),
    "I;16 of a TIFF": (lambda: gray(30000, np.uint16), "tiff", [30000 / 65535] * 3),
    "F": (lambda: gray(0.25, np.float32), "tiff", [0.25] * 3),
}


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("mode", MODES)
def test_pixels_of_every_mode_are_in_0_to_1(
    mode: str, read: Callable[[Path, str, bytes], Tensor], tmp_path: Path
) -> None:
    draw, form, wanted = MODES[mode]
    image = read(tmp_path, f"a.{form}", encoded(draw(), form))
    assert (image.dtype, image.shape) == (torch.float32, (3, 8, 8))
    assert image.mean((1, 2)).tolist() == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    ("draw", "form", "message"),
    [
        (lambda: gray(200, np.float32), "tiff", "the mode F has values from 200 to 200, and needs 0 to 1"),
        (lambda: gray(np.nan, np.float32), "tiff", "the mode F has values from nan"),
        (lambda: gray(30000, np.int32), "tiff", "the mode I of 32 bits has no known range"),
        (lambda: Image.new("LAB", (8, 8)), "tiff", "the mode LAB cannot be turned into colors"),
    ],
)
def test_modes_without_a_known_range_are_refused_by_name(
    draw: Draw, form: str, message: str, read: Callable[[Path, str, bytes], Tensor], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=f"is not an image that Pillow can read: {message}"):
        read(tmp_path, f"a.{form}", encoded(draw(), form))


@pytest.mark.parametrize("read", READERS)
def test_cut_images_are_refused_with_their_file_or_member(
    read: Callable[[Path, str, bytes], Tensor], tmp_path: Path
) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    whole = encoded(noise, "jpeg")
    with pytest.raises(UsageError, match=r"(a\.jpeg|sample 1 of .*one\.tar) is not an image .*truncated"):
        read(tmp_path, "a.jpeg", whole[: len(whole) // 2])


def test_gray_with_more_than_8_bits_has_the_channels_of_the_option(tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(encoded(gray(13107, np.uint16), "png"))
    with tarfile.open(tmp_path / "one.tar", "w") as archive:
        archive.add(tmp_path / "0.png", "0.png")
    found = {}
    for mode in ("l", "rgb", "rgba"):
        tar = Tar(path=str(tmp_path / "one.tar"), fields=["png"], images=mode)  # type: ignore[arg-type]
        found[mode] = tar.prepare(next(iter(tar)))[0][:, 0, 0].tolist()
    assert found["l"] == pytest.approx([0.2])
    assert found["rgb"] == pytest.approx([0.2] * 3)
    assert found["rgba"] == pytest.approx([0.2] * 3 + [1.0])


# ---------------------------------------------------------------------------------------------- orientation
def turned(orientation: int) -> bytes:
    """Returns a picture of 4 x 2 pixels whose first stored pixel is white, to be turned when it is shown."""
    values, exif = np.zeros((2, 4), np.uint8), Image.Exif()
    values[0, 0], exif[0x0112] = 255, orientation
    return encoded(Image.fromarray(values), "png", exif=exif)


# The place of the first stored pixel, as row and column of an image of 2 x 4 or 4 x 2.
CORNERS = {1: (0, 0), 2: (0, 3), 3: (1, 3), 4: (1, 0), 5: (0, 0), 6: (0, 1), 7: (3, 1), 8: (3, 0)}


@pytest.mark.parametrize("orientation", CORNERS)
@pytest.mark.parametrize("read", [of_tar, of_coco, of_torchvision])
def test_images_are_turned_as_their_exif_orientation_requires(
    orientation: int, read: Callable[[Path, str, bytes], Tensor], tmp_path: Path
) -> None:
    image = read(tmp_path, "a.png", turned(orientation))
    assert image.shape[1:] == ((2, 4) if orientation < 5 else (4, 2))
    assert [tuple(place) for place in image[0].nonzero().tolist()] == [CORNERS[orientation]]


@pytest.mark.parametrize(("size", "shape"), [((2, 4), (4, 2)), ((4, 2), (2, 4))])
def test_orientation_of_boxes_is_that_of_the_size_in_the_annotations(
    size: tuple[int, int], shape: tuple[int, int], tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(turned(6))
    image, _ = coco(tmp_path, {"file_name": "a.png", "width": size[0], "height": size[1]})[0]
    assert image.shape[1:] == shape
    with pytest.raises(UsageError, match=r"a\.png has 2 x 4 pixels, but its annotations are for 8 x 8"):
        _ = coco(tmp_path, {"file_name": "a.png", "width": 8, "height": 8})[0]


# ---------------------------------------------------------------------------------------------- annotations
@pytest.mark.parametrize(
    ("box", "message"),
    [
        ([0, 0, float("nan"), 2], "annotation 70 has the box .* which are not finite"),
        ([float("inf"), 0, 1, 2], "annotation 70 has the box .* which are not finite"),
        ([0, 0, -1, 2], "annotation 70 has a box of negative size"),
        ([8, 0, 2, 2], r"annotation 70 has the box \[8.0, 0.0, 10.0, 2.0\] .* outside of a\.png with 8 x 8 pixels"),
        ([0, -5, 2, 4], "annotation 70 has the box .* outside of"),
    ],
)
def test_boxes_that_are_not_finite_or_outside_are_refused_with_their_annotation(
    box: list[float], message: str, tmp_path: Path
) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    with pytest.raises(UsageError, match=message):
        coco(tmp_path, {"file_name": "a.png", "width": 8, "height": 8}, {"bbox": box})
    if "outside" in message:  # without a size in the annotations, that of the image counts
        with pytest.raises(UsageError, match="annotation 70 has the box"):
            _ = coco(tmp_path, {"file_name": "a.png"}, {"bbox": box})[0]


def test_boxes_that_go_beyond_their_image_are_counted_and_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    boxes = [{"bbox": [4, 4, 4.5, 2]}, {"bbox": [4, 4, 9, 2]}, {"bbox": [0, 0, 0, 2]}]
    data = coco(tmp_path, {"file_name": "a.png", "width": 8, "height": 8}, *boxes)
    assert data[0][1]["boxes"].tolist() == [[4, 4, 8.5, 6], [4, 4, 13, 6]]
    assert "1 boxes go beyond their image, first annotation 71 of a.png" in caplog.text
    assert "1 boxes without area are left out (annotation 72)" in caplog.text


@pytest.mark.parametrize("name", ["../a.png", "/etc/passwd", "b/../../a.png", "C:\\a.png"])
def test_annotated_file_outside_of_its_folder_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"image 1 has the file_name .* outside of the folder"):
        coco(tmp_path, {"file_name": name})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_id": 9}, "annotation 70 has the image_id 9, which no image has"),
        ({"category_id": 6}, "annotation 70 has the category_id 6, which no category has"),
    ],
)
def test_annotation_of_nothing_is_refused_with_its_id(change: dict[str, int], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        coco(tmp_path, {"file_name": "a.png"}, {"bbox": [0, 0, 1, 1], **change})


# ---------------------------------------------------------------------------------------------- files
def test_pipes_are_refused_and_do_not_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(UsageError, match=r"there is no image .*a\.png: it is not a regular file"):
        open_image(tmp_path / "a.png", name=tmp_path / "a.png", key="path")


def test_first_of_several_frames_is_used_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "_warned", set())
    frames = {"save_all": True, "append_images": [gray(255, np.uint8)]}
    for name in ("a.gif", "b.gif"):
        gray(51, np.uint8).save(tmp_path / name, **frames)
        image = open_image(tmp_path / name, name=name, key="path")
        assert pixels(image).mean().item() == pytest.approx(0.2)
    assert [one.message for one in caplog.records] == [
        "a.gif has several frames: of such images, the first frame is used"
    ]


def test_images_that_are_left_out_are_counted_and_named_in_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "pets"
    (folder / "cat/more.png").mkdir(parents=True)
    for name in ("a.png", "more.png/b.PNG", ".c.png", "._d.png", "e.png~"):
        gray(0, np.uint8).save(folder / "cat" / name, format="PNG")
    for name in ("cat/f.jfif", "cat/g.heic", "loose.png"):
        (folder / name).write_bytes(b"")
    os.mkfifo(folder / "cat/h.png")
    (tmp_path / "elsewhere").mkdir()
    (folder / "cat/linked").symlink_to(tmp_path / "elsewhere")
    (folder / "__MACOSX").mkdir()
    with caplog.at_level(logging.WARNING, "ddpforge"):
        data = ImageFolder(path=folder, size=8)
    assert data.class_names == ["cat"]
    assert [str(file.relative_to(folder)) for file, _ in data.files] == ["cat/a.png", "cat/more.png/b.PNG"]
    assert [one.message for one in caplog.records] == [
        f"{folder}: left out: 4 hidden or left behind by a program (__MACOSX, cat/._d.png, cat/.c.png, …); "
        "1 linked folders (cat/linked); 1 not in the folder of a class (loose.png); 1 not regular files (cat/h.png); "
        "2 with other endings (cat/f.jfif, cat/g.heic)"
    ]


def test_tiff_in_which_zero_is_white_is_refused(tmp_path: Path) -> None:
    """Pillow gives the stored numbers, which would be a negative."""
    gray(30000, np.uint16).save(tmp_path / "a.tiff", tiffinfo={262: 0})
    with Image.open(tmp_path / "a.tiff") as stored:
        assert stored.tag_v2[262] == 0
    with pytest.raises(UsageError, match="of 16 bits has no known range of values"):
        open_image(tmp_path / "a.tiff", name="a.tiff", key="path")


def test_photo_with_a_preview_is_one_image_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cameras store a smaller copy as a second frame (MPO); the first is the photo."""
    monkeypatch.setattr(images, "_warned", set())
    first, second = gray(51, np.uint8), gray(255, np.uint8)
    first.save(tmp_path / "a.jpg", format="MPO", save_all=True, append_images=[second])
    with Image.open(tmp_path / "a.jpg") as stored:
        assert (stored.format, stored.n_frames) == ("MPO", 2)
    assert pixels(open_image(tmp_path / "a.jpg", name="a.jpg", key="path")).mean().item() == pytest.approx(
        0.2, abs=0.01
    )
    assert caplog.records == []


def test_gray_that_a_resize_takes_beyond_its_range_is_cut_to_0_to_1() -> None:
    image = Image.fromarray(np.array([[-20.0, 0.0], [255.0, 300.0]], np.float32))
    assert pixels(image, "L").tolist() == [[[0.0, 0.0], [1.0, 1.0]]]
    assert pixels(image, "RGBA")[3].tolist() == [[1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize("name", ["a.bin", "a.BIN", "a.Tar.GZ"])
def test_endings_of_files_that_do_not_count_are_found_in_any_case(tmp_path: Path, name: str) -> None:
    for one in (name, "a.txt"):
        (tmp_path / one).write_bytes(b"x")
    left = LeftOut(tmp_path)
    assert [file.name for file in files_below(tmp_path, left=left, but=(".bin", ".gz"))] == ["a.txt"]
    assert left.found == {"of a kind that is not read": [name]}
