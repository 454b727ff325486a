"""The machine, the packages and the launch of a run: what may explain later why it behaved as it did."""

import os
import platform
import re
import socket
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddpforge.components.installed import version
from ddpforge.confidential import redact, redacted

_RELEVANT = re.compile(
    "RANK|WORLD_SIZE|(LOCAL|GROUP|NODE|ROLE)_.*|MASTER_.*|OMP_.*|MKL_.*|CUDA_.*|NCCL_.*|GLOO_.*|TORCH.*|PYTORCH_.*"
    "|PYTHONHASHSEED|ACCELERATE_.*|SLURM_.*|WANDB_.*|DDPFORGE_(?!STARTED|STORE|VERDICT).*"  # of this launch alone
)
_PACKAGES = ("ddpforge", "torch", "accelerate", "deepspeed", "numpy", "safetensors")
_SECRET = re.compile("KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|JWT")


def describe_environment() -> dict[str, Any]:
    """The contents of a run's `env.json`: plain JSON, without secrets; imports nothing that it describes."""
    return {
        "time": datetime.now(UTC).isoformat(),
        "command": redacted(sys.argv),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "packages": {name: version(name) for name in _PACKAGES},
        "cuda": _cuda(sys.modules.get("torch")),
        "git": _git(),
        "environment": {
            name: redact(value)
            for name, value in sorted(os.environ.items())
            if _RELEVANT.fullmatch(name) and not _SECRET.search(name)
        },
    }


def world_size() -> int:
    """The number of ranks that the launcher announced; 1 where there is none."""
    said = os.environ.get("WORLD_SIZE", "")
    return int(said) if said.isdecimal() else 1


def _cuda(torch: Any) -> dict[str, Any] | None:
    """The GPUs of this process and the libraries that drive them; None where it uses none."""
    if torch is None or not torch.cuda.is_initialized():
        return None
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return {
        "gpus": [{"name": gpu.name, "memory": gpu.total_memory} for gpu in found],
        "driver": _driver(),
        "runtime": torch.version.cuda or torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
    }


def _driver() -> str | None:
    """The version of the NVIDIA driver, as the kernel tells it."""
    try:
        said = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", said)
    return found[0] if found else None


def _git() -> dict[str, Any] | None:
    """The commit of the current folder; None outside a repository, without git, or when it takes too long."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": said.removesuffix("-dirty"), "dirty": said.endswith("-dirty")}
