"""Sets values in a recipe's file; comments and layout stay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomlkit

from ddpforge import disk
from ddpforge.errors import UsageError

__all__ = ["refuse_no_file", "set_values"]


def refuse_no_file(path: Path) -> None:
    """Raises UsageError unless a recipe is in a file of its own, into which something can be written."""
    if not path.is_file():
        raise UsageError(
            f"{path} is no recipe file, so nothing can be written into it",
            hints=[f"copy the bundled recipe first: ddpforge recipes cp {path.name}"],
        )


def set_values(path: Path, values: Mapping[str, str]) -> None:
    """Sets dotted keys to values that are written as in TOML; the file is replaced whole, or not at all.

    Another component's name, `….use`, takes the options of the one that was there with it.
    """
    refuse_no_file(path)
    document = tomlkit.parse(path.read_text(encoding="utf-8"))
    for dotted, text in values.items():
        *tables, key = dotted.split(".")
        place: Any = document
        for name in tables:
            place = place.setdefault(name, tomlkit.table())
        value = tomlkit.value(text)
        if key == "use" and place.get(key) != value:
            place.clear()  # the options are those of another component
        place[key] = value
    disk.replace(path, tomlkit.dumps(document).encode())
