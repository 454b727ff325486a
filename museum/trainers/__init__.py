"""Adapters: each trains a `Training` as the trainer's documentation shows, in the process of one rank."""

from __future__ import annotations

from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType

__all__ = ["TRAINERS", "Trainer"]


class Trainer:
    """A trainer of the museum.

    Attributes:
        name: as in the table.
        package: distribution whose version counts.
        module: module of the adapter, with `train(training, folder, phase) -> Result`.
        preloads: modules that the process imports before it forks ranks.
    """

    def __init__(self, name: str, package: str, module: str, *preloads: str) -> None:
        self.name, self.package, self.module, self.preloads = name, package, module, preloads

    def version(self) -> str:
        """Returns the installed version."""
        return metadata.version(self.package)

    def adapter(self) -> ModuleType:
        """Returns the module of the adapter."""
        return import_module(f"museum.trainers.{self.module}")


TRAINERS = {
    one.module: one
    for one in (
        Trainer(
            "ddpforge", "ddpforge", "forge", "ddpforge.app.run", "ddpforge.strategies.ddp_replica", "torch._dynamo"
        ),
        Trainer("torch (DDP, FSDP2)", "torch", "loop", "torch._dynamo", "torch.distributed.fsdp"),
        Trainer("Accelerate", "accelerate", "accelerated", "accelerate", "torch._dynamo"),
        Trainer("HF Trainer", "transformers", "hf", "transformers.trainer", "accelerate", "torch._dynamo"),
        Trainer("TRL", "trl", "trl_sft", "trl", "trl.trainer.sft_trainer", "trl.trainer.dpo_trainer", "torch._dynamo"),
        Trainer("Lightning", "lightning", "pl", "lightning.pytorch", "torch._dynamo"),
        Trainer("DeepSpeed", "deepspeed", "zero", "deepspeed", "torch._dynamo"),
    )
}


def checkpoint_folder(folder: Path) -> Path:
    """Returns the folder for checkpoints of a trainer; created by the first rank."""
    folder = folder / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
