"""A small tokenizer, small encoders, and files of texts."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

_TEXT = (
    "the a cat dog bird fish sees hears likes fears big small old young red green blue and or in of query document :"
    " . ? one two three four five six seven eight nine ten"
)
WORDS = _TEXT.split()
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
BERT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def save_tokenizer(folder: Path) -> Path:
    """Saves a tokenizer of whole words, with [CLS] and [SEP] around a text."""
    numbers = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    words = Tokenizer(WordLevel(numbers, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", numbers["[CLS]"]), ("[SEP]", numbers["[SEP]"])]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(folder)
    return folder


def text(number: int, words: int = 5) -> str:
    """Returns a text; different numbers below 1,000 give different texts."""
    digits = [WORDS[24 + int(digit)] if int(digit) else "or" for digit in f"{number:03d}"]
    return " ".join([*digits, *(WORDS[(number * (place + 3)) % 22] for place in range(number % words + 1))])


def rows_of(count: int, negatives: int = 0) -> list[dict[str, Any]]:
    """Returns rows with an anchor, a positive, negatives and a score; all texts differ."""
    found = []
    for number in range(count):
        row: dict[str, Any] = {"anchor": text(number, 4), "positive": text(number + 250, 9)}
        row |= {f"negative_{place}": text(number + 500 + 100 * place, 7) for place in range(negatives)}
        found.append(row | {"score": (number * 7 % 11) / 10})
    return found


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Writes a .jsonl file."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_corpus(folder: Path, queries: int = 6, documents: int = 20) -> Path:
    """Writes queries, a corpus and judgements in BEIR's layout; some grades are 2."""
    (folder / "qrels").mkdir(parents=True)
    write_rows(folder / "corpus.jsonl", [{"_id": f"d{n}", "title": "", "text": text(n, 9)} for n in range(documents)])
    write_rows(folder / "queries.jsonl", [{"_id": f"q{n}", "text": text(n + 40, 4)} for n in range(queries + 1)])
    lines = ["query-id\tcorpus-id\tscore"]
    for number in range(queries):
        lines += [f"q{number}\td{number}\t2", f"q{number}\td{(number * 7 + 5) % documents}\t1", f"q{number}\td9\t0"]
    (folder / "qrels" / "test.tsv").write_text("\n".join(dict.fromkeys(lines)) + "\n")
    return folder
