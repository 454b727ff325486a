"""Batches that are not columns of tensors (graphs, images with boxes), with a model and a task for each."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddpforge.interfaces import Task, Total


class GraphBatch:
    """Nodes of several graphs in one tensor, as graph libraries batch them; has its own method `to`."""

    def __init__(self, nodes: Tensor, graph: Tensor, targets: Tensor) -> None:
        self.nodes, self.graph, self.targets = nodes, graph, targets

    def to(self, device: torch.device) -> "GraphBatch":
        return GraphBatch(self.nodes.to(device), self.graph.to(device), self.targets.to(device))


class Graphs:
    """Graphs of one to five nodes; the target is 1 if the sum of their values is positive."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(1 + index % 5, 4, generator=torch.Generator().manual_seed(index))

    def collate(self, samples: Sequence[Tensor]) -> GraphBatch:
        lengths = torch.tensor([len(nodes) for nodes in samples])
        targets = torch.stack([nodes.sum() > 0 for nodes in samples]).long()
        return GraphBatch(torch.cat([*samples]), torch.repeat_interleave(lengths), targets)


class GraphNet(nn.Module):
    """Classifies the sum of a layer's outputs over the nodes of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, batch: GraphBatch) -> Tensor:
        sums = self.head.weight.new_zeros(len(batch.targets), 8)
        return self.head(sums.index_add(0, batch.graph, self.layer(batch.nodes).relu()))


class GraphTask(Task):
    """Classifies graphs."""

    def loss(self, model: nn.Module, batch: GraphBatch) -> tuple[Tensor, Any]:
        outputs = model(batch)
        return nn.functional.cross_entropy(outputs, batch.targets, reduction="sum"), outputs

    def metrics(self, outputs: Any, batch: GraphBatch) -> dict[str, Total]:
        right = outputs.argmax(1) == batch.targets
        return {"right": Total(right.sum(), len(right))}


class Boxes:
    """Images of different sizes, each with one to three boxes: a batch is two lists."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(index)
        image = torch.rand(3, 4 + index % 7, 5, generator=generator)
        return image, {"boxes": torch.rand(1 + index % 3, 4, generator=generator)}

    def collate(self, samples: Sequence[tuple[Tensor, Any]]) -> tuple[list[Tensor], list[Any]]:
        return [image for image, _ in samples], [target for _, target in samples]


class Detector(nn.Module):
    """Finds one box in every image."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, images: Sequence[Tensor]) -> Tensor:
        return self.layer(torch.stack([image.mean((1, 2)) for image in images]))


class Detection(Task):
    """Trains the predicted box towards all boxes of the image."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        images, targets = batch
        found = model(images)
        pairs = zip(found, targets, strict=True)
        return torch.stack([(box - target["boxes"]).square().sum() for box, target in pairs]).sum(), found
