"""The first forward passes are watched: what writes into weights, or calls backward, is refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpforge.errors import ForgeError, UsageError
from ddpforge.strategies.watch import refuse_loss, watched


class Net(nn.Module):
    """Calls `also(self, x)` before it uses its layer."""

    def __init__(self, also: Callable[["Net", Tensor], object] = lambda net, x: None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.teacher = nn.Linear(4, 4).requires_grad_(False)
        self.norm, self.rnn = nn.BatchNorm1d(4), nn.LSTM(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.also = also

    def forward(self, x: Tensor) -> Tensor:
        self.also(self, x)
        y: Tensor = self.norm(self.layer(x))
        return y


def run(also: Callable[[Net, Tensor], object], *, shards: bool = False, eager: bool = True) -> None:
    net = Net(also)
    with watched(net, shards_weights=shards, shards_gradients=shards, eager=eager):
        net(torch.randn(3, 4))


@torch.no_grad()
def clamp(net: Net, x: Tensor) -> None:
    net.layer.weight.clamp_(-9, 9)


def clamp_data(net: Net, x: Tensor) -> None:
    net.layer.weight.data.clamp_(-9, 9)


def renormalise(net: Net, x: Tensor) -> None:
    net.layer.weight.data = torch.renorm(net.layer.weight.data, 2, 0, 9.0)


def follow(net: Net, x: Tensor) -> None:
    net.teacher.bias.data = 0.9 * net.teacher.bias.data + 0.1 * net.layer.bias.data


def look_up(net: Net, x: Tensor) -> None:
    nn.functional.embedding(torch.tensor([1]), net.layer.weight, max_norm=9.0)


def put_another(net: Net, x: Tensor) -> None:
    net.teacher.weight = nn.Parameter(net.teacher.weight * 2, requires_grad=False)


def copy_all(net: Net, x: Tensor) -> None:
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(net.layer.parameters()), net.layer.parameters())


@pytest.mark.parametrize("shards", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize(
    ("also", "name"),
    [
        (clamp, "layer.weight"),
        (clamp_data, "layer.weight"),
        (renormalise, "layer.weight"),
        (look_up, "layer.weight"),
        (copy_all, "layer.weight"),
        (follow, "teacher.bias"),
        (put_another, "teacher.weight"),
    ],
)
def test_a_forward_pass_that_changes_weights_is_refused(also: Any, name: str, shards: bool) -> None:
    """Even where, this time, it writes what was there."""
    owner = name.partition(".")[0]
    with pytest.raises(UsageError, match=rf"forward changes parameter `{name}` of `{owner}` \(Linear\)"):
        run(also, shards=shards)


@pytest.mark.parametrize("also", [clamp, look_up, put_another])
def test_what_compiled_code_does_is_seen_by_its_traces(also: Any) -> None:
    with pytest.raises(UsageError, match="forward changes parameter"):
        run(also, eager=False)


def everything_else(net: Net, x: Tensor) -> None:
    net.mean.mul_(0.9).add_(x.detach().mean(0))
    net.rnn.flatten_parameters()
    net.rnn(x[None])
    net.teacher.to(x.device)
    torch.relu_(x * 2)
    net.layer.weight.detach().clone().zero_()


@pytest.mark.parametrize("shards", [False, True], ids=["whole", "sharded"])
def test_buffers_activations_and_copies_may_be_written(shards: bool) -> None:
    run(everything_else, shards=shards)


@pytest.mark.parametrize(
    ("also", "said", "everywhere"),
    [
        (lambda net, x: net.layer(x).sum().backward(), "calls backward itself", True),
        (
            lambda net, x: torch.autograd.grad(net.layer(x).sum(), net.layer.bias),
            "computes gradients of its own",
            False,
        ),
        (
            lambda net, x: nn.functional.embedding(torch.tensor([1]), net.layer.weight, sparse=True),
            "parameter `layer.weight` gets sparse gradients",
            False,
        ),
    ],
)
def test_what_sharding_cannot_follow_is_refused(also: Any, said: str, everywhere: bool) -> None:
    with pytest.raises(ForgeError, match=said):
        run(also, shards=True)
    if not everywhere:
        run(also, shards=False)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (torch.ones(1, requires_grad=True), r"the shape \[1\], not \[\]"),
        (torch.ones(()), "depends on no trained parameter"),
    ],
)
def test_a_loss_must_be_a_number_that_depends_on_the_weights(loss: Tensor, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        refuse_loss(loss)
    refuse_loss(torch.ones((), requires_grad=True))
