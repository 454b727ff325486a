"""`ddpforge plan`: predicts a run's memory, communication and time without using a device."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ddpforge import disk
from ddpforge.cli.options import SizeParam, json_option, recipe_argument, sets_options
from ddpforge.cli.tables import counted, print_table, size, span
from ddpforge.errors import UsageError
from ddpforge.fast_import import gc_paused

if TYPE_CHECKING:
    from ddpforge.components.registry import Registry
    from ddpforge.tools.parity.specs import Spec
    from ddpforge.tools.simulation.devices import Device
    from ddpforge.tools.simulation.forecast import Forecast
    from ddpforge.tools.simulation.search import Choice, Remedy

_DEVICES = ("cpu", "h100", "h200", "a100-80", "a100-40", "l40s", "rtx4090", "mi300x")


_NOTHING = "no setting that was tried makes it fit: use more ranks, or a smaller model"


@click.command()
@recipe_argument
@sets_options
@click.option(
    *("-n", "--ranks"),
    type=click.IntRange(1, 2**16),
    envvar="WORLD_SIZE",
    default=1,
    show_default="WORLD_SIZE, else 1",
    help="Plan for this many ranks.",
)
@click.option(
    "--device",
    type=click.Choice(_DEVICES),
    default="cpu",
    show_default=True,
    help="Plan for this device: its memory, and its published speeds for the estimate of a step's time.",
)
@click.option(
    "--memory",
    "budget",
    type=SizeParam(),
    metavar="MEMORY",
    help="Memory available to a rank, e.g. 80GiB; default: the device's.",
)
@click.option(
    "--strategies",
    multiple=True,
    metavar="NAME[:OPTION...][@RANKS],...",
    help="Strategies to plan instead of the recipe's, e.g. ddp,fsdp,fsdp:tensor=2,deepspeed:3; repeatable.",
)
@click.option(
    "--auto",
    is_flag=True,
    help="Find the largest train.micro_batch that fits under each strategy, without and with activation "
    "checkpointing, and the fastest of these by the estimate. The global batch does not change.",
)
@click.option("--write", is_flag=True, help="With --auto: write the fastest settings into the recipe's file.")
@click.option(
    "--explain", is_flag=True, help="List the ten largest tensors at the peak, and the operations that made them."
)
@json_option
def plan(
    recipe: str,
    sets: Sequence[str],
    ranks: int,
    device: str,
    budget: int | None,
    strategies: Sequence[str],
    auto: bool,
    write: bool,
    explain: bool,
    as_json: bool,
) -> None:
    """Predict the memory, communication, operations and time of RECIPE on each rank, without using a device.

    ddpforge builds the run and simulates one step without other processes, on tensors without values. Memory is that of
    all live tensors at the peak of the step. Data is read for one step. Exit codes: 0 it fits, or no --memory was
    given; 1 it does not fit: settings that would fit are printed; 2 usage or recipe.
    """
    with gc_paused():
        from ddpforge.components.registry import Registry
        from ddpforge.tools.parity.specs import parse, split
        from ddpforge.tools.simulation.devices import DEVICES
        from ddpforge.tools.simulation.forecast import forecast
        from ddpforge.tools.simulation.search import remedies

    if write and not auto:
        raise click.UsageError("--write needs --auto")
    if write:
        _reject_no_file(Path(recipe))
    registry = Registry.installed()
    chosen = DEVICES.get(device)
    specs = [parse(text, registry, ranks=ranks) for text in split(strategies)]
    if auto:
        _auto(recipe, sets, ranks, registry, specs, chosen, budget, write=write, as_json=as_json)
        return
    found = [
        forecast(recipe, spec, ranks=ranks, registry=registry, sets=sets, device=chosen, budget=budget)
        for spec in (specs or (None,))
    ]
    if not as_json:
        _print(found, chosen, explain=explain)
    changes = []
    if not specs and found[0].fits is False:
        click.echo("looking for settings that fit: each needs its own plan", err=True)
        limit = found[0].budget or 0
        changes = remedies(recipe, ranks, registry=registry, budget=limit, sets=sets, device=chosen)
    if as_json:
        click.echo(json.dumps([one.as_dict() | {"remedies": [_remedy(one) for one in changes]} for one in found]))
    else:
        _print_remedies(found, changes, tried=not specs)
    if any(one.fits is False for one in found):
        raise SystemExit(1)


def _auto(
    recipe: str,
    sets: Sequence[str],
    ranks: int,
    registry: Registry,
    specs: Sequence[Spec],
    device: Device | None,
    budget: int | None,
    *,
    write: bool,
    as_json: bool,
) -> None:
    from ddpforge.tools.parity.specs import parse
    from ddpforge.tools.simulation.search import best, choices

    limit = budget or (int(device.memory) if device else None)
    if limit is None:
        raise click.UsageError("--auto needs a --memory, or a --device other than cpu")
    tried = specs or [parse(name, registry, ranks=ranks) for name in (("ddp", "fsdp") if ranks > 1 else ("single",))]
    found = choices(
        recipe,
        tried,
        registry=registry,
        budget=limit,
        sets=sets,
        device=device,
        on_result=lambda one: click.echo(f"{one.strategy}: {_tried(one)}", err=True),
    )
    fastest = best(found)
    if as_json:
        click.echo(json.dumps({"choices": [_as_dict(one) for one in found], "best": fastest and _as_dict(fastest)}))
    else:
        rows = [_choice(one, one is fastest) for one in found]
        print_table(("strategy", "activation checkpointing", "micro-batch", "needs", "step", ""), rows)
        for key, value in (fastest.sets if fastest else {}).items():
            click.echo(f"{key} = {value}")
    if fastest is None:
        raise SystemExit(1)
    if write:
        _set_values(Path(recipe), fastest.sets)
        click.echo(f"written to {recipe}", err=True)


def _tried(one: Forecast) -> str:
    fits = {True: "fits", False: "does not fit", None: f"not simulated ({one.unsimulated})"}[one.fits]
    return f"micro-batch {one.batch['micro_batch']}: {fits}{f', {size(one.needs)}' if one.needs else ''}"


def _as_dict(one: Choice) -> dict[str, object]:
    return {
        "strategy": one.spec.text,
        "activation_checkpointing": one.checkpointing,
        "micro_batch": one.micro_batch,
        "sets": one.sets,
        "forecast": one.forecast.as_dict(),
    }


def _choice(one: Choice, is_best: bool) -> tuple[str, ...]:
    none = "not simulated" if one.forecast.unsimulated else "none fits"
    micro = none if one.micro_batch is None else str(one.micro_batch)
    checkpointing = one.checkpointing if isinstance(one.checkpointing, str) else "yes" if one.checkpointing else "no"
    return one.spec.text, checkpointing, micro, _size(one.forecast.needs), _time(one.forecast), "fastest" * is_best


def _print(found: Sequence[Forecast], device: Device | None, *, explain: bool) -> None:
    first = found[0]
    batch = first.batch
    click.echo(f"{first.parameters:,} parameters")
    passes = f"= {batch['micro_batch']} per forward pass"
    if batch["max_tokens"]:
        passes = f"with at most {batch['max_tokens']:,} tokens per forward pass"
    click.echo(
        f"batch: {batch['global_batch']} per step {passes} × {batch['accumulation']} accumulation × "
        f"{counted(batch['data_ranks'], 'rank')}{_length(first)}\n"
    )
    rows = [
        (
            one.strategy,
            *(_size(one.state.get(kind, 0)) for kind in ("weights", "gradients", "optimizer state")),
            _size((one.kinds or {}).get("activations")),
            _size((one.kinds or {}).get("logits and loss")),
            _size((one.kinds or {}).get("communication")),
            _size(one.peak),
            one.phase,
            {True: "fits", False: "too much", None: ""}[one.fits],
            _time(one),
        )
        for one in found
    ]
    print_table(
        (
            *("strategy", "weights", "gradients", "optimizer", "activations", "logits", "communication"),
            *("peak", "in", "", "step, estimated"),
        ),
        rows,
    )
    for one in found:
        click.echo("")
        _print_one(one, device, explain=explain)


def short(one: Forecast) -> Iterator[str]:
    """Yields a plan in two lines: the memory of a rank, and its operations and communication in a step."""
    held = sorted((one.kinds or one.state).items(), key=lambda pair: -pair[1])
    kinds = ", ".join(f"{kind} {size(count)}" for kind, count in held if count)
    if one.peak is None:
        yield f"plan: not simulated ({one.unsimulated}); by arithmetic a rank holds {kinds}"
        return
    yield f"plan: {size(one.peak)} on a rank at the peak of a step, in {one.phase}: {kinds}"
    sent = size(int(sum((one.wire or {}).values())))
    yield f"plan: a rank computes {_operations(one.flops or 0)} in a step, and sends {sent}"


def _print_remedies(found: Sequence[Forecast], changes: Sequence[Remedy], *, tried: bool) -> None:
    """Prints settings with which a plan that does not fit would fit."""
    if not tried or found[0].fits is not False:
        return
    click.echo("\nit fits with one of these, the fastest first by the estimate:" if changes else f"\n{_NOTHING}")
    for one in changes:
        click.echo(f"  {' '.join(f'{key}={value}' for key, value in one.sets.items())}: {_size(one.forecast.needs)}")


def _remedy(one: Remedy) -> dict[str, object]:
    return {"sets": dict(one.sets), "needs": one.forecast.needs, "peak": one.forecast.peak}


def _print_one(one: Forecast, device: Device | None, *, explain: bool) -> None:
    click.echo(f"{one.strategy}, on each of {counted(one.ranks, 'rank')}:")
    if one.unsimulated:
        click.echo(f"  not simulated ({one.unsimulated}): weights, gradients and optimizer state are computed by")
        click.echo("  arithmetic, activations are not counted")
    if master := one.state.get("master weights"):
        click.echo(f"  master weights: {size(master)}")
    for name, wire in (one.wire or {}).items():
        if wire:
            click.echo(f"  sends per step, {name} ranks: {size(int(wire))}")
    if one.flops:
        each = (one.all_flops or 0) / one.items if one.items else 0
        per_item = f", {_operations(each)} on all ranks per {one.items_name.removesuffix('s')}" if each else ""
        click.echo(f"  floating-point operations per step: {_operations(one.flops)}{per_item}")
    every = ""
    if one.checkpoint_every:
        steps = one.checkpoint_every
        every = f", every {counted(steps, 'step')}: {size(one.checkpoint // steps)} to write for each step"
    click.echo(f"  checkpoint, of all ranks together: {size(one.checkpoint)}{every}")
    if device and one.needs and one.peak:
        click.echo(
            f"  needs {size(one.needs)} of {size(one.budget or 0)}: the peak, 10 % for fragmentation and 1.5 GiB for "
            "CUDA, cuBLAS and NCCL (an assumption, not measured)"
        )
    if device and one.seconds:
        click.echo(
            f"  a step takes {_time(one)} by the roofline of each operation at the published speeds of {device.name} "
            f"({device.source}): computation {_seconds(one.seconds.compute)}, communication "
            f"{_seconds(one.seconds.communication)}, which overlap completely or not at all"
        )
    if explain:
        click.echo("  the largest tensors at the peak:")
        for piece in one.largest:
            shape = "×".join(map(str, piece["shape"])) or "a number"
            click.echo(f"    {size(piece['bytes']):>10}  {piece['kind']}: {piece['made_by']} {shape} {piece['dtype']}")


def _length(one: Forecast) -> str:
    if not one.items:
        return ""
    each = f", {one.items:,.0f} {one.items_name} per step"
    return each if one.steps is None else f"{each}, {one.items * one.steps:,.0f} in {one.steps:,} steps"


def _size(count: int | None) -> str:
    return "" if count is None else size(count)


_LAUNCH = 5e-6  # seconds for the start of a kernel on a GPU; a step starts hundreds
_SHORTEST = 100 * _LAUNCH  # a step of a real GPU is longer than this


def _time(one: Forecast) -> str:
    if one.seconds is None:
        return ""
    if one.seconds.least < _SHORTEST:
        return "less than the launch overhead"
    least, most = _seconds(one.seconds.least), _seconds(one.seconds.most)
    return least if least == most else f"{least} to {most}"


def _seconds(value: float) -> str:
    """Returns a duration with two digits in µs, ms or s; a long one in its two largest units."""
    if value >= 60:
        return span(value)
    name, unit = next(one for one in (("s", 1), ("ms", 1e-3), ("µs", 1e-6)) if value >= one[1] or one[1] == 1e-6)
    return f"{float(f'{value / unit:.2g}'):g} {name}"  # 280 ms, not 2.8e+02


def _operations(count: float) -> str:
    """Returns a number of floating-point operations with three digits: 36 MFLOP, 1.25 GFLOP."""
    units = (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3), ("FLOP", 1))
    name, unit = next(one for one in units if count >= one[1] or one[1] == 1)
    return f"{count / unit:.3g} {name}"


# ---------------------------------------------------------------------------------------------- writing into a recipe
def _reject_no_file(path: Path) -> None:
    """Raises UsageError unless the recipe is a file, not a bundled recipe."""
    if not path.is_file():
        raise UsageError(
            f"cannot write into {path}: it is not a recipe file",
            hints=[f"copy the bundled recipe first: ddpforge recipes cp {path.name}"],
        )


def _set_values(path: Path, values: Mapping[str, str]) -> None:
    """Sets dotted keys of a recipe file to values in TOML syntax. Replaces the file atomically.

    A new component name (`….use`) removes the options of the previous component.
    """
    _reject_no_file(path)
    import tomlkit

    document = tomlkit.parse(path.read_text(encoding="utf-8"))
    for dotted, text in values.items():
        *tables, key = dotted.split(".")
        place: Any = document
        for name in tables:
            place = place.setdefault(name, tomlkit.table())
        value = tomlkit.value(text)
        if key == "use" and place.get(key) != value:
            place.clear()  # the options belong to the previous component
        place[key] = value
    disk.replace(path, tomlkit.dumps(document).encode())
