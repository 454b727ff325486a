"""`ddpforge generate`: generates text with a trained language model."""

import json
from pathlib import Path

import click

from ddpforge.cli.options import DeviceName, checkpoint_options, run_argument
from ddpforge.cli.tables import printable
from ddpforge.errors import UsageError


@click.command()
@run_argument
@click.option("-p", "--prompt", metavar="TEXT", help="The text to continue.")
@click.option("--prompts", type=click.Path(path_type=Path), metavar="FILE", help="A file with one prompt per line.")
@click.option("-n", "--tokens", type=int, default=200, show_default=True, metavar="N", help="Tokens to generate.")
@click.option("--temperature", type=float, metavar="X", help="Below 1: more probable tokens; above 1: more variety.")
@click.option("--top-k", type=int, metavar="N", help="Sample only from the N most probable tokens.")
@click.option(
    "--top-p", type=float, metavar="P", help="Sample only from the most probable tokens with total probability P."
)
@click.option("--greedy", is_flag=True, help="Always take the most probable token.")
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Seed for sampling.")
@checkpoint_options
@click.option(
    "--weights", metavar="NAME", help='"model", or a callback such as ema; default: the weights of evaluations.'
)
@click.option("--device", type=DeviceName(), help="Default: the recipe's; for auto, a GPU if available.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per prompt.")
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
    """Generate text after a prompt with the language model of RUN, a run's folder or its name in runs/.

    The same seed gives the same text. If the text exceeds the model's block size, the model uses the last tokens.
    """
    texts = _prompts(prompt, prompts)

    from ddpforge.app.api import load
    from ddpforge.app.generation import Sampling
    from ddpforge.ranks.devices import chosen_kind, named_kind
    from ddpforge.ranks.logs import setup_logging
    from ddpforge.runs.checkpoints import find

    setup_logging(0)
    how = Sampling(tokens=tokens, temperature=temperature, top_k=top_k, top_p=top_p, greedy=greedy, seed=seed)
    trained = load(find(run, step=step, best=best, intact=True), weights=weights)
    where = (named_kind(device) if device else chosen_kind(trained.recipe.train)).type
    for number, (text, found) in enumerate(zip(texts, trained.texts(texts, how, device=where), strict=True)):
        if as_json:
            click.echo(json.dumps({"prompt": text, "text": found}, ensure_ascii=False))
        else:
            click.echo(f"{'---' + chr(10) if number else ''}{_shown(text + found)}")


def _prompts(prompt: str | None, file: Path | None) -> list[str]:
    if (prompt is None) == (file is None):
        raise UsageError(
            "expected exactly one of --prompt and --prompts",
            hints=["use --prompt TEXT, or --prompts FILE with one prompt per line"],
        )
    if file is None:
        return [str(prompt)]
    try:
        found = [line for line in file.read_text(encoding="utf-8").splitlines() if line]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompts {file}: cannot read the file as text: {error}") from error
    if not found:
        raise UsageError(f"--prompts {file}: the file has no prompt; expected one per line")
    return found


def _shown(text: str) -> str:
    """Returns the text with control characters escaped."""
    return "\n".join(printable(line.replace("\t", "    ")) for line in text.split("\n"))
