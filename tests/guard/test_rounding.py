"""Rounding: what one unit in the last place makes is the measure of "same", for numbers and tensors by name."""

import math

import pytest
import torch
from torch import Tensor, nn

from ddpforge.guard.rounding import UPDATES, Rounding, apart, excesses, multiple_of, perturb, resolution_of


# ---------------------------------------------------------------------------------------------- perturbation
@pytest.mark.parametrize(
    ("dtype", "low"), [(torch.float32, None), (torch.float32, torch.bfloat16), (torch.bfloat16, None)]
)
def test_a_perturbation_is_one_unit_in_the_last_place_up_and_down(dtype: torch.dtype, low: torch.dtype | None) -> None:
    weights, count = {"w": torch.ones(1000, dtype=dtype), "n": torch.arange(3)}, torch.arange(3)
    perturb(weights, low)
    eps = torch.finfo(low or dtype).eps
    change = weights["w"].double() - 1
    # Below 1, numbers of the same dtype are half as far apart: 1 - eps is exact.
    assert change.abs().unique().tolist() == pytest.approx([eps], rel=1e-3)
    assert 400 < int((change > 0).sum()) < 600
    assert torch.equal(weights["n"], count)


def test_equal_seeds_and_names_give_equal_perturbations_whatever_the_other_tensors_are() -> None:
    one, other, third = ({"w": torch.ones(50)} for _ in range(3))
    perturb({"v": torch.ones(3), **one}, seed=1)
    perturb(other, seed=1)
    perturb(third, seed=2)
    assert torch.equal(one["w"], other["w"])
    assert not torch.equal(one["w"], third["w"])


# ---------------------------------------------------------------------------------------------- allowed differences
def test_allowed_is_four_times_the_larger_of_its_own_measured_difference_and_of_the_median() -> None:
    rounding = Rounding([{"a": 1e-4, "b": 2e-4, "c": 1e-3}])
    assert rounding.allowed(1, "c") == pytest.approx(4e-3)
    assert rounding.allowed(1, "a") == pytest.approx(8e-4)  # the median
    assert rounding.allowed(1, "unknown") == pytest.approx(8e-4)


def test_differences_of_1e_5_are_always_rounding_and_in_tensors_1e_4() -> None:
    assert Rounding([{"a": 1e-9}]).allowed(1, "a") == Rounding([]).allowed(1, "a") == 1e-5
    assert Rounding.measured([{"w": torch.ones(2)}]).allowed(1, "w") == 1e-4


def test_numbers_of_the_first_three_steps_are_taken_together_and_tensors_are_not() -> None:
    """Covers numbers that differ by almost nothing by chance; a vector does not."""
    numbers = Rounding.measured([{"loss": 1.0}] * 3, [{"loss": 1.0}, {"loss": 1.0}, {"loss": 1.001}])
    assert numbers.allowed(1, "loss") == pytest.approx(4e-3)
    ones, other = {"w": torch.ones(2)}, {"w": torch.full((2,), 1.001)}
    tensors = Rounding.measured([ones] * 3, [ones, ones, other])
    assert [tensors.allowed(step, "w") for step in (1, 2)] == [1e-4, 1e-4]
    assert tensors.allowed(3, "w") == pytest.approx(4e-3, rel=1e-3)


def test_rounding_is_the_largest_difference_of_all_perturbed_computations() -> None:
    rounding = Rounding.measured([{"loss": 1.0}], [{"loss": 1.001}], [{"loss": 0.998}])
    assert rounding.spread[0]["loss"] == pytest.approx(2e-3)


def test_an_update_is_as_precise_as_the_weight_that_it_changes() -> None:
    """Covers the weight of a LayerNorm: it is 1, its first updates are small, and their rounding is large."""
    weights, norms = {"w": torch.ones(4)}, {"w": 2e-4}
    least = resolution_of(weights, norms)
    assert least["w"] == pytest.approx(2**-23 * 2 / 2e-4)
    assert Rounding.measured([norms], factor=UPDATES, resolution=[least]).allowed(1, "w") == 10 * least["w"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_samples_is_rounding_and_half_a_gradient_is_not(dtype: torch.dtype, seed: int) -> None:
    """In every dtype: a layer whose gradient is halved is named, although the norm of all changes by 1 % only."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(20, 16), nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 20))
    tokens = torch.randint(0, 20, (16, 12))
    start = {name: one.detach().clone() for name, one in model.named_parameters()}

    def gradients(batch: Tensor, disturbed: int = 0) -> dict[str, Tensor]:
        weights = dict(model.named_parameters())
        with torch.no_grad():
            for name, one in weights.items():
                one.copy_(start[name])
                one.grad = None
            if disturbed:
                perturb(weights, dtype, seed=disturbed)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            scores = model(batch[:, :-1])
        nn.functional.cross_entropy(scores.float().flatten(0, 1), batch[:, 1:].flatten()).backward()
        return {name: one.grad.clone() for name, one in weights.items() if one.grad is not None}

    reference = gradients(tokens)
    rounding = Rounding.measured([reference], [gradients(tokens, 1)], [gradients(tokens, 2)])
    assert excesses(gradients(tokens.flip(0)), reference, lambda name: rounding.allowed(1, name)) == []
    wrong = reference | {"1.bias": reference["1.bias"] / 2}
    (found,) = excesses(wrong, reference, lambda name: rounding.allowed(1, name))
    assert (found.name, found.multiple) == ("1.bias", pytest.approx(0.5))
    assert found.difference == pytest.approx(0.5)


# ---------------------------------------------------------------------------------------------- differences
def test_the_five_largest_differences_in_proportion_to_their_tolerances_are_named() -> None:
    reference = {name: torch.ones(2) for name in "abcdefg"}
    values = {name: torch.ones(2) * (1 + 0.01 * number) for number, name in enumerate("abcdefg")}
    found = excesses(values, reference, lambda name: 1.0 if name == "g" else 0.005)
    assert [one.name for one in found] == ["f", "e", "d", "c", "b"]
    assert found[0].multiple == pytest.approx(1.05)


def test_differences_of_numbers_and_tensors_are_relative_and_infinite_if_one_is_absent() -> None:
    found = apart({"x": 1.1, "w": torch.tensor([3.0, 4.5])}, {"x": 1.0, "w": torch.tensor([3.0, 4.0]), "v": 2.0})
    assert found == {"x": pytest.approx(0.1), "w": pytest.approx(0.1), "v": math.inf}
    assert apart({"x": math.nan}, {"x": 1.0}) == {"x": math.inf}
    assert apart({"w": torch.ones(2)}, {"w": torch.ones(3)}) == {"w": math.inf}


def test_a_tensor_of_rounding_noise_is_compared_relative_to_the_largest() -> None:
    big = {"w": torch.full((4,), 1e3), "noise": torch.tensor([1e-9])}
    assert apart(big | {"noise": torch.tensor([-1e-9])}, big)["noise"] == pytest.approx(1e-6, rel=1e-3)


def test_multiples_of_numbers_and_of_parallel_tensors_are_found() -> None:
    assert multiple_of(3.0, 2.0) == 1.5
    assert multiple_of(torch.tensor([3.0, 6.0]), torch.tensor([1.0, 2.0])) == pytest.approx(3.0)
    assert multiple_of(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])) is None
    assert multiple_of(torch.ones(2), torch.ones(3)) is multiple_of(None, 1.0) is multiple_of(1.0, 0.0) is None
