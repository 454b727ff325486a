"""Sequence classification: one class per sequence of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ddpforge.builtin.tasks.classification import Classification, chosen
from ddpforge.builtin.tasks.forms import beside_targets, pair, parts_of
from ddpforge.builtin.tasks.sequences import check_sizes, logits_of, tokens_of
from ddpforge.interfaces import Data

if TYPE_CHECKING:
    from torch import Tensor, nn


class SequenceClassification(Classification):
    """Classification of tokens [B, T]; a batch is (tokens, classes).

    A batch for a model of transformers is {input_ids, attention_mask, labels [B]}.
    """

    task_name = "sequence_classification"

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Returns the summed cross-entropy, and the logits [B, C]."""
        logits = logits_of(model, *tokens_of(batch, "sequence_classification"), "sequence_classification")
        return self.cross_entropy(logits, self.classes_of(batch)), logits

    def loss_from_outputs(self, outputs: Tensor, batch: Any) -> Tensor:
        """Returns the summed cross-entropy."""
        return self.cross_entropy(outputs, self.classes_of(batch))

    def classes_of(self, batch: Any) -> Tensor:
        """Returns the classes of a batch; in a mapping they are called `labels`."""
        if isinstance(batch, Mapping):
            classes: Tensor = batch["labels"]
            return classes
        return pair(batch, "sequence_classification", "(tokens, classes)")[1]

    def count(self, batch: Any) -> Tensor | None:
        """Counts as `classification` does, for both forms of a batch."""
        return super().count((None, self.classes_of(batch)))

    def predict(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        """Returns the most probable `class`, its `probability`, and the true class, `target`, if the batch has it."""
        logits = logits_of(model, *tokens_of(batch, "sequence_classification"), "sequence_classification")
        classes = batch.get("labels") if isinstance(batch, Mapping) else parts_of(batch)[1]
        return beside_targets(chosen(logits), classes)

    def check(self, model: nn.Module, data: Data) -> None:
        """Raises ValueError if the sizes of data and model do not fit, or their padding tokens differ."""
        super().check(model, data)
        check_sizes(model, data)
        config, tokenizer = getattr(model, "config", None), getattr(data, "tokenizer", None)
        if config is not None and tokenizer is not None:
            mine, padding = getattr(config, "pad_token_id", None), getattr(data, "pad_token", tokenizer.pad_token_id)
            if mine is None or padding not in (None, mine):
                fault = "has no pad_token_id" if mine is None else f"has pad_token_id = {mine}, other than the data"
                raise ValueError(
                    f"the model's config {fault}, so the model cannot find the end of a text;"
                    f" set model.options.pad_token_id = {padding}"
                )
        if tokenizer is not None and getattr(data, "classes", None) is None:
            raise ValueError("the data has no classes; set data.train.classes (and data.eval.classes)")
