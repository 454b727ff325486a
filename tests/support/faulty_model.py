"""A small transformer in which one fault can be planted, for `ddpforge bisect`."""

import json
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

VOCABULARY, LENGTH, WIDTH = 17, 8, 16


class Sequences(Dataset[tuple[Tensor, Tensor]]):
    """Sequences of tokens and the tokens that follow them."""

    def __init__(self, *, samples: int = 64, offset: int = 0) -> None:
        self.samples, self.offset = samples, offset

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = torch.arange(index + self.offset, index + self.offset + LENGTH + 1)
        tokens = start * start % VOCABULARY
        return tokens[:-1], tokens[1:]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.temperature, self.diagonal = 1.0, 0

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2) * (self.temperature / WIDTH**0.5)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1 + self.diagonal)
        found: Tensor = self.out(scores.masked_fill(later, float("-inf")).softmax(-1) @ self.value(x))
        return found


class Feedforward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.approximate = "none"

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(nn.functional.gelu(self.up(x), approximate=self.approximate))
        return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.mlp_norm, self.mlp = nn.LayerNorm(WIDTH), Feedforward()
        self.residual = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.residual + self.attention(self.attention_norm(x))
        found: Tensor = x + self.mlp(self.mlp_norm(x))
        return found


class Times(torch.autograd.Function):
    """Identity whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


class Transformer(nn.Module):
    """Logits for the next token.

    Args:
        fault: kind of the fault, e.g. "scale"; "" for none.
        at: name of the module, or of the parameter, that has it.
        step: first training step with the fault, from 1.
    """

    def __init__(self, *, fault: str = "", at: str = "", step: int = 1) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.step = step
        if fault == "gradient":
            self.get_parameter(at).register_hook(lambda gradient: gradient * 0.5)  # type: ignore[no-untyped-call]
        elif fault == "frozen":
            self.get_parameter(at).requires_grad_(False)
        elif fault.startswith("attribute"):
            _, name, value = fault.split()
            setattr(self.get_submodule(at), name, json.loads(value) if value[-1].isdigit() else value)
        elif fault:
            self.get_submodule(at).register_forward_hook(lambda module, args, out: self.changed(fault, out))

    def changed(self, fault: str, out: Tensor) -> Tensor:
        if int(self.passes) < self.step:
            return out
        kind, _, size = fault.partition(" ")
        if kind == "scale":
            return out * (1 + float(size))
        if kind == "shift":
            return out + float(size)
        if kind == "round":
            return out.bfloat16().float()
        assert kind == "backward"
        return Times.apply(out, float(size))  # type: ignore[no-any-return, no-untyped-call]

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(self.norm(x))
        return found
