"""State of PowerSGD: stored by parameter, and restored on a different number of ranks."""

import logging
import math
from typing import Any

import pytest
import torch
from support.doubles import Elsewhere
from support.forked import Training, in_ranks
from support.saved_tensors import Saved
from torch import Tensor, nn

from ddpforge.errors import StrategyError
from ddpforge.interfaces import CanonicalState, FlatRange, TensorShard
from ddpforge.strategies.comm_hooks import PowerSGD
from ddpforge.strategies.ddp import DDP


def powersgd(model: nn.Module, rank: int = 0, ranks: int = 2) -> PowerSGD:
    hook = PowerSGD(1, 2, Elsewhere(ranks, rank))
    hook.look_at(model)
    return hook


def saved(**errors: list[list[float]]) -> dict[str, Any]:
    return {"powersgd.step": 7, **{f"powersgd.error.{name}": Saved(torch.tensor(e)) for name, e in errors.items()}}


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_restores_its_own_error(rank: int) -> None:
    hook = powersgd(nn.Linear(3, 1), rank)
    hook.restore(saved(weight=[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], bias=[[7.0], [8.0]]))
    state = hook.capture()
    assert state["powersgd.step"] == 7
    part = state["powersgd.error.weight"]
    assert isinstance(part, TensorShard)
    assert part.tensor.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]][rank]
    assert (part.shape, part.region) == ((2, 3), FlatRange(3 * rank, 3 * rank + 3))


def test_a_different_number_of_ranks_restores_the_mean_of_the_errors(caplog: pytest.LogCaptureFixture) -> None:
    hook = powersgd(nn.Linear(3, 1), rank=2, ranks=4)
    with caplog.at_level(logging.WARNING, "ddpforge"):
        powersgd(nn.Linear(3, 1), ranks=4).restore(saved(bias=[[7.0], [9.0]]))
        hook.restore(saved(bias=[[7.0], [9.0]]))
    part = hook.capture()["powersgd.error.bias"]
    assert isinstance(part, TensorShard)
    assert part.tensor.tolist() == [8.0]
    assert caplog.messages == ["powersgd: the checkpoint has the errors of 2 ranks: each rank starts with their mean"]


def test_a_checkpoint_without_powersgd_state_is_logged_as_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    hook = powersgd(nn.Linear(3, 1))
    with caplog.at_level(logging.WARNING, "ddpforge"):
        hook.restore({})
    assert hook.capture() == {"powersgd.step": 0}
    assert caplog.messages == ["powersgd: the checkpoint has no PowerSGD memory: compression starts from scratch"]


def test_a_scalar_parameter_is_refused() -> None:
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(StrategyError, match="parameter `scale` is a scalar"):
        powersgd(model)


# ---------------------------------------------------------------------------------------------- stored state
def factor(number: int, size: int) -> list[float]:
    """Returns the initial factor of the parameter with this number."""
    return torch.randn(size, generator=torch.Generator().manual_seed(number)).tolist()


def test_a_checkpoint_without_powersgd_state_clears_the_state() -> None:
    hook = powersgd(nn.Linear(3, 1))
    hook.restore(saved(weight=[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    assert hook.capture()["powersgd.step"] == 7
    hook.restore({})
    assert hook.capture() == {"powersgd.step": 0}


@pytest.mark.parametrize(("size", "expected"), [(16, [0.5] * 16), (8, factor(2, 16)), (0, factor(2, 16))])
def test_a_factor_is_restored_if_it_fits_and_else_seeded_by_its_parameter_number(
    size: int, expected: list[float]
) -> None:
    """16 columns, at rank 1. The bias is a column, and is not compressed."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[0].bias.requires_grad_(False)  # makes the second weight number 1 of the trained weights
    hook = powersgd(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    memory = {"powersgd.step": 3, "powersgd.error.1.weight": Saved(torch.zeros(2, 256))}
    memory["powersgd.error.1.bias"] = Saved(torch.ones(2, 16))
    if size:
        memory["powersgd.q.1.weight"] = Saved(torch.full((size,), 0.5))
    hook.restore(memory)
    found = hook.capture()
    assert set(found) == {"powersgd.step", *(f"powersgd.{kind}.1.weight" for kind in ("error", "q"))} | {
        "powersgd.error.1.bias"
    }
    assert torch.as_tensor(found["powersgd.q.1.weight"]).tolist() == pytest.approx(expected)


def test_an_error_of_a_different_size_is_dropped() -> None:
    hook = powersgd(nn.Linear(3, 1))
    hook.restore(saved(weight=[[1.0, 2.0], [4.0, 5.0]], bias=[[7.0], [8.0]]))
    assert set(hook.capture()) == {"powersgd.step", "powersgd.error.bias"}


def test_slashes_in_parameter_names_are_escaped_in_keys() -> None:
    hook = powersgd(nn.ModuleDict({"a/b": nn.Linear(3, 1)}))
    hook.restore(saved(**{"a|b.weight": [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]}))
    part = hook.capture()["powersgd.error.a|b.weight"]
    assert isinstance(part, TensorShard)
    assert part.tensor.tolist() == [1.0, 2.0, 3.0]


# ---------------------------------------------------------------------------------------------- training
def wide() -> nn.Module:
    """Returns a model with several buckets of 1 MiB, which DDP reorders in a process's second step."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 300), nn.Linear(300, 400), nn.Linear(400, 300), nn.Linear(300, 300), nn.Linear(300, 1)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


def narrow() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))


def begin(build: Any, start: int, rank: int = 2) -> Training:
    strategy = DDP(compression="powersgd", powersgd_start=start, powersgd_rank=rank, bucket_cap_mb=1)
    return Training(strategy, build, lambda weights: torch.optim.Adam(weights, lr=1e-3))


def batch(rank: int, step: int, width: int) -> Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(2 * step + rank))


def on_disk(state: CanonicalState[Any]) -> CanonicalState[Any]:
    """Returns the state as read from disk. This rank may read only its own shard of per-rank tensors."""

    def read(value: Any) -> Any:
        if isinstance(value, TensorShard):
            assert isinstance(value.region, FlatRange)
            whole = torch.full(value.shape, torch.nan).view(-1)
            whole[value.region.start : value.region.stop] = value.tensor.reshape(-1)
            return Saved(whole.view(value.shape))
        if not isinstance(value, Tensor):
            return value
        return Saved(value.clone()) if value.ndim else value.clone()

    return CanonicalState(
        {name: read(value) for name, value in state.model.items()},
        {name: {key: read(value) for key, value in entry.items()} for name, entry in state.optimizer.items()},
        {},
        {name: read(value) for name, value in state.extra_state.items()},
    )


def contents(state: CanonicalState[Any]) -> dict[str, list[float]]:
    values = {**state.model, **state.extra_state}
    tensors = {name: value.tensor if isinstance(value, TensorShard) else value for name, value in values.items()}
    return {name: torch.as_tensor(value).double().sum().item() for name, value in tensors.items()}  # type: ignore[misc]


@pytest.mark.parametrize("stops", [(2,), (3,), (4, 5)], ids=str)
def test_a_run_resumed_several_times_is_bit_identical(stops: tuple[int, ...]) -> None:
    """Stops before, at and after the step at which compression starts."""

    def rank(number: int) -> Any:
        found = []
        for pauses in ((), stops):
            training = begin(wide, start=3)
            for step in range(7):
                if step in pauses:
                    state = on_disk(training.state())
                    training = begin(wide, start=3)
                    training.replica.load_state(state)
                training.step(batch(number, step, 4))
            found.append(contents(training.state()))
        assert found[0] == found[1]
        return sorted(found[0])

    names = in_ranks(2, rank)[0]
    assert {"powersgd.step", "powersgd.error.0.bias", "powersgd.q.4.weight"} < set(names)
    assert "powersgd.q.0.bias" not in names


def test_a_skipped_step_does_not_change_powersgd_state() -> None:
    """Otherwise its gradient would stay in every rank's error, and in the factors."""

    def rank(number: int) -> Any:
        found = []
        for bad in ((), (2,), (4, 5)):
            training = begin(narrow, start=2)
            norms = []
            for step in range(7):
                if step in bad:
                    x = batch(number, step, 16)
                    x[0, 0] = torch.inf if number else 1.0
                    norms.append(training.step(x))
                if step not in bad or len(bad) == 1:  # the skipped step is repeated, or two in a row are not
                    norms.append(training.step(batch(number, step, 16)))
            found.append((norms, contents(training.state())))
        (plain, weights), (once, same), (late, _) = found
        assert [norm for norm in once if math.isfinite(norm)] == plain
        assert {**same, "powersgd.step": 7.0} == weights
        return [math.isfinite(norm) for norm in plain], [math.isfinite(norm) for norm in late]

    assert in_ranks(2, rank) == [([True] * 7, [True] * 4 + [False] * 2 + [True])] * 2


def test_compression_starts_at_its_step_and_stores_the_error() -> None:
    """Errors of a full-rank matrix are nonzero after compression at rank 1, and zero before."""

    def rank(number: int) -> Any:
        training = begin(narrow, start=3, rank=1)
        found = []
        for step in range(5):
            training.step(batch(number, step, 16))
            shared = training.state().extra_state
            error = shared.get("powersgd.error.0.weight")
            found.append((shared["powersgd.step"], isinstance(error, TensorShard) and error.tensor.any().item()))
        return found

    steps = [(1, False), (2, False), (3, False), (4, True), (5, True)]
    assert in_ranks(2, rank) == [steps] * 2


@pytest.mark.parametrize(
    ("build", "approximation", "exact"),
    [
        (lambda x: x * 0, 1, True),
        (lambda x: x * 0, 2, True),
        (lambda x: x * 0, 4, True),
        (lambda x: x[:1].expand_as(x), 1, True),
        (lambda x: x[:1].expand_as(x), 2, False),  # torch's Gram-Schmidt treats rounding as a second direction
        (lambda x: x[:1].expand_as(x), 4, True),
    ],
)
def test_gradients_of_a_lower_rank_than_the_approximation_stay_finite(
    build: Any, approximation: int, exact: bool
) -> None:
    """Covers zeros, the gradient of an unused weight, and the gradient of a single sample."""

    def rank(number: int) -> Any:
        training = begin(lambda: nn.Linear(16, 16, bias=False), start=2, rank=approximation)
        norms = []
        for step in range(5):
            x = build(batch(0, step, 16))
            norms.append((training.step(x), 4 * x.sum(0).norm().item()))
        return norms

    for norms in in_ranks(2, rank):
        assert all(math.isfinite(norm) for norm, _ in norms)
        assert not exact or [norm for norm, _ in norms] == [pytest.approx(true, rel=1e-3) for _, true in norms]
