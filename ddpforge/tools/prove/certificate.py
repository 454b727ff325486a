"""Results of relations: as text, as JSON and as a page of HTML."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from ddpforge.api import Excess

__all__ = ["Broken", "Certificate", "Relation"]


@dataclass(frozen=True)
class Broken:
    """First step at which a relation does not hold.

    Attributes:
        quantity: "gradient", "gradient norm", "update", "loss", "samples" or "mode", the first that differs.
        parameter: The parameter that differs most, in proportion to its rounding; empty for numbers of the whole model.
        difference: Relative to the size of the quantity in the unchanged run.
        factor: By which the quantity is multiplied; None if it is not a multiple.
        worst: The five parameters that differ most.
        loss: Of the script and under the change, of the whole step.
    """

    step: int
    quantity: str
    parameter: str
    difference: float
    factor: float | None
    worst: Sequence[Excess]
    loss: tuple[float, float]

    def lines(self) -> Iterator[str]:
        """Yields the place and the factors."""
        what = f"the {self.quantity}" + (f" of `{self.parameter}`" if self.parameter else "")
        change = f" × {self.factor:.4g}" if self.factor is not None else f" differs by {self.difference:.1e}"
        change = "" if self.quantity in ("samples", "mode") else change
        yield f"step {self.step}: {what}{change}; loss {self.loss[0]:.6g}, {self.loss[1]:.6g}"
        others = [f"{one.name} × {one.multiple:.4g}" for one in self.worst[1:] if one.multiple is not None]
        if others:
            yield f"also: {', '.join(others)}"


@dataclass(frozen=True)
class Relation:
    """Relation and its result: "holds", "broken" or "not tried"."""

    name: str
    about: str
    result: str
    why: str = ""
    difference: float = 0.0  # of a gradient, the largest one in proportion to its rounding
    allowed: float = 0.0  # of the same gradient
    broken: Broken | None = None
    meaning: str = ""


@dataclass(frozen=True)
class Certificate:
    """Results of all relations for one script or recipe."""

    script: str
    steps: int
    rounding: float  # largest difference of a gradient that one unit in the last place of the weights makes
    dtype: str = ""  # of autocast; empty if the model computes in the dtype of its weights
    relations: Sequence[Relation] = field(default_factory=list)

    @property
    def broken(self) -> list[Relation]:
        """Returns the relations that do not hold."""
        return [one for one in self.relations if one.result == "broken"]

    @property
    def verdict(self) -> str:
        """Returns one sentence."""
        tried = [one for one in self.relations if one.result != "not tried"]
        held = len(tried) - len(self.broken)
        return f"{held} of {len(tried)} relations hold over {self.steps} steps of {self.script}"

    def as_dict(self) -> dict[str, Any]:
        """Returns the certificate for JSON; a number that is not finite becomes null."""
        proved = not self.broken and any(one.result == "holds" for one in self.relations)
        found: dict[str, Any] = _finite(asdict(self) | {"proved": proved})
        return found

    def lines(self) -> Iterator[str]:
        """Yields the certificate as lines of text."""
        yield f"{'relation':<13}  {'result':<9}  {'difference':>10}  {'allowed':>8}"
        for one in self.relations:
            numbers = "" if one.result == "not tried" else f"{one.difference:>10.1e}  {one.allowed:>8.1e}"
            yield f"{one.name:<13}  {one.result:<9}  {numbers or one.why}"
        for one in self.broken:
            yield ""
            yield f"{one.name}: {one.about}"
            yield from (f"  {line}" for line in (one.broken.lines() if one.broken else ()))
            if one.meaning:
                yield f"  {one.meaning}"
        yield ""
        yield self.verdict

    def page(self) -> str:
        """Returns a page of HTML that fetches nothing, and is read on a phone, too."""
        rows = "\n".join(_row(one) for one in self.relations)
        state = "broken" if self.broken else "holds"
        dtype = f" Forward passes compute in {self.dtype}." if self.dtype else ""
        return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(self.script)}: {"broken" if self.broken else "proved"}</title>
<style>{_STYLE}</style>
<h1>{escape(self.script)}</h1>
<p class="{state}">{escape(self.verdict)}</p>
<p>Each relation is a change whose result is known. Allowed differences are rounding: one unit in the last place of the
weights changes a gradient by up to {self.rounding:.1e}.{escape(dtype)}</p>
<main>
{rows}
</main>
</html>
"""


_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 46rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.3rem; overflow-wrap: anywhere }
article { border-left: 4px solid #8888; padding: .1rem .8rem; margin: .8rem 0 }
article h2 { font-size: 1rem; margin: .2rem 0 }
article p { margin: .2rem 0; overflow-wrap: anywhere }
article.holds { border-color: #2a9d55 }
article.broken { border-color: #d33 }
p.holds, p.broken { font-weight: 600 }
small { opacity: .75 }
"""


def _row(one: Relation) -> str:
    lines = [*(one.broken.lines() if one.broken else ()), one.meaning, one.why]
    numbers = "" if one.result == "not tried" else f"largest difference {one.difference:.1e}, allowed {one.allowed:.1e}"
    details = "".join(f"<p>{escape(line)}</p>" for line in lines if line)
    kind = one.result.replace(" ", "-")
    return (
        f'<article class="{kind}"><h2>{escape(one.name)}: {one.result}</h2><p>{escape(one.about)}</p>{details}'
        f"<small>{numbers}</small></article>"
    )


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
