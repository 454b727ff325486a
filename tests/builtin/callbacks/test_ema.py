"""EMA weights: equal to the formula, used in evaluations only, and exact after a resume."""

import logging
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from support.doubles import run_of
from support.saved_tensors import Saved
from torch import Tensor, nn

from ddpforge.builtin.callbacks.ema import EMA
from ddpforge.errors import CheckpointError
from ddpforge.interfaces import FullWeights, StepInfo, World
from ddpforge.ranks.collectives import SingleRank

RANKS = SingleRank()
WORLD = World(global_ranks=RANKS, dp_ranks=RANKS, device=torch.device("cpu"), local_rank=0)


def info(step: int) -> StepInfo:
    return StepInfo(step=step, samples=8 * step, lr=0.1, seconds=0.1)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def step_and_average(model: nn.Module, ema: EMA, steps: range) -> None:
    """Trains and averages; the weights depend on the step alone."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape, generator=generator))
        ema.on_step(info(step))


def started(model: nn.Module, **options: object) -> EMA:
    ema = EMA(**{"decay": 0.9, **options})  # type: ignore[arg-type]
    ema.on_start(run_of(model, WORLD))
    return ema


def averages_of(ema: EMA) -> dict[str, Tensor]:
    return {name: part.tensor for name, part in ema.state().items()}


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("every", [1, 4])
def test_twenty_steps_match_the_formula(every: int) -> None:
    model = net()
    ema, expected = started(model, every=every), snapshot(model)
    for step in range(1, 21):
        step_and_average(model, ema, range(step, step + 1))
        if step % every == 0:
            expected = {name: 0.9 * expected[name] + 0.1 * p for name, p in snapshot(model).items()}
    assert ema.state().keys() == expected.keys()
    torch.testing.assert_close(averages_of(ema), expected)


def test_warmup_averages_the_first_weights_less() -> None:
    model = net()
    ema, expected = started(model, warmup=True, decay=0.5), snapshot(model)
    for step in range(1, 21):
        step_and_average(model, ema, range(step, step + 1))
        decay = min(0.5, step / (9 + step))
        expected = {name: decay * expected[name] + (1 - decay) * p for name, p in snapshot(model).items()}
    torch.testing.assert_close(averages_of(ema), expected)


def test_evaluation_uses_averages_and_live_buffers() -> None:
    model = net()
    ema = started(model)
    step_and_average(model, ema, range(1, 6))
    model[1].running_mean.fill_(7.0)  # type: ignore[operator]
    live = snapshot(model)
    identities = [id(p) for p in model.parameters()]

    with ema.evaluating():
        torch.testing.assert_close(snapshot(model), averages_of(ema), rtol=0, atol=0)
        assert [id(p) for p in model.parameters()] == identities
        assert torch.equal(model[1].running_mean, torch.full((3,), 7.0))  # type: ignore[arg-type]
    torch.testing.assert_close(snapshot(model), live, rtol=0, atol=0)


class Apart(FullWeights):
    """Weights that a strategy stores twice, and some of them on other ranks."""

    said = 0

    def mark_changed(self) -> None:
        self.said += 1

    def remote_names(self) -> frozenset[str]:
        return frozenset({"stage.1"})


def test_weight_changes_are_marked_and_averages_of_other_ranks_are_ignored() -> None:
    model = net()
    weights, ema = Apart(model, RANKS), EMA(decay=0.9)  # type: ignore[call-arg]
    ema.on_start(run_of(model, WORLD, weights=weights))
    step_and_average(model, ema, range(1, 3))
    with ema.evaluating():
        assert weights.said == 1
    assert weights.said == 2
    state = {name: Saved(average) for name, average in averages_of(ema).items()}
    ema.load_state({**state, "stage.1": Saved(torch.ones(7))})


def test_live_weights_are_restored_if_evaluation_raises() -> None:
    model = net()
    ema = started(model)
    step_and_average(model, ema, range(1, 6))
    live, averages = snapshot(model), {name: a.clone() for name, a in averages_of(ema).items()}
    with pytest.raises(RuntimeError, match="out of memory"), ema.evaluating():
        raise RuntimeError("out of memory")
    torch.testing.assert_close(snapshot(model), live, rtol=0, atol=0)
    torch.testing.assert_close(averages_of(ema), averages, rtol=0, atol=0)


def test_evaluate_false_keeps_live_weights_in_evaluation() -> None:
    model = net()
    ema = started(model, evaluate=False)
    step_and_average(model, ema, range(1, 6))
    live = snapshot(model)
    with ema.evaluating():
        torch.testing.assert_close(snapshot(model), live, rtol=0, atol=0)


@pytest.mark.parametrize("evaluation", [True, False])
def test_resumed_averages_equal_those_of_an_uninterrupted_run(evaluation: bool) -> None:
    model = net()
    whole = started(model)
    step_and_average(model, whole, range(1, 21))

    model = net()
    first = started(model)
    step_and_average(model, first, range(1, 11))
    context: AbstractContextManager[None] = first.evaluating() if evaluation else nullcontext()
    with context:
        pass
    weights, saved = snapshot(model), {name: Saved(average.clone()) for name, average in averages_of(first).items()}

    model = net()
    second = started(model)
    model.load_state_dict(weights, strict=False)
    second.load_state(saved)
    step_and_average(model, second, range(11, 21))
    torch.testing.assert_close(averages_of(second), averages_of(whole), rtol=0, atol=0)


def test_ema_added_to_a_run_starts_from_current_weights(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("ddpforge"), "propagate", True)
    caplog.set_level(logging.INFO, logger="ddpforge")
    model = net()
    ema = started(model)
    step_and_average(model, ema, range(100, 101))
    torch.testing.assert_close(averages_of(ema), snapshot(model), rtol=0, atol=0)
    assert "they start at step 100" in caplog.text


@pytest.mark.parametrize("change", ["missing", "unexpected", "another shape"])
def test_state_of_another_model_is_refused(change: str) -> None:
    ema = started(net())
    state = {name: Saved(average) for name, average in averages_of(ema).items()}
    if change == "missing":
        del state["0.bias"]
    elif change == "unexpected":
        state["9.bias"] = Saved(torch.zeros(3))
    else:
        state["0.bias"] = Saved(torch.zeros(1))  # would broadcast
    with pytest.raises(CheckpointError, match=r"9\.bias" if change == "unexpected" else r"0\.bias"):
        ema.load_state(state)


def test_low_precision_weights_are_averaged_in_fp32() -> None:
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    ema = started(model, decay=0.999)
    with torch.no_grad():
        model.weight.fill_(2.0)
    ema.on_step(info(1))
    assert averages_of(ema)["weight"].dtype == torch.float32
    assert averages_of(ema)["weight"].item() == pytest.approx(1.001)
    with ema.evaluating():
        assert model.weight.dtype == torch.bfloat16
    assert model.weight.item() == 2.0


def test_frozen_parameters_are_skipped_and_tied_ones_averaged_once() -> None:
    model = net()
    model[0].requires_grad_(False)
    model[2].bias = model[1].bias
    assert sorted(started(model).state()) == ["1.bias", "1.weight", "2.weight"]
