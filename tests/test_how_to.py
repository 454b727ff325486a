"""The commands of how-to pages that need nothing but bundled recipes: each is run, in the order of the page."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import Ranks
from test_docs import DOCS, blocks

TRAINED = {
    "digits": ["digits", "checkpoint.keep.last=100", "checkpoint.every=69st"],
    "a": ["digits", "name=a", "train.length=2ep"],
    "b": ["digits", "name=b", "train.length=2ep", "optimizer.lr=1e-3"],
    "c": ["digits", "name=c", "train.length=2ep", "train.seed=3"],
    "gan": ["gan", "train.length=2st"],
    "diffusion": ["diffusion", "train.length=2ep"],
}
ELSEWHERE = (
    *("recipe.toml", "pretrained", "theirs", "meta-model", "deepspeed-run", "shakespeare-char", "tiny-llama"),
    *("/scratch", "runs/wide", "runs/old", "--push-to-hub", "--only", "launch ", "--watch"),  # not here, or no end
    *(".onnx", ".pt2", "batch-size", "lr-range", "sweep ", "runs resume"),  # take long, and have tests of their own
)
"""Words of commands that are not run here."""


def commands(page: Path) -> list[list[str]]:
    """The words after `ddpforge` of the commands that a page shows, without those of ELSEWHERE."""
    text = "".join(blocks(page, "sh", "text"))
    lines = re.findall(r"^(?:\$ )?ddpforge (.*)$", text, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines if not any(word in line for word in ELSEWHERE)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("page", "number", "runs"),
    [
        ("before-training", 3, []),
        ("checkpoints", 5, ["digits"]),
        ("debug", 1, []),
        ("evaluate", 5, ["digits"]),
        ("report", 1, ["digits"]),
        ("runs", 7, ["digits", "a", "b", "c"]),
        ("use-a-model", 4, ["digits", "gan", "diffusion"]),
    ],
)
def test_the_commands_of_a_how_to_run(
    ddpforge: Callable[..., Ranks],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    page: str,
    number: int,
    runs: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for run in runs:
        ddpforge("run", *TRAINED[run])
    found = commands(DOCS / f"how-to/{page}.md")
    assert len(found) == number
    for words in found:
        done = ddpforge(*words, fails=True)
        assert done.codes in ([0], [1] if words[:2] == ["ckpt", "diff"] else [0]), (words, done.stderr)
    if "gan" in runs:
        (snippet,) = (text for text in blocks(DOCS / f"how-to/{page}.md", "python") if "denoised" in text)
        given: dict[str, object] = {}
        exec(snippet, given)
        assert [tuple(getattr(given[name], "shape")) for name in ("drawn", "denoised")] == [(16, 1, 8, 8)] * 2  # noqa: B009
