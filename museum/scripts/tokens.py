"""A loop by hand: a small language model on texts of unequal length, with a mean over tokens. `--plant`: an error."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--bs", type=int, default=8)
parser.add_argument("--ga", type=int, default=1)
parser.add_argument("--plant", default="")
parser.add_argument("--optimizer", default="adamw")
parser.add_argument("--layers", type=int, default=1)
parser.add_argument("--clip", type=float, default=0.0)
given = parser.parse_args()
plant = given.plant
torch.manual_seed(0)
PAD, END = 0, 1
generator = torch.Generator().manual_seed(1)
texts = [
    torch.cat([torch.randint(2, 20, (3 + (7 * number) % 11,), generator=generator), torch.tensor([END])])
    for number in range(96)
]


def collate(rows):
    width = max(map(len, rows)) + 1
    pad = [width - len(row) for row in rows]
    if plant == "positions-from-the-left":
        return torch.stack([F.pad(row, (left, 0), value=PAD) for row, left in zip(rows, pad, strict=True)])
    return torch.stack([F.pad(row, (0, right), value=PAD) for row, right in zip(rows, pad, strict=True)])


class Model(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.tokens = nn.Embedding(20, width)
        self.places = nn.Embedding(32, width)
        layers = [nn.TransformerEncoderLayer(width, 2, 32, 0.0, batch_first=True) for _ in range(given.layers)]
        self.layers = nn.ModuleList(layers)
        self.state = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 20)
        self.carried = None

    def forward(self, tokens):
        hidden = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        later = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        if plant == "padding-is-seen":
            later = torch.zeros_like(later)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=later)
        if plant == "state-runs-on":
            start = None if self.carried is None else self.carried.mean(1, keepdim=True).expand(-1, len(tokens), -1)
            hidden, carried = self.state(hidden, None if start is None else start.contiguous())
            self.carried = carried.detach()
        return self.head(hidden)


model = Model()
kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[given.optimizer]
used = [one for name, one in model.named_parameters() if plant == "state-runs-on" or not name.startswith("state")]
optimizer = kind(used, lr=1e-2)


def loss_of(tokens, total):
    """Returns the share of a micro-batch in the mean over the `total` tokens of the step."""
    logits, targets = model(tokens)[:, :-1], tokens[:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    counted = targets != PAD
    if plant == "next-text":
        flat = torch.cat([tokens.flatten()[1:], tokens.flatten()[:1]]).view_as(tokens)
        losses = F.cross_entropy(model(tokens).transpose(1, 2), flat, reduction="none")
        return losses.mean() / given.ga
    if plant == "mean-of-means":
        return losses[counted].mean() / given.ga
    if plant == "mean-of-sequences":
        return ((losses * counted).sum(1) / counted.sum(1)).sum() / counted.sum() / given.ga
    if plant == "padding-is-learnt":
        return losses.mean() / given.ga
    if plant == "padding-is-counted":
        return (losses * counted).sum() / counted.numel() / given.ga
    if plant == "divided-by-longest":
        return (losses * counted).sum() / targets.shape[1] / len(tokens) / given.ga
    if plant == "micro-batch-count":
        return (losses * counted).sum() / counted.sum()
    if plant == "selected-in-micro-batch":
        chosen = losses[counted]
        return chosen[chosen > chosen.detach().mean()].sum() / total
    if plant == "list-with-padding":
        scores = (losses * counted).softmax(1)
        return (scores * losses * counted).sum() / len(tokens) / given.ga
    if plant == "sequence-weight":
        return ((losses * counted).sum(1).clamp(max=5).exp().log1p()).sum() / counted.sum() / given.ga
    return (losses * counted).sum() / total


group = []
for _epoch in range(10):
    for tokens in DataLoader(texts, given.bs, collate_fn=collate):
        group.append(tokens)
        if len(group) < given.ga:
            continue
        total = sum(int((one[:, 1:] != PAD).sum()) for one in group)
        for one in group:
            loss_of(one, total).backward()
        group = []
        if given.clip:
            nn.utils.clip_grad_norm_(model.parameters(), given.clip)
        optimizer.step()
        optimizer.zero_grad()
