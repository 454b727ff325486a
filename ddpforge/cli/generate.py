"""`ddpforge generate`: text that a trained language model writes."""

import json
from pathlib import Path

import click

from ddpforge.cli.options import checkpoint_options, run_argument
from ddpforge.cli.tables import printable
from ddpforge.errors import UsageError


@click.command()
@run_argument
@click.option("-p", "--prompt", metavar="TEXT", help="The text to continue.")
@click.option("--prompts", type=click.Path(path_type=Path), metavar="FILE", help="A file with a prompt a line.")
@click.option("-n", "--tokens", type=int, default=200, show_default=True, metavar="N", help="Tokens to write.")
@click.option("--temperature", type=float, metavar="X", help="Below 1 for what is probable, above for what is not.")
@click.option("--top-k", type=int, metavar="N", help="Draw among the N most probable tokens.")
@click.option(
    "--top-p", type=float, metavar="P", help="Draw among the most probable tokens that have the probability P together."
)
@click.option("--greedy", is_flag=True, help="Take the most probable token.")
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Seed of what is drawn.")
@checkpoint_options
@click.option(
    "--weights", metavar="NAME", help='"model", or a callback such as ema; default: those that evaluations use.'
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Default: as the recipe says, else what is here.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each prompt.")
def generate(
    run: str,
    prompt: str | None,
    prompts: Path | None,
    tokens: int,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    greedy: bool,
    seed: int,
    step: int | None,
    best: bool,
    weights: str | None,
    device: str | None,
    as_json: bool,
) -> None:
    """Print what the language model of RUN, a run's folder or its name in runs/, writes after a prompt.

    The same seed gives the same text. A model that sees so many tokens at a time, its block size, continues from the
    last of them.
    """
    texts = _prompts(prompt, prompts)

    from ddpforge.app.api import load
    from ddpforge.app.generation import Sampling
    from ddpforge.ranks.devices import device_type
    from ddpforge.ranks.logs import setup_logging
    from ddpforge.runs.checkpoints import find

    setup_logging(0)
    how = Sampling(tokens=tokens, temperature=temperature, top_k=top_k, top_p=top_p, greedy=greedy, seed=seed)
    trained = load(find(run, step=step, best=best, intact=True), weights=weights)
    where = device or device_type(trained.recipe.train)
    for number, (text, found) in enumerate(zip(texts, trained.texts(texts, how, device=where), strict=True)):
        if as_json:
            click.echo(json.dumps({"prompt": text, "text": found}, ensure_ascii=False))
        else:
            click.echo(f"{'---' + chr(10) if number else ''}{_shown(text + found)}")


def _prompts(prompt: str | None, file: Path | None) -> list[str]:
    if (prompt is None) == (file is None):
        raise UsageError("say what to continue", hints=["--prompt TEXT, or --prompts FILE with a prompt a line"])
    if file is None:
        return [str(prompt)]
    try:
        found = [line for line in file.read_text(encoding="utf-8").splitlines() if line]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompts {file} cannot be read as text: {error}") from error
    if not found:
        raise UsageError(f"--prompts {file} holds no prompt")
    return found


def _shown(text: str) -> str:
    """The text, less what would steer a terminal."""
    return "\n".join(printable(line.replace("\t", "    ")) for line in text.split("\n"))
