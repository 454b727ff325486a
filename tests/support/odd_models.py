"""Models that are difficult for some strategies; recipes in tests name them as `./odd_models.py:Name`.

They map [B, 4] to [B, 1].
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ddpforge.interfaces import Task, Total, World


class _Block(nn.Module):
    def __init__(self, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        if weight is not None:
            self.inner.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class TiedBlocks(nn.Module):
    """Two blocks that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        first = _Block()
        self.blocks = nn.ModuleList([first, _Block(first.inner.weight)])
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TiedNames(nn.Module):
    """A parameter with two names, in a module that has another parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(x)))


class Uninitialised(nn.Module):
    """A parameter that only the constructor initializes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.scale * x)


class Half(nn.Module):
    """Weights in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.bfloat16()).float()


class Scalar(nn.Module):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.head(x)


class BySample(nn.Module):
    """The first sample of a batch selects one of two layers for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x[0, 0] > 0 else self.b(x)


class Uneven(nn.Module):
    """Two branches of different sizes: rank 0 uses one, all other ranks use the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 1)
        self.b = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 1))
        self.first = os.environ.get("RANK", "0") == "0"

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if self.first else self.b(x)


class _Normed(nn.Module):
    """Forward changes its buffers: running statistics, a power iteration, a buffer that is a new tensor each time."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.norm(self.first(x)).relu())
        if self.training:
            self.largest = torch.maximum(0.9 * self.largest, x.detach().abs().max())
        return x / (1 + self.largest)


class NormedBlocks(nn.Module):
    """Two blocks that change their buffers; the second is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Normed(), _Normed()])
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for number in (0, 1, 1):
            x = x + self.blocks[number](x=x)
        return self.head(x)


class Attending(nn.Module):
    """Attention on [B, 4, 8] with nonzero biases; changes products in place."""

    pipeline = (("enter", "rise"), "blocks", ("leave", "head"))

    def __init__(self) -> None:
        super().__init__()
        self.rise = nn.Linear(1, 8)
        self.blocks = nn.ModuleList([_Attention(bias=True), _Attention(bias=False)])
        self.head = nn.Linear(8, 1)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)

    def enter(self, x: Tensor) -> Tensor:
        return self.rise(x[..., None])

    def leave(self, x: Tensor) -> Tensor:
        return self.head(x).mean(1)


class _Attention(nn.Module):
    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=bias) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        q, k, v = self.q(n), self.k(n), self.v(n)
        q *= 0.5
        return x + self.o((q @ k.transpose(1, 2)).softmax(-1) @ v).tanh()


class Hungry(nn.Module):
    """Needs more memory than any machine has from the fourth training pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        if self.passes > 3:
            torch.empty(2**56, device=x.device)
        return self.head(x)


class OwnSeed(nn.Module):
    """Draws different initial weights on every rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(int(os.environ.get("RANK", "0")))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


class Odd(nn.Module):
    """Buffers of every dtype and layout, transposed and channels-last weights, a frozen integer one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 2).to(memory_format=torch.channels_last)
        self.mix = nn.Parameter(torch.randn(6, 4).t() / 3)
        self.shift = nn.Parameter(torch.arange(6).short(), requires_grad=False)
        self.head = nn.Linear(6, 1)
        rank = int(os.environ.get("RANK", "0"))  # must not matter: every rank receives the values of rank 0
        for dtype in (torch.int16, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float64):
            self.register_buffer(f"b_{dtype}".rpartition(".")[2], torch.full((3,), rank).to(dtype))
        for dtype in (torch.uint16, torch.complex64):
            self.register_buffer(f"n_{dtype}".rpartition(".")[2], torch.full((3,), rank).to(dtype), persistent=False)
        self.register_buffer("turned", torch.full((3, 2), 1.0 + rank).t())
        self.register_buffer("number", torch.tensor(rank, dtype=torch.int16))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x.view(-1, 1, 2, 2)).flatten(1) @ self.mix + self.shift / 9
        odd = [buffer.real if buffer.is_complex() else buffer.float() for buffer in self.buffers()]
        return self.head(y.tanh()) + sum(buffer.mean() for buffer in odd)


class Gapped(nn.Module):
    """Weights that are slices of larger tensors or have other strides, one with two names, and expanded buffers."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(5)

        def some(*size: int) -> Tensor:
            return torch.randn(size, generator=draw) / 3

        wide = some(4, 12)
        self.left, self.right = nn.Parameter(wide[:, :3]), nn.Parameter(wide[:, 3::3])
        self.rows = nn.Parameter(some(6, 8)[::2])
        self.turned = nn.Parameter(some(8, 14).t()[::2])
        self.turned_again = self.turned
        self.column = nn.Parameter(some(8, 3)[:, :1])
        self.frozen = nn.Parameter(some(8, 3)[:, 0], requires_grad=False)
        self.conv = nn.Conv2d(3, 2, 2).to(memory_format=torch.channels_last)
        self.conv.weight = nn.Parameter(self.conv.weight.detach()[:, :1])
        self.register_buffer("scale", torch.ones(1).expand(8))
        self.register_buffer("shift", torch.zeros(1, 8).expand(3, 8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = ((x @ self.left).tanh() @ self.rows + x @ self.right @ self.rows + self.shift.mean(0)) * self.scale
        y = y + (y[:, :7] @ self.turned_again * self.frozen).tanh()
        return y @ self.column + self.conv(x.view(-1, 1, 2, 2)).sum((1, 2, 3))[:, None]


class Double(nn.Module):
    """Weights in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.double()).float()


class Following(nn.Module):
    """A teacher that follows the student in forward, as in MoCo's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 1), nn.Linear(4, 1).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            old.data = old.data * 0.9 + new.data * 0.1
        return self.student(x) + self.teacher(x)


class Hooked(nn.Module):
    """A hook doubles the gradient of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)
        self.head.weight.register_hook(lambda gradient: 2 * gradient)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


class Looked(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 4, sparse=True), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.table((x[:, 0] > 0).long()))


class Hollow(nn.Module):
    """A weight without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing, self.head = nn.Parameter(torch.zeros(0)), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) + self.nothing.sum()


class Remembers(Task):
    """A regression whose loss depends on a running mean, a bank and a counter, which `state` returns."""

    keeps, apart = True, False

    def __init__(self) -> None:
        self.mean, self.bank, self.calls = torch.zeros(()), [torch.zeros(())], 0

    def start(self, model: nn.Module, world: World) -> None:
        self.ranks = world.dp_ranks

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        outputs = model(batch[0])
        scale = 1 + self.mean + sum(self.bank) / 9 + self.calls / 99
        loss = (outputs - batch[1]).square().sum() * scale
        if model.training:
            mean = outputs.detach().mean()
            mean = mean if self.apart else self.ranks.all_reduce_sum(mean) / self.ranks.size
            self.mean = 0.9 * self.mean + 0.1 * mean
            self.bank = [*self.bank, mean][-3:]
            self.calls += 1
        return loss, None

    def state(self) -> dict[str, Any]:
        return {"mean": self.mean, "bank": torch.stack(self.bank), "calls": self.calls} if self.keeps else {}

    def load_state(self, state: Any) -> None:
        self.mean, self.bank, self.calls = state["mean"], list(state["bank"]), state["calls"]


class Forgets(Remembers):
    """The same, but its state is not saved."""

    keeps = False

    def load_state(self, state: Any) -> None:
        pass


class Apart(Remembers):
    """The same, with a mean over each rank's own samples."""

    apart = True


class Penalty(Task):
    """Squared error, and the squared gradient of the output by the input."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        x, y = batch
        x.requires_grad_(torch.is_grad_enabled())
        out = model(x)
        loss = (out - y).square().sum()
        if torch.is_grad_enabled():
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = loss + slope.square().sum()
        return loss, out


class Weighed(Task):
    """Squared error; evaluations also report the norm of the first weight."""

    def start(self, model: nn.Module, world: World) -> None:
        self.model = model

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        out = model(batch[0])
        return (out - batch[1]).square().sum(), out

    def metrics(self, outputs: Any, batch: Any) -> Mapping[str, Total]:
        if self.model.training:
            return {}
        return {"norm": Total(next(self.model.parameters()).norm(), 1)}


class WeighedAtStart(Weighed):
    """The same, with the norm at the start of the run."""

    def start(self, model: nn.Module, world: World) -> None:
        self.model, self.first = model, float(next(model.parameters()).detach().norm())


class Deciding(nn.Module):
    """Needs 40 MB more with values than with shapes alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.embedding(tokens)
        if (tokens >= 0).all():
            found = found + torch.zeros(10_000_000).sum()
        return found


class Unforeseen(Deciding):
    """Cannot run with shapes alone."""

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.embedding(tokens)
        assert len(torch.unique(tokens)) > 1
        return found
