"""The way of one optimizer step through the package, recorded by `sys.setprofile`: `pytest -s` prints it."""

from difflib import SequenceMatcher
from pathlib import Path

from support.architecture import path_of_a_step
from support.forked import in_ranks

PAGE = Path(__file__).parents[2] / "docs/concepts/architecture.md"


def test_a_step_takes_sixty_calls_and_nine_frames(tmp_path: Path) -> None:
    """Bounds with room: they fail if every run begins to walk through the parts that only some runs use."""
    (calls,) = in_ranks(1, lambda _: path_of_a_step(tmp_path))
    path = [f"{'  ' * depth}{name}" for depth, name in calls]
    print("\n".join(path))
    assert len(calls) <= 66
    assert max(depth for depth, _ in calls) <= 9
    assert len({name.partition(":")[0] for _, name in calls}) <= 26

    documented = PAGE.read_text(encoding="utf-8").partition("```text\n")[2].partition("\n```")[0].splitlines()
    assert SequenceMatcher(None, documented, path).ratio() > 0.9, "run: python docs/architecture.py"
