"""What a step, an agreement and a state are under DDP and in one process, in numbers that can be worked out by hand."""

import logging
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddpforge.strategies.accelerated import AcceleratedStrategy
from forked import Training, in_ranks, refused, saved, train
from own_optimizers import Counting
from saved import Saved
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from ddpforge.errors import CheckpointError, StrategyError, UsageError
from ddpforge.interfaces import CanonicalState, Part, Range, World
from ddpforge.strategies import accelerated
from ddpforge.strategies.ddp import DDP
from ddpforge.strategies.fsdp import FSDP
from ddpforge.strategies.single import Single


class Dot(nn.Module):
    """w·x, from w = 0: the gradient is x."""

    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


class Two(Dot):
    """Another weight that only `uses` uses, and a third that is frozen."""

    def __init__(self, uses: str = "a") -> None:
        super().__init__(1)
        self.b, self.c = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        self.frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.uses = uses

    def forward(self, x: Tensor) -> Tensor:
        named = {"a": self.w, "b": self.b, "c": self.c, "f": self.frozen}
        return torch.stack([named[name] * x for name in self.uses]).sum() if self.uses else x.clone()


def momentum(weights: Any) -> SGD:
    return SGD(weights, lr=1.0, momentum=0.5)


# ---------------------------------------------------------------------------------------------- the step
@pytest.mark.parametrize(("clip", "update"), [(None, [-6.0, -8.0]), (5.0, [-3.0, -4.0]), (20.0, [-6.0, -8.0])])
def test_the_mean_gradient_over_ranks_is_clipped_by_its_own_norm_and_forgotten_after_the_step(
    clip: float | None, update: list[float]
) -> None:
    def rank(number: int) -> Any:
        training = Training(DDP(), Dot, clip_norm=clip)
        x = torch.tensor([6.0, 8.0]) * 2 * number
        return [(training.step(x), training.weights()["w"]) for _ in range(2)]

    for steps in in_ranks(2, rank):
        assert [norm for norm, _ in steps] == [10.0, 10.0]
        assert steps[0][1] == pytest.approx(update, rel=1e-6)
        assert steps[1][1] == pytest.approx([2 * each for each in update], rel=1e-6)


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"gradient_as_bucket_view": False}], ids=str)
def test_micro_batches_add_up_before_ranks_take_their_mean(options: dict[str, bool]) -> None:
    def rank(number: int) -> Any:
        training = Training(DDP(**options), Dot)  # type: ignore[arg-type]
        mine = [[[1.0, 0.0], [3.0, 0.0]], [[0.0, 2.0], [0.0, 6.0]]][number]
        norms = [training.step(*map(torch.tensor, mine)) for _ in range(3)]
        return norms, training.weights()["w"]

    assert in_ranks(2, rank) == [([pytest.approx(20**0.5)] * 3, [-6.0, -12.0])] * 2


@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=str)
def test_only_the_last_micro_batch_waits_for_other_ranks(options: dict[str, bool]) -> None:
    """Until then a rank has its own gradient."""

    def rank(number: int) -> Any:
        training = Training(DDP(**options), Dot)  # type: ignore[arg-type]
        training.step(torch.ones(2))
        found = []
        for last in (False, False, True):
            with training.strategy.micro_step(training.model, last=last):
                training.strategy.backward(training.model(torch.tensor([1.0 + number, 0.0])).sum())
            (weight,) = training.model.parameters()
            assert weight.grad is not None
            found.append(weight.grad[0].item())
        return found

    assert in_ranks(2, rank) == [[1.0, 2.0, 4.5], [2.0, 4.0, 4.5]]


@pytest.mark.parametrize(
    ("compression", "sums", "dtype"),
    [
        ("none", [1 + 2**-7, 1 + 2**-10, 1 + 2**-11], "float32"),
        ("fp16", [1 + 2**-7, 1 + 2**-10, 1], "float16"),
        ("bf16", [1 + 2**-7, 1, 1], "bfloat16"),
    ],
)
def test_gradients_travel_in_the_dtype_that_the_contract_names(compression: Any, sums: list[float], dtype: str) -> None:
    def rank(number: int) -> Any:
        training = Training(DDP(compression=compression), lambda: Dot(3))
        training.step(torch.tensor([1 + 2**-7, 1 + 2**-10, 1 + 2**-11]))
        return training.weights()["w"], training.strategy.contract.reduce_dtype

    assert in_ranks(2, rank) == [([-each for each in sums], dtype)] * 2


def test_the_options_are_those_of_the_wrapped_model() -> None:
    def rank(number: int) -> Any:
        found = []
        for options in ({}, {"find_unused_parameters": True}, {"static_graph": True, "gradient_as_bucket_view": False}):
            model = Training(DDP(bucket_cap_mb=3, **options), Dot).model  # type: ignore[arg-type]
            assert isinstance(model, DistributedDataParallel)
            assert not model.broadcast_buffers
            assert model.bucket_bytes_cap == 3 * 2**20
            found.append((model.find_unused_parameters, model.static_graph, model.gradient_as_bucket_view))
        return found

    assert in_ranks(2, rank) == [[(False, False, True), (True, False, True), (False, True, False)]] * 2


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_gradient_that_is_not_finite_on_one_rank_leaves_the_step_out_on_all(precision: str) -> None:
    def rank(number: int) -> Any:
        training = Training(DDP(), Dot, momentum, precision=precision)
        first = training.step(torch.ones(2))
        bad = training.step(torch.full((2,), torch.inf if number else 1.0))
        excused = training.strategy.overflowed()
        training.step(torch.ones(2))
        return first, bad, excused, training.weights()["w"], training.strategy.loop_state().get("loss_scale")

    fp16 = precision == "fp16"
    found = (pytest.approx(2**0.5), torch.inf, fp16, [-2.5, -2.5], 2.0**15 if fp16 else None)
    assert in_ranks(2, rank) == [found] * 2


def test_the_scale_of_the_loss_is_kept_in_the_state_of_the_loop() -> None:
    def rank(number: int) -> Any:
        first, second = Training(Single(), Dot, precision="fp16"), Training(Single(), Dot, precision="fp16")
        first.step(torch.full((2,), torch.inf))
        second.strategy.load_loop_state(first.strategy.loop_state())
        second.strategy.load_loop_state({})  # of a run that was not fp16
        return first.strategy.loop_state(), second.strategy.loop_state()

    (found,) = in_ranks(1, rank)
    assert found == ({"loss_scale": 2.0**15, "loss_scale_growth_tracker": 0},) * 2


class Explorer(SGD):
    """Notes the norms that it is given, and what the gradient is then."""

    def __init__(self, weights: Any) -> None:
        super().__init__(weights, lr=1.0)
        self.seen: list[tuple[float, list[float]]] = []

    def explore(self, norm: float) -> None:
        (weight,) = self.param_groups[0]["params"]
        self.seen.append((norm, weight.grad.tolist()))

    def restore(self) -> None: ...


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_exploring_sees_the_true_gradient_unless_it_is_not_finite_and_forgets_it(precision: str) -> None:
    def rank(number: int) -> Any:
        training = Training(DDP(), Dot, Explorer, precision=precision, clip_norm=1.0)
        norms = []
        for value in (4.0, torch.inf, 8.0):
            training.backward(torch.tensor([value * number, 0.0]))
            norms.append(training.strategy.explore(training.model, training.optimizer).item())  # type: ignore[arg-type]
        assert isinstance(training.optimizer, Explorer)
        return norms, training.optimizer.seen, training.weights()["w"], training.strategy.loop_state().get("loss_scale")

    seen = [(2.0, [2.0, 0.0]), (4.0, [4.0, 0.0])]
    scale = 2.0**15 if precision == "fp16" else None
    norms, *found = in_ranks(2, rank)[1]
    assert (norms[0], norms[2]) == (2.0, 4.0)
    assert not torch.isfinite(torch.tensor(norms[1]))
    assert found == [seen, [0.0, 0.0], scale]


# ---------------------------------------------------------------------------------------------- parameters
@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_parameters_that_are_not_used_may_be_allowed(options: dict[str, bool]) -> None:
    def rank(number: int) -> Any:
        training = Training(DDP(**options), Two)  # type: ignore[arg-type]
        training.step(torch.ones(1))
        training.step(torch.ones(1))
        return training.weights()

    assert in_ranks(2, rank) == [{"w": [-2.0], "b": [0.0], "c": [0.0]}] * 2


@pytest.mark.parametrize(("uses", "said"), [("a", "`b` and 1 more"), ("ab", "`c`"), ("bc", "`w`")])
def test_else_the_first_that_is_not_used_is_named_with_its_rank(uses: str, said: str) -> None:
    def rank(number: int) -> Any:
        training = Training(DDP(), lambda: Two(uses))
        return refused(StrategyError, lambda: training.step(torch.ones(1)))

    for number, message in enumerate(in_ranks(2, rank)):
        assert message.startswith(f"parameter {said} got no gradient on rank {number}: forward did not use it | ")
        assert "or set strategy.find_unused_parameters = true" in message


def test_one_process_allows_them_but_not_a_loss_that_depends_on_none() -> None:
    def rank(number: int) -> Any:
        training = Training(Single(), Two)
        training.step(torch.ones(1))
        assert isinstance(training.model, Two)
        training.model.uses = ""
        x = torch.ones(1, requires_grad=True)
        return training.weights(), refused(UsageError, lambda: training.step(x))

    weights, message = in_ranks(1, rank)[0]
    assert weights == {"w": [-1.0], "b": [0.0], "c": [0.0]}
    assert message.startswith("the loss depends on no trained parameter: backward gave none of them a gradient")


@pytest.mark.parametrize("uses", ["af", "f", "abcf"])
def test_a_weight_that_was_frozen_and_gets_a_gradient_is_named(uses: str) -> None:
    """In one process; several ranks would train it apart."""

    def rank(number: int) -> Any:
        training = Training(Single(), lambda: Two(uses))
        assert isinstance(training.model, Two)
        training.model.frozen.requires_grad_()
        return refused(StrategyError, lambda: training.step(torch.ones(1)))

    assert in_ranks(1, rank)[0].startswith("parameter `frozen` was frozen when the model was wrapped")


def test_a_frozen_weight_is_left_alone_and_nobody_complains() -> None:
    def rank(number: int) -> Any:
        training = Training(DDP(), lambda: Two("abcf"))
        return training.step(torch.ones(1)), training.weights()

    assert in_ranks(2, rank) == [(pytest.approx(3**0.5), {"w": [-1.0], "b": [-1.0], "c": [-1.0]})] * 2


def test_a_loss_is_looked_at_in_every_backward_pass() -> None:
    def rank(number: int) -> Any:
        strategy = Training(Single(), Dot).strategy
        losses = (torch.ones(2), torch.ones(()))
        return [refused(UsageError, partial(strategy.backward, loss)) for loss in losses]

    (found,) = in_ranks(1, rank)
    assert found[0].startswith("the task's loss has the shape [2]")
    assert found[1].startswith("the loss depends on no trained parameter")


def test_a_model_that_comes_back_without_a_wrapper_is_refused_where_there_are_several_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rank(number: int) -> Any:
        return refused(StrategyError, lambda: Training(DDP(), Dot))

    monkeypatch.setattr(accelerated.Accelerator, "prepare_model", lambda self, model: model)
    for message in in_ranks(2, rank):
        assert message.startswith("asked for DDP over 2 ranks, but the prepared model is a Dot")
    assert in_ranks(1, lambda number: Training(DDP(), Dot).step(torch.ones(1))) == [pytest.approx(2**0.5)]


@pytest.mark.parametrize(("precision", "refused_"), [("fp32", False), ("bf16", True), ("fp16", True)])
def test_float64_is_refused_where_autocast_would_leave_it_alone(precision: str, refused_: bool) -> None:
    def rank(number: int) -> Any:
        try:
            Training(Single(), nn.Linear(1, 1).double, precision=precision)
        except StrategyError as error:
            return error.message
        return ""

    message = in_ranks(1, rank)[0]
    assert message.startswith("parameter `weight` is float64") == refused_


@pytest.mark.parametrize(
    ("strategy", "kind", "said"),
    [
        (Single, torch.optim.Adam, "`0` (Embedding) gives sparse gradients, and Adam does not take them"),
        (FSDP, SGD, "`0` (Embedding) gives sparse gradients, and sharded ones are dense"),
        (Single, SGD, ""),
        (DDP, SGD, ""),
    ],
)
def test_sparse_gradients_are_refused_where_they_cannot_be_trained_with(strategy: Any, kind: Any, said: str) -> None:
    def rank(number: int) -> Any:
        def begin() -> Training:
            return Training(strategy(), lambda: nn.Sequential(nn.Embedding(4, 2, sparse=True)), kind)

        if said:
            return refused(StrategyError, begin)
        return str(begin().step(torch.tensor([1, 1])))

    (message,) = in_ranks(1, rank)
    assert message.startswith(said or str(8**0.5)[:6])


def test_a_loss_that_differentiates_itself_is_refused_where_something_is_sharded() -> None:
    class Penalised(Dot):
        def forward(self, x: Tensor) -> Tensor:
            y = (self.w * x).sum()
            (slope,) = torch.autograd.grad(y, self.w, create_graph=True)
            return y + (slope * self.w).sum()

    def rank(number: int) -> Any:
        training = Training(Single(), Penalised)
        return training.step(torch.ones(2)), refused(
            StrategyError, lambda: Training(FSDP(), Penalised).step(torch.ones(2))
        )

    ((norm, said),) = in_ranks(1, rank)
    assert norm == pytest.approx(8**0.5)
    assert said.startswith("the loss computes gradients of its own")


# ---------------------------------------------------------------------------------------------- the forward pass
class Writes(Dot):
    """Writes what was there into its weight."""

    def forward(self, x: Tensor) -> Tensor:
        self.w.data.mul_(1.0)
        return super().forward(x)


def test_training_passes_are_watched_until_the_first_update_and_no_others() -> None:
    def rank(number: int) -> Any:
        training = Training(Single(), Writes)
        training.model.eval()
        with training.strategy.forward():
            training.model(torch.ones(2))
        training.model.train()
        said = refused(UsageError, lambda: training.backward(torch.ones(2)))
        training.strategy.backward(training.model(torch.ones(2)).sum())
        training.strategy.step(training.model, training.optimizer)
        training.step(torch.ones(2))
        return said, training.weights()["w"]

    ((said, weight),) = in_ranks(1, rank)
    assert said.startswith("forward changes parameter `w`")
    assert weight == [-2.0, -2.0]


def test_a_forward_pass_computes_in_the_precision_of_the_recipe() -> None:
    def rank(number: int) -> Any:
        found = []
        for precision in ("fp32", "bf16", "fp16"):
            training = Training(Single(), lambda: nn.Linear(2, 2), precision=precision)
            for mode in (True, False):
                training.model.train(mode)
                with training.strategy.forward():
                    found.append(str(training.model(torch.ones(2)).dtype))
            assert training.model.weight.dtype == torch.float32
        return found

    kinds = ["torch.float32", "torch.bfloat16", "torch.float16"]
    assert in_ranks(1, rank) == [[kind for kind in kinds for _ in range(2)]]


@pytest.mark.parametrize(
    ("options", "compiled"),
    [
        ({}, []),
        ({"compile": "default"}, ["default"]),
        ({"compile": "max-autotune"}, ["max-autotune"]),
        ({"compile": "default", "compile_blocks": True}, []),
    ],
)
def test_the_wrapped_model_is_compiled_where_the_recipe_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], compiled: list[str]
) -> None:
    def compile(module: nn.Module, *, mode: str) -> None:
        asked.append((type(module).__name__, mode))

    def rank(number: int) -> Any:
        Training(DDP(), Dot, **options)
        return asked

    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(nn.Module, "compile", compile)
    assert in_ranks(2, rank)[0] == [("DistributedDataParallel", mode) for mode in compiled]


# ---------------------------------------------------------------------------------------------- agreement
class ByRank(nn.Module):
    """Every tensor says of which rank it is."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.full((2,), 1.0 + rank))
        self.frozen = nn.Parameter(torch.full((2,), 1.0 + rank), requires_grad=False)
        self.register_buffer("small", torch.full((1,), 1 + rank, dtype=torch.int16))
        self.register_buffer("hidden", torch.full((3,), 1.0 + rank).bfloat16(), persistent=False)
        self.register_buffer("across", torch.full((2, 3), 1.0 + rank).T)
        self.register_buffer("none", torch.zeros(0))
        self.register_buffer("twin", torch.full((2,), 1 + 1j * rank).conj())
        self.norm = nn.BatchNorm1d(1)
        self.stateless = nn.BatchNorm1d(1, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x * self.trained.sum())
        return self.stateless(y)


def values(module: nn.Module) -> dict[str, Any]:
    return {name: tensor.flatten().tolist() for name, tensor in (*module.named_parameters(), *module.named_buffers())}


def test_all_ranks_begin_with_rank_0s_weights_and_buffers_of_any_dtype_and_layout() -> None:
    def rank(number: int) -> Any:
        training = Training(DDP(), lambda: ByRank(number))
        return values(training.strategy.unwrap(training.model))

    first, second = in_ranks(2, rank)
    assert first == second == values(ByRank(0))


def test_statistics_become_their_mean_over_ranks_and_other_buffers_rank_0s() -> None:
    def rank(number: int) -> Any:
        training = Training(DDP(), lambda: ByRank(number))
        bare = training.strategy.unwrap(training.model)
        assert isinstance(bare, ByRank)
        assert isinstance(bare.norm.running_mean, Tensor)
        assert isinstance(bare.norm.running_var, Tensor)
        assert isinstance(bare.norm.num_batches_tracked, Tensor)
        bare.norm.running_mean.fill_(1.0 + 4 * number)
        bare.norm.running_var.fill_(2.0 + 4 * number)
        bare.norm.num_batches_tracked.fill_(7 + number)
        bare.get_buffer("across").fill_(5.0 + number)
        training.strategy.sync_buffers(training.model)
        return values(bare)

    first, second = in_ranks(2, rank)
    assert first == second
    assert (first["norm.running_mean"], first["norm.running_var"]) == ([3.0], [4.0])
    assert (first["norm.num_batches_tracked"], first["across"]) == ([7], [5.0] * 6)


def test_one_process_needs_nobody_to_agree() -> None:
    def rank(number: int) -> Any:
        training = Training(Single(), lambda: ByRank(3))
        training.strategy.sync_buffers(training.model)
        assert not dist.is_initialized()
        return training.strategy.total(torch.ones(2)).tolist(), training.strategy.broadcast("all"), training.world.rank

    assert in_ranks(1, rank) == [([1.0, 1.0], "all", 0)]


def test_totals_are_sums_over_ranks_that_see_different_data_and_what_is_broadcast_is_rank_0s() -> None:
    def rank(number: int) -> Any:
        strategy = Training(DDP(), Dot).strategy
        total = strategy.total(torch.tensor([1.0 + number, 2.0], dtype=torch.float64)).tolist()
        said = strategy.broadcast({"rank": number})
        world = strategy.world
        strategy.world = World(
            rank=number, size=2, local_rank=number, device=world.device, data_rank=0, data_size=1
        )  # both see the same data
        return total, strategy.total(torch.tensor([4.0])).tolist(), said, (world.rank, world.local_rank, world.size)

    found = in_ranks(2, rank)
    assert [each[:3] for each in found] == [([3.0, 4.0], [4.0], {"rank": 0})] * 2
    assert [each[3] for each in found] == [(0, 0, 2), (1, 1, 2)]


def test_the_group_is_left_when_all_have_come_to_the_end() -> None:
    def rank(number: int) -> Any:
        strategy = Training(DDP(), Dot).strategy
        world = strategy.world
        before = dist.is_initialized()
        strategy.close()
        return before, dist.is_initialized(), (world.data_rank, world.data_size, world.is_main, str(world.device))

    assert in_ranks(2, rank) == [(True, False, (0, 2, True, "cpu")), (True, False, (1, 2, False, "cpu"))]


def test_nobody_leaves_before_the_last(tmp_path: Any) -> None:
    """A rank that is gone would end those that still compute."""

    def rank(number: int) -> Any:
        strategy = Training(DDP(), Dot).strategy
        left = tmp_path / "left"
        if number:
            for _ in range(200):
                assert not left.exists()
            strategy.close()
            return True
        strategy.close()
        left.touch()
        return True

    assert in_ranks(2, rank) == [True, True]


# ---------------------------------------------------------------------------------------------- to disk and back
def test_a_run_goes_on_from_the_state_that_another_had() -> None:
    def rank(number: int) -> Any:
        straight = Training(DDP(), Dot, momentum)
        resumed = Training(DDP(), Dot, momentum)
        for _ in range(2):
            straight.step(torch.ones(2))
        state = saved(straight.state())
        resumed.strategy.load_state(resumed.model, resumed.optimizer, state)
        straight.step(torch.ones(2))
        resumed.step(torch.ones(2))
        return straight.weights(), resumed.weights(), sorted(state.model)

    found = {"w": [-4.25, -4.25]}
    assert in_ranks(2, rank) == [(found, found, ["w"])] * 2


def test_an_optimizers_own_counters_go_with_it() -> None:
    def rank(number: int) -> Any:
        straight, resumed = Training(Single(), Dot, Counting), Training(Single(), Dot, Counting)
        for _ in range(2):
            straight.step(torch.ones(2))
        state = saved(straight.state())
        resumed.strategy.load_state(resumed.model, resumed.optimizer, state)
        straight.step(torch.ones(2))
        resumed.step(torch.ones(2))
        return straight.weights() == resumed.weights(), sorted(state.shared)[:2]

    assert in_ranks(1, rank) == [(True, ["optimizer.attributes.count", "optimizer.attributes.factor"])]


def test_weights_alone_leave_the_rest_as_it_is() -> None:
    def rank(number: int) -> Any:
        training = Training(Single(), Two)
        partial = CanonicalState({"b": Saved(torch.tensor([5.0]))}, {})
        said = refused(
            CheckpointError, lambda: training.strategy.load_state(training.model, training.optimizer, partial)
        )
        training.strategy.load_state(training.model, training.optimizer, partial, partial=True)
        return said, training.weights()

    ((said, weights),) = in_ranks(1, rank)
    assert "missing from the checkpoint: c, frozen, w" in said
    assert weights == {"w": [0.0], "b": [5.0], "c": [0.0]}


def test_powersgds_memory_is_each_ranks_own_and_weights_alone_do_not_touch_it() -> None:
    def rank(number: int) -> Any:
        training = Training(DDP(compression="powersgd", powersgd_start=2), lambda: nn.Linear(16, 16, bias=False))
        for _ in range(4):
            training.step(torch.randn(3, 16, generator=torch.Generator().manual_seed(number)))
        state = training.state()
        error = state.shared["powersgd.error.weight"]
        assert isinstance(error, Part)
        weights = saved(CanonicalState({"weight": state.model["weight"]}, {}))
        before = error.tensor.clone()
        training.strategy.load_state(training.model, training.optimizer, weights, partial=True)
        after = training.state().shared
        assert torch.equal(after["powersgd.error.weight"].tensor, before)
        training.strategy.load_state(training.model, training.optimizer, weights)
        return (
            state.shared["powersgd.step"],
            after["powersgd.step"],
            training.state().shared["powersgd.step"],
            (error.shape, error.region, error.tensor.any().item()),
            training.strategy.contract.reduce_dtype,
        )

    for number, found in enumerate(in_ranks(2, rank)):
        mine = ((2, 256), Range(256 * number, 256 * number + 256), True)
        assert found == (4, 4, 0, mine, "float32, of a low-rank approximation")


# ---------------------------------------------------------------------------------------------- setting up
def test_one_process_is_not_several() -> None:
    def rank(number: int) -> Any:
        return refused(StrategyError, lambda: Single().setup(train()))

    for message in in_ranks(2, rank):
        assert message.startswith('strategy.use = "single" was started in 2 processes')
        assert ' | set strategy.use = "ddp"' in message
    assert not list(Single().refusals(train(), 1, "cpu"))


@pytest.mark.parametrize(("asked", "device", "count"), [(True, "cpu", 1), (True, "cuda", 0), (False, "cpu", 0)])
@pytest.mark.parametrize("strategy", [Single(), DDP()], ids=["single", "ddp"])
def test_batchnorm_over_ranks_needs_a_gpu(strategy: AcceleratedStrategy, asked: bool, device: str, count: int) -> None:
    found = list(strategy.refusals(train(sync_batchnorm=asked), 1, device))
    assert [each.key for each in found] == ["train.sync_batchnorm"] * count
    strategy.train = train(sync_batchnorm=asked)
    strategy.world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"), data_rank=0, data_size=1)
    (norm,) = strategy.wrap(nn.Sequential(nn.BatchNorm1d(1)), ()).children()
    assert isinstance(norm, nn.SyncBatchNorm) == asked


@pytest.mark.parametrize(
    ("variable", "said", "options", "fits"),
    [
        ("MIXED_PRECISION", "no", {"precision": "bf16"}, True),  # nobody said anything
        ("MIXED_PRECISION", "BF16", {"precision": "bf16"}, True),
        ("MIXED_PRECISION", "fp16", {"precision": "bf16"}, False),
        ("MIXED_PRECISION", "fp32", {}, False),
        ("USE_DEEPSPEED", "True", {}, False),
        ("USE_DEEPSPEED", "FALSE", {}, True),
        ("USE_FSDP", "true", {}, False),
        ("DYNAMO_BACKEND", "INDUCTOR", {}, False),
        ("DYNAMO_BACKEND", "NO", {}, True),
        ("GRADIENT_ACCUMULATION_STEPS", "1", {}, True),
        ("GRADIENT_ACCUMULATION_STEPS", "2", {}, False),
    ],
)
def test_a_launcher_may_say_what_the_recipe_says_or_nothing(
    monkeypatch: pytest.MonkeyPatch, variable: str, said: str, options: dict[str, str], fits: bool
) -> None:
    def rank(number: int) -> Any:
        if fits:
            Single().setup(train(**options))
            return ""
        return refused(StrategyError, lambda: Single().setup(train(**options)))

    monkeypatch.setenv(f"ACCELERATE_{variable}", said)
    monkeypatch.setattr(accelerated, "processes_asked_for", lambda: 1)
    keys = {
        "MIXED_PRECISION": "train.precision",
        "DYNAMO_BACKEND": "train.compile",
        "GRADIENT_ACCUMULATION_STEPS": "train.micro_batch",
    }
    key = keys.get(variable, "strategy.use")
    message = in_ranks(1, rank)[0]
    said = f"the launcher says ACCELERATE_{variable}={said}, which `{key}` in the recipe decides | "
    assert message.startswith("" if fits else said)
    assert bool(message) != fits


def test_fewer_processes_than_were_asked_for_are_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(number: int) -> Any:
        return refused(StrategyError, lambda: Single().setup(train()))

    monkeypatch.setattr(accelerated, "processes_asked_for", lambda: 2)
    (message,) = in_ranks(1, rank)
    assert message.startswith("`accelerate launch` was asked for 2 processes and started 1")
    assert " | ddpforge launch RECIPE --nproc 2 | " in message


def test_a_world_of_another_size_than_the_launcher_announced_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Alone(accelerated.Accelerator):  # type: ignore[misc]
        num_processes = 1

    def rank(number: int) -> Any:
        return refused(StrategyError, lambda: DDP().setup(train()))

    monkeypatch.setattr(accelerated, "Accelerator", Alone)
    said = "the launcher started 2 processes, but Accelerate formed a world of 1"
    assert [message.startswith(said) for message in in_ranks(2, rank)] == [True, True]


@pytest.mark.parametrize(
    ("gpus", "ranks", "precision", "native", "said"),
    [
        (1, 1, "bf16", True, []),
        (3, 1, "fp32", True, ["2 more GPUs are idle: ddpforge launch RECIPE --nproc 3"]),
        (3, 3, "fp32", False, []),
        (1, 1, "fp32", False, []),
        (1, 1, "bf16", False, ['Old computes bf16 by emulation, which is slow; train.precision = "fp16" is not']),
    ],
)
def test_what_a_gpu_could_do_faster_is_said(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    gpus: int,
    ranks: int,
    precision: str,
    native: bool,
    said: list[str],
) -> None:
    """A machine that is made believe that it has GPUs."""

    class Believes:
        process_index = local_process_index = 0
        num_processes = ranks
        distributed_type = accelerated.DistributedType.MULTI_GPU

    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation or native)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old")
    monkeypatch.setattr(accelerated, "choose_device", lambda kind, asked: torch.device("cuda", 0))
    monkeypatch.setattr(accelerated, "Agreement", lambda device, timeout: None)
    monkeypatch.setattr(accelerated, "Accelerator", lambda **_: Believes())
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with caplog.at_level(logging.INFO, "ddpforge"):
        DDP().setup(train(precision=precision, device="cuda"))
    assert caplog.messages == said
