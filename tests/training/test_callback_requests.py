"""Requests of callbacks: which may end a run, and what ranks exchange for it after each step."""
# ruff: noqa: ANN001, ANN201 (methods as users write them, without annotations)

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.trained import trained

from ddpforge.interfaces import Callback, StepInfo
from ddpforge.training.callbacks import may_end


class Declared(Callback):
    def on_step(self, info: StepInfo) -> None: ...


class Undeclared(Callback):
    def on_step(self, info):  # type: ignore[no-untyped-def]
        if info.step > 2:
            return
        self.seen = info.step


class Explicit(Callback):
    def on_step(self, info):  # type: ignore[no-untyped-def]
        self.seen = info.step
        return None


class Ends(Callback):
    def on_step(self, info):  # type: ignore[no-untyped-def]
        if info.step > 10_000:
            return True


class EndsByName(Callback):
    def on_step(self, info):  # type: ignore[no-untyped-def]
        return getattr(self, "wanted", None) or None


class EndsOrNone(Callback):
    def on_step(self, info):  # type: ignore[no-untyped-def]
        return info.step > 10_000 and None


class DeclaredToEnd(Callback):
    def on_step(self, info: StepInfo) -> bool | None:
        return None


class Later(Callback):
    def on_step(self, info):  # type: ignore[no-untyped-def]
        yield info


def attribute(function: Callable[[Any], Any]) -> Callback:
    found = Callback()
    found.on_step = function  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize(
    ("callback", "may"),
    [
        (Callback(), False),
        (Declared(), False),
        (Undeclared(), False),
        (Explicit(), False),
        (attribute(lambda info: None), False),
        (attribute([].append), True),  # written in C: its result is not known
        (Ends(), True),
        (EndsByName(), True),
        (EndsOrNone(), True),
        (DeclaredToEnd(), True),
        (Later(), True),
        (attribute(lambda info: info), True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Callback) else str(value),
)
def test_a_callback_may_end_a_run_if_its_method_can_return_something(callback: Callback, may: bool) -> None:
    assert may_end({"one": callback}, "on_step") == ["one"] * may


PARTS = """
import json
import torch.distributed as dist
from ddpforge.interfaces import Callback

COLLECTIVES = ("all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "broadcast", "barrier",
               "broadcast_object_list", "gather_object", "reduce_scatter_tensor", "all_to_all_single")


class Counts(Callback):
    def on_start(self, run):
        self.file, self.calls, self.steps = run.folder / f"counts-{run.world.global_ranks.rank}.json", 0, []
        for name in COLLECTIVES:
            setattr(dist, name, self.counted(getattr(dist, name)))

    def counted(self, function):
        def call(*args, **kwargs):
            self.calls += 1
            return function(*args, **kwargs)

        return call

    def on_step(self, info) -> None:
        self.steps.append(self.calls)
        self.calls = 0

    def on_end(self, error=None):
        self.file.write_text(json.dumps(self.steps))


class Declared(Callback):
    def on_step(self, info) -> None: ...


class Undeclared(Callback):
    def on_step(self, info):
        self.seen = info.step


class Ends(Callback):
    def on_step(self, info):
        if info.step > 10_000:
            return True


class EndsAtStep5(Callback):
    def on_start(self, run):
        self.rank = run.world.global_ranks.rank

    def on_step(self, info):
        return self.rank == 1 and info.step == 5
"""
RECIPE = """
recipe = 2
name = "counts"
model = {{ use = "mlp", inputs = 64, outputs = 10 }}
data.train = {{ use = "digits", split = "train" }}
task = {{ use = "classification" }}
optimizer = {{ use = "sgd", lr = 0.1 }}
train = {{ length = "16st", global_batch = 8, device = "cpu" }}
track = {{ every = "100st" }}
callbacks.counts = {{ use = "./own.py:Counts" }}
{others}
"""


@pytest.mark.parametrize(
    ("kinds", "more"),
    [(["Declared"], 0), (["Undeclared"], 0), (["Ends"], 1), (["Ends", "Undeclared", "EndsAtStep5"], 1)],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_ranks_add_up_one_number_after_a_step_only_if_a_callback_may_end_the_run(
    kinds: list[str], more: int, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(PARTS)

    def count(kinds: list[str]) -> list[list[int]]:
        others = "\n".join(f'callbacks.{kind} = {{ use = "./own.py:{kind}" }}' for kind in kinds)
        (tmp_path / "runs").mkdir(exist_ok=True)
        trained(tmp_path, RECIPE.format(others=others).replace('counts"\n', f'counts-{len(kinds)}"\n', 1), 2)
        files = [tmp_path / f"runs/counts-{len(kinds)}/counts-{rank}.json" for rank in range(2)]
        return [json.loads(file.read_text()) for file in files]

    alone, found = count([]), count(kinds)
    for rank in range(2):
        assert len(found[rank]) == (5 if "EndsAtStep5" in kinds else 16)
        # A vote about stops comes about once a second: most steps have none.
        assert min(found[rank][3:]) == min(alone[rank][3:]) + more
