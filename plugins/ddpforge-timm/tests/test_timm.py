"""timm's models: names and options, and training on two ranks."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from ddpforge.ranks.collectives import SingleRank
from ddpforge.strategies.named_state import tensors
from ddpforge.testing.ranks import preload, run_ddpforge
from ddpforge.training.initial_weights import load_initial
from safetensors.torch import save_model
from torch import nn

from ddpforge_timm import timm_model

os.environ["HF_HUB_OFFLINE"] = "1"
preload("timm")
RECIPE = Path(__file__).parents[1] / "recipes" / "digits-resnet.toml"


def launched(*arguments: str, cwd: Path, ranks: int) -> subprocess.CompletedProcess[str]:
    """Runs ddpforge under torchrun, as a user would."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *torchrun, "-m", "ddpforge", *arguments]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)


def losses(folder: Path) -> list[float]:
    rows: list[dict[str, Any]] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["train/loss"] for row in rows if "train/loss" in row]


# ---------------------------------------------------------------------------------------------- options
def test_model_equals_the_model_of_timm() -> None:
    torch.manual_seed(1)
    model = timm_model(arch="test_vit", classes=7, channels=1, image_size=32, drop_rate=0.1, options={"patch_size": 8})
    torch.manual_seed(1)
    expected = timm.create_model(
        "test_vit", pretrained=False, num_classes=7, in_chans=1, img_size=32, drop_rate=0.1, patch_size=8
    )
    images = torch.randn(2, 1, 32, 32)
    assert torch.equal(model.eval()(images), expected.eval()(images))
    assert model.outputs == 7


@pytest.mark.parametrize("arch", ["test_resnet", "test_efficientnet", "test_convnext"])
def test_convolutional_models_return_logits(arch: str) -> None:
    model = timm_model(arch=arch, classes=3, channels=2, drop_rate=0.2)
    assert model.eval()(torch.randn(1, 2, 64, 64)).shape == (1, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arch": "resnet51"}, r"no model `resnet51`; did you mean .*`resnet50`"),
        ({"arch": "hf-hub:someone/something"}, "no model"),
        ({"arch": "resnet50.nonsense"}, r"no weights `nonsense` of `resnet50`; it has resnet50\.a1_in1k"),
        ({"arch": "test_resnet", "image_size": 64}, "img_size"),
        ({"arch": "test_vit", "options": {"dept": 2}}, "dept"),
        ({"arch": "test_vit", "options": {"num_classes": 2}}, "use `classes`"),
        ({"arch": "test_vit", "options": {"features_only": True}}, "not be a classifier"),
        ({"arch": "test_vit", "options": {"pretrained_cfg_overlay": {"file": "x.pth"}}}, "checkpoint.init_from"),
    ],
)
def test_options_that_timm_would_ignore_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        timm_model(classes=2, **options)


def test_unknown_name_is_an_error_of_the_recipe(tmp_path: Path) -> None:
    done = run_ddpforge("run", str(RECIPE), "--set=model.arch=test_resnett", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "did you mean `test_resnet`" in done.stderr
    assert "Traceback" not in done.stderr


# ---------------------------------------------------------------------------------------------- training
@pytest.mark.parametrize("start", [run_ddpforge, pytest.param(launched, marks=pytest.mark.slow)])
def test_ddp_and_fsdp_train_the_same_curve_on_two_ranks(tmp_path: Path, start: Callable[..., Any]) -> None:
    curves = {}
    for strategy in ("ddp", "fsdp"):
        sets = (
            f"--set=strategy.use={strategy}",
            f"--set=name={strategy}",
            "--set=train.length=20st",
            "--set=schedule.warmup=2st",
        )
        done = start("run", str(RECIPE), *sets, "--set=track.every=1st", cwd=tmp_path, ranks=2)
        assert done.returncode == 0, done.stderr
        curves[strategy] = losses(tmp_path / "runs" / strategy)
    assert len(curves["ddp"]) == 20
    assert curves["ddp"][-1] < 0.9 * curves["ddp"][0]
    assert curves["fsdp"] == pytest.approx(curves["ddp"], rel=1e-4)


# ---------------------------------------------------------------------------------------------- initial weights
def begin(model: nn.Module, source: Path, *skip: str) -> None:
    held, aliases = tensors(model)

    def take(saved: Any) -> None:
        model.load_state_dict({name: tensor.read() for name, tensor in saved.items()}, strict=False)

    load_initial(str(source), held, aliases, take, SingleRank(torch.device("cpu")), skip=skip)


@pytest.mark.parametrize(("arch", "head"), [("test_resnet", "fc"), ("test_vit", "head")])
def test_init_from_loads_weights_of_timm_except_the_ignored_head(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, arch: str, head: str
) -> None:
    torch.manual_seed(1)
    saved = timm.create_model(arch, num_classes=10)
    save_model(saved, str(tmp_path / "model.safetensors"))  # as in a folder of the hub
    torch.manual_seed(2)
    model = timm_model(arch=arch, classes=3)
    with pytest.raises(Exception, match=rf"`{head}.weight` is \[3, \d+\] in the model and \[10, \d+\]"):
        begin(model, tmp_path)
    new = model.get_submodule(head).weight.clone()  # type: ignore[operator]
    with caplog.at_level("INFO", logger="ddpforge"):
        begin(model, tmp_path, f"{head}.*")
    theirs, mine = saved.state_dict(), model.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine if not name.startswith(f"{head}."))
    assert torch.equal(model.get_submodule(head).weight, new)
    assert f"2 tensors skipped by init_ignore: {head}.bias, {head}.weight" in caplog.text


def test_init_from_reports_a_missing_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_model(timm.create_model("test_resnet", num_classes=0), str(tmp_path / "body.safetensors"))
    model = timm_model(arch="test_resnet", classes=3)
    with caplog.at_level("INFO", logger="ddpforge"):
        begin(model, tmp_path / "body.safetensors")
    assert "2 tensors not in it: fc.bias, fc.weight" in caplog.text
