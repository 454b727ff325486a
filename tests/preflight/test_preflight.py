"""Before training all that cannot work is found in one pass; what a few samples tell is told in words."""

import copy
import json
import re
import shutil
from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import SUPPORT
from support.doubles import Plain
from support.stages import Staged, staged

from ddpforge import preflight
from ddpforge.app.build import short_steps
from ddpforge.app.evaluate import check_sets
from ddpforge.builtin.orders.plain import Shuffled
from ddpforge.errors import ForgeError, RecipeError, UsageError
from ddpforge.preflight import CHECKS, function_of
from ddpforge.recipe import load_recipe
from ddpforge.training.stages import Chosen

RECIPE = """
recipe = 1
name = "run"
[model]
use = "./mine.py:Net"
[data.train]
use = "./mine.py:Data"
[task]
use = "classification"
metrics = ["accuracy"]
[optimizer]
use = "sgd"
lr = 0.1
[train]
length = "4st"
global_batch = 8
[checkpoint]
every = "4st"
"""
CODE = """
import torch
from torch import nn
from torch.utils.data import IterableDataset
from ddpforge.interfaces import Rows, Task, Total

class Net(nn.Module):
    def __init__(self, inputs: int = 4, outputs: int = 3, gives: str = "logits") -> None:
        super().__init__()
        self.layer, self.gives = nn.Linear(inputs, outputs), gives
    def forward(self, x):
        y = self.layer(x)
        return {"logits": y} if self.gives == "dict" else y

class Data:
    def __init__(self, gives: str = "pair", top: int = 2) -> None:
        self.gives, self.top = gives, top
    def __len__(self):
        return 16
    def __getitem__(self, i):
        x, y = torch.full((4,), float(i)) / 16, i % (self.top + 1)
        return {"x": x, "y": y} if self.gives == "dict" else (x, "text") if self.gives == "text" else (x, y)

class Stream(IterableDataset):
    def __iter__(self):
        data = Data()
        yield from (data[i] for i in range(16))

class Odd(Task):
    def __init__(self, how: str) -> None:
        self.how = how
    def loss(self, model, batch):
        y = model(batch[0])
        losses = nn.functional.cross_entropy(y, batch[1], reduction="none")
        if self.how == "derives":
            torch.autograd.grad(losses.sum(), y, create_graph=True)
        found = {"mean": losses.mean(), "unreduced": losses, "detached": losses.sum().detach()}.get(self.how)
        found = losses.sum() if found is None else found
        return found if self.how == "alone" else (found.item(), y) if self.how == "float" else (found, y)
    def metrics(self, outputs, batch):
        if self.how == "list":
            return [1.0]
        if self.how == "rows":
            return {"it": Rows(batch[1])}
        if self.how == "listed":
            return {"it": Rows([0.5] * 8, batch[1])}
        if self.how == "by turns":
            self.calls = getattr(self, "calls", 0) + 1
            return {"it": Rows(batch[1]) if self.calls % 2 else Total(batch[1].sum(), 8)}
        return {"it": 0.5} if self.how == "floats" else {"it": Total(torch.zeros(3), 3)} if self.how == "wide" else {}
"""


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Staged]:
    """`parts("model.inputs=5", …)`: the parts of a small recipe with local code, as `check --build` builds them."""
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RECIPE)
    Path("mine.py").write_text(CODE)

    return lambda *sets: staged("run.toml", *sets)


def told(parts: Staged, *, strict: bool = False) -> dict[str, str]:
    """What is wrong, by key: what a run finds, or a check."""
    return parts.errors(strict=strict)


def test_parts_that_fit_are_built_and_tried(parts: Callable[..., Staged]) -> None:
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
def test_batches_that_are_no_columns_of_tensors_are_tried(
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
        (["task={use='./mine.py:Odd', how='floats'}"], "metric `it` is a float, and must be a Total"),
        (["task={use='./mine.py:Odd', how='wide'}"], "metric `it` is no single number: it is of shape [3], []"),
        (["task={use='./mine.py:Odd', how='list'}"], "metrics returns a list (a float), not a dict of totals"),
        (["task={use='./mine.py:Odd', how='mean'}"], "returns a mean over the batch"),
        (["task={use='./mine.py:Odd', how='rows'}"], "metric `it` returns Rows, and nothing finishes it"),
        (["task={use='./mine.py:Odd', how='listed'}"], "metric `it` has Rows of a list of 8, the first a float"),
        (
            ["task={use='./mine.py:Odd', how='by turns'}"],
            "metric `it` is now Rows of shape [], now a Total of shape []",
        ),
    ],
)
def test_a_form_that_cannot_work_is_told_in_words(parts: Callable[..., Staged], sets: list[str], said: str) -> None:
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
        ("rows", "nothing finishes it"),
        ("listed", "has Rows of a list"),
        ("by turns", "is now Rows of shape [], now a Total"),
        ("sum", ""),
    ],
)
def test_a_run_tries_a_task_of_its_own_files_with_a_model_that_only_computes(
    parts: Callable[..., Staged], how: str, said: str
) -> None:
    found = told(
        parts(
            "model={use='torch.nn:Linear', in_features=4, out_features=3}", f"task={{use='./mine.py:Odd', how='{how}'}}"
        )
    )
    assert len(found) == (1 if said else 0)
    assert all(said in message for message in found.values())


def test_a_model_that_cannot_be_built_says_why(parts: Callable[..., Staged]) -> None:
    Path("mine.py").write_text(CODE + "\ndef broken():\n    raise ValueError('no wheels')\n")
    assert "no wheels" in told(parts("model={use='./mine.py:broken'}"))["model"]


def test_a_sum_is_no_mean(parts: Callable[..., Staged]) -> None:
    assert told(parts("task={use='./mine.py:Odd', how='sum'}"), strict=True) == {}


def test_a_model_of_another_shape_is_left_to_the_run_but_not_by_check(parts: Callable[..., Staged]) -> None:
    assert told(parts("model.inputs=5")) == {}
    (message,) = told(parts("model.inputs=5"), strict=True).values()
    assert re.search(r"a batch of \[data.train\] cannot be evaluated: RuntimeError: .*mat1 and mat2 shapes", message)


@pytest.mark.parametrize(
    ("sets", "key", "said"),
    [
        (
            ["data.train.use=./mine.py:Stream", "data.order={use='sequential'}"],
            "data.order",
            "Stream is an iterable dataset, whose samples come in its own order",
        ),
        (["data.order={use='balanced', by='label'}"], "data.order.by", "by: Data has no `label`, by which to order"),
        (["data.order={use='growing', start=1, until='4ep'}"], "data.order.until", "until: 4ep must be in steps"),
        (
            ["data.order={use='growing', start=1, until='4st'}", "train.length=1.5ep"],
            "train.length",
            "train.length: 1.5ep needs to know how long an epoch is, and this data has no epochs of one length",
        ),
        (["data.order={use='collections:Counter'}"], "data.order", "must be a ddpforge.interfaces.Order"),
    ],
)
def test_an_order_that_cannot_be_is_told_before_training(
    parts: Callable[..., Staged], sets: list[str], key: str, said: str
) -> None:
    problems = told(parts(*sets))
    assert said in problems[key]
    assert len(problems) == 1


@pytest.mark.parametrize(("length", "steps"), [("1ep", 5), ("2ep", 7), ("10ep", 23)])
def test_whole_epochs_of_an_order_whose_steps_grow_are_a_length(
    parts: Callable[..., Staged], length: str, steps: int
) -> None:
    """16 samples in steps of 1, 2, 4, 6 and 3, which is what is left; then of 8."""
    built = parts("data.order={use='growing', start=1, until='4st'}", f"train.length={length}")
    assert told(built) == {}
    assert built.stage.plan.horizon.total == steps


def test_an_order_decides_how_long_an_epoch_is(parts: Callable[..., Staged]) -> None:
    assert parts("train.length=2ep").stage.plan.horizon.total == 4
    assert parts("train.length=2ep", "data.order={use='repeated', times=3}").stage.plan.horizon.total == 12


MLP = "model={use='mlp', inputs=%d, outputs=3, hidden=[4]}"
LINEAR = "model={use='torch.nn:Linear', in_features=%d, out_features=3}"
OWN = "task={use='./mine.py:Odd', how='sum'}"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("task", ["task.use=classification", OWN])
@pytest.mark.parametrize(
    ("model", "said"),
    [(MLP, "ValueError: MLP(inputs = 5) got samples of 4 values"), (LINEAR, "mat1 and mat2 shapes cannot be")],
)
def test_a_model_that_only_computes_is_told_to_have_another_shape_before_training(
    parts: Callable[..., Staged], monkeypatch: pytest.MonkeyPatch, model: str, task: str, said: str, device: str
) -> None:
    """Where ranks have GPUs, too: the model fails before it is on one."""
    built = parts(model % 5, task)
    monkeypatch.setattr("ddpforge.preflight.samples.device_type", lambda train: device)
    (message,) = told(built).values()
    assert "a batch of [data.train] cannot be evaluated: " in message
    assert said in message
    assert told(parts(model % 4, task)) == {}
    opened = parts(model % 5, task, "train.global_batch=16")
    opened.deal()
    assert told(opened).keys() == {"data.train"}


def test_a_run_of_a_model_of_another_shape_ends_in_words(ddpforge: Callable[..., object], tmp_path: Path) -> None:
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
def test_what_may_work_in_training_is_left_to_it(
    parts: Callable[..., Staged], monkeypatch: pytest.MonkeyPatch, sets: list[str]
) -> None:
    Path("mine.py").write_text(CODE + MORE)
    # The strategy would refuse some of that.
    passing = [one for one in preflight.CHECKS[Chosen] if one[0] not in ("strategy", "train")]
    monkeypatch.setitem(preflight.CHECKS, Chosen, passing)
    built = parts(OWN, *sets)
    assert told(built) == {}
    built.deal()
    assert told(built) == {}


def test_a_stream_without_a_length_is_met_with_all_that_counts_epochs(parts: Callable[..., Staged]) -> None:
    sets = ["data.train.use=./mine.py:Stream", "checkpoint.every=1ep", "track.every=1ep", "train.length=2ep"]
    assert told(parts(*sets)).keys() == {"checkpoint.every", "track.every", "train.length"}


def test_random_numbers_are_what_they_were(parts: Callable[..., Staged]) -> None:
    built = parts()
    torch.manual_seed(7)
    wanted = torch.get_rng_state()
    built.evaluate()
    assert torch.equal(torch.get_rng_state(), wanted)


def test_a_stream_without_a_sample_is_told(parts: Callable[..., Staged]) -> None:
    Path("mine.py").write_text(CODE.replace("range(16))", "range(0))"))
    found = told(parts("data.eval={use='./mine.py:Stream'}"), strict=True)
    assert "the iterable dataset Stream holds no sample" in "".join(found.values())


def test_initial_weights_that_are_not_there_do_not_matter_to_a_resume(parts: Callable[..., Staged]) -> None:
    parts()
    for resumes in (True, False):
        found = staged("run.toml", "checkpoint.init_from=nowhere", resumes=resumes)
        assert bool(found.problems) is not resumes


# ---------------------------------------------------------------------------------------------- evaluation sets
SETS = ["data.eval.one.use=./mine.py:Data", "data.eval.two={use='./mine.py:Data', top=1}"]


def test_every_evaluation_set_is_tried_by_its_name(parts: Callable[..., Staged]) -> None:
    built = parts(*SETS)
    assert built.evaluate().keys() == {"train", "eval.one", "eval.two"}
    built.problems.raise_if_any()


def test_a_set_that_cannot_be_built_is_blamed_and_no_other(parts: Callable[..., Staged]) -> None:
    Path("mine.py").write_text(CODE + "\ndef none(seed: int):\n    return []\n")
    found = told(parts(*SETS, "data.eval.three.use=./mine.py:none"), strict=True)
    assert found == {"data.eval.three": "list is empty: it has no samples"}


@pytest.mark.parametrize("strict", [True, False])
def test_a_metric_that_recipes_decide_by_is_one_of_a_set(parts: Callable[..., Staged], strict: bool) -> None:
    Path("mine.py").write_text(CODE.replace("class Net(nn.Module)", "class Net_(nn.Module)"))  # local models wait
    net = "model={use='mlp', inputs=4, outputs=3, hidden=[2]}"
    stop = "callbacks.early_stopping={{metric='{}', patience=1}}"
    assert told(parts(net, *SETS, stop.format("eval/two/accuracy")), strict=strict) == {}
    for metric in ("eval/three/accuracy", "eval/accuracy"):
        found = told(parts(net, *SETS, stop.format(metric)), strict=strict)
        assert found == {"callbacks.early_stopping.metric": f"no evaluation reports {metric}"}


CALLBACKS = """
from ddpforge.interfaces import Callback

class Old(Callback):
    def on_start(self, model, world, weights): ...

class Reads(Callback):
    def on_gradient(self, step, norm): ...

class Calls(Callback):
    calls_model = True

class Measures(Callback):
    def while_evaluating(self, step):
        return {"fid": 1.0}
"""


def test_a_callback_of_an_older_contract_is_told_what_to_change(parts: Callable[..., Staged]) -> None:
    Path("calls.py").write_text(CALLBACKS)
    found = told(parts("callbacks.old.use=./calls.py:Old"))
    assert found == {"callbacks.old": "callback `old`: Old.on_start takes other arguments than the run"}


def test_a_callback_that_reads_gradients_is_refused_where_the_strategy_cannot_show_them(
    parts: Callable[..., Staged],
) -> None:
    Path("calls.py").write_text(CALLBACKS)
    reads = "callbacks.reads.use=./calls.py:Reads"
    assert told(parts(reads)) == {}
    found = told(parts(reads, "strategy={use='deepspeed'}"))
    said = "callback `reads` (Reads) reads gradients in `on_gradient`, and this strategy cannot show them"
    assert found["callbacks.reads"] == said


def test_a_callback_that_calls_the_model_is_refused_where_no_rank_has_all_of_it(parts: Callable[..., Staged]) -> None:
    Path("calls.py").write_text(CALLBACKS)
    calls = "callbacks.calls.use=./calls.py:Calls"
    assert told(parts(calls)) == {}
    said = "callback `calls` (Calls) calls the model, and under this strategy no rank has all of it"
    assert told(parts(calls, "strategy={use='pipeline'}"))["callbacks.calls"] == said


def test_what_a_callback_measures_may_be_what_a_recipe_decides_by(parts: Callable[..., Staged]) -> None:
    Path("calls.py").write_text(CALLBACKS)
    measures = "callbacks.fid.use=./calls.py:Measures"
    stop = "callbacks.early_stopping={metric='eval/fid', patience=1, mode='min'}"
    net = "model={use='mlp', inputs=4, outputs=3, hidden=[2]}"
    evaluates = "data.eval.use=./mine.py:Data"
    assert told(parts(net, evaluates, stop), strict=True) == {
        "callbacks.early_stopping.metric": "no evaluation reports eval/fid"
    }
    assert told(parts(net, evaluates, measures, stop), strict=True) == {}


def evaluated(*only: str, sets: Sequence[str] = SETS) -> Staged:
    """The parts of an evaluation: nothing else can be built, for their constructors raise."""
    Path("gone.py").write_text(
        "def gone(seed: int = 0, params: object = None, horizon: object = None):\n    raise OSError('gone')\n"
    )
    lost = [f"{kind}={{use='./gone.py:gone'}}" for kind in ("data.train", "optimizer", "schedule", "track.lost")]
    # among which a batch of 8 cannot be dealt out
    built = staged("run.toml", *lost, *sets, ranks=3, meta=False, trains=False, only=only)
    built.problems.raise_if_any()
    return built


@pytest.mark.usefixtures("parts")
def test_an_evaluation_needs_no_training_data_optimizer_schedule_or_tracker() -> None:
    built = evaluated()
    assert built.stage.data.keys() == {"eval.one", "eval.two"}
    built.deal(Plain(ranks=3).world)
    assert [len(micro.data[0]) for micro in built.stage.evaluation["one"].evaluation()] == [2, 2, 1]  # of 16


@pytest.mark.usefixtures("parts")
def test_an_evaluation_may_be_on_some_of_the_sets() -> None:
    assert evaluated("two").stage.data.keys() == {"eval.two"}
    recipe = load_recipe("run.toml", sets=SETS).recipe
    with pytest.raises(UsageError, match=r"no \[data\.eval\.tow\] to evaluate on") as caught:
        check_sets(recipe, ["tow"])
    assert caught.value.hints == ("did you mean `two`?", "there are one, two")


@pytest.mark.usefixtures("parts")
def test_a_set_that_has_no_name_cannot_be_named() -> None:
    recipe = load_recipe("run.toml", sets=["data.eval.use=./mine.py:Data"]).recipe
    with pytest.raises(UsageError, match=r"no \[data\.eval\.one\] to evaluate on") as caught:
        check_sets(recipe, ["one"])
    assert caught.value.hints == ("its one [data.eval] has no name",)
    with pytest.raises(UsageError, match=r"the recipe has no \[data\.eval\] to evaluate on"):
        check_sets(load_recipe("run.toml").recipe, [])


# ---------------------------------------------------------------------------------------------- turns
TURNS = """
class Duel(Task):
    turns = ("up", "down")
    def loss(self, model, batch, turn=""):
        y = model(batch[0]).square().sum()
        return (y if turn == "up" else -y), None
"""
UP, DOWN = "optimizer.turns.up={parameters=['*.weight']}", "optimizer.turns.down={parameters=['*.bias']}"


@pytest.mark.parametrize(
    ("sets", "key", "said"),
    [
        ([UP], "optimizer", "[optimizer.turns.down] is missing: the task makes an update of that name in every step"),
        ([UP, DOWN, "optimizer.turns.sideways={}"], "optimizer.turns.sideways", "has no turn `sideways`"),
        ([UP, "optimizer.turns.down={}"], "optimizer.turns.down.parameters", "`down.*` matches no parameter"),
        ([UP, "optimizer.turns.down={parameters=['layer.*']}"], "optimizer.turns", "is in the turns up and down"),
        (
            [UP, DOWN, "optimizer.turns.up.use='torch.optim:SGD'", "optimizer.turns.up.lr=0.0"],
            "optimizer.turns.up.lr",
            "`optimizer.turns.up.lr` must be more than 0",
        ),
        ([UP, DOWN, "strategy.use=deepspeed"], "optimizer.turns", "makes one update a step"),
        (
            [UP, DOWN, "optimizer.turns.up.schedule={use='constant', warmup='9st'}"],
            "optimizer.turns.up",
            "warm-up of 9",
        ),
    ],
)
def test_turns_that_do_not_fit(parts: Callable[..., Staged], sets: list[str], key: str, said: str) -> None:
    Path("mine.py").write_text(CODE + TURNS)
    found = told(parts("~task.metrics", "task.use=./mine.py:Duel", *sets))
    assert any(place.startswith(key) and said in message for place, message in found.items()), found


def test_a_loss_is_told_its_turn(parts: Callable[..., Staged]) -> None:
    Path("mine.py").write_text(CODE + TURNS.replace(', turn=""', ""))
    found = told(parts("~task.metrics", "task.use=./mine.py:Duel", UP, DOWN))
    assert "mine.py:Duel has the turns up, down, and its `loss` is not told which" in found["task"]


def test_turns_of_a_task_that_has_none(parts: Callable[..., Staged]) -> None:
    found = told(parts(UP))
    assert "the task `classification` has no turn `up`" in found["optimizer.turns.up"]


# ---------------------------------------------------------------------------------------------- groups
@pytest.mark.parametrize(
    ("group", "key", "said"),
    [
        ("{parameters=['layers.*']}", "optimizer.groups.g.parameters", "`layers.*` matches no parameter; near it are"),
        ("{parameters=['bias'], use='muon', lr=0.1}", "optimizer", "`layer.bias` has the shape [3]"),
        ("{parameters=['bias'], fused='auto'}", "", ""),
        ("{parameters=['bias'], fused=true}", "", ""),
        ("{parameters=['bias'], use='torch.optim:SGD', lr=0.0}", "optimizer.groups.g.lr", "must be more than 0"),
        ("{parameters=['bias'], rho=1}", "optimizer.groups.g.rho", "unknown key `rho` in [optimizer.groups.g]"),
        ("{lr=0.1}", "optimizer.groups.g", "missing key `parameters`"),
    ],
)
def test_groups_that_do_not_fit(parts: Callable[..., Staged], group: str, key: str, said: str) -> None:
    try:
        found = told(parts(f"optimizer.groups.g={group}"))
    except RecipeError as error:
        found = {problem.key: problem.message for problem in error.problems}
    if not said:
        assert not found
    assert all(place.startswith(key) and said in message for place, message in found.items()), found
    assert bool(found) == bool(said)


def test_another_optimizer_under_a_strategy_that_takes_one(parts: Callable[..., Staged]) -> None:
    group = "optimizer.groups.g={parameters=['2d'], use='muon', lr=0.1}"
    found = told(parts(group, "strategy.use=deepspeed"))
    assert "takes one optimizer; [optimizer.groups.g] has another" in found["optimizer.groups.g.use"]
    assert "optimizer.groups.g.lr" not in told(parts("optimizer.groups.g={parameters=['2d'], lr=0.5}"))


# ---------------------------------------------------------------------------------------------- what else goes wrong
def test_one_error_of_the_machine_stays_what_it_is(parts: Callable[..., Staged]) -> None:
    Path("mine.py").write_text(
        CODE + "\nfrom ddpforge.errors import EnvironmentProblem\n"
        "def absent(seed: int):\n    raise EnvironmentProblem('no disk', hints=['mount it'])\n"
    )
    with pytest.raises(ForgeError, match="no disk") as caught:
        parts("data.train.use=./mine.py:absent").problems.raise_if_any()
    assert (caught.value.exit_code, caught.value.hints) == (3, ("mount it",))


def test_a_state_that_no_checkpoint_can_hold_is_found_before_training(
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


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_run_says_all_of_it_and_makes_no_folder(ddpforge: Callable[..., object], tmp_path: Path, nproc: int) -> None:
    (tmp_path / "run.toml").write_text(RECIPE)
    (tmp_path / "mine.py").write_text(CODE)
    wrong = ('optimizer.no_decay=["biass"]', 'train.blocks=["Nope"]', "data.train.gives=dict")
    sets = [word for text in wrong for word in ("--set", text)]
    failed = ddpforge("run", "run.toml", *sets, nproc=nproc, fails=True)
    assert set(failed.codes) == {2}  # type: ignore[attr-defined]
    said = failed.stderr  # type: ignore[attr-defined]
    assert "3 errors in the recipe; nothing was started." in said
    for message in ("`biass` matches no parameter", "has no Nope", "the data gives a dict with x float32 [4, 4]"):
        assert message.replace("[4, 4]", f"[{8 // nproc}, 4]") in said
    assert "Traceback" not in said
    assert not (tmp_path / "runs").exists()


def test_the_json_of_a_check_has_keys(parts: Callable[..., Staged]) -> None:
    found = told(parts("optimizer.no_decay=['biass']"))
    assert json.dumps(list(found)) == '["optimizer.no_decay"]'


def test_what_is_looked_at_before_training_is_fetched_once(ddpforge: Callable[..., object], tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RECIPE)
    noted = "        open('fetched', 'a').write(f'{i}\\n')\n        x, y = torch.full"
    (tmp_path / "mine.py").write_text(CODE.replace("        x, y = torch.full", noted))
    ddpforge("run", "run.toml")
    fetched = (tmp_path / "fetched").read_text().split()
    assert len(fetched) == 8 + 4 * 8, "eight samples, by which the data is known again, and four steps"
    del fetched[8:16]
    assert sorted(map(int, fetched[:16])) == sorted(map(int, fetched[16:])) == list(range(16))


def test_the_first_micro_batch_is_that_of_training() -> None:
    from ddpforge.builtin.orders.plain import Shuffled
    from ddpforge.data import RankShare, open_data

    fetching = {"seed": 3, "drop_last": False, "workers": 0, "prefetch": 2, "pin": False}
    order = Shuffled(torch.arange(10), 3, 4, False)
    batches = open_data(torch.arange(10), order=order, global_batch=4, share=RankShare(0, 1, 4), **fetching)  # type: ignore[arg-type]
    wanted = [next(batches.training(start)).data.tolist() for start in (0, 1)]
    assert batches.first().data.tolist() == wanted[0]
    source = batches.training(0)
    assert [next(source).data.tolist() for _ in (0, 1)] == wanted
    batches.first()
    assert next(batches.training(1)).data.tolist() == wanted[1]
    assert next(batches.training(0)).data.tolist() == wanted[0]


@pytest.mark.parametrize(("samples", "note"), [(3, "every step has 3 samples, not train.global_batch = 8"), (8, "")])
def test_steps_that_the_data_cannot_fill_are_described(samples: int, note: str) -> None:
    order = Shuffled(range(samples), 0, 8, False)
    parts: Any = SimpleNamespace(order=order, recipe=SimpleNamespace(train=SimpleNamespace(global_batch=8)))
    assert short_steps(parts).startswith(note)
    assert bool(short_steps(parts)) == bool(note)


def test_a_loss_that_needs_gradients_is_tried_as_evaluations_call_it(parts: Callable[..., Staged]) -> None:
    built = parts("task={use='./mine.py:Odd', how='derives'}", "data.eval={use='./mine.py:Data'}")
    built.evaluate()
    with pytest.raises(ForgeError) as caught:
        built.problems.raise_if_any()
    told = str(caught.value) + " ".join(getattr(caught.value, "hints", ()))
    problems = getattr(caught.value, "problems", [])
    told += " ".join(f"{one.message} {' '.join(one.hints)}" for one in problems)
    assert "a batch of [data.eval] cannot be evaluated" in told
    assert "with torch.enable_grad()" in told


# ---------------------------------------------------------------------------------------------- the key at fault
WORDS = """
from torch import nn

class Net(nn.Linear):
    def __init__(self, width: int = 4, depth: int = 2) -> None:
        super().__init__(4, 3)
        if depth % 2 == 0:
            raise ValueError("{said}")
"""


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ("with this width, depth must be odd, not 2", "model"),
        ("depth: it must be odd, not 2", "model.depth"),
        ("depth = 2 is even", "model.depth"),
        ("train: it must be odd", "model"),
    ],
)
def test_an_error_is_at_the_key_with_which_it_begins_and_at_no_word_inside_it(
    parts: Callable[..., Staged], said: str, key: str
) -> None:
    Path("words.py").write_text(WORDS.format(said=said))
    assert told(parts("model={use='./words.py:Net', width=3, depth=2}")).keys() == {key}


def test_a_model_with_too_few_outputs_is_at_its_own_option_or_its_table(parts: Callable[..., Staged]) -> None:
    mlp = "model={use='mlp', inputs=64, outputs=7}"
    found = told(parts(mlp, "data.train={use='digits', split='train'}"))
    assert found == {"model": "the data has 10 classes and the model 7 outputs"}


def test_the_list_of_checks_names_functions_of_one_stage_each_once() -> None:
    rows = [name for stage in CHECKS.values() for _, name in stage]
    assert len({*rows}) == len(rows)
    for name in rows:
        assert len(signature(function_of(name)).parameters) == 1, name
