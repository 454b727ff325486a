"""Low-precision copies of weights are recomputed in the backward pass, from the current weight."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ddpforge.strategies.precision import recomputed_casts

W = nn.Parameter(torch.arange(1.0, 7.0).view(2, 3))


def gradients(use: Callable[[Tensor], Tensor], weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of an input multiplied with `use(weight)`: with an unchanged and with a doubled weight."""
    found = []
    for factor in (1.0, 2.0):
        with recomputed_casts():
            used = use(weight)
            x = torch.ones_like(used, requires_grad=True)
            y = (used * x).sum()
        with torch.no_grad():
            weight.mul_(factor)
        y.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            weight.div_(factor)
        assert x.grad is not None
        found.append(x.grad)
    return found[0], found[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "view",
    [
        lambda w: w,
        lambda w: w.T,
        lambda w: w.transpose(0, 1),
        lambda w: w.permute(1, 0),
        lambda w: w.view(3, 2),
        lambda w: w.unsqueeze(1),
        lambda w: w.unsqueeze(1).permute(2, 0, 1),
        lambda w: w.T.unsqueeze(0),
    ],
)
@pytest.mark.parametrize("layout", ["plain", "transposed"])
def test_a_cast_weight_is_recomputed_for_every_kind_of_view(
    view: Callable[[Tensor], Tensor], dtype: torch.dtype, layout: str
) -> None:
    weight = W if layout == "plain" else nn.Parameter(W.detach().view(3, 2).contiguous().T)
    if layout == "transposed":
        try:
            view(weight.detach())
        except RuntimeError:
            pytest.skip("a transposed weight has no such view")
    before, after = gradients(lambda w: view(w.to(dtype)), weight)
    assert torch.equal(before, view(weight.detach().to(dtype)))
    assert torch.equal(after, 2 * before)


@pytest.mark.parametrize(
    ("use", "weight"),
    [
        (lambda w: (w * 1).bfloat16(), W),  # computed
        (lambda w: w[:1].bfloat16(), W),  # a slice of it
        (lambda w: w.bfloat16()[:, 1:], W),
        (lambda w: w.T.bfloat16(), W),
        (lambda w: w.double(), W),  # not lower
        (lambda w: w.bfloat16() * 1, W),
        (lambda w: w.bfloat16(), torch.ones(2, requires_grad=True)),  # not a weight
        (lambda w: w.bfloat16(), torch.ones(2)),
        (lambda w: w.bfloat16(), nn.Parameter(torch.ones(2), requires_grad=False)),
    ],
)
def test_other_casts_are_saved_for_backward(use: Callable[[Tensor], Tensor], weight: Tensor) -> None:
    before, after = gradients(use, weight)
    assert torch.equal(before, use(weight.detach()))
    assert torch.equal(after, before)
