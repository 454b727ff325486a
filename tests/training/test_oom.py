"""Errors for full memory list recipe changes that save memory, cheapest first."""

from typing import Any

import pytest
import torch

from ddpforge.errors import ExitCode, OutOfMemory
from ddpforge.recipe.schema import Recipe
from ddpforge.training.oom import explain_oom

FULL = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.10 GiB of which 5.00 MiB is "
    "free. See documentation for Memory Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html)"
)


def recipe(use: str = "ddp", options: dict[str, Any] | None = None, **train: Any) -> Recipe:
    part = {"use": "x"}
    tables = {
        "recipe": 2,
        "name": "x",
        **{"model": part, "task": part, "optimizer": part, "data": {"train": part}},
        "strategy": {"use": use, "options": options or {}},
        "train": {"length": "1st", "global_batch": 48} | train,
    }
    return Recipe.model_validate(tables)


def hints(*arguments: Any, **train: Any) -> tuple[str, ...]:
    found = explain_oom(FULL, recipe(*arguments, **train), 2)
    assert isinstance(found, OutOfMemory)
    return found.hints


def test_the_error_keeps_the_message_of_torch_and_exits_with_code_1() -> None:
    found = explain_oom(FULL, recipe(), 2)
    assert isinstance(found, OutOfMemory)
    assert found.message.startswith("memory is full: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has")
    assert "documentation" not in found.message
    assert found.exit_code == ExitCode.FAILED
    assert found.__cause__ is FULL


@pytest.mark.parametrize(
    ("train", "smaller"),
    [
        ({}, 12),
        ({"micro_batch": 24}, 12),
        ({"micro_batch": 3}, 1),
        ({"virtual_ranks": 4}, 6),
        ({"micro_batch": 1}, None),
    ],
)
def test_the_first_hint_is_a_smaller_micro_batch_that_divides_the_batch(
    train: dict[str, Any], smaller: int | None
) -> None:
    first = hints(**train)[0]
    assert ("train.micro_batch" in first) == (smaller is not None)
    assert smaller is None or f"train.micro_batch = {smaller}:" in first


def test_hints_skip_settings_that_are_set() -> None:
    some = hints("ddp", eval_batch=8)
    assert [
        word for word in ("eval_batch = 4", "checkpointing = true", '"fsdp"', '"bf16"') if word not in str(some)
    ] == []
    few = hints(
        "fsdp",
        {"cpu_offload": True},
        activation_checkpointing=True,
        activation_offload=True,
        precision="bf16",
        micro_batch=1,
    )
    assert few == ()
    assert '"fsdp"' in str(hints("naive_split"))
    assert '"fsdp"' not in str(hints("deepspeed")) + str(hints("pipeline"))
    assert "strategy.stage = 3" in str(hints("deepspeed", {"stage": 2}))
    assert "strategy.stage" not in str(hints("deepspeed", {"stage": 3}))
    assert "strategy.offload_optimizer" in str(hints("deepspeed", {"stage": 3}))


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:128] DefaultCPUAllocator: can't allocate memory: you tried"),
            True,
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_other_errors_are_returned_unchanged(error: Exception, full: bool) -> None:
    assert (explain_oom(error, recipe(), 1) is not error) == full
