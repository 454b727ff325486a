"""Assembly of an evaluator, and what its callbacks receive in all cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.stages import dealt

from ddpforge.checkpoint.state import CheckpointMetadata
from ddpforge.errors import CheckpointError
from ddpforge.interfaces import Callback, CanonicalState, RunContext, World
from ddpforge.ranks.collectives import SingleRank
from ddpforge.training.assemble import assemble_evaluator
from ddpforge.training.stages import Dealt

FOLDER = Path("runs/run")

RECIPE = """\
recipe = 2
name = "run"
model = { use = "mlp", inputs = 64, outputs = 10, hidden = [4] }
data.train = { use = "digits", split = "train" }
data.eval = { use = "digits", split = "test" }
task = { use = "classification", metrics = ["accuracy"] }
optimizer = { use = "adamw", lr = 0.1 }
strategy = { use = "single" }
train = { length = "1ep", global_batch = 64, device = "cpu" }
callbacks.ema = { decay = 0.5 }
"""


class Recorder(Callback):
    """Callback that records its calls. Calls `start` in `on_start` and `end` in `on_end`."""

    def __init__(self, start: Callable[[], Any] = lambda: None, end: Callable[[], Any] = lambda: None) -> None:
        self.start, self.end, self.received = start, end, list[Any]()

    def on_start(self, run: RunContext) -> None:
        self.start()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.received.append(dict(state))

    def on_end(self, error: BaseException | None) -> None:
        self.received.append(error)
        self.end()


class Saved:
    """Checkpoint of the evaluated model, with all weights equal to `value`. `of`: prefix of names, for another
    model."""

    def __init__(self, parts: Dealt, value: float = 0.0, of: str = "") -> None:
        self.model = {of + name: _Full(torch.full_like(x, value)) for name, x in parts.model.state_dict().items()}
        self.metadata = CheckpointMetadata(
            step=3, samples=3, strategy="ddp", world_size=1, recipe="", position={}, loop={}
        )

    def state(self) -> CanonicalState[Any]:
        return CanonicalState(self.model, {})

    def callbacks(self) -> dict[str, Any]:
        return {"first": {"n": 1}, "gone": {"n": 2}}


class _Full:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.shape, self.dtype = tensor, tensor.shape, tensor.dtype

    def read_into(self, region: Any, target: torch.Tensor) -> None:
        target.copy_(self.tensor.view_as(target))


@pytest.fixture
def parts(tmp_path: Path) -> Dealt:
    (tmp_path / "run.toml").write_text(RECIPE)
    return dealt(tmp_path / "run.toml", trains=False)


@pytest.fixture
def world(parts: Dealt) -> World:
    alone = World(global_ranks=SingleRank(), dp_ranks=SingleRank(), device=torch.device("cpu"), local_rank=0)
    return parts.strategy.setup(parts.recipe.train, alone)


def watched(parts: Dealt, **callbacks: Callback) -> Dealt:
    """Returns the parts with these callbacks only."""
    component = next(iter(parts.recipe.callbacks.values()))
    named = dict.fromkeys(callbacks, component)
    loaded = replace(parts.loaded, recipe=parts.recipe.model_copy(update={"callbacks": named}))
    return replace(parts, loaded=loaded, callbacks=callbacks)


def test_an_evaluator_restores_weights_and_callback_state_from_the_checkpoint(parts: Dealt, world: World) -> None:
    """If all weights are zero, all classes have equal probability: the loss is ln 10."""
    first, second = Recorder(), Recorder()
    parts = watched(parts, first=first, second=second)
    with assemble_evaluator(parts, world, Saved(parts), FOLDER) as evaluator:  # type: ignore[arg-type]
        assert evaluator.evaluate(3)["eval/loss"] == pytest.approx(2.302585)
        assert (first.received, second.received) == ([{"n": 1}], [])
    assert (first.received[1:], second.received) == ([None], [None])


def test_callback_of_the_task_starts_before_those_of_the_recipe_and_wraps_evaluations(
    parts: Dealt, world: World
) -> None:
    calls: list[str] = []

    class Own(Recorder):
        @contextmanager
        def evaluating(self) -> Iterator[None]:
            calls.append("begin")
            yield
            calls.append("end")

    parts = watched(parts, first=Recorder(start=lambda: calls.append("first starts")))
    parts.task.callback = own = Own(start=lambda: calls.append("own starts"))
    with assemble_evaluator(parts, world, Saved(parts), FOLDER) as evaluator:  # type: ignore[arg-type]
        evaluator.evaluate(3)
    assert calls == ["own starts", "first starts", "begin", "end"]
    assert own.received == [None]


def test_missing_ema_weights_fall_back_to_the_model_weights(
    parts: Dealt, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Averages would be the initial weights. The loss of the checkpoint's weights is ln 10."""
    with assemble_evaluator(parts, world, Saved(parts), FOLDER) as evaluator:  # type: ignore[arg-type]
        assert evaluator.evaluate(3)["eval/loss"] == pytest.approx(2.302585)
    assert "ema: there are no averages yet; this evaluation uses the weights themselves" in caplog.text


def test_callbacks_receive_the_error_of_a_failed_evaluation(parts: Dealt, world: World) -> None:
    first, second = Recorder(end=lambda: 1 / 0), Recorder()
    parts = watched(parts, first=first, second=second)
    failure = RuntimeError("no memory")
    with pytest.raises(RuntimeError, match="no memory"), assemble_evaluator(parts, world, Saved(parts), FOLDER):  # type: ignore[arg-type]
        raise failure
    assert first.received[-1] is second.received[-1] is failure


def test_started_callbacks_receive_the_error_of_a_callback_that_fails_to_start(parts: Dealt, world: World) -> None:
    first, second = Recorder(), Recorder(start=lambda: {}["key"])
    parts = watched(parts, first=first, second=second)
    with pytest.raises(KeyError), assemble_evaluator(parts, world, Saved(parts), FOLDER):  # type: ignore[arg-type]
        pytest.fail("there is nothing to lend")
    assert [type(error) for error in first.received] == [KeyError]
    assert second.received == []


def test_callbacks_receive_the_error_of_a_checkpoint_of_another_model(parts: Dealt, world: World) -> None:
    first = Recorder()
    parts = watched(parts, first=first)
    with (
        pytest.raises(CheckpointError, match="of another model"),
        assemble_evaluator(parts, world, Saved(parts, of="encoder."), FOLDER),  # type: ignore[arg-type]
    ):
        pytest.fail("there is nothing to lend")
    assert [type(error) for error in first.received] == [CheckpointError]


def test_an_error_in_on_end_is_raised_after_all_callbacks_have_ended(parts: Dealt, world: World) -> None:
    first, second = Recorder(end=lambda: 1 / 0), Recorder()
    parts = watched(parts, first=first, second=second)
    with pytest.raises(ZeroDivisionError), assemble_evaluator(parts, world, Saved(parts), FOLDER):  # type: ignore[arg-type]
        pass
    assert second.received == [None]
