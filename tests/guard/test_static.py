"""Settings that no strategy supports are refused at the key of the recipe."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.forked import train
from support.small_recipe import CALLBACKS, CODE, told
from support.stages import Staged, chosen_with, staged

from ddpforge.errors import RecipeError
from ddpforge.guard.static import check_device, check_max_tokens
from ddpforge.interfaces import Contract


@pytest.mark.parametrize("key", ["tf32", "cudnn_benchmark"])
def test_gpu_settings_are_refused_on_a_cpu(key: str) -> None:
    (found,) = check_device(chosen_with(train(**{key: True}), ranks=1, device="cpu"))
    assert found.key == f"train.{key}"
    assert "which needs CUDA, but this run is on cpu" in found.message
    assert not list(check_device(chosen_with(train(**{key: True}), ranks=1, device="cuda")))


def test_cudnn_benchmark_is_refused_with_deterministic() -> None:
    (found,) = check_device(chosen_with(train(cudnn_benchmark=True, deterministic=True), ranks=1, device="cuda"))
    assert "train.deterministic forbids that" in found.message


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("asked", "device", "count"), [(True, "cpu", 1), (True, "cuda", 0), (False, "cpu", 0)])
def test_sync_batchnorm_needs_a_gpu(ranks: int, asked: bool, device: str, count: int) -> None:
    found = list(check_device(chosen_with(train(sync_batchnorm=asked), ranks=ranks, device=device)))
    assert [each.key for each in found] == ["train.sync_batchnorm"] * count
    message = "train.sync_batchnorm needs CUDA, but this run is on cpu"
    assert [each.message for each in found] == [message] * count


RAGGED = """
class Ragged(Data):
    lengths = [5, 3] * 8

class Steps(Net):
    pipeline = ("layer",)
"""


@pytest.mark.parametrize(
    ("sets", "key", "message"),
    [
        ([], "", ""),
        (["data.eval={use='./mine.py:Ragged'}", "train.eval_batch=2"], "", ""),
        (["data.eval={use='./mine.py:Ragged'}"], "train.max_tokens", "a forward pass of an evaluation has 8 samples"),
        (["task={use='contrastive'}"], "train.max_tokens", "compares all samples of a step with each other"),
        (["data.train.use=./mine.py:Data"], "data", "data.lengths: Data has no attribute or method `lengths`"),
        (["train.max_tokens=4"], "train.max_tokens", "sample 0 has 5 tokens; samples that are too long: 8 of 16"),
        (["data.train.use=./mine.py:Stream"], "train.max_tokens", "needs the length of every sample in advance"),
        (["strategy.use=pipeline"], "train.max_tokens", "sends micro-batches of one shape between ranks"),
    ],
)
def test_a_limit_of_tokens_is_refused_where_it_cannot_work(
    parts: Callable[..., Staged], sets: list[str], key: str, message: str
) -> None:
    parts()
    Path("mine.py").write_text(CODE + RAGGED)
    found = told(parts("train.max_tokens=10", "data.train.use=./mine.py:Ragged", *sets))
    assert message in found.get(key, "") if message else found == {}


def test_cuda_graphs_refuse_a_limit_of_tokens() -> None:
    plain = SimpleNamespace(whole_batch=False)
    strategy = SimpleNamespace(contract=Contract(clipping="", accumulation=""))
    data: Any = {"data": SimpleNamespace(evaluations={})}
    options = train(max_tokens=8, compile="reduce-overhead")
    (found,) = check_max_tokens(chosen_with(options, recipe=data, task=plain, strategy=strategy, device="cuda"))
    assert "replays CUDA graphs of one shape" in found.message


def test_a_stream_without_a_length_refuses_all_durations_in_epochs(parts: Callable[..., Staged]) -> None:
    sets = ["data.train.use=./mine.py:Stream", "checkpoint.every=1ep", "track.every=1ep", "train.length=2ep"]
    assert told(parts(*sets)).keys() == {"checkpoint.every", "track.every", "train.length"}


def test_missing_initial_weights_are_ignored_on_resume(parts: Callable[..., Staged]) -> None:
    parts()
    for resumes in (True, False):
        found = staged("run.toml", "checkpoint.init_from=nowhere", resumes=resumes)
        assert bool(found.problems) is not resumes


def test_a_callback_with_an_old_signature_is_refused(parts: Callable[..., Staged]) -> None:
    Path("calls.py").write_text(CALLBACKS)
    found = told(parts("callbacks.old.use=./calls.py:Old"))
    assert found == {"callbacks.old": "callback `old`: Old.on_start must take one argument, the run"}


def test_a_callback_that_reads_gradients_is_refused_if_the_strategy_provides_none(
    parts: Callable[..., Staged],
) -> None:
    Path("calls.py").write_text(CALLBACKS)
    reads = "callbacks.reads.use=./calls.py:Reads"
    assert told(parts(reads)) == {}
    found = told(parts(reads, "strategy={use='deepspeed'}"))
    said = "callback `reads` (Reads) reads gradients in `on_gradient`, but this strategy cannot provide them"
    assert found["callbacks.reads"] == said


def test_a_callback_that_calls_the_model_is_refused_if_no_rank_has_the_whole_model(
    parts: Callable[..., Staged],
) -> None:
    Path("calls.py").write_text(CALLBACKS)
    calls = "callbacks.calls.use=./calls.py:Calls"
    assert told(parts(calls)) == {}
    said = "callback `calls` (Calls) calls the model, but under this strategy no rank has the whole model"
    assert told(parts(calls, "strategy={use='pipeline'}"))["callbacks.calls"] == said


UPDATES = """
class Duel(Task):
    updates = ("up", "down")
    def loss(self, model, batch, turn=""):
        y = model(batch[0]).square().sum()
        return (y if turn == "up" else -y), None
"""


UP, DOWN = "optimizer.updates.up={parameters=['*.weight']}", "optimizer.updates.down={parameters=['*.bias']}"


@pytest.mark.parametrize(
    ("sets", "key", "said"),
    [
        ([UP], "optimizer", "[optimizer.updates.down] is missing: the task makes an update of that name in every step"),
        ([UP, DOWN, "optimizer.updates.sideways={}"], "optimizer.updates.sideways", "has no update `sideways`"),
        ([UP, "optimizer.updates.down={}"], "optimizer.updates.down.parameters", "`down.*` matches no parameter"),
        ([UP, "optimizer.updates.down={parameters=['layer.*']}"], "optimizer.updates", "is in the updates up and down"),
        (
            [UP, DOWN, "optimizer.updates.up.use='torch.optim:SGD'", "optimizer.updates.up.lr=0.0"],
            "optimizer.updates.up.lr",
            "`optimizer.updates.up.lr` must be more than 0",
        ),
        ([UP, DOWN, "strategy.use=deepspeed"], "optimizer.updates", "makes one update a step"),
        (
            [UP, DOWN, "optimizer.updates.up.schedule={use='constant', warmup='9st'}"],
            "optimizer.updates.up",
            "warm-up of 9",
        ),
    ],
)
def test_invalid_alternating_updates_are_refused(
    parts: Callable[..., Staged], sets: list[str], key: str, said: str
) -> None:
    Path("mine.py").write_text(CODE + UPDATES)
    found = told(parts("~task.metrics", "task.use=./mine.py:Duel", *sets))
    assert any(place.startswith(key) and said in message for place, message in found.items()), found


def test_the_loss_must_accept_the_name_of_its_update(parts: Callable[..., Staged]) -> None:
    Path("mine.py").write_text(CODE + UPDATES.replace(', turn=""', ""))
    found = told(parts("~task.metrics", "task.use=./mine.py:Duel", UP, DOWN))
    assert "mine.py:Duel has the updates up, down, but its `loss` takes no update" in found["task"]


def test_updates_of_a_task_without_alternating_updates_are_refused(parts: Callable[..., Staged]) -> None:
    found = told(parts(UP))
    assert "the task `classification` has no update `up`" in found["optimizer.updates.up"]


@pytest.mark.parametrize(
    ("group", "key", "said"),
    [
        (
            "{parameters=['layers.*']}",
            "optimizer.groups.g.parameters",
            "`layers.*` matches no parameter; similar names:",
        ),
        ("{parameters=['bias'], use='muon', lr=0.1}", "optimizer", "`layer.bias` has the shape [3]"),
        ("{parameters=['bias'], fused='auto'}", "", ""),
        ("{parameters=['bias'], fused=true}", "", ""),
        ("{parameters=['bias'], use='torch.optim:SGD', lr=0.0}", "optimizer.groups.g.lr", "must be more than 0"),
        ("{parameters=['bias'], rho=1}", "optimizer.groups.g.rho", "unknown key `rho` in [optimizer.groups.g]"),
        ("{lr=0.1}", "optimizer.groups.g", "missing key `parameters`"),
    ],
)
def test_invalid_groups_are_refused(parts: Callable[..., Staged], group: str, key: str, said: str) -> None:
    try:
        found = told(parts(f"optimizer.groups.g={group}"))
    except RecipeError as error:
        found = {problem.key: problem.message for problem in error.problems}
    if not said:
        assert not found
    assert all(place.startswith(key) and said in message for place, message in found.items()), found
    assert bool(found) == bool(said)


def test_a_second_optimizer_is_refused_by_a_strategy_with_one_optimizer(parts: Callable[..., Staged]) -> None:
    group = "optimizer.groups.g={parameters=['2d'], use='muon', lr=0.1}"
    found = told(parts(group, "strategy.use=deepspeed"))
    assert "takes one optimizer; [optimizer.groups.g] has another" in found["optimizer.groups.g.use"]
    assert "optimizer.groups.g.lr" not in told(parts("optimizer.groups.g={parameters=['2d'], lr=0.5}"))
