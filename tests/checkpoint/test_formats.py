"""Formats of plugins: initial weights, imports and exports use them, after ddpforge's own formats."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint import conftest
from checkpoint.doubles import checkpoint_of, write
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from support.fake_distributions import forgetting_modules_below, install
from support.forked import refused
from torch import nn

from ddpforge.checkpoint.formats import format_of, named_format, weights_format
from ddpforge.checkpoint.reader import CheckpointReader
from ddpforge.cli import main
from ddpforge.errors import PluginError, UsageError
from ddpforge.ranks.collectives import SingleRank
from ddpforge.strategies.named_state import tensors
from ddpforge.training.initial_weights import load_initial

PAGE = Path(__file__).parents[2] / "docs/extend/format.md"
NPZ = PAGE.read_text().partition("```python\n")[2].partition("```")[0]

_fast_disk, folder = conftest._fast_disk, conftest.folder


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yields a folder with the weights of a small layer, w.npz; the plugin of the documentation is installed."""
    site = tmp_path / "site"
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(site)
    install(site, "npz-format", {"ddpforge.format": {"npz": "npz_format:Npz"}}, modules={"npz_format.py": NPZ})
    np.savez("w.npz", weight=np.full((2, 3), 7.0, np.float32), bias=np.arange(2, dtype=np.float32))
    with forgetting_modules_below(tmp_path):
        yield tmp_path


def test_initial_weights_come_from_the_format_of_a_plugin(site: Path) -> None:
    layer = nn.Linear(3, 2)
    held, aliases = tensors(layer)

    def take(saved: object) -> None:
        for name, one in saved.items():  # type: ignore[attr-defined]
            held[name].data.copy_(one.read())

    load_initial("w.npz", held, aliases, take, SingleRank())
    assert layer.weight.tolist() == [[7.0] * 3] * 2
    assert layer.bias.tolist() == [0.0, 1.0]


def test_import_reads_the_format_of_a_plugin(site: Path) -> None:
    done = CliRunner().invoke(main, ["ckpt", "import", "w.npz", "-o", "imported", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["kind"], found["tensors"]) == ("npz", 2)
    saved = CheckpointReader(Path(found["path"])).state().model
    assert saved["weight"].read().tolist() == [[7.0] * 3] * 2


def test_export_writes_the_format_of_a_plugin(site: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ddpforge.cli.export", raising=False)  # it lists the installed formats
    path = write(folder, checkpoint_of(7))
    done = CliRunner().invoke(main, ["export", str(path), "--format=npz", "--dtype=fp32", "-o", "out.npz"])
    assert done.exit_code == 0, done.output
    with np.load("out.npz") as file:
        assert file["layer.weight"].tolist() == [[7.0] * 5] * 3
        assert sorted(file) == ["layer.bias", "layer.weight", "norm.num_batches_tracked"]
    again = CliRunner().invoke(main, ["export", str(path), "--format", "npz", "-o", "out.npz"])
    assert (again.exit_code, "out.npz exists" in again.stderr) == (2, True)


def test_formats_of_ddpforge_come_first_and_import_no_plugin(site: Path) -> None:
    install(
        site / "site", "broken", {"ddpforge.format": {"a": "broken_format:A"}}, modules={"broken_format.py": "1 / 0"}
    )
    save_file({"a": torch.zeros(1)}, "w.safetensors")
    torch.save({"a": torch.zeros(1)}, "w.pt")
    assert type(weights_format(Path("w.safetensors"))).__name__ == "Safetensors"
    assert type(format_of(Path("w.pt"))).__name__ == "StateDict"
    assert load_file("w.safetensors")["a"].tolist() == [0.0]


def test_a_class_that_is_not_a_format_is_refused_with_its_plugin(site: Path) -> None:
    install(
        site / "site",
        "other",
        {"ddpforge.format": {"odd": "odd_format:Odd"}},
        modules={"odd_format.py": "class Odd: ..."},
    )
    message = refused(PluginError, lambda: named_format("odd"))
    assert "`odd` of other (ddpforge.format) is not a subclass of ddpforge.interfaces.CheckpointFormat" in message


def test_an_unknown_format_is_refused_with_the_known_ones(site: Path) -> None:
    message = refused(UsageError, lambda: named_format("gguf"))
    assert "there is no format `gguf` | known formats: dcp, deepspeed, safetensors, state_dict" in message
