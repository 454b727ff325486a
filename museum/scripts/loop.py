"""A loop by hand: a classifier of points, with gradient accumulation. `--plant` switches on an error."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--bs", type=int, default=8)
parser.add_argument("--ga", type=int, default=1)
parser.add_argument("--plant", default="")
parser.add_argument("--optimizer", default="adamw")
parser.add_argument("--norm", action="store_true")
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--clip", type=float, default=0.0)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--schedule", action="store_true")
given = parser.parse_args()
plant = given.plant
torch.manual_seed(0)


class Points(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(96, 6, generator=generator)
        self.targets = (self.inputs.sum(1) > 0).long() + (self.inputs[:, 0] > 1).long()
        self.weights = torch.rand(96, generator=generator) + 0.5
        self.read = 0

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        inputs = self.inputs[index]
        if plant == "counter-in-dataset":  # easier samples first, by a counter that each process has for itself
            self.read += 1
            inputs = inputs * min(1.0, 0.5 + self.read / 48)
        return inputs, self.targets[index], self.weights[index]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16) if given.norm else nn.Identity()
        self.dropout = nn.Dropout(given.dropout)
        self.last = nn.Linear(16, 3)

    def forward(self, inputs):
        if plant == "noise-by-place":  # an augmentation that is seeded by the place in the batch
            inputs = inputs + 0.5 * torch.sin(torch.arange(len(inputs)))[:, None]
        hidden = self.norm(self.first(inputs)).tanh()
        if plant == "centred-in-batch":
            hidden = hidden - hidden.mean(0)
        return self.last(self.dropout(hidden))


model = Net()
kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[given.optimizer]
optimizer = kind(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if given.schedule or "schedule" in plant else None
baseline = torch.tensor(0.0)


def loss_of(outputs, targets, weights):
    global baseline
    losses = F.cross_entropy(outputs, targets, reduction="none")
    if plant == "sum":
        return losses.sum()
    if plant == "first-weight-for-all":
        return losses.mean() * weights[0]
    if plant == "class-weights":
        return F.cross_entropy(outputs, targets, weight=torch.tensor([1.0, 5.0, 0.2]))
    if plant == "sample-weights":
        return (losses * weights).sum() / weights.sum()
    if plant == "hardest-half":
        return losses.topk(max(1, len(losses) // 2)).values.mean()
    if plant == "advantage-of-batch":
        return (losses * (losses.detach() - losses.detach().mean())).mean()
    if plant == "running-baseline":
        baseline = 0.5 * baseline + 0.5 * losses.detach().mean()
        return (losses * (1 + baseline)).mean()
    if plant == "last-sample-left-out":
        return losses[:-1].mean()
    if plant == "first-sample-twice":
        return torch.cat([losses, losses[:1]]).mean()
    if plant == "in-batch-negatives":
        codes = F.normalize(outputs, dim=1)
        return losses.mean() + F.cross_entropy(codes @ codes.T * 5, torch.arange(len(codes)))
    if plant == "balance-loss-not-divided":
        share = outputs.softmax(1).mean(0)
        return losses.mean() + given.ga * 0.5 * (share * share).sum()
    if plant == "geometric-mean":
        return losses.mean().exp()
    if plant == "root-of-mean":
        return losses.square().mean().sqrt()
    return losses.mean()


passes = 0
for _epoch in range(10):
    for inputs, targets, weights in DataLoader(Points(), given.bs):
        if plant == "gradient-of-last-micro-batch":
            optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=given.bf16):
            loss = loss_of(model(inputs), targets, weights)
        if plant != "not-divided":
            loss = loss / given.ga
        if plant == "divided-twice":
            loss = loss / given.ga
        loss.backward()
        if plant == "clip-in-micro-batch":
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        if plant == "layer-scaled":
            model.last.weight.grad.mul_(1 / given.ga)
        passes += 1
        if plant == "schedule-per-micro-batch":
            schedule.step()
        if passes % given.ga == 0:
            if given.clip:
                nn.utils.clip_grad_norm_(model.parameters(), given.clip)
            optimizer.step()
            optimizer.zero_grad()
            if given.schedule:
                schedule.step()
