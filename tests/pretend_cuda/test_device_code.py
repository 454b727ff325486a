"""Calls to the device of small parts of ddpforge: batches, checkpoints, rows of metrics, random numbers, memory."""

import json
import subprocess
import sys

import pytest
from support import SUPPORT
from support.pretended import environment, with_changes

Numbers = dict[str, int]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Numbers]:
    """Returns the numbers of each part."""
    env = with_changes(environment(2, computes=False))
    env["PYTHONPATH"] += f":{SUPPORT.parent}"
    command = [sys.executable, str(SUPPORT / "device_code.py")]
    done = subprocess.run(
        command, cwd=tmp_path_factory.mktemp("parts"), env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    numbers: dict[str, Numbers] = json.loads(done.stdout)
    return numbers


def test_a_large_batch_is_copied_on_its_own_stream_which_the_other_waits_for(found: dict[str, Numbers]) -> None:
    batch = found["large_batch"]
    assert batch["on_gpu_1"]
    assert (batch["to_device"], batch["unpinned"], batch["waits"]) == (2, 0, 0)
    assert (batch["events"], batch["stream_waits"]) == (1, 1)


def test_memory_of_a_large_batch_is_free_when_the_stream_that_reads_it_is_done(found: dict[str, Numbers]) -> None:
    """Each tensor that another stream uses has an event when it is freed."""
    assert found["large_batch"]["events_when_freed"] == 2


def test_a_small_batch_needs_no_stream(found: dict[str, Numbers]) -> None:
    batch = found["small_batch"]
    assert (batch["to_device"], batch["unpinned"], batch["waits"]) == (2, 0, 0)
    assert batch["events"] == batch["stream_waits"] == 0


def test_the_host_waits_for_a_staged_checkpoint_only_where_it_is_written(found: dict[str, Numbers]) -> None:
    staged = found["staged_checkpoint"]
    assert (staged["to_host"], staged["unpinned"], staged["waits"]) == (3, 0, 0)
    assert staged["waits_of_writer"] == 1
    assert staged["stream_waits_of_update"] == 1


def test_numbers_of_the_host_join_those_of_the_device_in_pinned_memory(found: dict[str, Numbers]) -> None:
    """Allows one copy without pinning: the read by the double of this function."""
    row = found["row_of_metrics"]
    assert row["to_device"] == row["to_host"] == row["unpinned"] == 1


def test_seeds_reach_the_generator_of_the_rank_s_device(found: dict[str, Numbers]) -> None:
    assert found["random_numbers"]["seed"] == 11


def test_the_state_of_the_device_s_generator_is_restored(found: dict[str, Numbers]) -> None:
    numbers = found["random_numbers"]
    assert numbers["a_rank_has_its_own"]
    assert numbers["restored_after_a_comparison"]
    assert numbers["restored_after_a_rank's"]


def test_the_peak_is_measured_anew(found: dict[str, Numbers]) -> None:
    memory = found["peak_memory"]
    assert memory["before"] >= 4 << 20
    assert memory["after"] == memory["now"]


def test_the_thread_that_writes_checkpoints_has_the_device_of_its_rank(found: dict[str, Numbers]) -> None:
    assert found["writing_thread"]["device"] == 1
