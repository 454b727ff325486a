"""A run that has done its work ends well, every time."""

from pathlib import Path

import pytest
from ranks import Zygote

RECIPE = """
recipe = 1
name = "short"
model = { use = "mlp", inputs = 64, outputs = 10, hidden = [8] }
data.train = { use = "digits", split = "test" }
task = { use = "classification" }
optimizer = { use = "sgd", lr = 0.1 }
train = { length = "2st", global_batch = 8 }
"""


@pytest.mark.slow
def test_fifty_finished_runs_of_two_ranks_end_with_zero(tmp_path: Path, zygote: Zygote) -> None:
    """Trap 28a: gloo's threads abort about every tenth process that leaves by way of the interpreter's clean-up."""
    (tmp_path / "short.toml").write_text(RECIPE)
    ended = [zygote.run(["run", "short.toml", "--fresh"], nproc=2, cwd=tmp_path) for _ in range(50)]
    assert [ranks.codes for ranks in ended] == [[0, 0]] * 50, next(ranks for ranks in ended if any(ranks.codes)).stderr
