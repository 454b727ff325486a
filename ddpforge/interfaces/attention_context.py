"""Sequence positions that a rank computes, for models with attention that can be distributed over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["AttentionContext"]


class AttentionContext:
    """All positions of every sequence, on this rank.

    A model supports sequences that are split over ranks if every module that computes attention or position numbers
    has a `context = AttentionContext()` and calls its methods. A strategy that splits sequences replaces it by its own
    object. All other computations of the model must treat each position by itself.
    """

    def length(self, tokens: int) -> int:
        """Returns the length of the whole sequence, if this rank has `tokens` of its positions."""
        return tokens

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Returns the position numbers of this rank's `tokens` tokens, int64 [tokens]."""
        import torch

        return torch.arange(tokens, device=device)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, dropout: float = 0.0) -> Tensor:
        """Computes attention from this rank's positions to the whole sequence; `causal`: not to later positions.

        `q`, `k`, `v` and the result are [B, heads, tokens, channels]. `dropout` applies to attention weights.
        """
        from torch.nn.functional import scaled_dot_product_attention

        return scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal)
