"""The dataset `torchvision`: files, transforms, downloads, refusals."""

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

pytest.importorskip("torchvision")

from PIL import Image

from ddpforge.builtin.datasets.vision import ImageBatches, Images, torchvision_dataset
from ddpforge.errors import SetupError, UsageError


@pytest.fixture
def mnist(tmp_path: Path) -> Path:
    """Writes twelve training and four test images of noise, in the files to which torchvision unpacks MNIST."""
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    noise = np.random.RandomState(0)
    for name, count in (("train", 12), ("t10k", 4)):
        pixels = noise.randint(256, size=(count, 28, 28), dtype=np.uint8)
        labels = np.arange(count, dtype=np.uint8) % 10
        (raw / f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, count, 28, 28) + pixels.tobytes())
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels.tobytes())
    return tmp_path


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """Writes an image folder: classes cat (red images) and dog (blue ones), two images each in train and val."""
    for split in ("train", "val"):
        for name, colour in (("cat", (255, 0, 0)), ("dog", (0, 0, 255))):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for n in range(2):
                Image.new("RGB", (12, 10), colour).save(folder / f"{n}.png")
    return tmp_path


# ---------------------------------------------------------------------------------------------- in memory
def test_mnist_has_grey_images_from_0_to_1_and_labels(mnist: Path) -> None:
    train = torchvision_dataset(name="MNIST", root=mnist, split="train")
    test = torchvision_dataset(name="MNIST", root=mnist, split="test")
    assert (len(train), len(test), train.classes) == (12, 4, 10)
    image, label = train[11]
    assert (image.shape, image.dtype, label.dtype) == ((1, 28, 28), torch.float32, torch.int64)
    assert label.item() == 1
    raw = (mnist / "MNIST/raw/train-images-idx3-ubyte").read_bytes()[16:]
    assert (image * 255).flatten().tolist() == pytest.approx(list(raw[11 * 784 :]))


def test_batch_without_transforms_equals_its_samples_fetched_one_by_one(mnist: Path) -> None:
    data = torchvision_dataset(name="MNIST", root=mnist, split="train", mean=[0.13], std=[0.31])
    assert isinstance(data, ImageBatches)
    assert not data.random
    images, labels = data.collate(data.__getitems__([3, 0, 11]))
    expected = default_collate([data[i] for i in (3, 0, 11)])
    assert torch.equal(images, expected[0])
    assert torch.equal(labels, expected[1])
    assert type(images) is torch.Tensor


def test_normalisation_subtracts_the_mean_and_divides_by_the_deviation(mnist: Path) -> None:
    plain = torchvision_dataset(name="MNIST", root=mnist, split="train")[0][0]
    normal = torchvision_dataset(name="MNIST", root=mnist, split="train", mean=[0.5], std=[0.25])[0][0]
    torch.testing.assert_close(normal, (plain - 0.5) / 0.25)


def test_transforms_run_per_sample_and_depend_on_the_seed(mnist: Path) -> None:
    data = torchvision_dataset(
        name="MNIST",
        root=mnist,
        split="train",
        transforms=["RandomVerticalFlip", {"use": "RandomCrop", "size": 28, "padding": 4}],
    )
    assert data.random
    assert not hasattr(data, "__getitems__")

    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append(data[0][0])
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_check_of_transforms_keeps_the_rng_state(mnist: Path) -> None:
    torch.manual_seed(0)
    torchvision_dataset(name="MNIST", root=mnist, split="train", transforms=["RandomVerticalFlip"])
    drawn = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(1))


def test_dataset_with_transforms_survives_pickling(mnist: Path) -> None:
    data = torchvision_dataset(name="MNIST", root=mnist, split="test", transforms=["Grayscale"])
    assert torch.equal(pickle.loads(pickle.dumps(data))[3][0], data[3][0])


# ---------------------------------------------------------------------------------------------- folders, made up
def test_image_folder_numbers_its_classes_in_order(pets: Path) -> None:
    data = torchvision_dataset(
        name="ImageFolder", root=pets, split="val", transforms=[{"use": "Resize", "size": [8, 6]}]
    )
    assert (len(data), data.classes) == (4, 2)
    images, labels = default_collate([data[i] for i in range(4)])
    assert images.shape == (4, 3, 8, 6)
    assert labels.tolist() == [0, 0, 1, 1]
    assert images.mean(dim=(2, 3)).tolist() == [[1, 0, 0], [1, 0, 0], [0, 0, 1], [0, 0, 1]]


def test_image_folder_without_a_training_class_is_refused(pets: Path) -> None:
    (pets / "train" / "bird").mkdir()
    with pytest.raises(ValueError, match=r"val and .*train have different classes: bird"):
        torchvision_dataset(name="ImageFolder", root=pets, split="val")


def test_error_for_a_missing_image_folder_names_the_expected_paths(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="ImageFolder cannot read") as caught:
        torchvision_dataset(name="ImageFolder", root=tmp_path, split="val")
    assert f"{tmp_path}/val/<class>/" in caught.value.hints[0]


def test_fake_data_is_the_same_every_time_and_differs_between_splits() -> None:
    resize = [{"use": "Resize", "size": [4, 4]}]
    train = torchvision_dataset(name="FakeData", split="train", transforms=resize)
    test = torchvision_dataset(name="FakeData", split="test", transforms=resize)
    assert isinstance(train, Images)
    assert (len(train), train.classes, train[7][0].shape) == (1000, 10, (3, 4, 4))
    assert torch.equal(train[7][0], train[7][0])
    assert not torch.equal(train[7][0], test[7][0])


# ---------------------------------------------------------------------------------------------- downloading
def test_missing_files_name_the_folder_and_the_option_that_fetches_them(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="CIFAR10 is missing or incomplete in") as caught:
        torchvision_dataset(name="CIFAR10", root=tmp_path, split="train")
    assert str(tmp_path) in caught.value.message
    (hint,) = caught.value.hints
    assert "--set data.train.download=true --set data.eval.download=true" in hint


def test_several_processes_never_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SetupError, match="CIFAR10 is missing") as caught:
        torchvision_dataset(name="CIFAR10", root=tmp_path, split="train", download=True)
    assert f"CIFAR10('{tmp_path}', download=True)" in caught.value.hints[0]


def test_existing_files_need_no_download(mnist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert len(torchvision_dataset(name="MNIST", root=mnist, split="train", download=True)) == 12


def test_failed_download_raises_setup_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: object, **kwargs: object) -> None:
        raise OSError("network is unreachable")

    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", unreachable)
    with pytest.raises(SetupError, match=r"CIFAR10 could not be downloaded to .*: network is unreachable"):
        torchvision_dataset(name="CIFAR10", root=tmp_path, split="train", download=True)


# ---------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "val"}, 'MNIST has no split "val"'),
        ({"root": None}, "MNIST needs `root`"),
        ({"name": "FakeData"}, "FakeData is generated, not read; remove `root`"),
        ({"name": "ImageFolder", "download": True}, "ImageFolder cannot be downloaded"),
        ({"mean": [0.5]}, "mean and std require each other"),
        ({"mean": [0.5] * 3, "std": [0.5] * 3}, "images have 1 channels, but mean has 3 values and std has 3"),
        ({"transforms": ["RandomHorizontlFlip"]}, "no transform `RandomHorizontlFlip` .*mean `RandomHorizontalFlip`"),
        ({"transforms": ["Compose"]}, "no transform `Compose` that a recipe can name"),
        ({"transforms": [{"size": 3}]}, "no transform `None`"),
        ({"transforms": ["RandomCrop"]}, "the transform RandomCrop does not accept {}: .*size"),
        ({"transforms": [{"use": "RandomCrop", "size": 4, "colour": 1}]}, "RandomCrop does not accept .*colour"),
        ({"transforms": [{"use": "RandomCrop", "size": 99}]}, "fail on the first image: ValueError: .*99"),
        ({"transforms": [{"use": "FiveCrop", "size": 9}]}, "the transforms return tuple, not one image"),
        ({"transforms": ["ToPILImage"]}, "the transforms return Image, not one image"),
    ],
)
def test_invalid_options_are_refused_before_training(mnist: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        torchvision_dataset(**{"name": "MNIST", "root": mnist, "split": "train"} | options)  # type: ignore[arg-type]


def test_planted_pickle_in_cifar_files_is_not_loaded(tmp_path: Path) -> None:
    """Plants a pickle: torchvision unpickles the batches, but only those with the hash that it knows."""
    marker = tmp_path / "marker"
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    payload = b"cpathlib\nPath\n(V" + str(marker).encode() + b"\ntR."
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta"):
        (folder / name).write_bytes(payload.replace(b"cpathlib\nPath\n", b"cos\nmkdir\n"))
    with pytest.raises(SetupError, match="CIFAR10 is missing or incomplete"):
        torchvision_dataset(name="CIFAR10", split="train", root=tmp_path)
    assert not marker.exists()


def test_postscript_in_an_image_folder_is_not_executed(pets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: pytest.fail("Ghostscript was started"))
    for file in pets.rglob("*.*"):
        file.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\nshowpage\n%%EOF\n")
    with pytest.raises(UsageError, match="is not an image that Pillow can read: cannot identify"):
        torchvision_dataset(name="ImageFolder", split="train", root=pets)
