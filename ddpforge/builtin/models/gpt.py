"""A decoder-only transformer in the manner of GPT-2 (Radford et al. 2019): pre-norm, learnt positions."""

import math
from bisect import bisect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from ddpforge.interfaces import Context

_STD = 0.02  # of all initial weights, as in GPT-2


class GPT(nn.Module):
    """The model `gpt`; `builders.gpt` documents its options."""

    repeated: ClassVar[tuple[str, ...]] = ("blocks",)
    """The `nn.ModuleList`s whose members make up most of the model: what a strategy shards one by one."""

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
    """The styles in which ranks of tensor parallelism share layers."""

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
        self.context = Context()

        self.tokens = _Embedding(vocab_size, width)
        self.positions = _Embedding(block_size, width)
        self.dropout = nn.Dropout(dropout)
        residual_std = _STD / math.sqrt(2 * layers)
        self.blocks = nn.ModuleList(
            self._block(width, heads, dropout, bias, residual_std, causal) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width, bias=bias)
        self.head: nn.Module = _Tied()
        self.classes = classes
        if classes is not None:  # of the mean over positions, all of which a rank then needs
            self.tensor_plan = {key: word for key, word in self.tensor_plan.items() if key != "head"}
            self.tensor_plan["norm"] = "gather"
            self.outputs = classes
            self.head = _Linear(width, classes, bias=bias)
        elif not tie_embeddings:
            self.head = _Linear(width, vocab_size, bias=False)

    @property
    def pipeline(self) -> tuple[str | tuple[str, ...], ...]:
        """The steps of a forward pass, in their order: where a pipeline may cut."""
        last = "tokens" if isinstance(self.head, _Tied) else "head"
        return (("enter", "tokens", "positions"), "blocks", ("leave", "norm", last))

    def _block(self, *form: Any) -> "Block":
        return Block(*form)

    @property
    def takes_score(self) -> bool:
        """True if the output layer is one product with its weights, which `score` can be given: no adapter is in it."""
        return self.classes is None and isinstance(self.head, _Tied | _Linear)

    def forward(self, tokens: Tensor, score: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
        """[B, T] int64 → [B, T, vocab_size], or [B, classes]; raises ValueError when T exceeds `block_size`.

        With `score` it is, in place of logits, what that makes of the hidden states [B, T, width] and the weights of
        the output layer [vocab_size, width].
        """
        x = self.enter(tokens)
        for block in self.blocks:
            x = block(x)
        return self.leave(x, score)

    def enter(self, tokens: Tensor) -> Tensor:
        """[B, T] int64 → [B, T, width]: what the first block reads."""
        length = self.context.length(tokens.shape[1])
        if length > self.block_size:
            raise ValueError(f"a sequence of {length} tokens is longer than the model's block_size = {self.block_size}")

        x = self.tokens(tokens) + self.positions(self.context.positions(tokens.shape[1], tokens.device))
        found: Tensor = self.dropout(x)
        return found

    def leave(self, x: Tensor, score: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
        """[B, T, width] → logits, or a score: what is made of what the last block writes."""
        x = self.norm(x)
        if self.classes is not None:
            x = x.mean(dim=1)
        tied = isinstance(self.head, _Tied)
        if score is not None:
            weight: Any = self.tokens.weight if tied else self.head.weight
            return score(x, weight)
        logits: Tensor = self.head(x, self.tokens.weight) if tied else self.head(x)
        return logits


class _Tied(nn.Module):
    """An output layer whose weights are another module's; a module of its own, so that plans can name it."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """[..., width] → [..., vocab_size]."""
        return F.linear(x, weight)


class Block(nn.Module):
    """Attention, then a two-layer perceptron; each reads a normalised copy of the stream and adds to it."""

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
        """[B, T, width] → [B, T, width]."""
        x = x + self.attention(self.attention_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return x


class Attention(nn.Module):
    """Multi-head self-attention; where it is `causal` a position sees itself and what came before."""

    def __init__(
        self, width: int, heads: int, dropout: float, bias: bool, residual_std: float, causal: bool = True
    ) -> None:
        super().__init__()
        self.head_dim, self.causal = width // heads, causal
        self.context = Context()
        self.qkv = _Linear(width, 3 * width, bias=bias)
        self.projection = _Linear(width, width, bias=bias, std=residual_std)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] → [B, T, width]."""
        qkv = self.qkv(x).unflatten(-1, (3, -1, self.head_dim))  # as many heads as this rank has
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, heads, T, head_dim]
        dropout = self.dropout.p if self.training else 0.0
        mixed = self.context.attention(q, k, v, causal=self.causal, dropout=dropout)
        out: Tensor = self.dropout(self.projection(mixed.transpose(1, 2).flatten(2)))
        return out


class _Linear(nn.Linear):
    """A linear layer that starts with N(0, std²) weights and zero biases."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, std: float = _STD) -> None:
        self.std = std  # first, because nn.Linear initialises itself
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class _Embedding(nn.Embedding):
    """An embedding that starts with N(0, 0.02²) weights."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=_STD)


def _nearest(width: int, heads: int) -> str:
    """Names the numbers of heads, near `heads`, that divide `width`."""
    divisors = [n for n in range(1, width + 1) if width % n == 0]
    above = bisect(divisors, heads)
    nearest = " or ".join(map(str, divisors[max(0, above - 1) : above + 1]))
    return f"use heads = {nearest}, or a width that is a multiple of {heads}"
