"""GPT with mixtures of experts instead of MLPs (Shazeer et al. 2017; Fedus et al. 2021)."""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpforge.builtin.models.gpt import GPT, Block
from ddpforge.interfaces import ExpertDispatch

_STD = 0.02


class Routed(NamedTuple):
    """Output of `MoEGPT`: logits [B, T, vocab_size], and two measures per sequence, averaged over layers.

    `balance` [B] is 1 if experts are used evenly, and up to the number of experts if not (Fedus et al. 2021, equation
    4); it has gradients. `dropped` [B] is the fraction of a sequence's choices that exceed an expert's capacity.
    """

    logits: Tensor
    balance: Tensor
    dropped: Tensor


class MoEGPT(GPT):
    """Model `moe_gpt`; `builders.moe_gpt` documents its options."""

    tensor_plan = {}  # noqa: RUF012
    takes_loss_function = False

    def __init__(
        self,
        *,
        vocab_size: int = 256,
        block_size: int = 256,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        dropout: float = 0.0,
        experts: int = 8,
        top_k: int = 2,
        capacity_factor: float = 1.5,
    ) -> None:
        if top_k >= experts:
            raise ValueError(f"top_k = {top_k} is not less than experts = {experts}")
        self.mixture = (experts, top_k, capacity_factor)
        super().__init__(
            vocab_size=vocab_size, block_size=block_size, layers=layers, heads=heads, width=width, dropout=dropout
        )

    def _block(self, *form: Any) -> Block:
        return MixtureBlock(*form, mixture=self.mixture)

    def forward(self, tokens: Tensor) -> Routed:  # type: ignore[override]
        """Maps [B, T] int64 → `Routed`."""
        x = self.enter(tokens)
        usage = x.new_zeros(len(x), 2, dtype=torch.float32)
        for block in self.blocks:
            x, found = block(x)
            usage = usage + found
        balance, dropped = (usage / len(self.blocks)).unbind(1)
        return Routed(self.leave(x), balance, dropped.detach())


class MixtureBlock(Block):
    """Transformer block: attention, then a mixture of experts; also returns the experts' usage."""

    def __init__(
        self,
        width: int,
        heads: int,
        dropout: float,
        bias: bool,
        residual_std: float,
        causal: bool,
        *,
        mixture: tuple[int, int, float],
    ) -> None:
        self._form = (width, dropout, residual_std, *mixture)
        super().__init__(width, heads, dropout, bias, residual_std, causal)

    def _mlp(self, width: int, dropout: float, bias: bool, residual_std: float) -> nn.Module:
        return Mixture(*self._form)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Maps [B, T, width] → [B, T, width], and balance and dropped fraction of each sequence: [B, 2]."""
        x = x + self.attention(self.attention_norm(x))
        mixed, usage = self.mlp(self.mlp_norm(x))
        return x + mixed, usage


class Mixture(nn.Module):
    """Mixture of experts: a router and its experts."""

    def __init__(
        self, width: int, dropout: float, residual_std: float, experts: int, top_k: int, capacity: float
    ) -> None:
        super().__init__()
        self.top_k, self.capacity = top_k, capacity
        self.router = _Router(width, experts, bias=False)
        self.experts = ExpertLayers(experts, width, residual_std)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Maps [B, T, width] → [B, T, width], and balance and dropped fraction of each sequence: [B, 2]."""
        batch, length, width = x.shape
        shares = self.router(x).float().softmax(-1)  # [B, T, experts]
        weights, chosen = shares.topk(self.top_k)  # [B, T, top_k]
        weights = weights / weights.sum(-1, keepdim=True)

        experts = shares.shape[-1]
        places = math.ceil(self.capacity * self.top_k * length / experts)
        choices = F.one_hot(chosen.flatten(1), experts)  # [B, T·top_k, experts], earlier tokens first
        number = (choices.cumsum(1) - choices).gather(2, chosen.flatten(1)[..., None])[
            ..., 0
        ]  # index among the choices of the same expert
        kept = number < places
        nowhere = experts * places  # extra slot for dropped choices
        place = torch.where(kept, chosen.flatten(1) * places + number, nowhere)  # [B, T·top_k]

        slots = self._dealt(x, place, nowhere).view(batch, experts, places, width)
        outputs = self.experts(slots.transpose(0, 1).flatten(1, 2))  # [experts, B·places, width]
        outputs = outputs.view(experts, batch, places, width).transpose(0, 1).flatten(1, 2)
        outputs = F.pad(outputs, (0, 0, 0, 1))  # dropped choices read zeros
        found = outputs.gather(1, place[..., None].expand(-1, -1, width)).view(batch, length, self.top_k, width)
        mixed: Tensor = self.dropout((found * weights[..., None].to(found.dtype)).sum(2))
        return mixed, self._usage(shares, choices, kept)

    def _dealt(self, x: Tensor, place: Tensor, nowhere: int) -> Tensor:
        """Returns the tokens in the experts' slots, [B, experts·places, width]; empty slots are zeros."""
        batch, length, width = x.shape
        token = torch.arange(length, device=x.device).repeat_interleave(self.top_k).expand(batch, -1)
        whose = torch.full((batch, nowhere + 1), length, device=x.device).scatter(1, place, token)[:, :nowhere]
        return F.pad(x, (0, 0, 0, 1)).gather(1, whose[..., None].expand(-1, -1, width))

    def _usage(self, shares: Tensor, choices: Tensor, kept: Tensor) -> Tensor:
        """Returns balance and dropped fraction of each sequence: [B, 2]."""
        used = choices.float().mean(1)
        balance = shares.shape[-1] * (used * shares.mean(1)).sum(-1)
        return torch.stack([balance, 1 - kept.float().mean(1)], dim=1)


class ExpertLayers(nn.Module):
    """MLPs of all experts, each with two layers without biases."""

    def __init__(self, experts: int, width: int, residual_std: float) -> None:
        super().__init__()
        self.residual_std = residual_std
        self.up = nn.Parameter(torch.empty(experts, width, 4 * width))
        self.down = nn.Parameter(torch.empty(experts, 4 * width, width))
        self.experts = ExpertDispatch()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes the weights like those of the model's other layers."""
        nn.init.normal_(self.up, std=_STD)
        nn.init.normal_(self.down, std=self.residual_std)

    def forward(self, slots: Tensor) -> Tensor:
        """Maps [experts, n, width] → [experts, n, width], with n tokens for each expert."""
        return self.experts.compute(slots, self._compute)

    def _compute(self, slots: Tensor) -> Tensor:
        return torch.bmm(F.gelu(torch.bmm(slots, self.up)), self.down)


class _Router(nn.Linear):
    """Linear layer with initial weights N(0, 0.02²)."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=_STD)
