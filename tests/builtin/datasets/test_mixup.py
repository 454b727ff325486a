"""Dataset `mixup`: mixup and CutMix with soft targets, the same for any batches and ranks."""

import pickle
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from ddpforge.builtin.datasets.views import Mixed, Part, TwoViews
from ddpforge.builtin.metrics.classification import Accuracy
from ddpforge.builtin.models.mlp import MLP
from ddpforge.builtin.tasks.classification import Classification
from ddpforge.data import RankShare
from ddpforge.errors import UsageError
from ddpforge.training.loaders import open_data


class Images:
    """Ten images, each filled with its own number; the class is the number modulo 5."""

    classes = 5

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((1, 8, 6), float(index)), index % 5


def drawn(data: Mixed, index: int, seed: int) -> tuple[Tensor, Tensor]:
    random.seed(seed)
    return data[index]


@pytest.mark.parametrize("seed", range(20))
def test_mixup_adds_two_images_and_their_classes_with_the_same_weights(seed: int) -> None:
    image, target = drawn(Mixed(of=Images(), mixup_alpha=1.0), 3, seed)
    random.seed(seed)
    random.random(), random.random()
    kept, other = random.betavariate(1.0, 1.0), random.randrange(10)
    assert torch.allclose(image, torch.full((1, 8, 6), kept * 3 + (1 - kept) * other))
    expected = torch.zeros(5)
    expected[3] += kept
    expected[other % 5] += 1 - kept
    torch.testing.assert_close(target, expected)


@pytest.mark.parametrize("seed", range(20))
def test_cutmix_weights_classes_by_the_area_of_the_rectangle(seed: int) -> None:
    image, target = drawn(Mixed(of=Images(), mixup_alpha=0.0, cutmix_alpha=1.0), 3, seed)
    numbers, areas = image.unique(return_counts=True)
    expected = torch.zeros(5)
    for number, area in zip(numbers.tolist(), areas.tolist(), strict=True):
        expected[int(number) % 5] += area / 48
    torch.testing.assert_close(target, expected)
    rows, columns = (image[0] != 3).any(1).nonzero(), (image[0] != 3).any(0).nonzero()
    if len(rows):  # the changed pixels are one rectangle
        height, width = rows.max() - rows.min() + 1, columns.max() - columns.min() + 1
        assert (image[0] != 3).sum() == height * width


def test_probability_and_switch_choose_how_samples_are_mixed() -> None:
    data = Mixed(of=Images(), mixup_alpha=1.0, cutmix_alpha=1.0, switch_prob=0.25, prob=0.5)
    plain = cut = mixed = 0
    for seed in range(400):
        image, target = drawn(data, 3, seed)
        whole = bool((target == 1).any())
        plain += whole
        cut += not whole and len(image.unique()) == 2
        mixed += not whole and len(image.unique()) == 1
    assert 190 < plain < 260  # half of them, plus mixtures of one class
    assert 2 < mixed / cut < 5


@pytest.mark.parametrize("ranks", [1, 2])
def test_samples_do_not_depend_on_ranks_and_batches(ranks: int) -> None:
    def fetched(ranks: int, micro: int) -> Tensor:
        found: dict[int, list[Tensor]] = {}
        for rank in range(ranks):
            share = RankShare(rank, ranks, micro)
            batches = open_data(
                *[Mixed(of=Images(), cutmix_alpha=1.0)],
                **{"global_batch": 4, "share": share, "drop_last": True, "seed": 0},
                **{"workers": 0, "prefetch": 2, "pin": False},
            )
            for micro_batch in batches.evaluation():
                for place, image in zip(micro_batch.places.tolist(), micro_batch.data[0], strict=True):
                    found[place] = image
        return torch.stack([found[place] for place in sorted(found)])  # type: ignore[arg-type]

    assert torch.equal(fetched(ranks, 2), fetched(1, 4))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"mixup_alpha": 0.0}, "nothing would be mixed"),
        ({"of": iter([])}, "is a stream"),
        ({"of": [(torch.zeros(1, 2, 2), 0)]}, "has no attribute `classes`"),
    ],
)
def test_options_that_cannot_mix_are_refused(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Mixed(**{"of": Images()} | options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sample", "complaint"),
    [
        ((torch.zeros(1, 2, 2, dtype=torch.uint8), 0), r"gives torch\.uint8"),
        (("image", 0), "gives str"),
        ((torch.zeros(1, 2, 2), 7), "a sample has the class 7, but there are 5 classes"),
    ],
)
def test_samples_that_cannot_be_mixed_are_refused(sample: tuple[object, int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Mixed(of=[sample] * 3, classes=5)[0]


# ---------------------------------------------------------------------------------------------- soft targets
PROBABILITIES = torch.tensor([[0.7, 0.3, 0.0], [0.0, 0.0, 1.0]])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_classification_takes_probabilities_of_classes(smoothing: float) -> None:
    torch.manual_seed(0)
    model, inputs = MLP(inputs=4, outputs=3), torch.randn(2, 4)
    task = Classification(label_smoothing=smoothing, metrics=[Accuracy()])
    assert task.count((inputs, PROBABILITIES)) is None
    loss, logits = task.loss(model, (inputs, PROBABILITIES))
    smooth = PROBABILITIES * (1 - smoothing) + smoothing / 3
    torch.testing.assert_close(loss, -(smooth * logits.log_softmax(1)).sum())
    hits = task.metrics(logits, (inputs, PROBABILITIES))["accuracy"]
    assert hits.sum == (logits.argmax(1) == torch.tensor([0, 2])).sum()  # type: ignore[union-attr]


def test_rows_that_are_not_probabilities_are_refused() -> None:
    with pytest.raises(UsageError, match=r"a row has the sum 1\.9"):
        Classification().count((torch.zeros(2, 4), PROBABILITIES + torch.tensor([[0.3], [0.0]])))
    with pytest.raises(UsageError, match="so no class can be ignored"):
        Classification(ignore_index=0).count((torch.zeros(2, 4), PROBABILITIES))


class Described(Images):
    """Images with attributes and methods of the user's own."""

    random = False
    labels = torch.arange(len(Images()))
    owner = "us"

    def lengths(self) -> list[int]:
        return [3 * index for index in range(len(self))]

    def collate(self, samples: list[Any]) -> Any:
        raise AssertionError("mixed samples have another form")

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def double(self, number: int) -> list[int]:
        return [number] * len(self)


@pytest.mark.parametrize("derived", [lambda of: Mixed(of=of, classes=3), lambda of: TwoViews(of=of)])
def test_derived_datasets_have_the_attributes_and_methods_of_their_dataset(derived: Any) -> None:
    whole = Described()
    data = pickle.loads(pickle.dumps(derived(whole)))
    assert data.lengths() == whole.lengths()
    assert torch.equal(data.labels, whole.labels)
    assert data.owner == "us"
    data.set_epoch(4)
    assert data.data.epoch == 4
    assert data.random  # the dataset draws no numbers, but mixing and views do
    assert not hasattr(data, "collate")
    with pytest.raises(AttributeError, match="nothing"):
        _ = data.nothing


def test_attributes_and_methods_of_a_part_have_its_samples() -> None:
    whole = Described()
    part = pickle.loads(pickle.dumps(Part(of=whole, share="50%")))
    assert part.lengths() == [whole.lengths()[place] for place in part.places]
    assert torch.equal(part.labels, whole.labels[part.places])
    assert part.double(2) == [2] * len(whole)  # with arguments it may be of anything
    assert pickle.loads(pickle.dumps(part.lengths))() == part.lengths()
    assert part.owner == "us"
