"""Doubles, recipes, components and processes that several test files share."""

from pathlib import Path

SUPPORT = Path(__file__).parent
"""The folder of components that tests copy next to their recipes."""
