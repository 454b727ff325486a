"""Several devices in one process: same results as one device, placement of modules, and refused settings."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ddpforge.builtin.models.gpt import GPT
from ddpforge.errors import StrategyError
from ddpforge.interfaces import Pass
from ddpforge.strategies.single import Single
from ddpforge.testing.ranks import run_ddpforge
from packaging.version import Version
from teaching_parts import ALONE, Training, refused, saved, train
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import AdamW

from ddpforge_teaching import DataParallel, NaiveSplit

ROOT = Path(__file__).parents[1]
BATCHES = torch.arange(48).reshape(6, 2, 4) * 5 % 16


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=16, block_size=4, layers=3, heads=2, width=8)


def training(strategy: Any) -> Training:
    return Training(strategy, gpt, lambda weights: AdamW(weights, lr=0.1), lambda model: model.blocks, clip_norm=0.1)


class Unchecked(DataParallel):
    """DataParallel that also accepts a CPU; without GPUs torch.nn.DataParallel simply calls the model."""

    def unsupported(self, *_: Any) -> Any:
        return ()


# ---------------------------------------------------------------------------------------------- results
@pytest.mark.parametrize("strategy", [NaiveSplit, lambda: NaiveSplit(devices=["cpu"] * 3), Unchecked])
def test_steps_and_state_equal_those_of_one_device_bit_by_bit(strategy: Any) -> None:
    one, several = training(Single()), training(strategy())
    norms = [(one.step(*pair), several.step(*pair)) for pair in BATCHES.split(2)]
    assert several.strategy.contract.shards == ()
    states = one.state(), several.state()
    assert states[0].model.keys() == states[1].model.keys()
    for name, value in states[0].model.items():
        assert torch.equal(value, states[1].model[name])
        for key, entry in states[0].optimizer[name].items():
            assert torch.equal(torch.as_tensor(entry), torch.as_tensor(states[1].optimizer[name][key]))
    assert all(one == several > 0.1 for one, several in norms)


def test_run_resumes_on_several_devices_and_again_on_one() -> None:
    straight = training(Single())
    expected = [straight.step(batch) for batch in BATCHES]
    found, state = [], None
    for strategy, batches in ((Single(), BATCHES[:2]), (NaiveSplit(), BATCHES[2:4]), (Single(), BATCHES[4:])):
        part = training(strategy)
        if state is not None:
            part.replica.load_state(state)
        found += [part.step(batch) for batch in batches]
        state = saved(part.state())
    assert found == expected


# ---------------------------------------------------------------------------------------------- placement
class Rest(nn.Module):
    """Module with a weight of `outside` elements."""

    def __init__(self, outside: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outside))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.sum()


class Chain(nn.Module):
    """Weight of `outside` elements, blocks, one output per sample; `skips`: adds the first activations to each."""

    def __init__(self, blocks: int = 4, outside: int = 1, skips: bool = False) -> None:
        super().__init__()
        self.enter = nn.Linear(1, 4)
        self.rest = Rest(outside)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(blocks))
        self.leave = nn.Linear(4, 1)
        self.skips = skips

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.rest(self.enter(x))
        for block in self.blocks:
            x = block(x) + first if self.skips else block(x)
        out: Tensor = self.leave(x)
        return out


def _apply(module: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
    """Replaces nn.Module._apply, which changes parameters in place; fake tensors do not support that."""
    for each in module.modules() if recurse else [module]:
        for name, parameter in each._parameters.items():
            each._parameters[name] = nn.Parameter(fn(parameter))  # type: ignore[arg-type]
    return module


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a mode of fake tensors, which compute nothing and refuse tensors of different devices."""
    monkeypatch.setattr(nn.Module, "_apply", _apply)
    return FakeTensorMode()


def split(model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
    strategy = NaiveSplit(devices=["cpu:0", "cpu:1"])
    assert strategy.setup(train(), ALONE).device == torch.device("cpu:0")
    return strategy.wrap(model, blocks)


@pytest.mark.parametrize(("outside", "places"), [(1, [0, 0, 1, 1]), (45, [0, 1, 1, 1]), (200, [1, 1, 1, 1])])
def test_devices_hold_equal_shares_and_inputs_move_to_the_blocks(devices: Any, outside: int, places: list[int]) -> None:
    with devices:
        model = Chain(outside=outside)
        split(model, [*model.blocks])
        assert [block.weight.device.index for block in model.blocks] == places  # type: ignore[union-attr]
        assert {model.enter.weight.device.index, model.rest.weight.device.index, model.leave.weight.device.index} == {0}
        assert model(torch.ones(2, 1, device="cpu:0")).device == torch.device("cpu:0")


@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.14"), reason="fake tensors raise another error for two devices"
)
def test_computation_on_two_devices_between_blocks_is_an_error_with_a_hint(devices: Any) -> None:
    def mixes() -> None:
        with devices, Training(NaiveSplit(), gpt, blocks=lambda model: model.blocks).replica.autocast():
            model = Chain(skips=True)
            split(model, [*model.blocks])(torch.ones(2, 1, device="cpu:0"))

    message = refused(StrategyError, mixes)
    assert message.startswith("the model computes with tensors of different devices between its blocks")
    assert message.endswith(
        "set classes of larger modules in train.blocks, so that each block contains such a computation"
    )


def test_empty_device_and_weight_shared_by_two_devices_are_refused() -> None:
    strategy = NaiveSplit(devices=["cpu"] * 3)
    strategy.setup(train(), ALONE)
    model = Chain(blocks=2, outside=200)
    message = refused(StrategyError, lambda: strategy.wrap(model, [*model.blocks]))
    assert message.startswith("2 repeated blocks over 3 devices: no block is left for cpu (number 2)")

    tied = Chain(blocks=3)
    tied.blocks[2].weight = tied.blocks[0].weight  # type: ignore[union-attr]
    message = refused(StrategyError, lambda: strategy.wrap(tied, [*tied.blocks]))
    assert message.startswith("`blocks.0.weight` is shared by parts of the model on different devices")


def test_each_device_has_its_own_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    generators = [torch.Generator(), torch.Generator()]
    monkeypatch.setattr(torch.cuda, "default_generators", generators, raising=False)
    replica = Training(NaiveSplit(), gpt, blocks=lambda model: model.blocks).replica
    replica._others = [torch.device("cuda:1")]

    def compute(module: nn.Module, one: Pass) -> Any:
        one.seed()
        return module(one.batch).sum(), None

    given = Pass(batch=BATCHES[0], seed=lambda: torch.default_generator.manual_seed(7) and None)
    assert len(list(replica.run_microbatches([given], compute, trains=True))) == 1
    assert generators[1].initial_seed() == 8


def test_tensors_outside_of_blocks_move_without_the_blocks() -> None:
    strategy = NaiveSplit(devices=["cpu", "cpu"])
    strategy.setup(train(), ALONE)
    strategy.devices[0] = torch.device("meta")
    model = Chain()
    del model.rest, model.enter, model.leave
    model.register_buffer("own", torch.ones(2), persistent=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategy, "_places", lambda *_: [1] * 4)
        strategy.wrap(model, [*model.blocks])
    assert model.get_buffer("own").device.type == "meta"
    assert {weight.device.type for weight in model.parameters()} == {"cpu"}
    assert model.state_dict().keys() == dict(model.named_parameters()).keys()


def test_recipe_with_naive_split_has_the_losses_of_one_device(tmp_path: Path) -> None:
    def losses(use: str) -> list[float]:
        recipe = str(ROOT / "recipes/gpt-split.toml")
        settings = [f"strategy.use={use}", f"name={use}", "train.length=3st", "track.every=1st", "train.device=cpu"]
        done = run_ddpforge("run", recipe, *(f"--set={each}" for each in settings), cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("is for teaching and comparison" in done.stderr) == (use == "naive_split")
        rows = [json.loads(line) for line in (tmp_path / "runs" / use / "metrics.jsonl").read_text().splitlines()]
        return [row["train/loss"] for row in rows if "train/loss" in row]

    found = losses("naive_split")
    assert len(found) == 3
    assert found == losses("single")


# ---------------------------------------------------------------------------------------------- refused settings
@pytest.mark.parametrize(
    ("strategy", "options", "ranks", "device", "key", "says"),
    [
        (NaiveSplit(), {}, 2, "cpu", "strategy.use", 'set strategy.use = "ddp" or "fsdp"'),
        (DataParallel(), {}, 2, "cuda", "strategy.use", 'set strategy.use = "ddp" or "fsdp"'),
        (DataParallel(), {}, 1, "cpu", "strategy.use", "copies the model to GPUs, but this run is on cpu"),
        (
            NaiveSplit(devices=["cuda:0"]),
            {},
            1,
            "cpu",
            "strategy.devices",
            "lists cuda:0, but this run is on cpu",
        ),
        (NaiveSplit(devices=["cpu"]), {}, 1, "cuda", "strategy.devices", "lists cpu, but this run is on cuda"),
        (DataParallel(devices=["cuda:1", "cuda:1"]), {}, 1, "cuda", "strategy.devices", "lists a GPU twice"),
        (NaiveSplit(), {"compile": "default"}, 1, "cpu", "train.compile", "for one device"),
        (DataParallel(), {"activation_checkpointing": True}, 1, "cuda", "train.activation_checkpointing", "no effect"),
        (DataParallel(), {"sync_batchnorm": True}, 1, "cuda", "train.sync_batchnorm", "has no effect on the copies"),
    ],
)
def test_unsupported_settings_are_refused_before_training(
    strategy: Any, options: dict[str, Any], ranks: int, device: str, key: str, says: str
) -> None:
    (refusal,) = strategy.unsupported(train(**options), ranks, device)
    assert refusal.key == key
    assert says in " | ".join([refusal.message, *refusal.hints])


def test_missing_gpu_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    message = refused(StrategyError, lambda: NaiveSplit(devices=["cuda:0", "cuda:3"]).setup(train(), ALONE))
    assert message.startswith("strategy.devices lists cuda:3, but there is 1 GPU")


@pytest.mark.parametrize("strategy", [NaiveSplit(), Unchecked()])
def test_warning_names_the_strategy_to_use_instead(strategy: Any, caplog: pytest.LogCaptureFixture) -> None:
    strategy.setup(train(), ALONE)
    (warning,) = caplog.messages
    assert warning.startswith(f'strategy.use = "{strategy.name}" is for teaching and comparison: ')
    assert '"fsdp"' in warning or '"ddp"' in warning
