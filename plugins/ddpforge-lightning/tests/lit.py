"""LightningModule and dataset of the tests' recipes; the tests train them with Lightning's own Trainer too."""

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
import torchmetrics
from ddpforge.interfaces import Callback, StepInfo
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate
from torchmetrics import classification


class LitNet(pl.LightningModule):
    """Small network with the same initial weights everywhere; `form` is the result of configure_optimizers."""

    def __init__(self, width: int = 9, lr: float = 0.05, form: str = "onecycle") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.log_dict({"val_loss": loss, "val_acc": (logits.argmax(1) == y).float().mean()}, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        schedulers = torch.optim.lr_scheduler
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        match self.hparams.form:
            case "onecycle":
                total = int(self.trainer.estimated_stepping_batches)
                scheduler = schedulers.OneCycleLR(optimizer, max_lr=self.hparams.lr, total_steps=total)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
            case "lists":  # a scheduler of epochs
                return [optimizer], [schedulers.ExponentialLR(optimizer, 0.5)]
            case "frequency":
                config = {"scheduler": schedulers.StepLR(optimizer, 1, 0.8), "interval": "step", "frequency": 3}
                return [optimizer], [config]
            case "warmup":  # the first rate is 0; two groups with rates of one shape
                layers = [{"params": self.layers[0].parameters()}, {"params": self.layers[2].parameters(), "lr": 0.01}]
                optimizer = torch.optim.SGD(layers, lr=self.hparams.lr, momentum=0.9)
                warmup = schedulers.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}
            case "list":
                return [optimizer]
        return optimizer


class LitHooks(LitNet):
    """Writes a line for each hook and each step, to the file `called`."""

    def note(self, name: str) -> None:
        with Path("called").open("a") as file:
            file.write(f"{name} {self.current_epoch} {self.global_step}\n")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.note("training_step")
        return super().training_step(batch, batch_idx)

    def on_fit_start(self) -> None:
        self.note("fit_start")

    def on_train_start(self) -> None:
        self.note("train_start")

    def on_train_epoch_start(self) -> None:
        self.note("train_epoch_start")

    def on_train_epoch_end(self) -> None:
        self.note("train_epoch_end")

    def on_validation_epoch_end(self) -> None:
        self.note("validation_epoch_end")

    def on_train_end(self) -> None:
        self.note("train_end")

    def on_fit_end(self) -> None:
        self.note("fit_end")


class LitMetrics(LitNet):
    """Logs objects of torchmetrics in every form of Lightning's documentation."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.train_acc = classification.MulticlassAccuracy(3)  # a mean over classes, not over samples
        self.f1 = classification.MulticlassF1Score(3)
        self.auroc = nn.ModuleDict({"exact": classification.MulticlassAUROC(3)})
        self.peak = torchmetrics.MaxMetric()
        self.both = torchmetrics.MetricCollection(
            {"precision": classification.MulticlassPrecision(3), "recall": classification.MulticlassRecall(3)},
            prefix="val_",
        )
        self.kappa = classification.MulticlassCohenKappa(3)
        self.classes = torchmetrics.ClasswiseWrapper(classification.MulticlassRecall(3, average=None), prefix="val_")
        self.ratio = self.both["precision"] / self.both["recall"]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        self.train_acc(logits, batch[1])
        self.log("train_acc", self.train_acc, on_step=True, on_epoch=True)
        return F.cross_entropy(logits, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y))
        self.f1(logits, y)
        self.log("val_f1", self.f1, on_step=False, on_epoch=True, prog_bar=True)
        self.auroc["exact"].update(logits.softmax(1), y)
        self.peak.update(logits.max())
        self.log_dict({"val_auroc": self.auroc["exact"], "val_peak": self.peak})
        self.both.update(logits, y)
        self.log_dict(self.both)
        self.kappa(logits, y)
        self.classes.update(logits, y)

    def on_validation_epoch_end(self) -> None:
        self.log("val_kappa", self.kappa.compute())
        self.log("val_error", 1 - self.kappa.compute())
        self.log("val_number", self.kappa.compute().item())
        self.log_dict(self.classes.compute())
        self.kappa.reset()
        self.classes.reset()


class PointsModule(pl.LightningDataModule):
    """Training and validation data of the tests."""

    def __init__(self, samples: int = 80) -> None:
        super().__init__()
        self.samples = samples

    def prepare_data(self) -> None:
        with Path("prepared").open("a") as file:
            file.write("x")

    def setup(self, stage: str) -> None:
        assert Path("prepared").exists()
        self.train, self.val = Points(self.samples), Points(21, 2)

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, 8, collate_fn=stacked)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val, 4)


def stacked(samples: Any) -> Any:
    """Returns the batch with inputs of half their size."""
    x, y = default_collate(list(samples))
    return [x / 2, y]


class Crash(Callback):
    """Fails the first attempt after step 15."""

    def on_step(self, info: StepInfo) -> None:
        mark = Path("crashed")
        if info.step == 15 and not mark.exists():
            mark.touch()
            raise RuntimeError("crash of the test")


class Points:
    """Dataset of pairs (x, class)."""

    random = False

    def __init__(self, samples: int = 80, draw: int = 1) -> None:
        self.x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(draw))
        self.y = (self.x.sum(1) > 0).long() + (self.x[:, 0] > 1).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]
