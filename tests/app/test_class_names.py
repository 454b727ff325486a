"""Class numbers belong to names: all data is numbered by the names of the training data, or refused by name."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from support.stages import dealt, staged
from torch.utils.data import ConcatDataset, Subset

import ddpforge
from ddpforge.app.class_names import with_class_names
from ddpforge.builtin.datasets.coco import CocoDetection
from ddpforge.builtin.datasets.folders import CSVTable, ImageFolder
from ddpforge.builtin.datasets.text import TextClasses
from ddpforge.builtin.datasets.views import Mixed, Part, TwoViews
from ddpforge.cli import main
from ddpforge.components.options import Nested
from ddpforge.components.registry import Registry
from ddpforge.errors import ForgeError, RecipeError, UsageError
from ddpforge.interfaces import class_names_of
from ddpforge.training.data_names import DataNames

POINTS = {"cat": (0, 0), "dog": (2, 0), "owl": (4, 0)}
RECIPE: dict[str, Any] = {
    "name": "named",
    "model": {"use": "mlp", "inputs": 2, "outputs": 3, "hidden": []},
    "data": {"train": {"use": "csv", "path": "train.csv", "target": "label"}},
    "task": {"use": "classification", "metrics": ["accuracy"]},
    "optimizer": {"use": "sgd", "lr": 0.1},
    "train": {"length": "1st", "global_batch": 4, "device": "cpu"},
}


class Named(torch.utils.data.Dataset[Any]):
    """A user's dataset with names, which takes none."""

    def __init__(self, *names: str, labels: Sequence[int] = (0, 1)) -> None:
        self.class_names, self.numbers = list(names), list(labels)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Any:
        return torch.ones(2), self.numbers[index]


def write(path: Path, *names: str, columns: str = "x,y,label") -> Path:
    """Writes a table with four rows of each class."""
    rows = [dict(zip(("x", "y", "label"), (*POINTS.get(name, (9, 9)), name), strict=True)) for name in names * 4]
    lines = [",".join(str(row[column]) for column in columns.split(",")) for row in rows]
    path.write_text("\n".join([columns, *lines]) + "\n")
    return path


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "train.csv", "cat", "dog", "owl")
    write(tmp_path / "few.csv", "owl", "dog")
    write(tmp_path / "other.csv", "dog", "fox")
    return tmp_path


def recipe(**data: Any) -> dict[str, Any]:
    return RECIPE | {"data": RECIPE["data"] | data}


def table(path: str, **options: Any) -> dict[str, Any]:
    return {"use": "csv", "path": path, "target": "label", **options}


def counts(data: Any) -> dict[int, int]:
    """Returns the number of samples of each class number."""
    numbers = [int(data[index][1]) for index in range(len(data))]
    return {number: numbers.count(number) for number in sorted(set(numbers))}


# ---------------------------------------------------------------------------------------------- evaluation sets
def test_evaluation_set_with_fewer_classes_is_numbered_by_the_names_of_the_training_data() -> None:
    part = {"use": "part", "share": "50%", "shuffle": False, "of": table("few.csv")}
    built = dealt(recipe(eval={"few": table("few.csv"), "part": part}))
    assert built.names.classes == ["cat", "dog", "owl"]
    assert [counts(built.data[key]) for key in ("train", "eval.few", "eval.part")] == [
        {0: 4, 1: 4, 2: 4},
        {1: 4, 2: 4},
        {1: 2, 2: 2},
    ]
    assert all(data.class_names == ["cat", "dog", "owl"] for data in built.data.values())


def test_evaluation_set_with_an_unknown_class_is_refused_with_file_line_and_name() -> None:
    errors = staged(recipe(eval=table("other.csv"))).errors()
    assert errors == {
        "data.eval.target": "other.csv:3: the cell in column 'label' is 'fox': the class `fox` is not one of the "
        "training data, or of `class_names`: `cat`, `dog`, `owl`"
    }


def test_numbers_as_class_names_are_classes_in_evaluation_data_with_numbers_only(here: Path) -> None:
    (here / "mixed.csv").write_text("x,y,label\n1,1,1\n2,2,2\n3,3,ten\n")
    (here / "plain.csv").write_text("x,y,label\n2,2,2\n")
    built = dealt(
        recipe(train=table("mixed.csv", target_kind="class"), eval=table("plain.csv")), sets=["train.global_batch=1"]
    )
    assert (built.data["eval"].class_names, counts(built.data["eval"])) == (["1", "2", "ten"], {1: 1})


def test_images_of_an_evaluation_set_have_the_numbers_of_their_folders_in_the_training_data(here: Path) -> None:
    for split, names in {"train": ["cat", "dog", "owl"], "eval": ["owl"], "other": ["ape", "owl"]}.items():
        for name in names:
            (here / split / name).mkdir(parents=True)
            Image.new("RGB", (4, 4)).save(here / split / name / "0.png")
    folder = {"use": "image_folder", "size": 4}
    model = {"use": "mlp", "inputs": 48, "outputs": 3}
    images = recipe(train={**folder, "path": "train"}, eval={**folder, "path": "eval"}) | {"model": model}
    assert counts(dealt(images).data["eval"]) == {2: 1}
    (message,) = staged(images, "data.eval.path=other").errors().values()
    assert message == (
        "other/ape: the class `ape` is not one of the training data, or of `class_names`: `cat`, `dog`, `owl`"
    )


def test_boxes_of_an_evaluation_set_have_the_numbers_of_their_categories_in_the_training_data(here: Path) -> None:
    Image.new("RGB", (8, 8)).save(here / "a.png")

    def annotated(name: str, categories: dict[int, str]) -> Path:
        boxes = [{"id": 1, "image_id": 1, "bbox": [0, 0, 4, 4], "category_id": max(categories)}]
        kinds = [{"id": number, "name": kind} for number, kind in categories.items()]
        content = {"images": [{"id": 1, "file_name": "a.png"}], "categories": kinds, "annotations": boxes}
        (here / name).write_text(json.dumps(content))
        return here / name

    train = CocoDetection(annotations=annotated("train.json", {1: "cat", 2: "dog", 3: "owl"}), images=here)
    few = annotated("few.json", {7: "dog", 9: "owl"})
    assert train[0][1]["labels"].tolist() == [3]
    found = CocoDetection(annotations=few, images=here, class_names=train.class_names)
    assert (found[0][1]["labels"].tolist(), found.classes) == ([3], 4)
    with pytest.raises(UsageError, match="the class `fox` is not one of the training data"):
        CocoDetection(annotations=annotated("fox.json", {1: "fox"}), images=here, class_names=train.class_names)
    with pytest.raises(UsageError, match="the class 0 of detection is the background"):
        CocoDetection(annotations=few, images=here, class_names=["dog", "owl"])
    with pytest.raises(UsageError, match="two categories with the name 'dog'"):
        CocoDetection(annotations=annotated("twice.json", {1: "dog", 2: "dog"}), images=here)
    kinds = [{"id": 0, "name": "dog"}, {"id": 0, "name": "owl"}]
    (here / "zeros.json").write_text(json.dumps({"images": [], "categories": kinds, "annotations": []}))
    with pytest.raises(UsageError, match="two categories with the id 0"):
        CocoDetection(annotations=here / "zeros.json", images=here)


# ---------------------------------------------------------------------------------------------- sources
def test_sources_with_different_classes_have_common_numbers(here: Path) -> None:
    write(here / "two.csv", "dog", "fox")
    built = dealt(
        recipe(train={"a": table("few.csv"), "b": table("train.csv"), "c": table("two.csv")}, eval=table("few.csv")),
        sets=["model.outputs=4"],
    )
    assert built.names.classes == ["dog", "owl", "cat", "fox"]
    sources = dict(built.data["train"].items())
    assert {name: counts(source) for name, source in sources.items()} == {
        "a": {0: 4, 1: 4},
        "b": {0: 4, 1: 4, 2: 4},
        "c": {0: 4, 3: 4},
    }
    assert built.data["train"].classes == 4


def test_names_of_classes_are_not_columns_of_a_mixture_or_a_part_with_as_many_samples(here: Path) -> None:
    (here / "three.csv").write_text("x,y,label\n1,1,a\n2,2,b\n3,3,c\n")
    data = CSVTable(path=here / "three.csv", target="label")
    part = Part(of=data, share="67%")
    assert (len(part), part.class_names, part.input_names) == (2, ["a", "b", "c"], ["x", "y"])
    built = dealt(recipe(train={"one": table("three.csv"), "two": table("three.csv")}), sets=["train.global_batch=2"])
    assert built.data["train"].class_names == ["a", "b", "c"]


# ---------------------------------------------------------------------------------------------- a user's datasets
@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("dog", "cat"), "has the order `dog`, `cat`, and the training data the order `cat`, `dog`"),
        (("dog",), "lacks the class `cat` of the training data; it has `dog`"),
        (("cat", "owl"), "has the class `owl`, which the training data lacks; this has `cat`, `dog`"),
    ],
)
def test_own_dataset_that_cannot_be_numbered_again_is_refused_by_name(names: tuple[str, ...], message: str) -> None:
    changes = {"data": {}, "model": RECIPE["model"] | {"outputs": 2}}
    with pytest.raises(RecipeError) as caught:
        ddpforge.train(RECIPE | changes, train_data=Named("cat", "dog"), eval_data=Named(*names, labels=[0]))
    (problem,) = caught.value.problems
    assert problem.message == f"[data.eval] {message}, so its class numbers mean other classes"


def test_own_dataset_with_the_first_classes_is_accepted() -> None:
    changes = {"data": {}, "train.eval_every": "1st"}
    few = Subset(Named("cat", labels=[0, 0]), [1])
    folder = ddpforge.train(RECIPE | changes, train_data=Named("cat", "dog"), eval_data=few).folder
    assert "eval/accuracy" in json.loads((folder / "status.json").read_text())["metrics"]


def test_own_dataset_gets_the_names_of_the_training_data_as_its_option(here: Path) -> None:
    (here / "own.py").write_text(
        "import torch\n\n\nclass Own:\n"
        "    def __init__(self, *, name: str, class_names: list[str] | None = None) -> None:\n"
        "        self.class_names, self.name = class_names or sorted([name, 'owl']), name\n\n"
        "    def __len__(self):\n        return 4\n\n"
        "    def __getitem__(self, index):\n        return torch.ones(2), self.class_names.index(self.name)\n"
    )
    own = {"use": "./own.py:Own", "name": "owl"}
    built = dealt(recipe(eval={"given": own, "set": {**own, "class_names": ["cat", "dog", "owl"]}}))
    assert [counts(built.data[key]) for key in ("eval.given", "eval.set")] == [{2: 4}, {2: 4}]


def test_class_names_of_torch_and_hugging_face_objects() -> None:
    datasets = pytest.importorskip("datasets")
    one, other = Named("cat", "dog"), Named("dog", "cat")
    assert class_names_of(Subset(one, [0])) == ["cat", "dog"]
    assert class_names_of(ConcatDataset([one, one])) == ["cat", "dog"]
    with pytest.raises(UsageError, match="number their classes differently: cat, dog and dog, cat"):
        class_names_of(ConcatDataset([one, other]))
    features = datasets.Features({"x": datasets.Value("float32"), "y": datasets.ClassLabel(names=["no", "yes"])})
    assert class_names_of(datasets.Dataset.from_dict({"x": [1.0], "y": [1]}, features=features)) == ["no", "yes"]
    torchvision_like = Named()
    torchvision_like.classes = ["a", "b"]  # type: ignore[attr-defined]
    assert class_names_of(torchvision_like) == ["a", "b"]
    for form in (np.array(["a", "b"]), ("a", "b"), {1: "b", 0: "a"}):
        one.class_names = form  # type: ignore[assignment]
        assert class_names_of(one) == ["a", "b"]
    assert class_names_of([1, 2]) == []


def test_wrappers_pass_on_the_names() -> None:
    images = Named("cat", "dog")
    for made in (Part(of=images, share="50%"), TwoViews(of=images), Mixed(of=images)):
        assert class_names_of(made) == ["cat", "dog"]
    assert Mixed(of=images).classes == 2


def test_text_classes_follow_the_names_of_files_and_folders(here: Path) -> None:
    for folder in ("train", "eval"):
        for name in ("a", "b", "c"):
            (here / folder).mkdir(exist_ok=True)
            (here / folder / f"{name}.txt").write_text(name * 100)
    options: Any = {"block_size": 10, "split": "train"}
    train = TextClasses(paths=[Path("train/a.txt"), Path("train/b.txt"), Path("train/c.txt")], **options)
    assert train.class_names == ["a", "b", "c"]
    few = TextClasses(paths=[Path("eval/c.txt"), Path("eval/b.txt")], class_names=train.class_names, **options)
    assert few.__getitems__([0, len(few) - 1])[1].tolist() == [2, 1]
    (here / "x.txt").write_text("x" * 100)
    others = TextClasses(paths=[Path("x.txt")] * 3, class_names=train.class_names, **options)
    assert others.__getitems__([0, len(others) - 1])[1].tolist() == [0, 2]
    with pytest.raises(UsageError, match="the class `x` is not one of the training data"):
        TextClasses(paths=[Path("train/a.txt"), Path("x.txt")], class_names=train.class_names, **options)


# ---------------------------------------------------------------------------------------------- columns
@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("y,x,label", "has the order `y`, `x`, and the training data the order `x`, `y`"),
        ("x,label", "lacks the column `y` of the training data; it has `x`"),
    ],
)
def test_columns_in_another_order_than_in_the_training_data_are_refused(columns: str, message: str, here: Path) -> None:
    write(here / "swapped.csv", "dog", columns=columns)
    assert staged(recipe(eval=table("swapped.csv"))).errors()["data.eval"] == (
        f"[data.eval] {message}, so its values would go to other inputs of the model"
    )
    if columns == "y,x,label":
        assert dealt(recipe(eval=table("swapped.csv", inputs=["x", "y"]))).data["eval"][0][0].tolist() == [2, 0]


# ---------------------------------------------------------------------------------------------- a run afterwards
def test_a_run_evaluates_and_predicts_later_data_by_its_names(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ddpforge.train(recipe(eval=table("few.csv"))).folder
    (here / "train.csv").unlink()  # predictions do not need it
    ddpforge.predict(folder, here / "p.jsonl")
    rows = [json.loads(line) for line in (here / "p.jsonl").read_text().splitlines()]
    assert [(row["target"], row["target_name"]) for row in rows] == [(2, "owl"), (1, "dog")] * 4
    assert all(row["class_name"] == ["cat", "dog", "owl"][row["class"]] for row in rows)
    with pytest.raises(ForgeError, match="the class `fox` is not one of the training data"):
        ddpforge.evaluate(folder, sets=["data.eval.path=other.csv"])
    with pytest.raises(ForgeError, match="the class `fox` is not one of the training data"):
        ddpforge.predict(folder, here / "q.jsonl", data=["path=other.csv"])
    assert "older version" not in capsys.readouterr().err


def test_rows_without_a_target_are_predicted_with_names(here: Path) -> None:
    folder = ddpforge.train(recipe(eval=table("few.csv"))).folder
    (here / "new.csv").write_text("x,y\n2,0\n4,0\n0,0\n")
    with pytest.raises(ForgeError, match=r"there is no column 'label' in new\.csv:1"):
        ddpforge.predict(folder, here / "p.jsonl", data=["path=new.csv"])
    ddpforge.predict(folder, here / "p.jsonl", data=["path=new.csv", "labeled=false"])
    rows = [json.loads(line) for line in (here / "p.jsonl").read_text().splitlines()]
    assert [sorted(row) for row in rows] == [["class", "class_name", "index", "probability"]] * 3
    labeled = ddpforge.predict(folder, here / "few.jsonl", data=["labeled=false"])
    assert labeled.samples == 8  # the column of the target is not read


def test_images_without_class_folders_are_predicted_with_names(here: Path) -> None:
    for name, gray in {"black": 0, "white": 255}.items():
        (here / "train" / name).mkdir(parents=True)
        Image.fromarray(np.full((4, 4), gray, np.uint8)).save(here / f"train/{name}/0.png")
    (here / "new/more").mkdir(parents=True)
    Image.new("RGB", (4, 4), "white").save(here / "new/more/b.png")
    Image.new("RGB", (4, 4)).save(here / "new/a.png")
    changes = {
        "data": {"train": {"use": "image_folder", "path": "train", "size": 4}},
        "model": {"use": "mlp", "inputs": 48, "outputs": 2, "hidden": []},
        "train": RECIPE["train"] | {"length": "40st", "global_batch": 2},
    }
    folder = ddpforge.train(RECIPE | changes).folder
    with pytest.raises(ForgeError, match=r"path: new has no folder with images|the class `more`"):
        ddpforge.predict(folder, here / "p.jsonl", data=["train", "path=new"])
    ddpforge.predict(folder, here / "p.jsonl", data=["train", "path=new", "labeled=false"])
    rows = [json.loads(line) for line in (here / "p.jsonl").read_text().splitlines()]
    assert [row["class_name"] for row in rows] == ["black", "white"]
    assert len(ImageFolder(path=here / "new", size=4, labeled=False)) == 2


def test_data_show_has_the_names_of_the_classes(here: Path) -> None:
    (here / "r.toml").write_text(
        'recipe = 2\nname = "named"\nmodel = { use = "mlp", inputs = 2, outputs = 3 }\n'
        'data.train = { use = "csv", path = "train.csv", target = "label" }\n'
        'data.eval = { use = "csv", path = "few.csv", target = "label" }\n'
        'task.use = "classification"\noptimizer = { use = "sgd", lr = 0.1 }\n'
        'train = { length = "1st", global_batch = 4, device = "cpu" }\n'
    )
    shown = CliRunner().invoke(main, ["data", "show", "r.toml", "--split", "eval"])
    assert shown.output.startswith("3 classes: 0: cat, 1: dog, 2: owl\neval, batch 1: 4 samples\n")
    as_json = CliRunner().invoke(main, ["data", "show", "r.toml", "--split", "eval", "--json"])
    assert json.loads(as_json.output)["class_names"] == ["cat", "dog", "owl"]


def test_checkpoint_without_names_is_evaluated_with_a_warning(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr(DataNames, "as_json", lambda self: {})
        folder = ddpforge.train(recipe(eval=table("train.csv"))).folder
    ddpforge.evaluate(folder)
    assert "the checkpoint is of an older version, without the names of classes" in capsys.readouterr().err
    assert DataNames.recorded({"train": {"length": 3}}) is None
    several = DataNames.recorded({"train.a": {"class_names": ["x"]}, "train.b": {"class_names": []}})
    assert several
    assert several.classes == ["x"]
    assert not DataNames.recorded({"train": {"class_names": 3}}).classes  # type: ignore[union-attr]


def test_classes_that_changed_since_the_checkpoint_stop_a_resume(here: Path) -> None:
    changes = {"train": RECIPE["train"] | {"length": "2st"}, "checkpoint": {"every": "1st"}}
    ddpforge.train(recipe() | changes)
    (here / "train.csv").write_text((here / "train.csv").read_text().replace("owl", "zebra"))
    with pytest.raises(UsageError, match="classes cat, dog, owl → cat, dog, zebra"):
        ddpforge.train(recipe() | changes | {"train": RECIPE["train"] | {"length": "3st"}})


# ---------------------------------------------------------------------------------------------- kinds of targets
def test_tasks_refuse_targets_of_the_other_kind_by_the_name_of_the_option(here: Path) -> None:
    (here / "numbers.csv").write_text("x,y,label\n1,1,0\n2,2,1\n3,3,2\n1,2,0\n")
    (message,) = staged(recipe(train=table("numbers.csv"))).errors().values()
    assert message == "task classification takes classes, but the targets of CSVTable are numbers"
    assert dealt(recipe(train=table("numbers.csv", target_kind="class"))).names.classes == ["0", "1", "2"]
    regression = RECIPE | {"task": {"use": "regression"}, "model": RECIPE["model"] | {"outputs": 1}}
    (message,) = staged(regression).errors().values()
    assert message == "task regression takes numbers, but the targets of CSVTable are classes: cat, dog, owl"


# ---------------------------------------------------------------------------------------------- components
def nested(**options: Any) -> Nested:
    given = {"path": "a.csv", "target": "y", **options}
    return Nested(kind="data", use="csv", options=given, base=Path(), plain={"use": "csv", **given})


def test_names_of_the_recipe_stay_and_datasets_in_lists_and_tables_get_those_of_training() -> None:
    registry, names = Registry.installed(), ["cat", "dog"]
    assert with_class_names(registry, nested(), names).options["class_names"] == names
    assert with_class_names(registry, nested(class_names=["owl"]), names).options["class_names"] == ["owl"]
    assert with_class_names(registry, nested(), []).options.get("class_names") is None

    of = {"list": [nested(), 3], "tuple": (nested(),), "table": {"x": nested()}, "text": "a.csv"}
    found = with_class_names(registry, nested(**of), names).options
    inside = [found["list"][0], found["tuple"][0], found["table"]["x"]]
    assert [one.options["class_names"] for one in inside] == [names] * 3
    assert (found["list"][1], type(found["tuple"]), found["text"]) == (3, tuple, "a.csv")
