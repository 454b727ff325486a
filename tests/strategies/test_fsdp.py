"""Results, shards, state and refusals of FSDP, with values that can be checked by hand."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.forked import Training, in_ranks, refused, saved, set_up, train
from support.saved_tensors import Saved
from support.stages import chosen_with
from support.torch_versions import needs_torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from ddpforge.errors import CheckpointError, StrategyError
from ddpforge.guard.static import check_device
from ddpforge.interfaces import CanonicalState, FlatRange, TensorShard
from ddpforge.strategies.ddp import DDP
from ddpforge.strategies.fsdp import FSDP
from ddpforge.strategies.fsdp.shards import clip_local, rows_of
from ddpforge.strategies.fsdp.wrap_units import check_shardable


class Dot(nn.Module):
    """Computes w·x from w = 0: the gradient is x. Three elements do not divide by two ranks."""

    def __init__(self, size: int = 3, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


class Blocks(nn.Module):
    """Two blocks and a weight outside of them. `uses`: the blocks that forward uses."""

    def __init__(self, uses: str = "ab") -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"a": Dot(), "b": Dot()})
        self.scale = nn.Parameter(torch.ones(3))
        self.uses = uses

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.blocks[name](x) for name in self.uses]
        return torch.stack([*parts, self.scale * x]).sum(0)


def blocks_of(model: Any) -> list[nn.Module]:
    return list(model.blocks.values())


def momentum(weights: Any) -> SGD:
    return SGD(weights, lr=1.0, momentum=0.5)


MINE = [slice(0, 2), slice(2, 3)]  # three elements over two ranks


# ---------------------------------------------------------------------------------------------- the step
@pytest.mark.parametrize(("clip", "share"), [(None, 1.0), (3.5, 0.5), (20.0, 1.0)])
@pytest.mark.parametrize("no_sync", [False, True])
def test_the_mean_gradient_over_ranks_is_clipped_by_the_norm_over_all_shards(
    no_sync: bool, clip: float | None, share: float
) -> None:
    def rank(number: int) -> Any:
        training = Training(FSDP(no_sync=no_sync), Dot, clip_norm=clip)
        one, other = torch.tensor([4.0, 0.0, 6.0]) * number, torch.tensor([0.0, 6.0, 6.0]) * number
        return [(training.step(one, other), training.weights()["w"]) for _ in range(2)]

    for number, steps in enumerate(in_ranks(2, rank)):
        assert [norm for norm, _ in steps] == [pytest.approx(7.0)] * 2
        for count, (_, weights) in enumerate(steps, 1):
            whole = [-count * share * each for each in (2.0, 3.0, 6.0)]
            assert weights == pytest.approx(whole[MINE[number]], rel=1e-5)


@pytest.mark.parametrize("no_sync", [False, True])
def test_replicas_average_over_all_ranks_and_count_each_element_once(no_sync: bool) -> None:
    def rank(number: int) -> Any:
        strategy = FSDP(replicas=2, no_sync=no_sync)
        training = Training(strategy, Dot, clip_norm=3.5)
        x = torch.tensor([2.0, 3.0, 6.0]) * number / 3
        norms = [training.step(x, x) for _ in range(2)]
        part = training.state().model["w"]
        return norms, training.weights()["w"], (part.region, part.replica, part.replicas), strategy.contract.replicas

    for number, (norms, weights, part, copies) in enumerate(in_ranks(4, rank)):
        shard = number % 2
        assert norms == [pytest.approx(7.0)] * 2
        assert weights == pytest.approx([[-2.0, -3.0], [-6.0]][shard], rel=1e-5)
        assert part == ([FlatRange(0, 2), FlatRange(2, 3)][shard], number // 2, 2)
        assert copies == 2


@pytest.mark.parametrize(
    ("options", "reduced"),
    [
        ({}, [True, True, True]),
        ({"no_sync": True}, [False, False, True]),
        ({"replicas": 2}, [False, False, True]),
    ],
    ids=str,
)
def test_reductions_are_deferred_to_the_last_micro_batch_if_possible(
    options: dict[str, Any], reduced: list[bool]
) -> None:
    """Shards have a gradient once it has been reduced over all ranks."""

    def rank(number: int) -> Any:
        training = Training(FSDP(**options), Dot)
        found = []
        for _ in range(2):
            for last in (False, False, True):
                with training.replica.forward(last=last):
                    loss = training.model(torch.ones(3)).sum()
                training.replica.backward(loss)
                found.append(all(weight.grad is not None for weight in training.model.parameters()))
            training.replica.step()
        return found

    assert in_ranks(2, rank) == [reduced * 2] * 2


def test_a_nonfinite_gradient_on_one_shard_skips_the_step_on_all() -> None:
    def rank(number: int) -> Any:
        training = Training(FSDP(), Dot, momentum)
        x = torch.ones(3)
        norms = [training.step(x), training.step(torch.tensor([1.0, 1.0, torch.inf])), training.step(x)]
        return norms, training.weights()["w"]

    (first, mine), (second, _) = in_ranks(2, rank)
    assert first == second == [pytest.approx(3**0.5), torch.inf, pytest.approx(3**0.5)]
    assert mine == [-2.5, -2.5]


@pytest.mark.parametrize(
    ("size", "dtype", "gather", "precision"),
    [
        (2**-10, torch.float32, "fp32", "fp32"),
        (2**-10, torch.float32, "compute", "bf16"),
        (2**-40, torch.float64, "fp32", "fp32"),
    ],
)
def test_gradients_are_reduced_in_at_least_fp32(size: float, dtype: torch.dtype, gather: Any, precision: str) -> None:
    """Fewer bits would lose the last bit of the mean of 1 + size on one rank and 1 on the other."""

    def rank(number: int) -> Any:
        training = Training(FSDP(all_gather_dtype=gather), lambda: Dot(2, dtype), precision=precision)
        training.step(torch.full((2,), 1 + number * size, dtype=dtype))
        return training.weights()["w"]

    assert in_ranks(2, rank) == [[-(1 + size / 2)]] * 2


@pytest.mark.parametrize(("uses", "said"), [("a", "`blocks.b.w`"), ("", "`blocks.a.w` and 1 more")])
def test_a_weight_unused_in_one_micro_batch_is_refused(uses: str, said: str) -> None:
    """Holds even if another micro-batch used the weight, and in the second step."""

    def rank(number: int) -> Any:
        training = Training(FSDP(), Blocks, blocks=blocks_of)
        training.step(torch.ones(3), torch.ones(3))
        training.backward(torch.ones(3))
        bare = training.replica.unwrapped
        assert isinstance(bare, Blocks)
        bare.uses = uses
        return refused(StrategyError, lambda: training.backward(torch.ones(3)))

    for number, message in enumerate(in_ranks(2, rank)):
        assert message.startswith(f"parameter {said} got no gradient on rank {number}: forward did not use it for the")
        assert "if no sample uses it: remove it" in message
        assert "call that part in every forward pass, also with an empty input of 0 rows" in message


# ---------------------------------------------------------------------------------------------- shards
class Odd(nn.Module):
    """Weights and buffers of various shapes that contain the number of their rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.across = nn.Parameter((torch.arange(6.0).view(3, 2) + 10 * rank).T)
        self.frozen = nn.Parameter(torch.full((3,), 1.0 + rank), requires_grad=False)
        self.none = nn.Parameter(torch.zeros(0), requires_grad=False)
        self.inner = Dot()
        self.inner.w.data += 1.0 + rank
        self.inner.register_buffer("mean", torch.full((2,), 1.0 + rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sum() + self.across.sum()


def test_all_ranks_hold_shards_of_rank_0s_weights_and_copies_of_its_buffers() -> None:
    def rank(number: int) -> Any:
        training = Training(FSDP(), lambda: Odd(number), blocks=lambda model: [model.inner])
        state = training.state().model
        assert all(isinstance(parameter, DTensor) for parameter in training.model.parameters())
        assert all(isinstance(module, FSDPModule) for module in training.model.modules())
        found = {
            name: value.tensor.flatten().tolist() for name, value in state.items() if isinstance(value, TensorShard)
        }
        return found | {name: value.tolist() for name, value in state.items() if not isinstance(value, TensorShard)}

    first, second = in_ranks(2, rank)
    assert first == {"across": [0, 2, 4], "frozen": [1, 1], "none": [], "inner.w": [1, 1], "inner.mean": [1, 1]}
    assert second == {"across": [1, 3, 5], "frozen": [1], "none": [], "inner.w": [1], "inner.mean": [1, 1]}


class DtypeRecorder(nn.Module):
    """Module that records the dtypes of its weight and of its input in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.seen: list[tuple[str, str]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((str(self.inner.weight.dtype), str(x.dtype)))
        y: Tensor = self.inner(x)
        return y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.norm = DtypeRecorder(), nn.LayerNorm(2)
        self.seen: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(str(self.norm.weight.dtype))
        y: Tensor = self.norm(self.block(x))
        return y


@pytest.mark.parametrize(("gather", "dtype"), [("fp32", "torch.float32"), ("compute", "torch.bfloat16")])
def test_blocks_are_gathered_in_the_dtype_of_the_recipe_and_other_weights_in_fp32(gather: Any, dtype: str) -> None:
    def rank(number: int) -> Any:
        training = Training(FSDP(all_gather_dtype=gather), Net, precision="bf16", blocks=lambda model: [model.block])
        training.step(torch.ones(1, 2))
        bare = training.replica.unwrapped
        assert isinstance(bare, Net)
        return bare.block.seen, bare.seen, {str(weight.dtype) for weight in bare.parameters()}

    assert in_ranks(2, rank) == [([(dtype, "torch.float32")], ["torch.float32"], {"torch.float32"})] * 2


@pytest.mark.parametrize(
    ("kind", "precision", "gather"),
    [("cuda", "bf16", torch.bfloat16), ("cuda", "fp32", None), ("cuda", "fp16", None), ("cpu", "bf16", None)],
)
def test_accelerators_gather_blocks_in_bf16_by_default(kind: str, precision: str, gather: torch.dtype | None) -> None:
    strategy = FSDP()
    world: Any = SimpleNamespace(device=torch.device(kind))
    strategy.train, strategy.world = train(precision=precision), world
    assert strategy._gather_dtype(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))) is gather
    assert strategy._gather_dtype(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))) is None
    assert strategy.gathers_exactly == (gather is None)


@pytest.mark.parametrize(("norm", "factor"), [(2.0, 1.0), (4.9, 1.0), (5.0, 1.0), (10.0, 0.5), (50.0, 0.1)])
def test_clipping_of_shards_never_enlarges_gradients(norm: float, factor: float) -> None:
    """On a GPU, clipping is also called for a norm below the limit: reading the norm would take time."""
    weight = nn.Parameter(torch.zeros(3))
    weight.grad = torch.tensor([1.0, -2.0, 4.0])
    clip_local([weight], 5.0, torch.tensor(norm))
    assert weight.grad.tolist() == pytest.approx([factor, -2 * factor, 4 * factor], rel=1e-6)


@pytest.mark.parametrize(
    ("rows", "ranks", "expected"),
    [
        (5, 4, [(0, 2), (2, 4), (4, 5), (5, 5)]),
        (6, 3, [(0, 2), (2, 4), (4, 6)]),
        (1, 3, [(0, 1), (1, 1), (1, 1)]),
    ],
)
def test_rows_of_a_rank_end_with_the_tensor(rows: int, ranks: int, expected: list[tuple[int, int]]) -> None:
    class Held(list[int]):
        def __init__(self, rank: int) -> None:
            super().__init__(range(rows))
            self.device_mesh = SimpleNamespace(ndim=1, size=lambda _: ranks, get_local_rank=lambda _: rank)

    held: list[Any] = [Held(rank) for rank in range(ranks)]
    assert [rows_of(one) for one in held] == expected


def test_replicas_clip_by_the_same_norm() -> None:
    """Checks groups that add in another order: the second norm would differ in its last bits."""

    def rank(number: int) -> float:
        training = Training(FSDP(replicas=2), Dot)
        return float(training.replica.norm([torch.tensor([1.0 + (number > 1) * 2**-20])]))

    norms = in_ranks(4, rank)
    assert norms == [norms[0]] * 4 == [pytest.approx(2**0.5)] * 4


def test_rounding_weights_of_norms_is_refused_on_a_cpu() -> None:
    def rank(number: int) -> str:
        def build() -> nn.Module:
            return nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))

        strategy = FSDP(all_gather_dtype="compute")
        return refused(
            StrategyError, lambda: Training(strategy, build, precision="bf16", blocks=lambda model: [model[0]])
        )

    (said,) = in_ranks(1, rank)
    assert said.startswith(
        'strategy.all_gather_dtype = "compute" rounds the weights of `1`, a LayerNorm, which torch supports on a GPU'
    )


@pytest.mark.parametrize("reshard", [True, False])
def test_block_weights_are_freed_after_forward_if_resharding_is_enabled(reshard: bool) -> None:
    def rank(number: int) -> Any:
        training = Training(FSDP(reshard_after_forward=reshard), Blocks, blocks=blocks_of)
        training.model(torch.ones(3))
        bare = training.replica.unwrapped
        assert isinstance(bare, Blocks)
        return isinstance(bare.blocks["a"].w, DTensor)

    assert in_ranks(2, rank) == [reshard] * 2


def test_a_model_on_meta_has_the_same_initial_weights() -> None:
    def rank(number: int) -> Any:
        found = []
        for meta in (True, False):
            torch.manual_seed(5 + number)  # rank 0's seed decides
            strategy = FSDP(meta=meta)
            training = Training(
                strategy,
                lambda: nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 3)),
                blocks=lambda model: [model[1]],
            )
            assert isinstance(training.model[1], FSDPModule)
            assert not isinstance(training.model[0], FSDPModule)
            found.append(training.weights())
        return found

    (first, plain), (second, _) = in_ranks(2, rank)
    assert first == plain
    assert first != second
    torch.manual_seed(5)
    whole = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 3)).state_dict()
    for name, weight in whole.items():
        assert [*first[name], *second[name]] == weight.flatten().tolist()


# ---------------------------------------------------------------------------------------------- callbacks
def test_mark_changed_applies_writes_to_shards_even_if_weights_are_gathered() -> None:
    def rank(number: int) -> Any:
        training = Training(FSDP(), lambda: Dot(2))
        weights = training.replica.weights
        with torch.no_grad():
            training.model(torch.ones(2))  # the model's own weights stay gathered
            with training.replica.weights.callback_guard():
                assert all(isinstance(parameter, DTensor) for parameter in training.model.parameters())
            training.model(torch.ones(2))
            weights.shards()["w"].tensor.fill_(2.0 + number)
            weights.mark_changed()
            return training.model(torch.ones(2)).tolist(), sorted(weights.frozen())

    assert in_ranks(2, rank) == [([2.0, 3.0], [])] * 2


def test_frozen_weights_are_sharded() -> None:
    def rank(number: int) -> Any:
        training = Training(FSDP(), lambda: Odd(number))
        weights = training.replica.weights
        return sorted(weights.shards()), {name: part.region for name, part in weights.frozen().items()}

    first, second = in_ranks(2, rank)
    assert first == (["across", "inner.w"], {"frozen": FlatRange(0, 2), "none": FlatRange(0, 0)})
    assert second == (["across", "inner.w"], {"frozen": FlatRange(2, 3), "none": FlatRange(0, 0)})


# ---------------------------------------------------------------------------------------------- checkpoints
class Matrix(nn.Module):
    """Computes x @ W with three rows of two. Has an alias of W, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3, 2))
        self.twin = self.w
        self.register_buffer("mean", torch.tensor([4.0]))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_saves_its_rows_and_their_optimizer_state(ranks: int) -> None:
    """With three rows, the last of four ranks has none."""

    def rank(number: int) -> Any:
        training = Training(FSDP(), Matrix, AdamW)
        training.step(torch.ones(3))
        state = training.state()
        entry = state.optimizer["w"]
        parts = [state.model["w"], entry["exp_avg"], entry["exp_avg_sq"]]
        assert {part.shape for part in parts} == {(3, 2)}
        assert {part.tensor.numel() for part in parts} == {parts[0].region.numel}
        assert (float(entry["step"]), state.aliases, state.model["mean"].tolist()) == (1.0, {"twin": "w"}, [4.0])
        return {(part.region, part.replica, part.replicas) for part in parts}

    rows = -(-3 // ranks) * 2
    regions = [FlatRange(at, min(at + rows, 6)) if at < 6 else FlatRange(0, 0) for at in range(0, ranks * rows, rows)]
    assert in_ranks(ranks, rank) == [{(region, 0, 1)} for region in regions]


def test_a_state_right_after_an_evaluation_has_shards_aliases_and_optimizer_state() -> None:
    """Holds after a forward pass without a backward pass, which leaves gathered weights in the model."""

    def rank(number: int) -> Any:
        training = Training(FSDP(), Matrix, AdamW)
        training.step(torch.ones(3))
        with torch.no_grad():
            training.model(torch.ones(3))
        state = training.state()
        part, entry = state.model["w"], state.optimizer["w"]["exp_avg"]
        return (
            [(part.region, part.tensor.numel()), (entry.region, entry.tensor.numel())],
            state.aliases,
            set(state.model),
        )

    shards = [(FlatRange(0, 4), 4), (FlatRange(4, 6), 2)]
    assert in_ranks(2, rank) == [([shard] * 2, {"twin": "w"}, {"w", "mean"}) for shard in shards]


def test_a_ddp_state_continues_under_fsdp() -> None:
    def rank(number: int) -> Any:
        whole = Training(DDP(), Matrix, momentum)
        sharded = Training(FSDP(), Matrix, momentum)
        for value in (1.0, 2.0):
            whole.step(torch.full((3,), value))
        with torch.no_grad():
            sharded.model(torch.ones(3))  # gathered weights must be discarded when a state is loaded
        sharded.replica.load_state(saved(whole.state()))
        for training in (whole, sharded):
            training.step(torch.ones(3))
        return whole.weights()["w"], sharded.weights()["w"], sharded.model(torch.ones(3)).tolist()

    (whole, first, output), (_, second, _) = in_ranks(2, rank)
    assert [*first, *second] == whole == [-5.75] * 6
    assert output == [3 * -5.75] * 2


def test_loading_some_weights_keeps_the_others() -> None:
    def rank(number: int) -> Any:
        training = Training(FSDP(), lambda: Odd(0))
        partial = CanonicalState({"inner.w": Saved(torch.tensor([5.0, 6.0, 7.0]))}, {})
        training.replica.load_state(partial, partial=True)
        return training.weights()

    assert in_ranks(2, rank) == [{"across": [0, 2, 4], "inner.w": [5, 6]}, {"across": [1, 3, 5], "inner.w": [7]}]


def test_optimizer_state_of_a_different_shape_is_refused() -> None:
    def rank(number: int) -> Any:
        training = Training(FSDP(), Matrix, momentum)
        weights = {"w": Saved(torch.zeros(3, 2)), "mean": Saved(torch.zeros(1))}
        state = CanonicalState(weights, {"w": {"row": Saved(torch.zeros(3))}}, {"twin": "w"})
        loaded = refused(CheckpointError, lambda: training.replica.load_state(state))
        training.step(torch.ones(3))
        training.state()
        (weight,) = training.model.parameters()
        training.optimizer.state[weight]["row"] = torch.zeros(3)
        return loaded, refused(CheckpointError, training.state)

    for found in in_ranks(2, rank):
        for message in found:
            assert message.startswith("the optimizer keeps `row` of `w` in a different shape, [3]")


# ---------------------------------------------------------------------------------------------- optimizers
class OddOptimizer(Optimizer):
    """Gradient descent that calls `odd` on sharded weights, in parameter groups with the option `odd`."""

    odd: Any = staticmethod(lambda weight, state: 1.0)

    def __init__(self, weights: Any) -> None:
        super().__init__(weights, {"lr": 0.1, "odd": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    factor = self.odd(weight, self.state[weight]) if group["odd"] else 1.0
                    weight.add_(weight.grad, alpha=-group["lr"] * factor)


def _raises(weight: Tensor, state: dict[str, Any]) -> float:
    if isinstance(weight, DTensor):
        raise RuntimeError("no rule for it")
    return 1.0


def _keeps(weight: Tensor, state: dict[str, Any]) -> float:
    state["rows"] = torch.zeros(len(weight))
    return 1.0


def _counts(weight: Tensor, state: dict[str, Any]) -> float:
    state["step"], state["number"], state["like"] = torch.zeros(()), 3, torch.zeros_like(weight)
    return 1.0


def _slower(weight: Tensor, state: dict[str, Any]) -> float:
    return 0.998 if isinstance(weight, DTensor) else 1.0


def _rounds(weight: Tensor, state: dict[str, Any]) -> float:
    return 0.99999 if isinstance(weight, DTensor) else 1.0


def _on_rank_1(weight: Tensor, state: dict[str, Any]) -> float:
    """Changes the factor only on the rank with the second half of the weight."""
    return 0.9 if isinstance(weight, DTensor) and weight.device_mesh.get_local_rank() else 1.0


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (_raises, "OddOptimizer cannot be used under FSDP, which shards weights: no rule for it"),
        (_keeps, "OddOptimizer keeps `rows` of a weight of shape [4, 4] in the shape [4]"),
        (_slower, "OddOptimizer updates a sharded weight differently from a whole one"),
        (_counts, ""),
        (_rounds, ""),
    ],
)
def test_an_optimizer_is_probed_on_a_shard_with_the_options_of_each_group(
    odd: Callable[..., float], said: str, which: int
) -> None:
    def rank(number: int) -> Any:
        def build(weights: Any) -> OddOptimizer:
            first, second = weights
            kind = type("OddOptimizer", (OddOptimizer,), {"odd": staticmethod(odd)})
            groups = [{"params": [first]}, {"params": [second]}]
            groups[which]["odd"] = True  # type: ignore[assignment]
            found: OddOptimizer = kind(groups)
            return found

        if said:
            return refused(StrategyError, lambda: Training(FSDP(), lambda: nn.Linear(2, 2), build))
        Training(FSDP(), lambda: nn.Linear(2, 2), build)
        return ""

    for message in in_ranks(2, rank):
        assert message.startswith(said)
        assert bool(message) == bool(said)


def test_every_rank_compares_its_own_rows() -> None:
    def rank(number: int) -> Any:
        def build(weights: Any) -> OddOptimizer:
            kind = type("OddOptimizer", (OddOptimizer,), {"odd": staticmethod(_on_rank_1)})
            found: OddOptimizer = kind([{"params": list(weights), "odd": True}])
            return found

        try:
            Training(FSDP(), lambda: nn.Linear(2, 2), build)
        except StrategyError as error:
            return error.message
        return ""

    assert in_ranks(2, rank) == ["", "OddOptimizer updates a sharded weight differently from a whole one"]


@pytest.mark.parametrize(
    "kind",
    [
        *(AdamW, SGD, torch.optim.Adam, torch.optim.RMSprop),
        pytest.param(torch.optim.Adagrad, marks=needs_torch("2.12")),  # before, only its constructor created its state
    ],
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_element_wise_optimizers_are_accepted(kind: type[Optimizer], replicas: int) -> None:
    def rank(number: int) -> Any:
        training = Training(FSDP(replicas=replicas), Dot, lambda weights: kind(weights, lr=0.1))  # type: ignore[call-arg]
        return training.step(torch.ones(3))

    assert in_ranks(2, rank) == [pytest.approx(3**0.5)] * 2


def test_an_optimizer_with_row_and_column_state_is_refused() -> None:
    def rank(number: int) -> Any:
        return refused(StrategyError, lambda: Training(FSDP(), Dot, Adafactor))

    for message in in_ranks(2, rank):
        assert message.startswith("Adafactor ")
        assert 'set strategy.use = "ddp"' in message


# ---------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(("version", "refuses"), [("2.11.0+cu130", True), ("2.12.0", False)])
def test_integers_are_refused_if_torch_cannot_shard_them(
    monkeypatch: pytest.MonkeyPatch, version: str, refuses: bool
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    check_shardable("weight", nn.Parameter(torch.ones(2)))
    codes = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
    if not refuses:
        check_shardable("codes", codes)
        return
    message = refused(StrategyError, lambda: check_shardable("codes", codes))
    assert message.startswith(f"parameter `codes` holds integers, which torch {version} cannot shard")


@needs_torch("2.12")
def test_frozen_integers_do_not_disturb_the_step_of_trained_weights() -> None:
    class Coded(Dot):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(torch.tensor([2, 3, 4], dtype=torch.int8), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.w * x * self.codes

    def rank(number: int) -> Any:
        training = Training(FSDP(), Coded, lambda weights: SGD([w for w in weights if w.requires_grad], lr=1.0))
        return training.step(torch.ones(3)), training.weights()["w"]

    norm = pytest.approx(29**0.5)
    assert in_ranks(2, rank) == [(norm, [-2.0, -3.0]), (norm, [-4.0])]


class Given(nn.Module):
    def __init__(self, **parameters: nn.Parameter) -> None:
        super().__init__()
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)


def _parameter(*shape: int, dtype: torch.dtype = torch.float32, trained: bool = True) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=trained)


def _hooked(method: str) -> nn.Parameter:
    parameter = _parameter(2)
    getattr(parameter, method)(lambda *_: None)
    return parameter


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        (lambda: {"a": _parameter(2), "b": _parameter()}, "parameter `b` is a scalar"),
        (lambda: {"a": _parameter(2), "b": _parameter(2, 0)}, "parameter `b` has no elements"),
        (lambda: {"a": _parameter(2), "b": _parameter(2, 0, trained=False)}, ""),
        (lambda: {"a": _hooked("register_hook")}, "parameter `a` has a gradient hook"),
        (lambda: {"a": _hooked("register_post_accumulate_grad_hook")}, "parameter `a` has a gradient hook"),
        (
            lambda: {"a": _parameter(2), "b": _parameter(2, dtype=torch.float64)},
            "parameter `a` is float32 and `b` is float64, but FSDP gathers both together",
        ),
        (lambda: {"a": _parameter(2), "b": _parameter(2, dtype=torch.float64, trained=False)}, ""),
    ],
)
def test_parameters_that_cannot_be_sharded_are_refused(
    parameters: Callable[[], dict[str, nn.Parameter]], said: str
) -> None:
    def rank(number: int) -> Any:
        strategy = FSDP()
        set_up(strategy)
        model = Given(**parameters())
        if said:
            return refused(StrategyError, lambda: strategy.wrap(model, ()))
        strategy.wrap(model, ())
        return ""

    (message,) = in_ranks(1, rank)
    assert message.startswith(said)
    assert bool(message) == bool(said)


@pytest.mark.parametrize(("inside", "said"), [(True, ""), (False, "`0.weight` and `1.weight` are one parameter")])
def test_a_weight_shared_by_two_blocks_is_refused_and_one_within_a_block_stays_shared(inside: bool, said: str) -> None:
    def rank(number: int) -> Any:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight = model[0].weight
        strategy = FSDP()
        set_up(strategy)
        blocks = [model[2]] if inside else [model[0], model[1]]
        if said:
            return refused(StrategyError, lambda: strategy.wrap(model, blocks))
        strategy.wrap(model, blocks)
        assert model[0].weight is model[1].weight
        return ""

    (message,) = in_ranks(1, rank)
    assert message.startswith(said)
    assert bool(message) == bool(said)


def test_parameters_that_are_not_sharded_are_refused() -> None:
    def rank(number: int) -> Any:
        strategy = FSDP()
        set_up(strategy)

        def prepare(model: nn.Module) -> object:
            return strategy.prepare(model, SGD(model.parameters(), lr=1.0))

        plain = refused(StrategyError, lambda: prepare(nn.Linear(2, 2)))
        alike = strategy.wrap(Dot(2), ())
        everywhere = distribute_tensor(torch.zeros(2), strategy.mesh, [Replicate()])
        alike.register_parameter("w", nn.Parameter(everywhere))
        return plain, refused(StrategyError, lambda: prepare(alike))

    for plain, alike in in_ranks(2, rank):
        assert plain.startswith("FSDP did not shard parameter `weight`: it is a Parameter")
        assert alike.startswith("FSDP did not shard parameter `w`: it is placed as (Replicate(),)")


@pytest.mark.parametrize(
    ("options", "settings", "ranks", "device", "key", "said"),
    [
        ({}, {}, 3, "cpu", None, ""),
        ({"replicas": 2}, {}, 4, "cpu", None, ""),
        ({"replicas": 3}, {}, 4, "cpu", "strategy.replicas", "use one of 1, 2, 4"),
        ({"replicas": 2}, {}, 1, "cpu", "strategy.replicas", "remove it"),
        ({"cpu_offload": True}, {}, 2, "cpu", "strategy.cpu_offload", "remove strategy.cpu_offload"),
        ({"cpu_offload": True}, {}, 2, "cuda", None, ""),
        ({"all_gather_dtype": "compute"}, {}, 2, "cpu", "strategy.all_gather_dtype", 'set train.precision = "bf16"'),
        ({"all_gather_dtype": "compute"}, {"precision": "bf16"}, 2, "cpu", None, ""),
        ({"all_gather_dtype": "compute"}, {"precision": "fp16"}, 2, "cpu", None, ""),
        ({}, {"compile": "reduce-overhead"}, 2, "cuda", "train.compile", 'set train.compile = "default"'),
        ({}, {"compile": "default"}, 2, "cuda", None, ""),
        ({}, {"compile": "reduce-overhead"}, 2, "cpu", None, ""),
        ({}, {"sync_batchnorm": True}, 2, "cpu", "train.sync_batchnorm", "remove train.sync_batchnorm"),
    ],
)
def test_invalid_options_and_options_without_effect_are_refused(
    options: dict[str, Any], settings: dict[str, Any], ranks: int, device: str, key: str | None, said: str
) -> None:
    asked = train(**settings)
    of_device = check_device(chosen_with(asked, ranks=ranks, device=device))
    found = [*of_device, *FSDP(**options).unsupported(asked, ranks, device)]
    assert [each.key for each in found] == ([key] if key else [])
    assert not key or said in found[0].hints[0]


def test_the_contract_declares_replicas_and_accumulation() -> None:
    assert (FSDP().contract.replicas, FSDP(replicas=4).contract.replicas) == (1, 4)
    assert FSDP().contract.accumulation == "the shards' .grad; one reduce-scatter per micro-batch"
    assert FSDP(no_sync=True).contract.accumulation.startswith("whole, in fp32; one reduce-scatter per step")
    assert FSDP(no_sync=True, replicas=2).contract.replicas == 2


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_timeout_of_the_recipe_applies_to_every_process_group(replicas: int) -> None:
    def rank(number: int) -> Any:
        strategy = FSDP(replicas=replicas)
        set_up(strategy, collective_timeout="7m")
        groups = strategy.mesh.get_all_groups()
        return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]

    assert in_ranks(2, rank) == [[420.0] * (1 if replicas == 1 else 2)] * 2
