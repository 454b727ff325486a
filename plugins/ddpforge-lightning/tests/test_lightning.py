"""LightningModules under ddpforge compared with Lightning's own Trainer; modules and recipes that are refused."""

import importlib
import inspect
import json
import subprocess
from pathlib import Path
from shutil import copy
from typing import Any

import ddpforge
import lit
import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from ddpforge.errors import UsageError
from ddpforge.interfaces import Horizon
from ddpforge.testing.ranks import preload, run_ddpforge
from ddpforge.training.callbacks import may_end
from ddpforge.training.stages import MISSING, NotBuilt
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, WeightedRandomSampler

from ddpforge_lightning.data import LightningData
from ddpforge_lightning.hooks import ModuleHooks
from ddpforge_lightning.metric_objects import MetricObjects
from ddpforge_lightning.module import checked, run_of
from ddpforge_lightning.optimizers import lightning_optimizer, lightning_schedule
from ddpforge_lightning.tasks import LightningTask, _recorder

RECIPE = """
recipe = 2
name = "run"
[model]
use = "./lit.py:LitNet"
form = "{form}"
[data.train]
use = "./lit.py:Points"
[data.eval]
use = "./lit.py:Points"
samples = 21
draw = 2
[data.sampler]
use = "sequential"
[task]
use = "lightning"
[optimizer]
use = "lightning"
[schedule]
use = "lightning"
{more}
[strategy]
use = "{strategy}"
[train]
length = "4ep"
global_batch = 8
micro_batch = 4
eval_every = "1ep"
[track]
every = "1st"
[checkpoint]
every = "10st"
[checkpoint.keep]
best = 1
monitor = "eval/val_acc"
mode = "max"
"""
preload("pytorch_lightning", "torchmetrics", "ddpforge_lightning.tasks")
MOMENTUM = '[optimizer.schedules.beta1]\nuse = "lightning"'


class Bench:
    """Runs one recipe in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        copy(Path(__file__).parent / "lit.py", folder)

    def __call__(self, *arguments: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
        return run_ddpforge(*arguments, cwd=self.folder, ranks=ranks)

    def write(self, *, form: str = "onecycle", more: str = "", strategy: str = "ddp") -> None:
        more += MOMENTUM if form == "onecycle" and not more else ""
        (self.folder / "run.toml").write_text(RECIPE.format(form=form, more=more, strategy=strategy))

    def train(self, *, ranks: int = 1, **text: str) -> None:
        self.write(**text)
        done = self("run", "run.toml", ranks=ranks)
        assert done.returncode == 0, done.stdout + done.stderr

    def column(self, key: str) -> list[float]:
        """Returns a metric at each of its steps; the newest value if a resumed run repeats a step."""
        rows = map(json.loads, (self.folder / "runs/run/metrics.jsonl").read_text().splitlines())
        found = {row["step"]: row[key] for row in rows if key in row}
        return [found[step] for step in sorted(found)]

    def weights(self) -> dict[str, torch.Tensor]:
        done = self("export", "runs/run", "--out", "weights.safetensors", "--force")
        assert done.returncode == 0, done.stderr
        return load_file(self.folder / "weights.safetensors")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


class Record(pl.Callback):
    """Records losses, learning rates and means of the validation of a real Trainer."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.validated: dict[str, list[float]] = {"val_loss": [], "val_acc": []}

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        for name, values in self.validated.items():
            values.append(float(trainer.callback_metrics[name]))


def by_lightning(form: str = "onecycle", data: Any = None) -> tuple[Record, lit.LitNet]:
    """Trains four epochs with Lightning's own Trainer, in the order of the data."""
    record, module = Record(), lit.LitNet(form=form)
    trainer = pl.Trainer(
        max_epochs=4,
        accelerator="cpu",
        callbacks=[record],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    if data is None:
        trainer.fit(module, DataLoader(lit.Points(), 8), DataLoader(lit.Points(21, 2), 4))
    else:
        trainer.fit(module, datamodule=data)
    return record, module


def check(bench: Bench, record: Record) -> None:
    assert len(record.losses) == 40
    assert bench.column("train/loss") == pytest.approx(record.losses, rel=1e-6)
    assert bench.column("train/train_loss") == pytest.approx(record.losses, rel=1e-6)
    assert bench.column("lr") == pytest.approx(record.rates, rel=1e-9)
    for name, values in record.validated.items():
        assert bench.column(f"eval/{name}") == pytest.approx(values, rel=1e-6)


# ---------------------------------------------------------------------------------------------- the loss curve
SLOW = [pytest.param(form, marks=pytest.mark.slow) for form in ("frequency", "list", "one")]


@pytest.mark.parametrize("form", ["onecycle", "lists", "warmup", *SLOW])
def test_curve_is_that_of_the_trainer(bench: Bench, form: str) -> None:
    bench.train(form=form)
    check(bench, by_lightning(form)[0])


# A test of the data module has the curve under DDP, too.
@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_two_ranks_have_the_curve_of_the_trainer(bench: Bench, strategy: str) -> None:
    bench.train(ranks=2, strategy=strategy)
    check(bench, by_lightning()[0])


def test_resumed_run_has_the_curve_of_the_trainer(bench: Bench) -> None:
    bench.write(more=MOMENTUM + '\n[callbacks.crash]\nuse = "./lit.py:Crash"')
    assert "crash of the test" in bench("run", "run.toml").stderr
    done = bench("run", "run.toml")
    assert done.returncode == 0, done.stderr
    assert "step 10" in done.stdout + done.stderr  # it resumes there
    check(bench, by_lightning()[0])


def test_hooks_are_called_in_the_order_of_the_trainer(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares each hook and training step, with the epoch and the global step that the module then reads."""
    bench.write(form="lists")
    edit_file(bench.folder / "run.toml", "LitNet", "LitHooks")
    edit_file(bench.folder / "run.toml", "micro_batch = 4", "micro_batch = 8")
    done = bench("run", "run.toml", "--set", "train.length=2ep")
    assert done.returncode == 0, done.stdout + done.stderr
    ours = (bench.folder / "called").read_text().splitlines()
    ours = ours[ours.index("fit_start 0 0") :]  # before: the loss of a batch and of its halves, in copies

    (bench.folder / "theirs").mkdir()
    monkeypatch.chdir(bench.folder / "theirs")
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    loaders = DataLoader(lit.Points(), 8), DataLoader(lit.Points(21, 2), 8)
    trainer.fit(lit.LitHooks(form="lists"), *loaders)
    theirs = (bench.folder / "theirs/called").read_text().splitlines()
    assert ours[:-2] == theirs[:-2]
    # The Trainer counts the epochs that have ended; ddpforge stays in the last one.
    assert [line.split()[0] for line in ours[-2:]] == ["train_end", "fit_end"]


def test_log_in_a_hook_is_refused(bench: Bench) -> None:
    bench.write(form="lists")
    edit_file(bench.folder / "run.toml", "LitNet", "LitHooks")
    edit_file(bench.folder / "lit.py", 'self.note("validation_epoch_end")', 'self.log("a", 1.0)')
    done = bench("run", "run.toml")
    assert done.returncode == 2
    assert "the LightningModule logs in on_validation_epoch_end" in done.stderr
    assert "Traceback" not in done.stderr


def test_evaluation_without_a_loss_reports_logged_values(bench: Bench) -> None:
    bench.write(form="list")
    edit_file(bench.folder / "run.toml", "[task]\n", "[task]\nevaluation_loss = false\n")
    done = bench("run", "run.toml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(bench.column("eval/val_acc")) == 4
    assert bench.column("eval/loss") == []


def test_weights_load_into_the_module_without_renamed_keys(bench: Bench) -> None:
    bench.train(ranks=2)
    module, expected = lit.LitNet(), by_lightning()[1].state_dict()
    module.load_state_dict(bench.weights())
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def test_evaluation_uses_the_logged_loss_if_none_is_returned(bench: Bench) -> None:
    edit(bench, "        return loss\n\n    def conf", "    def conf")
    done = bench("run", "run.toml")
    assert done.returncode == 0, done.stderr
    assert bench.column("eval/loss") == bench.column("eval/val_loss")
    check(bench, by_lightning()[0])


def test_evaluations_call_the_test_step_if_the_recipe_chooses_it(bench: Bench) -> None:
    edit(bench, '[task]\nuse = "lightning"', '[task]\nuse = "lightning"\nevaluation = "test_step"')
    edit_file(bench.folder / "lit.py", "def validation_step", "def test_step")
    done = bench("run", "run.toml")
    assert done.returncode == 0, done.stderr
    check(bench, by_lightning()[0])


def test_data_module_gives_its_datasets_and_collate_function(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.write()
    for name, loader in (("train", "train"), ("eval", "val")):
        before = f'[data.{name}]\nuse = "./lit.py:Points"'
        after = f'[data.{name}]\nuse = "lightning"\nloader = "{loader}"\nof = {{ use = "./lit.py:PointsModule" }}'
        edit_file(bench.folder / "run.toml", before, after)
    edit_file(bench.folder / "run.toml", "samples = 21\ndraw = 2\n", "")
    done = bench("run", "run.toml", ranks=2)
    assert done.returncode == 0, done.stderr
    assert "has a batch size of 8, which is not used" in done.stdout + done.stderr
    monkeypatch.chdir(bench.folder)
    check(bench, by_lightning(data=lit.PointsModule())[0])


class Weighted(lit.PointsModule):
    def train_dataloader(self) -> Any:
        return DataLoader(self.train, 8, sampler=WeightedRandomSampler([1.0] * 80, 80))


class Moved(lit.PointsModule):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class Several(lit.PointsModule):
    def train_dataloader(self) -> Any:
        return [super().train_dataloader()]


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Weighted, "has a WeightedRandomSampler"),
        (Moved, "overrides `on_after_batch_transfer`"),
        (Several, "returns list, not one DataLoader"),
        (lit.Points, "Points is not a LightningDataModule"),
    ],
)
def test_unusable_data_modules_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    built = module()
    with pytest.raises(UsageError, match=message):
        LightningData(of=built)


def test_readme_has_the_recipe_and_its_module() -> None:
    folder = Path(__file__).parents[1]
    text = (folder / "README.md").read_text()
    assert all((folder / "recipes" / name).read_text() in text for name in ("lit_digits.py", "digits-lightning.toml"))


@pytest.mark.slow
def test_recipe_of_the_readme_reaches_its_accuracy(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for file in (Path(__file__).parents[1] / "recipes").iterdir():
        if file.is_file():
            copy(file, tmp_path)
    recipe = (tmp_path / "digits-lightning.toml").read_text()
    (tmp_path / "run.toml").write_text(recipe.replace('name = "digits-lightning"', 'name = "run"'))
    done = bench("run", "run.toml", ranks=2)
    assert done.returncode == 0, done.stderr
    assert bench.column("eval/val_acc")[-1] == pytest.approx(0.95, abs=0.02)


# ---------------------------------------------------------------------------------------------- refused modules
def manual(module: Any) -> None:
    module.automatic_optimization = False


def refused(**methods: Any) -> Any:
    return type("Changed", (lit.LitNet,), methods)()


@pytest.mark.parametrize(
    ("method", "hint"),
    [
        ("on_train_batch_start", "callback of ddpforge"),
        ("on_before_optimizer_step", "callback of ddpforge"),
        ("optimizer_step", "a warm-up is a schedule"),
        ("backward", "let ddpforge call backward"),
        ("configure_model", "__init__"),
        ("train_dataloader", "data.train"),
        ("configure_gradient_clipping", "train.clip_norm"),
    ],
)
def test_overridden_hook_is_refused_by_name(method: str, hint: str) -> None:
    with pytest.raises(UsageError, match=f"overrides `{method}`") as caught:
        checked(refused(**{method: lambda self, *_: None}))
    assert hint in str(caught.value.hints)


def test_manual_optimization_is_refused() -> None:
    module = lit.LitNet()
    manual(module)
    with pytest.raises(UsageError, match="optimizes manually"):
        checked(module)


class Predicting(lit.LitNet):
    """Predicts the class of each sample."""

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        return {"class": self(batch[0]).argmax(1)}


def test_predictions_are_the_columns_of_predict_step() -> None:
    task, batch = LightningTask(), (torch.randn(5, 4), torch.zeros(5, dtype=torch.int64))
    task._module = model = Predicting()
    assert task.predict(model, batch)["class"].tolist() == model(batch[0]).argmax(1).tolist()
    task._module = lit.LitNet()
    with pytest.raises(UsageError, match=r"LitNet has no predict_step, which `ddpforge predict` calls"):
        task.predict(task._module, batch)


def test_a_model_that_was_not_built_is_reported_by_its_own_error() -> None:
    """So `ddpforge data show`, which builds no model, prints the data."""
    with pytest.raises(NotBuilt):
        checked(MISSING)


def test_other_models_are_refused() -> None:
    with pytest.raises(UsageError, match="the model is a Linear, not a LightningModule"):
        checked(nn.Linear(2, 2))


@pytest.mark.parametrize("read", ["logger", "loggers"])
def test_what_needs_a_trainer_is_refused_by_name(read: str) -> None:
    module = lit.LitNet()
    run_of(module)
    with pytest.raises(UsageError, match=f"reads `{read}` of its Trainer"):
        getattr(module, read)


def test_epochs_need_the_schedule_that_knows_their_length() -> None:
    module = lit.LitNet()
    run_of(module)
    assert module.global_step == 0
    with pytest.raises(UsageError, match="their length in steps is not known") as caught:
        assert module.current_epoch
    assert caught.value.hints == ('write [schedule] use = "lightning", which works without a scheduler too',)
    run_of(module, Horizon(total=20, steps_per_epoch=10)).step = 13
    assert (module.current_epoch, module.global_step) == (1, 13)


def test_length_of_the_run_is_that_of_the_trainer() -> None:
    module = lit.LitNet()
    run_of(module, Horizon(total=25, steps_per_epoch=10))
    assert (module.trainer.max_steps, module.trainer.max_epochs, module.trainer.num_training_batches) == (25, 3, 10)
    assert (module.trainer.world_size, module.trainer.is_global_zero, module.global_rank) == (1, True, 0)
    module.print("rank 0 prints")


def test_a_mean_is_multiplied_by_the_samples_and_not_by_the_first_value_of_a_batch() -> None:
    class Shared(pl.LightningModule):
        def training_step(self, batch: Any) -> Any:
            self.log("own", batch[1].mean())
            return batch[1].mean()

    module, task = Shared(), LightningTask()
    task._module, task.batch_samples = module, 4
    loss, outputs = task.loss(module, (torch.zeros(9), torch.full((4,), 2.0)))
    assert float(loss) == 8.0
    assert outputs["own"] == (2.0, 4)


def test_hooks_of_a_module_cost_no_collective_after_a_step() -> None:
    assert may_end({"module": ModuleHooks("validation")}, "on_step") == []


def test_logged_loss_of_an_evaluation_is_a_mean_also_if_training_declares_a_sum() -> None:
    task, module = LightningTask(reduction="sum", evaluation_loss="val_loss"), lit.LitNet()
    module.training_step = lambda batch, batch_idx: 0.0
    task.start(module, None)  # type: ignore[arg-type]
    task.evaluates = True
    data = lit.Points(8)
    loss, _ = task.loss(module, (data.x, data.y))
    torch.testing.assert_close(loss, 8 * nn.functional.cross_entropy(module(data.x), data.y))


@pytest.mark.parametrize(
    ("value", "message"), [("text", "receives a str, not a number"), (torch.ones(2), r"receives \[2\], not one number")]
)
def test_values_that_are_not_numbers_are_refused(value: Any, message: str) -> None:
    logged: dict[str, Any] = {}
    with pytest.raises(UsageError, match=message):
        _recorder(logged, MetricObjects(), {})("a", value)
    _recorder(logged, MetricObjects(), {})("b", torch.ones(1))
    assert logged["b"][0].shape == ()


def test_module_of_the_package_lightning_is_accepted() -> None:
    other = pytest.importorskip("lightning.pytorch")
    kind = type("Other", (other.LightningModule,), {"training_step": lambda self, batch, batch_idx: None})
    assert checked(kind()).automatic_optimization


class Trainers(lit.LitNet):
    """Needs a Trainer in many places."""

    def shared(self, batch: Any, number: int) -> Any:
        if number % 10 == 0:
            self.print(self.trainer.datamodule)
        return F.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.shared(batch, batch_idx)
        if not torch.isfinite(loss):
            return None
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        return loss * rate

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.logger.experiment.add_scalar("x", 1.0)

    def on_validation_epoch_end(self) -> None:
        self.log("x", 1.0)

    def on_train_epoch_end(self) -> None:
        self.log("y", 1.0)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass

    def optimizer_zero_grad(self, *_: Any) -> None:
        pass

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.layers[0].parameters())
        second = torch.optim.Adam(self.layers[2].parameters())
        return [first, second], [torch.optim.lr_scheduler.ReduceLROnPlateau(first)]


PLACES = (
    "overrides `on_before_optimizer_step`",
    "overrides `optimizer_zero_grad`",
    "reads `number`, and a batch has no number",
    "reads `datamodule` of its Trainer",
    "reads `optimizers` of its Trainer",
    "training_step returns None",
    "reads `logger` of its Trainer",
    "logs in on_validation_epoch_end, and has no metric objects",
    "logs in on_train_epoch_end",
    "returns 2 optimizers",
    "has ReduceLROnPlateau",
)


def test_all_places_that_need_a_trainer_are_refused_at_once() -> None:
    with pytest.raises(UsageError, match="overrides") as caught:
        checked(Trainers())
    text = " ".join((caught.value.message, *caught.value.hints))
    assert [place for place in PLACES if text.count(place) != 1] == []
    line = inspect.getsourcelines(Trainers.shared)[1] + 1
    assert f"(test_lightning.py:{line})" in text


def test_places_in_branches_that_may_not_be_reached_are_not_errors() -> None:
    class Debug(lit.LitNet):
        debug = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.debug:
                print(self.trainer.datamodule, batch_idx + 1)
            if self.debug and self.logger:
                return super().training_step(batch, batch_idx) + batch_idx
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return self.trainer.datamodule  # the run may have no evaluation

    module = Debug()
    assert checked(module) is module
    with pytest.raises(UsageError, match="reads `datamodule` of its Trainer"):
        checked(module, "validation_step")


def test_error_of_a_step_names_the_other_places() -> None:
    class Two(lit.LitNet):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            for _ in range(1):
                print(self.trainer.datamodule)
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            return plateau(self), torch.optim.lr_scheduler.ReduceLROnPlateau

    module, task, data = Two(), LightningTask(), lit.Points(8)
    task.start(module, None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="reads `datamodule`") as caught:
        task.loss(module, (data.x, data.y))
    assert any(one.startswith("also: configure_optimizers has ReduceLROnPlateau (test_") for one in caught.value.hints)


def test_epoch_of_an_evaluation_is_that_of_the_checkpoint(bench: Bench) -> None:
    bench.write(form="list")
    edit_file(bench.folder / "run.toml", "LitNet", "LitHooks")
    done = bench("run", "run.toml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no checkpoint holds" not in done.stdout + done.stderr
    called = (bench.folder / "called").read_text().splitlines()
    in_training = [line for line in called if line.startswith("validation_epoch_end")]
    assert in_training == [f"validation_epoch_end {epoch} {10 * (epoch + 1)}" for epoch in range(4)]
    for step in (40, 30):
        (bench.folder / "called").unlink()
        done = bench("eval", "runs/run", "--step", str(step))
        assert done.returncode == 0, done.stdout + done.stderr
        assert (bench.folder / "called").read_text().splitlines() == [f"validation_epoch_end {step // 10 - 1} {step}"]


def test_check_finds_mistakes_of_the_validation_step(bench: Bench) -> None:
    edit(bench, '"val_acc": (', '"val_acc": 1 / (self.trainer.datamodule is None), "val": (')
    done = bench("check", "run.toml", "--build")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "reads `datamodule` of its Trainer" in done.stderr
    run = bench("run", "run.toml")
    assert run.returncode == 2
    assert "reads `datamodule` of its Trainer" in run.stderr
    assert "step 1" not in run.stdout + run.stderr


def logs_with_batch_size(size: int) -> Any:
    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))
        self.log("weighted", batch[0].sum(), batch_size=size if len(batch[0]) == 4 else 7)

    return type("Weighted", (lit.LitNet,), {"validation_step": validation_step})


@pytest.mark.parametrize("size", [1, 3])
def test_mean_of_a_logged_value_is_weighted_by_its_batch_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", **options)
    module = logs_with_batch_size(size)(form="list")
    (theirs,) = trainer.validate(module, DataLoader(lit.Points(21, 2), 4), verbose=False)
    module = logs_with_batch_size(size)(form="list", lr=1e-12)
    recipe = {
        "recipe": 2,
        "name": "run",
        "task": {"use": "lightning"},
        "optimizer": {"use": "lightning"},
        "train": {"length": "1st", "global_batch": 8, "eval_batch": 4},
    }
    run = ddpforge.train(recipe, model=module, train_data=lit.Points(), eval_data=lit.Points(21, 2))
    assert run.status["metrics"]["eval/weighted"] == pytest.approx(theirs["weighted"], rel=1e-6)
    assert run.status["metrics"]["eval/val_loss"] == pytest.approx(theirs["val_loss"], rel=1e-5)


SPLIT = """

class Numbered(Points):
    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index], index


class Split(PointsModule):
    def setup(self, stage: str) -> None:
        self.train, self.val, self.test = random_split(Numbered(80), [50, 20, 10])

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, 8)

    def test_dataloader(self) -> Any:
        return DataLoader(self.test, 4)


class LitSeen(LitNet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.note("train", batch)
        return super().training_step(batch[:2], batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.note("eval", batch)
        return super().validation_step(batch[:2], batch_idx)

    def note(self, name: str, batch: Any) -> None:
        with Path("seen").open("a") as file:
            file.write("".join(f"{name} {index}\\n" for index in batch[2].tolist()))
"""


def test_random_parts_of_a_data_module_are_disjoint_although_each_stage_splits_anew(bench: Bench) -> None:
    bench.write(form="list")
    edit_file(bench.folder / "lit.py", "import DataLoader,", "import DataLoader, random_split,")
    with (bench.folder / "lit.py").open("a") as file:
        file.write(SPLIT)
    edit_file(bench.folder / "run.toml", "LitNet", "LitSeen")
    recipe = (bench.folder / "run.toml").read_text()
    begin, end = recipe.index("[data.train]"), recipe.index("[data.sampler]")
    tables = [
        f'[data.{name}]\nuse = "lightning"\nloader = "{loader}"\nof = {{ use = "./lit.py:Split" }}\n'
        for name, loader in (("train", "train"), ("eval.val", "val"), ("eval.test", "test"))
    ]
    (bench.folder / "run.toml").write_text(
        recipe[:begin] + "".join(tables) + recipe[end:].replace("eval/", "eval/val/")
    )
    done = bench("run", "run.toml", "--set", "train.length=1ep")
    assert done.returncode == 0, done.stdout + done.stderr
    seen: dict[str, set[str]] = {"train": set(), "eval": set()}
    for line in (bench.folder / "seen").read_text().splitlines():
        seen[line.split()[0]].add(line.split()[1])
    assert (len(seen["train"]), len(seen["eval"]), len(seen["train"] | seen["eval"])) == (50, 30, 80)


# ---------------------------------------------------------------------------------------------- refused optimizers
def parameters(module: nn.Module) -> list[dict[str, Any]]:
    named = dict(module.named_parameters())
    return [{"params": list(named.values()), "names": list(named)}]


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=0.1)


def plateau(module: nn.Module) -> Any:
    optimizer = adam(module)
    return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)}


def shapes(module: Any) -> Any:
    optimizer = torch.optim.SGD([{"params": [one]} for one in module.parameters()], lr=0.1)
    factors = [lambda step: 1.0] * 3 + [lambda step: 0.9**step]
    return [optimizer], [{"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, factors), "interval": "step"}]


def build_both(module: nn.Module) -> None:
    lightning_schedule(Horizon(total=9, steps_per_epoch=3), module, "lr")
    lightning_optimizer(parameters(module), module)


@pytest.mark.parametrize(
    ("configure", "message"),
    [
        (lambda module: [adam(module), adam(module)], "returns 2 optimizers"),
        (plateau, "returns ReduceLROnPlateau"),
        (shapes, "different shapes"),
        (lambda module: None, "returns NoneType"),
        (lambda module: torch.optim.LBFGS(module.parameters()), "LBFGS of configure_optimizers computes the loss"),
        (lambda module: torch.optim.SGD(module.layers[0].parameters(), lr=0.1), r"leaves out .*layers\.2\.weight"),
    ],
)
def test_unusable_optimizers_are_refused(configure: Any, message: str) -> None:
    module = refused(configure_optimizers=configure)
    with pytest.raises(UsageError, match=message):
        build_both(module)


def test_scheduler_leaves_weights_alone_and_options_in_range() -> None:
    module = lit.LitNet()
    for one in module.parameters():
        one.grad = torch.ones_like(one)  # as a check before training may leave it
    before = [one.clone() for one in module.parameters()]
    factor = lightning_schedule(Horizon(total=40, steps_per_epoch=10), module, "lr")
    assert max(map(factor, range(40))) == 1.0
    assert factor(39) == factor(1000) == pytest.approx(4e-6, rel=0.01)
    assert all(map(torch.equal, before, module.parameters()))


# ---------------------------------------------------------------------------------------------- refused recipes
def edit(bench: Bench, before: str, after: str) -> None:
    bench.write()
    for name in ("run.toml", "lit.py"):
        edit_file(bench.folder / name, before, after)


def edit_file(file: Path, before: str, after: str) -> None:
    file.write_text(file.read_text().replace(before, after))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (MOMENTUM, "", "changes beta1, but the recipe has another schedule"),
        ('[schedule]\nuse = "lightning"', '[schedule]\nuse = "cosine"', "write [schedule] use"),
        ('[task]\nuse = "lightning"', '[task]\nuse = "lightning"\nreduction = "sum"', "but task.reduction is sum"),
        ("    def validation_step", "    def on_after_backward", "overrides `on_after_backward`"),
        ("        return loss\n\n    def conf", "        return logits\n\n    def conf", "returns no loss"),
        ("x, y = batch\n        loss", "x, y = batch\n        batch_idx % 3\n        loss", "reads `batch_idx`"),
    ],
)
def test_mistake_is_an_error_without_traceback(bench: Bench, before: str, after: str, message: str) -> None:
    edit(bench, before, after)
    done = bench("run", "run.toml")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_import_of_the_plugin_imports_no_lightning() -> None:
    code = "import sys, ddpforge_lightning.tasks, ddpforge_lightning.optimizers; assert not [one for one in sys.modules"
    code += " if one.split('.')[0] in ('torch', 'lightning', 'pytorch_lightning')]"
    assert importlib.util.find_spec("pytorch_lightning")
    assert subprocess.run([__import__("sys").executable, "-c", code], timeout=60).returncode == 0
