"""Task for language models of transformers. The loss is a sum, so every token has the same weight on any ranks."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from ddpforge.builtin.tasks.forms import IGNORED, LabelSmoothing, cross_entropy
from ddpforge.builtin.tasks.language_modeling import of_sequences
from ddpforge.interfaces import Metric, SampleColumns, Task, Total
from pydantic import Field
from torch import Tensor, nn

from ddpforge_transformers.packing import check_document_mask
from ddpforge_transformers.preference_data import FeedbackData, PreferenceData

__all__ = ["CausalLM", "check_fit"]

ddpforge_plugin_api = 3

Batch = Mapping[str, Tensor]
_Metrics = Annotated[Sequence[Metric], Field(description="Metrics in addition to the loss.")]


class CausalLM(Task):
    """Cross-entropy of the next token, in nats per token. A batch is {input_ids, labels} and optionally attention_mask.

    Several documents in a row have position_ids that start at 0 in each. The loss is that of transformers, but summed
    and in float32. Labels of -100 are ignored. The task also reports the exponential of the loss, `perplexity`, and the
    metrics of the counted tokens.
    """

    items = "tokens"
    predicts_next_token = True
    separates_documents = True

    def __init__(self, *, label_smoothing: LabelSmoothing = 0.0, metrics: _Metrics = ()) -> None:
        self._smoothing = label_smoothing
        self._metrics = {metric.name: metric for metric in metrics}
        if len(self._metrics) < len(metrics):
            raise ValueError(f"metrics must differ by name, got {[metric.name for metric in metrics]}")

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the loss summed over tokens, and the logits [B, T - 1, V] of all positions with a next token."""
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        logits = model(**inputs, use_cache=False).logits[:, :-1]
        return self.loss_from_outputs(logits, batch), logits

    def loss_from_outputs(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Returns the loss summed over tokens, from the logits."""
        targets = batch["labels"][:, 1:]
        return cross_entropy(outputs.flatten(0, 1), targets.flatten(), label_smoothing=self._smoothing)

    def predict(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Returns per sample: mean `loss`, number of counted `tokens`, and their `losses` [T - 1] (0 for others)."""
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        logits, targets = model(**inputs, use_cache=False).logits[:, :-1], batch["labels"][:, 1:]
        flat = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return of_sequences(flat.view_as(targets), targets != IGNORED)

    def count(self, batch: Batch) -> Tensor:
        """Returns the number of labels that are not ignored."""
        return (batch["labels"][:, 1:] != IGNORED).sum()

    def metrics(self, outputs: Tensor, batch: Batch) -> Mapping[str, Total | SampleColumns]:
        """Returns the metrics of the recipe, over counted tokens only."""
        if not self._metrics:
            return {}
        targets = batch["labels"][:, 1:]
        counted = targets != IGNORED
        return {name: metric(outputs[counted], targets[counted]) for name, metric in self._metrics.items()}

    def finish(self, metrics: dict[str, float]) -> dict[str, float]:
        """Adds the perplexity (infinite if it overflows); not to a smoothed loss."""
        if self._smoothing:
            return metrics
        loss = metrics["loss"]
        return metrics | {"perplexity": math.inf if loss > 700 else math.exp(loss)}

    def check(self, model: nn.Module, data: Any) -> None:
        """Raises ValueError if vocabulary or sample length exceed the model's, or if the data has classes or answers.

        Also for data with several documents in a sample, if the model is not known to keep them apart.
        """
        if getattr(data, "classes", None) is not None:
            raise ValueError("the data has classes, but this task predicts tokens; remove data.*.classes")
        if isinstance(data, PreferenceData | FeedbackData):
            raise ValueError(
                "each sample of the data has two answers, which this task cannot compare; set task.use = "
                + ('"kto"' if isinstance(data, FeedbackData) else '"dpo", "orpo" or "reward"')
            )
        check_fit(model, data)
        check_document_mask(model, data)


def check_fit(model: nn.Module, data: Any) -> None:
    """Raises ValueError if vocabulary or sample length exceed the model's."""
    config: Any = getattr(model, "config", None)
    if config is None:
        raise ValueError(f"this task needs a model of transformers, not a {type(model).__name__}")
    longest = getattr(data, "block_size", None) or getattr(data, "max_length", None)
    for noun, has, takes, key in (
        ("different tokens", getattr(data, "vocab_size", None), getattr(config, "vocab_size", None), "vocab_size"),
        ("tokens per sample", longest, getattr(config, "max_position_embeddings", None), "max_position_embeddings"),
    ):
        if has is not None and takes is not None and has > takes:
            raise ValueError(f"the data has {has} {noun}, but the model takes {takes}; set model.options.{key} = {has}")
