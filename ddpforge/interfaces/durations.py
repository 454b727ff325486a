"""Durations with units, as recipes write them: "5ep", "100st", "10%", "30s", "10m", "2h"."""

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema

_TEXT = r"([0-9]+(?:\.[0-9]+)?)(ep|st|%|h|m|s)"
_FORM = re.compile(_TEXT)
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0}
_LIMIT = 1e15


@dataclass(frozen=True)
class Duration:
    """An amount of training (epochs, steps, percent of the run) or of wall time (hours, minutes, seconds)."""

    value: float
    unit: str

    FORM: ClassVar[str] = 'a duration such as "5ep" (epochs), "100st" (steps), "10%" (of the run), "30s", "10m" or "2h"'

    PATTERN: ClassVar[str] = rf"^{_TEXT}$|\$\{{"  # for JSON schemas: a duration, or a reference as ${vars.x}

    @classmethod
    def parse(cls, text: str) -> "Duration":
        """Parses `text`; raises ValueError if it is not a duration."""
        match = _FORM.fullmatch(text)
        if not match:
            raise ValueError(f"must be {cls.FORM}")

        duration = cls(float(match[1]), match[2])
        if duration.value > _LIMIT:
            raise ValueError(f"must be at most {_LIMIT:g}{duration.unit}")
        if duration.unit == "%" and duration.value > 100:
            raise ValueError("must be at most 100%")
        if duration.unit == "st" and not duration.value.is_integer():
            raise ValueError("must be a whole number of steps")
        return duration

    def __str__(self) -> str:
        return f"{Decimal(repr(self.value)).normalize():f}{self.unit}"  # never 1e-05: `parse` must read it again

    @property
    def is_time(self) -> bool:
        """True for hours, minutes and seconds."""
        return self.unit in _SECONDS

    @property
    def seconds(self) -> float:
        """Returns the wall time in seconds; only for time units."""
        return self.value * _SECONDS[self.unit]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: "GetCoreSchemaHandler") -> "CoreSchema":
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(
            cls.parse,
            core_schema.str_schema(),
            serialization=core_schema.to_string_ser_schema(),
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: "CoreSchema", handler: "GetJsonSchemaHandler") -> "JsonSchemaValue":
        return {"type": "string", "x-toml": "duration", "pattern": cls.PATTERN, "examples": ["1ep"]}


@dataclass(frozen=True)
class Horizon:
    """Length of a run in optimizer steps; converts durations to step counts.

    `steps_per_epoch` is None for a stream without a length. `total` is None if the run's length is a wall time.
    """

    total: int | None
    steps_per_epoch: int | None

    def steps(self, duration: Duration) -> int:
        """Returns `duration` in optimizer steps; fractions of an epoch or of the run are rounded up to a whole step.

        Raises ValueError for a wall time, for epochs if `steps_per_epoch` is None, and for percent if `total` is None.
        """
        if duration.unit == "st":
            return int(duration.value)
        if duration.is_time:
            raise ValueError(f"{duration} is a wall time; expected epochs or steps")
        if duration.unit == "%":
            return self._share(duration)
        if self.steps_per_epoch is None:
            raise ValueError(
                f"{duration} needs the length of an epoch, but this data has no epochs of a fixed length; use steps"
            )
        steps = math.ceil(round(duration.value * self.steps_per_epoch, 9))  # 1.1 × 10 is a little more than 11
        return max(1, steps) if duration.value else 0

    def _share(self, duration: Duration) -> int:
        if self.total is None:
            raise ValueError(f"{duration} needs the run's length in steps, but train.length is a wall time")
        return math.ceil(round(duration.value * self.total / 100, 9))
