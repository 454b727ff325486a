"""Task for language models of transformers. The loss is a sum, so every token has the same weight on any ranks."""

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Annotated, Any, Literal

from ddpforge.builtin.tasks.forms import IGNORED, LabelSmoothing, ZLoss, cross_entropy
from ddpforge.builtin.tasks.language_modeling import of_sequences
from ddpforge.errors import UsageError
from ddpforge.interfaces import Metric, SampleColumns, Task, Total, World
from ddpforge.interfaces.forms import described
from pydantic import Field
from torch import Tensor, nn

from ddpforge_transformers.output_layer import (
    LossFunction,
    OutputLayer,
    check_output_layer,
    chunked_loss,
    liger_loss,
    next_tokens,
)
from ddpforge_transformers.packing import check_document_mask
from ddpforge_transformers.preference_data import FeedbackData, PreferenceData
from ddpforge_transformers.probe import check_causal

__all__ = ["CausalLM", "LossChunk", "Metrics", "check_attention", "check_fit", "labels_of"]

ddpforge_plugin_api = 3

Batch = Mapping[str, Tensor]
LossChunk = Annotated[
    int | None,
    Field(
        ge=1,
        le=2**24,
        description="Number of targets with logits in memory at the same time, e.g. 1024; absent: all.",
    ),
]
Metrics = Annotated[Sequence[Metric], Field(description="Metrics in addition to the loss.")]


class CausalLM(Task):
    """Cross-entropy of the next token, in nats per token. A batch is {input_ids, labels} and optionally attention_mask.

    Several documents in a row have position_ids that start at 0 in each. The loss is that of transformers, but summed
    and in float32. Labels of -100 are ignored. The task also reports the exponential of the loss, `perplexity`, unless
    the loss has `label_smoothing` or `z_loss`, and the metrics of the counted tokens.

    With `loss_chunk` or `loss_kernel` the loss is computed in the output layer, and the memory of all logits is not
    needed. There are no metrics then. Models that change their logits after the output layer are refused.
    """

    items = "tokens"
    predicts_next_token = True
    separates_documents = True

    def __init__(
        self,
        *,
        label_smoothing: LabelSmoothing = 0.0,
        metrics: Metrics = (),
        z_loss: ZLoss = None,
        loss_chunk: LossChunk = None,
        loss_kernel: Annotated[
            Literal["liger"] | None,
            Field(description="Kernel that computes the loss in the output layer: that of liger-kernel, on GPUs."),
        ] = None,
    ) -> None:
        self._smoothing, self._z_loss = label_smoothing, z_loss or 0.0
        self._chunk, self._kernel = loss_chunk, loss_kernel
        self.loss_in_model = loss_chunk is not None or loss_kernel is not None
        self._output: OutputLayer | None = None
        self._metrics = {metric.name: metric for metric in metrics}
        if len(self._metrics) < len(metrics):
            raise ValueError(f"metrics must differ by name, got {[metric.name for metric in metrics]}")
        if loss_chunk is not None and loss_kernel is not None:
            raise ValueError("loss_kernel chooses its own chunks; remove loss_chunk or loss_kernel")
        if self.loss_in_model and metrics:
            raise ValueError(f"metrics need the logits, which {self._option} does not compute; remove one of them")
        if loss_kernel is not None and find_spec("liger_kernel") is None:
            raise ValueError(
                f'loss_kernel = "{loss_kernel}" needs a package that is not installed: pip install'
                " liger-kernel; loss_chunk needs none"
            )

    @property
    def _option(self) -> str:
        return "loss_chunk" if self._chunk is not None else "loss_kernel"

    def start(self, model: nn.Module, world: World) -> None:
        """Raises UsageError for a kernel that the device does not have."""
        check_attention(model, world)
        if self._kernel is not None and world.device.type != "cuda":
            raise UsageError(
                f'task.loss_kernel = "{self._kernel}" runs on GPUs of CUDA, but this rank computes on'
                f" {world.device.type}",
                hints=["set task.loss_chunk = 1024 instead"],
                key="task.loss_kernel",
            )

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Returns the loss summed over tokens, and the logits [B, T - 1, V] of all positions with a next token.

        The logits are None if the loss is computed in the output layer.
        """
        targets = next_tokens(labels_of(batch))
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        if self.loss_in_model:
            return self._output_of(model)(model, inputs, self._function(targets)), None
        logits = model(**inputs, use_cache=False).logits
        # Of all positions: without the last one the logits would have to be copied.
        return self._cross_entropy(logits, targets), logits[:, :-1]

    def loss_from_outputs(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Returns the loss summed over tokens, from the logits."""
        return self._cross_entropy(outputs, labels_of(batch)[:, 1:])

    def _cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(
            logits.flatten(0, 1), targets.flatten(), label_smoothing=self._smoothing, z_loss=self._z_loss
        )

    def _function(self, targets: Tensor) -> LossFunction:
        if self._chunk is not None:
            return chunked_loss(targets, self._chunk, self._smoothing, self._z_loss)
        return liger_loss(targets, self._smoothing, self._z_loss)

    def _output_of(self, model: nn.Module) -> OutputLayer:
        if self._output is None or not self._output.belongs_to(model):
            self._output = OutputLayer(model)
        return self._output

    def predict(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Returns per sample: mean `loss`, number of counted `tokens`, and their `losses` [T - 1] (0 for others)."""
        targets = labels_of(batch)[:, 1:]
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        logits = model(**inputs, use_cache=False).logits[:, :-1]
        flat = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return of_sequences(flat.view_as(targets), targets != IGNORED)

    def count(self, batch: Batch) -> Tensor:
        """Returns the number of labels that are not ignored."""
        return (labels_of(batch)[:, 1:] != IGNORED).sum()

    def metrics(self, outputs: Tensor, batch: Batch) -> Mapping[str, Total | SampleColumns]:
        """Returns the metrics of the recipe, over counted tokens only."""
        if not self._metrics:
            return {}
        targets = labels_of(batch)[:, 1:]
        counted = targets != IGNORED
        return {name: metric(outputs[counted], targets[counted]) for name, metric in self._metrics.items()}

    def finish(self, metrics: dict[str, float]) -> dict[str, float]:
        """Adds the perplexity (infinite if it overflows); not with label_smoothing or z_loss."""
        if self._smoothing or self._z_loss:
            return metrics
        loss = metrics["loss"]
        return metrics | {"perplexity": math.inf if loss > 700 else math.exp(loss)}

    def check(self, model: nn.Module, data: Any) -> None:
        """Raises ValueError if vocabulary or sample length exceed the model's, or if the data has classes or answers.

        Also for a model whose tokens see later ones, and for data with several documents in a sample, if the model does
        not keep them apart.
        """
        if getattr(data, "classes", None) is not None:
            raise ValueError("the data has classes, but this task predicts tokens; remove data.*.classes")
        if isinstance(data, PreferenceData | FeedbackData):
            raise ValueError(
                "each sample of the data has two answers, which this task cannot compare; set task.use = "
                + ('"kto"' if isinstance(data, FeedbackData) else '"dpo", "orpo" or "reward"')
            )
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise ValueError(
                f"{type(model).__name__} has an encoder and a decoder: set task.use = "
                '"seq2seq_lm", or model.use = "causal_lm"'
            )
        check_fit(model, data)
        check_causal(model)
        check_document_mask(model, data)
        if self.loss_in_model:
            check_output_layer(model, self._option)


def labels_of(batch: Any, task: str = "causal_lm") -> Tensor:
    """Returns the labels [B, T] of a batch; raises UsageError if it has none."""
    if isinstance(batch, Mapping) and "labels" in batch:
        labels: Tensor = batch["labels"]
        return labels
    raise UsageError(
        f"task {task} takes a batch {{input_ids, labels}}; the data gives {described(batch)}",
        hints=[
            'return dicts as samples, {"input_ids": tokens, "labels": tokens}, with -100 for labels that do not count',
            'for pairs (tokens, next tokens) and a model that returns logits, set task.use = "language_modeling"',
        ],
        key="task.use",
    )


def check_attention(model: nn.Module, world: World) -> None:
    """Raises UsageError for flex attention on a CPU: torch has no backward pass for it."""
    config: Any = model.config
    if world.device.type == "cpu" and getattr(config, "_attn_implementation", None) == "flex_attention":
        raise UsageError(
            'attention = "flex_attention" has no backward pass on a CPU',
            hints=['set model.attention = "sdpa", which has the same masks'],
            key="model.attention",
        )


def check_fit(model: nn.Module, data: Any) -> None:
    """Raises ValueError if vocabulary or sample length exceed the model's."""
    config: Any = getattr(model, "config", None)
    if config is None:
        raise ValueError(f"this task needs a model of transformers, not a {type(model).__name__}")
    if getattr(config.get_text_config(), "output_router_logits", False):
        raise ValueError(
            "the config sets output_router_logits: the auxiliary loss of a router, which is a mean over the tokens"
            " of a micro-batch and would depend on its size; the task does not add it: set"
            " model.options.output_router_logits = false"
        )
    text = config.get_text_config()  # of a model that also takes images
    longest = getattr(data, "block_size", None) or getattr(data, "max_length", None)
    for noun, has, takes, key in (
        ("different tokens", getattr(data, "vocab_size", None), getattr(text, "vocab_size", None), "vocab_size"),
        ("tokens per sample", longest, getattr(text, "max_position_embeddings", None), "max_position_embeddings"),
    ):
        if has is not None and takes is not None and has > takes:
            part = "" if text is config else "text_config."
            hint = f"set model.options.{part}{key} = {has}"
            if getattr(model, "keeps_saved_dtype", False):  # saved weights have this shape
                fewer = "block_size" if getattr(data, "block_size", None) else "max_length"
                hint = (
                    f"set model.resize_vocabulary = {has}"
                    if key == "vocab_size"
                    else f"set {fewer} = {takes} in the data"
                )
            raise ValueError(f"the data has {has} {noun}, but the model takes {takes}; {hint}")
