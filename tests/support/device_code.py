"""Small parts of ddpforge on pretended CUDA devices, and their calls to the device.

    python device_code.py    prints numbers of each part as JSON

Kernels are counted and compute nothing. Each function returns the numbers of one part.
"""

import gc
import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from ddpforge.checkpoint.staging import Staging
from ddpforge.checkpoint.state import RankState, flatten
from ddpforge.data import seed_all, to_device
from ddpforge.data.pytree import pinned
from ddpforge.guard.reference_check import _random_numbers
from ddpforge.interfaces import CanonicalState, Total, device_kind
from ddpforge.ranks import metric_reduction
from ddpforge.ranks.writers import _Work
from ddpforge.strategies.tensor.tensor_parallel import TensorParallelRNG
from support.pretended_counts import counts

GPU = torch.device("cuda", 1)
KIND = device_kind(GPU)

Numbers = dict[str, int | bool]


def during(action: Callable[[], object]) -> dict[str, int]:
    """Returns the counts of `action`."""
    before = counts()
    kept = action()
    after = counts()
    del kept
    return {name: after[name] - before[name] for name in before}


def large_batch() -> Numbers:
    """Moves two tensors of 1 MiB, then frees them."""
    batch = pinned([torch.ones(1 << 18), torch.ones(1 << 18)])
    moved: list[Tensor] = []
    found = during(lambda: moved.extend(to_device(batch, GPU)))
    on = {tensor.device for tensor in moved}
    freed = during(lambda: (moved.clear(), gc.collect()))
    return {**found, "on_gpu_1": on == {GPU}, "events_when_freed": freed["events"]}


def small_batch() -> Numbers:
    batch = pinned([torch.ones(64), torch.ones(64)])
    return {**during(lambda: to_device(batch, GPU))}


def staged_checkpoint() -> Numbers:
    """Copies a weight and its momentum, and a running mean."""
    model = {"weight": torch.ones(1 << 18, device=GPU), "mean": torch.ones(8, device=GPU)}
    optimizer = {"weight": {"momentum": torch.ones(1 << 18, device=GPU)}}
    held = flatten(RankState.of(CanonicalState(model, optimizer), {}), rank=0, ranks=1).held
    staging = Staging()
    staging.copy(held)  # takes the memory
    begun = during(lambda: staging.copy(held))
    update, waited = during(staging.before_update), during(staging.wait)
    return {**begun, "stream_waits_of_update": update["stream_waits"], "waits_of_writer": waited["waits"]}


def row_of_metrics() -> Numbers:
    """Joins numbers of the host with one of the device. Its double then reads that one to the host."""
    total = Total(torch.ones((), device=GPU, dtype=torch.float64), 3)
    return {**during(lambda: metric_reduction._joined([1.0, total.sum, 3.0]))}


def random_numbers() -> Numbers:
    generator = torch.cuda.default_generators[GPU.index]
    seed_all(11, GPU)
    seeded, before = generator.initial_seed(), generator.get_state()
    with _random_numbers(GPU):
        generator.manual_seed(12)
    kept = torch.equal(generator.get_state(), before)
    ranks = TensorParallelRNG(1, GPU)
    ranks.begin()
    own = generator.initial_seed()
    ranks.end()
    return {
        "seed": seeded,
        "restored_after_a_comparison": kept,
        "a_rank_has_its_own": own != seeded,
        "restored_after_a_rank's": torch.equal(generator.get_state(), before),
    }


def peak_memory() -> Numbers:
    torch.ones(1 << 20, device=GPU)  # 4 MiB, freed at once
    before = KIND.peak_memory(GPU) or 0
    KIND.reset_peak_memory(GPU)
    return {"before": before, "after": KIND.peak_memory(GPU) or 0, "now": torch.cuda.memory_allocated(GPU)}


def writing_thread() -> Numbers:
    """Returns the current device of the thread that writes checkpoints."""
    KIND.make_current(GPU.index)
    work = _Work(KIND.current, name="writes", apart=True)
    work.wait(60)
    return {"device": work.result or 0}


PARTS = (large_batch, small_batch, staged_checkpoint, row_of_metrics, random_numbers, peak_memory, writing_thread)

if __name__ == "__main__":
    torch.ones(1, device=GPU)
    large_batch()  # makes the stream
    json.dump({part.__name__: part() for part in PARTS}, sys.stdout)
