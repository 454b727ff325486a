"""Silent corruption: hashes of bits, and flipped bits in gradients, weights and optimizer state on real ranks."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.bit_flips import PLACES, Checked, CrossEntropy, Flip, drawn
from support.forked import in_ranks, refused
from torch import Tensor, nn

from ddpforge.errors import ExitCode, UsageError
from ddpforge.features import bit_hash
from ddpforge.features.bit_hash import BitHash
from ddpforge.features.corruption_check import CorruptionCheck, check_corruption
from ddpforge.features.second_pass import neighbours
from ddpforge.features.silent_corruption import (
    LOCAL,
    OPTIMIZER,
    REDUCED,
    WEIGHTS,
    SilentCorruption,
    SilentCorruptionError,
    minority,
)
from ddpforge.interfaces import Contract
from ddpforge.strategies.fsdp.strategy import FSDP
from ddpforge.testing.ranks import run_ddpforge


# ---------------------------------------------------------------------------------------------- hashes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
@pytest.mark.parametrize("count", [1, 7, 64])
def test_hash_changes_with_any_single_bit(dtype: torch.dtype, count: int) -> None:
    hashes, values = BitHash(), (torch.randn(count) * 3).to(dtype)
    before, bits = hashes(values).item(), values.view(torch.uint8)
    found = []
    for byte in range(len(bits)):
        for bit in range(8):
            bits[byte] ^= 1 << bit
            found.append(hashes(values).item())
            bits[byte] ^= 1 << bit
    assert before not in found
    assert hashes(values).item() == before


def test_hash_depends_on_the_order_of_values_but_not_on_strides_and_offsets() -> None:
    hashes, values = BitHash(), torch.randn(6, 4)
    assert hashes(values) == hashes(values.t().contiguous().t())
    assert hashes(values) == hashes(torch.cat([torch.zeros(1), values.flatten()])[1:].view(6, 4))
    assert hashes(values) != hashes(values.flip(0))
    assert hashes(torch.tensor(0.0)) != hashes(torch.tensor(-0.0))


def test_hash_of_a_large_tensor_is_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(100)
    monkeypatch.setattr(bit_hash, "_CHUNK", 8)
    hashes = BitHash()
    before = hashes(values).item()
    assert before != hashes(torch.cat([values[16:32], values[:16], values[32:]])), "the order of two parts"
    values[99] = -values[99]
    assert hashes(values) != before


def test_majority_decides_and_two_ranks_are_both_named() -> None:
    assert minority("aaa") == []
    assert minority("aba") == [1]
    assert minority("ab") == [0, 1]
    assert minority("aabb") == [0, 1, 2, 3]


@pytest.mark.parametrize("ranks", range(2, 40))
def test_each_rank_belongs_to_one_small_group(ranks: int) -> None:
    groups = neighbours(ranks)
    assert [rank for group in groups for rank in group] == list(range(ranks))
    assert all(3 <= len(group) <= 5 for group in groups) or groups == [[0, 1]]


# ---------------------------------------------------------------------------------------------- flips
def caught(checked: Checked, flip: Flip | None = None) -> list[tuple[str, tuple[int, ...], tuple[str, ...]]]:
    """Takes a step; returns the findings: kind, ranks, and names without the key of the optimizer's state."""
    try:
        checked.step(flip)
    except SilentCorruptionError as error:
        return [(one.kind, one.ranks, tuple(name.split(" ")[0] for name in one.names)) for one in error.found]
    return []


def flips(ranks: int, precision: str, _: int) -> list[Any]:
    checked, draw = Checked(micro_batches=2, precision=precision), random.Random(ranks)
    clean = [caught(checked) for _ in range(20)]
    checked.remember()
    found: list[Any] = [clean]
    for place in PLACES * 3:
        flip = drawn(draw, place, ranks, checked.parameters)
        found.append((flip, caught(checked, flip)))
        checked.reset()
    return found


@pytest.mark.parametrize(("ranks", "precision"), [(2, "fp32"), (3, "bf16")])
def test_flipped_bit_is_found_at_its_rank_place_and_parameter(ranks: int, precision: str) -> None:
    """Covers BatchNorm, dropout and two micro-batches per step. Steps without a flip raise no alarm."""
    for clean, *found in in_ranks(ranks, partial(flips, ranks, precision)):
        assert not any(clean)
        for flip, named in found:
            of = (flip.rank,) if ranks > 2 or flip.place == LOCAL else (0, 1)
            assert named == [(flip.place, of, (flip.name,))]


def later(_: int) -> list[Any]:
    checked = Checked(every=4)
    found = [caught(checked) for _ in range(5)]
    return [found, [caught(checked, Flip(WEIGHTS, 1, "0.weight", 3, 0) if n == 0 else None) for n in range(3)]]


def test_flip_of_a_weight_between_checks_is_found_by_the_next_check() -> None:
    """Weights are wrong in step 6; step 8 is checked."""
    for before, (first, second, third) in in_ranks(3, later):
        assert not any(before)
        assert not first
        assert not second
        assert (WEIGHTS, (1,), ("0.weight",)) in [(kind, ranks, names[:1]) for kind, ranks, names in third]


def saving(_: int) -> str:
    checked = Checked(every=1000)
    checked.step()
    checked.feature.before_save()
    if checked.rank == 1:
        Flip(WEIGHTS, 1, "0.bias", 0, 3)(checked.replica.weights.shards()["0.bias"].tensor)
    return refused(SilentCorruptionError, checked.feature.before_save)


def test_weights_are_compared_before_each_checkpoint() -> None:
    for message in in_ranks(3, saving):
        assert "step 1: silent corruption: wrong weights of `0.bias` on rank 1" in message
        assert "move those away that are newer than step 1, the last check" in message


def hybrid(_: int) -> list[Any]:
    checked = Checked(FSDP(replicas=3), blocks=lambda model: [model[0]])
    found: list[Any] = [[caught(checked) for _ in range(3)]]
    checked_flips = [Flip(place, 2, "0.weight", 5, 7) for place in (REDUCED, WEIGHTS, OPTIMIZER)]
    for flip in checked_flips:
        found.append((flip, caught(checked, flip)))
        if flip.rank == checked.rank and flip.place == WEIGHTS:
            flip(checked.replica.weights.shards()[flip.name].tensor)  # back
        checked.replica.gradients.clear()
    return found


def test_replicas_of_fsdp_are_compared() -> None:
    for clean, *found in in_ranks(3, hybrid):
        assert not any(clean)
        assert [named for _, named in found] == [[(flip.place, (2,), ("0.weight",))] for flip, _ in found]


def warning(_: int) -> list[Any]:
    checked = Checked(action="warn")
    checked.step()
    return caught(checked, Flip(REDUCED, 0, "0.weight", 0, 0))


def test_training_goes_on_if_the_check_only_warns() -> None:
    assert in_ranks(2, warning) == [[], []]


# ---------------------------------------------------------------------------------------------- models that do not fit
class DependsOnRank(CrossEntropy):
    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        loss, outputs = super().loss(model, batch)
        return loss * (1 + torch.distributed.get_rank()), outputs


class Random(CrossEntropy):
    def __init__(self) -> None:
        self.calls = 0

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        loss, outputs = super().loss(model, batch)
        self.calls += 1
        return loss * self.calls, outputs


@pytest.mark.parametrize(
    ("task", "message"),
    [(DependsOnRank, "the loss or the model depends on the rank"), (Random, "the model is not deterministic")],
)
def test_gradients_that_cannot_be_compared_are_refused_at_the_first_step(task: Callable[[], Any], message: str) -> None:
    def first(_: int) -> str:
        checked = Checked(task=task(), every=1000)
        return refused(UsageError, checked.step)

    for found in in_ranks(3, first):
        assert message in found
        assert "set callbacks.corruption_check.local_gradients = false" in found


class Codebook(nn.Module):
    """Buffer that each forward pass changes, and that the output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        mean: Tensor = self.mean  # type: ignore[assignment]
        outputs: Tensor = self.layer(x - mean)
        mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return outputs


def test_buffers_that_a_pass_reads_and_changes_are_those_of_its_rank() -> None:
    """Ranks have different buffers; the second pass changes none of them."""

    def action(rank: int) -> list[Any]:
        checked, plain = Checked(build=Codebook), Checked(build=Codebook, checks=False)
        found = [caught(checked) for _ in range(5)]
        for _ in range(5):
            plain.step()
        return [*found, torch.equal(checked.replica.unwrapped.mean, plain.replica.unwrapped.mean)]

    assert in_ranks(3, action) == [[[], [], [], [], [], True]] * 3


# ---------------------------------------------------------------------------------------------- recipes
def problems(**changes: Any) -> list[str]:
    """Returns the keys of the errors for a recipe with the callback."""
    train = {"compile": "off", "compile_blocks": False, "sync_batchnorm": False, "virtual_ranks": None}
    contract = {
        name: changes.pop(name) for name in ("shards", "replicas", "averages", "splits_forward") if name in changes
    }
    task, updates = changes.pop("task", CrossEntropy()), changes.pop("updates", {})
    local = changes.pop("local_gradients", True)
    chosen: Any = SimpleNamespace(
        callbacks={"bits": CorruptionCheck(local_gradients=local)},
        trains=True,
        strategy=SimpleNamespace(contract=Contract(clipping="", accumulation="", **contract)),
        updates=updates,
        recipe=SimpleNamespace(train=SimpleNamespace(**train | changes)),
        task=task,
    )
    return [error.key for error in check_corruption(chosen)]


class Stateful(CrossEntropy):
    def state(self) -> dict[str, int]:
        return {}


class Whole(CrossEntropy):
    whole_batch = True


ALL, OWN = "callbacks.bits", "callbacks.bits.local_gradients"


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({}, []),
        ({"shards": ("weights",), "replicas": 2}, []),
        ({"shards": ("weights",)}, [ALL]),
        ({"splits_forward": ("layers",), "shards": ("weights",)}, [ALL]),
        ({"averages": "weights"}, [ALL]),
        ({"updates": {"generator": 1}}, [ALL]),
        ({"compile": "default"}, [OWN]),
        ({"compile": "default", "compile_blocks": True}, []),
        ({"sync_batchnorm": True, "virtual_ranks": 4}, [OWN, OWN]),
        ({"task": Stateful(), "updates": {"generator": 1}}, [ALL, OWN]),
        ({"task": Whole()}, [OWN]),
        ({"task": Whole(), "local_gradients": False}, []),
        ({"task": Whole(), "shards": ("weights",), "replicas": 2}, []),
    ],
)
def test_settings_that_the_check_cannot_work_with_are_refused_all_at_once(
    changes: dict[str, Any], keys: list[str]
) -> None:
    assert problems(**changes) == keys


CODE = """
import os

import torch

from ddpforge.interfaces import Callback


class Data:
    def __len__(self):
        return 1_000

    def __getitem__(self, index):
        return torch.randn(4, generator=torch.Generator().manual_seed(index)), index % 3


class Flips(Callback):
    def on_start(self, run):
        self.weights = run.weights

    def on_step(self, info) -> None:
        if info.step == 5 and os.environ.get("RANK") == "1":
            weight = self.weights.shards()["layers.0.weight"].tensor
            weight.view(-1).view(torch.int32)[2] ^= 1 << 30
            self.weights.mark_changed()
"""
RECIPE = """
recipe = 2
name = "run"
[model]
use = "mlp"
inputs = 4
outputs = 3
[data.train]
use = "./parts.py:Data"
[task]
use = "classification"
[optimizer]
use = "adamw"
lr = 0.01
[train]
length = "12st"
global_batch = 6
device = "cpu"
[strategy]
use = "ddp"
[checkpoint]
every = "4st"
[callbacks.bits]
use = "corruption_check"
every = 3
{flips}
"""


@pytest.mark.slow
def test_run_ends_at_a_flipped_bit_with_rank_parameter_and_advice(tmp_path: Path) -> None:
    """Step 5 flips a bit, step 6 is checked before its update. Without the flip the run ends well."""
    (tmp_path / "parts.py").write_text(CODE)
    (tmp_path / "run.toml").write_text(RECIPE.format(flips='[callbacks.flips]\nuse = "./parts.py:Flips"'))
    done = run_ddpforge("run", "run.toml", cwd=tmp_path, ranks=3)
    assert done.returncode == ExitCode.ENVIRONMENT, done.stderr
    assert "step 6: silent corruption: wrong weights of `layers.0.weight` on rank 1" in done.stderr
    assert "newer than step 4, the last check without a finding" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    (tmp_path / "run.toml").write_text(RECIPE.format(flips=""))
    done = run_ddpforge("run", "run.toml", cwd=tmp_path, ranks=3)
    assert done.returncode == 0, done.stderr
    done = run_ddpforge("run", "run.toml", "--fresh", cwd=tmp_path, ranks=1)
    assert done.returncode == ExitCode.USAGE, done.stderr
    assert "no two of 1 rank(s) hold the same weights" in done.stderr


def test_second_check_is_refused() -> None:
    chosen: Any = SimpleNamespace(callbacks={"a": CorruptionCheck(), "b": CorruptionCheck()}, trains=False)
    assert [error.key for error in check_corruption(chosen)] == ["callbacks.b"]


def test_batch_that_cannot_be_sent_is_refused() -> None:
    def first(_: int) -> str:
        checked = Checked(batch=lambda draw: (torch.randn(6, 8), Unsent()))
        return refused(UsageError, checked.step)

    for found in in_ranks(2, first):
        assert "cannot be pickled" in found
        assert "set callbacks.corruption_check.local_gradients = false" in found


class Unsent:
    def __reduce__(self) -> Any:
        raise TypeError("it has a file")


def padding(_: int) -> list[Any]:
    checked = Checked(build=Codebook, samples=lambda rank: 6 if rank else 0)
    return [caught(checked) for _ in range(4)]


def test_rank_without_samples_is_checked_too() -> None:
    """Covers a pass that changes no buffers in the end, with a gradient of zero."""
    assert in_ranks(3, padding) == [[[]] * 4] * 3


def test_feature_is_not_used_without_its_callback() -> None:
    run: Any = SimpleNamespace(parts=SimpleNamespace(callbacks={}), trains=True)
    assert SilentCorruption.of(run) is None
