"""What no strategy can do with a recipe is refused by the recipe's key."""

import pytest
from support.forked import train
from support.stages import chosen_with

from ddpforge.preflight.static import check_device


@pytest.mark.parametrize("key", ["tf32", "cudnn_benchmark"])
def test_what_only_a_gpu_does_is_refused_on_a_cpu(key: str) -> None:
    (found,) = check_device(chosen_with(train(**{key: True}), ranks=1, device="cpu"))
    assert found.key == f"train.{key}"
    assert "which a GPU does, and this run is on cpu" in found.message
    assert not list(check_device(chosen_with(train(**{key: True}), ranks=1, device="cuda")))


def test_an_algorithm_that_time_chooses_is_not_deterministic() -> None:
    (found,) = check_device(chosen_with(train(cudnn_benchmark=True, deterministic=True), ranks=1, device="cuda"))
    assert "train.deterministic forbids it" in found.message


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("asked", "device", "count"), [(True, "cpu", 1), (True, "cuda", 0), (False, "cpu", 0)])
def test_batchnorm_over_ranks_needs_a_gpu(ranks: int, asked: bool, device: str, count: int) -> None:
    found = list(check_device(chosen_with(train(sync_batchnorm=asked), ranks=ranks, device=device)))
    assert [each.key for each in found] == ["train.sync_batchnorm"] * count
    assert [each.message for each in found] == ["train.sync_batchnorm needs CUDA, and this run is on cpu"] * count
