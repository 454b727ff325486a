"""`ddpforge bisect`: finds the first step, module and operation at which two runs part."""

import json
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

from ddpforge.cli import complain
from ddpforge.cli.options import assignments, json_option, sets_options
from ddpforge.errors import UsageError

if TYPE_CHECKING:
    from ddpforge.tools.bisect.bisection import BisectResult

_KINDS = {
    "samples": "the samples",
    "forward": "the forward pass of module `{}`",
    "backward": "the backward pass of module `{}`",
    "gradient": "the gradient of `{}`, which its module computes",
    "update": "the update of `{}` by the optimizer",
    "row": "only numbers of the row: see metrics.jsonl of both",
}


@click.command()
@click.argument("first", metavar="A")
@click.argument("second", metavar="[B]", required=False)
@click.option("--strategies", metavar="A,B", help="Strategies of both, as for `ddpforge parity`: single@1,fsdp@2.")
@click.option("--set-a", "sets_a", multiple=True, metavar="KEY=VALUE", help="Setting of A only; repeatable.")
@click.option("--set-b", "sets_b", multiple=True, metavar="KEY=VALUE", help="Setting of B only; repeatable.")
@click.option("--python-b", metavar="FILE", help="Interpreter for B, e.g. of an environment with another torch.")
@click.option(
    "--steps", type=click.IntRange(1, 1000), default=20, show_default=True, help="Largest number of steps to replay."
)
@sets_options
@click.option(
    "-o", "--out", type=click.Path(file_okay=False, path_type=Path), metavar="DIR", help="Keep the folders of all runs."
)
@json_option
def bisect(
    first: str,
    second: str | None,
    strategies: str | None,
    sets_a: tuple[str, ...],
    sets_b: tuple[str, ...],
    python_b: str | None,
    steps: int,
    sets: tuple[str, ...],
    out: Path | None,
    as_json: bool,
) -> None:
    """Find the first step, then the first module and operation, at which A and B part by more than rounding.

    A and B are recipes or folders of runs; without B, it is A with other settings: another layout, precision, compile
    setting or torch. Both are replayed from the same weights, which a run's newest common checkpoint has. Exit codes:
    0 they agree, 1 they part, 2 usage or recipe.
    """
    from ddpforge.ranks.logs import keep_output
    from ddpforge.tools.bisect.bisection import Side
    from ddpforge.tools.bisect.bisection import bisect as search
    from ddpforge.tools.parity.runs import RunFailed
    from ddpforge.tools.parity.specs import split

    keep_output()
    if second and "=" in second and not Path(second).exists():
        sets = (*sets, *assignments([second]))
        second = None
    named: list[str | None] = [*split([strategies])] if strategies else [None, None]
    if len(named) != 2:
        raise UsageError(f"--strategies names {len(named)} strategies", hints=["name that of A and that of B"])
    if not (second or strategies or sets_a or sets_b or python_b):
        raise UsageError("A and B are the same", hints=["name a second run, --strategies, or --set-b KEY=VALUE"])
    a = Side.of(first, named[0], [*sets, *assignments(sets_a)])
    b = Side.of(second or first, named[1], [*sets, *assignments(sets_b)], python_b)
    with ExitStack() as stack:
        folder = out or Path(stack.enter_context(TemporaryDirectory(prefix="ddpforge-bisect-")))
        folder.mkdir(parents=True, exist_ok=True)
        try:
            found = search(a, b, steps=steps, out=folder, say=lambda text: click.echo(text, err=True))
        except RunFailed as error:
            complain(error)
            raise SystemExit(error.code) from None
    click.echo(json.dumps(found.as_dict()) if as_json else _text(found))
    if found.step is not None:
        raise SystemExit(1)


def _text(found: "BisectResult") -> str:
    if found.step is None:
        return f"same: {found.steps} steps differ by no more than rounding"
    where = f", {found.where}" if found.where else ""
    call = f", in its call {found.call}" if found.call > 1 else ""
    lines = [f"they part at step {found.step}, in {_KINDS[found.kind].format(found.name)}{where}{call}"]
    if found.operation:
        lines.append(f"  the first operation that differs: {found.operation}")
    if found.difference:
        times = f", × {found.multiple:.4g}" if found.multiple is not None else ""
        lines.append(f"  relative difference {found.difference:.1e}{times}; rounding explains {found.allowed:.1e}")
    lines += [f"  also {name}{f' × {one:.4g}' if one is not None else ''}" for name, one in found.worst[1:]]
    return "\n".join(lines)
