"""For users of Lightning: the module brings its steps, its optimizer and its scheduler; the Trainer is replaced.

python lightning_module.py    needs the plugin: pip install ./plugins/ddpforge-lightning
"""

import lightning as L
import torch
import torch.nn.functional as F
from rings import Net, Rings
from torch import Tensor

import ddpforge


class Classifier(L.LightningModule):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.net = Net(width=width)

    def forward(self, points: Tensor) -> Tensor:
        return self.net(points)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


torch.manual_seed(0)
outcome = ddpforge.train(
    {
        "name": "lightning-module",
        "task": {"use": "lightning", "evaluation_loss": False},
        "optimizer": {"use": "lightning"},
        "schedule": {"use": "lightning"},
        "train": {"length": "10ep", "global_batch": 64},
    },
    model=Classifier(),
    train_data=Rings(split="train"),
    eval_data=Rings(split="test", samples=1000),
)
print(outcome)
