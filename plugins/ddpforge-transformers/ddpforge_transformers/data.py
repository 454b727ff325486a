"""Tokenized datasets of local text: packed into blocks, or one sample per line."""

import inspect
import json
import logging
import os
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import transformers
from ddpforge.builtin.datasets.hugging_face import hub_fault
from ddpforge.builtin.datasets.listing import BINARY, listed
from ddpforge.errors import SetupError, UsageError, not_there
from ddpforge.interfaces import Data
from huggingface_hub import snapshot_download, try_to_load_from_cache
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from transformers import AutoTokenizer

from ddpforge_transformers.rows import check_characters, not_text

__all__ = ["Collated", "TokenizedJSONL", "TokenizedText"]

ddpforge_plugin_api = 3

log = logging.getLogger("ddpforge")
Batch = dict[str, Tensor]
IGNORED = -100  # label that the loss ignores, as in transformers
_NOT_TEXT = (*BINARY, ".json", ".csv", ".tsv")  # a folder's .json would be learnt with its keys and braces
_AT_ONCE = 1000  # documents per call of the tokenizer

TokenizerName = Annotated[
    str, Field(description="Folder in which transformers saved a tokenizer, or a name on the hub.")
]
Length = Annotated[int, Field(ge=1, le=2**24)]


NewTokens = Annotated[
    Sequence[Annotated[str, Field(min_length=1)]],
    Field(description="Special tokens to add to the tokenizer; the model needs `resize_vocabulary`."),
]


class Tokenized:
    """Encoding and decoding of text, for `ddpforge generate`."""

    tokenizer: Any

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text to continue: without an end-of-text token."""
        tokens: list[int] = self.tokenizer(text)["input_ids"]
        return tokens[:-1] if tokens[-1:] == [self.tokenizer.eos_token_id] else tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, without special tokens."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def text_parts(self, batch: Batch) -> list[list[tuple[str, str]]]:
        """Returns the text of each sample in parts (kind, text), for `ddpforge data show`; without padding.

        Kinds are "learnt", and for tokens that are not learnt "special", if they are special tokens, or "given". The
        answers of a pair are texts of their own.
        """
        tokens, labels = batch["input_ids"], batch["labels"]
        if tokens.ndim == 3:  # pairs of answers
            tokens, labels = tokens.flatten(0, 1), labels.flatten(0, 1)
        if labels.ndim != tokens.ndim:  # classes
            return []
        return [self._parts(ids, mine) for ids, mine in zip(tokens.tolist(), labels.tolist(), strict=True)]

    def _parts(self, tokens: list[int], labels: list[int]) -> list[tuple[str, str]]:
        special = {number for number, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        end = len(tokens)
        while end and tokens[end - 1] == self.tokenizer.pad_token_id and labels[end - 1] == IGNORED:
            end -= 1

        def kind(number: int) -> str:
            if labels[number] != IGNORED:
                return "learnt"
            return "special" if tokens[number] in special else "given"

        return [
            (name, self.tokenizer.decode([tokens[number] for number in numbers], skip_special_tokens=False))
            for name, numbers in groupby(range(end), kind)
        ]

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Returns the tokens of messages {role, content} by the chat template, with its prompt for an answer.

        Raises ValueError if there is no template, or if it refuses the messages.
        """
        tokens: list[int] = self.tokenizer(self._chat_renderer.prompt(messages), add_special_tokens=False)["input_ids"]
        return tokens

    def lm_eval(self, model: nn.Module, tasks: Sequence[str], **options: Any) -> dict[str, float]:
        """Returns the metrics of tasks of lm-evaluation-harness, see `harness.evaluate`."""
        from ddpforge_transformers.harness import evaluate

        return evaluate(model, self.tokenizer, tasks, **options)

    @property
    def end_tokens(self) -> list[int]:
        """Returns the tokens that end an answer: that of the chat template, if it has one, and that of the tokenizer.

        Empty without a chat template.
        """
        if not self.tokenizer.chat_template:
            return []
        end = self.tokenizer.eos_token_id
        return list(dict.fromkeys([*self._chat_renderer.ends(), *([] if end is None else [end])]))

    @property
    def _chat_renderer(self) -> Any:
        from ddpforge_transformers.chat_rendering import ChatRenderer  # imports this module

        return ChatRenderer(self.tokenizer)


class TokenizedText(Tokenized):
    """Dataset of the documents of text files, joined by end-of-text tokens and cut into blocks of `block_size` tokens.

    A document is a file; in a .jsonl file, the text under `field` of each line. The files of a folder are read
    recursively in the order of their paths. A batch is {input_ids, labels, position_ids}, int64 [B, block_size]; labels
    equal the tokens, because the task shifts them. The incomplete block at the end is dropped.

    Documents in a block do not see each other: positions start at 0 in each document, and models of transformers then
    mask attention to other documents. The label of a document's first token is -100. With `document_mask = false` a
    batch is {input_ids, labels}, and a token sees all tokens before it in the block.
    """

    random = False

    def __init__(
        self,
        *,
        path: Annotated[Path, Field(description="Text file, .jsonl file or folder of such files, in UTF-8.")],
        tokenizer: TokenizerName,
        block_size: Annotated[Length, Field(description="Tokens per sample.")] = 512,
        field: Annotated[str, Field(description="Key of the text in a line of a .jsonl file.")] = "text",
        document_mask: Annotated[bool, Field(description="Documents in a block do not see each other.")] = True,
    ) -> None:
        self.document_mask = document_mask
        self.tokenizer = load_tokenizer(tokenizer)
        self.vocab_size, self.block_size = len(self.tokenizer), block_size
        if self.tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer {tokenizer} has no end-of-text token to separate documents")
        documents = list(_documents(_files(path), field))
        parts = [self._tokens(documents[n : n + _AT_ONCE]) for n in range(0, len(documents), _AT_ONCE)]
        tokens = np.concatenate([part for part, _ in parts])
        samples = len(tokens) // block_size
        if not samples:
            raise ValueError(f"{path} has {len(tokens)} tokens, fewer than one block of {block_size}")
        self._blocks = torch.from_numpy(tokens[: samples * block_size]).view(samples, block_size)
        self._starts: Tensor | None = None
        if document_mask:
            sizes = np.concatenate([sizes for _, sizes in parts])
            starts = torch.zeros(len(tokens), dtype=torch.bool)
            starts[np.cumsum(sizes) - sizes] = True
            self._starts = starts[: samples * block_size].view(samples, block_size)

    def _tokens(self, documents: list[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Returns the tokens of all documents, each with an end-of-text token, and the length of each."""
        rows = self.tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"]
        end = self.tokenizer.eos_token_id
        tokens = np.array([token for row in rows for token in (*row, end)], dtype=np.int32)
        return tokens, np.array([len(row) + 1 for row in rows])

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: int) -> Batch:
        return {name: tensor[0] for name, tensor in self.__getitems__([index]).items()}

    def __getitems__(self, ids: list[int]) -> Batch:
        """Returns the whole batch at once."""
        rows = torch.tensor(ids)
        tokens = self._blocks[rows].long()
        if self._starts is None:
            return {"input_ids": tokens, "labels": tokens.clone()}
        positions = positions_of(self._starts[rows])
        return {
            "input_ids": tokens,
            "labels": tokens.masked_fill(positions == 0, IGNORED),  # the token before is in another document
            "position_ids": positions,
        }

    def collate(self, batch: Batch) -> Batch:
        """Returns `batch` unchanged: `__getitems__` returns a batch already."""
        return batch


class TokenizedJSONL(Tokenized):
    """Dataset of a file with one JSON object, i.e. one sample, per line. Batches are padded to their longest sample.

    With `classes`, a line has a text and a class under `label`, and a batch is {input_ids, attention_mask, labels [B]}.
    Without `classes`, the dataset is for language models: labels [B, T] are the tokens, and -100 for padding and for
    the tokens of `prompt`, a text before the learned text. These samples end with an end-of-text token, unless they are
    cut at `max_length`.
    """

    random = False

    def __init__(
        self,
        *,
        path: Annotated[Path, Field(description="A .jsonl file, in UTF-8.")],
        tokenizer: TokenizerName,
        max_length: Annotated[Length, Field(description="Longer samples are cut.")] = 512,
        field: Annotated[str, Field(description="Key of the text.")] = "text",
        prompt: Annotated[str | None, Field(description="Key of a text before it that is not learned.")] = None,
        classes: Annotated[int | None, Field(ge=2, le=2**20, description="Number of classes; absent: none.")] = None,
        label: Annotated[str, Field(description="Key of the class, a number from 0.")] = "label",
    ) -> None:
        if classes is not None and prompt is not None:
            raise ValueError(
                "`prompt` is for language models, but `classes` is for classification; set only one of them"
            )
        self.tokenizer = load_tokenizer(tokenizer)
        self.vocab_size, self.max_length, self.classes = len(self.tokenizer), max_length, classes
        self._field, self._prompt, self._label = field, prompt, label
        self.pad_token = padding_of(self.tokenizer)
        wanted: dict[str, type] = {field: str} | ({prompt: str} if prompt else {}) | ({label: int} if classes else {})
        self._rows = list(read_jsonl(path, wanted))
        if not self._rows:
            raise ValueError(f"{path} is empty")
        for number, row in enumerate(self._rows, 1):
            if not row[field].strip() and not prompt:  # after a prompt, the end of the text is learnt
                raise ValueError(f'{path}, sample {number}: "{field}" is empty, and nothing can be learnt from it')
            if classes is not None and not 0 <= row[label] < classes:
                raise ValueError(f"{path}, sample {number}: class {row[label]} is not one of 0 to {classes - 1}")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[index]

    def lengths(self) -> NDArray[np.int64]:
        """Returns the number of tokens of each sample, for `train.max_tokens` and samplers; tokenizes all samples."""
        return np.array([self.collate([row])["input_ids"].shape[1] for row in self._rows])

    def collate(self, rows: Sequence[dict[str, Any]]) -> Batch:
        """Returns a batch of tokens, padded on the right."""
        if self.classes is not None:
            texts = [row[self._field] for row in rows]
            tokens = self.tokenizer(texts, truncation=True, max_length=self.max_length)["input_ids"]
            batch = {"labels": torch.tensor([row[self._label] for row in rows])}
        else:
            pairs = [self._sample(row) for row in rows]
            tokens = [mine for mine, _ in pairs]
            batch = {"labels": padded([labels for _, labels in pairs], IGNORED)}
        mask = padded([[1] * len(mine) for mine in tokens], 0)
        return {"input_ids": padded(tokens, self.pad_token), "attention_mask": mask, **batch}

    def _sample(self, row: dict[str, Any]) -> tuple[list[int], list[int]]:
        """Returns tokens and labels, with the tokenizer's special tokens only at the beginning of the sample."""
        given = self.tokenizer(row[self._prompt])["input_ids"] if self._prompt else []
        text = self.tokenizer(row[self._field], add_special_tokens=not self._prompt, verbose=False)["input_ids"]
        end = self.tokenizer.eos_token_id
        text = [*text, end] if end is not None and text[-1:] != [end] else text
        given = given[:-1] if given[-1:] == [end] else given
        tokens, labels = given + text, [IGNORED] * len(given) + text
        return tokens[: self.max_length], labels[: self.max_length]


class Collated:
    """Dataset `of` with a data collator of transformers, which pads and joins its samples to a batch.

    The samples are dicts, as the collator takes them. Collators that draw random numbers for a whole batch are refused:
    the result would depend on the number of ranks.
    """

    def __init__(
        self,
        *,
        of: Annotated[Data, Field(description="Dataset of dicts.")],
        collator: Annotated[
            str, Field(min_length=1, description='Class of transformers, e.g. "DataCollatorWithPadding".')
        ],
        tokenizer: Annotated[
            str | None, Field(description="Folder in which transformers saved a tokenizer, or a name on the hub.")
        ] = None,
        options: Annotated[dict[str, Any], Field(description="Further arguments of the collator.")] = {},
    ) -> None:
        self.data: Any = of
        self.tokenizer = load_tokenizer(tokenizer) if tokenizer else getattr(of, "tokenizer", None)
        self._collator = _collator(collator, self.tokenizer, options)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]

    def collate(self, samples: Sequence[Any]) -> dict[str, Any]:
        """Returns the collator's batch of the samples."""
        return dict(self._collator([dict(sample) for sample in samples]))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "data":
            raise AttributeError(name)
        return getattr(self.data, name)


def _collator(name: str, tokenizer: Any, options: dict[str, Any]) -> Any:
    """Builds a collator; raises ValueError if transformers has none of this name, or if it draws random numbers."""
    if name == "default_data_collator":
        return transformers.default_data_collator
    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and name.startswith("DataCollator")):
        known = [one for one in dir(transformers) if one.startswith("DataCollator")]
        near = get_close_matches(name, known, n=1, cutoff=0)
        raise ValueError(f"collator: transformers has no data collator `{name}`; did you mean `{near[0]}`?")
    parameters = inspect.signature(kind).parameters
    if "mlm" in parameters and options.get("mlm", parameters["mlm"].default):
        raise ValueError(
            f"{name} masks tokens at random, once for a whole batch; set options.mlm = false, or use the task"
            " masked_lm, which masks each sample by its own random numbers"
        )
    needs = "tokenizer" in parameters
    if needs and tokenizer is None:
        raise ValueError(f"{name} needs a tokenizer: set `tokenizer`")
    try:
        return kind(**({"tokenizer": tokenizer} if needs else {}), **options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} refuses its options {options}: {error}") from error


def positions_of(starts: Tensor) -> Tensor:
    """Returns the position of each token in its document, int64; `starts` [..., T] is True for first tokens.

    The first token of a row begins a document in any case.
    """
    places = torch.arange(starts.shape[-1])
    begins = torch.where(starts, places, 0).cummax(dim=-1).values
    return places - begins


def saved_folder(name: str, key: str) -> str:
    """Returns the folder of a path, or a name on the hub unchanged; its folder in the cache if the hub is unreachable.

    Raises UsageError, at `key`, for a missing folder, and SetupError if the hub does not answer and the name is not in
    its cache. Without these checks transformers would look for a path on the hub, and try again for minutes.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return str(folder)
    path_like = name.startswith((".", "~", "/")) or name.count("/") > 1 or "\\" in name
    path_like |= "/" in name and Path(name).parent.is_dir()
    if path_like or folder.exists():
        hints = ["it must be a folder that `save_pretrained` wrote", *not_there(folder)]
        raise UsageError(f"{key}: there is no folder {name}", hints=hints, key=key)
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON") and not _is_cached(name):
        hints = [*not_there(folder), "HF_HUB_OFFLINE is set: only models in the cache of the hub are found by name"]
        raise UsageError(
            f"{key}: there is no folder {name}, and no such model in the hub's cache", hints=hints, key=key
        )
    if not (fault := hub_fault()):
        return name
    if not _is_cached(name):
        hints = [*not_there(folder), "a model that was loaded before is in the cache of the hub, or name its folder"]
        raise SetupError(f"{key}: there is no folder {name}, and {fault}", hints=hints, key=key)
    log.warning("%s: %s; taken from the cache of the hub", name, fault)
    return str(snapshot_download(name, local_files_only=True))


def _is_cached(name: str) -> bool:
    files = ("config.json", "tokenizer_config.json", "tokenizer.json")
    return any(isinstance(try_to_load_from_cache(name, file), str) for file in files)


def load_tokenizer(name: str, key: str = "tokenizer") -> Any:
    """Loads a saved tokenizer; raises UsageError or ValueError if there is none."""
    place = saved_folder(name, key)
    try:
        # Never runs code of the tokenizer's folder. Without the keyword transformers would prompt on the terminal.
        found = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"no tokenizer could be loaded from `{name}`: {str(error).splitlines()[0]}") from error
    check_vocabulary(found, name)
    return found


def check_vocabulary(tokenizer: Any, name: str) -> None:
    """Raises ValueError for a tokenizer that knows no text, as transformers makes it without a tokenizer's files."""
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        raise ValueError(
            f"`{name}` has no files of a tokenizer: name a folder that a tokenizer's save_pretrained wrote"
        )


def add_tokens(tokenizer: Any, tokens: Sequence[str]) -> None:
    """Adds special tokens to a tokenizer; raises ValueError for one that it has already."""
    known = [token for token in tokens if token in tokenizer.get_vocab()]
    if known:
        raise ValueError(f"new_tokens: the tokenizer has `{known[0]}` already; remove it")
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)}, replace_extra_special_tokens=False)


def padding_of(tokenizer: Any) -> int:
    """Returns the token for padding, or else the end-of-text token; raises ValueError if there is neither."""
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    if pad is None and end is None:
        raise ValueError(f"the tokenizer {tokenizer.name_or_path} has neither a padding nor an end-of-text token")
    return int(end if pad is None else pad)


def read_jsonl(file: Path, wanted: dict[str, type]) -> Iterator[dict[str, Any]]:
    """Yields the object of each line; raises ValueError if it does not have the `wanted` keys and types."""
    for number, line in enumerate(_read(file).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{file}, line {number} is not JSON: {error}") from error
        check_characters(row, f"{file}, line {number}")
        if not isinstance(row, dict):
            array = ": write one JSON object per line, not an array" if isinstance(row, list) else ""
            raise ValueError(f"{file}, line {number} is not a JSON object{array}")
        for key, kind in wanted.items():
            if type(row.get(key)) is not kind:
                found = (
                    f"its {key} is {row[key]!r:.40}" if key in row else f"it has the keys {', '.join(map(repr, row))}"
                )
                raise ValueError(
                    f'{file}, line {number} needs "{key}", {"a text" if kind is str else "a whole number"}: {found}'
                )
        yield row


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise not_text(file, error) from error


def _documents(files: Sequence[Path], field: str) -> Iterator[str]:
    for file in files:
        if file.suffix == ".jsonl":
            yield from (row[field] for row in read_jsonl(file, {field: str}))
        else:
            yield _read(file)


def _files(path: Path) -> list[Path]:
    """Returns a file, or the files of a folder that count as text."""
    if path.is_dir():
        files = listed(path, but=_NOT_TEXT)
    elif path.name.lower().endswith(_NOT_TEXT):
        raise ValueError(f"path: {path} is not text; write a .jsonl file with the text under `field`, or a text file")
    else:
        files = [path]
    if not files:
        raise ValueError(f"the folder {path} contains no files of text")
    return files


def padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    """Returns the rows as int64 [B, T], with `value` after the shorter ones."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *([value] * (longest - len(row)))] for row in rows], dtype=torch.int64)
