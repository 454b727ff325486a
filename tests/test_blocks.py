"""Which parts of a model are treated one by one, and that recomputing them changes nothing."""

from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models import resnet18

from ddpforge.blocks import find_blocks, rework_blocks
from ddpforge.models.cnn import CNN
from ddpforge.models.gpt import GPT
from ddpforge.recipe.schema import TrainSection


def settings(**options: Any) -> TrainSection:
    return TrainSection.model_validate({"length": "1st", "global_batch": 1} | options)


def small() -> GPT:
    return GPT(vocab_size=8, block_size=4, layers=3, heads=1, width=4, dropout=0.5)


def names(model: nn.Module, *classes: str) -> list[str]:
    found = {id(block) for block in find_blocks(model, classes)}
    return [name for name, module in model.named_modules() if id(module) in found]


def test_a_model_names_its_own_blocks() -> None:
    assert names(small()) == ["blocks.0", "blocks.1", "blocks.2"]


def test_members_that_are_alike_and_have_children_are_blocks() -> None:
    assert names(resnet18()) == [f"layer{stage}.{number}" for stage in (1, 2, 3, 4) for number in (0, 1)]


def test_plain_layers_are_not() -> None:
    assert names(CNN()) == []


def test_a_recipe_names_classes_and_gets_the_outermost() -> None:
    assert names(small(), "Attention") == [f"blocks.{number}.attention" for number in range(3)]
    assert "blocks.0.mlp.0" in names(small(), "Linear")  # subclasses count


@pytest.mark.parametrize(
    ("classes", "said"),
    [
        (["Attention", "Block"], "no Attention outside of the others"),
        (["Blok"], "no Blok; near it are Block"),
        (["GPT"], "no GPT; near it"),
    ],
)
def test_a_class_that_is_not_there(classes: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        find_blocks(small(), classes)


@pytest.mark.parametrize("key", ["activation_checkpointing", "compile_blocks"])
def test_blocks_are_needed_where_something_is_to_be_done_to_them(key: str) -> None:
    with pytest.raises(ValueError, match=rf"train\.{key} needs repeated blocks"):
        rework_blocks([], settings(**{key: True}))


def test_recomputed_blocks_draw_the_same_dropout_and_give_the_same_gradients() -> None:
    kept, recomputed = small(), small()
    recomputed.load_state_dict(kept.state_dict())
    rework_blocks(find_blocks(recomputed, []), settings(activation_checkpointing=True))

    tokens = torch.arange(8).view(2, 4)
    for model in (kept, recomputed):
        torch.manual_seed(0)
        model(tokens).square().sum().backward()
    for one, other in zip(kept.parameters(), recomputed.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)
    assert recomputed.state_dict().keys() == kept.state_dict().keys()
