"""The positions of sequences that a rank computes, for models whose attention can be spread over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Context"]


class Context:
    """All positions of every sequence.

    A model declares that its sequences may be cut over ranks by a `context = Context()` of every module that attends
    or numbers positions, and by asking it. A strategy that cuts them puts another in its place. All else that the model
    computes must treat each position by itself.
    """

    def length(self, tokens: int) -> int:
        """The length of sequences of which this rank has `tokens` each."""
        return tokens

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """The numbers of the positions that this rank has `tokens` of, int64 [tokens]."""
        import torch

        return torch.arange(tokens, device=device)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, dropout: float = 0.0) -> Tensor:
        """Attends from this rank's positions to those of the whole sequence, or (`causal`) to none that come later.

        All are [B, heads, tokens, channels], as is the result; `dropout` is of attention weights.
        """
        from torch.nn.functional import scaled_dot_product_attention

        return scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal)
