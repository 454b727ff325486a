"""Metric objects of torchmetrics compared with Lightning's own Trainer, for any ranks and size of batches."""

from functools import cache
from pathlib import Path
from typing import Any

import ddpforge
import lit
import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
import torchmetrics
from ddpforge.errors import ForgeError, UsageError
from test_lightning import Bench, edit_file
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import classification

from ddpforge_lightning.metric_objects import MetricObjects

NAMES = ("val_loss", "val_f1", "val_auroc", "val_peak", "val_precision", "val_recall")
AT_END = ("val_kappa", "val_error", "val_number", *(f"val_{number}" for number in range(3)))


class Record(pl.Callback):
    """Records the metrics of each validation, and the training metric of each step."""

    def __init__(self) -> None:
        self.validated: dict[str, list[float]] = {name: [] for name in (*NAMES, *AT_END)}
        self.trained: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.trained.append(float(trainer.callback_metrics["train_acc_step"]))

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        if not trainer.sanity_checking:
            for name, values in self.validated.items():
                values.append(float(trainer.callback_metrics[name]))


@cache
def by_trainer() -> Record:
    """Trains with Lightning's own Trainer, which checks its validation before training."""
    record = Record()
    options: dict[str, Any] = {"enable_checkpointing": False, "enable_progress_bar": False, "logger": False}
    trainer = pl.Trainer(max_epochs=4, accelerator="cpu", callbacks=[record], enable_model_summary=False, **options)
    trainer.fit(lit.LitMetrics(form="list"), DataLoader(lit.Points(), 8), DataLoader(lit.Points(21, 2), 4))
    return record


def train(bench: Bench, *changes: str, ranks: int = 1, strategy: str = "ddp") -> str:
    bench.write(form="list", strategy=strategy)
    edit_file(bench.folder / "run.toml", "LitNet", "LitMetrics")
    done = bench("run", "run.toml", *(part for one in changes for part in ("--set", one)), ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def check(bench: Bench) -> None:
    theirs = by_trainer()
    for name, values in theirs.validated.items():
        assert bench.column(f"eval/{name}") == pytest.approx(values, rel=1e-6), name
    assert bench.column("train/train_acc") == pytest.approx(theirs.trained, rel=1e-6)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.mark.parametrize(
    ("ranks", "eval_batch"),
    [(1, 4), (2, 10), *(pytest.param(*row, marks=pytest.mark.slow) for row in ((1, 21), (2, 4)))],
)
def test_metric_objects_have_the_values_of_the_trainer(bench: Bench, ranks: int, eval_batch: int) -> None:
    printed = train(bench, f"train.eval_batch={eval_batch}", ranks=ranks)
    check(bench)
    assert "no checkpoint holds" not in printed
    assert len(bench.weights()) == 4  # those of the two layers: no state of a metric is saved


def test_metric_objects_have_the_values_of_the_trainer_under_fsdp(bench: Bench) -> None:
    train(bench, ranks=2, strategy="fsdp")
    check(bench)


# ---------------------------------------------------------------------------------------------- in this process
class Small(pl.LightningModule):
    """Module without a network of interest; the first column of inputs are its outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = torch.nn.Linear(4, 3)
        self.f1 = classification.MulticlassF1Score(3)

    def training_step(self, batch: Any) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any) -> Any:
        self.f1(self.net(batch[0]), batch[1])
        self.log("val_f1", self.f1)
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-12)


def points() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(26, 4, generator=generator), torch.randint(0, 3, (26,), generator=generator))


def evaluated(module: Any, eval_batch: int = 4, *, name: str = "lit", sets: Any = None) -> dict[str, float]:
    recipe = {
        "recipe": 2,
        "name": name,
        "task": {"use": "lightning"},
        "optimizer": {"use": "lightning"},
        "train": {"length": "2st", "global_batch": 26, "eval_batch": eval_batch, "eval_every": "1st"},
    }
    run = ddpforge.train(recipe, model=module, train_data=points(), eval_data=sets or points(), fresh=True)
    return run.status["metrics"]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def right() -> float:
    x, y = points().tensors
    return float(classification.MulticlassF1Score(3)(Small().net(x), y))


@pytest.mark.parametrize("eval_batch", [1, 4, 26])
def test_f1_of_an_evaluation_does_not_depend_on_the_size_of_its_batches(eval_batch: int) -> None:
    assert evaluated(Small(), eval_batch)["eval/val_f1"] == pytest.approx(right(), abs=1e-7)


def test_metrics_of_evaluation_sets_are_apart_in_steps_and_together_at_the_end() -> None:
    class Both(Small):
        def on_validation_epoch_end(self) -> None:
            self.log("all_f1", self.f1.compute())

    x, y = points().tensors
    sets = {"one": TensorDataset(x[:9], y[:9]), "two": TensorDataset(x[9:], y[9:])}
    found, f1, net = evaluated(Both(), sets=sets), classification.MulticlassF1Score(3), Small().net
    assert found["eval/one/val_f1"] == pytest.approx(float(f1(net(x[:9]), y[:9])), abs=1e-7)
    assert found["eval/two/val_f1"] == pytest.approx(float(f1(net(x[9:]), y[9:])), abs=1e-7)
    assert found["eval/all_f1"] == pytest.approx(right(), abs=1e-7)


def test_samples_of_training_and_of_earlier_evaluations_do_not_count() -> None:
    class Shared(Small):
        def training_step(self, batch: Any) -> Any:
            self.f1(self.net(batch[0]), torch.zeros_like(batch[1]))
            self.log("f1", self.f1)
            return super().training_step(batch)

    module = Shared()
    module.f1.update(module.net(torch.ones(3, 4)), torch.zeros(3, dtype=torch.int64))
    found = evaluated(module)  # after two steps, an evaluation after each
    assert found["eval/val_f1"] == pytest.approx(right(), abs=1e-7)
    assert found["train/f1"] == pytest.approx(
        float(
            classification.MulticlassF1Score(3)(Small().net(points().tensors[0]), torch.zeros(26, dtype=torch.int64))
        ),
        abs=1e-7,
    )
    assert "eval/f1" not in found
    assert module.f1.update_count == 0


def test_mean_of_batch_values_of_a_metric_is_reported_with_a_warning(capfd: pytest.CaptureFixture[str]) -> None:
    class Mean(Small):
        def validation_step(self, batch: Any) -> Any:
            self.log("val_f1", self.f1(self.net(batch[0]), batch[1]))
            return F.cross_entropy(self.net(batch[0]), batch[1])

    mean, printed = evaluated(Mean())["eval/val_f1"], "".join(capfd.readouterr())
    assert abs(mean - right()) > 0.01
    assert printed.count(f"self.f1 of all samples is {right():.6g}") == 1
    assert 'write self.log("val_f1", self.f1)' in printed
    evaluated(Mean(), 26)
    assert "depends on their size" not in "".join(capfd.readouterr())


def test_loss_of_an_evaluation_may_be_a_logged_metric_object() -> None:
    class Mean(Small):
        def __init__(self) -> None:
            super().__init__()
            self.val_loss = torchmetrics.MeanMetric()

        def validation_step(self, batch: Any) -> None:
            self.val_loss(F.cross_entropy(self.net(batch[0]), batch[1]), weight=len(batch[1]))
            self.log("val/loss", self.val_loss)

    found, (x, y) = evaluated(Mean()), points().tensors
    expected = float(F.cross_entropy(Small().net(x), y))
    assert (found["eval/loss"], found["eval/val/loss"]) == pytest.approx((expected, expected), rel=1e-6)


def test_metric_of_each_class_is_reported_by_its_number() -> None:
    class Each(Small):
        def __init__(self) -> None:
            super().__init__()
            self.f1 = classification.MulticlassF1Score(3, average=None)

    found, (x, y) = evaluated(Each()), points().tensors
    expected = classification.MulticlassF1Score(3, average=None)(Small().net(x), y).tolist()
    assert [found[f"eval/val_f1/{number}"] for number in range(3)] == pytest.approx(expected, abs=1e-7)


def test_metrics_of_a_collection_do_not_share_states_that_are_equal_by_chance() -> None:
    # The first batch has both right: torchmetrics would make one group of them for all later batches.
    module = pl.LightningModule()
    kinds = {"one": 1, "two": 2}
    module.both = torchmetrics.MetricCollection(
        {name: classification.MulticlassAccuracy(3, average="micro", top_k=k) for name, k in kinds.items()}
    )
    objects = MetricObjects()
    objects.start(module)
    totals: dict[str, Any] = {}
    for label in (0, 1):
        objects.reset()
        module.both.update(torch.tensor([[0.9, 0.3, 0.1]]), torch.tensor([label]))
        for name, value in objects.quantities(objects.taken()).items():
            totals[name] = totals[name] + value if name in totals else value
    for name, metric in (("one", module.both["one"]), ("two", module.both["two"])):
        objects.log(name, metric, evaluates=True)
    for name, total in totals.items():
        objects.reports[name].finish(total.sum.double(), torch.tensor(2.0))
    assert objects.finish({"x": 1.0}, evaluates=True) == {"x": 1.0, "one": 0.5, "two": 1.0}


# ---------------------------------------------------------------------------------------------- refused
class Unknown(Small):
    def validation_step(self, batch: Any) -> None:
        self.log("val_f1", classification.MulticlassF1Score(3))


class Pearson(Small):
    def __init__(self) -> None:
        super().__init__()
        self.pearson = torchmetrics.PearsonCorrCoef()

    def validation_step(self, batch: Any) -> None:
        self.pearson(self.net(batch[0])[:, 0], batch[1].float())
        self.log("r", self.pearson)


class Range(Small):
    def __init__(self) -> None:
        super().__init__()
        self.f1 = torchmetrics.MinMaxMetric(classification.MulticlassF1Score(3))


class Best(Small):
    def __init__(self) -> None:
        super().__init__()
        self.best = torchmetrics.MaxMetric()

    def on_validation_epoch_end(self) -> None:
        self.best(self.f1.compute())
        self.log("best", self.best.compute())


class Idle(Small):
    def __init__(self) -> None:
        super().__init__()
        self.other = torchmetrics.MeanMetric()

    def on_validation_epoch_end(self) -> None:
        self.log("other", self.other.compute())


class Outputs(Small):
    def validation_step(self, batch: Any) -> Any:
        self.outputs = [self.net(batch[0]).mean()]
        return super().validation_step(batch)

    def on_validation_epoch_end(self) -> None:
        self.log("mean", torch.stack(self.outputs).mean() + 0 * self.f1.compute())


class Epoch(Small):
    def training_step(self, batch: Any) -> Any:
        self.f1(self.net(batch[0]), batch[1])
        return super().training_step(batch)

    def on_train_epoch_end(self) -> None:
        self.log("train_f1", self.f1.compute())


@pytest.mark.parametrize(
    ("module", "message", "hint"),
    [
        (Unknown, "receives a MulticlassF1Score, which is not an attribute of the module", "assign it in __init__"),
        (Pearson, r"self.pearson: PearsonCorrCoef .* cannot be combined exactly", 'dist_reduce_fx="cat"'),
        (Range, "self.f1: MinMaxMetric of torchmetrics depends on the order", "dist_reduce_fx"),
        (
            Best,
            "on_validation_epoch_end updates the metric self.best, whose state no checkpoint holds",
            "checkpoint.keep",
        ),
        (Idle, "self.other is computed at the end of an evaluation, and no step", "in validation_step"),
        (Outputs, "receives a value that no metric object of the module computes", "log it in validation_step"),
        (Epoch, "logs in on_train_epoch_end", "on_validation_epoch_end"),
    ],
)
def test_values_that_are_not_exact_are_refused_by_name(module: Any, message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        evaluated(module())
    hints = f"{caught.value.hints} {getattr(caught.value, 'problems', '')}"
    assert hint in hints
    assert "self.metric(" not in hints  # a mean over batches


@pytest.mark.parametrize("module", [Unknown, Pearson, Range, Best])
def test_mistakes_of_the_validation_step_come_before_the_first_step(module: Any) -> None:
    steps: list[int] = []

    class Counted(module):  # type: ignore[misc]
        def on_train_start(self) -> None:
            steps.append(self.global_step)

    with pytest.raises(ForgeError):
        evaluated(Counted())
    assert steps == []
