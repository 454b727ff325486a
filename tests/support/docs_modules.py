"""Imports a program of docs/, which is not a package."""

import importlib.util
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).parents[2] / "docs"


def docs_module(name: str) -> ModuleType:
    """Returns the module of docs/NAME.py."""
    spec = importlib.util.spec_from_file_location(f"{name}_of_docs", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
