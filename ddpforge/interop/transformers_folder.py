"""A folder that transformers loads: config, generation settings and tokenizer beside the weights."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ddpforge import disk
from ddpforge.errors import EnvironmentProblem, UsageError
from ddpforge.interop.export import Exported

__all__ = ["FolderParts"]


@dataclass(frozen=True)
class FolderParts:
    """The parts of a transformers model that are no weights."""

    parts: tuple[Any, ...]

    @classmethod
    def of(cls, model: nn.Module, data: Any, *, merged: bool) -> FolderParts:
        """Those of a model, and the tokenizer of its data, if it has one; raises UsageError for another model."""
        config: Any = getattr(model, "config", None)
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
        stage = folder / f".beside.{os.getpid()}.tmp"
        try:
            disk.make_folder(stage)
            for part in self.parts:
                if part is not None:
                    part.save_pretrained(stage)
            names = {path.name: disk.sha256(path) for path in sorted(stage.iterdir())}
            for name in names:
                disk.rename(stage / name, folder / name)
            disk.sync_folder(folder)
        except OSError as error:
            raise EnvironmentProblem(f"{folder} could not be written: {error.strerror or error}") from error
        finally:
            disk.remove(stage)
        return replace(weights, files={**weights.files, **names})
