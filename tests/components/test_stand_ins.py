"""Looks without libraries: they show what looks with them show, and import none."""

import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Union, get_args

import pytest
import torch  # so that every look in this process is one with libraries
from click.testing import CliRunner

from ddpforge.cli import main
from ddpforge.components import stand_ins
from ddpforge.components.registry import Registry
from ddpforge.components.stand_ins import NeedsLibraries, look
from ddpforge.recipe.bundled import bundled

HEAVY = ("accelerate", "deepspeed", "numpy", "safetensors", "torch", "torch._dynamo", "torchvision", "wandb")
"""What takes long to import; with torch come numpy and much else."""

LOOKS = [
    [command, name]
    for command in ("check", "show")
    for name in bundled()
    if name != "distil-digits"  # whose task is built with its teacher, a model
]
LOOKS += [
    ["plugins", "show", entry.name, "--kind", entry.kind]
    for entry in Registry.installed().entries()
    if entry.distribution == "ddpforge"
]
LOOKS += [
    ["show", "digits", "--json"],
    ["show", "gpt-1-node", "--ranks=8"],
    ["show", "digits", "strategy.use=fsdp", "strategy.replicas=3", "--ranks=2"],
    ["check", "digits", "strategy.use=fsdp", "train.global_batch=7", "--ranks=2"],
    ["check", "digits", "train.sync_batchnorm=true", "--device=cpu"],
    ["check", "digits", "optimizer.lr=-1"],
    ["check", "digits", "data.train.use=nothing", "optimiser.lr=1"],
    ["check", "digits", "callbacks.early_stopping.metric=eval/nothing"],
    ["check", "digits", "--no-import", "model.use=./nowhere.py:Net"],
    ["runs", "ls"],
    ["recipes", "ls"],
    ["plugins", "list"],
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


@pytest.mark.slow
def test_looks_import_nothing_heavy_and_show_what_looks_with_torch_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for given, (code, shown, imported) in zip(LOOKS, looked(LOOKS, tmp_path), strict=True):
        again = CliRunner().invoke(main, given)
        assert (imported, given, code, shown) == ([], given, again.exit_code, again.output)


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
    (tmp_path / "net.py").write_text("import torch\n\n\nclass Net(torch.nn.Linear):\n    pass\n")
    own = ["launch", "digits", "--nproc=2", "model.use=./net.py:Net", "model.size=3"]
    ((code, shown, imported),) = looked([[*own, "--dry-run"]], tmp_path)
    assert (code, imported) == (0, [])
    assert shown.rstrip().endswith("model.size=3")

    ended = subprocess.run([sys.executable, "-m", "ddpforge", *own], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.count("error: unknown key `size` in [model]") == 1
    assert "nothing was started" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "runs").exists()


# ---------------------------------------------------------------------------------------------- what names do
@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A library of which there are only names."""
    monkeypatch.setitem(sys.modules, "library", library := stand_ins._Module("library"))
    return library


def test_names_are_passed_on_derived_from_and_annotate(names: Any) -> None:
    class Net(names.nn.Module):  # type: ignore[misc]
        def __init__(self, width: int) -> None: ...

    exec("made = names.seed(3)[1]", {"names": names})  # as at the top of a module
    assert names.nn.Module is names.nn.Module
    assert issubclass(Net, names.nn.Module)
    assert not issubclass(int, names.nn.Module)
    assert get_args(Annotated[names.Tensor, 1])[0] is names.Tensor
    assert eval("names.Tensor | None", {"names": names}) == Union[names.Tensor, None]  # noqa: UP007
    assert {names.float32: 1}[names.float32] == 1


@pytest.mark.parametrize(
    "use",
    [
        "names.zeros(3)",
        "names.pi + 1",
        "str(names.float32)",
        "bool(names.is_available)",
        "[*names.dtypes]",
        "names.float == names.float32",
        "names.__version__",
        "names.Tensor.__name__",
        "issubclass(Net, names.Tensor)",
        "Net()",
        "Net.parameters",
        "inspect.getdoc(Net)",
    ],
)
def test_whatever_asks_more_of_a_name_needs_the_library(names: Any, use: str) -> None:
    class Net(names.nn.Module): ...  # type: ignore[misc]

    given = {"names": names, "Net": Net, "inspect": inspect}
    exec(f"def function():\n    return {use}", given)
    with pytest.raises(NeedsLibraries):
        given["function"]()  # type: ignore[operator]


def test_a_look_is_taken_again_with_libraries_where_names_will_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    def at() -> float:
        import wave  # of the standard library

        import xxhash

        taken.append(type(xxhash))
        return wave.WAVE_FORMAT_PCM + xxhash.xxh64_intdigest(b"")

    for name in [name for name in sys.modules if name.partition(".")[0] in ("torch", "xxhash")]:
        monkeypatch.delitem(sys.modules, name)
    assert look(at) == 1 + 0xEF46DB3751D8E999
    assert taken == [stand_ins._Module, ModuleType]
    assert type(sys.modules["xxhash"]) is ModuleType


def test_a_library_that_is_missing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def at() -> str:
        try:
            import no_such_library  # noqa: F401
        except ModuleNotFoundError as error:
            return str(error)
        return ""

    monkeypatch.delitem(sys.modules, "torch")
    assert look(at) == "No module named 'no_such_library'"


def test_torch_is_what_it_was() -> None:
    assert sys.modules["torch"] is torch
    assert type(torch) is ModuleType
