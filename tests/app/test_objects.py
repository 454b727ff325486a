"""ddpforge.train: components as objects of Python, recipes as dicts; how such a run is resumed, loaded, evaluated."""

import functools
import importlib
import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.forked import in_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ddpforge
from ddpforge.app.objects import GivenObjects
from ddpforge.errors import ForgeError, RecipeError, UsageError
from ddpforge.interfaces import Callback, StepInfo, Task

INPUTS = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(INPUTS, INPUTS[:, :3].argmax(1))
RECIPE: dict[str, Any] = {
    "name": "mine",
    "train.length": "2ep",
    "train": {"global_batch": 16},
    "task": {"use": "classification", "metrics": ["accuracy"]},
    "optimizer": {"use": "sgd", "lr": 0.1},
}


class Net(nn.Module):
    """A classifier of 8 numbers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.width, self.layers = width, nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.layers(inputs)
        return found


class Squares(Task):
    """Sum of squares of the outputs."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        """Returns the sum of squares."""
        outputs = model(batch[0])
        return outputs.square().sum(), outputs


class Counting(Callback):
    """Counts steps."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step(self, info: Any) -> None:
        """Counts a step."""
        self.steps += 1


def halved(step: int) -> float:
    return 0.5**step


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def losses(name: str = "mine") -> list[float]:
    rows = map(json.loads, Path(f"runs/{name}/metrics.jsonl").read_text().splitlines())
    return [row["eval/loss"] for row in rows if "eval/loss" in row]


# ---------------------------------------------------------------------------------------------- training
def test_objects_train_as_the_same_components_by_name() -> None:
    counting, model = Counting(), Net()
    outcome = ddpforge.train(RECIPE, model=model, train_data=DATA, eval_data=DATA, callbacks=[counting])
    assert repr(outcome).startswith("Outcome(runs/mine: done at step 8, eval/loss")
    assert counting.steps == 8

    Path("net.py").write_text(
        "import torch\nfrom torch import nn\n\n\nclass Net(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        torch.manual_seed(0)\n"
        "        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))\n\n"
        "    def forward(self, inputs):\n        return self.layers(inputs)\n\n\n"
        "def data():\n    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))\n"
        "    return torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))\n"
    )
    named = {"model.use": "./net.py:Net", "data.train.use": "./net.py:data", "data.eval.use": "./net.py:data"}
    ddpforge.run(RECIPE | named | {"name": "named"})
    assert losses() == losses("named")
    torch.testing.assert_close(model.state_dict(), ddpforge.load("named").model().state_dict())


def test_every_component_may_be_an_object() -> None:
    outcome = ddpforge.train(
        {"name": "all", "train": {"length": "2st", "global_batch": 16}},
        model=Net(),
        task=Squares(),
        train_data=DATA,
        eval_data={"one": DATA, "two": DATA},
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        schedule=halved,
        callbacks=[Counting(), Counting()],
    )
    assert outcome.status["metrics"]["eval/one/loss"] == outcome.status["metrics"]["eval/two/loss"]
    resolved = ddpforge.load_recipe("runs/all/recipe.resolved.toml").recipe
    assert resolved.model.use == f"<object> {__name__}.Net"
    assert resolved.model.options == {"width": 16}
    assert list(resolved.callbacks) == ["counting", "counting_2"]


def test_a_dict_of_training_data_has_the_sources_of_a_mixture() -> None:
    recipe = RECIPE | {
        "data.train": {"one": {"weight": 0.25}, "two": {"weight": 0.75}},
        "train": {"global_batch": 16, "length": "8st"},
    }
    outcome = ddpforge.train(recipe, model=Net(), train_data={"one": DATA, "two": DATA})
    assert outcome.status["metrics"]["train/one/epochs"] == 8 * 4 / 64
    assert outcome.status["metrics"]["train/two/epochs"] == 8 * 12 / 64
    assert outcome.status["metrics"]["train/one/loss"] > 0
    trained = ddpforge.load("mine", model=Net(), train_data={"one": DATA, "two": DATA})
    assert trained.data("train.two") is DATA
    assert len(trained.batch(3)[0]) == 3
    with pytest.raises(UsageError, match="has no data 'train'"):
        trained.data("train")


def test_an_optimizer_may_be_any_function_of_the_parameters() -> None:
    recipe = {name: table for name, table in RECIPE.items() if name != "optimizer"}
    ddpforge.train(recipe, model=Net(), train_data=DATA, optimizer=lambda them: torch.optim.SGD(them, lr=0.1))
    ddpforge.train(RECIPE | {"name": "named"}, model=Net(), train_data=DATA)
    found, named = (ddpforge.load(name, model=Net()).model().state_dict() for name in ("mine", "named"))
    torch.testing.assert_close(found, named)


def test_a_class_takes_its_options_from_the_recipe() -> None:
    ddpforge.train(RECIPE | {"model.width": 4}, model=Net, train_data=DATA)
    assert ddpforge.load("mine", model=Net).model().layers[0].out_features == 4  # type: ignore[union-attr, index]


def test_the_same_objects_resume_evaluate_load_and_predict_a_run() -> None:
    ddpforge.train(RECIPE, model=Net(), train_data=DATA, eval_data=DATA)
    ddpforge.train(RECIPE | {"train.length": "3ep"}, model=Net(), train_data=DATA, eval_data=DATA)
    ddpforge.train(RECIPE | {"train.length": "3ep", "name": "whole"}, model=Net(), train_data=DATA, eval_data=DATA)
    assert losses() == losses("whole")

    found = ddpforge.evaluate("mine", model=Net(), eval_data=DATA)
    assert found.metrics["eval/loss"] == losses()[-1]
    trained = ddpforge.load("mine", model=Net()).model()
    prediction = ddpforge.predict("mine", "found.jsonl", model=Net(), eval_data=DATA)
    rows = [json.loads(line) for line in Path("found.jsonl").read_text().splitlines()]
    assert prediction.samples == len(rows) == 64
    assert [row["class"] for row in rows] == trained(INPUTS).argmax(1).tolist()


SCRIPT = """
from test_objects import DATA, RECIPE, Net

import ddpforge

ddpforge.train(RECIPE | {"name": "two", "strategy": {"use": "fsdp"}}, model=Net(), train_data=DATA, eval_data=DATA)
"""


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    Path("script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "script.py", *arguments]
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def test_a_script_under_torchrun_trains_the_curve_of_one_process() -> None:
    done = torchrun()
    assert done.returncode == 0, done.stderr
    ddpforge.train(RECIPE, model=Net(), train_data=DATA, eval_data=DATA)
    assert losses("two") == pytest.approx(losses(), rel=1e-5)


def test_initial_weights_that_differ_between_ranks_are_refused() -> None:
    def train(rank: int) -> str:
        model = Net()
        nn.init.normal_(model.layers[0].weight, std=1.0 + rank)  # type: ignore[arg-type]
        with pytest.raises(ForgeError) as raised:
            ddpforge.train(RECIPE | {"strategy": {"use": "fsdp"}}, model=model, train_data=DATA)
        return str(raised.value)

    for said in in_ranks(2, train):
        assert "ranks have built the model differently: number 0 on rank 0 is `layers.0.weight`" in said


def test_launch_sends_classes_and_functions_by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("parts.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Module):\n    def __init__(self, *, width: int):\n"
        "        super().__init__()\n        self.layer = nn.Linear(64, 10)\n\n"
        "    def forward(self, images):\n        return self.layer(images.flatten(1))\n\n\n"
        "def fading(step):\n    return 0.9 ** step\n"
    )
    monkeypatch.syspath_prepend(".")
    import parts  # type: ignore[import-not-found]

    recipe = RECIPE | {"data.train": {"use": "digits", "split": "train"}, "model": {"width": 3}}
    outcome = ddpforge.launch(recipe, nproc=2, model=parts.Net, schedule=parts.fading)
    assert (outcome.status["state"], outcome.status["world_size"]) == ("done", 2)
    resolved = ddpforge.load_recipe("runs/mine/recipe.resolved.toml").recipe
    assert (resolved.model.use, resolved.schedule.use) == ("parts:Net", "parts:fading")
    assert not list(Path().glob(".recipe-*"))


@pytest.mark.parametrize(
    "task",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(reduction="sum"),
        nn.CrossEntropyLoss(reduction="none"),
        functools.partial(nn.functional.cross_entropy, reduction="mean"),
        nn.functional.cross_entropy,
    ],
)
def test_losses_of_torch_are_tasks(task: Any) -> None:
    ddpforge.train(RECIPE, model=Net(), train_data=DATA, eval_data=DATA)
    given = {key: value for key, value in RECIPE.items() if not key.startswith("task")}
    ddpforge.train(given | {"name": "loss"}, model=Net(), train_data=DATA, eval_data=DATA, task=task)
    assert losses("loss") == pytest.approx(losses(), rel=1e-6)


# ---------------------------------------------------------------------------------------------- mistakes
@pytest.mark.parametrize(
    ("objects", "message", "hint"),
    [
        ({"train_data": DataLoader(DATA)}, "train_data is a DataLoader", "give its dataset: train_data=loader.dataset"),
        ({"eval_data": {"a": DataLoader(DATA)}}, r"eval_data\['a'\] is a DataLoader", "give its dataset"),
        (
            {"optimizer": torch.optim.SGD(Net().parameters())},
            "was built already",
            "functools.partial(torch.optim.AdamW",
        ),
        ({"model": nn.DataParallel(Net())}, "model is wrapped in DataParallel", "give model.module"),
        ({"model": "cnn"}, "model is the text 'cnn'", "write the name in the recipe: {'model.use': 'cnn'}"),
        ({"model": 3}, "model is an int, not a model", "give a torch.nn.Module, or a function that returns one"),
        ({"model": {"width": 3}}, "model is a dict", "give a torch.nn.Module"),
        ({"model": DATA}, "model is a TensorDataset", "give a torch.nn.Module"),
        ({"train_data": 5}, "train_data is an int, not a dataset", "an object with __len__ and __getitem__"),
        ({"task": Net()}, "task is a Net, not a task", "a ddpforge.interfaces.Task"),
        ({"schedule": 0.5}, "schedule is a float, not a schedule", "or a function that returns one"),
        ({"callbacks": Counting()}, "callbacks is a Counting, not a list", "callbacks=[Counting()]"),
        ({"callbacks": [object()]}, "callbacks is an object, not a callback", "derives from"),
        (
            {"train_data": {"train": DATA}},
            "train_data is a dict with the split 'train'",
            "train_data=datasets['train']",
        ),
        ({"train_data": {}}, "train_data is an empty dict", "give a dataset, or a dict of datasets by name"),
        ({"train_data": {"a": {}}}, r"train_data\['a'\] is an empty dict", "give a dataset"),
        ({"dataset": DATA}, "a run has no argument `dataset`", "give train_data=…"),
        ({"epochs": 3}, "a run has no argument `epochs`", 'set train.length = "3ep" in the recipe'),
        ({"batch_size": 32}, "a run has no argument", "set train.global_batch = 32 in the recipe"),
        ({"lr": 0.5}, "a run has no argument", "set optimizer.lr = 0.5 in the recipe"),
        ({"fp16": True}, "a run has no argument", 'set train.precision = "fp16" in the recipe'),
        ({"precision": "bf16"}, "a run has no argument", "set train.precision in the recipe"),
        ({"criterion": nn.MSELoss()}, "a run has no argument", "give task=…"),
        ({"scheduler": 1}, "a run has no argument", "give schedule=…, a function of the step"),
        ({"nproc": 2}, "a run has no argument", "ddpforge.launch(recipe, nproc=2, …)"),
        ({"collate_fn": len}, "a run has no argument", "a method `collate(samples)`"),
        ({"wandb": True}, "a run has no argument", "'track.wandb.project'"),
        ({"strategy": "fsdp"}, "strategy is the text 'fsdp'", "{'strategy.use': 'fsdp'}"),
        ({"task": "cross_entropy"}, "task is the text", "{'task.use': 'classification'}"),
        ({"train_data": "x.csv"}, "train_data is the text", "'path': 'x.csv'"),
        ({"train_data": Path("x.csv")}, "train_data is a PosixPath", "'path': 'x.csv'"),
        (
            {"strategy": nn.parallel.DistributedDataParallel},
            "is the class",
            "'strategy.use': 'ddp'",
        ),
        ({"model": nn.Linear(8, 3, device="meta")}, "model is on the meta device", "build it on the CPU"),
        ({"model": torch.relu}, "model is the function relu", "give a torch.nn.Module"),
        ({"task": nn.CrossEntropyLoss}, "task is the class CrossEntropyLoss", "task=nn.CrossEntropyLoss()"),
        ({"task": lambda model, batch: 0}, "task is a function of model, batch", "ddpforge.interfaces.Task"),
        ({"optimizer": lambda: 0}, "a function without an argument", "lambda params:"),
        (
            {"optimizer": functools.partial(torch.optim.SGD, rate=1)},
            "does not accept rate",
            "options of torch's SGD",
        ),
        ({"optimizer": functools.partial(torch.optim.SGD, [], lr=1)}, "has its parameters already", "leave them out"),
        ({"schedule": torch.optim.lr_scheduler.StepLR}, "the scheduler StepLR of torch", "'schedule.use': 'cosine'"),
        (
            {"sampler": torch.utils.data.RandomSampler(DATA)},
            "sampler is a RandomSampler",
            "'data.sampler.use': 'shuffled'",
        ),
        ({"train_data": (one for one in DATA)}, "gives its samples only once", "a list of the samples"),
        ({"eval_data": zip(INPUTS, INPUTS, strict=True)}, "gives its samples only once", "a list of the samples"),
        ({"train_data": (INPUTS, INPUTS)}, "a tuple of tensors", "TensorDataset"),
        (
            {"train_data": {"x": INPUTS, "y": INPUTS}},
            "a dict of tensors",
            "TensorDataset(train_data['x'], train_data['y'])",
        ),
        ({"eval_data": [DATA, DATA]}, "a list of datasets", "give a dict by name"),
        ({"train_data": [DataLoader(DATA)]}, "holds a DataLoader", "loader.dataset"),
        ({"train_data": TensorDataset}, "is the class TensorDataset", "give an instance"),
        ({"callbacks": {"a": Counting()}}, "callbacks is a dict", "list(callbacks.values())"),
        ({"callbacks": "ema"}, "callbacks is a str", "{'callbacks.ema.use': 'ema'}"),
        ({"callbacks": [lambda info: None]}, "a function of info, not a callback", "ddpforge.interfaces.Callback"),
        ({"callbacks": [[Counting()]]}, "callbacks is a list, not a callback", "give one list"),
    ],
)
def test_objects_that_cannot_be_used_are_refused(objects: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        ddpforge.train(RECIPE, **objects)
    assert hint in "; ".join(caught.value.hints)


def test_a_table_of_pandas_is_refused_with_a_dataset_in_its_place() -> None:
    frame = pytest.importorskip("pandas").DataFrame({"a": [1.0], "y": [0]})
    with pytest.raises(UsageError, match="train_data is a DataFrame of pandas, not a dataset") as caught:
        ddpforge.train(RECIPE, model=Net(), train_data=frame)
    assert "TensorDataset(torch.tensor(frame" in caught.value.hints[0]


def test_an_optimizer_over_another_models_parameters_is_refused() -> None:
    made = functools.partial(lambda other, _: torch.optim.SGD(other, lr=0.1), list(Net().parameters()))
    with pytest.raises(ForgeError, match="updates other parameters than the model"):
        ddpforge.train(RECIPE, model=Net(), train_data=DATA, optimizer=made)


def test_a_loss_of_torch_that_does_not_fit_the_targets_is_explained() -> None:
    with pytest.raises(ForgeError, match=r"MSELoss does not accept outputs float32 \[8, 3\] with targets int64") as e:
        ddpforge.train(RECIPE, model=Net(), train_data=DATA, task=nn.MSELoss())
    assert "cross_entropy" in e.value.__notes__[1]


class Mistyped(Callback):
    def on_train_epoch_end(self, *arguments: Any) -> None:
        """Is never called."""


class Short(Callback):
    def on_step(self) -> None:  # type: ignore[override]
        """Lacks an argument."""


@pytest.mark.parametrize(
    ("callback", "message", "hint"),
    [
        (Mistyped(), "Mistyped.on_train_epoch_end is never called", "methods: on_start"),
        (Short(), "Short.on_step is called with info", "def on_step(self, info)"),
    ],
)
def test_a_method_of_a_callback_that_cannot_be_called_is_refused(callback: Callback, message: str, hint: str) -> None:
    with pytest.raises(ForgeError, match=message) as caught:
        ddpforge.train(RECIPE, model=Net(), train_data=DATA, callbacks=[callback])
    assert hint in "; ".join(caught.value.__notes__)


class OwnNames(Callback):
    on_train = True  # a value, not a method

    @property
    def on_epoch(self) -> int:
        """Is a value, too."""
        return 1

    def on_disk(self) -> str:
        """Is a helper that no other library calls."""
        return "here"


def test_values_and_helpers_of_a_callback_may_begin_with_on() -> None:
    assert ddpforge.train(RECIPE, model=Net(), train_data=DATA, callbacks=[OwnNames()]).exit_code == 0


def test_weights_that_are_not_finite_are_named() -> None:
    model = Net()
    nn.init.constant_(model.layers[0].weight, float("nan"))  # type: ignore[arg-type]
    with pytest.raises(ForgeError, match="not finite") as caught:
        ddpforge.train(RECIPE, model=model, train_data=DATA)
    assert "the weight `layers.0.weight` was NaN or infinite before the step" in caught.value.hints[0]


@pytest.mark.parametrize(
    ("call", "message", "hint"),
    [
        (lambda: ddpforge.run(RECIPE, model=Net()), "`run` takes only a recipe", "ddpforge.train(recipe, model=…)"),
        (lambda: ddpforge.train(RECIPE, model=Net(), train_data=DATA, out="~/runs"), "which only a shell expands", ""),
        (
            lambda: ddpforge.train(RECIPE, model=Net(), train_data=DATA, out=3),
            "out=3: expected the path of a folder",
            "",
        ),  # type: ignore[arg-type]
        (lambda: ddpforge.run("digits", fresh="no"), "fresh='no': expected True or False", ""),  # type: ignore[arg-type]
        (lambda: ddpforge.run("digits", max_time=60), "60 is not a time with a unit", ""),  # type: ignore[arg-type]
        (lambda: ddpforge.run("digits", sets=[("a", 1)]), "sets holds a tuple", ""),  # type: ignore[list-item]
        (lambda: ddpforge.launch(RECIPE, nproc="2"), "nproc='2': expected 1 process or more", ""),  # type: ignore[arg-type]
        (lambda: ddpforge.launch(len), "a recipe is a path", "the recipe comes first"),  # type: ignore[arg-type]
        (lambda: ddpforge.load(None), "run is a NoneType, not a path", "its name in runs/"),  # type: ignore[arg-type]
        (lambda: ddpforge.load("~/runs/a"), "there is no run", "${env:HOME}/runs/a"),
        (lambda: ddpforge.predict("a", [1]), "out is a list, not the path", "model()(inputs)"),  # type: ignore[arg-type]
        (lambda: ddpforge.run('name = "x"'), "this is the text of a recipe", "tomllib.loads"),
        (
            lambda: ddpforge.run({"task": {"metrics": [len]}}),
            "which a recipe cannot hold",
            "derived from ddpforge.interfaces.Metric",
        ),
        (lambda: ddpforge.run({"optimizer": {"lr": torch.tensor(0.5)}}), "is a Tensor", "a number of Python: 0.5"),
        (lambda: ddpforge.run({"train": {"precision": torch.bfloat16}}), "is a dtype", 'write its name: "bf16"'),
        (lambda: ddpforge.run({"optimizer": torch.optim.SGD}), "is a type", "ddpforge.train(recipe, optimizer=…)"),
        (lambda: ddpforge.run(SimpleNamespace(lr=1)), "not a SimpleNamespace", "vars(…)"),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_another_form_are_refused_with_what_to_write(
    call: Callable[[], Any], message: str, hint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        call()
    assert message in caught.value.message
    assert hint in "; ".join(caught.value.__notes__)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: ddpforge.run({"name": "a", "model": Net()}),
            RecipeError,
            "`model` is a Net, which a recipe cannot hold",
        ),
        (lambda: ddpforge.run({"train": {"x": [1, {2}]}}), RecipeError, r"`train\.x\[1\]` is a set"),
        (
            lambda: ddpforge.run("digits", sets={"train.length": "2ep"}),
            UsageError,
            "sets is a dict, but must be a list",
        ),  # type: ignore[arg-type]
        (lambda: ddpforge.run(3), UsageError, "a recipe is a path, a name, a dict or a loaded recipe, not an int"),  # type: ignore[arg-type]
        (lambda: ddpforge.run(Net()), UsageError, "not a Net"),  # type: ignore[arg-type]
        (lambda: ddpforge.train(RECIPE | {"model.depth": 3}, model=Net()), RecipeError, "unknown key `depth`"),
        (
            lambda: ddpforge.train(RECIPE | {"model.width": 3}, model=Net(), train_data=DATA),
            ForgeError,
            "made with width = 16",
        ),
        (lambda: ddpforge.train(RECIPE, model=Squares, train_data=DATA), ForgeError, "Squares"),
        (
            lambda: ddpforge.train(RECIPE, model=Net(), train_data=DATA, schedule=lambda step: -1.0),
            RecipeError,
            "returns -1.0 for step 0, not a number of 0 or more",
        ),
        (
            lambda: ddpforge.train(RECIPE, model=Net(), train_data=DATA, schedule=lambda step: abs(1 / (step - 7))),
            RecipeError,
            "fails at step 7: ZeroDivisionError",
        ),
        (lambda: ddpforge.launch(RECIPE, model=Net()), UsageError, "model is an object of this process"),
        (lambda: ddpforge.launch(RECIPE, schedule=lambda step: 1.0), UsageError, "which other processes cannot import"),
    ],
)
def test_mistakes_with_recipes_and_classes_are_named(call: Callable[[], Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        call()
    assert not Path("runs").exists()


class Other(Net):
    """Another model."""


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ddpforge.load("mine").model(),
            f"an object of Python as its model, `<object> {__name__}.Net`",
        ),
        (lambda: ddpforge.load("mine", model=Other()).model(), "was made with an object of Python as its model"),
        (lambda: ddpforge.load("mine", model=Net(4)).model(), "width = 16, but the object was made with width = 4"),
        (
            lambda: ddpforge.evaluate("mine", model=Net()),
            "an object of Python as its dataset, `.*TensorDataset .eval.`",
        ),
        (lambda: ddpforge.train(RECIPE, model=Other(), train_data=DATA, eval_data=DATA), "model.use"),
        (lambda: ddpforge.train(RECIPE, train_data=DATA, eval_data=DATA), "model"),
    ],
)
def test_other_objects_than_those_of_the_run_are_refused(call: Callable[[], Any], message: str) -> None:
    ddpforge.train(RECIPE, model=Net(), train_data=DATA, eval_data=DATA)
    with pytest.raises(ForgeError, match=message):
        call()


def test_names_of_objects_do_not_depend_on_the_others() -> None:
    both = GivenObjects.of({"train_data": DATA, "eval_data": DATA}).tables
    assert both["data"]["eval"] == GivenObjects.of({"eval_data": DATA}).tables["data"]["eval"]


# ---------------------------------------------------------------------------------------------- doors that are strict
class Wide(Net):
    """Net with another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns logits."""
        return super().forward(inputs) + self.extra(inputs)


def test_weights_of_a_checkpoint_that_the_class_lacks_are_refused_by_load() -> None:
    ddpforge.train(RECIPE, model=Wide(), train_data=DATA)
    edited = type("Wide", (Net,), {"__module__": Wide.__module__, "__qualname__": Wide.__qualname__})
    with pytest.raises(ForgeError, match=r"it has extra\.bias, extra\.weight, which the model lacks"):
        ddpforge.load("runs/mine", model=edited).model()
    assert sorted(ddpforge.load("runs/mine", model=Wide).model().state_dict())[0] == "extra.bias"


@pytest.mark.parametrize("part", ["model", "layer"])
def test_a_compiled_module_is_refused_because_its_weights_have_other_names(part: str) -> None:
    model = Net()
    if part == "layer":
        model.layers[0] = torch.compile(model.layers[0], backend="eager")  # type: ignore[assignment]
    given = model if part == "layer" else torch.compile(model, backend="eager")
    with pytest.raises(RecipeError, match=r"(the model|`layers.0`) is the result of torch.compile"):
        ddpforge.train(RECIPE, model=given, train_data=DATA)


def test_a_module_that_is_compiled_in_place_keeps_the_names_of_its_weights() -> None:
    model = Net()
    model.layers[0].compile(backend="eager")
    ddpforge.train(RECIPE, model=model, train_data=DATA)
    assert sorted(ddpforge.load("runs/mine", model=Net).model().state_dict()) == sorted(Net().state_dict())


class Interrupts(Callback):
    """Ends a run after its second step."""

    def on_step(self, info: StepInfo) -> None:
        """Raises KeyboardInterrupt."""
        if info.step == 2:
            raise KeyboardInterrupt


def test_a_model_that_an_interrupted_call_has_changed_is_refused() -> None:
    model = Net()
    with pytest.raises(KeyboardInterrupt):
        ddpforge.train(RECIPE, model=model, train_data=DATA, callbacks=[Interrupts()])
    with pytest.raises(UsageError, match="the run would begin with changed weights"):
        ddpforge.train(RECIPE, model=model, train_data=DATA)
    ddpforge.train(RECIPE, model=model, train_data=DATA, fresh=True)


def test_another_model_begins_after_an_interrupted_call() -> None:
    with pytest.raises(KeyboardInterrupt):
        ddpforge.train(RECIPE, model=Net(), train_data=DATA, callbacks=[Interrupts()])
    ddpforge.train(RECIPE, model=Net(), train_data=DATA)


def test_a_changed_class_or_loss_is_named_when_a_run_resumes(capfd: pytest.CaptureFixture[str]) -> None:
    def constant(step: int) -> float:
        return factor

    factor, plain = 1.0, nn.CrossEntropyLoss()
    data: dict[str, Any] = {"model": Net(), "train_data": DATA, "schedule": constant}
    recipe = {key: value for key, value in RECIPE.items() if key != "task"}
    ddpforge.train(recipe, task=plain, **data)
    ddpforge.train(recipe, sets=["train.length=3ep"], task=plain, **data)
    assert "the code in" not in capfd.readouterr().err
    factor = 0.5
    ddpforge.train(recipe, sets=["train.length=4ep"], task=plain, **data)
    assert capfd.readouterr().err.count("changed since the last attempt: the code in schedule.txt") == 1
    with pytest.raises(UsageError, match=r"is finished, with another recipe:\n  the code in model.txt"):
        ddpforge.train(recipe, sets=["train.length=4ep"], task=plain, **data | {"model": Wider()})


class Wider(Net):
    """Net with another layer in its text, and the same name in the recipe."""


Wider.__qualname__ = "Net"


def test_settings_of_a_loss_belong_to_its_code() -> None:
    texts = {
        smoothing: GivenObjects.of({"task": nn.CrossEntropyLoss(label_smoothing=smoothing)}).sources()
        for smoothing in (0.0, 0.25)
    }
    assert list(texts[0.0]) == ["code/objects/task.txt"]
    assert texts[0.0] != texts[0.25]
    assert texts[0.0] == GivenObjects.of({"task": nn.CrossEntropyLoss()}).sources()


def test_ranks_import_a_given_class_from_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: `python ../a/train.py` trained the class of a file with the same name in the current folder."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, width in ((here, 3), (there, 5)):
        folder.mkdir()
        text = f"from torch import nn\nclass Net(nn.Linear):\n    width = {width}\n"
        (folder / "some_parts.py").write_text(text)
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(str(there))
    given = GivenObjects.of({"model": importlib.import_module("some_parts").Net})
    assert given.references() == ['model.use="some_parts:Net"']
    assert given.import_folders() == [str(there)]
    monkeypatch.delitem(sys.modules, "some_parts")


# ---------------------------------------------------------------------------------------------- calls and names
@pytest.mark.parametrize(
    ("call", "message", "way"),
    [
        (
            lambda: ddpforge.train(RECIPE, Net(), DATA),  # type: ignore[call-arg]
            "train() takes only recipe without a name, and was given an object of Net, an object of TensorDataset, too",
            "ddpforge.train(recipe, model=…, train_data=…)",
        ),
        (lambda: ddpforge.train(Net(), RECIPE), "train() takes only recipe", "the recipe comes first"),  # type: ignore[arg-type, call-arg]
        (lambda: ddpforge.train(model=Net()), "missing a required argument: 'recipe'", "train(recipe, model=…)"),  # type: ignore[call-arg]
        (lambda: ddpforge.launch(RECIPE, 2), "and was given 2, too", "ddpforge.launch(recipe, nproc=2)"),  # type: ignore[call-arg]
        (lambda: ddpforge.run(RECIPE, nn.MSELoss()), "run() takes only recipe", "ddpforge.run(recipe, task=…)"),  # type: ignore[call-arg]
        (lambda: ddpforge.evaluate("a", "best"), "given 'best', too", "ddpforge.evaluate(run, checkpoint='best')"),  # type: ignore[call-arg]
        (lambda: ddpforge.predict("a"), "missing a required argument: 'out'", "ddpforge.predict(run, out)"),  # type: ignore[call-arg]
        (lambda: ddpforge.load("a", Net), "an object of type, too", "ddpforge.load(run, model=…)"),  # type: ignore[call-arg]
        (lambda: ddpforge.load("a", device="cuda"), "no argument `device`", "load(…).model(device=…)"),  # type: ignore[call-arg]
        (lambda: ddpforge.evaluate("a", split="test"), "no argument `split`", "evaluate(…, only=['NAME'])"),  # type: ignore[call-arg]
        (lambda: ddpforge.run(RECIPE, epochs=3), "`run` takes only a recipe", "settings are keys of the recipe"),  # type: ignore[call-arg, arg-type]
    ],
)
def test_calls_that_do_not_fit_are_refused_with_the_call_to_write(
    call: Callable[[], Any], message: str, way: str
) -> None:
    with pytest.raises(UsageError) as caught:
        call()
    assert message in caught.value.message
    assert way in "; ".join(caught.value.hints)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("Callback", "from ddpforge.interfaces import Callback"),
        ("UsageError", "from ddpforge.errors import UsageError"),
        ("read_metrics", "from ddpforge.api import read_metrics"),
        ("Trainer", "ddpforge.train(recipe, model=…) trains"),  # there is one in ddpforge.api, for tools
        ("EarlyStopping", "[callbacks.early_stopping]"),
        ("register", "needs no registration"),
        ("DataModule", "ddpforge-lightning"),
    ],
)
def test_imports_of_names_that_are_elsewhere_are_answered_with_their_place(name: str, way: str) -> None:
    with pytest.raises(ImportError) as caught:
        exec(f"from ddpforge import {name}", {})
    assert f"ddpforge has no {name!r}: " in str(caught.value)
    assert way in str(caught.value)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("Trainer", "ddpforge.train(recipe, model=…) trains"),
        ("RecipeError", "from ddpforge.errors import RecipeError"),
    ],
)
def test_imports_from_the_interfaces_of_names_that_are_elsewhere_are_answered_too(name: str, way: str) -> None:
    with pytest.raises(ImportError, match=re.escape(f"ddpforge.interfaces has no {name!r}: {way}")):
        exec(f"from ddpforge.interfaces import {name}", {})
    assert not hasattr(ddpforge.interfaces, "nowhere")


def test_a_name_that_is_nowhere_is_an_attribute_error() -> None:
    assert not hasattr(ddpforge, "nowhere")
    assert not hasattr(ddpforge, "__wrapped__")


def test_attributes_that_a_result_does_not_have_are_answered_with_the_way_to_them() -> None:
    outcome = ddpforge.train(RECIPE, model=Net(), train_data=DATA, eval_data=DATA)
    objects: dict[str, Any] = {"model": Net(), "eval_data": DATA}
    trained = ddpforge.load(outcome.folder, **objects)
    found = ddpforge.evaluate(outcome.folder, **objects)
    for owner, name, way in (
        (outcome, "model", "ddpforge.load(RUN, …).model()"),
        (outcome, "metrics", "outcome.status['metrics']"),
        (outcome, "best_model_path", 'checkpoint="best"'),
        (trained, "best", 'checkpoint="best"'),
        (trained, "history", "run.metrics()"),
        (trained, "state_dict", "run.model()"),
        (trained, "save", "ddpforge export RUN"),
        (found, "accuracy", "evaluation.metrics['eval/NAME']"),
    ):
        with pytest.raises(AttributeError) as caught:
            getattr(owner, name)
        assert str(caught.value).startswith(f"'{type(owner).__name__}' object has no attribute {name!r}: ")
        assert way in str(caught.value)
    assert "eval/accuracy" in found.metrics
    assert "metrics" in outcome.status
    assert not hasattr(trained, "nothing")


def frames(error: BaseException) -> list[str]:
    """Returns the files of an error's traceback, from the caller to the line that raised."""
    return [Path(frame.filename).name for frame in traceback.extract_tb(error.__traceback__)]


class Broken(Callback):
    """Raises KeyError at the second step."""

    def on_step(self, info: StepInfo) -> None:
        """Raises KeyError."""
        if info.step == 2:
            raise KeyError("count")


def test_an_error_of_a_callback_has_only_the_frames_of_the_script() -> None:
    with pytest.raises(KeyError) as caught:
        ddpforge.train(RECIPE, model=Net(), train_data=DATA, callbacks=[Broken()])
    here = Path(__file__).name
    assert frames(caught.value) == [here, here]


def test_an_expected_error_has_no_frames_of_ddpforge() -> None:
    with pytest.raises(RecipeError) as caught:
        ddpforge.train(RECIPE | {"train.lenght": "2ep"}, model=Net(), train_data=DATA)
    assert set(frames(caught.value)) == {Path(__file__).name}


class Misses(Net):
    """A model that uses a layer which it does not have."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Raises AttributeError."""
        return self.head(inputs)  # type: ignore[no-any-return]


def test_an_error_in_the_model_of_a_script_has_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    with pytest.raises(RecipeError) as caught:
        ddpforge.train(RECIPE, model=Misses(), train_data=DATA, out="unused")
    assert "AttributeError: 'Misses' object has no attribute 'head'" in caught.value.message
    assert re.search(r"raised at test_objects\.py:\d+, in Misses\.forward", "\n".join(caught.value.__notes__))


class Collated(TensorDataset):
    """A dataset whose collate function is called without samples."""

    def collate(self) -> None:
        """Returns nothing."""


def test_a_collate_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"Collated\.collate is called with one argument, the samples") as caught:
        ddpforge.train(RECIPE, model=Net(), train_data=Collated(*DATA.tensors))
    assert "def collate(self, samples)" in "; ".join(caught.value.__notes__)
