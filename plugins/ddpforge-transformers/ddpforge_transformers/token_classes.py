"""Token classification, such as named entities: one tag for each word of a sentence."""

from collections.abc import Mapping, Sequence
from math import isnan
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from ddpforge.builtin.tasks.forms import IGNORED, LabelSmoothing, cross_entropy
from ddpforge.builtin.tasks.sequences import check_sizes
from ddpforge.interfaces import Task, Total, World
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from ddpforge_transformers.data import Batch, Length, TokenizerName, load_tokenizer, padded, padding_of
from ddpforge_transformers.rows import Invalid, OnInvalid, Split, is_dataset, read_rows
from ddpforge_transformers.tasks import check_attention, labels_of

__all__ = ["TaggedWords", "TokenClassification"]

ddpforge_plugin_api = 3


class TaggedWords:
    """Dataset of sentences whose words have tags; a batch is {input_ids, attention_mask, labels}, int64 [B, T].

    The first token of each word has the number of its tag as label; other tokens and padding have -100. Sentences that
    are cut at `max_length` lose the tags of their last words.
    """

    random = False

    def __init__(
        self,
        *,
        path: Annotated[Path, Field(description="A .jsonl, .json or .parquet file, or a dataset of Hugging Face.")],
        tokenizer: TokenizerName,
        tags: Annotated[
            Sequence[str],
            Field(min_length=2, description='All tags, in the order of the classes, e.g. ["O", "B-PER", "I-PER"].'),
        ],
        words: Annotated[str, Field(description="Key of the words, a list of texts.")] = "tokens",
        labels: Annotated[str, Field(description="Key of the tags, a list of names or of numbers from 0.")] = "tags",
        max_length: Annotated[Length, Field(description="Longer sentences are cut.")] = 512,
        split: Split = None,
        on_invalid: OnInvalid = "error",
    ) -> None:
        self.tokenizer = load_tokenizer(tokenizer)
        if not self.tokenizer.is_fast:
            raise ValueError(f"the tokenizer {tokenizer} does not give the word of each token: it is not a fast one")
        if len(set(tags)) < len(tags):
            raise ValueError(f"tags: each tag may be there once, got {', '.join(tags)}")
        self.vocab_size, self.max_length = len(self.tokenizer), max_length
        self.pad_token, self.tags = padding_of(self.tokenizer), tuple(tags)
        self.class_names = list(tags)  # other data of the run must have the same, in the same order
        self._words, self._labels = words, labels
        self._number = {tag: number for number, tag in enumerate(tags)}
        self._rows: list[tuple[list[str], list[int]]] = []
        invalid = Invalid(on_invalid)
        for where, row in read_rows(path, [] if is_dataset(path, split) else [path], split):
            try:
                if isinstance(row, ValueError):
                    raise row
                self._rows.append(self._sentence(row, where))
            except ValueError as error:
                invalid.take(where, error)
        if not self._rows:
            raise ValueError(f"path: all {invalid.number} rows of {path} are invalid: {invalid.reasons()}")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[list[str], list[int]]:
        return self._rows[index]

    def lengths(self) -> NDArray[np.int64]:
        """Returns the number of tokens of each sentence; tokenizes all."""
        return np.array([len(self._tokens([words])["input_ids"][0]) for words, _ in self._rows])

    def collate(self, rows: Sequence[tuple[list[str], list[int]]]) -> Batch:
        """Returns a batch, padded to its longest sentence."""
        found = self._tokens([words for words, _ in rows])
        labels = []
        for number, (_, tags) in enumerate(rows):
            places = found.word_ids(number)
            first = [
                place is not None and place != before for before, place in zip([None, *places], places, strict=False)
            ]
            labels.append([tags[place] if new else IGNORED for new, place in zip(first, places, strict=True)])
        return {
            "input_ids": padded(found["input_ids"], self.pad_token),
            "attention_mask": padded([[1] * len(mine) for mine in found["input_ids"]], 0),
            "labels": padded(labels, IGNORED),
        }

    def text_parts(self, batch: Batch) -> list[list[tuple[str, str]]]:
        """Returns the text of each sentence in parts; words whose tag is not the first one are "learnt"."""
        rows = []
        for tokens, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
            pairs = [(token, label) for token, label in zip(tokens, labels, strict=True) if token != self.pad_token]
            shown = [("learnt" if label > 0 else "given", self._shown(token, label)) for token, label in pairs]
            rows.append(shown)
        return rows

    def _shown(self, token: int, label: int) -> str:
        text: str = self.tokenizer.decode([token])
        return f" {text} [{self.tags[label]}]" if label > 0 else f" {text}"

    def _tokens(self, sentences: list[list[str]]) -> Any:
        return self.tokenizer(sentences, is_split_into_words=True, truncation=True, max_length=self.max_length)

    def _sentence(self, row: Mapping[str, Any], where: str) -> tuple[list[str], list[int]]:
        """Returns the words of a row and the numbers of their tags; raises ValueError for a flawed row."""
        for key in (self._words, self._labels):
            if not isinstance(row.get(key), list) or not row[key]:
                found = f"it is {row[key]!r:.40}" if key in row else f"it has the keys {', '.join(map(repr, row))}"
                raise ValueError(f'{where} needs "{key}", a list that is not empty: {found}')
        words, tags = row[self._words], row[self._labels]
        if odd := [word for word in words if not isinstance(word, str)]:
            raise ValueError(f'{where}: "{self._words}" holds {odd[0]!r:.40}, which is not a text')
        if "" in map(str.strip, words):
            raise ValueError(
                f'{where}: "{self._words}" holds an empty word, which has no token that could have its tag'
            )
        if len(words) != len(tags):
            raise ValueError(f"{where} has {len(words)} words, but {len(tags)} tags")
        return words, [self._tag(tag, where) for tag in tags]

    def _tag(self, tag: Any, where: str) -> int:
        if type(tag) is int and 0 <= tag < len(self.tags):
            return tag
        if isinstance(tag, str) and tag in self._number:
            return self._number[tag]
        kind = f"numbers are 0 to {len(self.tags) - 1}" if type(tag) is int else f"known are {', '.join(self.tags)}"
        raise ValueError(f"{where} has the tag {tag!r:.40}, which is not in `tags`: {kind}")


class TokenClassification(Task):
    """Cross-entropy of logits [B, T, C] and the tags of tokens, without labels of -100; in nats per tag.

    A batch is {input_ids, attention_mask, labels [B, T]}. The loss is that of transformers, but summed and in float32.
    Also reported: `accuracy`, the share of right tags, and, if the data has tags with "B-" and "I-", `precision`,
    `recall` and `f1` of whole entities, as seqeval counts them in its default mode.
    """

    items = "tags"

    def __init__(self, *, label_smoothing: LabelSmoothing = 0.0) -> None:
        self._smoothing = label_smoothing
        self._types: Tensor | None = None
        self._begins: Tensor | None = None

    def start(self, model: nn.Module, world: World) -> None:
        """Raises UsageError for an attention that the device does not have."""
        check_attention(model, world)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the loss summed over tags, and the logits."""
        labels = labels_of(batch, "token_classification")
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        logits: Tensor = model(**inputs).logits
        return self._cross_entropy(logits, labels), logits

    def loss_from_outputs(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Returns the loss summed over tags, from the logits."""
        return self._cross_entropy(outputs, batch["labels"])

    def _cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=self._smoothing)

    def count(self, batch: Batch) -> Tensor:
        """Returns the number of tags."""
        return (labels_of(batch, "token_classification") != IGNORED).sum()

    def metrics(self, outputs: Tensor, batch: Batch) -> Mapping[str, Total]:
        """Returns the accuracy of tags, and precision and recall of entities."""
        labels = batch["labels"]
        counted, found = labels != IGNORED, outputs.argmax(-1)
        metrics = {"accuracy": Total(((found == labels) & counted).sum(), counted.sum())}
        if self._types is None or self._begins is None:
            return metrics
        order = (~counted).byte().argsort(dim=1, stable=True)  # tagged tokens first, in their order
        inside = counted.gather(1, order)
        begins, types = self._begins.to(labels.device), self._types.to(labels.device)
        spans = [
            _entities(tags.gather(1, order).masked_fill(~inside, 0), inside, begins, types) for tags in (labels, found)
        ]
        (starts, kinds, ends), (starts_found, kinds_found, ends_found) = spans
        right = (starts & starts_found & (kinds == kinds_found) & (ends == ends_found)).sum()
        return metrics | {"precision": Total(right, starts_found.sum()), "recall": Total(right, starts.sum())}

    def finish(self, metrics: dict[str, float]) -> dict[str, float]:
        """Adds `f1`, the harmonic mean of precision and recall; 0 if no entity is right."""
        if "precision" not in metrics:
            return metrics
        precision, recall = (0.0 if isnan(metrics[name]) else metrics[name] for name in ("precision", "recall"))
        both = precision + recall
        f1 = 2 * precision * recall / both if both else 0.0
        return metrics | {"precision": precision, "recall": recall, "f1": f1}

    def predict(self, model: nn.Module, batch: Batch) -> Mapping[str, Any]:
        """Returns per sentence the number of the most probable tag of each token, and the true ones, `target`; [T]."""
        _, logits = self.loss(model, batch)
        return {"tag": logits.argmax(-1).masked_fill(batch["labels"] == IGNORED, IGNORED), "target": batch["labels"]}

    def check(self, model: nn.Module, data: Any) -> None:
        """Raises ValueError if the model has another number of classes than the data has tags, or other sizes."""
        check_sizes(model, data)
        tags, classes = getattr(data, "tags", None), getattr(getattr(model, "config", None), "num_labels", None)
        if classes is None:
            raise ValueError(f"this task needs a model of transformers, not a {type(model).__name__}")
        if tags is None:
            return
        if len(tags) != classes:
            raise ValueError(
                f"the data has {len(tags)} tags, but the model {classes} classes; set model.classes = {len(tags)}"
            )
        if any(tag.startswith(("B-", "I-")) for tag in tags):
            names = sorted({tag[2:] for tag in tags if tag[1:2] == "-"})
            types = [names.index(tag[2:]) + 1 if tag[1:2] == "-" else 0 for tag in tags]
            self._types, self._begins = torch.tensor(types), torch.tensor([tag.startswith("B-") for tag in tags])


def _entities(tags: Tensor, inside: Tensor, begins: Tensor, types: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns where entities start [B, T], the type at each place, and the place at which the entity there ends.

    An entity starts at "B-", and at an "I-" after another type or outside.
    """
    kinds = types[tags].masked_fill(~inside, 0)
    before = torch.nn.functional.pad(kinds, (1, 0))[:, :-1]
    starts = (kinds > 0) & (begins[tags] | (kinds != before))
    after = torch.nn.functional.pad(kinds, (0, 1))[:, 1:]
    next_starts = torch.nn.functional.pad(starts, (0, 1))[:, 1:]
    last = (kinds > 0) & ((after != kinds) | next_starts)
    places = torch.arange(tags.shape[1], device=tags.device).expand_as(tags)
    ends = places.masked_fill(~last, tags.shape[1]).flip(1).cummin(1).values.flip(1)
    return starts, kinds, ends
