"""`ddpforge slurm`: writes the script of a Slurm job that trains a recipe, or submits it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from ddpforge.cli.options import before_flags, imports_option, out_option, recipe_argument, set_option
from ddpforge.errors import RecipeError, SetupError, UsageError

if TYPE_CHECKING:
    from ddpforge.recipe import Recipe

_INDEX = "SLURM_ARRAY_TASK_ID"


@click.command()
@recipe_argument
@click.option("-N", "--nodes", type=click.IntRange(1, 2**16), default=1, show_default=True, help="Nodes of the job.")
@click.option("--gpus-per-node", type=click.IntRange(0, 1024), default=0, help="GPUs of each node; default: none.")
@click.option("-n", "--nproc", type=click.IntRange(1, 1024), help="Ranks on each node; default: one per GPU, or one.")
@click.option("--time", metavar="TIME", help="Time limit, as sbatch takes it: 4:00:00, 1-12:00:00, or minutes.")
@click.option(
    "--signal",
    type=click.IntRange(10, 65535),
    default=120,
    show_default=True,
    metavar="SECONDS",
    help="Signal the ranks this long before the time limit, to save; Slurm may do so a minute earlier.",
)
@click.option(
    "--max-requeues", type=click.IntRange(0), default=50, show_default=True, help="Maximum number of requeues."
)
@click.option("--array", metavar="INDICES", help="A job array, e.g. 0-7%2; use ${env:SLURM_ARRAY_TASK_ID} in the name.")
@click.option("--one-task-per-rank", is_flag=True, help="Start every rank with srun, instead of a launcher per node.")
@click.option(
    "--setup",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Shell commands to run first, e.g. to load modules and to activate the environment of ddpforge.",
)
@click.option("--sbatch", multiple=True, metavar="KEY[=VALUE]", help="A further option of sbatch; repeatable.")
@click.option("--to", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write the script to FILE.")
@click.option("--submit", is_flag=True, help="Submit the job.")
@imports_option
@set_option
@out_option
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[KEY=VALUE]... [-- LAUNCH_FLAGS...]")
def slurm(
    recipe: str,
    nodes: int,
    gpus_per_node: int,
    nproc: int | None,
    time: str | None,
    signal: int,
    max_requeues: int,
    array: str | None,
    one_task_per_rank: bool,
    setup: Path | None,
    sbatch: tuple[str, ...],
    to: Path | None,
    submit: bool,
    imports: bool,
    sets: tuple[str, ...],
    out: str | None,
    words: tuple[str, ...],
) -> None:
    """Write a Slurm job's script that trains RECIPE, to stdout; flags after `--` go to `ddpforge launch`.

    The recipe is checked for the job's number of ranks first, which imports the code that it names. The job saves
    before its time limit and when it is preempted, and requeues itself until the run is done.
    """
    from ddpforge.launchers.slurm import Job, script

    assigned, more = before_flags(words)
    sets = (*sets, *assigned)
    ranks = nproc or gpus_per_node or 1
    checked = _check(recipe, sets, out, ranks * nodes, gpus=bool(gpus_per_node), array=array, imports=imports)
    _reject(more, sbatch, checked, ranks, gpus_per_node)
    job = Job(
        name=re.sub(r"[^\w.-]", "-", (_name(recipe, sets) or Path(recipe).stem) if array else checked.name),
        arguments=[recipe, *(f"--set={value}" for value in sets), *([f"--out={out}"] if out else []), *more],
        nodes=nodes,
        ranks=ranks,
        gpus=gpus_per_node,
        cores=1 + _loaders(checked.data.workers, gpus=bool(gpus_per_node)),
        time=time,
        signal=signal,
        array=array,
        max_requeues=max_requeues,
        task_per_rank=one_task_per_rank,
        setup=setup.read_text() if setup else "",
        sbatch=sbatch,
    )
    text = script(job, ["ddpforge", *sys.argv[1:]])
    if to:
        to.write_text(text)
    if submit:
        click.echo(_submit(text), nl=False)
    elif not to:
        click.echo(text, nl=False)


_AUTO = 3  # loader processes of a rank on a GPU that data.workers = "auto" may start with these cores


def _loaders(workers: int | Literal["auto"], *, gpus: bool) -> int:
    """Returns the loader processes of a rank that need a core each; "auto" starts none on a CPU."""
    return workers if workers != "auto" else _AUTO if gpus else 0


def _check(
    recipe: str,
    sets: Sequence[str],
    out: str | None,
    ranks: int,
    *,
    gpus: bool,
    array: str | None,
    imports: bool,
) -> Recipe:
    """Returns the recipe, of an array that of the first job. Raises ForgeError if `ranks` ranks cannot train it."""
    from ddpforge.api import RunFolder
    from ddpforge.cli.check import choose_and_check
    from ddpforge.components.registry import Registry
    from ddpforge.launchers.slurm import indices
    from ddpforge.recipe import load_recipe

    numbers = indices(array) if array else []
    with _as_task(numbers[:1]):
        chosen, problems = choose_and_check(recipe, sets, ranks, "cuda" if gpus else None, imports=imports)
        problems.raise_if_any()
        first = RunFolder.of(chosen.recipe, out).path
    with _as_task(numbers[1:2]):
        registry = Registry.installed() if imports else Registry.installed().only_registered()
        if numbers[1:] and RunFolder.of(load_recipe(recipe, sets=sets, registry=registry).recipe, out).path == first:
            raise UsageError(
                f"all jobs of --array {array} would train in {first}",
                hints=[f"use the job's number in its name: --set 'name={first.name}-${{env:{_INDEX}}}'"],
            )
    return chosen.recipe


def _name(recipe: str, sets: Sequence[str]) -> str:
    """Returns a name for all jobs of an array: the common beginning and end of two of its runs' names."""
    from ddpforge.components.registry import Registry
    from ddpforge.recipe import load_recipe

    names = []
    for number in (1111, 2222):  # no common digit
        with _as_task([number]), suppress(RecipeError):
            registry = Registry.installed().only_registered()
            names.append(load_recipe(recipe, sets=sets, registry=registry).recipe.name)
    begin = _common(names)
    end = _common([name[len(begin) :][::-1] for name in names])[::-1]
    return f"{begin.rstrip('-_.')}{end}".strip("-_.") if len(names) == 2 else ""


def _common(words: Sequence[str]) -> str:
    """Returns the common prefix of all words."""
    return "".join(letters[0] for letters in takewhile(lambda each: len(set(each)) == 1, zip(*words, strict=False)))


@contextmanager
def _as_task(numbers: Sequence[int]) -> Iterator[None]:
    """Sets Slurm's environment variable with the number of an array's job inside this context."""
    if numbers:
        os.environ[_INDEX] = str(numbers[0])
    try:
        yield
    finally:
        if numbers:
            del os.environ[_INDEX]


def _reject(more: Sequence[str], sbatch: Sequence[str], recipe: Recipe, ranks: int, gpus: int) -> None:
    """Raises UsageError for options that would fail when the job begins, or each time."""
    if "--fresh" in more:
        raise UsageError("--fresh would start from scratch each time that the job is requeued")
    if gpus and ranks > gpus:
        raise UsageError(
            f"--nproc {ranks}, but a node has {gpus} GPUs: every rank needs one", hints=[f"use --nproc {gpus}"]
        )
    device, elsewhere = recipe.train.device, any(re.match("gres|gpus", option) for option in sbatch)
    if device not in ("auto", "cpu") and not gpus and not elsewhere:
        raise UsageError(
            f'the recipe has train.device = "{device}", but the job has no GPUs', hints=["set --gpus-per-node N"]
        )
    if device == "cpu" and gpus:
        raise UsageError('the recipe has train.device = "cpu": the GPUs would be idle', hints=["omit --gpus-per-node"])


def _submit(script: str) -> str:
    """Submits the script and returns the output of `sbatch`. Slurm keeps its own copy of the script."""
    if shutil.which("sbatch") is None:
        raise SetupError(
            "`sbatch` is not installed here", hints=["submit the script on a login node: ddpforge slurm … --to job.sh"]
        )
    done = subprocess.run(["sbatch"], input=script, text=True, capture_output=True, check=False)
    if done.returncode:
        raise SetupError(f"sbatch rejected the job: {done.stderr.strip()}")
    return done.stdout
