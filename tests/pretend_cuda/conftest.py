"""Ranks that see two GPUs, whose kernels compute on the CPU."""

from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copy

import pytest
from support import SUPPORT
from support.launched import Ranks, Zygote
from support.pretended import environment, with_changes
from support.sharding import Bench


@pytest.fixture(scope="package")
def zygote() -> Iterator[Zygote]:
    """Yields the process that forks ranks; it sees two GPUs."""
    zygote = Zygote(with_changes(environment(2, computes=True)))
    yield zygote
    zygote.close()


@pytest.fixture
def bench(tmp_path: Path, ddpforge: Callable[..., Ranks]) -> Bench:
    """Returns a recipe with 10 steps and a constant learning rate, which do not depend on its length."""
    copy(SUPPORT / "pretended_counts.py", tmp_path)
    bench = Bench(tmp_path, ddpforge)
    bench.recipe = bench.recipe.replace('use = "cosine"\nwarmup = "5st"', 'use = "constant"')
    return bench
