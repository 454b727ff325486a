"""Models that no strategy can train correctly are refused before anything is done with them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ddpforge.errors import UsageError
from ddpforge.features.batchnorm import watch_batchnorm
from ddpforge.guard.model import CHECKS


class Model(nn.Module):
    """Layer `a`, and additions by `add`."""

    def __init__(self, add: Callable[["Model"], object] = lambda model: None) -> None:
        super().__init__()
        self.a = nn.Linear(4, 8)
        add(self)


def parameter(tensor: Tensor, *, trains: bool = True) -> Callable[[Model], object]:
    return lambda model: model.register_parameter("x", nn.Parameter(tensor, requires_grad=trains))


def buffer(tensor: Tensor, *, persistent: bool = True) -> Callable[[Model], object]:
    return lambda model: model.register_buffer("x", tensor, persistent=persistent)


def module(child: nn.Module) -> Callable[[Model], object]:
    return lambda model: model.add_module("x", child)


@pytest.mark.parametrize(
    ("add", "said"),
    [
        (module(nn.Sequential(nn.LazyLinear(3))), "`x.0` (LazyLinear) has no weights before its first forward pass"),
        (module(nn.LazyBatchNorm1d()), "`x` (LazyBatchNorm1d) has no weights"),
        (module(nn.Embedding(3, 2, max_norm=2)), "`x` (Embedding) has max_norm = 2"),
        (module(nn.EmbeddingBag(3, 2, max_norm=0.5)), "`x` (EmbeddingBag) has max_norm = 0.5"),
        (parameter(torch.zeros(2, dtype=torch.complex64)), "parameter `x` is complex64"),
        (parameter(torch.zeros(1).expand(8)), "parameter `x` was made with `expand`"),
        (parameter(torch.zeros(4).as_strided((3, 2), (1, 1))), "parameter `x` was made with `as_strided` or `unfold`"),
        (buffer(torch.eye(2).to_sparse()), "buffer `x` is of layout sparse_coo"),
        (buffer(torch.eye(2).to_sparse(), persistent=False), "buffer `x` is of layout sparse_coo"),
        (buffer(torch.zeros(2, dtype=torch.complex64)), "`x` is complex64, but a checkpoint holds only float64"),
        (buffer(torch.zeros(2, dtype=torch.uint16)), "`x` is uint16, but a checkpoint holds only float64"),
        (lambda model: buffer(model.a.weight.data)(model), "`a.weight` and `x` share memory"),
        (lambda model: buffer(model.a.weight.data[2:], persistent=False)(model), "`a.weight` and `x` share memory"),
        (lambda model: parameter(model.a.weight.data.t())(model), "`a.weight` and `x` share memory"),
        (lambda model: parameter(model.a.weight.data[:, :1])(model), "`a.weight` and `x` share memory"),
        (lambda model: buffer(model.a.weight.data[::2, 1])(model), "`a.weight` and `x` share memory"),
    ],
)
def test_unsupported_models_are_refused(add: Callable[[Model], object], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_model(Model(add))
    assert said in refused.value.message
    assert refused.value.hints


def test_extra_state_that_is_not_a_tensor_is_refused() -> None:
    class Counts(Model):
        def get_extra_state(self) -> dict[str, int]:
            return {"seen": 1}

    with pytest.raises(UsageError, match="`_extra_state` in the model's state_dict is a dict"):
        check_model(Counts())


def check_model(model: nn.Module) -> None:
    for _, check in CHECKS:
        check(model)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight


WIDE = torch.zeros(4, 6)


@pytest.mark.parametrize(
    "model",
    [
        Tied(),
        nn.LSTM(3, 4),
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        nn.ParameterList([torch.zeros(3), nn.ParameterList([torch.ones(2)])]),
        Model(parameter(torch.zeros(0))),
        Model(parameter(torch.zeros(3, dtype=torch.float64))),
        Model(parameter(torch.zeros(3).short(), trains=False)),
        Model(parameter(torch.zeros(3, 4, 2, 2).to(memory_format=torch.channels_last))),
        Model(buffer(torch.zeros(3, dtype=torch.complex64), persistent=False)),
        Model(buffer(torch.zeros(3).to(torch.float8_e4m3fn))),
        Model(lambda model: (parameter(WIDE[:, :3])(model), model.register_buffer("y", WIDE[:, 3:]))),
        Model(lambda model: (parameter(WIDE[:, ::2])(model), model.register_buffer("y", WIDE[:, 1::2]))),
        Model(parameter(torch.zeros(9).as_strided((2, 2), (2, 3)))),
        Model(lambda model: (parameter(WIDE[:2])(model), model.register_buffer("y", WIDE[2:]))),
    ],
    ids=lambda model: type(model).__name__,
)
def test_unusual_models_are_accepted(model: nn.Module) -> None:
    check_model(model)
    with torch.device("meta"):
        check_model(Model())


# ---------------------------------------------------------------------------------------------- BatchNorm
FLAT, IMAGE = torch.randn(4, 3), torch.randn(4, 3, 2, 2)


@pytest.mark.parametrize(("full", "last", "hint"), [(4, 1, "drop_last"), (4, 0, "drop_last"), (1, 1, "micro_batch")])
def test_batchnorm_over_single_samples_is_refused_in_the_first_pass(full: int, last: int, hint: str) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    watch_batchnorm(model, full, last)
    model.eval()(FLAT)
    with pytest.raises(UsageError, match=r"`0` \(BatchNorm1d\) normalizes over the samples") as refused:
        model.train()(FLAT)
    assert hint in refused.value.hints[0]


def test_batchnorm_over_pixels_and_larger_batches_is_accepted() -> None:
    pixels, samples = nn.BatchNorm2d(3), nn.BatchNorm1d(3)
    watch_batchnorm(pixels, 4, 1)
    watch_batchnorm(samples, 4, 2)
    pixels(IMAGE)
    samples(FLAT)
    assert not pixels._forward_pre_hooks
