"""Task `model_loss`: the loss that a model returns, a mean or a sum; and keys of batches that are dicts."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.launched import Ranks
from support.stages import staged
from support.trained import trained
from torch import Tensor, nn

from ddpforge.builtin.metrics.classification import Accuracy
from ddpforge.builtin.tasks.model_loss import ModelLoss, samples_in
from ddpforge.data.collating import BatchKeys, collate_of
from ddpforge.errors import RecipeError, UsageError
from ddpforge.guard.sum_reduction import check_sum_reduction
from ddpforge.training.task_checks import checked_loss

IMAGES, CLASSES = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


class Returns(nn.Module):
    """Linear classifier that returns its own loss in the given form."""

    def __init__(self, form: Callable[[Tensor, Tensor], Any], reduction: str = "mean") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.form, self.reduction = nn.Linear(4, 3), form, reduction

    def forward(self, images: Tensor, labels: Tensor) -> Any:
        logits = self.layer(images)
        return self.form(logits, F.cross_entropy(logits, labels, reduction=self.reduction))


def expected(model: Returns) -> Tensor:
    return F.cross_entropy(model.layer(IMAGES), CLASSES, reduction="sum")


@pytest.mark.parametrize(
    "form",
    [
        lambda logits, loss: loss,
        lambda logits, loss: (logits, loss),
        lambda logits, loss: [loss, logits, None],
        lambda logits, loss: {"logits": logits, "loss": loss},
        lambda logits, loss: SimpleNamespace(),
    ],
    ids=["number", "tuple", "list", "dict", "nothing"],
)
def test_the_loss_is_found_in_every_form(form: Callable[[Tensor, Tensor], Any]) -> None:
    model, task = Returns(form), ModelLoss()
    if isinstance(form(IMAGES, IMAGES.sum()), SimpleNamespace):
        with pytest.raises(UsageError, match="takes the loss that the model returns, but it returns a SimpleNamespace"):
            task.loss(model, (IMAGES, CLASSES))
        return
    for batch in ((IMAGES, CLASSES), {"images": IMAGES, "labels": CLASSES}):
        torch.testing.assert_close(task.loss(model, batch)[0], expected(model))


class MaskedMean(nn.Module):
    """Linear classifier that returns the mean over its counted targets, by a sum and a number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        counted = labels != -100
        losses = F.cross_entropy(self.layer(images), labels.clamp(min=0), reduction="none")
        return (losses * counted).sum() / counted.sum()


@pytest.mark.parametrize("model", [MaskedMean, lambda: Returns(lambda logits, loss: {"loss": loss})])
@pytest.mark.parametrize("named", [True, False], ids=["dict", "tuple"])
def test_a_batch_without_counted_targets_adds_no_loss_and_no_gradient(
    model: Callable[[], nn.Module], named: bool
) -> None:
    task, net = ModelLoss(over="targets"), model()
    for labels, expected in ((torch.full((8,), -100), 0.0), (CLASSES.masked_fill(CLASSES > 0, -100), 1.0)):
        batch: Any = {"images": IMAGES, "labels": labels} if named else (IMAGES, labels)
        net.zero_grad()
        loss, outputs = task.loss(net, batch)
        assert loss is not None
        loss.backward()
        plain = F.cross_entropy(net.layer(IMAGES), labels, reduction="sum")  # type: ignore[operator]
        torch.testing.assert_close(loss, plain if expected else torch.zeros(()))
        assert bool(net.layer.weight.grad.abs().sum() > 0) == bool(expected)  # type: ignore[union-attr]
        assert net.layer.weight.grad.isfinite().all()  # type: ignore[union-attr]
        assert task.metrics(outputs, batch) == {}


@pytest.mark.parametrize(
    "form",
    [lambda logits, loss: loss, lambda logits, loss: {"box": loss, "mask": loss}],
    ids=["number", "dict"],
)
def test_a_model_may_return_only_losses_in_training_and_only_outputs_in_evaluations(form: Any) -> None:
    task = ModelLoss(evaluation_loss=False, metrics=[Accuracy()])
    model = Returns(form)
    _, outputs = task.loss(model, (IMAGES, CLASSES))
    assert "accuracy" not in task.metrics(outputs, (IMAGES, CLASSES))
    model.form = lambda logits, loss: logits
    loss, outputs = task.loss(model.eval(), (IMAGES, CLASSES))
    assert loss is None
    assert list(task.metrics(outputs, (IMAGES, CLASSES))) == ["accuracy"]
    model.form = form
    _, outputs = task.loss(model, (IMAGES, CLASSES))
    with pytest.raises(UsageError, match="returns no output for metrics"):
        task.metrics(outputs, (IMAGES, CLASSES))


@pytest.mark.parametrize("samples", [None, 8])
def test_a_mean_is_multiplied_by_the_samples_and_not_by_the_first_value_of_a_batch(samples: int | None) -> None:
    """Passes a first value that all samples share, as positions are."""

    class Shared(Returns):
        def forward(self, positions: Tensor, images: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
            return super().forward(images, labels)

    task, model = ModelLoss(), Shared(lambda logits, loss: loss)
    task.batch_samples = samples
    loss, _ = task.loss(model, (torch.zeros(24), IMAGES, CLASSES))
    torch.testing.assert_close(loss, expected(model) * (1 if samples else 3))


def test_models_of_transformers_return_the_loss_over_targets() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 11, "n_positions": 8}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    tokens = torch.randint(11, (4, 8))
    batch = {"input_ids": tokens, "labels": tokens.masked_fill(tokens == 3, -100)}
    task = ModelLoss(over="targets", shift=True)
    loss, _ = task.loss(model, batch)
    targets = batch["labels"][:, 1:]
    logits = model(tokens).logits[:, :-1]
    torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
    assert task.count(batch) == (targets != -100).sum()


def test_several_losses_are_added_with_weights_and_reported_each() -> None:
    model = Returns(lambda logits, loss: {"box": loss, "mask": 2 * loss, "logits": logits})
    task = ModelLoss(weights={"mask": 0.25})
    loss, outputs = task.loss(model, (IMAGES, CLASSES))
    torch.testing.assert_close(loss, 1.5 * expected(model))
    found: Mapping[str, Any] = task.metrics(outputs, (IMAGES, CLASSES))
    assert {name: round(float(total.sum / total.count), 5) for name, total in found.items()} == {
        "box": pytest.approx(float(expected(model) / 8), abs=1e-5),
        "mask": pytest.approx(float(expected(model) / 4), abs=1e-5),
    }
    with pytest.raises(UsageError, match="returns no loss `boxes`") as caught:
        ModelLoss(weights={"boxes": 2.0}).loss(model, (IMAGES, CLASSES))
    assert caught.value.key == "task.weights"


@pytest.mark.parametrize(("returned", "declared"), [("sum", "mean"), ("mean", "sum")])
def test_the_wrong_reduction_is_found_by_two_halves(returned: str, declared: Any) -> None:
    model = Returns(lambda logits, loss: loss, returned)
    check_sum_reduction(model, ModelLoss(reduction=returned), (IMAGES, CLASSES), 8)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=f"the loss is a {returned} over the batch") as caught:
        check_sum_reduction(model, ModelLoss(reduction=declared), (IMAGES, CLASSES), 8)
    assert caught.value.key == "task.reduction"


def test_a_batch_that_does_not_fit_forward_is_explained() -> None:
    with pytest.raises(UsageError, match=r"3 values by position, but its forward is Returns\(images: .*labels: .*\)"):
        ModelLoss().loss(Returns(lambda logits, loss: loss), (IMAGES, CLASSES, CLASSES))
    with pytest.raises(UsageError, match="the batch, images, targets, but its forward"):
        ModelLoss().loss(Returns(lambda logits, loss: loss), {"images": IMAGES, "targets": CLASSES})


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (IMAGES, 8),
        ((IMAGES, CLASSES), 8),
        ({"images": IMAGES}, 8),
        (((IMAGES, IMAGES), CLASSES), 8),
        ([[IMAGES[0], IMAGES[1, :2]], [{}, {}]], 2),
    ],
)
def test_samples_of_a_batch(batch: Any, size: int) -> None:
    assert samples_in(batch) == size


# ---------------------------------------------------------------------------------------------- keys of a batch
def test_keys_choose_inputs_and_targets_of_a_dict() -> None:
    batch = {"a": 1, "b": 2, "y": 3}
    assert BatchKeys(("a",), "y")(batch) == (1, 3)
    assert BatchKeys(("b", "a"), "y")(batch) == ((2, 1), 3)
    assert BatchKeys((), "y")(batch) == ((1, 2), 3)
    assert BatchKeys(("a",))(batch) == 1


@pytest.mark.parametrize(
    ("keys", "batch", "message", "key"),
    [
        (BatchKeys(("x",)), {"a": 1}, "the batch has no `x`", "data.inputs"),
        (BatchKeys((), "x"), {"a": 1}, "the batch has no `x`", "data.targets"),
        (BatchKeys((), "x"), (1, 2), "name keys of a batch, but the data gives a tuple", "data.targets"),
    ],
)
def test_keys_that_a_batch_does_not_have_are_refused(keys: BatchKeys, batch: Any, message: str, key: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        keys(batch)
    assert caught.value.key == key


def test_keys_apply_after_the_collate_of_the_dataset() -> None:
    assert collate_of(object(), BatchKeys(("x",), "y"))([{"x": 1, "y": 2}, {"x": 3, "y": 4}])[1].tolist() == [2, 4]


NET = """
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, image, label):
        logits = self.layer(image.flatten(1))
        return logits, F.cross_entropy(logits, label)


class Scans:
    def __init__(self, *, split: str):
        from ddpforge.builtin.datasets.digits import Digits

        self.data = Digits(split=split)

    def __len__(self):
        return 100

    def __getitem__(self, index):
        image, label = self.data[index]
        return {"image": image, "label": label, "index": index}
"""
RECIPE = """
recipe = 2
name = "own"
model.use = "./net.py:Net"
data.inputs = ["image"]
data.targets = "label"
data.train = { use = "./net.py:Scans", split = "train" }
data.eval = { use = "./net.py:Scans", split = "test" }
task = { use = "model_loss", metrics = ["accuracy"] }
optimizer = { use = "sgd", lr = 0.1 }
train = { length = "3ep", global_batch = 32 }
"""


def test_a_model_with_its_own_loss_trains_as_with_the_loss_of_a_task(
    ddpforge: Callable[..., Ranks], tmp_path: Path
) -> None:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "own.toml").write_text(RECIPE)
    bare = NET.replace("image, label):", "image):").replace(
        "return logits, F.cross_entropy(logits, label)", "return logits"
    )
    (tmp_path / "linear.py").write_text(bare)
    ddpforge("run", "own.toml")
    ddpforge("run", "own.toml", "name=two", "train.micro_batch=8", nproc=2)
    ddpforge("run", "own.toml", "name=task", "model.use=./linear.py:Net", "task.use=classification")
    losses = [last_loss(tmp_path / f"runs/{name}") for name in ("own", "two", "task")]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


# --------------------------------------------------------------------------------------------- evaluations without loss
NO_LOSS = NET.replace("return logits, F", "if not self.training:\n            return logits\n        return logits, F")
WITHOUT = 'evaluation_loss = false, metrics = ["accuracy"] }'


def test_an_evaluation_may_have_no_loss(ddpforge: Callable[..., Ranks], tmp_path: Path) -> None:
    """Training and accuracy are those of the same model with a loss; only the loss of evaluations is absent."""
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "no_loss.py").write_text(NO_LOSS)
    (tmp_path / "own.toml").write_text(RECIPE)
    (tmp_path / "without.toml").write_text(
        RECIPE.replace('metrics = ["accuracy"] }', WITHOUT)
        .replace('"own"', '"without"')
        .replace("net.py:Net", "no_loss.py:Net")
        + 'checkpoint.keep = { best = 1, monitor = "eval/accuracy" }\n'
    )
    ddpforge("run", "own.toml")
    ddpforge("run", "without.toml", nproc=2)
    losses, metrics = (
        json.loads((tmp_path / f"runs/{name}/status.json").read_text())["metrics"] for name in ("own", "without")
    )
    assert "eval/loss" in losses
    assert [name for name in metrics if name.startswith("eval/")] == ["eval/accuracy"]
    assert metrics["eval/accuracy"] == losses["eval/accuracy"]
    assert metrics["train/loss"] == pytest.approx(losses["train/loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "key", "message"),
    [
        (['checkpoint.keep={best=1, monitor="eval/loss"}'], "checkpoint.keep.monitor", "so nothing reports eval/loss"),
        (
            ['callbacks.stop={use="early_stopping", metric="eval/loss", patience=2}'],
            "callbacks.stop.metric",
            "so nothing reports eval/loss",
        ),
        (["callbacks.slow.use=reduce_on_plateau"], "callbacks.slow.metric", "so nothing reports eval/loss"),
        (["task.metrics=[]"], "task", "and the task has no metrics to report"),
    ],
)
def test_decisions_by_a_loss_that_an_evaluation_does_not_have_are_refused(
    settings: list[str], key: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net.py").write_text(NO_LOSS)
    (tmp_path / "own.toml").write_text(RECIPE.replace('metrics = ["accuracy"] }', WITHOUT))
    monkeypatch.chdir(tmp_path)
    assert staged("own.toml").errors() == {}
    with pytest.raises(RecipeError) as caught:
        staged("own.toml", *settings).problems.raise_if_any()
    (problem,) = caught.value.problems
    assert problem.key == key
    assert problem.message == f"ModelLoss has a loss only in training: an evaluation has none, {message}"
    assert ("there are eval/accuracy" in problem.hints) == (key != "task")


def test_the_reduction_of_a_loss_in_training_mode_is_checked() -> None:
    class Trains(Returns):
        def forward(self, images: Tensor, labels: Tensor) -> Any:
            return super().forward(images, labels) if self.training else self.layer(images)

    model = Trains(lambda logits, loss: loss, "sum").eval()
    task = ModelLoss(evaluation_loss=False)
    assert task.loss(model, (IMAGES, CLASSES))[0] is None
    with pytest.raises(UsageError, match=r"the loss is a sum over the batch, but task\.reduction is mean"):
        check_sum_reduction(model, task, (IMAGES, CLASSES), 8)


def test_none_as_a_loss_needs_the_declaration() -> None:
    returned = (None, IMAGES)
    assert checked_loss(ModelLoss(evaluation_loss=False), returned, gradients=False) == returned
    with pytest.raises(UsageError, match="returns None for the loss") as caught:
        checked_loss(ModelLoss(), returned, gradients=False)
    assert caught.value.hints == ("if an evaluation has no loss, set evaluation_loss = False in the task",)
    with pytest.raises(UsageError, match="returns None for the loss"):
        checked_loss(ModelLoss(evaluation_loss=False), returned)


def last_loss(run: Path) -> float:
    loss: float = json.loads((run / "status.json").read_text())["metrics"]["eval/loss"]
    return loss


SHARED_FIRST = """
import torch
from torch import nn
from torch.nn.functional import mse_loss


class Shared:
    '''Batches begin with nine positions, which all samples share.'''

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.full((4,), index / 16), torch.tensor([float(index % 3)])

    def collate(self, samples):
        return torch.arange(9), torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, positions, x, y):
        return mse_loss(self.layer(x), y)
"""
SHARED_RECIPE = """
recipe = 2
name = "{name}"
model = {{ use = "./own.py:Net" }}
data.train = {{ use = "./own.py:Shared" }}
data.eval = {{ use = "./own.py:Shared" }}
task = {{ use = "model_loss" }}
optimizer = {{ use = "sgd", lr = 0.1 }}
strategy = {{ use = "{strategy}" }}
train = {{ length = "2st", global_batch = 8, micro_batch = {micro}, eval_every = "2st", device = "cpu" }}
track = {{ every = "1st" }}
"""


def test_the_loss_does_not_depend_on_micro_batches_if_the_first_value_is_shared(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SHARED_FIRST)

    def losses(strategy: str, micro: int, ranks: int) -> list[float]:
        text = SHARED_RECIPE.format(name=f"{strategy}-{micro}", strategy=strategy, micro=micro)
        result = trained(tmp_path, text, ranks)[0]
        return [*result.column(), *result.column("eval/loss")]

    whole = losses("single", 8, 1)
    assert losses("single", 1, 1) == pytest.approx(whole, rel=1e-5)
    assert losses("fsdp", 2, 2) == pytest.approx(whole, rel=1e-5)
