"""The model `text_encoder`: an encoder of transformers with pooling, a Dense layer and normalization."""

import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, cast

import torch
import torch.nn.functional as F
from ddpforge.builtin.models.lora import Adapters
from ddpforge_transformers.building import adapted
from ddpforge_transformers.models import base_model
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddpforge_embeddings.folder import ACTIVATIONS, Activation, EncoderFolder, SavedEncoder, read_folder
from ddpforge_embeddings.refusals import refused

__all__ = ["Dense", "TextEncoder", "Texts", "text_encoder"]

ddpforge_plugin_api = 3

log = logging.getLogger("ddpforge")

Texts = Mapping[str, Tensor]
"""Tokens of N texts: `input_ids` and `attention_mask` [N, T], padded on the right; `prompt_length` [N]; all int64."""
Pooling = Literal["mean", "cls", "max", "last"]


class Dense(BaseModel):
    """Options of a linear layer after the pooling."""

    model_config = ConfigDict(extra="forbid")

    features: Annotated[int, Field(ge=1, le=2**20, description="Size of the embeddings.")]
    activation: Annotated[Activation, Field(description="Activation after the layer.")] = "identity"
    bias: Annotated[bool, Field(description="Whether the layer has a bias.")] = True


class TextEncoder:
    """Text encoder: the class of a transformers model gets these methods, so its weights keep their names.

    `chunk` of `forward` bounds the memory of activations: at most `chunk` texts are computed at a time, and computed
    again in the backward pass (Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup",
    2021). Loss and gradients are those of all texts at once, also with dropout.
    """

    pooling: Pooling
    normalize: bool
    include_prompt: bool
    saved: SavedEncoder | None
    config: Any

    def forward(
        self, texts: Sequence[Texts], chunk: int | None = None, passes: Sequence[int] | None = None
    ) -> list[Tensor]:
        """Returns the embeddings [N, D] of each group of texts, in float32 outside of autocast.

        `passes` is the number of chunks of each group on the rank with the most: FSDP needs as many on every rank.
        """
        counts = passes if passes is not None else [0] * len(texts)
        return [self._embeddings(group, chunk, count) for group, count in zip(texts, counts, strict=True)]

    def _embeddings(self, texts: Texts, chunk: int | None, passes: int) -> Tensor:
        parts = [texts[name] for name in ("input_ids", "attention_mask", "prompt_length")]
        if chunk is None or (passes < 2 and chunk >= len(parts[0]) and not torch.is_grad_enabled()):
            return self._embed(*parts)
        chunks = list(zip(*(torch.split(part, chunk) for part in parts), strict=True))
        found: list[Tensor] = []
        missing = max(0, passes - len(chunks))
        for rows in (*chunks, *([tuple(part[:1] for part in parts)] * missing)):
            if torch.is_grad_enabled():
                # With an early stop, hooks of FSDP after the forward pass of a block would not run.
                found.append(checkpoint(self._embed, *rows, use_reentrant=False, early_stop=False))
            else:
                found.append(self._embed(*rows))
        whole = torch.cat(found[: len(chunks)])
        for extra in found[len(chunks) :]:
            whole = whole + 0 * extra.sum()
        return whole

    def _embed(self, ids: Tensor, mask: Tensor, prompt: Tensor) -> Tensor:
        if mask.device.type == "cpu" and not torch.compiler.is_compiling():
            # A chunk may be shorter. Without values, in an estimate of memory, the sum is 0.
            longest = int(mask.sum(1).max()) or mask.shape[1]
            ids, mask = ids[:, :longest], mask[:, :longest]
        keywords = {"use_cache": False} if getattr(self.config, "use_cache", None) else {}
        hidden: Tensor = super().forward(input_ids=ids, attention_mask=mask, **keywords)[0]  # type: ignore[misc]
        if not self.include_prompt:
            mask = mask * (torch.arange(mask.shape[1], device=mask.device) >= prompt[:, None])
        pooled = _pooled(hidden, mask, self.pooling)
        head = getattr(self, "head", None)
        if head is not None:
            pooled = head(pooled)
        return F.normalize(pooled.float(), dim=-1) if self.normalize else pooled.float()

    @property
    def dimension(self) -> int:
        """Returns the size of embeddings."""
        head: Any = getattr(self, "head", None)
        return int(head.linear.out_features if head is not None else self.config.hidden_size)

    def save_extra_files(self, folder: Any, data: Any, tensors: Mapping[str, Tensor]) -> None:
        """Writes the files of sentence-transformers into an exported folder; `tensors` reads its weights by name."""
        EncoderFolder(
            pooling=self.pooling,
            include_prompt=self.include_prompt,
            size=self.config.hidden_size,
            dense=getattr(self, "head", None),
            normalize=self.normalize,
            prompts=getattr(data, "prompts", {}),
            max_length=getattr(data, "max_length", None),
        ).write(folder, tensors)


class Head(nn.Module):
    """Linear layer with an activation, for pooled embeddings [N, D]."""

    def __init__(self, size: int, dense: Dense) -> None:
        super().__init__()
        self.linear = nn.Linear(size, dense.features, bias=dense.bias)
        self.activation_name = dense.activation
        self.activation = ACTIVATIONS[dense.activation][1]()

    def forward(self, pooled: Tensor) -> Tensor:
        """Returns [N, features]."""
        found: Tensor = self.activation(self.linear(pooled.to(self.linear.weight.dtype)))
        return found


def _pooled(hidden: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """Returns one vector per text, [N, D], from hidden states [N, T, D] where `mask` [N, T] is 1."""
    if pooling == "mean":
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        return (hidden * weights).sum(1, dtype=torch.float32) / weights.sum(1, dtype=torch.float32).clamp(min=1e-9)
    if pooling == "max":
        return hidden.masked_fill(mask.unsqueeze(-1) == 0, -torch.inf).amax(1)
    places = torch.arange(mask.shape[1], device=mask.device)
    first = mask.argmax(1) if pooling == "cls" else (mask * places).argmax(1)
    return hidden[torch.arange(len(hidden), device=hidden.device), first]


def text_encoder(
    *,
    model_type: Annotated[
        str | None, Field(description='Type of a model with random weights, e.g. "bert"; or set `pretrained`.')
    ] = None,
    pretrained: Annotated[
        str | None,
        Field(description="Folder of sentence-transformers or transformers, or a name on the hub to download."),
    ] = None,
    weights: Annotated[bool, Field(description="False: uses only the config of `pretrained`.")] = True,
    options: Annotated[Mapping[str, Any], Field(description="Keys of the config, e.g. { hidden_size = 64 }.")] = {},
    pooling: Annotated[
        Pooling | None, Field(description='Pooling of token states; absent: that of the folder, or "mean".')
    ] = None,
    normalize: Annotated[
        bool | None, Field(description="Scale embeddings to length 1; absent: as the folder, or not.")
    ] = None,
    include_prompt: Annotated[
        bool | None, Field(description="Whether tokens of the prompt are pooled; absent: as the folder, or true.")
    ] = None,
    dense: Annotated[
        Dense | None,
        Field(description="Linear layer after the pooling, e.g. { features = 256 }; absent: the folder's."),
    ] = None,
    attention: Annotated[
        Literal["eager", "sdpa", "flash_attention_2"] | None,
        Field(description="Implementation of attention; absent: the default of transformers."),
    ] = None,
    lora: Annotated[
        Adapters | None,
        Field(description='Train only adapters and a new `dense`: options of `lora`, e.g. { targets = ["query"] }.'),
    ] = None,
) -> nn.Module:
    """Builds a text encoder for the tasks of this package: groups of tokenized texts → embeddings [N, D] of each.

    From a folder of sentence-transformers it takes pooling, Dense layer and normalization. The pooler of BERT, which
    embeddings do not use, is frozen.

    Raises ValueError for unknown types and keys, if there is no saved model, for modules of sentence-transformers
    that it does not have, and for adapters that do not fit.
    """
    with refused():
        saved = read_folder(pretrained) if pretrained is not None else None
    place = str(saved.transformer) if saved else pretrained
    with refused():
        model: Any = base_model(model_type, place, options, attention, weights=weights)
    kind = type(model)
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"{model.config.model_type} has an encoder and a decoder, and a text encoder needs one stack of layers: "
            'set a model_type such as "bert", "modernbert" or "qwen3"'
        )
    if not hasattr(model.config, "hidden_size"):
        raise ValueError(f"{kind.__name__} has no hidden_size in its config: it is not a model of text")
    model.__class__ = type(kind.__name__, (TextEncoder, kind), {"__module__": __name__})
    model.saved = saved
    model.pooling = pooling or (saved and saved.pooling) or "mean"
    model.normalize = normalize if normalize is not None else bool(saved and saved.normalize)
    model.include_prompt = include_prompt if include_prompt is not None else not saved or saved.include_prompt
    new = _add_head(model, dense, saved, weights=weights)
    if getattr(model, "pooler", None) is not None:
        model.pooler.requires_grad_(False)
    with refused():
        return cast(nn.Module, adapted(model, lora, new))


def _add_head(model: Any, dense: Dense | None, saved: SavedEncoder | None, *, weights: bool) -> set[str]:
    """Adds the Dense layer, saved or new; returns the names of new weights."""
    stored = saved.dense if saved and dense is None else None
    chosen = Dense(**stored.options) if stored else dense
    if chosen is None:
        return set()
    model.head = Head(model.config.hidden_size, chosen)
    if stored and weights:
        model.head.load_state_dict(stored.tensors())
        return set()
    return {name for name, _ in model.named_parameters() if name.startswith("head.")}


text_encoder.export_format = "transformers"  # type: ignore[attr-defined]  # of `ddpforge export` into a folder
