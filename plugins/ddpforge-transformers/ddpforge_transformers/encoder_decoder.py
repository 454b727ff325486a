"""Encoder-decoder models, such as T5 and BART: a source text and the target text that the decoder learns."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from ddpforge.builtin.tasks.forms import IGNORED, LabelSmoothing, cross_entropy
from ddpforge.builtin.tasks.language_modeling import of_sequences
from ddpforge.interfaces import World
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from ddpforge_transformers.data import Batch, Length, Tokenized, TokenizerName, load_tokenizer, padded, padding_of
from ddpforge_transformers.rows import Invalid, OnInvalid, Split, is_dataset, read_rows
from ddpforge_transformers.tasks import CausalLM, Metrics, check_attention, labels_of

__all__ = ["Seq2SeqLM", "SourceTarget"]

ddpforge_plugin_api = 3


class SourceTarget(Tokenized):
    """Dataset of pairs of texts: a batch is {input_ids, attention_mask, labels}, padded to its longest texts.

    Both texts end with the tokenizer's end-of-text token; the labels of padding are -100.
    """

    random = False

    def __init__(
        self,
        *,
        path: Annotated[Path, Field(description="A .jsonl, .json or .parquet file, or a dataset of Hugging Face.")],
        tokenizer: TokenizerName,
        source: Annotated[str, Field(description="Key of the text that the encoder reads.")] = "source",
        target: Annotated[str, Field(description="Key of the text that the decoder learns.")] = "target",
        prefix: Annotated[str, Field(description='Text before each source, e.g. "summarize: ".')] = "",
        max_length: Annotated[Length, Field(description="Longer sources are cut.")] = 512,
        max_target_length: Annotated[Length, Field(description="Longer targets are cut.")] = 512,
        split: Split = None,
        on_invalid: OnInvalid = "error",
    ) -> None:
        self.tokenizer = load_tokenizer(tokenizer)
        self.vocab_size, self.max_length, self.max_target_length = len(self.tokenizer), max_length, max_target_length
        self.pad_token, self._prefix = padding_of(self.tokenizer), prefix
        self._rows: list[tuple[str, str]] = []
        invalid = Invalid(on_invalid)
        for where, row in read_rows(path, [] if is_dataset(path, split) else [path], split):
            try:
                if isinstance(row, ValueError):
                    raise row
                self._rows.append((_text(row, source, where), _text(row, target, where)))
            except ValueError as error:
                invalid.take(where, error)
        if not self._rows:
            raise ValueError(f"path: all {invalid.number} rows of {path} are invalid: {invalid.reasons()}")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[str, str]:
        return self._rows[index]

    def lengths(self) -> NDArray[np.int64]:
        """Returns the number of tokens of each sample, of source or target, whichever is longer; tokenizes all."""
        return np.array([max(map(len, self._tokens([row]))) for row in self._rows])

    def collate(self, rows: Sequence[tuple[str, str]]) -> Batch:
        """Returns a batch of int64 tensors [B, S] and [B, T]."""
        tokens = self._tokens(rows)
        sources, targets = tokens[: len(rows)], tokens[len(rows) :]
        mask = padded([[1] * len(mine) for mine in sources], 0)
        return {
            "input_ids": padded(sources, self.pad_token),
            "attention_mask": mask,
            "labels": padded(targets, IGNORED),
        }

    def _tokens(self, rows: Sequence[tuple[str, str]]) -> list[list[int]]:
        """Returns the tokens of all sources, then those of all targets."""
        sources = [self._prefix + source for source, _ in rows]
        found: list[list[int]] = self.tokenizer(sources, truncation=True, max_length=self.max_length)["input_ids"]
        targets = [target for _, target in rows]
        cut = {"truncation": True, "max_length": self.max_target_length}
        return [*found, *self.tokenizer(text_target=targets, **cut)["input_ids"]]

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a source, with its prefix and end-of-text token."""
        tokens: list[int] = self.tokenizer(self._prefix + text)["input_ids"]
        return tokens

    def text_parts(self, batch: Batch) -> list[list[tuple[str, str]]]:
        """Returns the source, which is given, and the target, which is learnt, of each sample."""
        pairs = zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)
        return [
            [("given", self._shown(source, self.pad_token)), ("learnt", self._shown(target, IGNORED))]
            for source, target in pairs
        ]

    def _shown(self, tokens: list[int], padding: int) -> str:
        text: str = self.tokenizer.decode([token for token in tokens if token != padding])
        return text


class Seq2SeqLM(CausalLM):
    """Cross-entropy of the targets of an encoder-decoder model, in nats per token, without labels of -100.

    A batch is {input_ids [B, S], attention_mask [B, S], labels [B, T]}, as `source_target` gives it, or a data collator
    of transformers. The decoder reads the labels, moved by one position as the model does it itself. The loss is that
    of transformers, but summed and in float32. The task also reports the exponential of the loss, `perplexity`, unless
    the loss has `label_smoothing`.
    """

    separates_documents = False
    _shift: Callable[[Tensor], Tensor]

    def __init__(self, *, label_smoothing: LabelSmoothing = 0.0, metrics: Metrics = ()) -> None:
        super().__init__(label_smoothing=label_smoothing, metrics=metrics)

    def start(self, model: Any, world: World) -> None:
        """Keeps the model's function that makes the decoder's inputs from the labels."""
        check_attention(model, world)
        self._shift = model.prepare_decoder_input_ids_from_labels

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Returns the loss summed over tokens, and the logits [B, T, V]."""
        logits = self._logits(model, batch)
        return self._cross_entropy(logits, batch["labels"]), logits

    def _logits(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        labels = labels_of(batch, "seq2seq_lm")
        inputs = {name: tensor for name, tensor in batch.items() if name not in ("labels", "decoder_input_ids")}
        logits: Tensor = model(**inputs, decoder_input_ids=self._shift(labels), use_cache=False).logits
        return logits

    def loss_from_outputs(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Returns the loss summed over tokens, from the logits."""
        return self._cross_entropy(outputs, batch["labels"])

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns per sample: mean `loss`, number of counted `tokens`, and their `losses` [T] (0 for others)."""
        logits, labels = self._logits(model, batch), batch["labels"]
        flat = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return of_sequences(flat.view_as(labels), labels != IGNORED)

    def count(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Returns the number of labels that are not ignored."""
        return (labels_of(batch, "seq2seq_lm") != IGNORED).sum()

    def metrics(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """Returns the metrics of the recipe, over counted tokens only."""
        counted = batch["labels"] != IGNORED
        return {name: metric(outputs[counted], batch["labels"][counted]) for name, metric in self._metrics.items()}

    def check(self, model: nn.Module, data: Any) -> None:
        """Raises ValueError if the model has no encoder and decoder, or if the data exceeds the model's sizes."""
        config: Any = getattr(model, "config", None)
        if not getattr(config, "is_encoder_decoder", False):
            raise ValueError(
                f"{type(model).__name__} is not an encoder-decoder model: set model.use = "
                '"seq2seq_lm", or task.use = "causal_lm"'
            )
        if getattr(data, "vocab_size", 0) > config.vocab_size:
            raise ValueError(
                f"the data has {data.vocab_size} different tokens, but the model takes {config.vocab_size}; set "
                f"model.options.vocab_size = {data.vocab_size}"
            )
        takes = getattr(config, "max_position_embeddings", None)
        for key in ("max_length", "max_target_length"):
            if takes is not None and (has := getattr(data, key, 0)) > takes:
                raise ValueError(f"the data has {key} = {has}, but the model takes {takes} tokens; set {key} = {takes}")
        padding = getattr(data, "pad_token", config.pad_token_id)
        if padding != config.pad_token_id:
            raise ValueError(
                f"the data pads with token {padding}, but the model with {config.pad_token_id}; set "
                f"model.options.pad_token_id = {padding}"
            )
        if getattr(config, "decoder_start_token_id", None) is None:
            raise ValueError(
                "the model has no decoder_start_token_id, with which a target begins; set "
                f"model.options.decoder_start_token_id = {padding}"
            )


def _text(row: Mapping[str, Any], key: str, where: str) -> str:
    """Returns the text of a row; raises ValueError if there is none."""
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        found = f"it is {value!r:.40}" if key in row else f"it has the keys {', '.join(map(repr, row))}"
        raise ValueError(f'{where} needs "{key}", a text that is not empty: {found}')
    return value
