"""The parts of a recipe are put together in the order that strategies need."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from doubles import Rows
from torch import nn

from ddpforge.checkpoint.manager import Checkpoints
from ddpforge.components.registry import Registry
from ddpforge.interfaces import World
from ddpforge.ranks.collectives import Alone
from ddpforge.ranks.writers import Peers
from ddpforge.recipe import load_recipe
from ddpforge.strategies.ddp import DDP
from ddpforge.strategies.single import Single
from ddpforge.training.assemble import assemble
from ddpforge.training.building import build_data_and_model
from ddpforge.training.foreseeing import foresee
from ddpforge.training.parts import Parts

RECIPE = """
recipe = 1
name = "run"
[model]
use = "cnn"
[data.train]
use = "digits"
split = "train"
[task]
use = "classification"
[optimizer]
use = "sgd"
lr = 0.1
[train]
length = "4st"
global_batch = 8
[checkpoint]
every = "4st"
"""
ALONE = World(all=Alone(), data=Alone(), device=torch.device("cpu"), local_rank=0)


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("strategy", [Single, DDP])
def test_statistics_are_those_of_all_ranks_where_the_recipe_asks_for_it(
    tmp_path: Path, strategy: type[Single | DDP], asked: bool
) -> None:
    path, registry = tmp_path / "run.toml", Registry.installed()
    path.write_text(RECIPE)
    loaded = load_recipe(str(path), sets=[f"train.sync_batchnorm={str(asked).lower()}"], registry=registry)
    parts = Parts(loaded, registry)
    foresee(parts, ranks=1, device="cuda")  # a CPU would be refused
    parts.built.strategy = strategy()
    parts.strategy.setup(loaded.recipe.train, ALONE)
    build_data_and_model(parts)
    parts.report()
    checkpoints = Checkpoints(tmp_path, loaded.recipe.checkpoint, peers=Peers.alone(), ranks=ALONE.all)
    trainer = assemble(parts, ALONE, checkpoints, Rows([]), folder=Path("runs/run"), life=ExitStack())
    norms = [module for module in trainer.replica.bare.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    assert len(norms) == 4
    assert [isinstance(norm, nn.SyncBatchNorm) for norm in norms] == [asked] * 4
    trained = {id(weight) for group in trainer.optimizer.param_groups for weight in group["params"]}
    assert trained == {id(weight) for weight in trainer.replica.bare.parameters()}
