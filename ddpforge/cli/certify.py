"""`ddpforge certify`: trains a recipe under all layouts of its ranks, and compares each with one process."""

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddpforge.cli import complain
from ddpforge.cli.options import json_option, recipe_argument, sets_options
from ddpforge.errors import UsageError

if TYPE_CHECKING:
    from ddpforge.tools.certify.certificate import LayoutCertificate

_SHOWN = 20  # rows of layouts that differ or fail


@click.command()
@recipe_argument
@click.option(
    "--ranks", type=click.IntRange(1, 64), default=8, show_default=True, help="Largest number of ranks of a layout."
)
@click.option("--strategies", metavar="NAME,...", default="", help="Only these strategies; default: all installed.")
@click.option("--steps", type=click.IntRange(1, 2**20), default=20, show_default=True, help="Steps of each run.")
@click.option("--layouts", type=click.IntRange(1), metavar="N", help="Train at most N layouts; default: all.")
@click.option(
    "--budget", type=click.FloatRange(0, min_open=True), metavar="MINUTES", help="Start no run after this time."
)
@click.option(
    "--types",
    metavar="RANKS,...",
    help="Instead, check the types of activations for these numbers of ranks that share layers, e.g. 2,8,64.",
)
@click.option(
    "--torch",
    "versions",
    metavar="VERSIONS",
    help="Certify under other versions of torch, 2.10..2.12 or 2.10,2.15, each in an environment in --out.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the order in which layouts are tried.")
@sets_options
@click.option(
    "-o",
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("certificate"),
    show_default=True,
    metavar="DIR",
    help="Folder for rows, page and picture. The same command goes on with the rows that it has.",
)
@json_option
def certify(
    recipe: str,
    ranks: int,
    strategies: str,
    steps: int,
    layouts: int | None,
    budget: float | None,
    types: str | None,
    versions: str | None,
    seed: int,
    sets: tuple[str, ...],
    out: Path,
    as_json: bool,
) -> None:
    """Train RECIPE under every layout on 1 to 8 ranks, and compare each with one process.

    The strategies declare the layouts: replicas, shards, shares of layers, sequences and experts, schedules of
    pipelines, stages of ZeRO; each with several micro-batches, and with activation checkpointing. They are tried in a
    random order, strategies in turns. All begin with the same weights and use the same samples. Ranks are processes on
    the CPU, or use GPUs if there is one for each. Exit codes: 0 all that trained are the same, 1 one differs or failed,
    2 usage or recipe.
    """
    if types:
        _check_types(recipe, types, sets, as_json)
        return
    if versions:
        given = {"--ranks": ranks, "--strategies": strategies, "--steps": steps, "--layouts": layouts, "--seed": seed}
        given |= {"--budget": budget}
        options = [word for name, value in given.items() if value not in (None, "") for word in (name, str(value))]
        _certify_versions(versions, [recipe, *options, *(f"--set={one}" for one in sets)], out, as_json)
        return
    from ddpforge.ranks.logs import keep_output
    from ddpforge.tools.certify.certificate import certify as try_layouts
    from ddpforge.tools.certify.page import write_page
    from ddpforge.tools.parity.runs import RunFailed

    keep_output()
    try:
        certificate = try_layouts(
            recipe,
            out=out,
            most=ranks,
            steps=steps,
            sets=sets,
            strategies=[name for name in strategies.split(",") if name],
            rows=layouts,
            budget=budget * 60 if budget else None,
            seed=seed,
            say=lambda text: click.echo(text, err=True),
        )
    except RunFailed as error:
        complain(error)
        raise SystemExit(error.code) from None
    page = write_page(certificate, out)
    click.echo(json.dumps(certificate.as_dict()) if as_json else f"{_text(certificate)}\n\npage: {page}")
    if certificate.of("differs", "failed"):
        raise SystemExit(1)


def _certify_versions(versions: str, arguments: list[str], out: Path, as_json: bool) -> None:
    from ddpforge.tools.certify.versions import certify_versions, versions_of

    found, wrong = {}, 0
    for version, certificate in certify_versions(
        versions_of(versions), arguments, out, lambda text: click.echo(text, err=True)
    ):
        found[version] = certificate
        bad = [row for row in certificate["rows"] if row["verdict"] in ("differs", "failed")]
        same = sum(row["verdict"] == "same" for row in certificate["rows"])
        wrong += len(bad)
        if not as_json:
            click.echo(f"torch {certificate['subject']['torch']}: {same} of {same + len(bad)} layouts train like one")
            for row in bad[:_SHOWN]:
                click.echo(f"  {row['layout']}: {row['verdict']} {row['reason']}")
    if as_json:
        click.echo(json.dumps(found))
    if wrong:
        raise SystemExit(1)


def _check_types(recipe: str, sizes: str, sets: tuple[str, ...], as_json: bool) -> None:
    from ddpforge.tools.certify.typed import typed_rows

    if not all(one.strip().isdecimal() and int(one) > 1 for one in sizes.split(",")):
        raise UsageError(f"--types is not a list of numbers of ranks above 1: {sizes}", hints=["--types 2,8,64"])
    rows = []
    for row in typed_rows(recipe, [int(one) for one in sizes.split(",")], sets):
        rows.append(row)
        if not as_json:
            click.echo(f"{row.layout:<34} {row.verdict}{f': {row.reason}' if row.reason else ''}")
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows]))
    if any(row.verdict == "mistyped" for row in rows):
        raise SystemExit(1)


def _text(certificate: "LayoutCertificate") -> str:
    rows = certificate.of("same", "differs", "failed")
    lines = [f"{'strategy':<14} {'layouts':>7} {'same':>5} {'differ':>6} {'failed':>6}  {'loss':>8}  {'weights':>8}"]
    for use in dict.fromkeys(row.use for row in rows):
        of_use = [row for row in rows if row.use == use]
        count = Counter(row.verdict for row in of_use)
        largest = [f"{max(row.largest(name) for row in of_use):.1e}" for name in ("train/loss", "weights")]
        counts = f"{len(of_use):>7} {count['same']:>5} {count['differs']:>6} {count['failed']:>6}"
        lines.append(f"{use:<14} {counts}  {largest[0]:>8}  {largest[1]:>8}")
    bad = certificate.of("differs", "failed")
    lines += ["", f"{len(certificate.of('same'))} of {len(rows)} layouts train like one process."]
    if refused := certificate.of("refused"):
        lines += [f"{len(refused)} more were refused before the first step, each with its reason."]
    if left := certificate.layouts - len(certificate.rows):
        lines += [f"{left} of {certificate.layouts} that the strategies declare were not tried."]
    lines += [f"  {row.layout}: {row.verdict}: {row.worst}" for row in bad[:_SHOWN]]
    return "\n".join(lines)
