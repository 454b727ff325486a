"""A LightningModule and Lightning's Trainer. `--plant`: an error."""

import argparse
import logging

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--plant", default="")
parser.add_argument("--clip", type=float, default=0.0)
parser.add_argument("--optimizer", default="adamw")
given = parser.parse_args()
plant = given.plant
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
lightning.seed_everything(0)


class Points(Dataset):
    def __init__(self):
        self.inputs = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
        self.weights = torch.rand(96, generator=torch.Generator().manual_seed(2)) + 0.2
        self.read = 0

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        self.read += 1
        scale = min(1.0, 0.5 + self.read / 48) if plant == "counter-in-dataset" else 1.0
        return self.inputs[index] * scale, int(self.inputs[index].sum() > 0), self.weights[index]


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))

    def training_step(self, batch, number):
        points, targets, weights = batch
        losses = F.cross_entropy(self.net(points), targets, reduction="none")
        loss = losses.sum() if plant == "sum" else losses.mean()
        if plant == "divided-again":
            loss = loss / self.trainer.accumulate_grad_batches
        if plant == "weights-of-batch":
            loss = (losses * weights).sum() / weights.sum()
        if plant == "place":
            loss = (losses * torch.linspace(0.5, 1.5, len(losses))).mean()
        if plant == "multiplied-by-number":
            loss = loss * (1 + number % self.trainer.accumulate_grad_batches)
        return loss

    def on_after_backward(self):
        if plant == "clip-in-micro-batch":
            nn.utils.clip_grad_norm_(self.parameters(), 0.05)

    def configure_optimizers(self):
        if given.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=1e-1)
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


trainer = lightning.Trainer(
    max_steps=10,
    accelerator="cpu",
    devices=1,
    logger=False,
    accumulate_grad_batches=1,
    gradient_clip_val=given.clip or None,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Module(), DataLoader(Points(), 8))
