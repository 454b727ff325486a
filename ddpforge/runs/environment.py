"""Records the machine, packages and launch variables of a run, for later diagnosis."""

import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from ddpforge.components.installed import version
from ddpforge.interfaces import active_kind
from ddpforge.machine import nvidia_driver, usable_cores
from ddpforge.secret_redaction import redact, redacted

_RELEVANT = re.compile(
    "RANK|WORLD_SIZE|(LOCAL|GROUP|NODE|ROLE)_.*|MASTER_.*|OMP_.*|MKL_.*|CUDA_.*|NCCL_.*|GLOO_.*|TORCH.*|PYTORCH_.*"
    "|PYTHONHASHSEED|ACCELERATE_.*|SLURM_.*|WANDB_.*|DDPFORGE_(?!STARTED|STORE|VERDICT).*"  # valid for this launch only
)
_LAUNCHER = re.compile(
    "RANK|(LOCAL|GROUP|NODE|ROLE)_.*|MASTER_.*|TORCH_?ELASTIC_.*|TORCH_DISABLE_SHARE.*|TORCHINDUCTOR_.*"
)
_PACKAGES = ("ddpforge", "torch", "accelerate", "deepspeed", "numpy", "safetensors")
_SECRET = re.compile("KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|JWT")


def describe_environment() -> dict[str, Any]:
    """Returns the contents of a run's `env.json`: plain JSON without secrets. Imports none of the packages."""
    return {
        "time": datetime.now(UTC).isoformat(),
        "command": redacted(sys.argv),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpus": usable_cores(),
        "packages": {name: version(name) for name in _PACKAGES},
        "cuda": _cuda(sys.modules.get("torch")),
        "devices": kind.describe() if (kind := active_kind()) else [],
        "git": _git(),
        "environment": {
            name: redact(value)
            for name, value in sorted(os.environ.items())
            if _RELEVANT.fullmatch(name) and not _SECRET.search(name)
        },
    }


def without_launcher(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the contents of an `env.json` without variables in which a launcher numbers or places its processes."""
    variables: Mapping[str, str] = facts.get("environment") or {}
    kept = {name: value for name, value in variables.items() if not _LAUNCHER.fullmatch(name)}
    return {**facts, "environment": kept}


def world_size() -> int:
    """Returns the number of ranks in WORLD_SIZE; 1 without a launcher."""
    said = os.environ.get("WORLD_SIZE", "")
    return int(said) if said.isdecimal() else 1


def _cuda(torch: Any) -> dict[str, Any] | None:
    """Describes the GPUs of this process, their driver and libraries; None if CUDA is not initialized."""
    if torch is None or not torch.cuda.is_initialized():
        return None
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    driver = re.search(r"\b\d+\.\d+(\.\d+)?\b", nvidia_driver())
    return {
        "gpus": [{"name": gpu.name, "memory": gpu.total_memory} for gpu in found],
        "driver": driver[0] if driver else None,
        "runtime": torch.version.cuda or torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
    }


def _git() -> dict[str, Any] | None:
    """Returns the commit of the current folder; None outside a repository, without git, or after 10 s."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": said.removesuffix("-dirty"), "dirty": said.endswith("-dirty")}
