"""Datasets of own files: folders of images, CSV tables, and parts of any dataset."""

import gzip
import json
import os
import pickle
import re
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


@pytest.mark.parametrize("cell", ["", "?", "N/A", '"1,234"', "nan", "-inf", "1_0", "0x10", "5%", "1e400", "1e39"])
@pytest.mark.parametrize("column", ["area", "price"])
def test_csv_cell_that_is_not_a_finite_number_is_refused_with_line_column_and_value(
    cell: str, column: str, tmp_path: Path
) -> None:
    row = {"area": "30", "price": "70"} | {column: cell}
    (tmp_path / "a.csv").write_text(f"area,price\n50,100\n{row['area']},{row['price']}\n")
    what = "too large for float32" if cell.startswith("1e") else "not a number"
    with pytest.raises(
        UsageError, match=rf"a\.csv:3: '{re.escape(cell.strip(chr(34)))}' in column '{column}' is {what}"
    ):
        CSVTable(path=tmp_path / "a.csv", target="price")


def test_csv_target_with_numbers_and_other_values_names_the_option_that_sets_their_meaning(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n" + "1,10\n" * 8 + "1,?\n2,7\n")
    with pytest.raises(UsageError, match=r"a\.csv:10: '\?' in column 'y' is not a number") as caught:
        CSVTable(path=tmp_path / "a.csv", target="y")
    assert caught.value.key == "target"
    assert list(caught.value.hints) == [
        "9 of 10 values of the column are numbers: mend or remove the row",
        'or set target_kind = "class", if each value is the name of a class',
    ]
    classes = CSVTable(path=tmp_path / "a.csv", target="y", target_kind="class")
    assert classes.class_names == ["7", "10", "?"]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ('x,y\n1,a\n2,"b\n3,a\n', {}, "3: a cell begins with a quote that is not closed"),
        ('x,y\n1,a\n2,"b"c\n3,a\n', {}, "3: a quote in a quoted cell is not doubled"),
        ('x,y\n1,"5\n2,a\n3,7"\n', {}, "2: the cell in column 'y' begins with a quote and goes on for 2 more"),
        ('x,n,y\n1,"5,a\n3,7",b\n', {"inputs": ["x"]}, "2: the cell in column 'n' begins with a quote and goes on"),
        ('x,y\n1,"' + "2,b\n" * 40000, {}, "2: a cell begins with a quote that is not closed"),
        ("x,y\n1,a\n2\n", {}, "3 has another number of cells than the 2 columns of the header: 1"),
        (
            "x,y\n1,a\n2, a\n",
            {},
            "2: the cell in column 'y' is 'a', and another row has ' a': they would be two classes",
        ),
        ("x,y\n1,1\n2,1.0\n", {"target_kind": "class"}, "3: the cell in column 'y' is '1.0', and another row has '1'"),
        ("x,y\n1,a\n2,\n", {}, "3: the cell in column 'y' is empty, not the name of a class"),
        ("x,y\n", {}, " has a header and no rows"),
        ("y\n1\n", {}, "has no column besides the target"),
    ],
)
def test_csv_rows_that_would_be_lost_or_misread_are_refused_with_their_line(
    text: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(UsageError) as caught:
        CSVTable(path=tmp_path / "a.csv", target="y", **options)
    assert message in caught.value.message
    assert "a.csv" in caught.value.message


def test_csv_text_of_several_lines_in_a_column_that_is_not_used_is_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('x,note,y\n1,"two\nlines, here",2\n3,"a ""b"" c",4\n')
    data = CSVTable(path=tmp_path / "a.csv", target="y", inputs=["x"])
    assert (data.inputs.tolist(), data.targets.tolist()) == ([[1], [3]], [[2], [4]])  # type: ignore[union-attr]


PLAIN = "x,y\n1,2\n3,4\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (PLAIN.encode("utf-16"), "is text in UTF-16, not CSV in UTF-8"),
        (PLAIN.encode("utf-32"), "is text in UTF-32"),
        (PLAIN.encode("utf-16-le"), ":1 has zero bytes"),
        ("x,y\n1,café\n".encode("latin-1"), ":2:6 has the byte 0xe9, which is not UTF-8"),
        (gzip.compress(PLAIN.encode()), "is compressed with gzip"),
        (b"PK\x03\x04" + b"0" * 20, "is a zip archive or a workbook"),
        (PLAIN.encode() + b"5,\0\n", ":4 has zero bytes"),
        (PLAIN.encode() + b"5,6\n" * 2**15 + b"\0\n", ":32772 has a zero byte"),
    ],
    ids=["utf-16", "utf-32", "utf-16-le", "latin-1", "gzip", "zip", "zero", "later zero"],
)
def test_csv_of_another_encoding_or_kind_is_refused_by_its_name(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(UsageError) as caught:
        CSVTable(path=tmp_path / "a.csv", target="y")
    assert f"{tmp_path}/a.csv" in caught.value.message
    assert message in caught.value.message
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf" + PLAIN.encode().replace(b"\n", b"\r\n"))
    assert CSVTable(path=tmp_path / "a.csv", target="y").input_names == ["x"]


@pytest.mark.parametrize(("delimiter", "written"), [(";", ";"), ("\t", "\\t"), ("|", "|")])
def test_csv_with_another_delimiter_names_the_option(delimiter: str, written: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(PLAIN.replace(",", delimiter))
    with pytest.raises(UsageError) as caught:
        CSVTable(path=tmp_path / "a.csv", target="y")
    assert caught.value.hints[0] == f'its columns are separated by "{written}": set delimiter = "{written}"'
    assert len(CSVTable(path=tmp_path / "a.csv", target="y", delimiter=delimiter)) == 2


def test_csv_of_many_columns_and_sparse_files_are_read_with_little_memory(tmp_path: Path) -> None:
    columns = 20_000
    header = ",".join(f"c{number}" for number in range(columns))
    (tmp_path / "wide.csv").write_text(f"{header},y\n" + ("0.5," * columns + "1\n") * 2)
    assert CSVTable(path=tmp_path / "wide.csv", target="y").inputs.shape == (2, columns)
    with pytest.raises(UsageError) as caught:
        CSVTable(path=tmp_path / "wide.csv", target="z")
    assert len(caught.value.hints[0]) < 200
    with (tmp_path / "sparse.csv").open("wb") as file:
        file.write(PLAIN.encode())
        file.truncate(2**34)
    with pytest.raises(UsageError, match=r"sparse\.csv:4 has zero bytes"):
        CSVTable(path=tmp_path / "sparse.csv", target="y")


def test_csv_path_that_is_a_pipe_does_not_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.csv")
    with pytest.raises(SetupError, match="is not a regular file"):
        CSVTable(path=tmp_path / "a.csv", target="y")


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


def test_csv_error_after_a_cell_with_line_breaks_has_the_line_of_its_row(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('x,note,y\n1,"a\nb\nc",5\n\n2,d,6\nbad,e,7\n')
    with pytest.raises(UsageError, match=r"a\.csv:7: 'bad' in column 'x' is not a number"):
        CSVTable(path=tmp_path / "a.csv", target="y", inputs=["x"])


# ---------------------------------------------------------------------------------------------- mistakes
@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("~/x.csv", 'write "${env:HOME}/x.csv"'),
        ("$DATA/x.csv", 'write "${env:DATA}/x.csv"'),
        ("https://example.org/x.csv", "is an address, but only files can be read"),
        ("C:/data/x.csv", "is a path of Windows"),
        (".", "it is a folder"),
        ("hauses.csv", "did you mean houses.csv?"),
        ("absent/x.csv", "looked in"),
        ("broken.csv", "it is a link to nowhere, which does not exist"),
    ],
)
def test_a_path_without_a_file_has_a_hint(
    path: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("houses.csv").write_text(CSV)
    Path("broken.csv").symlink_to("nowhere")
    with pytest.raises(SetupError, match="path: there is no file") as caught:
        CSVTable(path=Path(path), target="price")
    assert hint in "; ".join(caught.value.hints)


@pytest.mark.parametrize(
    ("text", "target", "message", "hint"),
    [
        ("1,2,cat\n3,4,dog\n", "y", "no column 'y'", "its first line must have the names of the columns"),
        ("# note\na,y\n1,2\n", "y", "no column 'y'", "its first line must have the names of the columns"),
        ("a,y\n1,2\n", "Y", "no column 'Y'", "did you mean 'y'?"),
        ("version https://git-lfs.github.com/spec/v1\n", "y", "is only a pointer of Git LFS", "git lfs pull"),
        (",a,y\n0,1,2\n1,2,3\n", "y", "a column of .* has no name", "to_csv(…, index=False)"),
    ],
)
def test_a_header_that_is_none_is_explained(text: str, target: str, message: str, hint: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        CSVTable(path=tmp_path / "t.csv", target=target)
    assert hint in "; ".join(caught.value.hints)


@pytest.mark.parametrize(
    ("folders", "options", "message"),
    [
        (("train/cat", "val/cat"), {}, "are splits, not classes: train, val"),
        (("cat", "dog", "eel/"), {}, "eel has no image, so its class could not be learned"),
        (("cat", "dog"), {"mean": [127.0] * 3, "std": [58.0] * 3}, r"pixels in \[0, 1\]: divide them by 255"),
    ],
)
def test_image_folders_that_would_be_learned_wrong_are_refused(
    folders: tuple[str, ...], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    for name in folders:
        (tmp_path / name).mkdir(parents=True)
        if not name.endswith("/"):
            Image.new("RGB", (4, 4)).save(tmp_path / name / "a.png")
    with pytest.raises((UsageError, ValueError), match=message):
        ImageFolder(path=tmp_path, size=4, **options)


def test_a_class_that_is_named_may_have_no_image(tmp_path: Path) -> None:
    for name in ("cat", "eel"):
        (tmp_path / name).mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "cat" / "a.png")
    assert ImageFolder(path=tmp_path, size=4, class_names=["cat", "eel"]).classes == 2


def test_a_target_among_the_inputs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("a,y\n1,2\n")
    with pytest.raises(UsageError, match="inputs: 'y' is the target"):
        CSVTable(path=tmp_path / "d.csv", target="y", inputs=["a", "y"])
