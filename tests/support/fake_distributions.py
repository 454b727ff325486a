"""Writes distributions into a folder as pip leaves them there, for tests of plugin discovery."""

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent


def install(
    site: Path,
    name: str,
    entry_points: Mapping[str, Mapping[str, str]],
    *,
    version: str = "1.0",
    modules: Mapping[str, str] | None = None,
) -> None:
    """Installs distribution `name`; `entry_points` is group → name → target, `modules` file name → source."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [
        line
        for group, points in entry_points.items()
        for line in (f"[{group}]", *(f"{point} = {target}" for point, target in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    for file, source in (modules or {}).items():
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_text(dedent(source))
    importlib.invalidate_caches()


@contextmanager
def forgetting_modules_below(folder: Path) -> Iterator[None]:
    """Removes modules imported from `folder` from sys.modules, so that tests do not share them."""
    try:
        yield
    finally:
        for name, module in list(sys.modules.items()):
            if (getattr(module, "__file__", None) or "").startswith(str(folder)):
                del sys.modules[name]
