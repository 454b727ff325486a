"""Names of the training data's classes and input columns, which all other data of a run must share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from ddpforge.interfaces import class_names_of

__all__ = ["DataNames"]

_MOST_COLUMNS = 10_000  # that a checkpoint records


@dataclass(frozen=True)
class DataNames:
    """Names of classes, and of input columns, in the order of their numbers; empty if they are not known."""

    classes: Sequence[str] = ()
    inputs: Sequence[str] = ()

    @classmethod
    def of(cls, data: Any) -> Self:
        """Returns the names of a dataset, from its attributes `class_names` and `input_names`."""
        return cls(class_names_of(data), _texts(getattr(data, "input_names", None)))

    @classmethod
    def recorded(cls, data: Mapping[str, Any]) -> Self | None:
        """Returns the names of the training data in the fingerprints of a checkpoint.

        None for a checkpoint of an older version, which does not record them.
        """
        found = [
            one
            for key, one in data.items()
            if key.split(".")[0] == "train" and isinstance(one, dict) and "class_names" in one
        ]
        if not found:
            return None
        classes, inputs = (
            max((_texts(one.get(key)) for one in found), key=len) for key in ("class_names", "input_names")
        )
        return cls(classes, inputs)

    def as_json(self) -> dict[str, list[str]]:
        """Returns the names in the form that a checkpoint stores, without those of very many columns."""
        return {
            "class_names": list(self.classes),
            "input_names": list(self.inputs) if len(self.inputs) <= _MOST_COLUMNS else [],
        }


def _texts(value: Any) -> list[str]:
    return list(value) if isinstance(value, list | tuple) and all(isinstance(one, str) for one in value) else []
