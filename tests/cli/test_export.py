"""`ddpforge export`: writes the weights of a run to a safetensors file."""

import json
import logging
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from ddpforge.checkpoint import writer
from ddpforge.checkpoint.state import CheckpointMetadata, RankState
from ddpforge.cli.ckpt import ckpt
from ddpforge.cli.export import export
from ddpforge.errors import UsageError
from ddpforge.ranks.writers import WriterGroup
from ddpforge.runs.folder import RunFolder

RESOLVED = '[checkpoint.keep]\nlast = 9\nbest = 1\nmonitor = "eval/loss"\n'


@pytest.fixture(autouse=True)
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Makes the run runs/digits, whose weights equal their step; step 2 is the best."""
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(Path("runs/digits"))
    folder.create(text="", resolved=RESOLVED, local_files={})
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        facts = CheckpointMetadata(step=step, samples=0, strategy="", world_size=1, metrics={"eval/loss": loss})
        averages = {"ema": {"w": torch.full((2,), step + 0.5)}}
        share = RankState(model={"w": torch.full((2,), float(step))}, callbacks=averages)
        writer.write(folder.checkpoints, facts, share, WriterGroup.alone())
    return folder


def call(*arguments: str) -> Result:
    return CliRunner().invoke(export, arguments, catch_exceptions=False, help_option_names=["-h", "--help"])


def weight(file: str) -> float:
    return float(load_file(file)["w"][0])


@pytest.mark.parametrize(
    ("arguments", "file", "expected"),
    [
        (["digits"], "digits.safetensors", 3.0),
        (["runs/digits"], "digits.safetensors", 3.0),
        (["digits", "--step", "1"], "digits.safetensors", 1.0),
        (["digits", "--best"], "digits.safetensors", 2.0),
        (["digits", "--weights", "ema"], "digits-ema.safetensors", 3.5),
        (["digits", "--out", "model.st"], "model.st", 3.0),
        (["digits", "--out", "hf/"], "hf/model.safetensors", 3.0),
        (["digits", "--out", "runs"], "runs/model.safetensors", 3.0),
        (["digits", "--step", "2", "--max-shard-size", "5GB"], "digits/model.safetensors", 2.0),
        (["digits", "--weights", "ema", "--max-shard-size", "1KB"], "digits-ema/model.safetensors", 3.5),
    ],
)
def test_export_writes_the_chosen_weights_to_the_expected_file(
    arguments: list[str], file: str, expected: float
) -> None:
    result = call(*arguments)

    assert result.exit_code == 0
    assert weight(file) == expected
    assert result.stdout.startswith(f"{file}: 1 tensor,")


def test_the_dtype_can_be_chosen() -> None:
    call("digits", "--dtype", "bf16")

    assert load_file("digits.safetensors")["w"].dtype == torch.bfloat16


def test_json_describes_the_written_file() -> None:
    said = json.loads(call("digits", "--json").stdout)

    assert (said["file"], said["step"], said["tensors"]) == ("digits.safetensors", 3, 1)
    assert said["bytes"] == Path("digits.safetensors").stat().st_size


def test_a_damaged_checkpoint_is_skipped_with_a_warning(
    run: RunFolder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("ddpforge"), "propagate", True)
    newest = next(run.checkpoints.glob("step-000000003-*"))
    (newest / "COMMIT").unlink()

    call("digits")

    assert weight("digits.safetensors") == 2.0
    assert "passed over:" in caplog.text
    assert "COMMIT is damaged" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "complaint", "hint"),
    [
        (["digit"], "there is no run 'digit'", "did you mean digits?"),
        (["digits", "--step", "9"], "runs/digits has no checkpoint of step 9", "it has checkpoints of step 1, 2, 3"),
        (["digits", "--step", "1", "--best"], "--best and --step", "give one of them"),
        (["digits", "--weights", "emma"], "contains no weights called 'emma'", "callbacks that saved tensors: ema"),
    ],
)
def test_invalid_choices_are_usage_errors_with_a_hint(arguments: list[str], complaint: str, hint: str) -> None:
    with pytest.raises(UsageError, match=complaint) as caught:
        call(*arguments)
    assert caught.value.hints == (hint,)
    assert not list(Path().glob("*.safetensors"))


def test_best_needs_a_metric_in_the_recipe(run: RunFolder) -> None:
    run.resolved.write_text("[checkpoint.keep]\nlast = 2\n")

    with pytest.raises(UsageError, match=r"no metric ranks the checkpoints"):
        call("digits", "--best")


def test_an_existing_file_is_replaced_only_on_request() -> None:
    Path("digits.safetensors").write_text("precious")

    with pytest.raises(UsageError, match=r"digits\.safetensors exists"):
        call("digits")
    call("digits", "--force")
    assert weight("digits.safetensors") == 3.0


def test_a_single_checkpoint_can_be_exported(run: RunFolder) -> None:
    (checkpoint,) = run.checkpoints.glob("step-000000002-*")

    assert call(str(checkpoint)).exit_code == 0
    assert weight(f"{checkpoint.name}.safetensors") == 2.0
    with pytest.raises(UsageError, match="is a single checkpoint, but --step and --best choose"):
        call(str(checkpoint), "--best")


def test_ckpt_export_is_the_same_command() -> None:
    assert ckpt.commands["export"] is export


@pytest.mark.parametrize("size", ["5000", "2.5kb", "3 MiB"])
def test_sizes_have_units(size: str) -> None:
    assert call("digits", "--max-shard-size", size).exit_code == 0


@pytest.mark.parametrize("size", ["", "0", "-1", "GB", "5 apples", "0.1"])
def test_an_invalid_size_is_a_usage_error(size: str) -> None:
    result = call("digits", "--max-shard-size", size)

    assert result.exit_code == 2
    assert "is not a size; expected e.g. 5GB" in result.stderr


def test_a_size_below_a_kilobyte_lacks_its_unit() -> None:
    result = call("digits", "--max-shard-size", "5")
    assert result.exit_code == 2
    assert "5 is a size of 5 bytes; write a unit, e.g. 5GB" in result.stderr


@pytest.mark.parametrize("file", ["model.pt", "model.pth", "model.bin", "model.ckpt"])
def test_file_names_of_torch_formats_are_refused(file: str) -> None:
    with pytest.raises(UsageError, match="the file would be safetensors"):
        call("digits", "--out", file)
    assert not Path(file).exists()


def test_an_unknown_file_name_needs_a_format() -> None:
    with pytest.raises(UsageError, match=r"does not write \.gguf files") as caught:
        call("digits", "--out", "model.gguf")
    assert any("--format safetensors" in hint for hint in caught.value.hints)
    assert not Path("model.gguf").exists()
