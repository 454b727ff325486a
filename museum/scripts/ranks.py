"""A loop by hand on several ranks: DDP, or an all-reduce of its own. Starts by torchrun. `--plant`: an error."""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--bs", type=int, default=8)
parser.add_argument("--ga", type=int, default=1)
parser.add_argument("--plant", default="")
parser.add_argument("--clip", type=float, default=0.0)
parser.add_argument("--own", action="store_true", help="an all-reduce by hand in place of DDP")
given = parser.parse_args()
plant = given.plant
dist.init_process_group("gloo")
ranks = dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(
    inputs, (inputs.sum(1) > 0).long(), torch.rand(96, generator=torch.Generator().manual_seed(2)) + 0.2
)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
own = given.own or plant in ("not-reduced", "added", "one-layer-not-reduced", "copy-reduced", "clipped-before")
replica = model if own else DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(data, given.bs, sampler=DistributedSampler(data, shuffle=False))


def reduce_gradients():
    for name, one in model.named_parameters():
        if plant == "not-reduced" or (plant == "one-layer-not-reduced" and name.startswith("2.")):
            continue
        if plant == "copy-reduced" and one.dim() == 2:
            dist.all_reduce(one.grad.t().contiguous())  # of a copy: the gradient stays
            continue
        dist.all_reduce(one.grad)
        if plant != "added":
            one.grad /= ranks


def loss_of(outputs, targets, weights):
    losses = F.cross_entropy(outputs, targets, reduction="none")
    loss = losses.mean()
    if plant == "divided-by-ranks":
        return loss / ranks
    if plant == "multiplied-by-ranks":
        return loss * ranks
    if plant == "weights-of-rank":
        return (losses * weights).sum() / weights.sum()
    if plant == "term-gathered-twice":
        return loss + 0.1 * ranks * outputs.square().mean()
    if plant == "only-rank-0":
        return loss * (dist.get_rank() == 0) * ranks if ranks > 1 else loss
    return loss


passes = 0
for epoch in range(10):
    loader.sampler.set_epoch(epoch)
    for points, targets, weights in loader:
        passes += 1
        updates = passes % given.ga == 0
        with nullcontext() if own or updates else replica.no_sync():
            run = model if plant == "bare-model" else replica
            loss = loss_of(run(points), targets, weights) / (1 if plant == "not-divided" else given.ga)
            loss.backward()
        if not updates:
            continue
        if plant == "clipped-before":
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        if own:
            reduce_gradients()
        if given.clip:
            nn.utils.clip_grad_norm_(model.parameters(), given.clip)
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
