"""For users of transformers' Trainer: a subclass with its own compute_loss is the task, as it is.

python hf_trainer.py          needs the plugin: pip install ./plugins/ddpforge-transformers
"""

import torch
import torch.nn.functional as F
from rings import Net, Rings
from torch import Tensor, nn
from transformers import Trainer

import ddpforge


class Samples(Rings):
    """The samples as dicts, which a Trainer takes."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"points": self.points[index], "labels": self.labels[index]}


class WeightedTrainer(Trainer):
    """Counts the second class twice."""

    def compute_loss(self, model: nn.Module, inputs: dict, return_outputs: bool = False, **_: object) -> object:
        logits = model(inputs["points"])
        loss = F.cross_entropy(logits, inputs["labels"], weight=logits.new_tensor([1.0, 2.0]))
        return (loss, {"logits": logits}) if return_outputs else loss


torch.manual_seed(0)
outcome = ddpforge.train(
    {"name": "hf-trainer", "optimizer": {"use": "adamw", "lr": 1e-2}, "train": {"length": "10ep", "global_batch": 64}},
    model=Net(),
    task=WeightedTrainer,
    train_data=Samples(split="train"),
    eval_data=Samples(split="test", samples=1000),
)
print(outcome)
