"""A folder that transformers loads: config, generation settings and tokenizer beside the weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ddpforge import disk
from ddpforge.errors import UsageError
from ddpforge.exchange.export import Exported

__all__ = ["Beside"]


@dataclass(frozen=True)
class Beside:
    """The parts of a transformers model that are no weights."""

    parts: tuple[Any, ...]

    @classmethod
    def of(cls, model: nn.Module, data: Any, *, merged: bool) -> Beside:
        """Those of a model, and the tokenizer of its data, if it has one; raises UsageError for another model."""
        config = getattr(model, "config", None)
        if not hasattr(config, "save_pretrained"):
            raise UsageError(
                f"{type(model).__name__} is no model of transformers",
                hints=[
                    "--format transformers is for runs of ddpforge-transformers; leave it out for the weights alone"
                ],
            )
        if not merged and any(".lora_" in name for name, _ in model.named_parameters()):
            raise UsageError(
                "the model has adapters, which transformers would not find in their places",
                hints=["--merge folds them in", "--only '*lora_*' and no --format writes them alone"],
            )
        config.architectures = [type(model).__name__]
        return cls((config, getattr(model, "generation_config", None), getattr(data, "tokenizer", None)))

    def save(self, weights: Exported) -> Exported:
        """Puts them beside weights that were written; of what was written all files are told."""
        folder = weights.file.parent
        before = set(folder.iterdir())
        for part in self.parts:
            if part is not None:
                part.save_pretrained(folder)
        names = {path.name: disk.sha256(path) for path in set(folder.iterdir()) - before if path.is_file()}
        return replace(weights, files={**weights.files, **dict(sorted(names.items()))})
