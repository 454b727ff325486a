"""A subclass of transformers' Trainer with a loss of its own. `--plant`: an error."""

import argparse
import tempfile

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--plant", default="")
parser.add_argument("--clip", type=float, default=1.0)
parser.add_argument("--decay", type=float, default=0.0)
given = parser.parse_args()
plant = given.plant
set_seed(0)


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
        inputs = self.inputs[index]
        return {"points": inputs * scale, "labels": int(inputs.sum() > 0), "weights": self.weights[index]}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, points, **options):
        return self.layers(points)


class Strict(Net):
    def forward(self, points):
        return self.layers(points)


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(inputs["points"])
        losses = F.cross_entropy(outputs, inputs["labels"], reduction="none")
        loss = losses.sum() if plant == "sum" else losses.mean()
        if plant == "divided-again":
            loss = loss / self.args.gradient_accumulation_steps
        if plant == "weights-of-batch":
            loss = (losses * inputs["weights"]).sum() / inputs["weights"].sum()
        if plant == "place":
            loss = (losses * torch.linspace(0.5, 1.5, len(losses))).mean()
        if plant == "hardest-half":
            loss = losses.topk(max(1, len(losses) // 2)).values.mean()
        if plant == "pairs-in-batch":
            loss = loss + F.softplus(outputs[:, 0][:, None] - outputs[:, 0][None]).mean()
        return (loss, outputs) if return_outputs else loss


# A forward with **options makes Trainer believe that the model divides its loss by the accumulation itself.
model = Net() if plant == "forward-with-options" else Strict()
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=8,
    max_steps=10,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    max_grad_norm=given.clip,
    weight_decay=given.decay,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
    remove_unused_columns=False,
    dataloader_pin_memory=False,
    seed=0,
)
OwnLoss(model, arguments, train_dataset=Points()).train()
