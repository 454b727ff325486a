"""Refusals of other packages, raised as those of this package: ddpforge prints them without a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["refused"]


@contextmanager
def refused() -> Iterator[None]:
    """Raises a ValueError of the block again, as one of this package."""
    try:
        yield
    except ValueError as error:
        raise ValueError(str(error)) from error
