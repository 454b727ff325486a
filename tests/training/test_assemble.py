"""Assembly of a trainer from a recipe, in the order that strategies need."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from support.doubles import Rows
from support.stages import ALONE, dealt
from torch import nn

from ddpforge.checkpoint.manager import Checkpoints
from ddpforge.ranks.writers import WriterGroup
from ddpforge.strategies.ddp import DDP
from ddpforge.strategies.single import Single
from ddpforge.training.assemble import assemble

RECIPE = """
recipe = 2
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


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("strategy", [Single, DDP])
def test_sync_batchnorm_replaces_norms_before_the_optimizer_is_built(
    tmp_path: Path, strategy: type[Single | DDP], enabled: bool
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RECIPE)
    sets = [f"train.sync_batchnorm={str(enabled).lower()}"]
    parts = replace(dealt(path, sets=sets, device="cuda"), strategy=strategy())  # a CPU would be refused
    parts.strategy.setup(parts.recipe.train, ALONE)
    checkpoints = Checkpoints(tmp_path, parts.recipe.checkpoint, peers=WriterGroup.alone(), ranks=ALONE.global_ranks)
    trainer = assemble(parts, ALONE, checkpoints, Rows([]), folder=Path("runs/run"), life=ExitStack())
    norms = [
        module for module in trainer.replica.unwrapped.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    assert len(norms) == 4
    assert [isinstance(norm, nn.SyncBatchNorm) for norm in norms] == [enabled] * 4
    trained = {id(weight) for group in trainer.optimizer.param_groups for weight in group["params"]}
    assert trained == {id(weight) for weight in trainer.replica.unwrapped.parameters()}
