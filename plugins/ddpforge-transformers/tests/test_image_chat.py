"""Chats with images: rows, learnt tokens, batches, and the mistakes of users."""

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from chats import CHATML, byte_tokenizer
from datasets import Dataset, List
from datasets import Image as ImageFeature
from ddpforge.errors import UsageError
from PIL import Image
from torch import Tensor
from transformers import AutoProcessor
from vlms import FAMILIES, chats, pictures, prepare, processor, template

from ddpforge_transformers.image_chat import ImageChatData
from ddpforge_transformers.models import image_text_to_text
from ddpforge_transformers.packing import PackedData
from ddpforge_transformers.tasks import CausalLM


def written(folder: Path, rows: list[Any], name: str = "train.jsonl") -> Path:
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    processor(request.param, folder / "model")
    return request.param, folder


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a processor of LLaVA, whose images have four tokens each, and twelve pictures."""
    folder = tmp_path_factory.mktemp("llava")
    processor("llava", folder / "model")
    pictures(folder)
    return folder


def by_processor(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Returns the batch of transformers, with the labels of its generation marks."""
    made = AutoProcessor.from_pretrained(folder / "model")
    messages = []
    for row in rows:
        files = iter(row["images"])
        mine = [dict(one) for one in row["messages"]]
        for one in mine:
            one["content"] = [
                {"type": "image", "image": Image.open(folder / next(files))} if part["type"] == "image" else part
                for part in one["content"]
            ]
        messages.append(mine)
    found = made.apply_chat_template(
        messages,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        return_assistant_tokens_mask=True,
        processor_kwargs={"padding": True, "padding_side": "right"},
    )
    labels = found["input_ids"].masked_fill(found.pop("assistant_masks") == 0, -100)
    return {**found, "labels": labels}


def test_batches_and_losses_are_those_of_transformers(family: tuple[str, Path]) -> None:
    """Compares batches with none, one and two images per chat, and the loss of transformers times its tokens."""
    name, folder = family
    rows = chats(folder)[:8]
    data = ImageChatData(path=written(folder, rows), processor=str(folder / "model"))
    found, wanted = data.collate([data[number] for number in range(8)]), by_processor(folder, rows)
    assert found.keys() == wanted.keys()
    for key in ("input_ids", "attention_mask", "labels"):
        assert torch.equal(found[key], wanted[key]), key
    torch.manual_seed(0)
    model: Any = image_text_to_text(model_type=name, options=FAMILIES[name]).eval()
    task = CausalLM()
    with torch.no_grad():
        loss, number = task.loss(model, found)[0], task.count(found)
        theirs = model(**wanted).loss
    assert float(loss / number) == pytest.approx(float(theirs), rel=1e-6)
    assert data.lengths().tolist() == [len(data[number]["input_ids"]) for number in range(8)]


def test_tokens_of_images_are_never_learnt(family: tuple[str, Path]) -> None:
    name, folder = family
    text = template(name).replace("{{ part.text }}{% endfor %}<|im_end|>{% endgeneration %}", "{% if part.type == "
        "'image' %}" + {"qwen2_vl": "<|image_pad|>", "gemma3": "<boi>"}.get(name, "<image>") + "{% else %}"
        "{{ part.text }}{% endif %}{% endfor %}<|im_end|>{% endgeneration %}")  # fmt: skip
    (folder / "answers.jinja").write_text(text)
    file, _ = pictures(folder)[0]
    said = [{"type": "text", "text": "red"}, {"type": "image", "path": file}, {"type": "text", "text": "blue"}]
    row = {"messages": [{"role": "user", "content": "Draw"}, {"role": "assistant", "content": said}]}
    data = ImageChatData(
        path=written(folder, [row], "draw.jsonl"), processor=str(folder / "model"), template=folder / "answers.jinja"
    )
    learnt = data[0]["labels"]
    assert data.decode(learnt[learnt >= 0].tolist()) == "redblue"


def test_a_batch_without_images_has_one_that_no_learnt_token_sees(family: tuple[str, Path]) -> None:
    """Compares with the samples alone; checks that each gradient of the vision tower is 0."""
    name, folder = family
    rows = chats(folder, (0, 0, 0, 0))[:3]
    data = ImageChatData(path=written(folder, rows, "texts.jsonl"), processor=str(folder / "model"))
    samples = [data[number] for number in range(3)]
    batch = data.collate(samples)
    torch.manual_seed(0)
    model: Any = image_text_to_text(model_type=name, options=FAMILIES[name])
    task = CausalLM()
    loss = task.loss(model, batch)[0]
    loss.backward()
    alone = []
    for sample in samples:
        alone.append(task.loss(model, {key: values[None] for key, values in sample.items()})[0].detach())
    assert float(loss.detach()) == pytest.approx(float(sum(alone)), rel=1e-6)
    tower = model.get_encoder(modality="image")
    assert all(float(one.grad.abs().max()) == 0 for one in tower.parameters() if one.requires_grad)
    assert any(one.requires_grad for one in tower.parameters())


def test_all_ways_to_write_an_image_give_the_same_sample(llava: Path) -> None:
    """Tries parts with a file under each key, `images` or `image` of the line, `<image>` in texts, and plain texts."""
    file = str(llava / "pictures" / "0.png")
    answer = {"role": "assistant", "content": "red"}

    def asked(*parts: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "Which?"}]}, answer]}

    plain = {"messages": [{"role": "user", "content": "Which?"}, answer]}
    marked = {"messages": [{"role": "user", "content": "<image>Which?"}, answer]}
    rows = [
        *(asked({"type": "image", key: name}) for key in ("image", "path", "url") for name in (file, "pictures/0.png")),
        asked({"type": "image", "url": f"file://{file}"}),
        asked({"type": "image_url", "image_url": {"url": file}}),
        asked({"type": "image"}) | {"images": ["pictures/0.png"]},
        asked({"type": "image"}) | {"image": "pictures/0.png"},
        asked({"type": "image"}) | {"images": [{"path": "pictures/0.png", "bytes": None}]},
        plain | {"images": [file]},
        marked | {"image": file},
    ]
    content = Path(file).read_bytes()
    inline = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    rows += [plain | {"images": [inline]}, asked({"type": "image_url", "image_url": {"url": inline}})]
    data = ImageChatData(path=written(llava, rows, "ways.jsonl"), processor=str(llava / "model"))
    for number in range(1, len(rows)):
        for key, values in data[0].items():
            assert torch.equal(values, data[number][key]), rows[number]
    turns = [{"from": "human", "value": "<image>Which?"}, {"from": "gpt", "value": "red"}]
    row = {"conversations": turns, "image": "pictures/0.png"}
    other = ImageChatData(path=written(llava, [row], "turns.jsonl"), processor=str(llava / "model"))
    assert torch.equal(other[0]["input_ids"], data[0]["input_ids"])


def test_images_in_parquet_files_and_datasets_are_those_of_their_files(llava: Path) -> None:
    """Tries a column of images, one of lists, and parts of messages, as {bytes, path} and as a feature of datasets."""
    rows = chats(llava)[:4]
    files = ImageChatData(path=written(llava, rows, "files.jsonl"), processor=str(llava / "model"))
    messages = [row["messages"] for row in rows]
    images = [[{"bytes": (llava / name).read_bytes(), "path": None} for name in row["images"]] for row in rows]
    pq.write_table(pa.table({"messages": messages, "images": images}), llava / "inside.parquet")
    whole = Dataset.from_dict({"messages": messages, "images": images})
    whole.cast_column("images", List(ImageFeature())).save_to_disk(llava / "dataset")
    for path in ("inside.parquet", "dataset"):
        data = ImageChatData(path=llava / path, processor=str(llava / "model"))
        assert len(data) == len(rows)
        for number in range(len(rows)):
            for key, values in files[number].items():
                assert torch.equal(values, data[number][key])
    single = [{"bytes": one[0]["bytes"], "path": "a.png"} for one in images if len(one) == 1]
    texts = [each for each, one in zip(messages, images, strict=True) if len(one) == 1]
    one = Dataset.from_dict({"messages": texts, "image": single}).cast_column("image", ImageFeature())
    one.save_to_disk(llava / "single")
    assert torch.equal(
        ImageChatData(path=llava / "single", processor=str(llava / "model"))[0]["pixel_values"],
        files[0]["pixel_values"],
    )


def test_the_images_of_a_batch_are_drawn_with_their_names(llava: Path) -> None:
    data = ImageChatData(path=written(llava, chats(llava)[:3], "draw.jsonl"), processor=str(llava / "model"))
    images, names = data.batch_images(data.collate([data[1], data[0]]))
    assert names == ["5.png", "6.png", "0.png"]
    assert images.shape == (3, 3, 128, 128)
    with Image.open(llava / "pictures" / "0.png") as opened:
        assert images[2][:, 64, 64].tolist() == list(
            opened.convert("RGB").getpixel((opened.width // 2, opened.height // 2))
        )


def test_data_show_has_the_number_of_tokens_and_the_file_of_each_image(llava: Path) -> None:
    data = ImageChatData(path=written(llava, chats(llava)[1:2], "show.jsonl"), processor=str(llava / "model"))
    [parts] = data.text_parts(data.collate([data[0]]))
    assert [text for kind, text in parts if kind == "special" and "x" in text] == [
        "<image> x 4",
        "<image> x 4",
        "images: 5.png 24x24, 6.png 20x30",
    ]
    assert [text for kind, text in parts if kind == "learnt"] == ["green and blue<|im_end|>"]


def test_images_are_turned_by_their_exif_data(llava: Path) -> None:
    wide = Image.new("RGB", (30, 10), "red")
    tags = Image.Exif()
    tags[0x0112] = 6
    wide.save(llava / "turned.jpg", exif=tags)
    row = chats(llava)[0] | {"images": ["turned.jpg"]}
    data = ImageChatData(path=written(llava, [row], "turned.jsonl"), processor=str(llava / "model"))
    assert data[0]["pixel_values"].shape == (1, 3, 16, 16)
    assert data._samples[0][1][0].size == (10, 30)


def test_long_chats_are_refused_or_left_out(llava: Path) -> None:
    """Checks it, because a cut would remove tokens of images, or leave images without tokens."""
    rows = chats(llava)[:4]
    file = written(llava, rows, "long.jsonl")
    with pytest.raises(ValueError, match=r"line 1 has 31 tokens, 4 of them for 1 images, more than max_length = 10"):
        ImageChatData(path=file, processor=str(llava / "model"), max_length=10)
    data = ImageChatData(path=file, processor=str(llava / "model"), max_length=40, truncation="drop")
    assert 0 < len(data) < 4
    assert all(len(data[number]["input_ids"]) <= 40 for number in range(len(data)))


def test_packing_is_refused(llava: Path) -> None:
    data = ImageChatData(path=written(llava, chats(llava)[:4], "pack.jsonl"), processor=str(llava / "model"))
    with pytest.raises(ValueError, match="have images, which cannot be packed"):
        PackedData(of=data)


def part(**keys: Any) -> dict[str, Any]:
    """Returns a row whose user's message has one part of the type image."""
    content = [{"type": "image", **keys}, {"type": "text", "text": "x"}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "red"}]}


PICTURE = "pictures/0.png"
TEXT = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "red"}]}


@pytest.mark.parametrize(
    ("row", "error"),
    [
        (part(image="none.png"), "line 1: there is no image .*none.png"),
        (part(image="broken.png"), "broken.png is not an image that PIL can read"),
        (part(image="pictures"), "is a folder, but a file with an image is expected"),
        (part(image=""), "the path of an image is empty"),
        (part(image="https://example.org/a.png"), "a.png is not downloaded"),
        (part(image="data:image/png;base64,AAAA"), "line 1: image 0 of the row is not an image that PIL can read"),
        (part(image="data:image/png;base64,AA*A"), "the data: URL of an image is not base64"),
        (part(image="data:image/png,AAAA"), "the URL data:image/png,AAAA…: expected data:image/png;base64,"),
        (part(image={"bytes": "AAAA", "path": None}), "given as dict: expected the path of its file, or the content"),
        (part(image=7), "given as int: expected the path"),
        (part(file=PICTURE), r'messages\[0\].content\[0\] has the unknown key "file": expected one of "image", "path"'),
        (part(image=PICTURE, path=PICTURE), "has 2 files: expected one"),
        (part(), r'"images" has 0 images, but the messages have one place'),
        (part() | {"images": [PICTURE, PICTURE]}, '"images" has 2 images, but the messages have one place'),
        (part(image=PICTURE) | {"images": [PICTURE]}, "the parts of its messages have files of their own: remove one"),
        (TEXT | {"images": PICTURE}, '"images" is str: expected a list of files'),
        (TEXT | {"images": [PICTURE], "image": PICTURE}, 'has "image" and "images": expected one of them'),
        (part(type="video", video="a.mp4"), "is of the type video"),
        ({"messages": [{"role": "user", "content": "See <image>."}, TEXT["messages"][1]]}, "has the text <image>"),
        ({"prompt": "x", "completion": "y"}, 'have no place for images: write "messages"'),
        ({"prompt": "x", "completion": "y", "images": [PICTURE]}, '"images" has 1 images, but the messages have 0'),
        ({"messages": [{"role": "user", "content": "\U000f8f00"}, TEXT["messages"][1]]}, r"has the character U\+F8F00"),
    ],
)
def test_invalid_rows_are_refused_with_file_and_line(llava: Path, row: dict[str, Any], error: str) -> None:
    (llava / "broken.png").write_bytes(b"not an image")
    with pytest.raises(ValueError, match=error):
        ImageChatData(path=written(llava, [row], "wrong.jsonl"), processor=str(llava / "model"))
    both = written(llava, [row, part(image=PICTURE)], "wrong.jsonl")
    if "prompt" not in row:
        assert len(ImageChatData(path=both, processor=str(llava / "model"), on_invalid="drop")) == 1


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"processor": "bytes"}, r"not a processor for images and text|no processor could be loaded"),
        ({"processor": "pictures"}, "no processor could be loaded"),
        ({"processor": "./none"}, "there is no folder"),
        ({"processor_options": {"patch_sise": 8}}, "has no value `patch_sise`; did you mean patch_size"),
        ({"images": Path("none")}, "images: there is no folder none"),
        ({"template": "chatml.jinja"}, r"does not print the content|prints 0 image tokens"),
    ],
)
def test_wrong_options_are_refused(llava: Path, options: dict[str, Any], error: str) -> None:
    byte_tokenizer(llava / "bytes")
    (llava / "chatml.jinja").write_text(CHATML)
    given: dict[str, Any] = {"processor": "model"} | options
    for key in ("processor", "template"):
        if key in given and not given[key].startswith("."):
            given[key] = str(llava / given[key]) if key == "processor" else llava / given[key]
    with pytest.raises((ValueError, UsageError), match=error):
        ImageChatData(path=written(llava, [part(image=PICTURE)], "one.jsonl"), **given)


def test_a_processor_without_the_files_of_its_tokenizer_is_refused(family: tuple[str, Path]) -> None:
    """Checks it, because transformers makes a tokenizer of special tokens alone for some models."""
    name, folder = family
    prepare(name, folder)
    bare = shutil.copytree(folder / "model", folder / "bare")
    for file in bare.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"`.*bare` has no files of a tokenizer|no processor could be loaded from `"):
        ImageChatData(path=folder / "train.jsonl", processor=str(bare))


def test_images_that_change_while_a_run_trains_are_refused(llava: Path) -> None:
    Image.new("RGB", (20, 20)).save(llava / "changing.png")
    data = ImageChatData(
        path=written(llava, [part(image="changing.png")], "changing.jsonl"), processor=str(llava / "model")
    )
    Image.new("RGB", (20, 21)).save(llava / "changing.png")
    with pytest.raises(ValueError, match="has 20 x 21 pixels, but had 20 x 20 when the run started"):
        data[0]
    whole = (llava / "pictures" / "0.png").read_bytes()
    (llava / "changing.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"changing\.png cannot be read"):
        data[0]


# ------------------------------------------------------------------------------------------ models
def trained(model: torch.nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("name", FAMILIES)
def test_freeze_and_adapters(name: str) -> None:
    """Frozen parts are not trained; targets by name are those of the language model, those by glob are any."""

    def build(**how: Any) -> Any:
        return image_text_to_text(model_type=name, options=FAMILIES[name], **how)

    whole, without = trained(build()), trained(build(freeze=["vision_tower"]))
    language = trained(build(freeze=["vision_tower", "projector"]))
    assert language < without < whole
    assert language == {one for one in whole if "language_model" in one or "text_model" in one or "lm_head" in one}
    adapted = trained(build(lora=adapters(["q_proj"])))
    assert len(adapted) == 4
    assert all("language_model" in one or "text_model" in one for one in adapted)
    every = trained(build(lora=adapters("all-linear")))
    assert len(every) == 2 * 2 * 7
    globs = trained(build(lora=adapters(["*vi*fc1"])))
    assert len(globs) == 4
    assert all("vi" in one for one in globs)


def adapters(targets: Any) -> Any:
    from ddpforge.builtin.models.lora import Adapters

    return Adapters(targets=targets)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"model_type": "llama"}, "transformers cannot build this llama"),
        (
            {"options": {"text_config": {"hiden_size": 8}}},
            "llama has no key `hiden_size`",
        ),
        ({"freeze": ["vision_tower", "projector", "language_model"]}, "names all parts of the model"),
        ({"freeze": ["projector"], "lora": ["q_proj"]}, "remove `freeze`"),
        ({"lora": ["fc1"]}, r'the language model has no linear layer "fc1"; it has down_proj, .*"\*.fc1"'),
    ],
)
def test_wrong_models_are_refused(options: dict[str, Any], error: str) -> None:
    given = {"model_type": "llava", "options": FAMILIES["llava"]} | options
    if given["model_type"] == "llama":
        given["options"] = {}
    if "lora" in given:
        given["lora"] = adapters(given["lora"])
    with pytest.raises(ValueError, match=error):
        image_text_to_text(**given)
