"""Detection: a dict of losses in training; in evaluations predictions and mean average precision over ranks."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from support.launched import Ranks as Launched
from support.stages import staged
from torch import Tensor, nn

from ddpforge.builtin.datasets.coco import CocoDetection
from ddpforge.builtin.metrics.torchmetrics import TorchMetric, adopted
from ddpforge.builtin.tasks.detection import Detection
from ddpforge.errors import PluginError, SetupError, UsageError
from ddpforge.guard.sum_reduction import check_sum_reduction
from ddpforge.interfaces import Metric, Ranks, SampleColumns, Total
from ddpforge.testing.doubles import in_threads
from ddpforge.training.task_checks import checked_quantity

NET = """
import torch
from torch import nn


class Net(nn.Module):
    '''Finds one box in each image; with the contract of torchvision's detection models.'''

    def __init__(self):
        super().__init__()
        self.box, self.kind = nn.Linear(3, 4), nn.Linear(3, 3)

    def forward(self, images, targets=None):
        if self.training and targets is None:
            raise ValueError("targets should not be none when in training mode")
        seen = torch.stack([image.mean(dim=(1, 2)) for image in images])
        sizes = torch.tensor([[*image.shape[:0:-1]] * 2 for image in images])
        boxes, logits = self.box(seen).sigmoid() * sizes, self.kind(seen)
        if self.training:
            wanted = torch.stack([target["boxes"].mean(0) for target in targets])
            first = torch.stack([target["labels"][0] for target in targets])
            return {
                "classifier": nn.functional.cross_entropy(logits, first),
                "box_reg": ((boxes - wanted) / sizes).square().mean(),
            }
        boxes = torch.cat([torch.minimum(boxes[:, :2], boxes[:, 2:]), torch.maximum(boxes[:, :2], boxes[:, 2:])], 1)
        scores, labels = logits.softmax(1)[:, 1:].max(1)
        return [
            {"boxes": box[None], "labels": label[None] + 1, "scores": score[None]}
            for box, label, score in zip(boxes, labels, scores)
        ]


def ssdlite(classes: int) -> nn.Module:
    from torchvision.models.detection import ssdlite320_mobilenet_v3_large

    return ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=classes)
"""
RECIPE = """
recipe = 2
name = "boxes"
model.use = "./net.py:Net"
data.train = { use = "coco_detection", annotations = "boxes.json", images = "images", flip = true }
data.eval = { use = "coco_detection", annotations = "boxes.json", images = "images" }
optimizer = { use = "adamw", lr = 0.05 }
train = { length = "20ep", global_batch = 4, eval_every = "20ep" }

[task]
use = "detection"
weights = { box_reg = 2.0 }
metrics = [{ use = "torchmetrics.detection:MeanAveragePrecision", name = "map" }]
"""


@pytest.fixture
def boxes(tmp_path: Path) -> Path:
    """Eight images of different sizes, with one to three boxes in their middle; categories have the ids 3 and 7."""
    (tmp_path / "images").mkdir()
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "boxes.toml").write_text(RECIPE)
    images, annotations = [], []
    for number in range(8):
        width, height = 24 + 4 * number, 40 - 3 * number
        Image.new("RGB", (width, height), ((40, 90, 200), (250, 80, 30))[number % 2]).save(
            tmp_path / f"images/{number}.png"
        )
        images.append({"id": 10 + number, "file_name": f"{number}.png", "width": width, "height": height})
        for _ in range(1 + number % 3):
            box = [width * 0.25, height * 0.25, width * 0.5, height * 0.5]
            annotations.append({"image_id": 10 + number, "category_id": (7, 3)[number % 2], "bbox": box})
    annotations += [
        {"image_id": 10, "category_id": 3, "bbox": [1, 2, 3, 4], "iscrowd": 1, "area": 5},
        {"image_id": 10, "category_id": 3, "bbox": [1, 2, 0, 4]},
    ]
    kinds = [{"id": 7, "name": "ball"}, {"id": 3, "name": "cat"}]
    text = json.dumps({"images": images, "annotations": annotations, "categories": kinds})
    (tmp_path / "boxes.json").write_text(text)
    return tmp_path


@pytest.fixture
def measured(boxes: Path) -> Path:
    """Returns the same folder; skips the test if the libraries of the metric are not installed."""
    for name in ("torchvision", "torchmetrics", "pycocotools"):
        pytest.importorskip(name)
    return boxes


def metrics_of(run: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads((run / "status.json").read_text())["metrics"]
    return found


# ---------------------------------------------------------------------------------------------- runs
def test_losses_and_precision_are_the_same_on_two_ranks(ddpforge: Callable[..., Launched], measured: Path) -> None:
    ddpforge("run", "boxes.toml")
    ddpforge("run", "boxes.toml", "name=two", "train.micro_batch=1", nproc=2)
    one, two = (metrics_of(measured / f"runs/{name}") for name in ("boxes", "two"))
    names = ("train/loss", "train/classifier", "train/box_reg", "eval/map/map", "eval/map/map_50", "eval/map/mar_100")
    assert [one[name] for name in names] == pytest.approx([two[name] for name in names], rel=1e-5)
    assert one["train/loss"] == pytest.approx(one["train/classifier"] + 2 * one["train/box_reg"])
    assert one["eval/map/map_50"] > 0.3  # three equal boxes of an image are found once
    assert "eval/loss" not in one
    assert one["train/classifier"] < 0.2  # ln 3 before training


@pytest.mark.full  # a small model of this form trains in the test of two ranks, and predicts in the next test
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_smallest_model_of_torchvision_trains(
    ddpforge: Callable[..., Launched], measured: Path, ranks: int
) -> None:
    sets = ["model.use=./net.py:ssdlite", "model.classes=3", "~task.weights", "train.length=2st"]
    ddpforge("run", "boxes.toml", *sets, "optimizer.lr=0.0001", "train.eval_every=2st", nproc=ranks)
    found = metrics_of(measured / "runs/boxes")
    total = found["train/bbox_regression"] + found["train/classification"]
    assert found["train/loss"] == pytest.approx(total, rel=1e-5)
    assert 0 <= found["eval/map/map"] <= 1


def test_predictions_have_the_boxes_of_each_image(ddpforge: Callable[..., Launched], measured: Path) -> None:
    ddpforge("run", "boxes.toml", "train.length=1st", "train.eval_every=1st")
    ddpforge("predict", "runs/boxes", "--out", "found.jsonl")
    rows = [json.loads(line) for line in (measured / "found.jsonl").read_text().splitlines()]
    assert [len(row["boxes"]) for row in rows] == [1] * 8
    assert {len(row["boxes"][0]) for row in rows} == {4}
    assert {label for row in rows for label in row["labels"]} <= {1, 2}


def test_a_loss_of_evaluations_is_refused_as_a_monitor(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(measured)
    assert staged("boxes.toml").errors(strict=True) == {}
    assert staged("boxes.toml", 'checkpoint.keep={best=1, monitor="eval/loss"}').errors() == {
        "checkpoint.keep.monitor": "Detection has a loss only in training: an evaluation has none, so nothing reports "
        "eval/loss"
    }
    assert staged("boxes.toml", 'checkpoint.keep={best=1, monitor="eval/map/map"}').errors(strict=True) == {}


# ---------------------------------------------------------------------------------------------- the task
def batch(*boxes: int) -> Any:
    """Returns images with this number of boxes each."""
    images = [torch.rand(3, 8 + n, 9, generator=torch.Generator().manual_seed(n)) for n in boxes]
    corners = torch.tensor([1.0, 2.0, 5.0, 7.0])
    return images, [{"boxes": corners.repeat(n, 1), "labels": torch.ones(n, dtype=torch.int64)} for n in boxes]


class Means(nn.Module):
    """Returns means over images in training mode, or their sum."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.weight, self.reduction = nn.Parameter(torch.ones(())), reduction

    def forward(self, images: list[Tensor], targets: Any = None) -> Any:
        values = torch.stack([self.weight * image.mean() for image in images])
        if not self.training:
            return [{"boxes": torch.zeros(0, 4), "labels": torch.zeros(0), "scores": torch.zeros(0)} for _ in images]
        total = values.mean() if self.reduction == "mean" else values.sum()
        return {"a": total, "b": 3 * total}


def test_the_loss_is_the_weighted_mean_times_the_images() -> None:
    data = batch(1, 2, 3)
    means = sum(float(image.mean()) for image in data[0])
    loss, outputs = Detection(weights={"b": 0.5}).loss(Means(), data)
    assert float(loss) == pytest.approx(2.5 * means)  # type: ignore[arg-type]
    totals: Mapping[str, Any] = Detection().metrics(outputs, data)
    assert {name: float(one.sum / one.count) for name, one in totals.items()} == {
        "a": pytest.approx(means / 3),
        "b": pytest.approx(means),
    }
    loss, found = Detection().loss(Means().eval(), data)
    assert loss is None
    assert len(found) == 3


def test_a_sum_over_images_is_refused() -> None:
    check_sum_reduction(Means(), Detection(), batch(1, 1, 2, 2), 4)
    for weights in ({"c": 1.0}, {"a": 1.0, "c": 0.0}):
        with pytest.raises(UsageError, match="the model returns no loss `c`") as caught:
            Detection(weights=weights).loss(Means(), batch(1))
        assert caught.value.key == "task.weights"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (torch.zeros(2, 3, 4, 4), "the data gives float32"),
        ((torch.zeros(2, 3, 4, 4), torch.zeros(2)), "takes a list of images and a list of targets"),
        (([torch.zeros(3, 4, 4)], [{"boxes": torch.zeros(1, 4)}]), "dicts with boxes and labels"),
        (([torch.zeros(3, 4, 4)], []), "a list of images and a list of targets"),
        (
            ([torch.zeros(3, 4, 4)], [{"boxes": torch.zeros(2, 4), "labels": torch.zeros(1)}]),
            r"takes boxes \[n, 4\] and labels \[n\]",
        ),
    ],
)
def test_batches_of_another_form_are_refused(data: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Detection().loss(Means(), data)


@pytest.mark.parametrize(("mode", "message"), [(True, "takes a dict of losses"), (False, "takes a list of dicts")])
def test_a_model_with_another_contract_is_refused(mode: bool, message: str) -> None:
    class Logits(nn.Module):
        def forward(self, images: Any, targets: Any = None) -> Tensor:
            return torch.zeros(2, 3)

    with pytest.raises(UsageError, match=f"{message} .* which returns float32"):
        Detection().loss(Logits().train(mode), batch(1))


# ---------------------------------------------------------------------------------------------- mean average precision
def drawn(images: int) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Returns predictions and targets of images with zero to four boxes each."""
    draw = torch.Generator().manual_seed(0)
    found, wanted = [], []
    for number in range(images):
        count = number % 5
        corner = torch.rand(count, 2, generator=draw) * 50
        target = torch.cat([corner, corner + 5 + torch.rand(count, 2, generator=draw) * 40], dim=1)
        labels = torch.randint(1, 4, (count,), generator=draw)
        moved = torch.cat([target + torch.randn(count, 4, generator=draw), target[:1] + 60])
        scores = torch.rand(len(moved), generator=draw)
        found.append({"boxes": moved, "labels": torch.cat([labels, labels[:1]]), "scores": scores})
        wanted.append({"boxes": target, "labels": labels})
    return found, wanted


def precision(**options: Any) -> Metric:
    detection = pytest.importorskip("torchmetrics.detection")
    pytest.importorskip("pycocotools")
    return adopted(detection.MeanAveragePrecision)(name="map", **options)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_precision_over_ranks_is_that_of_torchmetrics(ranks: int) -> None:
    """Seven images in micro-batches of two; of five ranks one has no image."""
    found, wanted = drawn(7)
    own = pytest.importorskip("torchmetrics.detection").MeanAveragePrecision(class_metrics=True)
    metric = precision(class_metrics=True)
    own.update(found, wanted)
    expected = {name: value for name, value in own.compute().items() if name != "classes"}
    starts = [*range(0, 7, 2)]

    def run(one: Ranks) -> dict[str, float]:
        mine: Any = precision(class_metrics=True)
        rows = [mine(found[at : at + 2], wanted[at : at + 2]) for at in starts[one.rank :: ranks]]
        for each in rows:
            checked_quantity("map", each)
        quantities = {"map": sum(rows[1:], rows[0])} if rows else {}
        return one.reduce_metrics(quantities, {"map": metric if one.rank == 0 else mine})

    first, *others = in_threads(ranks, run)
    assert all(other == first for other in others)
    for name, value in expected.items():
        values = value.reshape(-1).tolist()
        keys = [f"map/{name}"] if value.ndim == 0 else [f"map/{name}/{i}" for i in range(len(values))]
        assert [first[key] for key in keys] == pytest.approx(values, abs=1e-6), name
    assert 0.1 < first["map/map"] < 0.9


def test_precision_without_any_box_is_a_number() -> None:
    nothing = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}
    found = in_threads(
        2,
        lambda one: one.reduce_metrics(
            {"map": (metric := precision())([nothing | {"scores": torch.zeros(0)}], [nothing])},
            {"map": metric},
        ),
    )
    assert found[0]["map/map"] == found[1]["map/map"] == -1


def test_masks_are_refused_by_name() -> None:
    metric: Any = precision(iou_type="segm")
    mask = {"masks": torch.ones(1, 4, 4, dtype=torch.bool), "labels": torch.ones(1, dtype=torch.int64)}
    with pytest.raises(UsageError, match="map of torchmetrics keeps detection_mask in a form that ranks cannot add up"):
        metric([mask | {"scores": torch.ones(1)}], [mask])


def test_a_missing_backend_names_the_extra() -> None:
    class Missing:
        def __init__(self, **_: Any) -> None:
            raise ModuleNotFoundError("`MAP` metric requires that `pycocotools` or `faster-coco-eval` installed.")

    Missing.__module__ = "torchmetrics.detection.mean_ap"
    with pytest.raises(SetupError, match="Missing needs a library that is not installed: `MAP` metric") as caught:
        adopted(Missing)()  # type: ignore[arg-type]
    assert "pycocotools" in caught.value.hints[0]


class Widest(Metric):
    name = "widest"

    def __call__(self, outputs: Any, targets: Any) -> SampleColumns:
        return SampleColumns(outputs, targets)

    def finish(self, outputs: Any, targets: Tensor) -> Mapping[str, float]:  # type: ignore[override]
        assert len(outputs) == len(targets)
        return {"widest": max(map(len, outputs)), "sum": float(sum(one.sum() for one in outputs))}


def test_lists_of_any_length_are_gathered_in_the_order_of_ranks() -> None:
    lists = [[torch.ones(2, 3), torch.ones(0, 3)], [torch.ones(5, 3)], []]

    def run(one: Ranks) -> dict[str, float]:
        mine = lists[one.rank]
        quantities: dict[str, Total | SampleColumns] = {}
        if mine:
            quantities["widest"] = Widest()(mine, torch.zeros(len(mine)))
        return one.reduce_metrics(quantities, {"widest": Widest()})

    assert in_threads(3, run) == [{"widest/widest": 5.0, "widest/sum": 21.0}] * 3


def test_lists_with_other_differences_are_refused() -> None:
    checked_quantity("m", SampleColumns([torch.ones(2, 3), torch.ones(1, 3)], torch.zeros(2)))
    with pytest.raises(PluginError, match="differ in more than their first size"):
        checked_quantity("m", SampleColumns([torch.ones(2, 3), torch.ones(1, 4)]))
    with pytest.raises(PluginError, match="columns of different lengths: 2, 3"):
        checked_quantity("m", SampleColumns([torch.ones(2, 3), torch.ones(1, 3)], torch.zeros(3)))
    with pytest.raises(PluginError, match="not of tensors with rows"):
        checked_quantity("m", SampleColumns([torch.ones(()), torch.ones(())]))


# ---------------------------------------------------------------------------------------------- annotations
def test_annotations_become_images_and_boxes(boxes: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = CocoDetection(annotations=boxes / "boxes.json", images=boxes / "images")
    assert "boxes.json: 1 boxes without area are left out" in caplog.text
    assert (len(data), data.classes, data.class_names) == (8, 3, ["background", "cat", "ball"])
    image, target = data[0]
    assert (image.shape, image.dtype) == ((3, 40, 24), torch.float32)
    assert float(image[2].max()) == pytest.approx(200 / 255)
    assert {name: (one.dtype, one.tolist()) for name, one in target.items()} == {
        "boxes": (torch.float32, [[6, 10, 18, 30]]),
        "labels": (torch.int64, [2]),
        "area": (torch.float32, [12 * 20]),
        "iscrowd": (torch.int64, [0]),
    }
    crowds = CocoDetection(annotations=boxes / "boxes.json", images=boxes / "images", crowds=True)[0][1]
    assert crowds["boxes"].tolist()[1] == [1, 2, 4, 6]
    assert (crowds["iscrowd"].tolist(), crowds["area"].tolist()) == ([0, 1], [240, 5])
    images, targets = data.collate([data[0], data[1]])
    assert [one.shape[1:] for one in images] == [(40, 24), (37, 28)]
    assert [len(one["boxes"]) for one in targets] == [1, 2]


@pytest.mark.parametrize(
    ("bbox", "warning"), [([0.1, 0.2, 0.5, 0.5], "all boxes are within one pixel"), (None, "no image has a box")]
)
def test_boxes_from_0_to_1_and_images_without_boxes_are_warned_of(
    boxes: Path, bbox: list[float] | None, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    content = json.loads((boxes / "boxes.json").read_text())
    content["annotations"] = [one | {"bbox": bbox} for one in content["annotations"]] if bbox else []
    (boxes / "boxes.json").write_text(json.dumps(content))
    CocoDetection(annotations=boxes / "boxes.json", images=boxes / "images")
    assert warning in caplog.text


def test_flips_move_the_boxes(boxes: Path) -> None:
    data = CocoDetection(annotations=boxes / "boxes.json", images=boxes / "images", crowds=True, flip=True)
    torch.manual_seed(0)
    assert {tuple(data[0][1]["boxes"][1].tolist()) for _ in range(20)} == {(1, 2, 4, 6), (20, 2, 23, 6)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"annotations": 3}, 'is not in COCO\'s format: it has no list "annotations"'),
        (
            {"annotations": [{"id": 7, "image_id": 1, "category_id": 3, "bbox": [1, 2, 3]}]},
            r"7 has the bbox \[1, 2, 3\]",
        ),
        ({"annotations": [{"id": 7, "image_id": 1, "category_id": 3}]}, "annotation 7 has the bbox None"),
        ({"images": [{"id": 1}], "annotations": []}, "an entry has no 'file_name'"),
        ({"categories": []}, "annotation .* has the category_id [37], which no category has"),
        ({"images": [], "annotations": []}, "has no images"),
        ({"images": [{"id": 1, "file_name": "gone.png"}], "annotations": []}, "there is no file .*gone.png"),
    ],
)
def test_wrong_annotations_are_refused(boxes: Path, change: dict[str, Any], message: str) -> None:
    file = boxes / "boxes.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises((SetupError, UsageError), match=message):
        CocoDetection(annotations=file, images=boxes / "images")


def test_an_empty_file_of_annotations_is_named(boxes: Path) -> None:
    (boxes / "boxes.json").write_text("\n")
    with pytest.raises(UsageError, match=r"boxes\.json is empty"):
        CocoDetection(annotations=boxes / "boxes.json", images=boxes / "images")


def test_torchmetric_keeps_lists_of_images_apart() -> None:
    metric = precision()
    assert isinstance(metric, TorchMetric)
    found, wanted = drawn(4)
    rows: Any = metric(found, wanted)
    lengths = [[len(one) for one in column] for column in rows.columns if column[0].shape[1:] != (0,)]
    assert lengths[0] == [len(one["boxes"]) for one in found]
    assert all(len(each) == 4 for each in lengths)
