"""Decoder-only transformer like GPT-2 (Radford et al. 2019): pre-norm, learned positions."""

import math
from bisect import bisect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from ddpforge.builtin.models.frozen_layers import frozen_linear
from ddpforge.interfaces import AttentionContext

_STD = 0.02  # of all initial weights, as in GPT-2


class GPT(nn.Module):
    """Model `gpt`; `builders.gpt` documents its options."""

    repeated: ClassVar[tuple[str, ...]] = ("blocks",)
    """Names of `nn.ModuleList`s with most of the model's parameters; strategies shard their members one by one."""

    tensor_plan: Mapping[str, str] = {
        "tokens": "embedding_rowwise",
        "blocks.0": "scatter",
        "blocks.*.*_norm": "sequence_parallel",
        "blocks.*.attention.qkv": "colwise:3",
        "blocks.*.attention.projection": "rowwise",
        "blocks.*.mlp.0": "colwise",
        "blocks.*.mlp.2": "rowwise",
        "norm": "sequence_parallel",
        "head": "colwise_gather_output",
    }
    """Styles in which tensor parallelism shards the layers."""

    def __init__(
        self,
        *,
        vocab_size: int = 256,
        block_size: int = 256,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        dropout: float = 0.0,
        tie_embeddings: bool = True,
        bias: bool = True,
        causal: bool = True,
        classes: int | None = None,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"heads = {heads} does not divide width = {width}: {_nearest(width, heads)}")
        self.vocab_size, self.block_size = vocab_size, block_size
        self.context = AttentionContext()

        self.tokens = _Embedding(vocab_size, width)
        self.positions = _Embedding(block_size, width)
        self.dropout = nn.Dropout(dropout)
        residual_std = _STD / math.sqrt(2 * layers)
        self.blocks = nn.ModuleList(
            self._block(width, heads, dropout, bias, residual_std, causal) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width, bias=bias)
        # A tied layer has no parameter: two tied parameters may diverge when modules are materialized or sharded.
        self.head: nn.Module = _Tied()
        self.classes = classes
        if classes is not None:  # the head needs the mean over all positions on each rank
            self.tensor_plan = {key: word for key, word in self.tensor_plan.items() if key != "head"}
            self.tensor_plan["norm"] = "gather"
            self.outputs = classes
            self.head = _Linear(width, classes, bias=bias)
        elif not tie_embeddings:
            self.head = _Linear(width, vocab_size, bias=False)

    @property
    def pipeline(self) -> tuple[str | tuple[str, ...], ...]:
        """Returns the steps of a forward pass in order; pipeline stages may start at each of them."""
        last = "tokens" if isinstance(self.head, _Tied) else "head"
        return (("enter", "tokens", "positions"), "blocks", ("leave", "norm", last))

    def _block(self, *form: Any) -> "Block":
        return Block(*form)

    @property
    def takes_loss_function(self) -> bool:
        """True if `loss_function` is supported: the output layer is one product with its weights, without adapter."""
        return self.classes is None and isinstance(self.head, _Tied | _Linear)

    def forward(self, tokens: Tensor, loss_function: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
        """Maps [B, T] int64 → [B, T, vocab_size], or [B, classes]; raises ValueError if T exceeds `block_size`.

        With `loss_function` it returns `loss_function(hidden, weight)` instead of logits, for the hidden states [B, T,
        width] and the weights of the output layer [vocab_size, width].
        """
        x = self.enter(tokens)
        for block in self.blocks:
            x = block(x)
        return self.leave(x, loss_function)

    def enter(self, tokens: Tensor) -> Tensor:
        """Maps tokens [B, T] int64 → the input of the first block [B, T, width]."""
        length = self.context.length(tokens.shape[1])
        if length > self.block_size:
            raise ValueError(f"a sequence of {length} tokens is longer than the model's block_size = {self.block_size}")

        x = self.tokens(tokens) + self.positions(self.context.positions(tokens.shape[1], tokens.device))
        found: Tensor = self.dropout(x)
        return found

    def leave(self, x: Tensor, loss_function: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
        """Maps the output of the last block [B, T, width] → logits, or the result of `loss_function`."""
        x = self.norm(x)
        if self.classes is not None:
            x = x.mean(dim=1)
        tied = isinstance(self.head, _Tied)
        if loss_function is not None:
            weight: Any = self.tokens.weight if tied else self.head.weight
            return loss_function(x, weight)
        logits: Tensor = self.head(x, self.tokens.weight) if tied else self.head(x)
        return logits


class _Tied(nn.Module):
    """Output layer that uses the weights of another module; a separate module, so that plans can name it."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Maps [..., width] → [..., vocab_size]."""
        return F.linear(x, weight) if weight.requires_grad else frozen_linear(x, weight, None)


class Block(nn.Module):
    """Transformer block: attention, then a two-layer MLP; each adds to the residual stream (pre-norm)."""

    def __init__(
        self, width: int, heads: int, dropout: float, bias: bool, residual_std: float, causal: bool = True
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=bias)
        self.attention = Attention(width, heads, dropout, bias, residual_std, causal)
        self.mlp_norm = nn.LayerNorm(width, bias=bias)
        self.mlp = self._mlp(width, dropout, bias, residual_std)

    def _mlp(self, width: int, dropout: float, bias: bool, residual_std: float) -> nn.Module:
        return nn.Sequential(
            _Linear(width, 4 * width, bias=bias),
            nn.GELU(),
            _Linear(4 * width, width, bias=bias, std=residual_std),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, T, width] → [B, T, width]."""
        x = x + self.attention(self.attention_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return x


class Attention(nn.Module):
    """Multi-head self-attention; if `causal`, positions attend only to themselves and earlier ones."""

    def __init__(
        self, width: int, heads: int, dropout: float, bias: bool, residual_std: float, causal: bool = True
    ) -> None:
        super().__init__()
        self.head_dim, self.causal = width // heads, causal
        self.context = AttentionContext()
        self.qkv = _Linear(width, 3 * width, bias=bias)
        self.projection = _Linear(width, width, bias=bias, std=residual_std)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, T, width] → [B, T, width]."""
        qkv = self.qkv(x).unflatten(-1, (3, -1, self.head_dim))  # only this rank's heads
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, heads, T, head_dim]
        dropout = self.dropout.p if self.training else 0.0
        mixed = self.context.attention(q, k, v, causal=self.causal, dropout=dropout)
        out: Tensor = self.dropout(self.projection(mixed.transpose(1, 2).flatten(2)))
        return out


class _Linear(nn.Linear):
    """Linear layer with initial weights N(0, std²) and zero biases."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, std: float = _STD) -> None:
        self.std = std  # first, because nn.Linear's constructor calls reset_parameters
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class _Embedding(nn.Embedding):
    """Embedding with initial weights N(0, 0.02²)."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=_STD)


def _nearest(width: int, heads: int) -> str:
    """Returns a hint with the numbers of heads closest to `heads` that divide `width`."""
    divisors = [n for n in range(1, width + 1) if width % n == 0]
    above = bisect(divisors, heads)
    nearest = " or ".join(map(str, divisors[max(0, above - 1) : above + 1]))
    return f"use heads = {nearest}, or a width that is a multiple of {heads}"
