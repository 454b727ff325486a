"""The dataset `digits`: splits, samples, batches, pickling."""

import pickle

import pytest
import torch

from ddpforge.builtin.datasets.digits import Digits


def test_splits_have_1437_and_360_different_samples() -> None:
    train, test = Digits(split="train"), Digits(split="test")
    assert (len(train), len(test)) == (1437, 360)
    rows = torch.cat([train.images, test.images]).flatten(1)
    assert rows.shape == (1797, 64)
    assert rows.sum().item() * 16 == 561_718  # the sum of all pixels of the file
    assert torch.cat([train.labels, test.labels]).bincount().tolist() == [
        *(178, 182, 177, 183, 181),
        *(182, 181, 179, 174, 180),
    ]


def test_split_never_changes() -> None:
    assert Digits(split="train").labels[:8].tolist() == [2, 8, 2, 6, 6, 7, 1, 9]
    assert Digits(split="test").labels[:8].tolist() == [7, 9, 4, 7, 0, 2, 6, 1]


def test_sample_is_an_image_from_0_to_1_and_its_label() -> None:
    data = Digits(split="train")
    image, label = data[0]
    assert (image.shape, image.dtype, label.shape, label.dtype) == ((1, 8, 8), torch.float32, (), torch.int64)
    assert (data.images.min().item(), data.images.max().item()) == (0.0, 1.0)


def test_batch_equals_its_samples_fetched_one_by_one() -> None:
    data, ids = Digits(split="test"), [5, 0, 359, 5]
    images, labels = data.collate(data.__getitems__(ids))
    assert torch.equal(images, torch.stack([data[i][0] for i in ids]))
    assert torch.equal(labels, torch.stack([data[i][1] for i in ids]))


def test_digits_survives_pickling() -> None:
    data = Digits(split="test")
    assert torch.equal(pickle.loads(pickle.dumps(data)).images, data.images)


def test_index_beyond_the_end_raises_index_error() -> None:
    with pytest.raises(IndexError):
        Digits(split="test")[360]
