"""Packing and padding of tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from ddpforge_transformers.data import TokenizedJSONL, TokenizedText

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
        ('{"text": "a"}\n{"txt": "a"}', {}, 'line 2 needs "text", of type str'),
        ('{"text": "a", "label": true}', {"classes": 2}, 'needs "label", of type int'),
        ('\n{"text": ', {}, "line 2 is not JSON"),
        ("", {}, "is empty"),
        (None, {}, "cannot be read"),
        ("{}", {"tokenizer": "./nowhere/at/all"}, "no tokenizer could be loaded"),
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
