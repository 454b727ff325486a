"""Commands that only read recipes and components import no torch, unless an option's annotation needs it."""

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from ddpforge.builtin.models.cnn import CNN
from ddpforge.builtin.models.denoiser import Denoiser
from ddpforge.builtin.models.gan import GAN
from ddpforge.builtin.models.gpt import GPT
from ddpforge.builtin.models.mlp import MLP
from ddpforge.builtin.models.moe import MoEGPT
from ddpforge.builtin.models.unet import UNet
from ddpforge.cli import main
from ddpforge.components.registry import Registry
from ddpforge.recipe import bundled

HEAVY = ("accelerate", "deepspeed", "numpy", "safetensors", "torch", "torch._dynamo", "torchvision", "wandb")
"""Modules that take long to import. torch imports numpy and others."""

TAKE_MODELS = [("model", "lora"), ("task", "distillation")]  # one of their options is annotated with a class of torch
OWN = [
    ["plugins", "show", entry.name, "--kind", entry.kind]
    for entry in Registry.installed().entries()
    if entry.distribution == "ddpforge" and (entry.kind, entry.name) not in TAKE_MODELS
]

_SCRIPT = """
import json, sys
from click.testing import CliRunner
from ddpforge.cli import main
looks, heavy = json.loads(sys.argv[1])
for look in looks:
    found = CliRunner().invoke(main, look)
    print(json.dumps([found.exit_code, found.output, [name for name in heavy if name in sys.modules]]))
"""


def looked(looks: list[list[str]], folder: Path) -> list[tuple[int, str, list[str]]]:
    """Runs commands in one new process; returns exit code, output and modules of HEAVY imported so far for each."""
    command = [sys.executable, "-c", _SCRIPT, json.dumps([looks, HEAVY])]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_list_commands_import_no_heavy_module(tmp_path: Path) -> None:
    looks = [["plugins", "list"], ["recipes", "ls"], ["runs", "ls"]]
    assert [(code, imported) for code, _, imported in looked(looks, tmp_path)] == [(0, [])] * 3


def test_a_launch_is_checked_without_torch(tmp_path: Path) -> None:
    looks = [
        ["launch", "digits", "--nproc=2", "--dry-run"],
        ["launch", "digits", "--nproc=2", "optimizer.lr=-1", "--dry-run"],
        ["launch", "digits", "--nproc=2", "strategy.use=dpp", "--dry-run"],
        ["launch", "digits", "--nproc=2", "strategy.use=fsdp", "strategy.replicas=many", "--dry-run"],
    ]
    fine, limit, name, option = looked(looks, tmp_path)
    refused = [(code, imported) for code, _, imported in (limit, name, option)]
    assert (fine[0], fine[2], refused) == (0, [], [(2, [])] * 3)
    assert "`strategy.replicas`" in option[1]
    assert "`optimizer.lr` must be at least" in limit[1]
    assert "did you mean `ddp`?" in name[1]


def test_launch_checks_strategy_options_also_if_the_batch_does_not_divide(tmp_path: Path) -> None:
    own = ["launch", "digits", "--nproc=3", "strategy.use=fsdp"]
    looks = [[*own, "--dry-run"], [*own, "strategy.replicas=many", "--dry-run"]]
    (_, indivisible, _), (code, wrong, _) = looked(looks, tmp_path)
    assert "cannot be divided evenly among 3 ranks" in indivisible
    assert code == 2
    assert "`strategy.replicas`" in wrong


NEED_TORCH = {"distil-digits", "finetune-digits"}  # they need a model inside the task, and initial weights
BUNDLED = sorted(bundled().keys() - NEED_TORCH)


def test_bundled_recipes_are_checked_and_shown_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares with the output in this process, which has imported torch."""
    looks = [[command, name, "--ranks=2"] for name in BUNDLED for command in ("check", "show")]
    looks += [["check", "digits", "optimizer.lr=-1"], ["check", "digits", "strategy.use=single", "--ranks=2"]]
    monkeypatch.chdir(tmp_path)
    for given, (code, shown, imported) in zip(looks, looked(looks, tmp_path), strict=True):
        beside = CliRunner().invoke(main, given)
        assert (code, shown) == (beside.exit_code, beside.output), given
        assert [name for name in imported if name != "numpy"] == [], given


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["train.tf32=true"], "train.tf32 multiplies in TF32"),
        pytest.param(
            ["strategy.use=fsdp", "strategy.cpu_offload=true"],
            "strategy.cpu_offload moves shards from a GPU",
            marks=pytest.mark.full,  # the same import, and the message in test_fsdp.py
        ),
    ],
)
def test_check_imports_torch_if_the_result_depends_on_a_gpu(tmp_path: Path, options: list[str], said: str) -> None:
    look = ["check", "digits", *options]
    on_gpu, here = looked([[*look, "--device=cuda"], look], tmp_path)
    assert (on_gpu[0], on_gpu[2]) == (0, [])
    assert (here[0], said in here[1]) == ((0, False) if torch.cuda.is_available() else (2, True))
    assert "torch" in here[2]


def test_the_options_of_built_in_components_are_shown_without_torch(tmp_path: Path) -> None:
    for given, (code, shown, imported) in zip(OWN, looked(OWN, tmp_path), strict=True):
        assert code == 0, shown
        assert [name for name in imported if name != "numpy"] == [], given  # samplers compute with numpy


@pytest.mark.parametrize(
    ("name", "model"),
    [
        *(("cnn", CNN), ("denoiser", Denoiser), ("gan", GAN), ("gpt", GPT), ("mlp", MLP), ("moe_gpt", MoEGPT)),
        ("unet", UNet),
    ],
)
def test_model_builder_and_model_class_have_the_same_options(name: str, model: type[Any]) -> None:
    declared = inspect.signature(Registry.installed().load("model", name)).parameters
    taken = inspect.signature(model).parameters
    assert {key: option.default for key, option in declared.items()} == {
        key: option.default for key, option in taken.items()
    }


def test_local_file_that_imports_torch_does_not_import_the_compiler(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\nSIZE = nn.Linear(2, 3).weight.numel()\n\n\n"
        "class Net(nn.Module):\n    def __init__(self, size: int = SIZE) -> None:\n        super().__init__()\n"
    )
    given = ["plugins", "show", "./net.py:Net", "--kind=model", "--json"]
    (_, shown, _), (code, _, imported) = looked([given, ["check", "digits", "model.use=./net.py:Net"]], tmp_path)
    assert [option["default"] for option in json.loads(shown)["options"]] == ["6"]
    assert code == 0
    assert "torch" in imported
    assert "torch._dynamo" not in imported


@pytest.mark.slow
def test_launch_does_not_import_local_files_and_ranks_report_their_errors(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import pathlib\n\nimport torch\n\n"
        "pathlib.Path('imported').touch()\n\n\nclass Net(torch.nn.Linear):\n    pass\n"
    )
    own = ["launch", "digits", "--nproc=2", "model.use=./net.py:Net", "model.size=3"]
    ((code, shown, _),) = looked([[*own, "--dry-run"]], tmp_path)
    assert code == 0
    assert not (tmp_path / "imported").exists()
    assert shown.rstrip().endswith("model.size=3")

    ended = subprocess.run([sys.executable, "-m", "ddpforge", *own], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.count("error: unknown key `size` in [model]") == 1
    assert "nothing was started" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "runs").exists()
