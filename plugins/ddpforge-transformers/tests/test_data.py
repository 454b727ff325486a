"""Packing and padding of tokens."""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ddpforge.errors import SetupError, UsageError
from transformers import AutoTokenizer

from ddpforge_transformers.chat import ChatData
from ddpforge_transformers.data import TokenizedJSONL, TokenizedText, load_tokenizer
from ddpforge_transformers.models import causal_lm

END = 1


def test_packing_drops_only_the_last_incomplete_block(texts: Path, tokenizer: Path) -> None:
    data = TokenizedText(path=texts, tokenizer=str(tokenizer), block_size=16, document_mask=False)
    words = AutoTokenizer.from_pretrained(tokenizer)
    lines = [json.loads(line)["text"] for line in (texts / "b.jsonl").read_text().splitlines()]
    expected = [token for text in ((texts / "a.txt").read_text(), *lines) for token in [*words(text)["input_ids"], END]]
    assert len(data) == len(expected) // 16 > 40
    batch = data.collate(data.__getitems__(list(range(len(data)))))
    assert batch["input_ids"].flatten().tolist() == expected[: len(data) * 16]
    assert torch.equal(batch["labels"], batch["input_ids"])
    assert torch.equal(data[3]["input_ids"], batch["input_ids"][3])


def test_padding_is_masked_and_ignored_by_the_loss(samples: Path, tokenizer: Path) -> None:
    data = TokenizedJSONL(path=samples, tokenizer=str(tokenizer))
    batch = data.collate([data[0], data[5]])
    lengths = batch["attention_mask"].sum(dim=1)
    assert len(set(lengths.tolist())) == 2
    for row in range(2):
        tokens = batch["input_ids"][row, : lengths[row]]
        assert tokens.tolist() == [*data.tokenizer(data[[0, 5][row]]["text"])["input_ids"], END]
        assert torch.equal(batch["labels"][row, : lengths[row]], tokens)
        assert (batch["labels"][row, lengths[row] :] == -100).all()
        assert (batch["input_ids"][row, lengths[row] :] == data.tokenizer.pad_token_id).all()
    assert data.lengths()[[0, 5]].tolist() == lengths.tolist()


def test_prompts_are_ignored_by_the_loss_and_long_samples_are_cut(samples: Path, tokenizer: Path) -> None:
    data = TokenizedJSONL(path=samples, tokenizer=str(tokenizer), prompt="ask", max_length=5)
    batch = data.collate([data[0]])
    assert batch["input_ids"].shape == (1, 5)
    assert (batch["labels"][0, :2] == -100).all()
    assert torch.equal(batch["labels"][0, 2:], batch["input_ids"][0, 2:])


def test_labels_are_classes_and_a_class_out_of_range_is_refused(samples: Path, tokenizer: Path) -> None:
    data = TokenizedJSONL(path=samples, tokenizer=str(tokenizer), classes=2)
    assert data.collate([data[n] for n in range(4)])["labels"].tolist() == [0, 1, 0, 1]
    samples.write_text('{"text": "a", "label": 2}')
    with pytest.raises(ValueError, match="sample 1: class 2 is not one of 0 to 1"):
        TokenizedJSONL(path=samples, tokenizer=str(tokenizer), classes=2)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ('{"text": "a"}\n{"txt": "a"}', {}, "line 2 needs \"text\", a text: it has the keys 'txt'"),
        ('{"text": 3}', {}, 'line 1 needs "text", a text: its text is 3'),
        ('[{"text": "a"}]', {}, "line 1 is not a JSON object: write one JSON object per line, not an array"),
        ('{"text": "a", "label": true}', {"classes": 2}, 'needs "label", a whole number: its label is True'),
        ('\n{"text": ', {}, "line 2 is not JSON"),
        ("", {}, "is empty"),
        ('{"text": "a"}\n{"text": " "}', {}, 'sample 2: "text" is empty, and nothing can be learnt from it'),
        ("{}", {"classes": 2, "prompt": "ask"}, "for language models"),
    ],
)
def test_invalid_input_is_refused(
    content: str | None, options: dict[str, Any], message: str, tokenizer: Path, tmp_path: Path
) -> None:
    file = tmp_path / "x.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=message):
        TokenizedJSONL(**{"path": file, "tokenizer": str(tokenizer), **options})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "path: there is no file"),
        (gzip.compress(b"{}"), "is compressed with gzip, not text in UTF-8"),
        ("{}".encode("utf-16"), "is text in UTF-16, not text in UTF-8"),
        (b"{\xe4}", "cannot be read as UTF-8 text"),
    ],
)
@pytest.mark.parametrize("kind", ["tokenized_jsonl", "chat"])
def test_a_file_of_another_kind_is_named(
    kind: str, content: bytes | None, message: str, tokenizer: Path, tmp_path: Path
) -> None:
    file = tmp_path / "x.jsonl"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        (TokenizedJSONL if kind == "tokenized_jsonl" else ChatData)(path=file, tokenizer=str(tokenizer))
    assert message in caught.value.message
    assert caught.value.key == "path"


@pytest.mark.parametrize("name", ["./nowhere", "~/nowhere", "/nowhere", "a/b/c", "tokens/mine"])
def test_a_missing_folder_is_refused_without_a_look_at_the_hub(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokens").mkdir()  # so `tokens/mine` is a path, although a name on the hub has this form
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("socket.getaddrinfo", None)
    for load, key in ((load_tokenizer, "tokenizer"), (lambda name: causal_lm(pretrained=name), "pretrained")):
        with pytest.raises(UsageError, match=f"{key}: there is no folder {name}") as caught:
            load(name)
        assert caught.value.key == key


def test_without_the_hub_only_cached_names_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UsageError, match="no such model in the hub's cache") as caught:
        load_tokenizer("owner/absent")
    assert "HF_HUB_OFFLINE is set" in caught.value.hints[-1]


def test_without_a_network_a_name_that_is_not_cached_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One short request, instead of those of transformers, which are repeated for a minute."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("ddpforge_transformers.data.hub_fault", lambda: "https://hub cannot be reached (away)")
    monkeypatch.setattr("socket.getaddrinfo", None)
    for load, key in ((load_tokenizer, "tokenizer"), (lambda name: causal_lm(pretrained=name), "pretrained")):
        with pytest.raises(SetupError, match=rf"{key}: there is no folder org/name, and https://hub cannot be rea"):
            load("org/name")


def test_without_a_network_a_cached_name_is_its_folder_in_the_cache(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("ddpforge_transformers.data.hub_fault", lambda: "https://hub cannot be reached (away)")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--org--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text("c0ffee")
    shutil.copytree(tokenizer, cached / "snapshots/c0ffee")
    assert len(load_tokenizer("org/name")) == len(load_tokenizer(str(tokenizer)))
    assert "org/name: https://hub cannot be reached (away); taken from the cache of the hub" in caplog.text


def test_a_split_of_a_file_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("{}")
    with pytest.raises(UsageError, match=r"x\.jsonl is a file, which has no splits"):
        ChatData(path=tmp_path / "x.jsonl", tokenizer=str(tokenizer), split="train")


def test_only_text_and_jsonl_of_a_folder_are_learnt(
    texts: Path, tokenizer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: Any = {"tokenizer": str(tokenizer), "block_size": 16, "document_mask": False}
    before = TokenizedText(path=texts, **options)
    (texts / ".ipynb_checkpoints").mkdir()
    for name in (".hidden.txt", ".ipynb_checkpoints/a.txt", "a.txt~", "0.json", "0.csv", "0.png"):
        (texts / name).write_text("the cat sees a dog " * 50)
    for name in ("a.txt", "b.jsonl"):
        (texts / name).write_bytes(b"\xef\xbb\xbf" + (texts / name).read_bytes())
    after = TokenizedText(path=texts, **options)
    whole = list(range(len(before)))
    assert len(after) == len(before)
    assert torch.equal(after.__getitems__(whole)["input_ids"], before.__getitems__(whole)["input_ids"])
    assert [one.message for one in caplog.records] == [
        f"{texts}: left out: 3 hidden or left behind by a program (.hidden.txt, .ipynb_checkpoints, a.txt~); "
        "3 of a kind that is not read (0.csv, 0.json, 0.png)"
    ]
    with pytest.raises(ValueError, match=r"0\.json is not text; write a \.jsonl file"):
        TokenizedText(path=texts / "0.json", **options)


Tokenizer = tuple[Path, str, str]  # and its tokens before and after a text


def test_a_sample_ends_with_one_end_token_and_a_prompt_with_none(added: Tokenizer, tmp_path: Path) -> None:
    folder, begin, _ = added
    (file := tmp_path / "x.jsonl").write_text('{"ask": "the cat", "text": " sees a dog"}')
    asked = TokenizedJSONL(path=file, tokenizer=str(folder), prompt="ask")
    batch = asked.collate([asked[0]])
    assert asked.tokenizer.decode(batch["input_ids"][0]) == f"{begin}the cat sees a dog<|im_end|>"
    taught = batch["input_ids"][0][batch["labels"][0] != -100]
    assert asked.tokenizer.decode(taught) == " sees a dog<|im_end|>"
    plain = TokenizedJSONL(path=file, tokenizer=str(folder))
    assert plain.tokenizer.decode(plain.collate([plain[0]])["input_ids"][0]) == f"{begin} sees a dog<|im_end|>"


@pytest.mark.parametrize("kind", [TokenizedJSONL, TokenizedText])
def test_half_of_a_character_is_an_error_with_file_and_line(kind: Any, tokenizer: Path, tmp_path: Path) -> None:
    (file := tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"text": "a \\ud83d cat"}\n')
    with pytest.raises(ValueError, match=r"x.jsonl, line 2: text has half of a character, \\ud83d"):
        kind(path=file, tokenizer=str(tokenizer))
