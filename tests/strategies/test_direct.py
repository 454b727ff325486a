"""Backward passes and steps without torch's wrappers do what torch's own do."""

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.profiler import ProfilerActivity, profile

from ddpforge.strategies.direct import run_backward, step


def gradients(scale: Tensor | float, *, direct: bool, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
    for _ in range(2):  # which add up
        loss = model(torch.randn(4, 8, dtype=dtype)).square().sum()
        if direct:
            run_backward(loss, scale)
        else:
            (loss * scale).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("scale", [1.0, 1 / 3, torch.tensor(0.7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_backward_pass_gives_the_same_bits_as_torchs(scale: Tensor | float, dtype: torch.dtype) -> None:
    for ours, torchs in zip(
        gradients(scale, direct=True, dtype=dtype), gradients(scale, direct=False, dtype=dtype), strict=True
    ):
        assert torch.equal(ours, torchs)


class Announced(Tensor):
    """A subclass that sees the functions it is used in."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(getattr(func, "__name__", ""))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_subclass_is_asked_as_torch_asks_it() -> None:
    weight = nn.Parameter(torch.ones(3))
    loss = weight.square().sum().as_subclass(Announced)
    run_backward(loss, 2.0)
    assert "backward" in Announced.seen
    torch.testing.assert_close(weight.grad, torch.full((3,), 4.0))


def stepped(kind: type[Optimizer] = SGD) -> tuple[Optimizer, nn.Parameter]:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return kind([weight], lr=0.5), weight  # type: ignore[call-arg]


def test_hooks_of_a_step_are_called() -> None:
    optimizer, weight = stepped()
    called: list[str] = []
    before = optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    after = optimizer.register_step_post_hook(lambda *_: called.append("after"))
    step(optimizer)
    before.remove()
    after.remove()
    step(optimizer)
    assert called == ["before", "after"]
    assert weight.tolist() == [0.0, 0.0]


def test_a_profiler_sees_the_step() -> None:
    optimizer, _ = stepped(AdamW)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step(optimizer)
    assert "Optimizer.step#AdamW.step" in {event.key for event in profiled.key_averages()}


def test_a_step_that_is_somebodys_own_is_the_one_that_is_called() -> None:
    called: list[str] = []

    class Own(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            called.append("class")
            super().step()

    optimizer, weight = stepped(Own)
    step(optimizer)
    assert called == ["class"]
    assert weight.tolist() == [0.5, 0.5]
    replaced: Any = optimizer
    replaced.step = lambda: called.append("instance")  # as torch's schedulers replace it
    step(optimizer)
    assert called == ["class", "instance"]
