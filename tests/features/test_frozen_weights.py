"""`train.freeze` before training, and frozen weights that checkpoints omit."""

import copy
from typing import Any

import pytest
import torch
from support.doubles import Elsewhere, Plain
from support.saved_tensors import Saved
from torch import nn

from ddpforge.errors import CheckpointError
from ddpforge.features.frozen_weights import checksum, fill_frozen, without_frozen, without_state_of_frozen
from ddpforge.interfaces import CanonicalState, TensorShard
from ddpforge.ranks.collectives import SingleRank
from ddpforge.training.parameter_groups import freeze, freeze_batchnorm_statistics


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1), nn.BatchNorm1d(1))


def test_only_parameters_that_match_a_glob_are_frozen() -> None:
    model = net()
    freeze(model, ["0.*", "1.weight"])
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained == ["1.bias", "2.weight", "2.bias", "3.weight", "3.bias"]
    with pytest.raises(ValueError, match=r"train.freeze: `4.\*` matches no parameter; similar names:"):
        freeze(model, ["4.*"])


def test_an_exclusion_glob_unfreezes_parameters() -> None:
    model = net()
    freeze(model, ["*", "!3.*", "3.bias"])
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == ["3.weight"]
    with pytest.raises(
        ValueError, match=r'train.freeze: "!3.\*" is the first entry, and excludes nothing; to freeze all others'
    ):
        freeze(net(), ["!3.*"])
    with pytest.raises(ValueError, match=r"train.freeze: `4.\*` matches no parameter"):
        freeze(net(), ["*", "!4.*"])


def test_statistics_of_an_excluded_batchnorm_are_updated() -> None:
    model = net()
    freeze_batchnorm_statistics(model, ["*", "!3.*"])
    model.train()
    assert [module.training for module in model] == [True, False, True, True]


@pytest.mark.parametrize("word", ["norm", "bias", "1d", "2d", "embedding"])
def test_words_for_parameter_groups_are_not_accepted_in_freeze(word: str) -> None:
    """With such a word, a BatchNorm would be frozen and its statistics would still be updated."""
    with pytest.raises(ValueError, match=f"train.freeze: `{word}` matches no parameter; similar names: [0-3]"):
        freeze(net(), [word])


def test_any_name_of_a_tied_parameter_freezes_it() -> None:
    model = net()
    model.tied = model[0].weight
    freeze(model, ["tied"])
    assert not model[0].weight.requires_grad  # type: ignore[union-attr]


def test_statistics_of_a_completely_frozen_batchnorm_are_constant() -> None:
    """Holds for copies, too: the check of the first loss uses one."""
    model = net()
    freeze_batchnorm_statistics(model, ["0.*", "1.*", "3.weight"])
    for held in (model, copy.deepcopy(model)):
        held.train()
        held(torch.tensor([[1.0, 2.0], [3.0, 5.0]]))
        assert held[1].running_mean.tolist() == [0.0, 0.0]  # type: ignore[union-attr, operator]
        assert held[3].running_mean.item() != 0.0  # type: ignore[union-attr, operator]
        assert [module.training for module in held] == [True, False, True, True]


# ---------------------------------------------------------------------------------------------- checkpoints
def state_of(model: nn.Module) -> tuple[Plain, CanonicalState[Any]]:
    replica = Plain().holding(model, torch.optim.SGD(model.parameters()))
    return replica, without_frozen(replica.state(), replica, SingleRank())


def frozen(value: float = 1.0) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        model[0].weight.fill_(value)
    freeze(model, ["0.*"])
    return model


def test_checkpoints_omit_frozen_weights_and_verify_them_on_resume() -> None:
    replica, state = state_of(frozen())
    assert set(state.model) == {"1.weight"}
    assert state.scalars == {"scale": 3.0, "left_out.magnitude": 2.0, "left_out.squares": 2.0}
    on_disk: Any = CanonicalState({name: Saved(x) for name, x in state.model.items()}, {}, scalars=state.scalars)
    found = fill_frozen(on_disk, replica, SingleRank())
    assert set(found.model) == {"0.weight", "1.weight"}
    own = torch.ones(1, 2)
    found.model["0.weight"].read_into(TensorShard.whole(own).region, own)
    assert own.tolist() == [[1.0, 1.0]]
    with pytest.raises(CheckpointError, match="omits the frozen weights, and the frozen weights of the model differ"):
        fill_frozen(on_disk, state_of(frozen(1.001))[0], SingleRank())


@pytest.mark.parametrize("trained", [[True, True], [False, False]])
def test_the_set_of_frozen_weights_may_change_on_resume(trained: list[bool]) -> None:
    """If an omitted weight is trained now, or a saved weight is frozen, the state is completed nevertheless."""
    _, state = state_of(frozen())
    on_disk: Any = CanonicalState({name: Saved(x) for name, x in state.model.items()}, {}, scalars=state.scalars)
    model = frozen()
    for parameter, trains in zip(model.parameters(), trained, strict=True):
        parameter.requires_grad_(trains)
    replica = Plain().holding(model, torch.optim.SGD(model.parameters()))
    assert len(replica.weights.frozen()) == trained.count(False)
    assert set(fill_frozen(on_disk, replica, SingleRank()).model) == {"0.weight", "1.weight"}


def test_optimizer_state_of_frozen_weights_is_dropped_on_resume() -> None:
    """State of an unknown parameter is kept; loading it is refused later."""
    replica, _ = state_of(frozen())
    known: Any = {"0.weight": {"step": 1}, "1.weight": {"step": 2}, "gone": {"step": 3}}
    found = without_state_of_frozen(CanonicalState({}, known), replica)
    assert found.optimizer == {"1.weight": {"step": 2}, "gone": {"step": 3}}


def test_a_complete_checkpoint_is_returned_unchanged() -> None:
    replica, _ = state_of(frozen())
    state: Any = CanonicalState({"0.weight": Saved(torch.zeros(1, 2))}, {}, scalars={"scale": 3.0})
    assert fill_frozen(state, replica, SingleRank()) is state


def test_the_checksum_is_the_same_for_whole_and_sharded_weights() -> None:
    """Each element counts once: the second of two ranks has a replica of the weight, or its other half."""
    weight = torch.tensor([1.0, -2.0])
    whole = checksum({"w": TensorShard.whole(weight, replica=1, replicas=2)}, Elsewhere(2, 1))
    assert whole == {"magnitude": 1.5, "squares": 2.5}
    assert checksum({"w": weight}, Elsewhere(2, 1)) == whole
    assert checksum({"w": weight}, SingleRank()) == {"magnitude": 3.0, "squares": 5.0}
