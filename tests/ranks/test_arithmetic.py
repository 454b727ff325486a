"""Torch's switches are those that the recipe asks for, in a run and not after it."""

import os
from typing import Any

import pytest
import torch
from support.forked import refused, train

from ddpforge.errors import StrategyError
from ddpforge.ranks.arithmetic import set_arithmetic, settings_restored, told_of_determinism


def switches() -> dict[str, Any]:
    return {
        "matmul": torch.get_float32_matmul_precision(),
        "convolutions": torch.backends.cudnn.allow_tf32,
        "benchmark": torch.backends.cudnn.benchmark,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


PLAIN = {"matmul": "highest", "convolutions": False, "benchmark": False, "deterministic": False}


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({}, {}),  # torch's own default would be TF32 in convolutions
        ({"tf32": True}, {"matmul": "high", "convolutions": True}),
        ({"cudnn_benchmark": True}, {"benchmark": True}),
        ({"deterministic": True}, {"deterministic": True}),
    ],
)
def test_a_recipe_decides_and_then_all_is_as_it_was(
    asked: dict[str, bool], found: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = switches()
    with settings_restored():
        set_arithmetic(train(**asked))
        assert switches() == PLAIN | found
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if "deterministic" in asked else None)
    assert switches() == before


def test_what_code_has_chosen_is_left_alone() -> None:
    with settings_restored():
        torch.set_float32_matmul_precision("high")
        torch.use_deterministic_algorithms(True)
        before = switches()
        set_arithmetic(train())
        assert switches() == before


def test_what_torch_cannot_repeat_is_named() -> None:
    def put() -> None:
        try:
            torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
        except RuntimeError as error:
            raise told_of_determinism(error) from error

    with settings_restored():
        set_arithmetic(train(deterministic=True))
        said = refused(StrategyError, put)
    assert "train.deterministic = true, but torch has no deterministic implementation of `put_`" in said
    other = RuntimeError("something else")
    assert told_of_determinism(other) is other
