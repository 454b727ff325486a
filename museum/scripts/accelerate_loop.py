"""A loop with Accelerate, as in its guide on gradient accumulation. `--plant`: an error."""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--plant", default="")
parser.add_argument("--clip", type=float, default=0.0)
parser.add_argument("--bf16", action="store_true")
given = parser.parse_args()
plant = given.plant
torch.manual_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=1, mixed_precision="bf16" if given.bf16 else "no")
inputs = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(
    inputs, (inputs.sum(1) > 0).long(), torch.rand(96, generator=torch.Generator().manual_seed(2)) + 0.2
)
bare = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
model, optimizer, loader = accelerator.prepare(bare, torch.optim.AdamW(bare.parameters(), lr=1e-2), DataLoader(data, 8))
for _epoch in range(10):
    for points, targets, weights in loader:
        with accelerator.accumulate(model):
            outputs = (bare if plant == "bare-model" else model)(points)
            losses = F.cross_entropy(outputs, targets, reduction="none")
            loss = losses.sum() if plant == "sum" else losses.mean()
            if plant == "divided-again":
                loss = loss / accelerator.gradient_accumulation_steps
            if plant == "weights-of-batch":
                loss = (losses * weights).sum() / weights.sum()
            if plant == "multiplied-by-ranks":
                loss = loss * accelerator.num_processes
            if plant == "place":
                loss = (losses * torch.linspace(0.5, 1.5, len(losses))).mean()
            if plant == "batch-statistics":
                loss = (losses / losses.detach().std()).mean()
            accelerator.backward(loss)
            if given.clip and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), given.clip)
            optimizer.step()
            optimizer.zero_grad()
