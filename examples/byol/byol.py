"""Bootstrap your own latent (Grill et al., 2020): an encoder learns to predict the output of its momentum encoder."""

import copy
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpforge.interfaces import AuxiliaryModule, Data, Task, Total


class TwoViews:
    """Dataset of two views of each image, each shifted by up to one pixel and noisy: [2, 1, 8, 8], and the label."""

    def __init__(self, *, data: Data, noise: float = 0.1) -> None:
        self.data, self.noise = data, noise

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = self.data[index]
        return torch.stack([self.view(image), self.view(image)]), label

    def view(self, image: Tensor) -> Tensor:
        rows, columns = torch.randint(-1, 2, (2,)).tolist()
        return image.roll((rows, columns), (1, 2)) + self.noise * torch.randn(image.shape)


class Online(nn.Module):
    """Encoder, and predictor of the momentum encoder's output for the other view."""

    def __init__(self, *, width: int = 64) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width))
        self.predictor = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, images: Tensor) -> Tensor:
        return self.predictor(self.encoder(images))


class BYOL(Task):
    """One minus the cosine of the prediction and the momentum encoder's output; the mean of both views of an image."""

    def __init__(self, *, momentum: float = 0.98) -> None:
        self.momentum = momentum

    def auxiliary_modules(self, model: nn.Module) -> Mapping[str, AuxiliaryModule]:
        self.target = copy.deepcopy(model.get_submodule("encoder"))
        return {"target": AuxiliaryModule(module=self.target, follows="encoder", momentum=self.momentum)}

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        first, second = batch[0].unbind(1)
        predicted = model(torch.cat([first, second])).float()
        with torch.no_grad():
            seen = self.target(torch.cat([second, first])).float()
        return (1 - F.cosine_similarity(predicted, seen)).sum() / 2, seen

    def metrics(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Mapping[str, Total]:
        """Returns the cosine of the momentum encoder's outputs for the two views; it approaches 1."""
        second, first = outputs.chunk(2)
        return {"agreement": Total(F.cosine_similarity(first, second).sum(), len(first))}
