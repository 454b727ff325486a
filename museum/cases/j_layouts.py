"""Distributed layouts: worlds that are not formed, strategies that do not run, layouts that train otherwise."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from museum.case import Case
from museum.cases.a_denominators import classes, numbered
from museum.training import ENTROPY, Perceptron, Training

THEME = "Distributed layouts"
CURVE = Training(
    model=Perceptron, data=lambda: classes(48), loss=ENTROPY, micro=2, accumulate=2, ranks=2,
    optimizer=partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1), clip=0.1,
)  # fmt: skip


def _without_hint() -> None:
    os.environ.pop("ACCELERATE_USE_CPU", None)  # a user's machine without GPUs does not set it


def _world_accelerate(folder: Path) -> Any:
    from accelerate import Accelerator

    _without_hint()
    accelerator = Accelerator()
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    number = 1.0 + int(os.environ["RANK"])
    accelerator.backward(model(torch.tensor([[number]])).sum())
    optimizer.step()
    return accelerator.unwrap_model(model).weight.item()


def _world_fabric(folder: Path) -> Any:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu")
    fabric.launch()
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1.0))
    fabric.backward(model(torch.tensor([[1.0 + int(os.environ["RANK"])]])).sum())
    optimizer.step()
    return next(model.parameters()).item()


def _world_hf(folder: Path) -> Any:
    from transformers import Trainer, TrainingArguments

    from museum.trainers import hf

    _without_hint()
    training = Training(data=lambda: numbered(2), micro=1)
    given = hf.arguments_for(training, folder)
    for name in ("use_cpu", "ddp_backend"):
        given.pop(name)
    model = hf.WithLoss(training.build(), training.loss)
    optimizer = training.build_optimizer(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    trainer = Trainer(
        model, TrainingArguments(**given), train_dataset=training.data(), data_collator=hf.collate,
        optimizers=(optimizer, schedule),
    )  # fmt: skip
    trainer.train()
    return model.net.w.item()


def _world_forge(folder: Path) -> Any:
    from museum.trainers import forge

    training = Training(data=lambda: numbered(2), micro=1, ranks=2)
    return forge.train(training, folder, "whole").weights["w"][0]


def _share_accelerate(plugin: str) -> Any:
    def trial(folder: Path) -> Any:
        import accelerate

        options: dict[str, Any] = (
            {"fsdp_plugin": accelerate.FullyShardedDataParallelPlugin(fsdp_version=2)}
            if plugin == "fsdp"
            else {"deepspeed_plugin": accelerate.DeepSpeedPlugin(zero_stage=3)}
        )
        accelerator = accelerate.Accelerator(cpu=True, **options)
        model = accelerator.prepare(nn.Linear(64, 64))
        return _share(model)

    return trial


def _share(model: nn.Module) -> float:
    """Returns the share of the parameters that this rank holds."""
    held = 0
    for one in model.parameters():
        local: Any = one.to_local() if hasattr(one, "to_local") else one
        local = local.ds_tensor if hasattr(local, "ds_tensor") else local
        held += local.numel()
    return round(held / 4160, 2)


def _share_torch(folder: Path) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    return _share(fully_shard(nn.Linear(64, 64), mesh=init_device_mesh("cpu", (2,))))


def _share_lightning(folder: Path) -> Any:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import FSDPStrategy

    fabric = Fabric(accelerator="cpu", devices=2, strategy=FSDPStrategy())
    fabric.launch()
    return _share(fabric.setup_module(nn.Linear(64, 64)))


def _share_forge(use: dict[str, Any]) -> Any:
    def trial(folder: Path) -> Any:
        import ddpforge
        from ddpforge.interfaces import Callback, RunContext

        shares = []

        class Share(Callback):
            def on_start(self, run: RunContext) -> None:
                shares.append(_share(run.model))

        torch.manual_seed(0)
        data = torch.utils.data.TensorDataset(torch.randn(8, 64), torch.arange(8))
        recipe = {
            "name": "share", "task": {"use": "classification"}, "strategy": use,
            "optimizer": {"use": "sgd", "lr": 0.1},
            "train": {"length": "1ep", "global_batch": 4, "device": "cpu"},
        }  # fmt: skip
        ddpforge.train(recipe, model=nn.Linear(64, 64), train_data=data, callbacks=[Share()], out=folder)
        return shares[0]

    return trial


CASES = [
    Case(
        name="world-not-formed",
        wrong="Ranks of a machine without GPUs do not join: each trains alone and is the main process.",
        references=["accelerate#2741", "TorchDR#238"],
        trials={"forge": _world_forge, "accelerated": _world_accelerate, "hf": _world_hf, "pl": _world_fabric},
        right=lambda: -1.5,
        ranks=2,
        notes={"pl": "Fabric without `devices`", "accelerated": "Accelerator() without arguments"},
    ),
    Case(
        name="fsdp-does-not-run",
        wrong="Another strategy than the one of the settings runs, without a word.",
        references=["pytorch-lightning#21812"],
        trials={
            "forge": _share_forge({"use": "fsdp"}),
            "loop": _share_torch,
            "accelerated": _share_accelerate("fsdp"),
            "pl": _share_lightning,
        },
        right=lambda: 0.5,
        ranks=2,
    ),
    Case(
        name="zero-does-not-run",
        wrong="DeepSpeed is in the settings, and plain DDP runs.",
        references=["pytorch-lightning#21812"],
        trials={"forge": _share_forge({"use": "deepspeed", "stage": 3}), "accelerated": _share_accelerate("zero")},
        right=lambda: 0.5,
        ranks=2,
        seconds=150,
    ),
    *(
        Case(
            name=f"same-curve-{strategy}",
            wrong="The same settings under another strategy are another training.",
            references=["torchtitan#3029", "DeepSpeed#7718", "llm-foundry#1521"],
            training=Training(**{**CURVE.__dict__, "strategy": strategy}),
            trainers=trainers,
        )
        for strategy, trainers in (
            ("fsdp", ["forge", "loop", "accelerated", "hf"]),
            ("zero1", ["forge", "zero", "accelerated", "hf"]),
            ("zero2", ["forge", "zero", "accelerated", "hf"]),
            ("zero3", ["forge", "zero", "accelerated", "hf"]),
        )
    ),
]
