"""Seeds from several integers, seeded generators, and RNG states that survive other uses."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ddpforge.data.rng import RandomState, isolated_rng, seed_all
from ddpforge.interfaces import mix


def draw() -> tuple[float, ...]:
    """Returns the next number of every generator. A normal number leaves a second one buffered in python and numpy."""
    return random.gauss(0, 1), float(np.random.normal()), torch.randn(()).item(), random.random(), np.random.rand()


# ---------------------------------------------------------------------------------------------- seeds
def test_seeds_are_pinned() -> None:
    """Runs of today must continue with the same numbers under any later version."""
    assert mix(0) == 8147104208329303767
    assert mix(2**63, 5, -7) == 2582340942062019994


def test_a_seed_has_63_bits() -> None:
    seeds = [mix(part, other) for part in (-1, 0, 1, 2**63, 2**64 - 1, 2**70) for other in (0, -5, 2**80)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62


def test_parts_of_a_seed_are_taken_modulo_two_to_the_64() -> None:
    assert mix(-1) == mix(2**64 - 1)
    assert mix(3, 2**64 + 5) == mix(3, 5)
    assert mix(-1) != mix(1)


def test_a_seed_depends_on_each_part_its_place_and_the_number_of_parts() -> None:
    seeds = [mix(*parts) for parts in ((), (0,), (0, 0), (1,), (1, 0), (0, 1), (1, 1), (1, 2), (2, 1), (0, 0, 0))]
    assert len(set(seeds)) == len(seeds)


def test_one_bit_of_a_part_changes_half_of_the_bits_of_the_seed() -> None:
    """63 bits, with 64 single-bit changes of each of two parts: 31.5 changes on average, at least 16."""
    changed = [
        (mix(7, 9) ^ other).bit_count() for bit in range(64) for other in (mix(7 ^ 1 << bit, 9), mix(7, 9 ^ 1 << bit))
    ]
    assert 30 < sum(changed) / len(changed) < 33
    assert min(changed) >= 16


# ---------------------------------------------------------------------------------------------- generators
def test_all_three_generators_are_seeded() -> None:
    seed_all(5)
    first = draw()
    assert draw() != first
    seed_all(5)
    assert draw() == first
    seed_all(6)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_generators_are_seeded_as_by_their_own_functions() -> None:
    """numpy uses 32 bits."""
    seed = 2**40 + 3
    seed_all(seed)
    found = draw()
    random.seed(seed)
    np.random.seed(3)
    torch.manual_seed(seed)
    assert draw() == found


@pytest.mark.parametrize(("index", "seeded"), [(None, [9, None]), (0, [9, None]), (1, [None, 9])])
def test_a_gpu_is_seeded_by_its_own_generator(
    monkeypatch: pytest.MonkeyPatch, index: int | None, seeded: list[Any]
) -> None:
    found: list[Any] = [None, None]

    def generator(number: int) -> Any:
        return SimpleNamespace(manual_seed=lambda seed: found.__setitem__(number, seed))

    monkeypatch.setattr(torch.cuda, "default_generators", (generator(0), generator(1)))
    seed_all(9, torch.device("cuda", index) if index is not None else torch.device("cuda"))
    assert found == seeded


@pytest.mark.parametrize("device", [None, torch.device("cpu"), torch.device("meta")])
def test_seeding_other_devices_does_not_touch_a_gpu(
    monkeypatch: pytest.MonkeyPatch, device: torch.device | None
) -> None:
    monkeypatch.setattr(torch.cuda, "default_generators", ())
    seed_all(9, device)


# ---------------------------------------------------------------------------------------------- RNG states
def test_a_state_starts_with_its_seed_and_continues_where_it_was_kept() -> None:
    seed_all(11)
    straight = [draw() for _ in range(4)]

    state = RandomState(11)
    found = [draw()]
    state.keep()
    for number in (1, 2, 3):
        seed_all(number)  # another use
        draw()
        state.resume()
        found.append(draw())
        state.keep()
    assert found == straight


def test_a_state_that_is_not_kept_resumes_at_the_same_place() -> None:
    state = RandomState(11)
    assert draw() == (state.resume(), draw())[1]


def test_capturing_the_current_state_draws_no_numbers() -> None:
    seed_all(3)
    wanted = draw()
    seed_all(3)
    state = RandomState.now()
    assert draw() == wanted
    state.resume()
    assert draw() == wanted


@pytest.mark.parametrize("fails", [False, True])
def test_isolated_rng_restores_all_generators(fails: bool) -> None:
    """Includes the buffered half of a pair of normal numbers, and a failure inside."""
    seed_all(3)
    draw()
    wanted = (draw(), draw())
    seed_all(3)
    draw()
    try:
        with isolated_rng():
            seed_all(99)
            draw()
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert (draw(), draw()) == wanted
