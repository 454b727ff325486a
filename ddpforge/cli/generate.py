"""`ddpforge generate`: generates text with a trained language model."""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from ddpforge.cli.options import DeviceName, checkpoint_options, run_argument
from ddpforge.cli.tables import printable
from ddpforge.errors import UsageError


@click.command()
@run_argument
@click.option("-p", "--prompt", metavar="TEXT", help="The text to continue.")
@click.option("--prompts", type=click.Path(path_type=Path), metavar="FILE", help="A file with one prompt per line.")
@click.option("--chat", is_flag=True, help="Answer as an assistant, with the chat template of the run's data.")
@click.option("--system", metavar="TEXT", help="System message of the chat.")
@click.option("--image", "images", multiple=True, metavar="FILE", help="Image of the chat's first message; repeatable.")
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
    chat: bool,
    system: str | None,
    images: tuple[str, ...],
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

    With --chat, the answer to --prompt, or to each line of --prompts alone. Without either, each line of the standard
    input is a message of one chat; on a terminal, Ctrl-D ends it. An answer ends at the end token of the template.
    """
    if system is not None and not chat:
        raise UsageError("--system is the system message of a chat", hints=["add --chat"])
    if images and not chat:
        raise UsageError("--image is an image of a chat", hints=["add --chat"])
    from_stdin = chat and prompt is None and prompts is None
    texts = [] if from_stdin else _prompts(prompt, prompts)

    from ddpforge.api import chosen_kind, load, named_kind
    from ddpforge.app.generation import Sampling
    from ddpforge.ranks.logs import setup_logging
    from ddpforge.runs.checkpoints import find

    setup_logging(0)
    how = Sampling(tokens=tokens, temperature=temperature, top_k=top_k, top_p=top_p, greedy=greedy, seed=seed)
    trained = load(find(run, step=step, best=best, intact=True), weights=weights)
    where = (named_kind(device) if device else chosen_kind(trained.recipe.train)).type
    if chat:
        chats: list[Iterable[str]] = [_typed()] if from_stdin else [[text] for text in texts]
        for turns in chats:
            said: list[str] = []
            for found in trained.answers(_noted(turns, said), how, system=system, images=images, device=where):
                click.echo(_as_json(said[-1], found) if as_json else _shown(found))
        return
    for number, (text, found) in enumerate(zip(texts, trained.texts(texts, how, device=where), strict=True)):
        if as_json:
            click.echo(_as_json(text, found))
        else:
            click.echo(f"{'---' + chr(10) if number else ''}{_shown(text + found)}")


def _as_json(prompt: str, text: str) -> str:
    return json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False)


def _typed() -> Iterator[str]:
    """Yields the lines of the standard input that are not empty; on a terminal, after a prompt."""
    while True:
        if sys.stdin.isatty():
            click.echo("> ", nl=False)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def _noted(turns: Iterable[str], said: list[str]) -> Iterator[str]:
    """Yields `turns`, and adds each to `said`."""
    for turn in turns:
        said.append(turn)
        yield turn


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
