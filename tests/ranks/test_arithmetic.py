"""Torch's switches are those that the recipe asks for, in a run and not after it."""

import os
from typing import Any

import pytest
import torch
from forked import refused, train

from ddpforge.errors import StrategyError
from ddpforge.ranks.arithmetic import restored, set_arithmetic, told_of_determinism


def switches() -> dict[str, Any]:
    backends: Any = torch.backends
    return {
        "matmul": backends.cuda.matmul.fp32_precision,
        "conv": backends.cudnn.conv.fp32_precision,
        "rnn": backends.cudnn.rnn.fp32_precision,
        "benchmark": backends.cudnn.benchmark,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


PLAIN = {"matmul": "ieee", "conv": "ieee", "rnn": "ieee", "benchmark": False, "deterministic": False}


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({}, {}),  # torch's own default would be TF32 in convolutions
        ({"tf32": True}, {"matmul": "tf32", "conv": "tf32", "rnn": "tf32"}),
        ({"cudnn_benchmark": True}, {"benchmark": True}),
        ({"deterministic": True}, {"deterministic": True}),
    ],
)
def test_a_recipe_decides_and_then_all_is_as_it_was(
    asked: dict[str, bool], found: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = switches()
    with restored():
        set_arithmetic(train(**asked))
        assert switches() == PLAIN | found
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if "deterministic" in asked else None)
    assert switches() == before


def test_what_torch_cannot_repeat_is_named() -> None:
    def put() -> None:
        try:
            torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
        except RuntimeError as error:
            raise told_of_determinism(error) from error

    with restored():
        set_arithmetic(train(deterministic=True))
        said = refused(StrategyError, put)
    assert "train.deterministic = true, and torch cannot compute `put_` the same way every time" in said
    other = RuntimeError("something else")
    assert told_of_determinism(other) is other
