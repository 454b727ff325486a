"""The first samples are evaluated before training, and errors are described in words."""

import copy
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from support import SUPPORT
from support.small_recipe import CALLBACKS, CODE, RECIPE, SETS, told
from support.stages import Staged

from ddpforge.builtin.models.mlp import MLP as _MLP
from ddpforge.errors import ForgeError
from ddpforge.guard import samples, static


def test_valid_parts_are_built_and_evaluated(parts: Callable[..., Staged]) -> None:
    built = parts()
    tried = built.evaluate()
    built.problems.raise_if_any()
    assert tried["train"].batch == "a list (float32 [8, 4], int64 [8])"
    assert tried["train"].metrics.keys() == {"loss", "accuracy"}
    assert (built.stage.size.all, built.stage.plan.horizon.total, built.stage.plan.batch.micro_batch) == (15, 4, 8)


@pytest.mark.parametrize(
    ("uses", "form"),
    [
        (("GraphNet", "Graphs", "GraphTask"), "a GraphBatch"),
        (("Detector", "Boxes", "Detection"), "a tuple (a list of 8, the first float32 [3, 4, 5], a list of 8, "),
    ],
)
def test_batches_that_are_not_columns_of_tensors_are_evaluated(
    parts: Callable[..., Staged], uses: Sequence[str], form: str
) -> None:
    shutil.copy(SUPPORT / "odd_batches.py", "mine.py")
    named = zip(("model", "data.train", "task"), uses, strict=True)
    sets = [f"{part}={{use='./mine.py:{use}'}}" for part, use in named]
    built = parts(*sets)
    tried = built.evaluate()
    built.problems.raise_if_any()
    model, task, data = copy.deepcopy((built.stage.model, built.stage.task, built.stage.data["train"]))
    loss, _ = task.loss(model, data.collate([data[i] for i in range(8)]))
    assert tried["train"].batch.startswith(form)
    assert tried["train"].metrics["loss"] == pytest.approx(loss.item() / 8)

    code = Path("mine.py").read_text().replace('"sum"', '"mean"').replace(".sum(), found", ".mean(), found")
    Path("mine.py").write_text(code)
    assert f"{uses[-1]}.loss returns a mean over the batch: " in told(parts(*sets), strict=True)["task"]


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["data.train.gives=dict"], "takes a batch (inputs, classes); the data gives a dict with x float32 [8, 4], y"),
        (["data.train.gives=text"], "takes a batch (inputs, classes); the data gives a list (float32 [8, 4], a tuple"),
        (["model.gives=dict"], "takes one tensor from the model, which returns a dict with logits float32 [8, 3]"),
        (["data.train.top=7"], "int64 [8] from 0 to 7 do not fit together"),
        (["task={use='./mine.py:Odd', how='alone'}"], "mine.py:Odd.loss returns float32 [], not a pair"),
        (["task={use='./mine.py:Odd', how='unreduced'}"], "returns a loss of shape [8], not one number"),
        (["task={use='./mine.py:Odd', how='detached'}"], "does not depend on any trainable parameter"),
        (["task={use='./mine.py:Odd', how='float'}"], "returns a float for the loss, not a tensor"),
        (["task={use='./mine.py:Odd', how='floats'}"], "metric `it` is a float, but must be a Total"),
        (["task={use='./mine.py:Odd', how='wide'}"], "metric `it` is not a single number: it has the shape [3], []"),
        (["task={use='./mine.py:Odd', how='list'}"], "metrics returns a list (a float), not a dict of totals"),
        (["task={use='./mine.py:Odd', how='mean'}"], "returns a mean over the batch"),
        (["task={use='./mine.py:Odd', how='rows'}"], "metric `it` returns SampleColumns, but no Metric finishes it"),
        (
            ["task={use='./mine.py:Odd', how='listed'}"],
            "metric `it` has SampleColumns of a list of 8, the first a float",
        ),
        (
            ["task={use='./mine.py:Odd', how='by turns'}"],
            "metric `it` is SampleColumns of shape [] for one batch and a Total of shape [] for another",
        ),
    ],
)
def test_invalid_batches_outputs_and_losses_are_described_in_words(
    parts: Callable[..., Staged], sets: list[str], said: str
) -> None:
    (message,) = told(parts(*sets), strict=True).values()
    assert said in message
    if sets[0].startswith("data.train.gives"):
        (message,) = told(parts(*sets)).values()
        assert said in message


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("mean", "returns a mean over the batch"),
        ("alone", "not a pair"),
        ("floats", "must be a Total"),
        ("rows", "no Metric finishes it"),
        ("listed", "has SampleColumns of a list"),
        ("by turns", "is SampleColumns of shape [] for one batch and a Total"),
        ("sum", ""),
    ],
)
def test_a_run_evaluates_a_local_task_with_a_library_model(parts: Callable[..., Staged], how: str, said: str) -> None:
    found = told(
        parts(
            "model={use='torch.nn:Linear', in_features=4, out_features=3}", f"task={{use='./mine.py:Odd', how='{how}'}}"
        )
    )
    assert len(found) == (1 if said else 0)
    assert all(said in message for message in found.values())


def test_a_sum_loss_is_accepted(parts: Callable[..., Staged]) -> None:
    assert told(parts("task={use='./mine.py:Odd', how='sum'}"), strict=True) == {}


def test_a_local_model_with_a_wrong_shape_is_reported_only_by_check(parts: Callable[..., Staged]) -> None:
    assert told(parts("model.inputs=5")) == {}
    (message,) = told(parts("model.inputs=5"), strict=True).values()
    assert re.search(r"a batch of \[data.train\] cannot be evaluated: RuntimeError: .*mat1 and mat2 shapes", message)


MLP = "model={use='mlp', inputs=%d, outputs=3, hidden=[4]}"


LINEAR = "model={use='torch.nn:Linear', in_features=%d, out_features=3}"


OWN = "task={use='./mine.py:Odd', how='sum'}"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("task", ["task.use=classification", OWN])
@pytest.mark.parametrize(
    ("model", "said"),
    [(MLP, "ValueError: MLP(inputs = 5) got samples of 4 values"), (LINEAR, "mat1 and mat2 shapes cannot be")],
)
def test_a_library_model_with_a_wrong_shape_is_reported_before_training(
    parts: Callable[..., Staged], monkeypatch: pytest.MonkeyPatch, model: str, task: str, said: str, device: str
) -> None:
    """Holds for ranks with GPUs, too: the model fails before it is moved to one."""
    built = parts(model % 5, task)
    monkeypatch.setattr("ddpforge.guard.samples.device_type", lambda train: device)
    (message,) = told(built).values()
    assert "a batch of [data.train] cannot be evaluated: " in message
    assert said in message
    assert told(parts(model % 4, task)) == {}
    opened = parts(model % 5, task, "train.global_batch=16")
    opened.deal()
    assert told(opened).keys() == {"data.train"}


def test_a_run_with_a_wrong_model_shape_fails_without_a_traceback(
    ddpforge: Callable[..., object], tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(RECIPE)
    (tmp_path / "mine.py").write_text(CODE)
    failed = ddpforge("run", "run.toml", "--set", MLP % 5, "--set", OWN, nproc=2, fails=True)
    assert failed.codes == [2, 2]  # type: ignore[attr-defined]
    assert "set model.inputs = 4" in failed.stderr  # type: ignore[attr-defined]
    assert "Traceback" not in failed.stderr  # type: ignore[attr-defined]
    assert not (tmp_path / "runs").exists()


MORE = """
from ddpforge.interfaces import Callback
from ddpforge.strategies.single import Single

class Prepares(Callback):
    pass

class Mine(Single):
    pass

class Unready(Odd):
    def loss(self, model, batch):
        raise RuntimeError("a callback makes me ready")

class Eights(Odd):
    def loss(self, model, batch):
        x, y = batch
        return super().loss(model, (x if len(x) == 16 else x[:, :3], y))
"""


@pytest.mark.parametrize(
    "sets",
    [
        [MLP % 5, "callbacks.prepares.use=./mine.py:Prepares"],
        [MLP % 5, "strategy.use=./mine.py:Mine"],
        [MLP % 5, "train.sync_batchnorm=true"],
        [MLP % 5, "train.precision=fp16"],
        [MLP % 4, "task={use='./mine.py:Unready', how='sum'}"],
        [MLP % 4, "task={use='./mine.py:Eights', how='sum'}", "train.global_batch=16"],
    ],
    ids=["a callback", "a strategy", "sync_batchnorm", "fp16", "an error of the task", "the first samples only"],
)
def test_errors_that_may_not_occur_in_training_are_not_reported(
    parts: Callable[..., Staged], monkeypatch: pytest.MonkeyPatch, sets: list[str]
) -> None:
    Path("mine.py").write_text(CODE + MORE)
    # The strategy would refuse some of these settings.
    monkeypatch.setattr(static, "CHECKS", [one for one in static.CHECKS if one[0] not in ("strategy", "train")])
    built = parts(OWN, *sets)
    assert told(built) == {}
    built.deal()
    assert told(built) == {}


def test_the_evaluation_of_samples_does_not_change_the_random_state(parts: Callable[..., Staged]) -> None:
    built = parts()
    torch.manual_seed(7)
    wanted = torch.get_rng_state()
    built.evaluate()
    assert torch.equal(torch.get_rng_state(), wanted)


def test_an_empty_stream_is_reported(parts: Callable[..., Staged]) -> None:
    Path("mine.py").write_text(CODE.replace("range(16))", "range(0))"))
    found = told(parts("data.eval={use='./mine.py:Stream'}"), strict=True)
    assert "the iterable dataset Stream yields no sample" in "".join(found.values())


def test_every_evaluation_set_is_evaluated_under_its_name(parts: Callable[..., Staged]) -> None:
    built = parts(*SETS)
    assert built.evaluate().keys() == {"train", "eval.one", "eval.two"}
    built.problems.raise_if_any()


@pytest.mark.parametrize("strict", [True, False])
def test_a_monitored_metric_must_be_reported_by_an_evaluation(parts: Callable[..., Staged], strict: bool) -> None:
    # local models are not evaluated
    Path("mine.py").write_text(CODE.replace("class Net(nn.Module)", "class Net_(nn.Module)"))
    net = "model={use='mlp', inputs=4, outputs=3, hidden=[2]}"
    stop = "callbacks.early_stopping={{metric='{}', patience=1}}"
    assert told(parts(net, *SETS, stop.format("eval/two/accuracy")), strict=strict) == {}
    for metric in ("eval/three/accuracy", "eval/accuracy"):
        found = told(parts(net, *SETS, stop.format(metric)), strict=strict)
        assert found == {"callbacks.early_stopping.metric": f"no evaluation reports {metric}"}


def test_a_monitored_metric_may_be_measured_by_a_callback(parts: Callable[..., Staged]) -> None:
    Path("calls.py").write_text(CALLBACKS)
    measures = "callbacks.fid.use=./calls.py:Measures"
    stop = "callbacks.early_stopping={metric='eval/fid', patience=1, mode='min'}"
    net = "model={use='mlp', inputs=4, outputs=3, hidden=[2]}"
    evaluates = "data.eval.use=./mine.py:Data"
    assert told(parts(net, evaluates, stop), strict=True) == {
        "callbacks.early_stopping.metric": "no evaluation reports eval/fid"
    }
    assert told(parts(net, evaluates, measures, stop), strict=True) == {}


def test_a_state_that_cannot_be_saved_is_reported_before_training(
    ddpforge: Callable[..., object], tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(RECIPE)
    keeps = """
from ddpforge.interfaces import Callback

class Keeps(Callback):
    def on_step(self, info):
        open("trained", "w").close()
    def state(self):
        return {"seen": {1, 2}}
"""
    (tmp_path / "mine.py").write_text(CODE + keeps)
    failed = ddpforge("run", "run.toml", "--set", "callbacks.keeps={use='./mine.py:Keeps'}", fails=True)
    assert failed.codes == [3]  # type: ignore[attr-defined]
    assert "seen in the state of callback keeps cannot be saved" in failed.stderr  # type: ignore[attr-defined]
    assert "Traceback" not in failed.stderr  # type: ignore[attr-defined]
    assert not (tmp_path / "trained").exists()


def test_samples_evaluated_before_training_are_fetched_once(ddpforge: Callable[..., object], tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RECIPE)
    noted = "        open('fetched', 'a').write(f'{i}\\n')\n        x, y = torch.full"
    (tmp_path / "mine.py").write_text(CODE.replace("        x, y = torch.full", noted))
    ddpforge("run", "run.toml")
    fetched = (tmp_path / "fetched").read_text().split()
    assert len(fetched) == 8 + 4 * 8, "eight samples for the data fingerprint, and four steps"
    del fetched[8:16]
    assert sorted(map(int, fetched[:16])) == sorted(map(int, fetched[16:])) == list(range(16))


def test_a_loss_that_needs_gradients_is_reported_for_evaluations(parts: Callable[..., Staged]) -> None:
    built = parts("task={use='./mine.py:Odd', how='derives'}", "data.eval={use='./mine.py:Data'}")
    built.evaluate()
    with pytest.raises(ForgeError) as caught:
        built.problems.raise_if_any()
    told = str(caught.value) + " ".join(getattr(caught.value, "hints", ()))
    problems = getattr(caught.value, "problems", [])
    told += " ".join(f"{one.message} {' '.join(one.hints)}" for one in problems)
    assert "a batch of [data.eval] cannot be evaluated" in told
    assert "with torch.enable_grad()" in told


def test_a_check_computes_the_loss_of_evaluations_for_evaluation_sets(parts: Callable[..., Staged]) -> None:
    Path("two.py").write_text(
        CODE
        + """
class Two(Odd):
    def loss(self, model, batch):
        loss, outputs = super().loss(model, batch)
        return loss * (0 if self.evaluates else 1), outputs
"""
    )
    found = parts("task={use='./two.py:Two', how='sum'}", "data.eval={use='./mine.py:Data'}").evaluate()
    assert found["eval"].metrics["loss"] == 0 < found["train"].metrics["loss"]


def test_a_model_is_called_five_times_before_training(
    parts: Callable[..., Staged], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls: one for the loss and its metrics; two on halves and two on the whole batch to detect a mean loss."""
    built, calls, forward = parts(MLP % 4), [], _MLP.forward

    def counted(model: _MLP, x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return forward(model, x)

    monkeypatch.setattr(_MLP, "forward", counted)
    assert told(built) == {}
    assert calls == [8, 4, 4, 8, 8]


@pytest.mark.parametrize("small", [True, False])
def test_a_large_model_is_neither_copied_nor_called_before_training(
    parts: Callable[..., Staged], monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    built, calls, forward = parts(MLP % 4), [], _MLP.forward
    parameters = built.stage.size.all

    def counted(model: _MLP, x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return forward(model, x)

    monkeypatch.setattr(_MLP, "forward", counted)
    monkeypatch.setattr(samples, "SMALL", parameters if small else parameters - 1)
    assert samples.check_first_batch(built.stage, built.problems) is small
    assert bool(calls) is small
