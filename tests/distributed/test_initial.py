"""Initial weights from another run or file: `checkpoint.init_from`."""

from collections.abc import Callable
from pathlib import Path
from shutil import rmtree

import pytest
import torch
from safetensors.torch import save_file
from support.launched import Ranks
from support.sharding import DDP, ZERO, Bench, ddp_and_zero, weights_in
from torch import Tensor

from ddpforge.checkpoint.reader import CheckpointReader
from ddpforge.errors import ExitCode

BEGIN = """
[checkpoint]
at_start = true
every = "100st"
init_from = "{source}"
{more}
[callbacks.ema]
decay = 0.9
"""


@pytest.fixture
def bench(tmp_path: Path, ddpforge: Callable[..., Ranks]) -> Bench:
    return Bench(tmp_path, ddpforge)


@pytest.fixture
def weights(bench: Bench) -> dict[str, Tensor]:
    """Returns the weights of a trained model, which is the run `base`."""
    bench("base", DDP, length="6st")
    return weights_in(bench.newest("base"))


def begin(bench: Bench, source: str, strategy: str = DDP, more: str = "", **options: bool) -> Ranks:
    return bench("tuned", strategy, length="6st", more=BEGIN.format(source=source, more=more), **options)


def first(bench: Bench) -> Path:
    """Returns the checkpoint before the first step."""
    return min((bench.folder / "runs/tuned/checkpoints").glob("step-*"))


@ddp_and_zero
def test_init_from_loads_the_weights_of_a_run(bench: Bench, weights: dict[str, Tensor], strategy: str) -> None:
    said = begin(bench, "base", strategy)
    checkpoint = CheckpointReader(first(bench))
    torch.testing.assert_close(weights_in(first(bench)), weights, rtol=0, atol=0)
    averages = {name: saved.read() for name, saved in checkpoint.callbacks()["ema"].items()}  # type: ignore[union-attr]
    torch.testing.assert_close(averages, {name: weights[name] for name in averages}, rtol=0, atol=0)
    assert checkpoint.metadata.step == 0
    assert not any(checkpoint.state().optimizer.values())
    assert f"initial weights: {len(weights)} tensors from" in said.stderr

    rmtree(bench.folder / "runs/base")  # a resumed run does not need them
    more = BEGIN.format(source="base", more="")
    bench("tuned", strategy, length="8st", more=more)
    assert CheckpointReader(bench.newest("tuned")).metadata.step == 8


@pytest.mark.parametrize("strategy", [DDP, pytest.param(ZERO[3], marks=pytest.mark.full)], ids=["ddp", "zero3"])
def test_missing_and_unexpected_tensors_are_reported(bench: Bench, weights: dict[str, Tensor], strategy: str) -> None:
    """Covers weights in another dtype, too."""
    names = list(weights)
    half = {name: weights[name].bfloat16() for name in names[2:]}
    save_file({**half, "head.extra": torch.zeros(2)}, bench.folder / "some.safetensors")
    said = begin(bench, "some.safetensors", strategy).stderr
    assert f"{len(half)} tensors from some.safetensors" in said
    assert f"2 tensors not in it: {', '.join(sorted(names[:2]))}" in said
    assert "1 tensors not in the model: head.extra" in said

    began = weights_in(first(bench))
    for name, tensor in half.items():
        assert torch.equal(began[name], tensor.float()), name
    assert not torch.equal(began[names[0]], weights[names[0]])


def test_init_from_reads_a_transformers_folder(bench: Bench, weights: dict[str, Tensor]) -> None:
    folder, names = bench.folder / "hub", list(weights)
    folder.mkdir()
    parts = {"model-00001-of-00002.safetensors": names[:3], "model-00002-of-00002.safetensors": names[3:]}
    for file, some in parts.items():
        save_file({name: weights[name] for name in some}, folder / file)
    index = {name: file for file, some in parts.items() for name in some}
    (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {index}}}'.replace("'", '"'))
    begin(bench, "hub")
    torch.testing.assert_close(weights_in(first(bench)), weights, rtol=0, atol=0)


def test_shape_mismatch_is_refused_unless_ignored(bench: Bench, weights: dict[str, Tensor]) -> None:
    name = next(name for name, tensor in weights.items() if tensor.ndim == 2)
    save_file({**weights, name: torch.zeros(2, 2)}, bench.folder / "odd.safetensors")
    refused = begin(bench, "odd.safetensors", fails=True)
    assert set(refused.codes) == {ExitCode.USAGE}
    assert f"`{name}` is {list(weights[name].shape)} in the model and [2, 2] in checkpoint.init_from" in refused.stderr
    assert "Traceback" not in refused.stderr

    said = begin(bench, "odd.safetensors", more=f'init_ignore = ["{name[:-2]}*"]')
    assert f"1 tensors skipped by init_ignore: {name}" in said.stderr


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("nowhere", "there is no run 'nowhere'"),
        ("other.safetensors", "none of its tensors has the name of one in the model"),
    ],
)
def test_invalid_source_is_refused(bench: Bench, source: str, reason: str) -> None:
    save_file({"w": torch.zeros(2)}, bench.folder / "other.safetensors")
    refused = begin(bench, source, fails=True)
    assert ExitCode.USAGE in refused.codes
    assert reason in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("skip", "reason"),
    [
        ("nothing.*", 'checkpoint.init_ignore: "nothing.*" matches no tensor of the model'),
        ("*", "checkpoint.init_ignore matches all tensors of the model"),
    ],
)
def test_init_ignore_that_matches_nothing_or_everything_is_refused(
    bench: Bench, weights: dict[str, Tensor], skip: str, reason: str
) -> None:
    refused = begin(bench, "base", more=f'init_ignore = ["{skip}"]', fails=True)
    assert ExitCode.USAGE in refused.codes
    assert reason in refused.stderr
    assert "Traceback" not in refused.stderr


def test_broken_file_is_named(bench: Bench) -> None:
    (bench.folder / "broken.safetensors").write_bytes(b"\xff" * 64)
    refused = begin(bench, "broken.safetensors", fails=True)
    assert set(refused.codes) == {ExitCode.ENVIRONMENT}
    assert "broken.safetensors cannot be read as safetensors" in refused.stderr
    assert "Traceback" not in refused.stderr
