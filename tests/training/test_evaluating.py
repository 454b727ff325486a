"""An evaluator is put together, lent, and ended: callbacks hear how, whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


class Hears(Callback):
    """Keeps what it hears; `start` is done when the run starts, `end` when it ends."""

    def __init__(self, start: Callable[[], Any] = lambda: None, end: Callable[[], Any] = lambda: None) -> None:
        self.start, self.end, self.heard = start, end, list[Any]()

    def on_start(self, run: RunContext) -> None:
        self.start()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.heard.append(dict(state))

    def on_end(self, error: BaseException | None) -> None:
        self.heard.append(error)
        self.end()


class Saved:
    """A checkpoint of the model that is evaluated, whose weights are all `value`; another's if `of` says so."""

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
    """Has the recipe name these callbacks, and no other."""
    component = next(iter(parts.recipe.callbacks.values()))
    named = dict.fromkeys(callbacks, component)
    loaded = replace(parts.loaded, recipe=parts.recipe.model_copy(update={"callbacks": named}))
    return replace(parts, loaded=loaded, callbacks=callbacks)


def test_an_evaluator_has_the_weights_of_the_checkpoint_and_callbacks_their_state(parts: Dealt, world: World) -> None:
    """With all weights zero every class is as likely: the loss is ln 10."""
    first, second = Hears(), Hears()
    parts = watched(parts, first=first, second=second)
    with assemble_evaluator(parts, world, Saved(parts), FOLDER) as evaluator:  # type: ignore[arg-type]
        assert evaluator.evaluate(3)["eval/loss"] == pytest.approx(2.302585)
        assert (first.heard, second.heard) == ([{"n": 1}], [])
    assert (first.heard[1:], second.heard) == ([None], [None])


def test_averages_that_the_checkpoint_lacks_are_not_evaluated(
    parts: Dealt, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """They would be those of the initial weights; the checkpoint's have a loss of ln 10."""
    with assemble_evaluator(parts, world, Saved(parts), FOLDER) as evaluator:  # type: ignore[arg-type]
        assert evaluator.evaluate(3)["eval/loss"] == pytest.approx(2.302585)
    assert "ema: there are no averages yet; this evaluation uses the weights themselves" in caplog.text


def test_callbacks_hear_of_an_evaluation_that_fails(parts: Dealt, world: World) -> None:
    first, second = Hears(end=lambda: 1 / 0), Hears()
    parts = watched(parts, first=first, second=second)
    failure = RuntimeError("no memory")
    with pytest.raises(RuntimeError, match="no memory"), assemble_evaluator(parts, world, Saved(parts), FOLDER):  # type: ignore[arg-type]
        raise failure
    assert first.heard[-1] is second.heard[-1] is failure


def test_callbacks_that_have_started_hear_that_another_could_not(parts: Dealt, world: World) -> None:
    first, second = Hears(), Hears(start=lambda: {}["key"])
    parts = watched(parts, first=first, second=second)
    with pytest.raises(KeyError), assemble_evaluator(parts, world, Saved(parts), FOLDER):  # type: ignore[arg-type]
        pytest.fail("there is nothing to lend")
    assert [type(error) for error in first.heard] == [KeyError]
    assert second.heard == []


def test_callbacks_hear_that_the_checkpoint_is_of_another_model(parts: Dealt, world: World) -> None:
    first = Hears()
    parts = watched(parts, first=first)
    with (
        pytest.raises(CheckpointError, match="of another model"),
        assemble_evaluator(parts, world, Saved(parts, of="encoder."), FOLDER),  # type: ignore[arg-type]
    ):
        pytest.fail("there is nothing to lend")
    assert [type(error) for error in first.heard] == [CheckpointError]


def test_what_a_callback_raises_at_the_end_is_told_when_all_have_heard_of_it(parts: Dealt, world: World) -> None:
    first, second = Hears(end=lambda: 1 / 0), Hears()
    parts = watched(parts, first=first, second=second)
    with pytest.raises(ZeroDivisionError), assemble_evaluator(parts, world, Saved(parts), FOLDER):  # type: ignore[arg-type]
        pass
    assert second.heard == [None]
