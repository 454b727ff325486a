"""`ddpforge doctor`: finds problems of these machines that would make a run fail."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from ddpforge.cli.ending import leave
from ddpforge.cli.options import json_option, out_option, sets_options
from ddpforge.errors import ExitCode
from ddpforge.ranks.environment import environment

if TYPE_CHECKING:
    from ddpforge.tools.doctor.findings import Finding


@click.command()
@click.argument("recipe", metavar="[RECIPE]", type=click.Path(), required=False)
@sets_options
@out_option
@json_option
def doctor(recipe: str | None, sets: tuple[str, ...], out: str | None, as_json: bool) -> None:
    """Find problems for RECIPE, or for any run, on this machine; under a launcher, on all of its machines.

    Under a launcher, e.g. `torchrun --nproc-per-node 2 -m ddpforge doctor` or `srun python -m ddpforge doctor`, ranks
    join, compare software, folder and clocks, and measure the speed of their communication. The exit code is 3 if there
    is an error.
    """
    environment().export_variables()

    from ddpforge.tools.doctor.checks import run_checks

    findings = run_checks(recipe, sets, out)
    if findings is not None:  # this is rank 0
        _show(findings, as_json=as_json)
    failed = any(finding.level == "error" for finding in findings or ())
    leave(ExitCode.ENVIRONMENT if failed else ExitCode.DONE)


def _show(findings: Sequence[Finding], *, as_json: bool) -> None:
    from ddpforge.cli.tables import print_table

    if as_json:
        healthy = all(finding.level != "error" for finding in findings)
        click.echo(json.dumps({"ok": healthy, "findings": [finding.as_dict() for finding in findings]}))
        return
    severity = ("error", "warning", "note", "ok")
    ordered = sorted(findings, key=lambda finding: severity.index(finding.level))
    several = len({host for finding in findings for host in finding.hosts}) > 1
    rows = [
        (each.level, *([" ".join(each.hosts) or "all"] if several else []), each.what, each.fix) for each in ordered
    ]
    print_table(("", *(["host"] if several else []), "finding", "fix"), rows)
