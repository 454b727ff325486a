"""Results, shards, state and refusals of DeepSpeed under each stage, with values that can be checked by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.forked import Training, in_ranks, refused, saved, train
from support.saved_tensors import Saved
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from ddpforge.errors import CheckpointError, StrategyError, UsageError
from ddpforge.interfaces import CanonicalState, FlatRange, TensorShard
from ddpforge.ranks.join import join
from ddpforge.strategies.ddp import DDP
from ddpforge.strategies.deepspeed import DeepSpeed

pytestmark = pytest.mark.usefixtures("deepspeed")
each_stage = pytest.mark.parametrize("stage", [1, 2, 3])
# 2 has the code of 1
stages_1_and_3 = pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.full), 3])


class Dot(nn.Module):
    """Computes w·x + v·x from zeros: both gradients are x. Two ranks share six elements; a weight has three."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("mean", torch.zeros(2))
        self.uses = "wv"

    def forward(self, x: Tensor) -> Tensor:
        parts = [{"w": self.w, "v": self.v, "f": self.frozen}[name] * x for name in self.uses]
        return torch.stack(parts).sum(0)


def momentum(weights: Any) -> SGD:
    return SGD([weight for weight in weights if weight.requires_grad], lr=1.0, momentum=0.5)


def begin(stage: Any, optimizer: Callable[[Any], Any] = momentum, build: Any = Dot, **options: Any) -> Training:
    return Training(DeepSpeed(stage=stage), build, optimizer, **options)


def whole(parts: list[dict[str, TensorShard]]) -> dict[str, list[float]]:
    """Returns full tensors from the shards of all ranks; each element must occur once."""
    found: dict[str, Tensor] = {}
    for held in parts:
        for name, part in held.items():
            assert isinstance(part.region, FlatRange)
            flat = found.setdefault(name, torch.full(part.shape, torch.nan)).view(-1)
            mine = flat[part.region.start : part.region.stop]
            assert mine.isnan().all()
            mine.copy_(part.tensor)
    return {name: tensor.flatten().tolist() for name, tensor in found.items()}


def parts_of(training: Training) -> dict[str, TensorShard]:
    """Returns copies of this rank's shards of the weights."""
    parts = training.replica.weights.shards()
    return {name: TensorShard(part.tensor.clone(), part.shape, part.region) for name, part in parts.items()}


# ---------------------------------------------------------------------------------------------- the step
@each_stage
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_mean_gradient_over_ranks_is_clipped_by_the_norm_over_all_shards(stage: int, precision: str) -> None:
    shares = {None: 1.0, 98**0.5 / 2: 0.5, 20.0: 1.0}

    def rank(number: int) -> Any:
        plain = lambda weights: SGD([w for w in weights if w.requires_grad], lr=1.0)  # noqa: E731
        one, other = torch.tensor([4.0, 0.0, 6.0]) * number, torch.tensor([0.0, 6.0, 6.0]) * number
        found = []
        for clip in shares:
            training = begin(stage, plain, clip_norm=clip, precision=precision)
            norms = [training.step(one, other) for _ in range(2)]
            found.append((norms, parts_of(training)))
        return found

    for share, found in zip(shares.values(), zip(*in_ranks(2, rank), strict=True), strict=True):
        assert [norms for norms, _ in found] == [[pytest.approx(98**0.5)] * 2] * 2  # (4 + 9 + 36) · 2
        expected = [pytest.approx(-2 * share * each, rel=1e-5) for each in (2.0, 3.0, 6.0)]
        assert whole([parts for _, parts in found]) == {"w": expected, "v": expected}


@pytest.mark.parametrize(("stage", "asked", "holds"), [(1, None, 6), (3, None, 6), (2, 4, 4), (2, 7, 7)])
def test_the_gradient_buffer_is_not_larger_than_the_gradients(stage: int, asked: int | None, holds: int) -> None:
    """Dot trains six elements. DeepSpeed's default buffer would hold 500 million elements: 2 GB on every rank."""
    extra = {"zero_optimization": {"reduce_bucket_size": asked}} if asked else {}

    def rank(_: int) -> Any:
        training = Training(DeepSpeed(stage=stage, extra=extra), Dot, momentum)
        norms = [training.step(torch.ones(3)) for _ in range(2)]
        return training.replica.engine.optimizer.reduce_bucket_size, norms

    assert in_ranks(2, rank) == [(holds, [pytest.approx(6**0.5)] * 2)] * 2


@each_stage
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_nonfinite_gradient_on_one_rank_skips_the_step_on_all(stage: int, precision: str) -> None:
    def rank(number: int) -> Any:
        training = begin(stage, precision=precision)
        norms = [training.step(torch.full((3,), 1.0 if step != 1 or number else torch.inf)) for step in range(3)]
        scale = training.replica.precision.state().get("loss_scale")
        return norms, training.replica.overflowed(), scale, parts_of(training)

    found = in_ranks(2, rank)
    fp16 = precision == "fp16"
    for norms, excused, scale, _ in found:
        assert (norms[0], norms[2]) == (pytest.approx(6**0.5), pytest.approx(6**0.5))
        assert not torch.tensor(norms[1]).isfinite()
        assert (excused, scale) == ((True, 2.0**15) if fp16 else (False, None))
    assert whole([each[-1] for each in found]) == {"w": [-2.5] * 3, "v": [-2.5] * 3}


def test_the_loss_scale_is_restored() -> None:
    def rank(number: int) -> Any:
        training = begin(2, precision="fp16")
        scale = {"loss_scale": 8.0, "loss_scale_growth_tracker": 5}
        training.replica.load_state(CanonicalState({}, {}, scalars=scale), partial=True)
        norm = training.step(torch.ones(3))
        return norm, training.replica.precision.state()

    state = {"loss_scale": 8.0, "loss_scale_growth_tracker": 6}
    assert in_ranks(2, rank) == [(pytest.approx(6**0.5), state)] * 2


def test_the_engine_uses_the_restored_loss_scale_in_the_next_step() -> None:
    """Gradients of 4 overflow with a loss scale of 2**127, and not with the scale of a new run."""

    def rank(number: int) -> Any:
        training = begin(2, precision="fp16")
        scale = {"loss_scale": 2.0**127, "loss_scale_growth_tracker": 5}
        training.replica.load_state(CanonicalState({}, {}, scalars=scale), partial=True)
        norm = training.step(torch.full((3,), 4.0))
        return torch.tensor(norm).isfinite().item(), training.replica.overflowed(), training.replica.precision.state()

    state = {"loss_scale": 2.0**126, "loss_scale_growth_tracker": 0}
    assert in_ranks(2, rank) == [(False, True, state)] * 2


@stages_1_and_3
@pytest.mark.parametrize(("uses", "said"), [("w", "`v`"), ("", "`w` and 1 more")])
def test_a_weight_unused_in_one_micro_batch_is_refused(stage: int, uses: str, said: str) -> None:
    """Holds even if another micro-batch used the weight, and in the second step."""

    def rank(number: int) -> Any:
        training = begin(stage)
        training.step(torch.ones(3), torch.ones(3))
        training.backward(torch.ones(3))
        bare = training.replica.unwrapped
        assert isinstance(bare, Dot)
        bare.uses = uses or "f"
        x = torch.ones(3, requires_grad=True)
        return refused(StrategyError, lambda: training.backward(x))

    for number, message in enumerate(in_ranks(2, rank)):
        assert message.startswith(f"parameter {said} got no gradient on rank {number}: forward did not use it for the")
        assert "if no sample uses it: remove it" in message
        assert "call that part in every forward pass, also with an empty input of 0 rows" in message


@pytest.mark.parametrize("stage", [1, 2])
def test_a_weight_that_is_unfrozen_later_is_refused(stage: int) -> None:
    def rank(number: int) -> Any:
        training = begin(stage)
        training.step(torch.ones(3))
        training.replica.unwrapped.get_parameter("frozen").requires_grad_()
        return refused(StrategyError, lambda: training.backward(torch.ones(3)))

    for message in in_ranks(2, rank):
        assert message.startswith("parameter `frozen` was frozen when the model was wrapped")


def test_the_loss_is_checked_in_every_backward_pass() -> None:
    def rank(number: int) -> Any:
        replica = begin(1).replica
        return refused(UsageError, lambda: replica.backward(torch.ones(2)))

    assert in_ranks(2, rank)[0].startswith("the task's loss has the shape [2]")


class Perturbing(SGD):
    """Multi-pass optimizer that records the norms that it receives; `perturb` adds the gradient."""

    def __init__(self, weights: Any) -> None:
        super().__init__([weight for weight in weights if weight.requires_grad], lr=1.0)
        self.seen: list[float] = []

    @torch.no_grad()
    def perturb(self, norm: float) -> None:
        self.seen.append(norm)
        for group in self.param_groups:
            for weight in group["params"]:
                weight.add_(weight.grad)

    def restore(self) -> None: ...


@stages_1_and_3
def test_perturb_changes_the_weights_of_forward_passes_and_does_not_clip(stage: int) -> None:
    def rank(number: int) -> Any:
        training = begin(stage, Perturbing, clip_norm=6**0.5 / 2)
        training.backward(torch.ones(3))
        explored = training.replica.perturb(training.optimizer).item()
        with torch.no_grad(), training.replica.forward():
            used = training.model(torch.ones(3)).tolist()
        updated = training.step(torch.ones(3))
        assert isinstance(training.optimizer, Perturbing)
        return (explored, updated, used, training.optimizer.seen), parts_of(training)

    found = in_ranks(2, rank)
    norm = pytest.approx(6**0.5)
    assert [told for told, _ in found] == [(norm, norm, [2.0] * 3, [norm])] * 2
    half = [pytest.approx(0.5, rel=1e-5)] * 3  # 1 minus the clipped gradient
    assert whole([parts for _, parts in found]) == {"w": half, "v": half}


# ---------------------------------------------------------------------------------------------- shards
class ByRank(Dot):
    def __init__(self, rank: int) -> None:
        super().__init__()
        for tensor in (*self.parameters(), *self.buffers()):
            tensor.data = torch.full((len(tensor), 2), 1.0 + rank)[:, 0]  # with gaps in memory


@stages_1_and_3
def test_all_ranks_start_with_rank_0s_weights_and_buffers(stage: int) -> None:
    def rank(number: int) -> Any:
        training = begin(stage, build=lambda: ByRank(number))
        with torch.no_grad(), training.replica.forward():
            used = training.model(torch.ones(3)).tolist()
        bare = training.replica.unwrapped
        return used, bare.get_buffer("mean").tolist(), parts_of(training)

    found = in_ranks(2, rank)
    assert [each[:2] for each in found] == [([2.0] * 3, [1.0, 1.0])] * 2
    assert whole([each[2] for each in found]) == {"w": [1.0] * 3, "v": [1.0] * 3}


@stages_1_and_3
def test_mark_changed_applies_writes_to_shards(stage: int) -> None:
    def rank(number: int) -> Any:
        training = begin(stage)
        weights = training.replica.weights
        for part in weights.shards().values():
            assert isinstance(part.region, FlatRange)
            part.tensor.copy_(torch.arange(part.region.start, part.region.stop))
        frozen = weights.frozen()["frozen"]
        if stage == 3:
            frozen.tensor.fill_(5.0)
        weights.mark_changed()
        own = {name: weights.elements(name, part.region).tolist() for name, part in weights.shards().items()}
        bare = training.replica.unwrapped
        assert isinstance(bare, Dot)
        bare.uses = "wvf" if stage == 3 else "wv"
        with torch.no_grad(), training.replica.forward():
            used = training.model(torch.ones(3)).tolist()
        return own == {name: part.tensor.tolist() for name, part in weights.shards().items()}, used

    more = 5.0 if stage == 3 else 0.0
    assert in_ranks(2, rank) == [(True, [more, 2.0 + more, 4.0 + more])] * 2


@stages_1_and_3
def test_callback_writes_outside_of_shards_are_refused(stage: int) -> None:
    def rank(number: int) -> Any:
        training = begin(stage)
        bare = training.replica.unwrapped

        def write(name: str) -> None:
            with training.replica.weights.callback_guard():
                bare.get_parameter(name).data.mul_(0.5)

        trained = refused(StrategyError, lambda: write("w"))
        if stage < 3:
            write("frozen")
            return trained, "frozen"
        return trained, refused(StrategyError, lambda: write("frozen"))

    for trained, frozen in in_ranks(2, rank):
        assert trained.startswith("a callback writes into parameter `w` of the model")
        assert "frozen" in frozen


# ---------------------------------------------------------------------------------------------- checkpoints
def adamw(weights: Any) -> AdamW:
    return AdamW([weight for weight in weights if weight.requires_grad], lr=0.1)


@stages_1_and_3
def test_states_are_interchangeable_with_ddp(stage: int) -> None:
    def rank(number: int) -> Any:
        plain, sharded = Training(DDP(), Dot, adamw), begin(stage, adamw)
        for value in (1.0, 2.0):
            plain.step(torch.full((3,), value))
        begun = saved(plain.state())
        sharded.replica.load_state(begun)
        for training in (plain, sharded):
            for value in (3.0, -1.0):
                training.step(torch.full((3,), value))
        expected, state = plain.state(), sharded.state()
        entries = {
            f"{key} of {name}": (value, expected.optimizer[name][key])
            for name, entry in state.optimizer.items()
            for key, value in entry.items()
        }
        assert {float(value) for key, (value, _) in entries.items() if key.startswith("step")} == {4.0}
        held = {key: value for key, (value, _) in entries.items() if isinstance(value, TensorShard)}
        return (
            {name: value for name, value in state.model.items() if name in ("w", "v")} | held,
            {name: expected.model[name].tolist() for name in ("w", "v")},
            {key: entries[key][1].tolist() for key in held},
            sorted(state.model),
        )

    found = in_ranks(2, rank)
    weights, moments = found[0][1], {**found[0][2], **found[1][2]}
    put_together = whole([each[0] for each in found])
    assert set(put_together) == {"w", "v", *(f"{key} of {name}" for key in ("exp_avg", "exp_avg_sq") for name in "wv")}
    for name, values in {**weights, **moments}.items():
        assert put_together[name] == pytest.approx(values, rel=1e-5), name
    assert found[0][3] == ["frozen", "mean", "v", "w"]


@stages_1_and_3
def test_a_partial_state_with_optimizer_state_restores_it(stage: int) -> None:
    def rank(number: int) -> Any:
        plain, training = Training(DDP(), Dot, momentum), begin(stage)
        plain.step(torch.ones(3))
        kept = saved(plain.state())
        for _ in range(2):
            training.step(torch.ones(3))  # the momentum is 1.5 in the end
        training.replica.load_state(CanonicalState(kept.model, kept.optimizer), partial=True)
        training.step(torch.ones(3))
        return parts_of(training)

    assert whole(in_ranks(1, rank)) == {"w": [-2.5] * 3, "v": [-2.5] * 3}


@stages_1_and_3
def test_loading_some_weights_keeps_the_others(stage: int) -> None:
    def rank(number: int) -> Any:
        training = begin(stage)
        training.step(torch.ones(3))
        partial = CanonicalState({"v": Saved(torch.tensor([5.0, 6.0, 7.0]))}, {})
        training.replica.load_state(partial, partial=True)
        with torch.no_grad(), training.replica.forward():
            used = training.model(torch.ones(3)).tolist()
        training.step(torch.ones(3))
        return used, parts_of(training)

    found = in_ranks(2, rank)
    assert [used for used, _ in found] == [[4.0, 5.0, 6.0]] * 2
    assert whole([parts for _, parts in found]) == {"w": [-2.5] * 3, "v": [3.5, 4.5, 5.5]}  # momentum is unchanged


def state(**changes: Any) -> CanonicalState[Any]:
    """Returns a state that fits `Dot`, of SGD with momentum."""
    weights = {name: Saved(torch.zeros(3)) for name in ("w", "v", "frozen")} | {"mean": Saved(torch.zeros(2))}
    momenta: dict[str, Any] = {name: {"momentum_buffer": Saved(torch.ones(3))} for name in "wv"}
    return CanonicalState(weights | changes.pop("model", {}), momenta | changes)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"model": {"more": Saved(torch.ones(1))}}, "the checkpoint is of another model (not in the model: more)"),
        ({"model": {"w": Saved(torch.ones(4))}}, "`w` is float32 [3] in the model and float32 [4] in the checkpoint"),
        ({"model": {"mean": Saved(torch.ones(3))}}, "`mean` is float32 [2] in the model and float32 [3]"),
        ({"frozen": {"momentum_buffer": Saved(torch.ones(3))}}, "the checkpoint holds optimizer state of `frozen`"),
        ({"v": {}}, "the checkpoint's optimizer has nothing for `v` and `momentum_buffer` for `w`"),
        ({"v": {"momentum_buffer": Saved(torch.ones(2))}}, "`momentum_buffer of v` is float32 [3] in the model"),
        (
            {name: {"momentum_buffer": Saved(torch.ones(3)), "step": 3 + (name == "v")} for name in "wv"},
            "the checkpoint's optimizer has `step` 4 for `v` and 3 for `w`",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused(stage: int, wrong: dict[str, Any], said: str) -> None:
    def rank(number: int) -> Any:
        training = begin(stage)
        return refused(CheckpointError, lambda: training.replica.load_state(state(**wrong)))

    for message in in_ranks(2, rank):
        assert message.startswith(said)


@stages_1_and_3
def test_a_state_without_optimizer_state_resets_the_optimizer(stage: int) -> None:
    def rank(number: int) -> Any:
        training = begin(stage)
        training.step(torch.ones(3))
        none = CanonicalState(state().model, {})
        training.replica.load_state(none)
        training.step(torch.ones(3))
        return parts_of(training)

    assert whole(in_ranks(2, rank)) == {"w": [-1.0] * 3, "v": [-1.0] * 3}


def test_optimizer_state_that_is_not_element_wise_is_refused() -> None:
    def rank(number: int) -> Any:
        training = begin(2)
        training.step(torch.ones(3))
        training.state()
        (entry,) = training.optimizer.state.values()
        entry["rows"] = torch.zeros(2)
        return refused(CheckpointError, training.state)

    for message in in_ranks(2, rank):
        assert message.startswith("the optimizer keeps `rows` in the shape [2] for a flat piece of ")


# ---------------------------------------------------------------------------------------------- refusals
class Given(Dot):
    def __init__(self, more: nn.Parameter) -> None:
        super().__init__()
        self.more = more


def _more(*shape: int, dtype: torch.dtype = torch.float32, trained: bool = True) -> Callable[[], nn.Module]:
    return lambda: Given(nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=trained))


@pytest.mark.parametrize(
    ("build", "stages", "said"),
    [
        (_more(0), (1, 2, 3), "parameter `more` has no elements"),
        (_more(0, trained=False), (3,), "parameter `more` has no elements"),
        (_more(2, dtype=torch.float64), (1, 2, 3), "parameter `more` is float64, but DeepSpeed stores and updates"),
        (_more(2, dtype=torch.bfloat16), (1, 2, 3), "parameter `more` is bfloat16, and DeepSpeed promises float32"),
        (_more(2, dtype=torch.int16, trained=False), (3,), "parameter `more` is int16, which gloo and NCCL cannot"),
        (_more(2, dtype=torch.float64, trained=False), (), ""),
    ],
)
@stages_1_and_3
def test_parameters_that_cannot_be_sharded_are_refused(
    build: Callable[[], nn.Module], stages: tuple[int, ...], said: str, stage: int
) -> None:
    def rank(number: int) -> Any:
        if stage in stages:
            return refused(StrategyError, lambda: begin(stage, build=build))
        begin(stage, build=build)
        return ""

    (message,) = in_ranks(1, rank)
    assert message.startswith(said if stage in stages else "")
    assert bool(message) == (stage in stages)


# ---------------------------------------------------------------------------------------------- setup
@pytest.mark.parametrize(
    ("variable", "said", "key"),
    [
        ("USE_DEEPSPEED", "true", None),
        ("USE_FSDP", "true", "strategy.use"),
        ("DEEPSPEED_ZERO_STAGE", "3", None),
        ("DEEPSPEED_ZERO_STAGE", "2", "strategy.stage"),
        ("DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none", "strategy.offload_optimizer"),
        ("DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu", None),
        ("DEEPSPEED_OFFLOAD_PARAM_DEVICE", "cpu", "strategy.offload_parameters"),
        ("DEEPSPEED_OFFLOAD_PARAM_DEVICE", "none", None),
        ("GRADIENT_CLIPPING", "0.5", None),
        ("GRADIENT_CLIPPING", "none", "train.clip_norm"),
        ("DEEPSPEED_CONFIG_FILE", "ds.json", "strategy.extra"),
        ("DEEPSPEED_CONFIG_FILE", "none", None),
    ],
)
def test_settings_of_the_accelerate_launcher_must_match_the_recipe(
    monkeypatch: pytest.MonkeyPatch, variable: str, said: str, key: str | None
) -> None:
    def rank(number: int) -> Any:
        strategy = DeepSpeed(stage=3, offload_optimizer="cpu")
        if key is None:
            join(train(clip_norm=0.5), strategy)
            return ""
        return refused(StrategyError, lambda: join(train(clip_norm=0.5), strategy))

    monkeypatch.setenv(f"ACCELERATE_{variable}", said)
    (message,) = in_ranks(1, rank)
    assert message.startswith(f"the launcher sets ACCELERATE_{variable}={said}, but `{key}` in" if key else "")
    assert bool(message) == bool(key)
