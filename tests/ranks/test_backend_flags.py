"""Backend flags of torch follow the recipe during a run, and are restored after it."""

import os
from typing import Any

import pytest
import torch
from support.forked import refused, train

from ddpforge.errors import StrategyError
from ddpforge.ranks.backend_flags import explain_determinism_error, restored_backend_flags, set_backend_flags


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
def test_backend_flags_follow_the_recipe_and_are_restored(
    asked: dict[str, bool], found: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = switches()
    with restored_backend_flags():
        set_backend_flags(train(**asked))
        assert switches() == PLAIN | found
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if "deterministic" in asked else None)
    assert switches() == before


def test_backend_flags_set_by_user_code_are_kept() -> None:
    with restored_backend_flags():
        torch.set_float32_matmul_precision("high")
        torch.use_deterministic_algorithms(True)
        before = switches()
        set_backend_flags(train())
        assert switches() == before


def test_error_names_an_operation_without_deterministic_implementation() -> None:
    def put() -> None:
        try:
            torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
        except RuntimeError as error:
            raise explain_determinism_error(error) from error

    with restored_backend_flags():
        set_backend_flags(train(deterministic=True))
        said = refused(StrategyError, put)
    assert "train.deterministic = true, but torch has no deterministic implementation of `put_`" in said
    other = RuntimeError("something else")
    assert explain_determinism_error(other) is other
