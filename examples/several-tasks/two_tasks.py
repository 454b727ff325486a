"""Two tasks on one trunk: the digit that an image shows, and the amount of ink in it."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpforge.interfaces import Data, Task, Total

DIGIT, INK = 0, 1


class Mixed:
    """Concatenation of two datasets; each sample is (image, target, number of its task)."""

    def __init__(self, *, digits: Data, ink: Data) -> None:
        self.parts = (digits, ink)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        first = len(self.parts[DIGIT])
        task, index = (DIGIT, index) if index < first else (INK, index - first)
        image, label = self.parts[task][index]
        return image, label.float() if task == DIGIT else image.mean(), task


class Heads(nn.Module):
    """Shared trunk with two heads: ten logits, and one number."""

    def __init__(self, *, width: int = 64) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU())
        self.digit, self.ink = nn.Linear(width, 10), nn.Linear(width, 1)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(images)
        return self.digit(hidden), self.ink(hidden).squeeze(1)


class TwoTasks(Task):
    """Sum of two losses. A sample contributes only to the loss and the metrics of its own task."""

    def losses(self, outputs: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, Tensor]:
        """Returns both losses of every sample; the loss of the other task is zero."""
        logits, ink = outputs
        _, targets, task = batch
        labels = torch.where(task == DIGIT, targets, 0).long()
        digit = F.cross_entropy(logits.float(), labels, reduction="none") * (task == DIGIT)
        return digit, (ink.float() - targets.float()).square() * (task == INK)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        outputs = model(batch[0])
        digit, ink = self.losses(outputs, batch)
        return digit.sum() + 10 * ink.sum(), outputs

    def metrics(self, outputs: Any, batch: Any) -> Mapping[str, Total]:
        (digit, ink), (_, targets, task) = self.losses(outputs, batch), batch
        right = (outputs[0].argmax(1) == targets) & (task == DIGIT)
        digits, inks = (task == DIGIT).sum(), (task == INK).sum()
        return {
            "digit_loss": Total(digit.sum(), digits),
            "digit_accuracy": Total(right.sum(), digits),
            "ink_error": Total(ink.sum(), inks),
        }
