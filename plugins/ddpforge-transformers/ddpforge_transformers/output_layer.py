"""Losses in the output layer of a causal model, in place of its logits: the memory of all logits is not needed."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from ddpforge.builtin.tasks.chunked import chunked_cross_entropy, log_probabilities_in_chunks
from ddpforge.builtin.tasks.forms import IGNORED
from ddpforge.errors import UsageError
from ddpforge.interfaces.forms import described
from torch import Tensor, nn

__all__ = [
    "OutputLayer",
    "check_output_layer",
    "chunked_loss",
    "liger_loss",
    "next_tokens",
    "token_log_probabilities",
]

LossFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]
# Keys of configs for changes to the logits after the output layer, and the value without an effect.
_CHANGES_LOGITS = {
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "lm_head_multiplier": 1.0,
    "output_logits_soft_cap": None,
}
_CHANGED = "changes its logits after the output layer"


class OutputLayer:
    """Output layer of a causal model, which can compute a function of the hidden states in place of the logits.

    Two hooks on the layer do this in a call of the model: the layer itself computes nothing, and the function reads its
    weights while it runs, when they are whole under FSDP and ZeRO. In all other calls the layer returns logits.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layer = _layer_of(model)
        self._function: LossFunction | None = None
        self._hidden: Tensor | None = None
        self._found: Tensor | None = None
        self._is_checked = False
        before, after = (torch.compiler.disable(hook) for hook in (self._before, self._after))  # type: ignore[no-untyped-call]
        self.layer.register_forward_pre_hook(before)
        self.layer.register_forward_hook(after, prepend=True)  # before strategies free the weights

    def __call__(self, model: nn.Module, inputs: Mapping[str, Tensor], function: LossFunction) -> Tensor:
        """Calls the model, and returns `function(hidden, weight, bias)`; hidden is [B, T, C], weight [V, C], bias [V].

        Raises UsageError if the model changes the result, as it changes logits.
        """
        self._function = function
        try:
            returned: Tensor = model(**inputs, use_cache=False).logits
            found = self._found
        finally:
            self._function = self._hidden = self._found = None
        if found is None or (returned is not found and not self._is_same(returned, found)):
            raise UsageError(
                f"{type(model).__name__} {_CHANGED}, so that no loss can be computed in its output layer",
                hints=["remove task.loss_chunk and task.loss_kernel"],
            )
        return returned

    def belongs_to(self, model: nn.Module) -> bool:
        """True if this is the output layer of `model`."""
        return self.layer is _layer_of(model)

    def _is_same(self, returned: Tensor, found: Tensor) -> bool:
        """True if a strategy returns the loss as another tensor; reads the values only once, which waits for them."""
        if not self._is_checked:
            self._is_checked = returned.shape == found.shape and torch.equal(returned.detach(), found.detach())
        return self._is_checked

    def _before(self, layer: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if self._function is None:
            return None
        self._hidden = given[0]
        return (self._hidden[..., :0, :],)  # no rows: the layer computes nothing

    def _after(self, layer: Any, given: Any, logits: Tensor) -> Tensor | None:
        if self._function is None or self._hidden is None:
            return None
        self._found = self._function(self._hidden, layer.weight, layer.bias)
        return self._found


def next_tokens(labels: Tensor) -> Tensor:
    """Returns the target of each position, int64 [B, T], from labels [B, T]: the label after it; -100 at the end."""
    return torch.cat([labels[:, 1:], labels.new_full((len(labels), 1), IGNORED)], dim=1)


def chunked_loss(targets: Tensor, chunk: int, label_smoothing: float, z_loss: float) -> LossFunction:
    """Returns the function that computes the summed loss with `chunk` rows of logits at the same time."""
    return partial(
        chunked_cross_entropy,
        targets=targets,
        chunk=chunk,
        ignore_index=IGNORED,
        task="causal_lm",
        label_smoothing=label_smoothing,
        z_loss=z_loss,
    )


def liger_loss(targets: Tensor, label_smoothing: float, z_loss: float) -> LossFunction:
    """Returns the function that computes the summed loss by a kernel of liger-kernel."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else hidden.dtype
        found: Tensor = liger_fused_linear_cross_entropy(
            hidden.flatten(0, -2).to(dtype),
            weight.to(dtype),
            targets.flatten(),
            bias=None if bias is None else bias.to(dtype),
            ignore_index=IGNORED,
            lse_square_scale=z_loss,
            label_smoothing=label_smoothing,
            reduction="sum",
            accum_dtype=torch.float32,
        )
        return found

    return loss


def token_log_probabilities(
    output: OutputLayer, model: nn.Module, batch: Mapping[str, Tensor], *, chunk: int
) -> Tensor:
    """Returns the log-probability of each next token, fp32 [B, T - 1], with gradients; 0 for labels of -100.

    Only `chunk` rows of logits are in memory at the same time. `batch` is {input_ids, labels} and further inputs. Build
    `output` once per model.
    """
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    function = partial(
        log_probabilities_in_chunks,
        targets=next_tokens(batch["labels"]),
        chunk=chunk,
        ignore_index=IGNORED,
        task="log-probabilities",
    )
    return output(model, inputs, function)[:, :-1]


def check_output_layer(model: nn.Module, option: str) -> None:
    """Raises ValueError if no loss can be computed in the output layer; `option` is the task's option for it."""
    layer: Any = _layer_of(model)
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if type(layer) is not nn.Linear or not layer.weight.is_floating_point():
        raise ValueError(
            f"task.{option} computes the loss from the weights of the output layer, which must be a torch.nn.Linear in"
            f" floating point, but it is a {type(layer).__name__} of {described(layer.weight)}; remove {option}, or"
            " neither adapt nor quantise the output layer"
        )
    for key, neutral in _CHANGES_LOGITS.items():
        if getattr(config, key, None) not in (None, neutral):
            raise ValueError(
                f"task.{option} cannot be used: {type(model).__name__} {_CHANGED} (`{key}` of its config); remove"
                f" {option}"
            )


def _layer_of(model: nn.Module) -> Any:
    """Returns the output layer; raises ValueError if the model has none."""
    for module in model.modules():
        get: Any = getattr(module, "get_output_embeddings", None)
        if get is not None and (layer := get()) is not None:
            return layer
    raise ValueError(f"{type(model).__name__} has no output layer over the vocabulary")
