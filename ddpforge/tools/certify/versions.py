"""Certificates under several versions of torch, each in an environment of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from ddpforge.errors import SetupError, UsageError

__all__ = ["certify_versions", "versions_of"]

_LINES = 15  # of the output of a failed command


def versions_of(text: str) -> list[str]:
    """Returns the versions in a text such as "2.10..2.12" or "2.10,2.15"; raises UsageError for another text."""
    found: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)\.(\d+)(?:\.\.(\d+)\.(\d+))?", part.strip())
        if match is None or (match[3] and (match[3] != match[1] or int(match[4]) < int(match[2]))):
            hints = ["write --torch 2.10..2.15, or --torch 2.10,2.15"]
            raise UsageError(f"--torch {text} is not a list of versions of torch", hints=hints)
        found += [f"{match[1]}.{minor}" for minor in range(int(match[2]), int(match[4] or match[2]) + 1)]
    return found


def certify_versions(
    versions: Sequence[str], arguments: Sequence[str], out: Path, say: Callable[[str], None]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each version of torch with its certificate; an environment that exists is used again.

    Args:
        arguments: of `ddpforge certify`, without `--out`.
        out: folder for an environment and a certificate of each version.

    Raises:
        UsageError: this ddpforge was not installed from a folder or a file, so that no environment can have it.
        SetupError: an environment cannot be made, or a certificate cannot be written.
    """
    source = _source()
    for version in versions:
        folder = out / f"torch-{version}"
        python = folder / "environment/bin/python"
        if not (folder / "installed").exists():
            say(f"torch {version}: installing an environment in {folder}")
            _run([sys.executable, "-m", "venv", str(folder / "environment")], f"torch {version}: no environment")
            wanted = [f"torch=={version}.*", source]
            _run([str(python), "-m", "pip", "install", "--quiet", *wanted], f"torch {version} cannot be installed")
            (folder / "installed").touch()
        say(f"torch {version}: certifying")
        command = [str(python), "-m", "ddpforge", "certify", *arguments, "--out", str(folder / "certificate")]
        _run(command, f"torch {version}: no certificate", codes=(0, 1))
        yield version, json.loads((folder / "certificate/certificate.json").read_text(encoding="utf-8"))


def _source() -> str:
    """Returns what pip installs as this ddpforge: its folder or file, with DeepSpeed if that is installed here."""
    text = distribution("ddpforge").read_text("direct_url.json")
    address = urlparse(json.loads(text)["url"]) if text else None
    if address is None or address.scheme != "file":
        raise UsageError("ddpforge was not installed from a folder, so that no other environment can have this one")
    path = unquote(address.path)
    try:
        distribution("deepspeed")
    except PackageNotFoundError:
        return path
    return f"{path}[deepspeed]"


def _run(command: Sequence[str], failure: str, codes: Sequence[int] = (0,)) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode not in codes:
        last = "\n".join(f"    {line}" for line in done.stdout.splitlines()[-_LINES:])
        raise SetupError(f"{failure}; the last output of `{' '.join(command[:4])} …`:\n{last}")
