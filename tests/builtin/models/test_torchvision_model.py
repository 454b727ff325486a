"""The model `torchvision`: heads, options, refusals, pipelines."""

from pathlib import Path

import pytest
import torch
from support.trained import Trained, trained

pytest.importorskip("torchvision")

from support.torch_versions import needs_pipelines

from ddpforge.builtin.models.vision import torchvision_model


def test_head_has_the_number_of_classes() -> None:
    model = torchvision_model(arch="squeezenet1_1", classes=7).eval()
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 7)
    assert model.outputs == 7


def test_resnet18_with_ten_classes_has_its_published_size_minus_990_classes() -> None:
    model = torchvision_model(arch="resnet18", classes=10)
    assert sum(p.numel() for p in model.parameters()) == 11_689_512 - 990 * 513


def test_options_reach_the_builder() -> None:
    model = torchvision_model(arch="squeezenet1_1", classes=10, options={"dropout": 0.25})
    assert [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)] == [0.25]


def test_architecture_with_auxiliary_outputs_returns_logits_only() -> None:
    model = torchvision_model(arch="googlenet", classes=3, options={"init_weights": False})
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 3)


RECIPE = """
recipe = 2
name = "run"
[model]
use = "torchvision"
arch = "resnet18"
classes = 10
[data.train]
use = "./pictures.py:Pictures"
[task]
use = "classification"
[optimizer]
use = "sgd"
lr = 1e-2
[strategy]
use = "{strategy}"
[train]
length = "3st"
global_batch = 8
micro_batch = 4
device = "cpu"
[track]
every = "1st"
"""


PICTURES = """
import torch

class Pictures(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, i): return torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(i)), i % 10
"""


@needs_pipelines
@pytest.mark.full  # tests/strategies/test_pipeline.py has pipelines with BatchNorm
def test_resnet_has_the_same_curve_in_a_pipeline(tmp_path: Path) -> None:
    def under(strategy: str, ranks: int) -> list[Trained]:
        folder = tmp_path / strategy
        folder.mkdir()
        (folder / "pictures.py").write_text(PICTURES)
        return trained(folder, RECIPE.format(strategy=strategy), ranks)

    expected, found = under("ddp", 1)[0], under("pipeline", 2)
    assert found[0].column() == pytest.approx(expected.column(), rel=1e-5)
    assert len(found[0].column()) == 3
    assert sum(one.held for one in found) == 11_689_512 - 990 * 513
    assert min(one.held for one in found) > 2_000_000


def test_error_for_an_unknown_architecture_names_similar_ones() -> None:
    with pytest.raises(ValueError, match=r"no classifier `resnet5`; did you mean .*`resnet50`"):
        torchvision_model(arch="resnet5", classes=10)


def test_detector_is_refused() -> None:
    with pytest.raises(ValueError, match="no classifier `fasterrcnn_resnet50_fpn`"):
        torchvision_model(arch="fasterrcnn_resnet50_fpn", classes=10)


@pytest.mark.parametrize("options", [{"colour": "red"}, {"weights": "DEFAULT"}, {"num_classes": 5}])
def test_options_refused_by_the_builder_are_named(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"cannot build `resnet18`.*{next(iter(options))}"):
        torchvision_model(arch="resnet18", classes=10, options=options)
