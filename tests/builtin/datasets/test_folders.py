"""Datasets of own files: folders of images, CSV tables, and parts of any dataset."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.launched import Ranks

from ddpforge.builtin.datasets.digits import Digits
from ddpforge.builtin.datasets.folders import CSVTable, ImageFolder
from ddpforge.builtin.datasets.views import Part
from ddpforge.errors import SetupError, UsageError

CSV = "area,rooms,kind,price\n50,2,flat,100\n80,3,house,200.5\n\n30,1,flat,70\n"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for name, color in {"red": (255, 0, 0), "blue": (0, 0, 255)}.items():
        (tmp_path / "pets" / name).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (20, 10 + number), color).save(tmp_path / "pets" / name / f"{number}.png")
    (tmp_path / "pets/.cache").mkdir()
    (tmp_path / "pets/red/notes.txt").write_text("no image")
    return tmp_path / "pets"


# ---------------------------------------------------------------------------------------------- images
def test_image_folder_has_a_class_for_each_folder(images: Path) -> None:
    data = ImageFolder(path=images, size=8)
    assert (len(data), data.classes, data.class_names) == (6, 2, ["blue", "red"])
    assert data.labels == [0, 0, 0, 1, 1, 1]
    image, label = data[4]
    assert (label, image.shape, image.dtype) == (1, (3, 8, 8), torch.float32)
    assert image[0].eq(1).all()
    assert image[1:].eq(0).all()


def test_image_folder_normalizes_and_flips(images: Path) -> None:
    data = ImageFolder(path=images, size=4, mean=[0.5, 0.5, 0.5], std=[0.5, 0.25, 0.5], flip=True)
    image, _ = data[5]
    assert [float(channel.mean()) for channel in image] == [1.0, -2.0, -1.0]
    half = np.zeros((4, 4, 3), dtype=np.uint8)
    half[:, :2] = 255
    Image.fromarray(half).save(images / "red/0.png")
    torch.manual_seed(0)
    lefts = {bool(ImageFolder(path=images, size=4, flip=True)[3][0][0, 0, 0]) for _ in range(20)}
    assert lefts == {True, False}
    assert {bool(ImageFolder(path=images, size=4)[3][0][0, 0, 0]) for _ in range(20)} == {True}


def test_broken_image_is_named(images: Path) -> None:
    (images / "red/1.png").write_bytes(b"no image")
    with pytest.raises(UsageError, match=r"red/1\.png is not an image that Pillow can read"):
        ImageFolder(path=images, size=8)[4]


@pytest.mark.parametrize(
    ("path", "message"), [("nowhere", "there is no folder nowhere"), (".", "has no folder with images")]
)
def test_folder_without_images_is_refused(
    path: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SetupError, match=message):
        ImageFolder(path=Path(path), size=8)


# ---------------------------------------------------------------------------------------------- tables
def test_csv_gives_inputs_and_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(CSV)
    data = CSVTable(path=tmp_path / "a.csv", target="price", inputs=["area", "rooms"])
    assert len(data) == 3
    assert data.inputs.tolist() == [[50, 2], [80, 3], [30, 1]]
    assert data.targets.tolist() == [[100], [200.5], [70]]
    assert [part.shape for part in data.__getitems__([0, 2])] == [(2, 2), (2, 1)]


def test_csv_target_of_text_is_a_class(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(CSV)
    data = CSVTable(path=tmp_path / "a.csv", target="kind")
    assert (data.classes, data.class_names, data.targets.tolist()) == (2, ["flat", "house"], [0, 1, 0])
    rooms = CSVTable(path=tmp_path / "a.csv", target="rooms", inputs=["area"], target_kind="class")
    assert (rooms.class_names, rooms.targets.tolist()) == (["1", "2", "3"], [1, 2, 0])


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (CSV, {"target": "prize"}, "target: there is no column 'prize'"),
        (CSV, {"target": "price", "inputs": ["size"]}, "inputs: there is no column 'size'"),
        (CSV, {"target": "price"}, r"a\.csv:2: 'flat' in column 'kind' is not a number"),
        (CSV, {"target": "kind", "inputs": ["area"], "target_kind": "number"}, "'flat' in column 'kind'"),
        ("a,a,y\n1,2,3\n", {"target": "y"}, r"a\.csv:1 has several columns 'a'"),
        (
            CSV + "1,2\n",
            {"target": "price", "inputs": ["area"]},
            r"a\.csv:6 has another number of cells than the 4 columns",
        ),
    ],
)
def test_csv_errors_name_the_column_and_the_line(
    text: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(UsageError, match=message):
        CSVTable(path=tmp_path / "a.csv", **options)


# ---------------------------------------------------------------------------------------------- parts
def test_share_and_rest_divide_a_dataset() -> None:
    whole = Digits(split="train")
    some, rest = Part(of=whole, share="90%"), Part(of=whole, share="90%", rest=True)
    assert (len(some), len(rest)) == (1293, 144)
    assert sorted([*some.places, *rest.places]) == list(range(1437))
    assert some.places.tolist() == Part(of=whole, share="90%").places.tolist()
    assert some.places.tolist() != Part(of=whole, share="90%", seed=1).places.tolist()
    assert Part(of=whole, share="1%", shuffle=False).places.tolist() == list(range(14))


@pytest.mark.parametrize("share", ["0%", "150%"])
def test_share_is_at_most_the_whole(share: str) -> None:
    with pytest.raises(ValueError, match=f"share: {share} is not more than 0% and at most 100%"):
        Part(of=Digits(split="test"), share=share)


def test_part_has_the_attributes_of_its_samples() -> None:
    whole = Digits(split="train")
    part = Part(of=whole, share="10%")
    place = int(part.places[7])
    assert (part.classes, part.random) == (10, False)
    assert part.labels.tolist() == whole.labels[part.places].tolist()
    assert torch.equal(part[7][0], whole[place][0])
    assert torch.equal(part.__getitems__([7, 8])[0][0], whole[place][0])
    assert len(pickle.loads(pickle.dumps(part))) == len(part)


@pytest.mark.parametrize(
    ("of", "share", "message"), [([1, 2, 3], "1%", "1% of 3 samples has no sample"), (iter([1]), "50%", "is a stream")]
)
def test_part_without_samples_is_refused(of: Any, share: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Part(of=of, share=share)


RECIPE = """
recipe = 2
name = "parts"
model = { use = "mlp", inputs = 64, outputs = 10 }
data.sampler = { use = "balanced", by = "labels" }
data.train = { use = "part", of = { use = "digits", split = "train" }, share = "80%" }
data.eval.held_out = { use = "part", of = { use = "digits", split = "train" }, share = "80%", rest = true }
data.eval.train = { use = "part", of = { use = "digits", split = "train" }, share = "5%" }
task = { use = "classification", metrics = ["accuracy"] }
optimizer = { use = "sgd", lr = 0.1 }
train = { length = "4st", global_batch = 64 }
"""


def test_parts_are_the_same_for_any_seed_and_ranks(ddpforge: Callable[..., Ranks], tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(RECIPE)
    ddpforge("run", "r.toml")
    ddpforge("run", "r.toml", "name=two", nproc=2)
    one, two = (json.loads((tmp_path / f"runs/{name}/status.json").read_text()) for name in ("parts", "two"))
    assert {"eval/held_out/accuracy", "eval/train/accuracy"} <= one["metrics"].keys()
    for name in ("eval/held_out/loss", "eval/train/loss"):
        assert one["metrics"][name] == pytest.approx(two["metrics"][name], rel=1e-5)
