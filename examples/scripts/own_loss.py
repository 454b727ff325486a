"""For users of Accelerate, or of any loop with a loss of its own: the loss is a Task, also one that changes over time.

python own_loss.py
"""

import torch
import torch.nn.functional as F
from rings import Net, Rings
from torch import Tensor, nn

import ddpforge
from ddpforge.interfaces import Task, Total


class WithConfidencePenalty(Task):
    """Cross-entropy minus a share of the entropy, which grows over the first steps."""

    def __init__(self, *, weight: float = 0.1, warmup: int = 100) -> None:
        self.weight, self.warmup = weight, warmup

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        logits = model(batch[0])
        entropy = -(logits.softmax(1) * logits.log_softmax(1)).sum()
        weight = self.weight * min(1.0, self.step / self.warmup)
        return F.cross_entropy(logits, batch[1], reduction="sum") - weight * entropy, logits  # a sum, not a mean

    def metrics(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> dict[str, Total]:
        hits = (outputs.argmax(1) == batch[1]).sum()
        return {"accuracy": Total(hits, len(batch[1]))}


torch.manual_seed(0)
outcome = ddpforge.train(
    {"name": "own-loss", "optimizer": {"use": "adamw", "lr": 1e-2}, "train": {"length": "10ep", "global_batch": 64}},
    model=Net(),
    task=WithConfidencePenalty(weight=0.05),
    train_data=Rings(split="train"),
    eval_data=Rings(split="test", samples=1000),
)
print(outcome)
