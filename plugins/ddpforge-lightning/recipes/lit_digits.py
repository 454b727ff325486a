"""LightningModule that classifies handwritten digits [1, 8, 8]."""

import torch
import torch.nn.functional as F
from pytorch_lightning import LightningModule
from torch import Tensor, nn


class LitDigits(LightningModule):
    """A small convolutional network, trained with AdamW and OneCycleLR."""

    def __init__(self, width: int = 16, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(width * 64, 10))

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits [B, 10]."""
        return self.net(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns the mean cross-entropy of the batch."""
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Logs the mean cross-entropy and the accuracy."""
        images, labels = batch
        logits = self(images)
        self.log("val_loss", F.cross_entropy(logits, labels))
        self.log("val_acc", (logits.argmax(1) == labels).float().mean(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> dict:
        """Returns AdamW, and OneCycleLR over all steps of the run."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.hparams.lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
