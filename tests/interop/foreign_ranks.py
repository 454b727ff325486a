"""Two ranks that train a small model under DeepSpeed and FSDP and save it in their formats; see `test_import.py`."""

from pathlib import Path

import torch
from torch import Tensor, nn

RANKS, STEPS = 2, 3


class Model(nn.Module):
    """Model with tied and frozen weights, buffers, a scalar, and sizes that do not divide by two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, 5)
        self.frozen = nn.Linear(5, 3).requires_grad_(False)
        self.low = nn.Linear(3, 5)
        self.norm = nn.LayerNorm(5)
        self.scale = nn.Parameter(torch.tensor([1.0]))
        self.register_buffer("count", torch.tensor([3]))
        self.register_buffer("mean", torch.tensor([0.25, 0.1]))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.low(self.frozen(self.emb(x))))
        return self.head(hidden * self.scale)  # type: ignore[no-any-return]


def build() -> nn.Module:
    torch.manual_seed(0)
    return Model()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Returns AdamW with two groups: weight decay for matrices only."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    """Returns the loss of the rank's own random samples."""
    torch.manual_seed(10 * step + rank)
    x = torch.randint(0, 7, (2, 4))
    return nn.functional.cross_entropy(model(x).flatten(0, 1).float(), x.flatten())


def deepspeed_folder(
    folder: Path, stage: int, *, bf16: bool = False, sub_group_size: int = 10**9, round_robin: bool = False
) -> None:
    """Trains and calls `save_checkpoint`; writes the weights of DeepSpeed's own accessor to public.safetensors."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param
    from safetensors.torch import save_file

    model = build()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "sub_group_size": sub_group_size, "round_robin_gradients": round_robin},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": bf16},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)
    for step in range(STEPS):
        engine.backward(loss_of(engine, step, engine.global_rank))
        engine.step()
    engine.save_checkpoint(str(folder))
    named = engine.module.named_parameters()
    public = {name: safe_get_full_fp32_param(p) for name, p in named if p.requires_grad}
    if engine.global_rank == 0:
        save_file({name: tensor.clone() for name, tensor in public.items()}, folder / "public.safetensors")


def dcp_folder(folder: Path) -> None:
    """Trains with FSDP2 and saves DTensors as in torch's tutorial."""
    import torch.distributed as dist
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = build()
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    optimizer = adamw(model)
    for step in range(STEPS):
        loss_of(model, step, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, state = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optim": state, "step": STEPS}, checkpoint_id=folder)


def save_all(out: Path) -> None:
    """Writes all checkpoints, on one rank of two."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise it compiles for a minute
    deepspeed.init_distributed("gloo")
    for stage in (1, 2, 3):
        deepspeed_folder(out / f"zero{stage}", stage, sub_group_size=10)
    deepspeed_folder(out / "zero2-bf16", 2, bf16=True)
    deepspeed_folder(out / "zero3-bf16", 3, bf16=True)
    deepspeed_folder(out / "zero2-robin", 2, round_robin=True)
    dcp_folder(out / "dcp")
    torch.distributed.barrier()
