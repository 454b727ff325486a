"""What a look at recipes and components imports: no torch, unless a component has it where options are declared."""

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
"""What takes long to import; with torch come numpy and much else."""

TAKE_MODELS = [("model", "lora"), ("task", "distillation")]  # an option of theirs is annotated with torch's class
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
    """What commands show, one after the other in a process of their own, and what of HEAVY is imported then."""
    command = [sys.executable, "-c", _SCRIPT, json.dumps([looks, HEAVY])]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_lists_import_nothing_heavy(tmp_path: Path) -> None:
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


def test_a_launch_whose_batch_does_not_divide_has_the_options_of_its_strategy_checked(tmp_path: Path) -> None:
    own = ["launch", "digits", "--nproc=3", "strategy.use=fsdp"]
    looks = [[*own, "--dry-run"], [*own, "strategy.replicas=many", "--dry-run"]]
    (_, indivisible, _), (code, wrong, _) = looked(looks, tmp_path)
    assert "cannot be divided evenly among 3 ranks" in indivisible
    assert code == 2
    assert "`strategy.replicas`" in wrong


NEED_TORCH = {"distil-digits", "finetune-digits"}  # a task that holds a model, and weights to begin with
BUNDLED = sorted(bundled().keys() - NEED_TORCH)


def test_bundled_recipes_are_checked_and_shown_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the words that they have where torch is imported, as it is in this process."""
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
        (["strategy.use=fsdp", "strategy.cpu_offload=true"], "strategy.cpu_offload moves shards from a GPU"),
    ],
)
def test_torch_tells_whether_there_is_a_gpu_if_that_matters(tmp_path: Path, options: list[str], said: str) -> None:
    look = ["check", "digits", *options]
    on_gpu, here = looked([[*look, "--device=cuda"], look], tmp_path)
    assert (on_gpu[0], on_gpu[2]) == (0, [])
    assert (here[0], said in here[1]) == ((0, False) if torch.cuda.is_available() else (2, True))
    assert "torch" in here[2]


def test_the_options_of_built_in_components_are_shown_without_torch(tmp_path: Path) -> None:
    for given, (code, shown, imported) in zip(OWN, looked(OWN, tmp_path), strict=True):
        assert code == 0, shown
        assert [name for name in imported if name != "numpy"] == [], given  # which orders compute with


@pytest.mark.parametrize(
    ("name", "model"),
    [
        *(("cnn", CNN), ("denoiser", Denoiser), ("gan", GAN), ("gpt", GPT), ("mlp", MLP), ("moe_gpt", MoEGPT)),
        ("unet", UNet),
    ],
)
def test_a_model_built_by_a_recipe_and_by_its_class_have_the_same_options(name: str, model: type[Any]) -> None:
    declared = inspect.signature(Registry.installed().load("model", name)).parameters
    taken = inspect.signature(model).parameters
    assert {key: option.default for key, option in declared.items()} == {
        key: option.default for key, option in taken.items()
    }


def test_a_file_of_ones_own_that_imports_torch_has_it_without_its_compiler(tmp_path: Path) -> None:
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
def test_a_launch_leaves_files_of_ones_own_to_the_ranks_which_refuse_what_is_wrong_with_them(tmp_path: Path) -> None:
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
