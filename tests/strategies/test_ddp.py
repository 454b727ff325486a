"""Steps, buffer synchronization and state under DDP and in one process, with values that can be checked by hand."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.forked import Training, in_ranks, refused, saved, train
from support.own_optimizers import Counting
from support.saved_tensors import Saved
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from ddpforge.errors import CheckpointError, StrategyError, UsageError
from ddpforge.interfaces import CanonicalState
from ddpforge.strategies.ddp import DDP
from ddpforge.strategies.fsdp import FSDP
from ddpforge.strategies.single import Single


class Dot(nn.Module):
    """Computes w·x from w = 0: the gradient is x."""

    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


class Two(Dot):
    """Model with two more weights and a frozen one. `uses`: the weights that forward uses."""

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
def test_the_mean_gradient_is_clipped_by_its_norm_and_reset_after_the_step(
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
def test_micro_batches_are_summed_before_the_mean_over_ranks(options: dict[str, bool]) -> None:
    def rank(number: int) -> Any:
        training = Training(DDP(**options), Dot)  # type: ignore[arg-type]
        mine = [[[1.0, 0.0], [3.0, 0.0]], [[0.0, 2.0], [0.0, 6.0]]][number]
        norms = [training.step(*map(torch.tensor, mine)) for _ in range(3)]
        return norms, training.weights()["w"]

    assert in_ranks(2, rank) == [([pytest.approx(20**0.5)] * 3, [-6.0, -12.0])] * 2


@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=str)
def test_only_the_last_micro_batch_waits_for_other_ranks(options: dict[str, bool]) -> None:
    """Before the last micro-batch a rank has only its own gradient."""

    def rank(number: int) -> Any:
        training = Training(DDP(**options), Dot)  # type: ignore[arg-type]
        training.step(torch.ones(2))
        found = []
        for last in (False, False, True):
            with training.replica.forward(last=last):
                loss = training.model(torch.tensor([1.0 + number, 0.0])).sum()
            training.replica.backward(loss)
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
def test_gradients_are_reduced_in_the_dtype_of_the_contract(compression: Any, sums: list[float], dtype: str) -> None:
    def rank(number: int) -> Any:
        training = Training(DDP(compression=compression), lambda: Dot(3))
        training.step(torch.tensor([1 + 2**-7, 1 + 2**-10, 1 + 2**-11]))
        return training.weights()["w"], training.strategy.contract.reduce_dtype

    assert in_ranks(2, rank) == [([-each for each in sums], dtype)] * 2


def test_the_options_are_passed_to_the_wrapped_model() -> None:
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
def test_a_nonfinite_gradient_on_one_rank_skips_the_step_on_all(precision: str) -> None:
    def rank(number: int) -> Any:
        training = Training(DDP(), Dot, momentum, precision=precision)
        first = training.step(torch.ones(2))
        bad = training.step(torch.full((2,), torch.inf if number else 1.0))
        excused = training.replica.overflowed()
        training.step(torch.ones(2))
        return first, bad, excused, training.weights()["w"], training.replica.precision.state().get("loss_scale")

    fp16 = precision == "fp16"
    found = (pytest.approx(2**0.5), torch.inf, fp16, [-2.5, -2.5], 2.0**15 if fp16 else None)
    assert in_ranks(2, rank) == [found] * 2


def test_the_loss_scale_is_part_of_the_state() -> None:
    def rank(number: int) -> Any:
        first, second = Training(Single(), Dot, precision="fp16"), Training(Single(), Dot, precision="fp16")
        first.step(torch.full((2,), torch.inf))
        kept = saved(first.state())
        second.replica.load_state(kept)
        second.replica.load_state(replace(kept, scalars={}))  # of a run in another precision
        return first.state().scalars, second.state().scalars

    (found,) = in_ranks(1, rank)
    assert found == ({"loss_scale": 2.0**15, "loss_scale_growth_tracker": 0},) * 2


class Perturbing(SGD):
    """Multi-pass optimizer that records the norms and gradients that it receives."""

    def __init__(self, weights: Any) -> None:
        super().__init__(weights, lr=1.0)
        self.seen: list[tuple[float, list[float]]] = []

    def perturb(self, norm: float) -> None:
        (weight,) = self.param_groups[0]["params"]
        self.seen.append((norm, weight.grad.tolist()))

    def restore(self) -> None: ...


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_perturb_receives_the_unscaled_gradient_unless_it_is_nonfinite(precision: str) -> None:
    def rank(number: int) -> Any:
        training = Training(DDP(), Dot, Perturbing, precision=precision, clip_norm=1.0)
        norms = []
        for value in (4.0, torch.inf, 8.0):
            training.backward(torch.tensor([value * number, 0.0]))
            norms.append(training.replica.perturb(training.optimizer).item())
        assert isinstance(training.optimizer, Perturbing)
        return (
            norms,
            training.optimizer.seen,
            training.weights()["w"],
            training.replica.precision.state().get("loss_scale"),
        )

    seen = [(2.0, [2.0, 0.0]), (4.0, [4.0, 0.0])]
    scale = 2.0**15 if precision == "fp16" else None
    norms, *found = in_ranks(2, rank)[1]
    assert (norms[0], norms[2]) == (2.0, 4.0)
    assert not torch.isfinite(torch.tensor(norms[1]))
    assert found == [seen, [0.0, 0.0], scale]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_optimizer_may_perturb_several_times_before_its_update(precision: str) -> None:
    """Each pass divides by the loss scale once."""

    def rank(number: int) -> Any:
        training = Training(DDP(), Dot, Perturbing, precision=precision)
        for value in (2.0, 4.0, 6.0):
            training.backward(torch.tensor([value, 0.0]))
            training.replica.perturb(training.optimizer)
        norm = training.step(torch.tensor([8.0, 0.0]))
        assert isinstance(training.optimizer, Perturbing)
        return [norm for norm, _ in training.optimizer.seen], norm, training.weights()["w"]

    assert in_ranks(1, rank) == [([2.0, 4.0, 6.0], 8.0, [-8.0, 0.0])]


# ---------------------------------------------------------------------------------------------- parameters
@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_unused_parameters_may_be_allowed(options: dict[str, bool]) -> None:
    def rank(number: int) -> Any:
        training = Training(DDP(**options), Two)  # type: ignore[arg-type]
        training.step(torch.ones(1))
        training.step(torch.ones(1))
        return training.weights()

    assert in_ranks(2, rank) == [{"w": [-2.0], "b": [0.0], "c": [0.0]}] * 2


@pytest.mark.parametrize(("uses", "said"), [("a", "`b` and 1 more"), ("ab", "`c`"), ("bc", "`w`")])
def test_the_first_unused_parameter_is_named_with_its_rank(uses: str, said: str) -> None:
    def rank(number: int) -> Any:
        training = Training(DDP(), lambda: Two(uses))
        return refused(StrategyError, lambda: training.step(torch.ones(1)))

    for number, message in enumerate(in_ranks(2, rank)):
        assert message.startswith(f"parameter {said} got no gradient on rank {number}: forward did not use it | ")
        assert "or set strategy.find_unused_parameters = true" in message


def test_gradient_accumulation_keeps_buckets_and_still_names_unused_parameters() -> None:
    """From the first update on, every parameter has a gradient, if only zeros."""

    def rank(number: int) -> Any:
        training = Training(DDP(), lambda: Two("abc"), global_batch=8, micro_batch=2)
        places = []
        for _ in range(4):
            norm = training.step(torch.ones(1), torch.ones(1))
            gradients = [parameter.grad for parameter in training.model.parameters() if parameter.requires_grad]
            places.append([gradient.data_ptr() for gradient in gradients])
            assert [gradient.item() for gradient in gradients] == [0.0] * 3
        training.model.module.uses = "ab"
        message = refused(StrategyError, lambda: training.step(torch.ones(1), torch.ones(1)))
        return norm, places[1:] == places[1:2] * 3, message

    for number, (norm, stay, message) in enumerate(in_ranks(2, rank)):
        assert norm == pytest.approx(12**0.5)
        assert stay  # the first step reorders the buckets
        assert message.startswith(f"parameter `c` got no gradient on rank {number}: forward did not use it | ")


def test_one_process_allows_unused_parameters_but_not_a_loss_without_any() -> None:
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
def test_a_frozen_weight_that_gets_a_gradient_is_refused(uses: str) -> None:
    """Runs in one process; several ranks would train the weight differently."""

    def rank(number: int) -> Any:
        training = Training(Single(), lambda: Two(uses))
        assert isinstance(training.model, Two)
        training.model.frozen.requires_grad_()
        return refused(StrategyError, lambda: training.step(torch.ones(1)))

    assert in_ranks(1, rank)[0].startswith("parameter `frozen` was frozen when the model was wrapped")


def test_a_frozen_weight_is_accepted() -> None:
    def rank(number: int) -> Any:
        training = Training(DDP(), lambda: Two("abcf"))
        return training.step(torch.ones(1)), training.weights()

    assert in_ranks(2, rank) == [(pytest.approx(3**0.5), {"w": [-1.0], "b": [-1.0], "c": [-1.0]})] * 2


def test_the_loss_is_checked_in_every_backward_pass() -> None:
    def rank(number: int) -> Any:
        replica = Training(Single(), Dot).replica
        losses = (torch.ones(2), torch.ones(()))
        return [refused(UsageError, partial(replica.backward, loss)) for loss in losses]

    (found,) = in_ranks(1, rank)
    assert found[0].startswith("the task's loss has the shape [2]")
    assert found[1].startswith("the loss depends on no trained parameter")


def test_several_ranks_refuse_a_model_without_trained_parameters() -> None:
    """DistributedDataParallel does not support such a model, and there would be nothing to synchronize."""

    def rank(number: int) -> Any:
        def elsewhere(_: Any) -> SGD:
            return SGD([torch.zeros(1)], lr=1.0)

        return refused(StrategyError, lambda: Training(DDP(), partial(nn.BatchNorm1d, 1, affine=False), elsewhere))

    for message in in_ranks(2, rank):
        assert message.startswith("DDP over 2 ranks needs a parameter to train, but the model has none | ")


def test_a_single_rank_does_not_wrap_the_model() -> None:
    def rank(number: int) -> Any:
        training = Training(DDP(), Dot)
        assert training.model is training.replica.unwrapped
        return training.step(torch.ones(1)), type(training.model).__name__

    assert in_ranks(1, rank) == [(pytest.approx(2**0.5), "Dot")]


@pytest.mark.parametrize(("precision", "refused_"), [("fp32", False), ("bf16", True), ("fp16", True)])
def test_float64_is_refused_under_autocast(precision: str, refused_: bool) -> None:
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
        (Single, torch.optim.Adam, "`0` (Embedding) gives sparse gradients, but Adam does not take them"),
        (FSDP, SGD, "`0` (Embedding) gives sparse gradients, but sharded gradients are dense"),
        (Single, SGD, ""),
        (DDP, SGD, ""),
    ],
)
def test_sparse_gradients_are_refused_if_strategy_or_optimizer_does_not_support_them(
    strategy: Any, kind: Any, said: str
) -> None:
    def rank(number: int) -> Any:
        def begin() -> Training:
            return Training(strategy(), lambda: nn.Sequential(nn.Embedding(4, 2, sparse=True)), kind)

        if said:
            return refused(StrategyError, begin)
        return str(begin().step(torch.tensor([1, 1])))

    (message,) = in_ranks(1, rank)
    assert message.startswith(said or str(8**0.5)[:6])


def test_a_loss_that_computes_gradients_is_refused_by_sharding_strategies() -> None:
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
    assert said.startswith("the loss computes gradients itself")


# ---------------------------------------------------------------------------------------------- the forward pass
class Writes(Dot):
    """Model that writes unchanged values into its weight."""

    def forward(self, x: Tensor) -> Tensor:
        self.w.data.mul_(1.0)
        return super().forward(x)


def test_training_passes_are_guarded_until_the_first_update() -> None:
    def rank(number: int) -> Any:
        training = Training(Single(), Writes)
        training.model.eval()
        with training.replica.forward():
            training.model(torch.ones(2))
        training.model.train()
        said = refused(UsageError, lambda: training.backward(torch.ones(2)))
        training.replica.backward(training.model(torch.ones(2)).sum())
        training.replica.step()
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
                with training.replica.forward():
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
def test_the_wrapped_model_is_compiled_if_the_recipe_enables_it(
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


def test_a_compiled_model_has_the_same_step_and_names_as_an_eager_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 25, with all passes of torch.compile except code generation."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.registry import lookup_backend  # takes a second; only ranks import it

        graphs.append(graph)
        return lookup_backend("aot_eager_decomp_partition")(graph, inputs)

    def rank(number: int) -> Any:
        training = Training(DDP(), Dot, compile="default")
        norm = training.step(torch.tensor([6.0, 8.0]) * 2 * number)
        return norm, training.weights(), list(training.state().model), bool(graphs)

    compile_ = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module, mode: compile_(module, backend=backend))
    assert in_ranks(2, rank) == [(10.0, {"w": [-6.0, -8.0]}, ["w"], True)] * 2


# ---------------------------------------------------------------------------------------------- synchronization
class ByRank(nn.Module):
    """Model whose tensors all contain the number of its rank, plus 1."""

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


def test_all_ranks_start_with_rank_0s_weights_and_buffers_of_any_dtype_and_layout() -> None:
    def rank(number: int) -> Any:
        training = Training(DDP(), lambda: ByRank(number))
        return values(training.replica.unwrapped)

    first, second = in_ranks(2, rank)
    assert first == second == values(ByRank(0))


def test_sync_buffers_averages_statistics_and_broadcasts_other_buffers() -> None:
    def rank(number: int) -> Any:
        training = Training(DDP(), lambda: ByRank(number))
        bare = training.replica.unwrapped
        assert isinstance(bare, ByRank)
        assert isinstance(bare.norm.running_mean, Tensor)
        assert isinstance(bare.norm.running_var, Tensor)
        assert isinstance(bare.norm.num_batches_tracked, Tensor)
        bare.norm.running_mean.fill_(1.0 + 4 * number)
        bare.norm.running_var.fill_(2.0 + 4 * number)
        bare.norm.num_batches_tracked.fill_(7 + number)
        bare.get_buffer("across").fill_(5.0 + number)
        training.replica.sync_buffers()
        return values(bare)

    first, second = in_ranks(2, rank)
    assert first == second
    assert (first["norm.running_mean"], first["norm.running_var"]) == ([3.0], [4.0])
    assert (first["norm.num_batches_tracked"], first["across"]) == ([7], [5.0] * 6)


def test_one_process_needs_no_process_group() -> None:
    def rank(number: int) -> Any:
        training = Training(Single(), lambda: ByRank(3))
        training.replica.sync_buffers()
        assert not dist.is_initialized()
        ranks = training.world.global_ranks
        return ranks.all_reduce_sum(torch.ones(2)).tolist(), ranks.broadcast("all"), ranks.rank

    assert in_ranks(1, rank) == [([1.0, 1.0], "all", 0)]


# ---------------------------------------------------------------------------------------------- checkpoints
def test_a_run_continues_from_the_state_of_another() -> None:
    def rank(number: int) -> Any:
        straight = Training(DDP(), Dot, momentum)
        resumed = Training(DDP(), Dot, momentum)
        for _ in range(2):
            straight.step(torch.ones(2))
        state = saved(straight.state())
        resumed.replica.load_state(state)
        straight.step(torch.ones(2))
        resumed.step(torch.ones(2))
        return straight.weights(), resumed.weights(), sorted(state.model)

    found = {"w": [-4.25, -4.25]}
    assert in_ranks(2, rank) == [(found, found, ["w"])] * 2


def test_extra_state_of_an_optimizer_is_saved_and_restored() -> None:
    def rank(number: int) -> Any:
        straight, resumed = Training(Single(), Dot, Counting), Training(Single(), Dot, Counting)
        for _ in range(2):
            straight.step(torch.ones(2))
        state = saved(straight.state())
        resumed.replica.load_state(state)
        straight.step(torch.ones(2))
        resumed.step(torch.ones(2))
        return straight.weights() == resumed.weights(), sorted(state.extra_state)[:2]

    assert in_ranks(1, rank) == [(True, ["optimizer.attributes.count", "optimizer.attributes.factor"])]


def test_loading_some_weights_keeps_the_others() -> None:
    def rank(number: int) -> Any:
        training = Training(Single(), Two)
        partial = CanonicalState({"b": Saved(torch.tensor([5.0]))}, {})
        said = refused(CheckpointError, lambda: training.replica.load_state(partial))
        training.replica.load_state(partial, partial=True)
        return said, training.weights()

    ((said, weights),) = in_ranks(1, rank)
    assert "missing from the checkpoint: c, frozen, w" in said
    assert weights == {"w": [0.0], "b": [5.0], "c": [0.0]}


# ---------------------------------------------------------------------------------------------- number of processes
def test_single_is_refused_in_several_processes() -> None:
    (refusal,) = Single().unsupported(train(), 2, "cpu")
    assert refusal.key == "strategy.use"
    assert refusal.message.startswith('strategy.use = "single" was started in 2 processes')
    assert refusal.hints[0].startswith('set strategy.use = "ddp"')
    assert not list(Single().unsupported(train(), 1, "cpu"))


# ---------------------------------------------------------------------------------------------- gradient callbacks
@pytest.mark.parametrize("strategy", [Single, DDP, FSDP])
def test_callbacks_read_the_reduced_gradient_before_clipping(strategy: Any) -> None:
    """Gradients in two micro-batches: 2 x (2, 4) on one rank, or (1, 2) and (3, 6) on two. Clipped to the norm 1."""
    ranks = 1 if strategy is Single else 2

    def rank(number: int) -> Any:
        training = Training(strategy(), Dot, clip_norm=1.0)
        seen: list[Any] = []

        def look(norm: Tensor) -> None:
            (part,) = training.replica.gradients_by_name().values()
            own = training.replica.weights.shards()["w"]
            assert (part.shape, part.region, part.replicas) == (own.shape, own.region, own.replicas)
            seen.extend([norm.item(), part.tensor.tolist()])

        training.replica.on_gradient = look
        x = torch.tensor([1.0, 2.0]) * (2 if ranks == 1 else 2 * number + 1)
        training.step(x, x)
        return seen

    whole = [[4.0, 8.0]] * ranks
    mine = [[4.0], [8.0]] if strategy is FSDP else whole
    assert in_ranks(ranks, rank) == [[pytest.approx(80**0.5), part] for part in mine]


# ---------------------------------------------------------------------------------------------- initial weights
def test_every_rank_starts_with_the_weights_of_rank_0() -> None:
    def rank(number: int) -> dict[str, list[float]]:
        torch.manual_seed(number)
        return Training(DDP(), lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))).weights()

    first, second = in_ranks(2, rank)
    assert first == second
    assert len(first) == 4


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda rank: nn.Linear(2 + rank, 1), "weight"),
        (lambda rank: nn.Linear(2, 1, bias=not rank), "bias"),
        (lambda rank: nn.Linear(2, 1).to(torch.float64 if rank else torch.float32), "weight"),
    ],
)
def test_a_rank_with_a_different_model_is_refused(build: Callable[[int], nn.Module], name: str) -> None:
    found = in_ranks(2, lambda rank: refused(StrategyError, lambda: Training(DDP(), lambda: build(rank))))
    for said in found:
        assert said.startswith(f"the model on rank 1 differs from the model on rank 0, first in `{name}`")
